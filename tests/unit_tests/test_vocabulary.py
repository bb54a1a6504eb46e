"""Fingerprints: equal for equal vocabularies, whoever reads them, and for no others."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from specguard_chains.decoding.vocabulary import Vocabulary

TOKENS = [b"<s>", b"</s>", b" the", b"", b"\xf0", b"the"]


def fingerprint(tokens: Iterable[bytes]) -> str:
    return Vocabulary.of(tokens).fingerprint


def test_the_same_tokens_have_the_same_fingerprint() -> None:
    assert fingerprint(TOKENS) == fingerprint(iter([*TOKENS]))


def test_ids_that_only_fill_the_matrix_up_do_not_count() -> None:
    padded = [*TOKENS, b"", b"[PAD7]", b"[PAD8]"]
    assert fingerprint(padded) == fingerprint(TOKENS) == fingerprint([*TOKENS, b"", b""])
    assert Vocabulary.of(padded).n_tokens == len(TOKENS)


def test_an_unused_id_is_one_however_it_is_spelled() -> None:
    assert fingerprint([b"a", b"[PAD1]", b"b"]) == fingerprint([b"a", b"", b"b"])
    assert fingerprint([b"a", b"[PAD2]", b"b"]) != fingerprint([b"a", b"", b"b"])


@pytest.mark.parametrize(
    "other",
    [
        TOKENS[:-1],
        [*TOKENS, b"more"],
        TOKENS[::-1],
        [b"", *TOKENS],
        [b"<s>", b"<|end|>", *TOKENS[2:]],
        [b"<s></s>", *TOKENS[2:]],
        [t.strip() for t in TOKENS],
        [],
    ],
)
def test_other_tokens_have_another(other: list[bytes]) -> None:
    assert fingerprint(other) != fingerprint(TOKENS)
