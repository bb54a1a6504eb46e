"""Ends of steps and answers in text that arrives in pieces, however it is cut into them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product
from typing import TypeVar

import numpy as np
import pytest

from specguard_chains.decoding.boundaries import (
    Boundary,
    StepShape,
    StepText,
    StopCutter,
    unfinished_character,
)
from specguard_chains.errors import ConfigurationError

Text = TypeVar("Text", str, bytes)


def splits(text: Text) -> Iterator[list[Text]]:
    """All ways to cut a text into pieces that are not empty."""
    for n in range(len(text)):
        for cuts in combinations(range(1, len(text)), n):
            yield [text[a:b] for a, b in zip((0, *cuts), (*cuts, None), strict=True)]


def write(tokens: Sequence[bytes], boundary: Boundary, dangling: bytes = b"") -> tuple:
    """Add tokens until the step ends; return its text, its ending, and how many it has."""
    text = StepText(boundary, dangling)
    for n, token in enumerate(tokens, 1):
        if ending := text.add(token):
            return text.text, ending, n
    return text.text, None, len(tokens)


def tokens_until(pieces: Sequence[bytes], end: int) -> int:
    """How many pieces it takes to hold `end` bytes."""
    return next(n for n in range(len(pieces) + 1) if len(b"".join(pieces[:n])) >= end)


# --- the delimiter


@pytest.mark.parametrize("delimiter", ["\n\n", ".", "\n\n---\n", "ab"])
def test_a_step_ends_with_the_token_that_completes_the_delimiter(delimiter: str) -> None:
    text = f"x{delimiter}yz"
    for pieces in splits(text.encode()):
        n = tokens_until(pieces, 1 + len(delimiter))
        expected = b"".join(pieces[:n]).decode(), "boundary", n
        assert write(pieces, Boundary(delimiter)) == expected


@pytest.mark.parametrize("lead", ["\n\n", "\n", " \n\n", "\n\n\n", "\t\n\n \n\n"])
def test_a_blank_lead_ends_no_step(lead: str) -> None:
    for pieces in splits(f"{lead}x\n\ny".encode()):
        n = tokens_until(pieces, len(lead) + 3)
        expected = b"".join(pieces[:n]).decode(), "boundary", n
        assert write(pieces, Boundary()) == expected


@pytest.mark.parametrize(("delimiter", "text"), [(".", ".a.b"), ("ab", "abxabc")])
def test_a_delimiter_after_a_blank_one_is_seen_in_the_same_token(delimiter: str, text: str) -> None:
    end = text.rindex(delimiter) + len(delimiter)
    for pieces in splits(text.encode()):
        n = tokens_until(pieces, end)
        assert write(pieces, Boundary(delimiter)) == (b"".join(pieces[:n]).decode(), "boundary", n)


def test_an_overlapping_delimiter_is_seen() -> None:
    for pieces in splits(b"aaab!"):  # "aab" begins in "aa" and again one later
        assert write(pieces, Boundary("aab"))[1:] == ("boundary", tokens_until(pieces, 4))


def test_text_without_a_delimiter_goes_on() -> None:
    for pieces in splits(b"a\nb\n c\n"):
        assert write(pieces, Boundary()) == ("a\nb\n c\n", None, len(pieces))


# --- the step limit


@pytest.mark.parametrize("limit", range(1, 7))
def test_a_step_ends_at_its_limit(limit: int) -> None:
    expected = "abcdefg"[:limit], "step_limit", limit
    assert write([b"a", b"b", b"c", b"d", b"e", b"f", b"g"], Boundary(max_tokens=limit)) == expected


def test_tokens_without_text_count_too() -> None:
    assert write([b"", b"", b"x"], Boundary(max_tokens=2)) == ("", "step_limit", 2)


def test_a_delimiter_or_stop_string_at_the_limit_is_named_first() -> None:
    assert write([b"x", b"\n\n"], Boundary(max_tokens=2))[1] == "boundary"
    assert write([b"x", b"END"], Boundary(max_tokens=2, stop=("END",)))[1] == "stop_string"


# --- stop strings


@pytest.mark.parametrize("stop", [("END",), ("END", "never"), ("q", "END"), ("\nEND",)])
def test_a_step_ends_with_the_token_that_completes_a_stop_string(stop: tuple[str, ...]) -> None:
    text = "ab\nENDcd"
    for pieces in splits(text.encode()):
        n = tokens_until(pieces, 6)
        expected = b"".join(pieces[:n]).decode(), "stop_string", n
        assert write(pieces, Boundary(stop=stop)) == expected


@pytest.mark.parametrize("begun", range(4))
def test_a_stop_string_may_begin_in_what_precedes(begun: int) -> None:
    boundary = Boundary(stop=("STOP",), preceding="xx" + "STOP"[:begun])
    for pieces in splits(b"STOP"[begun:] + b"rest"):
        assert write(pieces, boundary)[1:] == ("stop_string", tokens_until(pieces, 4 - begun))


def test_what_precedes_is_no_part_of_the_step() -> None:
    text = StepText(Boundary(stop=("STOP",), preceding="ST"))
    assert text.add(b"ill") is None
    assert text.text == "ill"


def test_what_precedes_completes_no_delimiter() -> None:
    assert write([b"\n", b"x"], Boundary(preceding="abc\n")) == ("\nx", None, 2)


def test_a_stop_string_within_what_precedes_alone_is_old_news() -> None:
    boundary = Boundary(stop=("ab",), preceding="ab")
    assert write([b"c", b"d"], boundary) == ("cd", None, 2)


def test_a_stop_string_of_other_characters() -> None:
    for pieces in splits("né→x".encode()):
        n = tokens_until(pieces, 6)  # 1 + 2 + 3 bytes
        assert write(pieces, Boundary(stop=("é→",)))[1:] == ("stop_string", n)


# --- characters of several bytes

LETTERS = "aé€😀b"


def test_characters_split_over_tokens_come_out_whole() -> None:
    for pieces in splits(LETTERS.encode()):
        text = StepText(Boundary())
        for piece in pieces:
            text.add(piece)
            assert LETTERS.startswith(text.text)
        assert text.text == LETTERS


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_characters_split_over_steps_come_out_whole(limit: int) -> None:
    for pieces in splits(LETTERS.encode()):
        steps = []
        for start in range(0, len(pieces), limit):
            before = unfinished_character(b"".join(pieces[:start]))
            text, _, _ = write(pieces[start : start + limit], Boundary(max_tokens=limit), before)
            steps.append(text)
        assert "".join(steps) == LETTERS


def test_a_delimiter_of_several_bytes() -> None:
    for pieces in splits("a→b".encode()):
        assert write(pieces, Boundary("→"))[1:] == ("boundary", tokens_until(pieces, 4))


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert write([b"a", b"\xff", b"b"], Boundary())[0] == "a\ufffdb"
    assert write([b"\xc3", b"x"], Boundary())[0] == "\ufffdx"
    assert write([b"x"], Boundary(), dangling=b"\xc3")[0] == "\ufffdx"


@pytest.mark.parametrize("character", LETTERS)
def test_an_unfinished_character_is_told_from_a_finished_one(character: str) -> None:
    data = character.encode()
    for n in range(len(data)):
        for lead in (b"", b"text", b"\xff", "é".encode(), "😀".encode()[1:]):
            assert unfinished_character(lead + data[:n]) == data[:n]
    assert unfinished_character(data) == b""


# --- validation


@pytest.mark.parametrize(
    ("wrong", "said"), [({"delimiter": ""}, "delimiter is empty"), ({"max_tokens": 0}, "not 0")]
)
def test_wrong_shapes_of_steps_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        StepShape(**wrong)


# --- cutting the answer


def cut(pieces: Sequence[str], stop: Sequence[str]) -> tuple[str, bool]:
    """The answer that comes out of a cutter which is not asked again once it has stopped."""
    cutter, answer = StopCutter(stop), ""
    for i, piece in enumerate(pieces):
        answer += cutter.add(piece, last=i == len(pieces) - 1)
        if cutter.stopped:
            break
    return answer, cutter.stopped


def expected_cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    found = [at for string in stop if (at := text.find(string)) >= 0]
    return text[: min(found, default=len(text))], bool(found)


@pytest.mark.parametrize(
    "text", ["abcabd", "aaaab", "xENDy", "EN EEND", "", "ENDEND", "a\n\nb\n\n"]
)
@pytest.mark.parametrize(
    "stop", [["abd"], ["aab"], ["END"], ["a"], ["\n\n"], ["b", "EE"], ["aaab", "EN E"], []]
)
def test_all_splits_give_the_same_as_find_on_the_whole_text(text: str, stop: list[str]) -> None:
    for pieces in splits(text):
        assert cut(pieces, stop) == expected_cut(text, stop)


@pytest.mark.parametrize("seed", range(5))
def test_random_texts_are_cut_as_find_would(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(400):
        text = "".join(rng.choice(list("ab"), size=rng.integers(1, 30)))
        stop = ["".join(rng.choice(list("ab"), size=rng.integers(1, 7)))]
        cuts = [0, *sorted(rng.integers(len(text) + 1, size=rng.integers(6))), len(text)]
        pieces = [text[a:b] for a, b in pairwise(cuts)]
        assert cut(pieces, stop) == expected_cut(text, stop)


def test_the_stop_string_that_is_complete_first_counts_whatever_the_split() -> None:
    for pieces in splits("xabcdy"):
        assert cut(pieces, ["abcd", "bc"]) == ("xa", True)  # a token stream would have ended here
        assert cut(pieces, ["abc", "bc", "c"]) == ("x", True)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    stop = ["abaab", "bbab"]
    for text in map("".join, product("ab", repeat=6)):
        cutter, released = StopCutter(stop), ""
        for n, character in enumerate(text, 1):
            released += cutter.add(character)
            if cutter.stopped:
                break
            assert released + cutter.held == text[:n]
            ends = (text[i:n] for i in range(n + 1))
            assert cutter.held == next(e for e in ends if any(s.startswith(e) for s in stop))


def test_the_last_piece_releases_what_was_held() -> None:
    cutter = StopCutter(["STOP"])
    assert cutter.add("so ST") == "so "
    assert cutter.held == "ST"
    assert cutter.add("O", last=True) == "STO"
    assert (cutter.held, cutter.stopped) == ("", False)


def test_a_stop_string_in_the_last_piece_is_cut_too() -> None:
    cutter = StopCutter(["STOP"])
    assert [cutter.add("so ST"), cutter.add("OP and on", last=True)] == ["so ", ""]
    assert (cutter.held, cutter.stopped) == ("", True)


def test_without_stop_strings_text_passes() -> None:
    cutter = StopCutter([])
    assert [cutter.add("a"), cutter.add(""), cutter.add("b", last=True)] == ["a", "", "b"]
    assert not cutter.stopped
