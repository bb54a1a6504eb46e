"""Speculative decoding with a draft and with prompt lookup, and llama-cpp-python's prompt lookup.

    python benchmarks/lookup.py --data gsm8k.jsonl [--limit 10] [--max-tokens 150] [--tokens 16]

Five ways of writing the same answers at temperature 0 from the same GGUF file, in turns and in one
process: the target alone, speculative decoding with the draft, with what the prompt and the answer
repeat, and llama-cpp-python's `Llama` without and with its `LlamaPromptLookupDecoding`, both as it
comes. The tasks are the problems of a file, where little is repeated, and copying: a text is to be
repeated with one change, or quoted. The prompt has been read when the time starts. As a pass over
several tokens rounds otherwise than several passes, texts can part at near-ties.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from shared import ratio, text_of

from specguard_chains import background
from specguard_chains.adapters import LlamaCppEngine
from specguard_chains.assembly import assemble
from specguard_chains.calibrations.fitting import reasoning_prompt
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.evaluation.problems import load_problems
from specguard_chains.models import resolve_pair
from specguard_chains.options import SpecGuardOptions

Way = Callable[[Prompt, int], tuple[str, int]]
"""(prompt, most tokens) -> the answer and its tokens."""

ALONE, LLAMA, LOOKUP = "target alone", "llama-cpp-python", "llama-cpp-python, lookup"
WAYS = (ALONE, "with the draft", "with the prompt", LLAMA, LOOKUP)

NAMES = ("Ada", "Boris", "Chloe", "Deniz", "Emil", "Farah", "Goro", "Hanna")
TOWNS = ("Lisbon", "Oslo", "Porto", "Riga", "Split", "Turin", "Utrecht", "Vienna")
WARES = ("lamps", "chairs", "maps", "kettles", "bicycles", "violins", "clocks", "carpets")


def copying(n: int) -> Iterator[Prompt]:
    """Yield n tasks whose answers repeat much of the prompt."""
    rng = np.random.default_rng(0)
    for number in range(n):
        names, towns, wares = (rng.permutation(words)[:4] for words in (NAMES, TOWNS, WARES))
        sold = rng.integers(20, 900, size=4)
        lines = [
            f"{name} from {town} sold {count} {ware} in the first half of the year."
            for name, town, count, ware in zip(names, towns, sold, wares, strict=True)
        ]
        report = "\n".join(lines)
        code = "\n".join(
            f"def total_{ware}(values):\n    total = {count}\n    for value in values:\n"
            f"        total += value\n    return total\n"
            for count, ware in zip(sold, wares, strict=True)
        )
        asked = (
            f"Repeat this report word for word, but let {names[2]} come from Madrid:\n\n{report}",
            f"Rename the parameter `values` to `amounts` everywhere, and give the whole code:\n\n"
            f"```python\n{code}```",
            f"{report}\n\nQuote the two sentences about {names[0]} and {names[3]} word for word, "
            "then say in one sentence who of the two sold more.",
        )
        yield Prompt(messages=[{"role": "user", "content": asked[number % len(asked)]}])


def decoding(decoder: Decoder) -> Way:
    """Return a decoder of this project as a way to write."""

    def write(prompt: Prompt, max_tokens: int) -> tuple[str, int]:
        request = Request(prompt, Sampling(temperature=0), max_tokens=max_tokens)
        steps = list(background.run(decoder, request))
        return text_of(steps), sum(step.answer_tokens for step in steps)

    return write


def generating(llama: Llama, lookup: LlamaPromptLookupDecoding | None, target: Any) -> Way:
    """Return llama-cpp-python as a way to write, from the tokens of the engine's prompt."""

    def write(prompt: Prompt, max_tokens: int) -> tuple[str, int]:
        llama.draft_model = lookup
        tokens: list[int] = []
        for token in islice(llama.generate(target.encode(prompt), temp=0.0), max_tokens):
            tokens.append(token)
            if target.is_end(token):
                break
        return b"".join(map(target.token_bytes, tokens)).decode(errors="replace"), len(tokens)

    return write


def ways(arguments: argparse.Namespace) -> dict[str, Way]:
    """Return all ways to write, by name; models are loaded."""
    pair = resolve_pair(SpecGuardOptions().pair)
    path = Path(arguments.target or pair.target)
    threads = arguments.threads or len(os.sched_getaffinity(0))
    common: dict[str, Any] = {
        "draft": arguments.draft or pair.draft,
        "target": path,
        "n_ctx": arguments.n_ctx,
        "n_threads": threads,
        "temperature": 0,
        "confidence_weight": 1,
    }
    alone, with_draft, with_prompt = (
        assemble(SpecGuardOptions(**common, **more))
        for more in (
            {"decoder": "target"},
            {"decoder": "speculative"},
            {
                "decoder": "speculative",
                "speculate_with": "prompt",
                "num_speculative_tokens": arguments.tokens,
            },
        )
    )
    target = cast("LlamaCppEngine", alone.engines[-1])
    lookup = LlamaPromptLookupDecoding()
    llama = Llama(
        str(path),
        draft_model=lookup,  # given here it has logits of all tokens, which it needs
        n_ctx=arguments.n_ctx,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=True,  # as the engine has it
        use_mmap=False,
        verbose=False,
    )
    return dict(
        zip(
            WAYS,
            [
                *map(decoding, (alone, with_draft, with_prompt)),
                generating(llama, None, target),
                generating(llama, lookup, target),
            ],
            strict=True,
        )
    )


def compare(task: str, prompts: Sequence[Prompt], ways: dict[str, Way], max_tokens: int) -> None:
    """Write every prompt in every way, in turns, and print the times."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    equal = dict.fromkeys(ways, 0)
    names = list(ways)
    for turn, prompt in enumerate(prompts):
        texts = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            ways[name](prompt, 1)  # reads the prompt
            start = time.perf_counter()
            texts[name], tokens = ways[name](prompt, max_tokens)
            spent[name].append(1000 * (time.perf_counter() - start) / tokens)
        for name in names:
            equal[name] += texts[name] == texts[ALONE]
        told = ", ".join(f"{name} {spent[name][-1]:.1f}" for name in names)
        print(f"  {task} {turn}: ms a token: {told}", flush=True)
    print(f"\n{task}: {len(prompts)} prompts, up to {max_tokens} tokens")
    print(f"{'':26} ms a token  texts equal  time to the target's    to llama-cpp-python's alone")
    for name in names:
        ratios = [ratio(spent[name], spent[ALONE])]
        if name in (LLAMA, LOOKUP):
            ratios.append(ratio(spent[name], spent[LLAMA]))
        print(
            f"{name:26} {np.mean(spent[name]):10.1f}  {equal[name]:4} of {len(prompts):2}   "
            + "   ".join(ratios)
        )
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="problems; without them only copying is measured")
    parser.add_argument("--limit", type=int, default=10, help="prompts of each task")
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=16, help="most copied at a time")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--n-ctx", type=int, default=1024)
    parser.add_argument("--draft")
    parser.add_argument("--target")
    arguments = parser.parse_args()
    loaded = ways(arguments)
    if arguments.data:
        problems = load_problems(arguments.data, limit=arguments.limit, skip=arguments.skip)
        prompts = [reasoning_prompt(problem.question) for problem in problems]
        compare("reasoning", prompts, loaded, arguments.max_tokens)
    compare("copying", list(copying(arguments.limit)), loaded, arguments.max_tokens)


if __name__ == "__main__":
    main()
