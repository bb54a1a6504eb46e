"""SpecGuard Greedy against both models alone: accuracy, time and acceptance in one run.

    python benchmarks/gsm8k.py --data gsm8k.jsonl --limit 40 --thresholds 0.7 0.5 --out run.jsonl

The data are JSON lines with "question" and "answer" (the final number). The decoders take turns on
every problem, each from a cold prompt cache, so that drift of the machine hits all alike. Answers
are checked with math-verify. Results are appended as they come; a run that is started again goes
on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from math_verify import parse, verify

from specguard_chains import background
from specguard_chains.assembly import assemble
from specguard_chains.calibrations.fitting import reasoning_prompt
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.evaluation.statistics import wilson_interval
from specguard_chains.metrics import Metrics
from specguard_chains.options import SpecGuardOptions


def answer_is_right(text: str, answer: str) -> bool:
    """Whether the text's final answer equals the given number."""
    return bool(verify(parse(answer), parse(text)))


def run(decoder: Decoder, question: str, max_tokens: int) -> dict[str, Any]:
    for engine in decoder.engines:
        engine.clear()
    request = Request(reasoning_prompt(question), Sampling(temperature=0), max_tokens=max_tokens)
    start = time.perf_counter()
    steps = list(background.run(decoder, request))
    seconds = time.perf_counter() - start
    return {
        "text": "".join(step.text for step in steps),
        "seconds": seconds,
        "tokens": sum(step.answer_tokens for step in steps),
        "finish_reason": steps[-1].finish_reason,
        "metrics": Metrics.of(steps).to_dict(),
        "steps": [
            {
                "source": s.source,
                "score": s.score,
                "confidence": s.confidence,
                "grounding": s.grounding,
                "tokens": s.answer_tokens,
            }
            for s in steps
        ],
    }


def report(results: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(r["decoder"] for r in results))
    rows = {name: [r for r in results if r["decoder"] == name] for name in names}
    target_seconds = sum(r["seconds"] for r in rows["target"])
    print("| decoder | right | 95 % interval | s a problem | time to target's | steps kept |")
    print("|---|---|---|---|---|---|")
    for name in names:
        correct, n = sum(r["right"] for r in rows[name]), len(rows[name])
        low, high = wilson_interval(correct, n)
        drafts = sum(r["metrics"]["num_drafts"] for r in rows[name])
        accepted = sum(r["metrics"]["num_accepted_steps"] for r in rows[name])
        seconds = [r["seconds"] for r in rows[name]]
        kept = f"{accepted / drafts:.0%}" if drafts else "–"
        print(
            f"| {name} | {correct}/{n} = {correct / n:.1%} | {low:.0%} to {high:.0%} | "
            f"{statistics.mean(seconds):.1f} | {sum(seconds) / target_seconds:.2f} | {kept} |"
        )
    print("\nseconds of the draft and of the target, tokens an answer:")
    for name in names:
        metrics = [r["metrics"] for r in rows[name]]
        split = [sum(m[f"{model}_seconds"] for m in metrics) for model in ("draft", "target")]
        tokens = statistics.mean(r["tokens"] for r in rows[name])
        print(f"  {name}: {split[0]:.0f} + {split[1]:.0f} s, {tokens:.0f} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=600)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--thresholds", type=float, nargs="+", default=[SpecGuardOptions().threshold]
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    threads = arguments.threads
    decoders = {
        name: assemble(SpecGuardOptions(decoder=name, num_candidates=1, n_threads=threads))
        for name in ("target", "draft")
    }
    for threshold in arguments.thresholds:
        decoders[f"specguard-greedy, threshold {threshold}"] = assemble(
            SpecGuardOptions(
                decoder="specguard-greedy",
                threshold=threshold,
                num_candidates=1,
                n_threads=threads,
            )
        )
    problems = [json.loads(line) for line in arguments.data.open(encoding="utf-8")]
    results: list[dict[str, Any]] = []
    if arguments.out.exists():
        results = [json.loads(line) for line in arguments.out.open(encoding="utf-8")]
    done = {(r["id"], r["decoder"]) for r in results}
    for problem in problems[: arguments.limit]:
        for name, decoder in decoders.items():
            if (problem["id"], name) in done:
                continue
            result = run(decoder, problem["question"], arguments.max_tokens)
            right = answer_is_right(result["text"], problem["answer"])
            results.append({"id": problem["id"], "decoder": name, "right": right, **result})
            with arguments.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(results[-1]) + "\n")
            print(problem["id"], name, right, f"{result['seconds']:.1f} s", flush=True)
    report(results)


if __name__ == "__main__":
    main()
