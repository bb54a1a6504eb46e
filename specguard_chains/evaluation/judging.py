"""What an arm judges steps by that its options do not name: bounds and value heads that were found.

The options leave them open by default, and files that are found today may be others tomorrow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.calibration import FALLBACK
from specguard_chains.decoding.rewards import ValueHead
from specguard_chains.decoding.rivals import RewardVerifier
from specguard_chains.decoding.verification import EnsembleVerifier
from specguard_chains.decoding.voting import VotingDecoder

JudgedBy = Mapping[str, Any]
"""By name: "bounds", where they come from; "confidence_bounds" and "grounding_bounds", low and
high; "value_head", its digest. What makes no difference to the arm is not in it."""


def judged_by(decoder: object) -> dict[str, Any]:
    """Return what a decoder judges steps by, or rates answers by."""
    match decoder:
        case VotingDecoder():
            return judged_by(decoder.decoder)
        case SoloDecoder():
            return _of_verifier(decoder.scorer)
        case _:
            return _of_verifier(getattr(decoder, "verifier", None))


def by_fallback(found: JudgedBy) -> bool:
    """Whether bounds of the pair were not known."""
    return found.get("bounds") == FALLBACK.source


def _of_verifier(verifier: object) -> dict[str, Any]:
    match verifier:
        case EnsembleVerifier():
            return _bounds(verifier) | _head(verifier.value_head)
        case RewardVerifier():
            return _head(verifier.reward)
        case _:
            return {}


def _bounds(verifier: EnsembleVerifier) -> dict[str, Any]:
    """Return the bounds of the signals that have any weight."""
    calibration = verifier.calibration
    needed = {
        "confidence_bounds": (verifier.needs_confidence, calibration.confidence),
        "grounding_bounds": (verifier.needs_grounding, calibration.grounding),
    }
    found = {name: [bounds.low, bounds.high] for name, (used, bounds) in needed.items() if used}
    return {"bounds": calibration.source, **found} if found else {}


def _head(reward: object) -> dict[str, Any]:
    """Return what tells a value head from others; reward models that read text have names."""
    if not isinstance(reward, ValueHead):
        return {}
    return {"value_head": reward.digest}
