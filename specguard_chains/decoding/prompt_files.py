"""Computed beginnings of prompts in a folder, for processes that come later.

A file is a NumPy archive, whose checksums tell a torn one: the model's state after a prompt's first
tokens, these tokens, and all that the state depends on. Its name has a hash of the latter two, and
the length. Which file was used last is told by its time of modification.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from specguard_chains.decoding.cache import State
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.errors import ConfigurationError

logger = logging.getLogger(__name__)

FORMAT = 1
"""Of these files; to be raised when something else is written under the same names."""
SUFFIX, UNFINISHED = ".prompt", ".prompt-part"
NAME = re.compile(rf"[0-9a-f]{{20}}-\d+-[0-9a-f]{{20}}{re.escape(SUFFIX)}")
"""What only these files are called: others in the folder are not ours to remove."""
IN_STATE = "state."
ABANDONED_S = 24 * 3600
"""An unfinished file of this age belongs to a process that was killed."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The state after the first `length` tokens of a prompt."""

    length: int
    state: State


class PromptFiles:
    """The files of one engine in a folder that it may share with others, and with processes."""

    def __init__(self, folder: Path, most_bytes: int, identity: Mapping[str, Any]) -> None:
        """Make the folder if there is none, for this user only: its files hold prompts.

        Args:
            folder: Where the files are.
            most_bytes: What all files in it may have together; those used last are kept.
            identity: All that a state depends on beside the tokens and the form of grounding.

        Raises:
            ConfigurationError: Nothing can be written there.
        """
        self._folder = folder.expanduser().absolute()
        self._most_bytes = most_bytes
        self._identity = json.dumps({"format": FORMAT, **identity}, sort_keys=True)
        self._lock = threading.Lock()
        self._writing: dict[Path, threading.Thread] = {}
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):
                pass
        except OSError as error:
            raise ConfigurationError(
                f"prompt_cache={str(folder)!r} cannot be used ({error}); give a folder that can "
                "be written, or leave it out"
            ) from error

    def load(
        self, tokens: Sequence[int], grounding: GroundingSpec | None, *, least: int, most: int
    ) -> Stored | None:
        """Return the longest state that these tokens begin with, None if there is none.

        A file that turns out to be damaged or another one's is removed, which is logged.

        Args:
            tokens: The prompt.
            grounding: In which form its attention is to be read.
            least: Fewer tokens are of no use.
            most: More tokens are of no use.
        """
        for length, path in sorted(self._candidates(grounding), reverse=True):
            if least <= length <= most and path == self._path(tokens[:length], grounding):
                try:
                    stored = self._read(path, tokens[:length], grounding)
                    with suppress(OSError):  # removed meanwhile, or another user's
                        os.utime(path)
                    return stored
                except FileNotFoundError:  # another process has made room
                    continue
                except Exception as error:  # whatever it is, it must not reach a request
                    logger.warning("a computed prompt is ignored and written anew: %s", error)
                    with suppress(OSError):
                        path.unlink()
        return None

    def holds(self, tokens: Sequence[int], grounding: GroundingSpec | None) -> bool:
        """Whether there is a file for just these tokens, or one is being written."""
        path = self._path(tokens, grounding)
        return path in self._writing or path.exists()

    def save(self, tokens: Sequence[int], grounding: GroundingSpec | None, state: State) -> None:
        """Write the state after these tokens in the background; Python ends only after it."""
        path = self._path(tokens, grounding)
        content = {
            "identity": np.array(self._key(grounding)),
            "tokens": np.asarray(tokens, dtype=np.int64),
            **{IN_STATE + name: array for name, array in state.items()},
        }
        thread = threading.Thread(
            target=self._write, args=(path, content), name="specguard-prompt-cache"
        )
        with self._lock:
            if path in self._writing:
                return
            try:
                thread.start()
            except RuntimeError as error:  # no more threads, or Python is ending
                logger.warning("a computed prompt is not kept: %s", error)
                return
            self._writing[path] = thread

    def flush(self) -> None:
        """Wait until everything is written."""
        with self._lock:
            threads = list(self._writing.values())
        for thread in threads:
            thread.join()

    def _read(self, path: Path, tokens: Sequence[int], grounding: GroundingSpec | None) -> Stored:
        """Return what a file holds.

        Raises:
            Exception: It is torn, or of another model or prompt.
        """
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            content = {name: archive[name] for name in archive.files}
        if str(content["identity"]) != self._key(grounding):
            raise ValueError(f"{path.name} is of another model, or of another version")
        if content["tokens"].tolist() != list(tokens):
            raise ValueError(f"{path.name} is of another prompt")
        own = {name: array for name, array in content.items() if name.startswith(IN_STATE)}
        state = {name.removeprefix(IN_STATE): array for name, array in own.items()}
        return Stored(len(tokens), state)

    def _write(self, path: Path, content: State) -> None:
        draft: Path | None = None
        try:
            size = sum(array.nbytes for array in content.values())
            if size > self._most_bytes:
                needed = size / 2**30
                logger.warning("a computed prompt needs prompt_cache_gib=%.2f or more", needed)
                return
            with tempfile.NamedTemporaryFile(
                dir=self._folder, suffix=UNFINISHED, delete=False
            ) as file:
                draft = Path(file.name)
                np.savez(file, allow_pickle=False, **content)
            draft.replace(path)
            self._make_room(path)
        except OSError as error:
            logger.warning("a computed prompt cannot be written to prompt_cache: %s", error)
            if draft is not None:
                draft.unlink(missing_ok=True)
        finally:
            with self._lock:
                del self._writing[path]

    def _make_room(self, newest: Path) -> None:
        """Remove the files that were used least recently, of all engines, and abandoned ones."""
        used: list[tuple[float, int, Path]] = []
        for path in self._folder.iterdir():
            with suppress(OSError):  # others may remove it meanwhile
                status = path.stat()
                if NAME.fullmatch(path.name):
                    used.append((status.st_mtime, status.st_size, path))
                elif path.suffix == UNFINISHED and status.st_mtime < time.time() - ABANDONED_S:
                    path.unlink()
        total = sum(size for _, size, _ in used)
        for _, size, path in sorted(used):
            if total <= self._most_bytes:
                return
            if path != newest:
                with suppress(OSError):
                    path.unlink()
                total -= size

    def _candidates(self, grounding: GroundingSpec | None) -> Iterator[tuple[int, Path]]:
        """Yield this engine's files and how many tokens each is for."""
        for path in self._folder.glob(f"{_digest(self._key(grounding))}-*{SUFFIX}"):
            with suppress(ValueError):
                yield int(path.name.split("-")[1]), path

    def _path(self, tokens: Sequence[int], grounding: GroundingSpec | None) -> Path:
        of_tokens = _digest(np.asarray(tokens, dtype=np.int64).tobytes())
        key = _digest(self._key(grounding))
        return self._folder / f"{key}-{len(tokens)}-{of_tokens}{SUFFIX}"

    def _key(self, grounding: GroundingSpec | None) -> str:
        """Return what a state depends on; passages come after it, and change nothing."""
        form = grounding and replace(grounding, passages=())
        return f"{self._identity} {form}"


def _digest(data: str | bytes) -> str:
    raw = data.encode() if isinstance(data, str) else data
    return blake2b(raw, digest_size=10).hexdigest()
