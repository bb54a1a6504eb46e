"""Identities on real weights at temperature 0: three ways in which texts must be equal.

    python benchmarks/identities.py --data gsm8k.jsonl --limit 20 [--max-tokens 600]

1. A verifier that never accepts writes what the target alone writes.
2. Threshold 0 with one candidate writes what the draft alone writes.
3. One model as draft and target writes its own text, whatever the verdicts.

Prints the first place where two texts part, and exits with 1 if any do.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from shared import DRAFTS_SIGNALS

from specguard_chains import background
from specguard_chains.assembly import assemble
from specguard_chains.calibrations.fitting import reasoning_prompt
from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.engine import Candidate, Reading
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.steps import Judgement, Source, Step, Verdict
from specguard_chains.decoding.verification import Situation
from specguard_chains.options import SpecGuardOptions


@dataclass(frozen=True)
class AcceptNone:
    """Rejects every step once it is complete."""

    needs_grounding: bool = True
    state_layer: int | None = None
    asks_others: bool = False

    def can_accept(self, confidence: float, grounding: float | None) -> bool:
        return True

    def judge(self, candidate: Candidate, reading: Reading, situation: Situation) -> Judgement:
        return Judgement(Verdict.REJECTED, 0.0, reading.confidence, reading.min_grounding)


def steps_of(decoder: Decoder, request: Request) -> list[Step]:
    for engine in decoder.engines:
        engine.clear()
    return list(background.run(decoder, request))


def text_of(decoder: Decoder, request: Request) -> str:
    return "".join(step.text for step in steps_of(decoder, request))


def first_difference(one: str, other: str) -> str:
    at = next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )
    return f"at character {at}: {one[at : at + 30]!r} against {other[at : at + 30]!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=600)
    parser.add_argument("--pair", default=SpecGuardOptions().pair)
    arguments = parser.parse_args()

    options = SpecGuardOptions(
        decoder="specguard-greedy",
        pair=arguments.pair,
        num_candidates=1,
        n_ctx=2048,
        **DRAFTS_SIGNALS,
        patience=0,
    )
    guarded = assemble(options)
    assert isinstance(guarded, SpecGuardDecoder)
    accept_all = assemble(options.model_copy(update={"threshold": 0.0}))
    target_alone = SoloDecoder(guarded.target, Source.TARGET)
    draft_alone = SoloDecoder(guarded.draft, Source.DRAFT, grounding=guarded.grounding)
    checks: dict[str, tuple[Decoder, Decoder]] = {
        "nothing accepted = target": (replace(guarded, verifier=AcceptNone()), target_alone),
        "everything accepted = draft": (accept_all, draft_alone),
        "one model twice = itself": (replace(guarded, target=guarded.draft), draft_alone),
    }
    equal = dict.fromkeys(checks, 0)
    accepted = judged = 0
    problems = [json.loads(line) for line in arguments.data.open(encoding="utf-8")]
    for problem in problems[: arguments.limit]:
        request = Request(
            reasoning_prompt(problem["question"]),
            Sampling(temperature=0),
            max_tokens=arguments.max_tokens,
        )
        alone = {
            decoder.source: text_of(decoder, request) for decoder in (target_alone, draft_alone)
        }
        for name, (decoder, reference) in checks.items():
            assert isinstance(reference, SoloDecoder)
            steps = steps_of(decoder, request)
            text = "".join(step.text for step in steps)
            if text == alone[reference.source]:
                equal[name] += 1
            else:
                print(problem["id"], name, first_difference(text, alone[reference.source]))
            if "twice" in name:
                judged += len(steps)
                accepted += sum(step.verdict is Verdict.ACCEPTED for step in steps)
        print(problem["id"], equal, flush=True)
    count = len(problems[: arguments.limit])
    for name, number in equal.items():
        print(f"{name}: {number} of {count} texts equal")
    print(f"(one model twice: {accepted} of {judged} steps accepted)")
    sys.exit(any(number < count for number in equal.values()))


if __name__ == "__main__":
    main()
