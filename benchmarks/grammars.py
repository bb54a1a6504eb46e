"""What holding a model to a JSON schema costs: llguidance, xgrammar and outlines-core.

Each library gets the vocabulary of the default pair and one schema, and follows the same answer
token by token. What is not installed is left out: pip install xgrammar outlines-core
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from specguard_chains.adapters import LlamaCppEngine
from specguard_chains.decoding.constraint import Constraint, TokenTrie
from specguard_chains.models import resolve

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "rare"]}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
ANSWER = (
    '{"name": "Ada Lovelace", "age": 36, "tags": ["old", "rare"], '
    '"address": {"street": "St James\'s Square 12", "city": "London"}}'
)

Walk = Callable[[list[int]], Iterator[float]]
"""Follows tokens and yields the seconds that each mask took."""


def llguidance(engine: LlamaCppEngine) -> tuple[float, Callable[[], Walk]]:
    start = perf_counter()
    trie = TokenTrie(engine)
    made = perf_counter() - start

    def compile_() -> Walk:
        matcher = trie.start(Constraint.json_schema(SCHEMA))
        logits = np.zeros(engine.n_tokens, dtype=np.float32)

        def walk(tokens: list[int]) -> Iterator[float]:
            for token in tokens:
                start = perf_counter()
                allowed = matcher.allowed(logits)
                yield perf_counter() - start
                assert np.isfinite(allowed[token])
                matcher.advance([token])

        return walk

    return made, compile_


def xgrammar(engine: LlamaCppEngine) -> tuple[float, Callable[[], Walk]]:
    import xgrammar as xgr

    start = perf_counter()
    vocabulary = [engine.token_bytes(token) for token in range(engine.n_tokens)]
    info = xgr.TokenizerInfo(vocabulary, stop_token_ids=[engine.end_token])
    made = perf_counter() - start

    def compile_() -> Walk:
        compiler = xgr.GrammarCompiler(info, cache_enabled=False)
        compiled = compiler.compile_json_schema(json.dumps(SCHEMA))
        matcher = xgr.GrammarMatcher(compiled)
        bitmask = xgr.allocate_token_bitmask(1, info.vocab_size)

        def walk(tokens: list[int]) -> Iterator[float]:
            for token in tokens:
                start = perf_counter()
                matcher.fill_next_token_bitmask(bitmask)
                yield perf_counter() - start
                assert matcher.accept_token(token)

        return walk

    return made, compile_


def outlines_core(engine: LlamaCppEngine) -> tuple[float, Callable[[], Walk]]:
    from outlines_core import Guide, Index, Vocabulary
    from outlines_core.json_schema import build_regex_from_schema

    start = perf_counter()
    ids: dict[bytes, list[int]] = {}
    for token in range(engine.n_tokens):
        if spelled := engine.token_bytes(token):
            ids.setdefault(spelled, []).append(token)
    vocabulary = Vocabulary(engine.end_token, ids)
    made = perf_counter() - start

    def compile_() -> Walk:
        guide = Guide(Index(build_regex_from_schema(json.dumps(SCHEMA)), vocabulary))

        def walk(tokens: list[int]) -> Iterator[float]:
            for token in tokens:
                start = perf_counter()
                allowed = guide.get_tokens()
                yield perf_counter() - start
                assert token in allowed
                guide.advance(token)

        return walk

    return made, compile_


def main(rounds: int) -> None:
    """Print the medians of some rounds; the libraries take turns."""
    engine = LlamaCppEngine(resolve("qwen2.5-coder-0.5b-instruct"), n_ctx=512)
    tokens = engine.encode_text(ANSWER)
    table = Table("library", "vocabulary, s", "schema, ms", "mask, µs (median)", "mask, ms (most)")
    made: dict[str, tuple[float, Callable[[], Walk]]] = {}
    for library in (llguidance, xgrammar, outlines_core):
        try:
            made[library.__name__] = library(engine)
        except ImportError as error:
            Console().print(f"{library.__name__} is not installed: {error}")
    compiled: dict[str, list[float]] = {name: [] for name in made}
    masks: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, (_, compile_) in made.items():
            start = perf_counter()
            walk = compile_()
            compiled[name].append(perf_counter() - start)
            masks[name] += walk(tokens)
    for name, (seconds, _) in made.items():
        table.add_row(
            name,
            f"{seconds:.2f}",
            f"{1e3 * statistics.median(compiled[name]):.1f}",
            f"{1e6 * statistics.median(masks[name]):.0f}",
            f"{1e3 * max(masks[name]):.2f}",
        )
    Console().print(f"{len(tokens)} tokens, {engine.n_tokens} in the vocabulary, {rounds} rounds")
    Console().print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    main(parser.parse_args().rounds)
