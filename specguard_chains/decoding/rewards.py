"""What a step is worth: how likely it leads to a right answer.

A reward model reads the text (reward-guided decoding, RSD, arXiv 2501.19324, uses a process reward
model). A value head reads a hidden state that the draft has computed anyway: logistic regression on
the state at the step's end, trained on whether whole solutions were right (outcome supervision,
OVM, arXiv 2311.09724). It costs a dot product a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from specguard_chains.decoding.engine import Candidate, Prompt, Reading
from specguard_chains.errors import CalibrationError, ConfigurationError, StatesUnavailableError

if TYPE_CHECKING:
    from specguard_chains.decoding.verification import Situation


class RewardModel(Protocol):
    """A model, or any function, that reads a conversation and the steps of its answer.

    Requests that run at the same time, and the answers of a vote, may call it at the same time.
    """

    def __call__(self, messages: Sequence[Mapping[str, Any]], steps: Sequence[str]) -> float:
        """Return the reward of the newest step, in [0, 1]."""
        ...


class Reward(Protocol):
    """Rates a drafted step, from whatever it needs."""

    @property
    def state_layer(self) -> int | None:
        """The layer of the draft whose hidden state it needs, None if it needs none."""
        ...

    @property
    def asks_others(self) -> bool:
        """See `Verifier.asks_others`."""
        ...

    def rate(self, candidate: Candidate, reading: Reading, situation: Situation) -> float:
        """Return the step's reward, in [0, 1]."""
        ...


@dataclass(frozen=True, slots=True)
class TextReward:
    """The reward that a model gives which reads the text."""

    model: RewardModel
    asks_others: bool = True
    """See `Verifier.asks_others`."""

    @property
    def state_layer(self) -> int | None:
        """See `Reward.state_layer`."""
        return None

    def rate(self, candidate: Candidate, reading: Reading, situation: Situation) -> float:
        """See `Reward.rate`."""
        return self.value(situation.request.prompt, [*situation.steps, candidate.text])

    def check(self, prompt: Prompt) -> None:
        """Refuse a prompt whose answers cannot be rated.

        Raises:
            ConfigurationError: It is bare text.
        """
        if prompt.text is not None:
            raise ConfigurationError(
                f"the reward model {self._name} needs messages, and this prompt is bare text; use "
                "the chat model, or a value head"
            )

    def value(self, prompt: Prompt, steps: Sequence[str]) -> float:
        """Return the reward of the last of an answer's steps, in [0, 1].

        Raises:
            ConfigurationError: The prompt is bare text, or the model returns something else.
        """
        self.check(prompt)
        reward = self.model(prompt.messages, steps)
        try:
            value = float(reward)
        except (TypeError, ValueError):
            value = nan
        if not 0 <= value <= 1:
            raise ConfigurationError(
                f"the reward model {self._name} must return a number from 0 to 1, not {reward!r}"
            )
        return value

    @property
    def _name(self) -> str:
        named = getattr(self.model, "name", None) or getattr(self.model, "__name__", None)
        return str(named or type(self.model).__name__)


class ValueHead(BaseModel):
    """Logistic regression on the draft's hidden state at a step's end."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    draft: str
    """Name of the model whose states it was trained on."""
    layer: int = Field(ge=0)
    """States that leave this layer, counted from 0."""
    weights: tuple[float, ...] = Field(min_length=1)
    bias: float
    training: dict[str, Any] = {}
    """What it was trained on, and how well it did on problems that it had not seen."""

    @property
    def state_layer(self) -> int | None:
        """See `Reward.state_layer`."""
        return self.layer

    @property
    def asks_others(self) -> bool:
        """See `Verifier.asks_others`."""
        return False

    @property
    def digest(self) -> str:
        """What tells it from other heads, of whatever name."""
        return sha256(self.model_dump_json().encode()).hexdigest()[:12]

    def rate(self, candidate: Candidate, reading: Reading, situation: Situation) -> float:
        """See `Reward.rate`."""
        return self.value(reading)

    def value(self, reading: Reading) -> float:
        """Return the estimated probability that the answer will be right.

        Raises:
            StatesUnavailableError: The reading has no hidden state, or one of another model.
        """
        state = reading.state
        if state is None or state.shape != (len(self.weights),):
            width = "none" if state is None else f"one of {state.size} numbers"
            raise StatesUnavailableError(
                f"the value head of {self.draft} needs a hidden state of {len(self.weights)} "
                f"numbers, and the draft gives {width}; train one with `specguard train-reward`"
            )
        logit = float(np.dot(state, np.asarray(self.weights, dtype=np.float32))) + self.bias
        return float(1 / (1 + np.exp(-np.clip(logit, -60, 60))))

    @classmethod
    def load(cls, path: Path) -> ValueHead:
        """Read a value head's file."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CalibrationError(
                f"cannot read the value head {path}: {error}; write it anew with "
                "`specguard train-reward`"
            ) from error

    def save(self, path: Path) -> None:
        """Write a value head's file."""
        path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
