"""Which engine runs a model that is named by a string, and the engines that are loaded.

model.gguf, a known name        llama.cpp
folder/, org/name, hf://...     transformers: a folder, a name on the hub, or either (or a GGUF
                                file) with the scheme in front
openai://host:port/model        an OpenAI-compatible server over http
openais://host:port/model       the same over https
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import SecretStr

from specguard_chains.decoding.engine import Engine
from specguard_chains.errors import ConfigurationError
from specguard_chains.models import FILES, ModelFile, Progress, resolve

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
Kind = Literal["llama.cpp", "transformers", "openai"]
Reference = str | os.PathLike[str] | ModelFile
"""What names a model that is not loaded yet."""
DEFAULT_N_CTX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How a model is loaded; each engine takes what concerns it."""

    n_ctx: int | None
    """Context length; None lets the engine or the server decide."""
    n_threads: int | None
    n_gpu_layers: int
    max_candidates: int
    candidate_tokens: int
    attention: bool
    attention_layers: int
    states: bool
    api_key: SecretStr | None
    max_retries: int
    max_parallel: int
    prompt_cache: str | None
    prompt_cache_gib: float


def kind_of(model: Reference) -> Kind:
    """Return which engine runs a model.

    Raises:
        ConfigurationError: The name is a URL of another scheme.
    """
    if isinstance(model, ModelFile):
        return "llama.cpp"
    name = os.fspath(model)
    scheme, is_url, _ = name.partition("://")
    if is_url:
        if scheme.lower() in ("openai", "openais"):
            return "openai"
        if scheme.lower() == "hf":
            return "transformers"
        shown = re.sub(r"(?<=//)[^/]*@", "…@", name)  # there may be a password in it
        raise ConfigurationError(
            f"{shown} is no model; write openai://host:port/model for one on a server (openais:// "
            "over TLS), or hf://name for one that transformers runs"
        )
    path = Path(name).expanduser()
    if path.is_dir():
        return "transformers"
    is_file = name.endswith(".gguf") or path.exists()
    return "transformers" if HUB_NAME.fullmatch(name) and not is_file else "llama.cpp"


def same_model(one: Reference, other: Reference) -> bool:
    """Whether two references name one model, however they are spelled."""
    return _identity(one) == _identity(other)


def name_of(model: Reference) -> str:
    """Return the name that the engine of a model has which this process runs."""
    if isinstance(model, ModelFile):
        return Path(model.file).stem
    if (name := _name(model)) in FILES:
        return Path(FILES[name].file).stem
    path = Path(name).absolute()
    is_file = kind_of(model) == "llama.cpp" or path.suffix == ".gguf"
    return path.stem if is_file else path.name


def load(model: Reference, settings: EngineSettings, progress: Progress) -> Engine:
    """Return the engine of a model: the one that the process has with these settings, or a new one.

    Raises:
        SpecGuardError: The model cannot be found, fetched or loaded, or the server not be reached.
    """
    kind = kind_of(model)
    name = _name(model) if kind != "llama.cpp" else resolve(model, progress=progress).absolute()
    arguments = _arguments(kind, settings)
    key = (kind, name, *arguments.items())
    with _loading:
        if key not in _engines:
            _engines[key] = _LOADERS[kind](name, arguments)
        return _engines[key]


def unload() -> None:
    """Free every model that this process has loaded."""
    with _loading:
        while _engines:
            _engines.popitem()[1].close()


def _arguments(kind: Kind, settings: EngineSettings) -> dict[str, Any]:
    """Return the settings that an engine takes, by its own names."""
    if kind == "openai":
        return {
            "context_length": settings.n_ctx,
            "max_candidates": settings.max_candidates,
            "api_key": settings.api_key,
            "max_retries": settings.max_retries,
            "max_parallel": settings.max_parallel,
        }
    arguments = {
        "n_ctx": settings.n_ctx or DEFAULT_N_CTX,
        "n_threads": settings.n_threads,
        "max_candidates": settings.max_candidates,
        "candidate_tokens": settings.candidate_tokens,
        "attention": settings.attention,
        "attention_layers": settings.attention_layers,
        "states": settings.states,
        "max_parallel": settings.max_parallel,
        "prompt_cache": settings.prompt_cache,
        "prompt_cache_gib": settings.prompt_cache_gib,
    }
    return arguments | ({"n_gpu_layers": settings.n_gpu_layers} if kind == "llama.cpp" else {})


def _identity(model: Reference) -> tuple[Kind, str | Path]:
    kind = kind_of(model)
    if isinstance(model, ModelFile):
        return kind, model.name
    name = _name(model)
    if kind == "openai" or name in FILES or not Path(name).exists():
        return kind, name
    return kind, Path(name).resolve()


def _name(model: Reference) -> str:
    """Return a model's name or path, without a scheme that only says which engine runs it."""
    assert not isinstance(model, ModelFile)
    name = os.fspath(model)
    name = name[len("hf://") :] if name.lower().startswith("hf://") else name
    return name if "://" in name else os.path.expanduser(name)


def _load_gguf(path: str | Path, arguments: dict[str, Any]) -> Engine:
    from specguard_chains.adapters import LlamaCppEngine

    return LlamaCppEngine(path, **arguments)


def _load_transformers(name: str | Path, arguments: dict[str, Any]) -> Engine:
    from specguard_chains.adapters import HuggingFaceEngine

    return HuggingFaceEngine(str(name), **arguments)


def _connect(url: str | Path, arguments: dict[str, Any]) -> Engine:
    from specguard_chains.adapters import OpenAIEngine

    return OpenAIEngine.from_url(str(url), **arguments)


_LOADERS: dict[Kind, Callable[[str | Path, dict[str, Any]], Engine]] = {
    "llama.cpp": _load_gguf,
    "transformers": _load_transformers,
    "openai": _connect,
}
_engines: dict[tuple[Any, ...], Engine] = {}
_loading = threading.Lock()
