"""Where a model of transformers comes from: the hub, a folder, a GGUF file, or the caller."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
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
LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers whose past is keys and values of single tokens."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its tokenizer."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load(
    model: str | os.PathLike[str] | PreTrainedModel,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None,
    device: str | torch.device | None,
    options: dict[str, Any],
    *,
    local_files_only: bool,
) -> Loaded:
    """Return a model that is ready to compute.

    Args:
        model: A name on the hub, a folder, a GGUF file, or a model.
        tokenizer: The same for the tokenizer; None takes the model's own.
        device: Where to put the model; None lets `device_map` decide, or takes a GPU if there is
            one.
        options: For `from_pretrained`; None leaves an option out.
        local_files_only: Never ask the hub.

    Raises:
        ModelNotFoundError: The model is neither here nor obtainable.
        ModelIntegrityError: Its files are damaged.
        ConfigurationError: The model is of a kind that cannot be used, or a value is unsuitable.
        EngineError: transformers cannot load it.
    """
    options = {key: value for key, value in options.items() if value is not None}
    if isinstance(model, PreTrainedModel):
        return _ready(model, tokenizer, {**options, **({"device": device} if device else {})})
    if device is not None and "device_map" in options:
        raise ConfigurationError(f"device={device!r} and device_map contradict; give one of them")
    source = _Source.of(model, local_files_only=local_files_only)
    hub_options = {k: v for k, v in options.items() if k in ("revision", "trust_remote_code")}
    loaded_tokenizer = _tokenizer(tokenizer, source, hub_options)
    config = source.fetch(transformers.AutoConfig, hub_options)
    refuse(config, source.name)
    if device is None and "device_map" not in options and torch.cuda.is_available():
        device = "cuda"
    quantised = getattr(config, "quantization_config", None) or "quantization_config" in options
    if device is not None and quantised and source.file is None:
        options["device_map"], device = {"": device}, None  # such models cannot be moved later
    loaded = source.fetch(transformers.AutoModelForCausalLM, {**options, "config": config})
    if device is not None:
        loaded = loaded.to(device)
    return Loaded(source.name, loaded.eval(), loaded_tokenizer)


def _tokenizer(
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None,
    source: _Source,
    options: dict[str, Any],
) -> Any:
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if tokenizer is None:
        return source.fetch(transformers.AutoTokenizer, options)
    other = _Source.of(tokenizer, local_files_only=source.local_files_only)
    own_options = {k: v for k, v in options.items() if k != "revision"}  # that is the model's
    return other.fetch(transformers.AutoTokenizer, own_options)


def refuse(config: Any, name: str) -> None:
    """Raise if a model of this kind cannot continue text and take a step back.

    Raises:
        ConfigurationError: It cannot; the message says why.
    """
    if obstacle := _obstacle(config):
        raise ConfigurationError(
            f"{name} cannot be used: the model {obstacle}; take a causal transformer"
        )


def _obstacle(config: Any) -> str | None:
    if config.is_encoder_decoder:
        return "has an encoder"
    classes = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    known = classes.get(type(config), None)
    text = config.get_text_config(decoder=True)
    odd = set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES
    if getattr(known, "_is_stateful", False) or odd:
        kinds = f" (layers of the kind {', '.join(sorted(odd))})" if odd else ""
        return f"is recurrent{kinds}, so that a rejected step cannot be taken back"
    if getattr(text, "is_decoder", None) is False and not getattr(text, "is_causal", True):
        return "reads in both directions"
    return None


@dataclass(frozen=True, slots=True)
class _Source:
    """A place that models are read from."""

    name: str
    where: str
    file: str | None
    on_hub: bool
    local_files_only: bool

    @classmethod
    def of(cls, place: str | os.PathLike[str], *, local_files_only: bool) -> _Source:
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

    def fetch(self, kind: Any, options: dict[str, Any]) -> Any:
        """Return what `kind.from_pretrained` gives, from here if possible."""

        def fetch(*, local: bool) -> Any:
            file = {"gguf_file": self.file} if self.file else {}
            with _quiet():
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

    def _not_found(self, error: Exception) -> ModelNotFoundError:
        if not self.on_hub:
            return ModelNotFoundError(
                f"{self.where} holds no model for transformers ({_reason(error)}); give a folder "
                "that save_pretrained has written"
            )
        return ModelNotFoundError(
            f"{self.where} is neither here nor on the hub ({_reason(error)}); check the name and "
            "the network and try again, or fetch the model by other means and give its folder"
        )


def _ready(model: PreTrainedModel, tokenizer: Any, options: dict[str, Any]) -> Loaded:
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigurationError("a model that is already loaded needs its tokenizer; give both")
    if options:
        raise ConfigurationError(
            f"{', '.join(options)} belong to loading, and the model is loaded already; leave "
            "them out"
        )
    name = Path(model.name_or_path).name.removesuffix(".gguf") or type(model).__name__
    refuse(model.config, name)
    return Loaded(name, model.eval(), tokenizer)


@contextmanager
def _quiet() -> Iterator[None]:
    """Let transformers load without progress bars."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _looks_like_hub_name(name: str) -> bool:
    return not name.startswith(("~", ".", "/")) and name.count("/") <= 1


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
