"""Bounds of the named pairs, as `specguard calibrate` wrote them, and where to look for others."""

from __future__ import annotations

import logging
from functools import cache
from importlib import resources
from pathlib import Path

from specguard_chains.decoding.calibration import FALLBACK, Calibration
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.models import cache_folder

logger = logging.getLogger(__name__)


def signals(verify_with: str, grounding_from: str | None) -> str:
    """Return whose signals are judged: one model's both, one's confidence alone, or one of each."""
    if grounding_from is None:
        return f"{verify_with}-confidence"
    return verify_with if grounding_from == verify_with else f"{verify_with}+{grounding_from}"


def file_name(draft: str, target: str, signals: str, grounding: GroundingSpec) -> str:
    """Return the name of the file that holds the bounds of these signals of this pair."""
    name = f"{draft}--{target}--{signals}-{grounding.form}-{grounding.layers}.json"
    return name.replace("/", "_")  # a server's models may be named like ones on the hub


def own_folder() -> Path:
    """Return the folder of the user's own calibrations; it may not exist yet."""
    return cache_folder().parent / "calibrations"


def find(
    draft: str,
    target: str,
    verify_with: str,
    grounding_from: str | None,
    grounding: GroundingSpec,
) -> Calibration:
    """Return the bounds of a pair: the user's own, the package's, or the visible fallback.

    Confidence has the same bounds whether or not there is grounding beside it.
    """
    kinds = [signals(verify_with, grounding_from)]
    if grounding_from is None:
        others = [role for role in ("draft", "target") if role != verify_with]
        kinds += [signals(verify_with, reader) for reader in (verify_with, *others)]
    for name in (file_name(draft, target, kind, grounding) for kind in kinds):
        if (own := own_folder() / name).is_file():
            return Calibration.load(own)
        shipped = resources.files(__name__) / name
        if shipped.is_file():
            with resources.as_file(shipped) as path:
                return Calibration.load(path)
    _warn_once(draft, target, kinds[0], grounding)
    return FALLBACK


@cache
def _warn_once(draft: str, target: str, signals: str, grounding: GroundingSpec) -> None:
    logger.warning(
        "no bounds for draft %s, target %s (%s signals, %s grounding, %d layers): scores use wide "
        "fallback bounds and say little; run `specguard calibrate` for this pair",
        draft,
        target,
        signals,
        grounding.form,
        grounding.layers,
    )
