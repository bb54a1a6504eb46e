"""What the stack costs on top of llama.cpp, and how much memory a full context takes.

    python benchmarks/overhead.py [--tokens 200] [--rounds 5] [--threads 2]

Three ways of writing the same number of tokens with the draft model of the default pair, in turn
and in one process: a bare greedy loop over llama.cpp's low-level functions; `ChatSpecGuard` with
every step accepted (threshold 0, one candidate) on confidence alone; the same with attention read
for grounding. Rates are whole requests, prompt included. Wanted: at least 0.95 and 0.90 of the
bare loop's rate, and at most 3 % of the time outside of llama.cpp's `llama_decode` (which calls
back into Python where attention is read).

Memory is measured in a process of its own: both models read a prompt that fills most of a context
of 4,096 tokens, and an answer is verified on top. Wanted: models + KV caches + 300 MB at most.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import llama_cpp as llama
import numpy as np

from specguard_chains import ChatSpecGuard
from specguard_chains.decoding import compute_thread
from specguard_chains.decoding.engine import Prompt
from specguard_chains.models import DEFAULT_PAIR, resolve_pair

QUESTION = (
    "A farmer has 17 sheep, 5 cows and 12 hens. Write down, one paragraph each, what he has to do "
    "on every day of the week for each kind of animal, and why. Variant {}."
)


class BareLoop:
    """llama.cpp's own functions and argmax; nothing else."""

    def __init__(self, path: Path, threads: int) -> None:
        parameters = llama.llama_model_default_params()
        self.model = llama.llama_model_load_from_file(str(path).encode(), parameters)
        settings = llama.llama_context_default_params()
        settings.n_ctx = 4096
        settings.n_threads = settings.n_threads_batch = threads
        self.context = llama.llama_init_from_model(self.model, settings)
        vocabulary = llama.llama_model_get_vocab(self.model)
        self.vocabulary = vocabulary
        self.size = llama.llama_vocab_n_tokens(vocabulary)

    def write(self, prompt: list[int], tokens: int) -> int:
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        pending = prompt
        for written in range(tokens):
            array = (llama.llama_token * len(pending))(*pending)
            batch = llama.llama_batch_get_one(array, len(pending))
            assert llama.llama_decode(self.context, batch) == 0
            logits = llama.llama_get_logits_ith(self.context, -1)
            row = np.ctypeslib.as_array(
                ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), shape=(self.size,)
            )
            token = int(row.argmax())
            if llama.llama_vocab_is_eog(self.vocabulary, token):
                return written + 1
            pending = [token]
        return tokens


class DecodeClock:
    """Counts the seconds within `llama_decode` while it is in its place."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._decode = llama.llama_decode

    def __enter__(self) -> DecodeClock:
        def timed(*arguments: object) -> int:
            start = time.perf_counter()
            code: int = self._decode(*arguments)
            self.seconds += time.perf_counter() - start
            return code

        llama.llama_decode = timed
        return self

    def __exit__(self, *_: object) -> None:
        llama.llama_decode = self._decode


def stack(weight: float, threads: int) -> ChatSpecGuard:
    return ChatSpecGuard(
        decoder="specguard-greedy",
        num_candidates=1,
        threshold=0,
        confidence_weight=weight,
        verify_with="draft",  # else the target would read what it is not needed for
        n_threads=threads,
    )


def speed(tokens: int, rounds: int, threads: int) -> None:
    models = {"confidence alone": stack(1.0, threads), "with attention": stack(0.3, threads)}
    drafts = [model._assembled.decoder(model).draft for model in models.values()]  # loads them
    bare = BareLoop(resolve_pair(DEFAULT_PAIR).draft, threads)
    rates: dict[str, list[float]] = {"bare loop": []} | {name: [] for name in models}
    outside: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):
        question = QUESTION.format(turn)
        prompt = drafts[0].encode(Prompt(messages=[{"role": "user", "content": question}]))
        results = {}
        start = time.perf_counter()
        written = compute_thread.run(partial(bare.write, prompt, tokens))
        results["bare loop"] = written / (time.perf_counter() - start)
        for name, model in models.items():
            for engine in model._assembled.decoder(model).engines:
                engine.clear()  # the bare loop reads the whole prompt, too
            start = time.perf_counter()
            with DecodeClock() as clock:
                *_, last = model.stream(question, max_tokens=tokens)
            spent = time.perf_counter() - start
            results[name] = last.usage_metadata["output_tokens"] / spent
            if turn:
                outside[name].append(1 - clock.seconds / spent)
        if turn:  # the first round warms up
            for name, rate in results.items():
                rates[name].append(rate)
        print(turn, {name: round(rate, 2) for name, rate in results.items()}, flush=True)
    print(f"\ntokens per second, median of {rounds} rounds, {tokens} tokens, {threads} threads:")
    for name, values in rates.items():
        ratios = [a / b for a, b in zip(values, rates["bare loop"], strict=True)]
        print(
            f"  {name:17} {statistics.median(values):6.2f}   ratio to bare "
            f"{statistics.median(ratios):.3f}  ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    for name, shares in outside.items():
        print(f"  {name}: {statistics.median(shares):.1%} of the time outside of llama_decode")


def memory(threads: int) -> None:
    """Run in a fresh process; prints one JSON object."""
    model = stack(0.3, threads)
    filler = "The quick brown fox jumps over the lazy dog. " * 375
    before = time.perf_counter()
    *_, last = model.stream(filler + "\nHow often does the fox jump?", max_tokens=64, threshold=0.5)
    usage = last.usage_metadata
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pair = resolve_pair(DEFAULT_PAIR)
    print(
        json.dumps(
            {
                "prompt_tokens": usage["input_tokens"],
                "seconds": time.perf_counter() - before,
                "peak_bytes": peak,
                "model_bytes": pair.draft.stat().st_size + pair.target.stat().st_size,
            }
        )
    )


def report_memory(threads: int) -> None:
    command = [sys.executable, __file__, "--memory-only", "--threads", str(threads)]
    figures = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    # Keys and values, 2 bytes each: layers x KV heads x head size x cells (k = 1).
    cache = 2 * 2 * 4096 * (24 * 2 * 64 + 28 * 2 * 128)
    megabyte = 1e6
    peak, models = figures["peak_bytes"] / megabyte, figures["model_bytes"] / megabyte
    caches = cache / megabyte
    print(
        f"\npeak resident memory with {figures['prompt_tokens']} prompt tokens: {peak:.0f} MB = "
        f"models {models:.0f} + KV caches {caches:.0f} + {peak - models - caches:.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_only:
        memory(arguments.threads)
        return
    report_memory(arguments.threads)
    speed(arguments.tokens, arguments.rounds, arguments.threads)


if __name__ == "__main__":
    main()
