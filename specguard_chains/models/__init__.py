"""Model files by name: found, fetched, verified by SHA-256 and cached.

>>> from specguard_chains.models import DEFAULT_PAIR, resolve_pair
>>> paths = resolve_pair(DEFAULT_PAIR)  # doctest: +SKIP
>>> paths.draft, paths.target  # doctest: +SKIP
"""

from specguard_chains.models.cache import (
    CachedModel,
    FileState,
    Progress,
    cache_folder,
    cached_models,
)
from specguard_chains.models.catalogue import (
    DEFAULT_PAIR,
    FILES,
    PAIRS,
    ModelFile,
    ModelPair,
    Wheel,
    find_file,
    find_pair,
)
from specguard_chains.models.fetching import PairPaths, fetch, resolve, resolve_pair

__all__ = [
    "DEFAULT_PAIR",
    "FILES",
    "PAIRS",
    "CachedModel",
    "FileState",
    "ModelFile",
    "ModelPair",
    "PairPaths",
    "Progress",
    "Wheel",
    "cache_folder",
    "cached_models",
    "fetch",
    "find_file",
    "find_pair",
    "resolve",
    "resolve_pair",
]
