"""Several requests at a time against one after the other, on the same models and questions.

    python benchmarks/throughput.py [--pair NAME] [--draft M] [--target M] [--decoder specguard]
                                    [--requests 8] [--rounds 5] [--tokens 100] [--threads 2]

Steps are judged as in the paper unless told otherwise: by the draft's signals, attention included.
A batch of as many chat questions as `max_parallel` allows, answered by `ChatSpecGuard.batch` at
temperature 0: by engines that admit all of them, and by engines that admit one at a time. Rounds
take turns, each with questions of its own and cold caches, in one process; a round's ratio is the
tokens per second of the one over those of the other. Texts are compared by request: what is
computed together is rounded otherwise, and where two tokens are nearly tied that decides. The
questions share a system message, which engines that admit several read once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, get_args

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

from specguard_chains import ChatSpecGuard
from specguard_chains.decoding.specguard import VerifyWith
from specguard_chains.models import DEFAULT_PAIR
from specguard_chains.options import PAPERS_THRESHOLD

SYSTEM = (
    "You are a patient teacher. Explain your reasoning in short steps, each in a paragraph of its "
    "own, check every number before you go on, and give the answer in the last line."
)
QUESTIONS = (
    "A train goes {n} km in 45 minutes. How far does it go in 3 hours at the same speed?",
    "Tom has {n} boxes of 12 pencils and gives away a third of them. How many are left?",
    "A shirt costs ${n} and is reduced by 15 %. What does it cost now?",
    "Explain in three sentences why {n} is or is not a prime number.",
    "Sum the whole numbers from 1 to {n}. Show the steps.",
    "Ann reads {n} pages a day. How long does she need for two books of 310 pages each?",
    "A tank holds {n} litres and loses 5 litres an hour. When is it three quarters full?",
    "Weng earns ${n} an hour. Yesterday she worked for 50 minutes. How much did she earn?",
)


def questions(number: int, requests: int) -> list[Any]:
    """Return the conversations of a round."""
    return [
        [
            SystemMessage(SYSTEM),
            HumanMessage(QUESTIONS[i % len(QUESTIONS)].format(n=17 + 8 * number + i)),
        ]
        for i in range(requests)
    ]


def measure(model: ChatSpecGuard, batch: list[Any]) -> tuple[list[AIMessage], float]:
    """Return the answers to a batch, and the tokens per second."""
    for engine in model._assembled.decoder(model).engines:
        clear = getattr(engine, "clear", None)
        if clear is not None:
            clear()
    start = time.perf_counter()
    answers: list[Any] = model.batch(batch, {"max_concurrency": len(batch)})
    seconds = time.perf_counter() - start
    return answers, sum(answer.usage_metadata["output_tokens"] for answer in answers) / seconds


def shared(one: str, other: str) -> float:
    """Return the share of a text that another one begins with."""
    length = max(len(one), len(other), 1)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), length) / (
        length
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pair", default=DEFAULT_PAIR)
    parser.add_argument("--draft")
    parser.add_argument("--target")
    parser.add_argument("--decoder", default="specguard-greedy")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--n-ctx", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--confidence-weight", type=float, default=0.3, help="1 reads no attention")
    parser.add_argument("--verify-with", choices=get_args(VerifyWith), default="draft")
    parser.add_argument("--threshold", type=float, default=PAPERS_THRESHOLD)
    parser.add_argument("--patience", type=int, default=0)
    arguments = parser.parse_args()

    def model(max_parallel: int) -> ChatSpecGuard:
        return ChatSpecGuard(
            pair=arguments.pair,
            draft=arguments.draft,
            target=arguments.target,
            decoder=arguments.decoder,
            confidence_weight=arguments.confidence_weight,
            verify_with=arguments.verify_with,
            threshold=arguments.threshold,
            patience=arguments.patience,
            num_candidates=1,
            temperature=0,
            max_tokens=arguments.tokens,
            n_ctx=arguments.n_ctx,
            n_threads=arguments.threads,
            max_parallel=max_parallel,
        )

    models = {"together": model(arguments.requests), "one by one": model(1)}
    rates: dict[str, list[float]] = {name: [] for name in models}
    equal: list[float] = []
    for number in range(arguments.rounds + 1):
        batch = questions(number, arguments.requests)
        order = list(models) if number % 2 else list(models)[::-1]
        results = {name: measure(models[name], batch) for name in order}
        print(number, {name: round(rate, 1) for name, (_, rate) in results.items()}, flush=True)
        if number:  # the first round warms up
            for name, (_, rate) in results.items():
                rates[name].append(rate)
            pairs = zip(results["together"][0], results["one by one"][0], strict=True)
            equal += [shared(str(one.text), str(other.text)) for one, other in pairs]
    ratios = [a / b for a, b in zip(rates["together"], rates["one by one"], strict=True)]
    print(
        f"\n{arguments.requests} requests, {arguments.decoder}, {arguments.threads} threads, "
        f"{arguments.rounds} rounds, tokens per second:"
    )
    for name, values in rates.items():
        spread = f"({min(values):.1f} to {max(values):.1f})"
        print(f"  {name:10} {statistics.median(values):6.1f}  {spread}")
    print(
        f"  ratio      {statistics.median(ratios):6.2f}  ({min(ratios):.2f} to {max(ratios):.2f})\n"
        f"  equal texts {sum(share == 1 for share in equal)} of {len(equal)}; the others share "
        f"their first {statistics.mean([s for s in equal if s < 1] or [1]):.0%} on average"
    )


if __name__ == "__main__":
    main()
