"""How time and memory grow: with the context, the candidates, the length of steps, and the turns.

    python benchmarks/scaling.py turns       # ten turns of a chat: seconds to each first step
    python benchmarks/scaling.py context     # seconds a token and memory behind longer prompts
    python benchmarks/scaling.py candidates  # seconds a step of 1, 2, 4 and 8 candidates
    python benchmarks/scaling.py steps       # seconds a token where steps are longer
    python benchmarks/scaling.py restart     # seconds to the first step of a new process
    python benchmarks/scaling.py soak --minutes 30 --requests 4  # memory under lasting load

Figures are medians over the rounds, in which the cases take turns. Steps are judged by the draft's
signals, attention included. With `--threshold 0` every one is accepted and only the draft computes,
with `--threshold 1` (mostly) every one is rejected.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    BaseMessageChunk,
    HumanMessage,
    SystemMessage,
)
from shared import DRAFTS_SIGNALS

from specguard_chains import ChatSpecGuard
from specguard_chains.assembly import unload
from specguard_chains.options import PAPERS_THRESHOLD

MESSAGE = (
    "A baker has {n} loaves of bread. She sells {m} of them in the morning and half of the rest in "
    "the afternoon. How many loaves are left in the evening? Explain it step by step."
)
FILLER = "The {n}th line of this text is here only to fill the context of the model.\n"


def resident_mb() -> float:
    """Return the process's resident memory in 10^6 bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def first_step(llm: ChatSpecGuard, messages: Sequence[BaseMessage]) -> tuple[float, AIMessage]:
    """Return the seconds to an answer's first step, and the answer."""
    start, first = time.perf_counter(), 0.0
    answer: BaseMessageChunk | None = None
    for chunk in llm.stream(list(messages)):
        first = first or time.perf_counter() - start
        answer = chunk if answer is None else answer + chunk
    assert answer is not None
    return first, AIMessage(answer.content, additional_kwargs=answer.additional_kwargs)


def turns(arguments: argparse.Namespace) -> None:
    """Each turn brings a message of the same length; what was said before is cached.

    What the first step has computed is shown beside its time: tokens that were read, by both
    models together, and tokens that were written. The chats have nothing in common.
    """
    llm = chat(arguments)
    rounds: list[list[float]] = []
    counts: list[tuple[int, int]] = []
    for round_ in range(arguments.rounds + 1):
        messages: list[BaseMessage] = [SystemMessage(f"You are helper number {7919 * round_}.")]
        seconds, counts = [], []
        for turn in range(10):
            content = MESSAGE.format(n=100 + 10 * round_ + turn, m=20 + turn)
            messages.append(HumanMessage(content))
            spent, answer = first_step(llm, messages)
            messages.append(answer)
            seconds.append(spent)
            tokens = answer.additional_kwargs["specguard_steps"][0]["tokens"]
            counts.append(
                (
                    tokens["draft_read"] + tokens["target_read"],
                    tokens["drafted"] + tokens["regenerated"],
                )
            )
        rounds.append(seconds)
    medians = [statistics.median(column) for column in zip(*rounds[1:], strict=True)]
    for turn, (spent, (read, written)) in enumerate(zip(medians, counts, strict=True), 1):
        print(
            f"turn {turn:2}: first step after {spent:.2f} s, to turn 1: {spent / medians[0]:.2f}; "
            f"{read} tokens read, {written} written"
        )


def context(arguments: argparse.Namespace) -> None:
    """Prompts of growing length, each read once before; only the answer is timed."""
    llm = chat(arguments, n_ctx=4096)
    cases: dict[str, Callable[[], float]] = {}
    for lines in (8, 32, 96, 160):
        text = "".join(FILLER.format(n=n) for n in range(lines)) + MESSAGE.format(n=100, m=20)
        cases[f"{lines} lines"] = lambda text=text: per_token(llm, text, warm=True)
    for name, values in measured(cases, arguments.rounds):
        print(
            f"{name:10} {1e3 * statistics.median(values):6.1f} ms a token, {resident_mb():.0f} MB"
        )


def candidates(arguments: argparse.Namespace) -> None:
    """Steps of several candidates, drawn side by side."""
    # Each k is a model of its own, but they share the engines.
    ks = (1, 2, 4, 8)
    llms = {
        k: chat(
            arguments,
            decoder="specguard",
            temperature=0.7,
            seed=1,
            num_candidates=k,
            num_target_candidates=k,
            doubt_margin=1,
        )
        for k in ks
    }
    cases = {
        f"k = {k}": lambda llm=llm: per_token(llm, MESSAGE.format(n=90, m=30))
        for k, llm in llms.items()
    }
    base = 0.0
    for name, values in measured(cases, arguments.rounds):
        median = statistics.median(values)
        base = base or median
        print(
            f"{name:10} {1e3 * median:6.1f} ms a token of the answer, {median / base:.2f} of k = 1"
        )


