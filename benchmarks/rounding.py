"""How far rounding moves the signals of a step, and how often that flips a verdict.

    python benchmarks/rounding.py --data gsm8k.jsonl --limit 20

The draft of a pair writes answers alone, greedily. Each step's signals are taken three times: live,
one token at a time; live as the last of four candidates that are decoded in one batch; and in one
pass by a second session that reads what the first one wrote. Prints the differences from the
first, and at the pair's bounds, weight and threshold the share of verdicts that they flip.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import numpy as np
from shared import DRAFTS_SIGNALS

from specguard_chains.assembly import assemble
from specguard_chains.calibrations.fitting import reasoning_prompt
from specguard_chains.decoding import compute_thread
from specguard_chains.decoding.boundaries import Boundary
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.verification import EnsembleVerifier
from specguard_chains.options import SpecGuardOptions

NEARLY_GREEDY = Sampling(temperature=1e-3, top_p=1.0)
"""Four candidates that are computed side by side although they (nearly always) say the same."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--pair", default=SpecGuardOptions().pair)
    parser.add_argument("--max-steps", type=int, default=20)
    arguments = parser.parse_args()
    options = SpecGuardOptions(
        pair=arguments.pair,
        num_candidates=4,
        n_ctx=2048,
        **DRAFTS_SIGNALS,
        doubt_margin=1,
    )
    decoder = assemble(options)
    assert isinstance(decoder, SpecGuardDecoder)
    verifier = decoder.verifier
    assert isinstance(verifier, EnsembleVerifier)

    moved: dict[str, list[tuple[float, float, bool]]] = defaultdict(list)
    accepted = steps = 0
    problems = [json.loads(line) for line in arguments.data.open(encoding="utf-8")]
    for problem in problems[: arguments.limit]:
        prompt = reasoning_prompt(problem["question"])
        with (
            closing(decoder.draft.open(prompt, grounding=decoder.grounding)) as writer,
            closing(decoder.draft.open(prompt, grounding=decoder.grounding)) as reader,
        ):
            for _ in range(arguments.max_steps):
                batch = writer.sample(4, Boundary(), NEARLY_GREEDY, seed=(0,))[3]
                (step,) = writer.sample(1, Boundary(), Sampling(temperature=0), seed=(0,))
                live = step.reading
                verdict = verifier.can_accept(live.confidence, live.min_grounding)
                steps, accepted = steps + 1, accepted + verdict
                others = {"one pass": reader.read(step)}
                if batch.tokens == step.tokens:
                    others["four at a time"] = batch.reading
                for name, other in others.items():
                    assert live.min_grounding is not None
                    assert other.min_grounding is not None
                    flipped = verdict != verifier.can_accept(other.confidence, other.min_grounding)
                    moved[name].append(
                        (
                            abs(other.confidence - live.confidence),
                            abs(other.min_grounding - live.min_grounding),
                            flipped,
                        )
                    )
                writer.accept(step)
                reader.accept(step)
                if step.ends_sequence or writer.room < Boundary().max_tokens:
                    break
    print(f"{steps} steps, {accepted} accepted at threshold {verifier.threshold}")
    for name, rows in moved.items():
        confidence, grounding, flips = (np.array(column) for column in zip(*rows, strict=True))
        print(
            f"{name}: {len(rows)} steps; confidence moves by {np.median(confidence):.4f} (median), "
            f"{confidence.max():.4f} (most); grounding by {np.median(grounding):.4f}, "
            f"{grounding.max():.4f}; verdicts flipped: {int(flips.sum())} = {flips.mean():.2%}"
        )


if __name__ == "__main__":
    compute_thread.run(main)
