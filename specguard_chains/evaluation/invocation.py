"""A command as it was run, and the machine and software that ran it."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import as_file, files
from pathlib import Path
from shlex import join, split
from typing import Any

from specguard_chains.evaluation.wording import without_folders

CPU_INFO = Path("/proc/cpuinfo")
PACKAGES = ("specguard_chains", "specguard_adapters")
"""What is installed together."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """What has added to a run: information, that results may differ in and be comparable."""

    command: str | None
    """None if no command line began it, or it is not known any more."""
    cpu: str | None
    """The model of the processor, None if it is not known any more."""
    version: str
    """Of this package."""
    python: str
    platform: str
    sources: str | None = None
    """Digest of this package's code, which changes more often than its version; None if it is not
    known any more."""

    @classmethod
    def here(cls, arguments: Sequence[str] | None = None) -> Invocation:
        """Return what runs now.

        Args:
            arguments: Of the process, its own name first. The folder that it runs in is told as
                ".", that of the user as "~".
        """
        return cls(
            command=None if arguments is None else _as_told(arguments),
            cpu=cpu_model(),
            version=version("specguard_chains"),
            python=platform.python_version(),
            platform=platform.platform(),
            sources=digest_of_sources(),
        )

    @property
    def machine(self) -> str:
        """What times depend on, in words."""
        software = f"specguard_chains {self.version}, Python {self.python}"
        return f"{self.cpu or 'an unknown processor'} with {self.platform}, {software}"

    def public(self) -> dict[str, Any]:
        """Return it as plain values, without any folder that only this machine has."""
        command = self.command
        if command is not None:
            command = join(map(without_folders, split(command)))
        return asdict(replace(self, command=command))


def cpu_model() -> str:
    """Return the processor's model name, as far as the system tells."""
    with suppress(OSError):
        for line in CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


@cache
def digest_of_sources() -> str:
    """Return what tells the code of this package apart from other code of the same version."""
    digest = sha256()
    for package in PACKAGES:
        with as_file(files(package)) as folder:
            digest.update(_read_sources(folder, package))
    return digest.hexdigest()[:12]


def _read_sources(folder: Path, package: str) -> bytes:
    """Return the names and contents of a package's modules, in the order of their names."""
    modules = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    parts = ((f"{package}/{name}".encode(), modules[name].read_bytes()) for name in sorted(modules))
    return b"".join(name + b"\0" + content + b"\0" for name, content in parts)


def _as_told(arguments: Sequence[str]) -> str:
    program, *words = arguments
    return join([Path(program).name, *map(_without_own_folders, words)])


def _without_own_folders(word: str) -> str:
    """Return an argument with signs for folders, whose names are nobody's business.

    It may hold paths behind a name, as in --out=/path or label=target:target=/path.
    """
    signs = {os.getcwd(): ".", os.path.expanduser("~"): "~"}
    for folder in sorted(signs, key=len, reverse=True):  # one may be within the other
        if len(folder) > 1:
            word = re.sub(rf"(?<![^\s=,]){re.escape(folder)}(?=$|[/\s,:])", signs[folder], word)
    return word
