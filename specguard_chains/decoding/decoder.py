"""The one interface of all decoders: a request goes in, verified steps come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from specguard_chains.decoding.engine import Engine, Prompt
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.steps import Step
from specguard_chains.errors import ConfigurationError


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

    def __post_init__(self) -> None:
        """Validate."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigurationError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ConfigurationError(
                f"stop must be a sequence of strings that are not empty, not {self.stop!r}"
            )
        if self.seed < 0:
            raise ConfigurationError(f"seed must be 0 or more, not {self.seed}")


class Decoder(Protocol):
    """Writes an answer step by step."""

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines that it needs, each once; by the last one's tokenizer prompts are counted."""
        ...

    def decode(self, request: Request) -> Iterator[Step]:
        """Yield steps until the answer is complete; the last one has a finish_reason.

        The caller holds the engines (`Engine.exclusive`) until the iterator is closed.

        Raises:
            ContextOverflowError: Prompt and max_tokens do not fit into a model's context.
            DecodingCancelled: The request was cancelled.
        """
        ...