def steps(arguments: argparse.Namespace) -> None:
    """The same answer in shorter and longer steps."""
    cases = {}
    for most in (16, 32, 64, 256):
        llm = chat(arguments, max_step_tokens=most)
        cases[f"{most} tokens"] = lambda llm=llm: per_token(llm, MESSAGE.format(n=80, m=10))
    for name, values in measured(cases, arguments.rounds):
        print(f"{name:10} {1e3 * statistics.median(values):6.1f} ms a token")


def restart(arguments: argparse.Namespace) -> None:
    """Long system messages after a restart, with a folder of computed prompts and without.

    The first round fills the folder. Loading the models is not counted: a short question does it.
    """
    with tempfile.TemporaryDirectory() as folder:
        cases = {
            f"{lines} lines, {name}": lambda lines=lines, where=where: after_restart(
                arguments, lines, where
            )
            for lines in (16, 55, 110, 165)
            for name, where in (("computed", None), ("stored", folder))
        }
        computed = 0.0
        for name, values in measured(cases, arguments.rounds):
            median = statistics.median(values)
            computed = median if name.endswith("computed") else computed
            ratio = median / computed
            print(f"{name:20} first step after {median:6.2f} s, to computed: {ratio:.2f}")
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        print(f"the folder: {size / 1e6:.0f} MB")


def after_restart(arguments: argparse.Namespace, lines: int, folder: str | None) -> float:
    """Return the seconds to the first step of models that have just been loaded."""
    unload()
    llm = chat(arguments, n_ctx=4096, prompt_cache=folder)
    llm.bind(max_tokens=1).invoke("Hello")
    system = "".join(FILLER.format(n=n) for n in range(lines))
    return first_step(llm, [SystemMessage(system), HumanMessage(MESSAGE.format(n=100, m=20))])[0]


def soak(arguments: argparse.Namespace) -> None:
    """Concurrent requests for minutes: memory must not grow once everything is warm."""
    llm = chat(arguments, max_parallel=arguments.requests)
    end = time.monotonic() + 60 * arguments.minutes
    done = [0] * arguments.requests

    def work(number: int) -> None:
        while time.monotonic() < end:
            n = 50 + (13 * done[number] + number) % 400
            llm.invoke(MESSAGE.format(n=n, m=n // 3))
            done[number] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(arguments.requests)]
    for thread in threads:
        thread.start()
    seen: list[float] = []
    while any(thread.is_alive() for thread in threads):
        time.sleep(10)
        seen.append(resident_mb())
        print(f"{10 * len(seen)} s: {seen[-1]:.0f} MB, {sum(done)} answers", flush=True)
    tenth = max(len(seen) // 10, 1)
    early, late = (
        statistics.median(seen[tenth : 2 * tenth] or seen),
        statistics.median(seen[-tenth:]),
    )
    print(
        f"{sum(done)} answers; second tenth {early:.0f} MB, last tenth {late:.0f} MB: "
        f"{late / early - 1:+.1%}"
    )


def chat(arguments: argparse.Namespace, **changed: Any) -> ChatSpecGuard:
    """Return the model that is measured."""
    settings: dict[str, Any] = {
        "pair": arguments.pair,
        "draft": arguments.draft,
        "target": arguments.target,
        "decoder": "specguard-greedy",
        **DRAFTS_SIGNALS,
        "threshold": arguments.threshold,
        "patience": 0,
        "max_tokens": arguments.max_tokens,
    }
    return ChatSpecGuard(**(settings | changed))


def per_token(llm: ChatSpecGuard, text: str, *, warm: bool = False) -> float:
    """Return the seconds a token of an answer, prompt included unless it is read before."""
    if warm:  # by both models, whoever writes the first token
        for decoder in ("draft", "target"):
            llm.bind(max_tokens=1, decoder=decoder).invoke(text)
    start = time.perf_counter()
    message = llm.invoke(text)
    seconds = time.perf_counter() - start
    return seconds / max(message.usage_metadata["output_tokens"], 1)


def measured(
    cases: dict[str, Callable[[], float]], rounds: int
) -> Iterator[tuple[str, list[float]]]:
    """Yield each case's figures after all rounds; the first one warms up and does not count."""
    figures: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(rounds + 1):
        for name, measure in cases.items():
            value = measure()
            if round_:
                figures[name].append(value)
    yield from figures.items()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cases = {f.__name__: f for f in (turns, context, candidates, steps, restart, soak)}
    parser.add_argument("what", choices=cases)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--threshold", type=float, default=PAPERS_THRESHOLD)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--pair", default="qwen2.5-coder-0.5b-1.5b")
    parser.add_argument("--draft")
    parser.add_argument("--target")
    arguments = parser.parse_args()
    with suppress(KeyboardInterrupt):
        cases[arguments.what](arguments)


if __name__ == "__main__":
    main()
