"""Where a reward model comes from: the hub or a folder; and of which kind it is."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specguard_adapters.huggingface.loading import refuse
from specguard_adapters.huggingface.source import Source
from specguard_adapters.reward.heads import class_with_head
from specguard_adapters.reward.kinds import KINDS, Head, RewardKind, Scale, detect, kind_called
from specguard_chains.errors import ConfigurationError

_CLASSIFIERS = ("ForSequenceClassification", transformers.AutoModelForSequenceClassification)


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A reward model, ready to compute, with its tokenizer."""

    name: str
    kind: RewardKind
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load(
    model: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] | None,
    kind: str | RewardKind | None,
    *,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    revision: str | None,
    trust_remote_code: bool,
    local_files_only: bool,
) -> LoadedReward:
    """Return a reward model; see `ProcessRewardModel` for what is given and raised."""
    source = Source.of(model, local_files_only=local_files_only)
    # None would make the library ask on the terminal.
    hub = {"trust_remote_code": trust_remote_code}
    pinned = hub | ({"revision": revision} if revision else {})
    config = source.fetch(transformers.AutoConfig, pinned)
    refuse(config, source.name)
    found = _kind(kind, config, source.name)
    if trust_remote_code and _code(config):
        found = replace(found, head=Head.OWN)
    elif found.head is Head.OWN:
        raise _without_code(config, source.name)
    options = pinned | ({"dtype": dtype} if dtype is not None else {})
    loaded = _model(source, config, found, options)
    if tokenizer is None:
        words = source.fetch(transformers.AutoTokenizer, pinned)
    else:
        other = Source.of(tokenizer, local_files_only=local_files_only)
        words = other.fetch(transformers.AutoTokenizer, hub)
    if device is None and torch.cuda.is_available():
        device = "cuda"
    return LoadedReward(source.name, found, loaded.to(device or "cpu").eval(), words)


def _kind(kind: str | RewardKind | None, config: Any, name: str) -> RewardKind:
    if isinstance(kind, RewardKind):
        return kind
    if kind is not None:
        return kind_called(kind)
    architectures = config.architectures or []
    found = detect(name, architectures, config.num_labels)
    if found is not None:
        return found
    own = _code(config)
    remedy = f"give kind=, one of {', '.join(KINDS)}, or a RewardKind"
    if own:
        remedy += "; or read the code that comes with it, and give trust_remote_code=True too"
    raise ConfigurationError(
        f"{name} is no reward model of a known kind (its architecture is "
        f"{', '.join(architectures) or 'not named'}); {remedy}"
    )


def _code(config: Any) -> dict[str, str]:
    """Return the classes that come with a model."""
    return {k: v for k, v in (getattr(config, "auto_map", None) or {}).items() if "Model" in k}


def _without_code(config: Any, name: str) -> ConfigurationError:
    if _code(config):
        return ConfigurationError(
            f"the reward kind's head is 'own'; read the code that comes with {name}, and give "
            "trust_remote_code=True if you trust it"
        )
    return ConfigurationError(
        f"the reward kind's head is 'own', and no code comes with {name}; give another kind"
    )


def _model(source: Source, config: Any, kind: RewardKind, options: dict[str, Any]) -> Any:
    if kind.head is Head.SCORE and config.num_labels != kind.size:
        raise ConfigurationError(
            f"{source.name} gives {config.num_labels} numbers a token, and scale="
            f"{str(kind.scale)!r} needs {kind.size}; give a RewardKind with another scale"
        )
    model, report = source.fetch(
        _class(config, kind, source.name),
        {**options, "config": config, "output_loading_info": True},
    )
    if missing := sorted(report["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigurationError(
            f"{source.name} has no weights {missing[0]!r}{more}, so it is no reward model of the "
            f"kind {kind.name!r}; give another model or kind"
        )
    return model


def _class(config: Any, kind: RewardKind, name: str) -> Any:
    architectures = config.architectures or []
    match kind.head:
        case Head.LANGUAGE:
            return transformers.AutoModelForCausalLM
        case Head.SCORE:
            ending, sequences = _CLASSIFIERS
            if any(architecture.endswith(ending) for architecture in architectures):
                return sequences
            return transformers.AutoModelForTokenClassification
        case Head.OWN:
            wanted = "AutoModelForCausalLM" if kind.scale is Scale.TOKENS else None
            for auto in _code(config):
                if hasattr(transformers, auto) and auto == (wanted or auto):
                    return getattr(transformers, auto)
            raise ConfigurationError(
                f"the code that comes with {name} has no {wanted or 'AutoModel'}, which the "
                f"reward kind {kind.name!r} needs; give another kind"
            )
    return class_with_head(config, kind.head, kind.size)
