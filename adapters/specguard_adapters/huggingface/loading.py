"""Where a model of transformers comes from: the hub, a folder, a GGUF file, or the caller."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specguard_adapters.huggingface.sharing import key_of, shared
from specguard_adapters.huggingface.source import Source
from specguard_chains.errors import ConfigurationError

LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers whose past is keys and values of single tokens."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its tokenizer."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    origin: tuple[Any, ...] | None
    """What tells it from others; None for a model that was given loaded."""


def load(
    model: str | os.PathLike[str] | PreTrainedModel,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None,
    device: str | torch.device | None,
    options: dict[str, Any],
    *,
    local_files_only: bool,
) -> Loaded:
    """Return a model that is ready to compute, shared with whoever has loaded it in the same way.

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
        given = {**options, "device": device}
        return _ready(model, tokenizer, {key: value for key, value in given.items() if value})
    if device is not None and "device_map" in options:
        raise ConfigurationError(f"device={device!r} and device_map contradict; give one of them")
    source = Source.of(model, local_files_only=local_files_only)
    loaded_tokenizer = _tokenizer(tokenizer, source, _hub_options(options))
    if device is None and "device_map" not in options and torch.cuda.is_available():
        device = "cuda"
    key = ("model", *source.state(), key_of({"device": device or "cpu", **options}))
    loaded = shared(key, lambda: _model(source, device, options))
    origin = (*source.state(), getattr(loaded.config, "_commit_hash", None))
    return Loaded(source.name, loaded, loaded_tokenizer, origin)


def _model(
    source: Source, device: str | torch.device | None, options: dict[str, Any]
) -> PreTrainedModel:
    config = source.fetch(transformers.AutoConfig, _hub_options(options))
    refuse(config, source.name)
    quantised = getattr(config, "quantization_config", None) or "quantization_config" in options
    if device is not None and quantised and source.file is None:
        # Such models cannot be moved later.
        options, device = {**options, "device_map": {"": device}}, None
    options = {**options, "config": config}
    model: PreTrainedModel = source.fetch(transformers.AutoModelForCausalLM, options)
    return (model if device is None else model.to(device)).eval()


def _tokenizer(
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None,
    source: Source,
    options: dict[str, Any],
) -> Any:
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if tokenizer is not None:
        source = Source.of(tokenizer, local_files_only=source.local_files_only)
        options = {k: v for k, v in options.items() if k != "revision"}  # that is the model's
    key = ("tokenizer", *source.state(), key_of(options))
    return shared(key, lambda: source.fetch(transformers.AutoTokenizer, options))


def _hub_options(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k in ("revision", "trust_remote_code")}


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
    return Loaded(name, model.eval(), tokenizer, None)
