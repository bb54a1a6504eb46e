"""One call of a model: the decoder that its options describe, and the answer's steps.

What the chat model and every other LangChain class share, without LangChain.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import randbits
from time import monotonic
from typing import Any

from specguard_chains import assembly, background
from specguard_chains.assembly import assemble
from specguard_chains.decoding.boundaries import Section
from specguard_chains.decoding.constraint import Constraint
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.engine import Engine, Prompt
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.steps import Step
from specguard_chains.errors import ConfigurationError, DecodingCancelled, DecodingTimeoutError
from specguard_chains.hooks import NO_HOOKS, Hooks
from specguard_chains.metrics import Metrics
from specguard_chains.options import SpecGuardOptions

OF_THE_REQUEST = frozenset(
    {
        "critical_steps",
        "max_queue",
        "max_tokens",
        "schema_instruction",
        "seed",
        "stop",
        "tool_instruction",
    }
)
"""Options that no decoder is assembled by."""


class Assembled:
    """The decoder that was used last. Copies and pickles of it are empty: weights stay here."""

    def __init__(self) -> None:
        """Start without one: weights are loaded when they are first used."""
        self._latest: tuple[dict[str, Any], Decoder] | None = None
        self._assembling = threading.Lock()

    def decoder(self, options: SpecGuardOptions) -> Decoder:
        """Return the decoder that the options describe."""
        key = {
            name: id(value) if isinstance(value, Engine) else value
            for name in SpecGuardOptions.model_fields.keys() - OF_THE_REQUEST
            for value in [getattr(options, name)]
        } | {"generation": assembly.generation}
        with self._assembling:  # one decoder for all threads: it may keep an account of seconds
            if self._latest is None or self._latest[0] != key:
                self._latest = key, assemble(options)
            return self._latest[1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Assembled)  # models are equal by their settings

    def __reduce__(self) -> tuple[type[Assembled], tuple[()]]:
        return Assembled, ()


@dataclass(frozen=True, slots=True)
class Call:
    """A request to a decoder, ready to be answered."""

    decoder: Decoder
    request: Request
    model_name: str
    timeout_s: float | None = None

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        prompt: Prompt,
        options: SpecGuardOptions,
        *,
        timeout_s: float | None = None,
        constraint: Constraint | None = None,
        sections: tuple[Section, ...] = (),
        opened: Section | None = None,
        hooks: Hooks = NO_HOOKS,
    ) -> Call:
        """Return the call of a prompt; a seed is drawn if the options have none."""
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigurationError(f"timeout must be more than 0 seconds, not {timeout_s}")
        request = Request(
            prompt,
            options.sampling(),
            max_tokens=options.max_tokens,
            stop=tuple(options.stop or ()),
            seed=randbits(32) if options.seed is None else options.seed,
            constraint=constraint,
            sections=sections,
            opened=opened,
            critical_steps=options.critical_steps,
            stop_when=hooks.stop_when,
            review=hooks.review,
            max_waiting=options.max_queue,
        )
        return cls(decoder, request, model_name(options), timeout_s)

    @property
    def input_tokens(self) -> int:
        """Tokens of the prompt, by the tokenizer of the target if there is one."""
        return len(counting_engine(self.decoder).encode(self.request.prompt))

    def steps(self) -> Generator[Step]:
        """Yield the answer's steps."""
        with self._timed() as request:
            yield from background.run(self.decoder, request)

    async def asteps(self) -> AsyncGenerator[Step]:
        """Yield the answer's steps."""
        with self._timed() as request:
            async with aclosing(background.arun(self.decoder, request)) as steps:
                async for step in steps:
                    yield step

    def metadata(self, steps: Sequence[Step]) -> dict[str, Any]:
        """Return what is to be known about the complete answer, as plain values."""
        verifier = getattr(self.decoder, "verifier", None)
        calibration = getattr(verifier, "calibration", None)
        return {
            "model_name": self.model_name,
            "model_provider": "specguard",
            "finish_reason": str(steps[-1].finish_reason),
            "seed": self.request.seed,
            "specguard": {
                "constrained": self.request.constraint is not None,
                **Metrics.of(steps).to_dict(),
                "calibrated": calibration and calibration.source == "calibrated",
                "confidence_weight": getattr(verifier, "confidence_weight", None),
                **signal_sources(self.decoder),
            },
        }

    @contextmanager
    def _timed(self) -> Iterator[Request]:
        """Give the request its deadline."""
        if self.timeout_s is None:
            yield self.request
            return
        deadline = monotonic() + self.timeout_s
        late = threading.Event()

        def is_late() -> bool:
            if monotonic() >= deadline:
                late.set()
            return late.is_set()

        try:
            yield replace(self.request, cancelled=is_late)
        except DecodingCancelled as error:
            if not late.is_set():  # the caller has stopped it
                raise
            raise DecodingTimeoutError(
                f"the answer took longer than timeout={self.timeout_s:g} s, waiting for its turn "
                "included; raise timeout or lower max_tokens"
            ) from error


def signal_sources(decoder: Decoder) -> dict[str, str | None]:
    """Return which model's signals decide on steps; None where a signal does not."""
    sources: dict[str, str | None] = {"confidence_from": None, "grounding_from": None}
    if not isinstance(decoder, SpecGuardDecoder):
        return sources
    if decoder.verifier.needs_confidence:
        sources["confidence_from"] = decoder.verify_with
    if decoder.verifier.needs_grounding:
        sources["grounding_from"] = decoder.reader
    return sources


def counting_engine(decoder: Decoder) -> Engine:
    """Return the engine by whose tokenizer prompts are counted: the target, if there is one."""
    return decoder.engines[-1]


def model_name(options: SpecGuardOptions) -> str:
    """Return the name of what answers: the pair, or the models that were given in its place."""
    roles = options.roles
    models = [getattr(options, role) for role in roles]
    if len(models) == 2 and models == [None, None]:
        return options.pair
    return " + ".join(
        f"{options.pair}:{role}" if model is None else _label(model)
        for role, model in zip(roles, models, strict=True)
    )


def identity(value: Any) -> Any:
    """Return an option's value in a form that differs whenever answers may differ."""
    if isinstance(value, Engine):
        return f"{value.name} ({value.context_length} tokens, {value.vocabulary}) at {id(value):#x}"
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _label(model: Any) -> str:
    if isinstance(model, str | os.PathLike):
        return Path(model).name
    return str(getattr(model, "name", model))
