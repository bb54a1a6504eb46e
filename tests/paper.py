"""Options of SpecGuard as the paper has it, for tests of that form; the defaults are others."""

from typing import Any

PAPER: dict[str, Any] = {
    "verify_with": "draft",
    "confidence_weight": 0.3,
    "num_candidates": 4,
    "num_target_candidates": 4,
    "doubt_margin": 1,
    "patience": 0,
}
