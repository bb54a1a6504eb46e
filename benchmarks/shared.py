"""What several benchmarks need: answers from cold caches, and how far two texts agree."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from specguard_chains import background
from specguard_chains.decoding import compute_thread
from specguard_chains.decoding.cache import common_prefix
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.steps import Step
from specguard_chains.decoding.token_tree import TokenTree
from specguard_chains.evaluation.statistics import ratio_of_sums
from specguard_chains.options import PAPERS_THRESHOLD

DRAFTS_SIGNALS: dict[str, Any] = {
    "verify_with": "draft",
    "confidence_weight": 0.3,
    "threshold": PAPERS_THRESHOLD,
}
"""Options with which steps are judged as in the paper, attention included."""


def timed(decoder: Decoder, request: Request) -> tuple[list[Step], float]:
    """Return the steps of an answer from cold caches, and its seconds."""
    for engine in decoder.engines:
        engine.clear()
    start = time.perf_counter()
    steps = list(background.run(decoder, request))
    return steps, time.perf_counter() - start


def text_of(steps: list[Step]) -> str:
    """Return the answer."""
    return "".join(step.text for step in steps)


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Return a ratio of sums with its interval, which few problems have not, as a text."""
    found = ratio_of_sums(ours, theirs)
    assert found is not None
    interval = "–" if found.interval is None else "{:.3f} to {:.3f}".format(*found.interval)
    return f"{found.value:.3f} ({interval})"


def parting(decoder: Decoder, request: Request, texts: tuple[str, str]) -> str:
    """Say how close the target's two likeliest tokens are where two texts part."""
    shared, margin = margin_at_parting(decoder, request, texts)
    return f"texts part at token {shared}: top-2 margin {margin:.4f} logits"


def margin_at_parting(
    decoder: Decoder, request: Request, texts: tuple[str, str]
) -> tuple[int, float]:
    """Return at which token two texts part, and by how many logits the likeliest leads there."""
    target = decoder.engines[-1]
    one, other = (target.encode_text(text) for text in texts)
    shared = common_prefix(one, other)

    def rows() -> np.ndarray:
        with target.exclusive():
            session = target.open(request.prompt)
            session.extend(one[:shared])
            logits = session.logits(TokenTree((1,)))[0].copy()
            session.close()
            return logits

    logits = compute_thread.run(rows)
    best, second = np.sort(logits)[-1:-3:-1]
    return shared, float(best - second)
