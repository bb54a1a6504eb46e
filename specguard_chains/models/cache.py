"""The cache folder: where model files lie, and the proof that they are what they should be.

A file is hashed once; a stamp beside it then records size, modification time and SHA-256.
As long as size and time agree with the stamp, the file counts as verified.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from specguard_chains.errors import ConfigurationError, ModelIntegrityError, ModelNotFoundError
from specguard_chains.models.catalogue import FILES, PAIRS, ModelFile

GGUF_MAGIC = b"GGUF"
CHUNK_BYTES = 1 << 20

logger = logging.getLogger("specguard_chains.models")


class Progress(Protocol):
    """Told how far a long piece of work is."""

    def __call__(self, done: int, total: int, label: str, /) -> None:
        """Take note of bytes done, bytes in total (0: not known), and what is being done."""


def no_progress(done: int, total: int, label: str, /) -> None:
    """Report nothing."""


class FileState(StrEnum):
    """What the cache holds of a model file."""

    READY = "ready"
    UNVERIFIED = "unverified"
    PARTIAL = "partial"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A known model's place in the cache; `size` is bytes on disk, `role` its use in pairs."""

    name: str
    role: str
    path: Path
    size: int
    state: FileState


def cache_folder() -> Path:
    """Return the folder of the model files; `SPECGUARD_CACHE` moves the cache elsewhere."""
    override = os.environ.get("SPECGUARD_CACHE")
    root = Path(override).expanduser() if override else user_cache_path("specguard_chains")
    return root / "models"


def cached_models() -> list[CachedModel]:
    """Return every known model with its state in the cache; reads no file contents to hash."""
    folder = cache_folder()
    return [_cached(file, folder / file.file) for file in FILES.values()]


def is_ready(path: Path, file: ModelFile) -> bool:
    """Return whether the path holds the file, as far as can be told without hashing it."""
    try:
        stamp = json.loads(_stamp_path(path).read_text(encoding="utf-8"))
        return bool(stamp == _stamp(path, file)) and has_gguf_magic(path)
    except (OSError, ValueError):
        return False


def verify(path: Path, file: ModelFile, progress: Progress = no_progress) -> None:
    """Hash the whole file and compare it with what it should be.

    Raises:
        ModelIntegrityError: Size or SHA-256 differ.
    """
    size = path.stat().st_size
    if size != file.size:
        raise ModelIntegrityError(
            f"{path} has {size:,} bytes where {file.name} has {file.size:,}: it is not that file"
        )
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(done, size, f"checking {file.file}")
    if digest.hexdigest() != file.sha256:
        raise ModelIntegrityError(
            f"{path} has the SHA-256 {digest.hexdigest()} where {file.name} has {file.sha256}: "
            "it is damaged or another file"
        )


def write_stamp(path: Path, file: ModelFile) -> None:
    """Record that the file was verified as it now is."""
    write_whole(_stamp_path(path), json.dumps(_stamp(path, file)))


def remove(path: Path) -> None:
    """Remove a model file and its stamp; a missing one is fine."""
    _stamp_path(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that it is never seen half-written."""
    draft = path.with_name(f"{path.name}.new")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def partial_path(path: Path) -> Path:
    """Return where a model file grows until it is complete."""
    return path.with_name(f"{path.name}.partial")


def has_gguf_magic(path: Path) -> bool:
    """Return whether the file starts as every GGUF file does."""
    with path.open("rb") as stream:
        return stream.read(len(GGUF_MAGIC)) == GGUF_MAGIC


def check_own_file(path: Path) -> Path:
    """Return the absolute path of a user's own model file after a look at its first bytes.

    Raises:
        ModelNotFoundError: There is no such file.
        ModelIntegrityError: It does not start as a GGUF file does.
    """
    path = path.expanduser().absolute()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ModelNotFoundError(
            f"The model file {path} {what}: give the path of a GGUF file, "
            f"or one of the names {', '.join(FILES)}"
        )
    if not has_gguf_magic(path):
        raise ModelIntegrityError(
            f"{path} is not a GGUF file (it does not start with 'GGUF'): "
            "fetch it again, or convert the model to GGUF first"
        )
    return path


@contextmanager
def locked(path: Path, progress: Progress = no_progress) -> Iterator[None]:
    """Hold the lock of one model file; a second process waits here and says so.

    Raises:
        ConfigurationError: The cache folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(f"{path.name}.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.warning("Another process is fetching %s; waiting for it.", path.name)
            progress(0, 0, f"waiting for another process to fetch {path.name}")
            lock.acquire()
    except OSError as error:
        raise ConfigurationError(
            f"The cache folder {path.parent} cannot be used ({error}): make it writable, "
            "or set SPECGUARD_CACHE to another folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _stamp_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.verified")


def _stamp(path: Path, file: ModelFile) -> dict[str, int | str]:
    """Return what a verified file's stamp must say now."""
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": file.sha256}


def _cached(file: ModelFile, path: Path) -> CachedModel:
    """Return one line of the listing."""
    partial = partial_path(path)
    if path.exists():
        state = FileState.READY if is_ready(path, file) else FileState.UNVERIFIED
        size = path.stat().st_size
    elif partial.exists():
        state, size = FileState.PARTIAL, partial.stat().st_size
    else:
        state, size = FileState.ABSENT, 0
    return CachedModel(file.name, _role(file), path, size, state)


def _role(file: ModelFile) -> str:
    """Return what the file does in the known pairs, such as "draft of a, target of b"."""
    uses = [f"draft of {pair.name}" for pair in PAIRS.values() if pair.draft == file]
    uses += [f"target of {pair.name}" for pair in PAIRS.values() if pair.target == file]
    return ", ".join(uses)
