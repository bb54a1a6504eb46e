"""The one interface of all decoders: a request goes in, verified steps come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from specguard_chains.decoding.boundaries import Section
from specguard_chains.decoding.constraint import Constraint
from specguard_chains.decoding.engine import Engine, Prompt, Session
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.steps import Review, Step
from specguard_chains.errors import ConfigurationError

CriticalSteps = Literal["verify", "target"]


@dataclass(frozen=True, slots=True)
class Request:
    """What one answer is asked for."""

    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    """Most tokens of the answer; None lets the context decide."""
    stop: tuple[str, ...] = ()
    """The answer is cut before the first of these strings."""
    seed: int = 0
    cancelled: Callable[[], bool] | None = None
    """Asked at every token; True ends the decoding with DecodingCancelled."""
    constraint: Constraint | None = None
    """What the answer may look like."""
    sections: tuple[Section, ...] = ()
    """Parts that the answer may have, each with steps of its own."""
    opened: Section | None = None
    """The one in which it begins."""
    critical_steps: CriticalSteps = "verify"
    """Whether tool calls and the final answer may come from a draft, or are the target's."""
    stop_when: Callable[[Step], bool] | None = None
    """Asked after every step; True ends the answer with it."""
    review: Callable[[Step], Review] | None = None
    """Asked before a step becomes part of the answer, whoever wrote it."""
    max_reviews: int = 3
    """So many versions of a step are shown to the reviewer; the last one is kept in any case."""
    max_waiting: int | None = None
    """So many other requests may wait for the same engine."""

    def __post_init__(self) -> None:
        """Validate."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigurationError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ConfigurationError(
                f"stop must be a sequence of strings that are not empty, not {self.stop!r}"
            )
        for name, least in (("seed", 0), ("max_reviews", 1), ("max_waiting", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigurationError(f"{name} must be {least} or more, not {value}")

    def open(
        self,
        engine: Engine,
        grounding: GroundingSpec | None = None,
        state_layer: int | None = None,
    ) -> Session:
        """Open a session with the prompt, held to the request's constraint.

        Raises:
            ConfigurationError: The engine cannot hold a session to a constraint.
        """
        if self.constraint is not None and not engine.capabilities.constraints:
            raise ConfigurationError(
                f"{engine.name} cannot be held to a grammar, which structured output and required "
                "tool calls need; take models that run in this process, or tool_choice='auto'"
            )
        return engine.open(
            self.prompt,
            grounding=grounding,
            cancelled=self.cancelled,
            constraint=self.constraint,
            state_layer=state_layer,
        )


class Decoder(Protocol):
    """Writes an answer step by step."""

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines that it needs, each once; by the last one's tokenizer prompts are counted."""
        ...

    @property
    def asks_others(self) -> bool:
        """Whether it waits for what is none of its engines, see `Verifier.asks_others`."""
        ...

    def decode(self, request: Request) -> Iterator[Step]:
        """Yield steps until the answer is complete; the last one has a finish_reason.

        The caller holds the engines (`Engine.exclusive`) until the iterator is closed.

        Raises:
            ContextOverflowError: Prompt and max_tokens do not fit into a model's context.
            DecodingCancelled: The request was cancelled.
        """
        ...
