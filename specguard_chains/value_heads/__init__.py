"""Value heads of known drafts, as `specguard train-reward` wrote them, and where to find others."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from specguard_chains.decoding.rewards import ValueHead
from specguard_chains.models import cache_folder


def file_name(draft: str) -> str:
    """Return the name of the file that holds a draft's value head."""
    return f"{draft}.json".replace("/", "_")  # a model may be named as on the hub


def own_folder() -> Path:
    """Return the folder of the user's own value heads; it may not exist yet."""
    return cache_folder().parent / "value_heads"


def find(draft: str) -> ValueHead | None:
    """Return a draft's value head: the user's own, the package's, or None."""
    if (own := own_folder() / file_name(draft)).is_file():
        return ValueHead.load(own)
    shipped = resources.files(__name__) / file_name(draft)
    if not shipped.is_file():
        return None
    with resources.as_file(shipped) as path:
        return ValueHead.load(path)
