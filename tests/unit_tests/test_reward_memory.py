"""What a reward model remembers of texts: which one a text goes on from, and which are forgotten.

What is computed of a text is here the text itself, in a list that a pass over more of it extends.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specguard_adapters.reward.memory import Memory


def beginning(computed: list[int], length: int, wanted: int) -> list[int]:
    assert len(computed) == length
    return computed[:wanted]


def read(memory: Memory[list[int]], text: str) -> int:
    """Read a text; return how much of it was not computed again."""
    tokens = list(text.encode())
    kept, computed = memory.take(tokens)
    computed = [] if computed is None else computed
    assert computed == tokens[:kept]
    assert kept < len(tokens)
    computed.extend(tokens[kept:])
    memory.put(tokens, computed)
    return kept


def fresh(most: int = 3) -> Memory[list[int]]:
    return Memory(beginning, most)


def test_a_text_goes_on_where_it_has_stopped() -> None:
    memory = fresh()
    assert [read(memory, text) for text in ("ab", "abcd", "abcde")] == [0, 2, 4]
    assert len(memory) == 1


def test_the_same_again_and_its_beginning_add_nothing() -> None:
    memory = fresh()
    assert [read(memory, text) for text in ("abcd", "abcd", "ab", "abcde")] == [0, 3, 1, 4]
    assert len(memory) == 1


@pytest.mark.parametrize("answers", [1, 2, 3])
def test_answers_in_turns_go_on_from_their_own_beginnings(answers: int) -> None:
    """Their second words are rejected and written anew."""
    memory = fresh()
    written = [f"question {n}" for n in range(answers)]
    for n, text in enumerate(written):
        assert read(memory, text) == (len("question ") if n else 0)
    for word, final in (("xx", False), ("yy", True), ("zz", True)):
        for n, text in enumerate(written):
            assert read(memory, text + word) == len(text)
            written[n] = text + word if final else text
    assert len(memory) <= 3


def test_more_answers_than_places_share_the_question() -> None:
    memory = fresh(most=2)
    texts = [f"question {n}" for n in range(3)]
    for text in texts:
        read(memory, text)
    assert [read(memory, f"{text}!") for text in texts] == [len("question ")] * 3


def test_the_text_that_was_not_used_for_longest_is_forgotten() -> None:
    memory = fresh(most=2)
    for text in ("aa", "bb", "aa", "cc"):
        read(memory, text)
    assert [memory.take(list(text))[0] for text in (b"aaa", b"bbb", b"ccc")] == [2, 0, 2]


def test_a_pass_that_fails_leaves_the_other_texts() -> None:
    memory = fresh()
    read(memory, "abc")
    read(memory, "abd")
    memory.take(list(b"abcd"))  # and no `put`
    assert read(memory, "abde") == 3
    assert read(memory, "abcd") == 2


def test_all_can_be_forgotten() -> None:
    memory = fresh()
    read(memory, "abc")
    memory.clear()
    assert not len(memory)
    assert read(memory, "abc") == 0


@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=30), st.integers(1, 4))
def test_whatever_is_read_is_remembered_once_and_whole(texts: list[str], most: int) -> None:
    memory = fresh(most)
    for text in texts:
        read(memory, text)
        held = [entry.tokens for entry in memory._texts]
        assert len(held) <= most
        assert not any(
            one is not other and other[: len(one)] == one for one in held for other in held
        )
        assert any(one[: len(text)] == list(text.encode()) for one in held)
        assert all(entry.tokens == entry.computed for entry in memory._texts)
