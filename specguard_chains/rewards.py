"""From the option `reward_model` to what rates steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from specguard_chains import value_heads
from specguard_chains.decoding.rewards import Reward, TextReward, ValueHead
from specguard_chains.errors import ConfigurationError
from specguard_chains.loaded import Loaded
from specguard_chains.options import SpecGuardOptions

if TYPE_CHECKING:
    from specguard_chains.adapters import ProcessRewardModel


def is_text_reward(options: SpecGuardOptions) -> bool:
    """Whether the options name a reward model that reads text, and no value head."""
    model = options.reward_model
    if model is None or isinstance(model, ValueHead):
        return False
    return not (isinstance(model, str | os.PathLike) and os.fspath(model).endswith(".json"))


def is_value_head(options: SpecGuardOptions, writer: str) -> bool:
    """Whether a value head rates the steps of a writer: one that is named, or known for it."""
    if options.reward_model is None:
        return value_heads.find(writer) is not None
    return not is_text_reward(options)


def reward(options: SpecGuardOptions, writer: str) -> Reward | None:
    """Return what rates the steps of a writer; None if nothing is named or known for it.

    Raises:
        SpecGuardError: What is named cannot be found or loaded, or is another model's value head.
    """
    model = options.reward_model
    if model is None:
        known = value_heads.find(writer)
        return None if known is None else _checked(known, writer)
    if isinstance(model, ValueHead):
        return _checked(model, writer)
    if isinstance(model, str | os.PathLike):
        name = os.fspath(model)
        if not is_text_reward(options):
            return _checked(ValueHead.load(Path(name).expanduser()), writer)
        return TextReward(_models.get(name))
    if callable(model):
        return TextReward(model)
    raise ConfigurationError(
        "reward_model must be a value head's file (.json), a process reward model's name or "
        f"folder, or a function of messages and steps, not {type(model).__name__}"
    )


def required_reward(options: SpecGuardOptions, writer: str) -> Reward:
    """Return what rates the steps of a writer.

    Raises:
        ConfigurationError: There is nothing.
    """
    found = reward(options, writer)
    if found is None:
        raise ConfigurationError(
            f"no value head of {writer} is known, and decoder={options.decoder!r} needs one; "
            "train one with `specguard train-reward`, or name a reward_model"
        )
    return found


def value_head(options: SpecGuardOptions, writer: str) -> ValueHead | None:
    """Return the writer's value head, if it has any weight.

    Raises:
        ConfigurationError: There is none, or the reward model that is named is no value head.
    """
    if not options.value_weight:
        return None
    found = required_reward(options, writer)
    if not isinstance(found, ValueHead):
        raise ConfigurationError(
            "value_weight needs a value head, and reward_model names a model that reads text; "
            "take decoder='rsd' for that one, or set value_weight=0"
        )
    return found


def _checked(head: ValueHead, writer: str) -> ValueHead:
    """Refuse another model's value head: states of the same width would give it any value."""
    if head.draft != writer:
        raise ConfigurationError(
            f"the value head is of {head.draft}, and the steps are written by {writer}; train one "
            "with `specguard train-reward`, or, if that is the same model by another name, give "
            'this name as "draft" in the file'
        )
    return head


def forget(options: SpecGuardOptions) -> None:
    """Let the reward model that the options name read all anew next time, if it is loaded."""
    model = options.reward_model
    if isinstance(model, str | os.PathLike):
        model = _models.peek(os.fspath(model))
    clear = getattr(model, "clear", None)
    if callable(clear):
        clear()


def unload() -> None:
    """Free the process reward models that this process has loaded by name."""
    _models.unload()


def _load(name: str) -> ProcessRewardModel:
    from specguard_chains.adapters import ProcessRewardModel

    return ProcessRewardModel(name)


_models = Loaded(_load)
