"""What each saving of SpecGuard is worth: on and off, in turns on every problem.

    python benchmarks/speed.py --data gsm8k.jsonl --limit 30 [--threshold 0.7] [--skip 100]
                               [--verify-with draft] [--confidence-weight 0.3]
                               [--variants both target]

The first variant, plain, drafts every step to its end and has the target write every rejected one
from scratch. The exact savings change no text: where one differs, the benchmark prints how far
apart the target's two likeliest tokens were there, as a pass over several tokens rounds otherwise
than several passes. The target alone is timed too. Variants take turns, from cold caches; ratios
are those of summed seconds, with intervals from resampled problems.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

import numpy as np
from shared import parting, ratio, text_of, timed

from specguard_chains.assembly import assemble
from specguard_chains.calibrations.fitting import reasoning_prompt
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import VerifyWith
from specguard_chains.evaluation.problems import load_problems
from specguard_chains.metrics import Metrics
from specguard_chains.options import SpecGuardOptions

SPECULATING = "both, speculating"
"""Proposed tokens have no grounding, so that it does not go together with it."""
OFF = {"early_rejection": False, "salvage": False, "patience": 0}
BOTH = OFF | {"early_rejection": True, "salvage": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": OFF,
    "early rejection": OFF | {"early_rejection": True},
    "salvage": OFF | {"salvage": True},
    "both": BOTH,
    "both, patience 1": BOTH | {"patience": 1},
    "both, patience 2": BOTH | {"patience": 2},
    "both, hand back 8": BOTH | {"hand_back": 8},
    SPECULATING: BOTH | {"speculate_rewrites": True},
    "target": {"decoder": "target"},
}
EXACT = ("early rejection", "salvage", "both", SPECULATING)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=30)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--threshold", type=float, default=SpecGuardOptions().score_threshold())
    parser.add_argument("--confidence-weight", type=float)
    parser.add_argument("--verify-with", choices=get_args(VerifyWith))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="beside plain; or all")
    parser.add_argument("--pair", default=SpecGuardOptions().pair)
    parser.add_argument("--draft")
    parser.add_argument("--target")
    arguments = parser.parse_args()

    common = {
        "pair": arguments.pair,
        "draft": arguments.draft,
        "target": arguments.target,
        "decoder": "specguard-greedy",
        "threshold": arguments.threshold,
        "n_ctx": 2048,
        "temperature": 0,
    }
    for name in ("confidence_weight", "verify_with"):
        if (value := getattr(arguments, name)) is not None:
            common[name] = value
    grounded = SpecGuardOptions(**common).confidence_weight < 1
    usual = [name for name in VARIANTS if not (grounded and name == SPECULATING)]
    wanted = ["plain", *(arguments.variants or usual)]
    decoders = {
        name: assemble(SpecGuardOptions(**(common | changed)))
        for name, changed in VARIANTS.items()
        if name in wanted
    }
    exact = [name for name in EXACT if name in decoders]
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    steps: dict[str, list[Any]] = {name: [] for name in decoders}
    differing = dict.fromkeys(exact, 0)
    problems = load_problems(str(arguments.data), limit=arguments.limit, skip=arguments.skip)
    for turn, problem in enumerate(problems):
        request = Request(
            reasoning_prompt(problem.question),
            Sampling(temperature=0),
            max_tokens=arguments.max_tokens,
        )
        names = list(decoders)
        texts = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            answer, spent = timed(decoders[name], request)
            seconds[name].append(spent)
            steps[name] += answer
            texts[name] = text_of(answer)
        print(f"{problem.id}: " + ", ".join(f"{n} {seconds[n][-1]:.1f} s" for n in names))
        for name in exact:
            if texts[name] != texts["plain"]:
                differing[name] += 1
                pair = texts["plain"], texts[name]
                print(f"  {name}: {parting(decoders[name], request, pair)}", flush=True)

    print(f"\n{len(problems)} problems of {arguments.data.name}, threshold {arguments.threshold}")
    print(f"{'':18} seconds   to plain                 to target                texts  metrics")
    for name in decoders:
        row = Metrics.of(steps[name])
        others = [other for other in ("plain", "target") if other in decoders]
        ratios = "   ".join(ratio(seconds[name], seconds[other]) for other in others)
        same = f"{len(problems) - differing[name]} equal" if name in exact else ""
        rate = "" if row.acceptance_rate is None else f"{row.acceptance_rate:.0%} accepted, "
        print(
            f"{name:18} {np.median(seconds[name]):7.2f}   {ratios}   {same:9} {rate}"
            f"{row.num_draft_tokens} drafted, {row.num_regenerated_tokens} regenerated, "
            f"{row.num_salvaged_tokens} salvaged, {row.num_paused_steps} undrafted steps"
        )


if __name__ == "__main__":
    main()
