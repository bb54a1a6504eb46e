"""Several whole answers, of which one is given: majority vote and best of n."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from math import inf
from typing import TypeVar

import numpy as np

from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.engine import Engine
from specguard_chains.decoding.final_answer import canonical_answer, final_answer
from specguard_chains.decoding.side_by_side import Cancelled, side_by_side
from specguard_chains.decoding.steps import Step, StepSeconds, StepTokens
from specguard_chains.errors import ConfigurationError

Choose = Callable[[Sequence[Sequence[Step]]], int]
"""Answers, each as its steps -> the index of the one to give."""
Cost = TypeVar("Cost", StepTokens, StepSeconds)


def majority(answers: Sequence[Sequence[Step]]) -> int:
    """Return the first answer with the final answer that most have; an earlier one among equals.

    Final answers that say the same in other words are one (`canonical_answer`). Answers without a
    final answer have no vote unless none has one.
    """
    finals = [final_answer("".join(step.text for step in steps)) for steps in answers]
    said = [None if final is None else canonical_answer(final) for final in finals]
    votes = Counter(final for final in said if final is not None)
    return said.index(votes.most_common(1)[0][0]) if votes else 0


def best_value(answers: Sequence[Sequence[Step]]) -> int:
    """Return the answer whose last step has the highest value (reward model or value head)."""
    return int(np.argmax([_known(steps[-1].value) for steps in answers]))


def best_confidence(answers: Sequence[Sequence[Step]]) -> int:
    """Return the answer whose least confident step is the most confident."""
    return int(np.argmax([min(_known(step.confidence) for step in steps) for steps in answers]))


@dataclass(frozen=True, slots=True)
class VotingDecoder:
    """Writes n answers with different seeds and gives one of them.

    Its steps come when all answers are complete. The first one carries what the others have cost;
    everything else that steps tell is about the answer that is given.

    Where the engines admit several requests at a time, answers are written side by side on places
    that no other request needs. They are the same; their seconds add up to more than have passed.

    Of a request, `max_tokens` holds for each answer. Its reviewer and `stop_when` are asked about
    the steps of every answer, as they are written, and so one answer after the other: what they say
    shapes or ends that answer alone.
    """

    decoder: Decoder
    num_samples: int
    choose: Choose

    def __post_init__(self) -> None:
        """Validate."""
        if self.num_samples < 1:
            raise ConfigurationError(f"num_samples must be 1 or more, not {self.num_samples}")

    @property
    def engines(self) -> tuple[Engine, ...]:
        """See `Decoder.engines`."""
        return self.decoder.engines

    @property
    def asks_others(self) -> bool:
        """See `Decoder.asks_others`."""
        return self.decoder.asks_others

    def decode(self, request: Request) -> Iterator[Step]:
        """See `Decoder.decode`."""
        if request.sampling.greedy and self.num_samples > 1:
            raise ConfigurationError(
                f"{self.num_samples} answers at temperature 0 would be the same; raise the "
                "temperature, or set num_samples=1"
            )
        answers = self._answers(request)
        chosen = self.choose(answers)
        first, *rest = answers[chosen]
        lost = [step for i, steps in enumerate(answers) if i != chosen for step in steps]
        yield replace(
            first,
            tokens=_total([first.tokens, *(replace(step.tokens, kept=0) for step in lost)]),
            seconds=_total([first.seconds, *(step.seconds for step in lost)]),
        )
        yield from rest

    def _answers(self, request: Request) -> list[list[Step]]:
        """Return all answers, as steps."""
        hooks = request.review is not None or request.stop_when is not None
        return side_by_side(
            [
                partial(self._answer, replace(request, seed=seed))
                for seed in _seeds(request.seed, self.num_samples)
            ],
            self.engines,
            request.cancelled,
            most=1 if hooks else None,
        )

    def _answer(self, request: Request, cancelled: Cancelled) -> list[Step]:
        return list(self.decoder.decode(replace(request, cancelled=cancelled)))


def _known(value: float | None) -> float:
    return -inf if value is None else value


def _seeds(seed: int, n: int) -> list[int]:
    """Return n seeds; the first is the request's own."""
    others = np.random.SeedSequence([seed, 11]).generate_state(n, np.uint64)[1:]
    return [seed, *map(int, others)]


def _total(costs: Sequence[Cost]) -> Cost:
    names = [field.name for field in fields(costs[0])]
    return type(costs[0])(**{n: sum(getattr(cost, n) for cost in costs) for n in names})
