"""Whole answers that a draft samples to training problems: what a value head learns from."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass, field
from time import perf_counter
from zlib import crc32

import numpy as np
from pydantic import BaseModel, ConfigDict

from specguard_chains.decoding.boundaries import Boundary, Ending
from specguard_chains.decoding.engine import Candidate, Engine, Reading
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.errors import ContextOverflowError
from specguard_chains.evaluation.checking import AnswerChecker
from specguard_chains.evaluation.labels import NO_DELIMITER
from specguard_chains.evaluation.problems import Problem, prompt_for
from specguard_chains.evaluation.records import ProblemKey, ProblemRecord

_STEP = re.compile(r".*?\n\n+|.+\Z", re.DOTALL)


class Solution(BaseModel):
    """One answer, and whether it is right."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str
    right: bool


class Solutions(ProblemRecord):
    """The sampled answers to one problem."""

    solutions: tuple[Solution, ...]
    """Those that ended by themselves; one that was cut off is neither right nor wrong."""
    seconds: float


def steps_of(text: str) -> list[str]:
    """Return the steps of an answer, each with the blank line that ends it."""
    return _STEP.findall(text)


def text_candidate(text: str, *, ends: bool = False) -> Candidate:
    """Return text as a candidate, which every session encodes in its own tokens.

    One that ends the answer has the end token behind it, as when its model wrote it.
    """
    unread = Reading(np.zeros(0, dtype=np.float32))
    ending = Ending.END_OF_SEQUENCE if ends else Ending.BOUNDARY
    return Candidate((), text, unread, ending, vocabulary="")


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples answers, all those of a problem side by side."""

    engine: Engine
    checker: AnswerChecker
    num_samples: int = 8
    max_tokens: int = 400
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.7, top_p=0.8))
    seed: int = 0

    def sample(self, problem: Problem) -> Solutions:
        """Return a problem's answers; they do not depend on what was sampled before.

        Raises:
            SpecGuardError: The model fails, or the prompt leaves no room for an answer.
        """
        start = perf_counter()
        with self.engine.exclusive(), closing(self.engine.open(prompt_for(problem))) as session:
            if (room := min(self.max_tokens, session.room)) < 1:
                raise ContextOverflowError(f"{problem.id} leaves no room for an answer")
            answers = session.sample(
                self.num_samples,
                Boundary(NO_DELIMITER, max_tokens=room),
                self.sampling,
                seed=(self.seed, crc32(problem.id.encode())),
            )
        return Solutions(
            **ProblemKey.of(problem)._asdict(),
            solutions=tuple(
                Solution(text=a.text, right=self.checker.check(a.text, problem).right)
                for a in answers
                if a.ends_sequence
            ),
            seconds=perf_counter() - start,
        )
