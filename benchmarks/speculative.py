"""Speculative decoding against the target alone: the same text, passes of the target, and time.

    python benchmarks/speculative.py --data gsm8k.jsonl --limit 50 [--max-tokens 200] [--tree 2 1 1]

At temperature 0 both must write the same text. In exact arithmetic they do; with quantised weights
the target's logits depend on how many tokens are computed at once, and near-ties can fall the other
way. Where two texts part, the benchmark prints the margin between the target's two likeliest tokens
there. `--exact` loads the models so that a few tokens have the same numbers in any batch
(`LlamaCppEngine(repack=False)`): then no text may differ. The decoders take turns on every problem,
from cold caches.
"""

from __future__ import annotations

import argparse
import json
import statistics
from math import prod
from pathlib import Path

from shared import parting, text_of, timed

from specguard_chains.adapters import LlamaCppEngine
from specguard_chains.assembly import assemble
from specguard_chains.calibrations.fitting import reasoning_prompt
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.models import resolve_pair
from specguard_chains.options import SpecGuardOptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=4, help="most drafted at a time")
    parser.add_argument(
        "--tree", type=int, nargs="+", help="children by depth, in place of a chain"
    )
    parser.add_argument("--fixed", action="store_true", help="always draft the most")
    parser.add_argument("--exact", action="store_true", help="without rearranged weights")
    parser.add_argument("--pair", default=SpecGuardOptions().pair)
    parser.add_argument("--draft")
    parser.add_argument("--target")
    arguments = parser.parse_args()

    draft, target = arguments.draft, arguments.target
    room = max(4, prod(arguments.tree or ()))
    if arguments.exact:
        pair = resolve_pair(arguments.pair)
        draft, target = (
            LlamaCppEngine(path, n_ctx=2048, max_candidates=room, repack=False)
            for path in (draft or pair.draft, target or pair.target)
        )
    options = SpecGuardOptions(
        pair=arguments.pair,
        draft=draft,
        target=target,
        decoder="speculative",
        num_speculative_tokens=arguments.tokens,
        speculative_tree=arguments.tree,
        adaptive_speculation=not arguments.fixed,
        confidence_weight=1,
        n_ctx=2048,
    )
    speculative = assemble(options)
    # A tree's branches need room that the target alone does not, yet it must be the same engine.
    alone = assemble(options.model_copy(update={"decoder": "target", "num_candidates": room}))
    equal, ratios, passes, tokens, kept, drafted = 0, [], 0, 0, 0, 0
    problems = [json.loads(line) for line in arguments.data.open(encoding="utf-8")]
    for problem in problems[: arguments.limit]:
        request = Request(
            reasoning_prompt(problem["question"]),
            Sampling(temperature=0),
            max_tokens=arguments.max_tokens,
        )
        steps, seconds = timed(speculative, request)
        expected, seconds_alone = timed(alone, request)
        texts = text_of(steps), text_of(expected)
        equal += texts[0] == texts[1]
        ratios.append(seconds / seconds_alone)
        passes += sum(step.tokens.target_passes for step in steps)
        tokens += sum(step.answer_tokens for step in steps)
        kept += sum(step.tokens.kept for step in steps)
        drafted += sum(step.tokens.drafted for step in steps)
        remark = "" if texts[0] == texts[1] else parting(speculative, request, texts)
        print(f"{problem['id']}: time ratio {ratios[-1]:.2f} {remark}", flush=True)
    shape = arguments.tree or f"chain of {arguments.tokens}"
    print(
        f"\n{len(ratios)} problems, {shape}, {'fixed' if arguments.fixed else 'adaptive'}: "
        f"{equal} texts equal; {tokens / passes:.2f} tokens a target pass, {kept / drafted:.1%} of "
        f"{drafted} drafted tokens kept; time to the target's alone: median "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
