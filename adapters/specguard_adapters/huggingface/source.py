"""Where files of transformers are read from: the hub, a folder, or a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from specguard_chains.errors import (
    ConfigurationError,
    EngineError,
    ModelIntegrityError,
    ModelNotFoundError,
    SpecGuardError,
)
from specguard_chains.models.cache import check_own_file

HUB_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Source:
    """A place that models are read from."""

    name: str
    where: str
    file: str | None
    on_hub: bool
    local_files_only: bool

    @classmethod
    def of(cls, place: str | os.PathLike[str], *, local_files_only: bool) -> Source:
        """Find out what a name or a path means.

        Raises:
            ModelNotFoundError: There is no such file, or no model in the folder.
            ModelIntegrityError: It is not a GGUF file.
        """
        path = Path(place).expanduser()
        if path.suffix == ".gguf":
            path = check_own_file(path)
            return cls(path.stem, str(path.parent), path.name, False, local_files_only)
        on_hub = isinstance(place, str) and not path.is_dir() and _looks_like_hub_name(place)
        if on_hub:
            return cls(path.name, str(place), None, True, local_files_only)
        if not (path / "config.json").is_file() and not (path / "tokenizer.json").is_file():
            what = "holds no model" if path.is_dir() else "does not exist"
            raise ModelNotFoundError(
                f"the folder {path} {what}; give one that save_pretrained has written, a GGUF "
                "file, or a name on the hub"
            )
        return cls(path.absolute().name, str(path), None, False, local_files_only)

    def state(self) -> tuple[Hashable, ...]:
        """Return what is read from here: the same place in the same state is the same model."""
        if self.on_hub:
            return (self.where,)
        folder = Path(self.where).resolve()
        files = [folder / self.file] if self.file else sorted(folder.iterdir())
        stats = [(file.name, file.stat()) for file in files if file.exists()]
        return folder, *((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)

    def fetch(self, kind: Any, options: dict[str, Any]) -> Any:
        """Return what `kind.from_pretrained` gives, from here if possible."""

        def fetch(*, local: bool) -> Any:
            file = {"gguf_file": self.file} if self.file else {}
            with _bars_on_terminals():
                return kind.from_pretrained(self.where, local_files_only=local, **file, **options)

        if not self.on_hub:
            return self._translated(lambda: fetch(local=True))
        try:
            return self._translated(lambda: fetch(local=True))
        except ModelNotFoundError:
            if self.local_files_only:
                raise
        return self._translated(lambda: self._from_hub(fetch))

    def _from_hub(self, fetch: Callable[..., Any]) -> Any:
        try:
            # Without a network the library retries for more than a minute: ask once first.
            import huggingface_hub as hub

            url = hub.hf_hub_url(self.where, "config.json")
            hub.utils.get_session().head(url, timeout=HUB_TIMEOUT_S)
        except Exception as error:  # the client's errors have no common base
            raise self._not_found(error) from error
        return fetch(local=False)

    def _translated(self, fetch: Callable[[], Any]) -> Any:
        """Raise this package's errors in place of the library's."""
        try:
            return fetch()
        except (SpecGuardError, ImportError):
            raise
        except OSError as error:
            raise self._not_found(error) from error
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"the memory does not suffice for {self.name}; give a smaller dtype, a "
                "quantization_config or device_map='auto'"
            ) from error
        except Exception as error:
            if self._holds_gguf:
                raise self._not_found(error) from error
            text = _reason(error)
            if "Safetensor" in type(error).__name__ or "deserializing" in text:
                raise ModelIntegrityError(
                    f"the files of {self.where} are damaged; fetch them again. {text}"
                ) from error
            if "trust_remote_code" in text:
                raise ConfigurationError(
                    f"{self.where} brings code of its own; read it, and give "
                    "trust_remote_code=True if you trust it"
                ) from error
            raise EngineError(f"transformers cannot load {self.where}: {text}") from error

    @property
    def _holds_gguf(self) -> bool:
        return self.on_hub and self.where.lower().endswith("-gguf")

    def _not_found(self, error: Exception) -> ModelNotFoundError:
        if not self.on_hub:
            return ModelNotFoundError(
                f"{self.where} holds no model for transformers ({_reason(error)}); give a folder "
                "that save_pretrained has written"
            )
        if self._holds_gguf:
            return ModelNotFoundError(
                f"{self.where} by its name holds GGUF files ({_reason(error)}); fetch one of them "
                "and give its path"
            )
        return ModelNotFoundError(
            f"{self.where} is neither here nor on the hub ({_reason(error)}); check the name and "
            "the network and try again, or fetch the model by other means and give its folder"
        )


@contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """Let transformers draw its progress bars on terminals only, as the hub's library does."""

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        settings = {"disable": None, **settings}  # which is tqdm's own test for a terminal
        return before(factory, args, settings) if before else factory(*args, **settings)

    before = transformers_logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def _looks_like_hub_name(name: str) -> bool:
    return not name.startswith(("~", ".", "/")) and name.count("/") <= 1


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
