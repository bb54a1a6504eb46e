"""The same decode on every engine: tokens per second and memory; and what attention costs.

    python benchmarks/engines.py [--tokens 64] [--rounds 5] [--server openai://127.0.0.1:8000/model]

1. The small model of the default pair writes the same number of tokens greedily on llama.cpp (from
   the GGUF file, quantised) and on transformers (the same file in float32), each with and without
   attention read, and on a server if one is named. Each engine runs in a process of its own, which
   tells its peak memory.
2. Attention on transformers at about 1,000 tokens of context: one decoding step with plain SDPA
   and one whose attention is read, in turn on one engine. Wanted: at most 10 % more.
3. Memory for attention at contexts of growing length: the largest array of probabilities that a
   step of 32 tokens and the reading of the whole context have needed.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from specguard_chains import adapters
from specguard_chains.decoding import compute_thread
from specguard_chains.decoding.boundaries import Boundary
from specguard_chains.decoding.engine import Engine, Prompt, Session
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.models import DEFAULT_PAIR, find_pair, resolve

QUESTION = "Write down, one paragraph each, what a farmer with sheep and cows does on every day."
GREEDY = Sampling(temperature=0)
NEVER = "\0"


def load(name: str, *, attention: bool, n_ctx: int) -> Engine:
    path = resolve(find_pair(DEFAULT_PAIR).draft)
    settings: dict[str, Any] = {"n_ctx": n_ctx, "attention": attention}
    if name == "llama.cpp":
        return adapters.LlamaCppEngine(path, **settings)
    if name == "transformers":
        return adapters.HuggingFaceEngine(path, dtype="float32", **settings)
    return adapters.OpenAIEngine.from_url(name)


def write(session: Session, tokens: int) -> int:
    (step,) = session.sample(1, Boundary(NEVER, tokens), GREEDY, seed=(0,))
    return len(step.tokens)


def on_compute_thread(engine: Engine, work: Callable[[], Any]) -> Any:
    with engine.exclusive():
        return compute_thread.run(work) if engine.capabilities.in_process else work()


def measure(name: str, *, attention: bool, tokens: int, rounds: int) -> dict[str, float]:
    """Run in a fresh process."""
    engine = load(name, attention=attention, n_ctx=1024)
    spec = GroundingSpec() if attention else None
    prompt = Prompt(messages=[{"role": "user", "content": QUESTION}])

    def once() -> float:
        with closing(engine.open(prompt, grounding=spec)) as session:
            write(session, 1)  # reads the prompt
            start = time.perf_counter()
            return write(session, tokens) / (time.perf_counter() - start)

    rates = [on_compute_thread(engine, once) for _ in range(rounds + 1)][1:]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"rate": statistics.median(rates), "low": min(rates), "high": max(rates), "peak": peak}


def attention_cost(rounds: int, context: int) -> None:
    """One step of decoding, read and not read, in turn on one engine."""
    engine = load("transformers", attention=True, n_ctx=context + 128)
    prompt = filler(engine, context)

    def compare() -> dict[str, list[float]]:
        sessions = {
            "plain sdpa": engine.open(prompt),
            "attention read": engine.open(prompt, grounding=GroundingSpec()),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sessions}
        for turn in range(rounds + 2):
            for name, session in sessions.items():
                start = time.perf_counter()
                write(session, 8)
                if turn > 1:
                    seconds[name].append((time.perf_counter() - start) / 8)
        for session in sessions.values():
            session.close()
        return seconds

    seconds = on_compute_thread(engine, compare)
    ratios = [a / b for a, b in zip(*reversed(seconds.values()), strict=True)]
    for name, values in seconds.items():
        print(f"  {name:15} {1000 * statistics.median(values):7.1f} ms a token")
    print(
        f"  ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) over "
        f"{rounds} rounds at {len(engine.encode(prompt))} tokens of context"
    )


def attention_memory(contexts: list[int]) -> None:
    from specguard_adapters.huggingface import attention as hf_attention

    largest = 0
    compute = hf_attention.probabilities

    def noting(*arguments: Any, **more: Any) -> Any:
        nonlocal largest
        for block in compute(*arguments, **more):
            largest = max(largest, block.numel() * block.element_size())
            yield block

    hf_attention.probabilities = noting
    engine = load("transformers", attention=True, n_ctx=max(contexts) + 128)
    for context in contexts:
        figures = {}
        prompt = filler(engine, context)

        def read(prompt: Prompt = prompt, figures: dict[str, int] = figures) -> None:
            nonlocal largest
            with closing(engine.open(prompt, grounding=GroundingSpec())) as session:
                largest = 0
                write(session, 1)
                figures["context"], largest = largest, 0
                (step,) = session.sample(1, Boundary(NEVER, 32), GREEDY, seed=(0,))
                largest = 0
                session.read(step)
                figures["step"] = largest

        on_compute_thread(engine, read)
        print(
            f"  {len(engine.encode(prompt)):5} tokens: {figures['step'] / 1e6:6.2f} MB for a step "
            "of 32 tokens, "
            f"{figures['context'] / 1e6:6.2f} MB while the context is read"
        )


def filler(engine: Engine, tokens: int) -> Prompt:
    """Return a prompt of at most so many tokens, and not many less."""
    sentence = "The quick brown fox jumps over the lazy dog. "
    each = len(engine.encode(Prompt(text=sentence)))
    return Prompt(text=sentence * (tokens // each))


def report(name: str, *, attention: bool, tokens: int, rounds: int) -> None:
    command = [sys.executable, __file__, "--tokens", str(tokens), "--rounds", str(rounds)]
    command += ["--only", name, *(["--attention"] if attention else [])]
    figures = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    where = "" if name.startswith("openai") else f", peak memory {figures['peak'] / 1e9:.2f} GB"
    print(
        f"  {name + (', attention read' if attention else ''):29} {figures['rate']:6.2f} tokens/s "
        f"({figures['low']:.2f} to {figures['high']:.2f}){where}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server", help="openai://host:port/model")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[512, 2048, 8192], help="tokens, at most"
    )
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--attention", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    settings = {"tokens": arguments.tokens, "rounds": arguments.rounds}
    if arguments.only:
        print(json.dumps(measure(arguments.only, attention=arguments.attention, **settings)))
        return
    print(f"{arguments.tokens} tokens, greedily, median of {arguments.rounds} rounds:")
    for name in ("llama.cpp", "transformers"):
        for attention in (False, True):
            report(name, attention=attention, **settings)
    if arguments.server:
        report(arguments.server, attention=False, **settings)
    print("\nattention on transformers:")
    attention_cost(arguments.rounds, context=1024)
    print("\nlargest array of attention probabilities on transformers:")
    attention_memory(arguments.contexts)


if __name__ == "__main__":
    main()
