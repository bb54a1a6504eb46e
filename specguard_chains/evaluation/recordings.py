"""Drafted steps with their labels, recorded once and read by every signal afterwards.

A problem is solved as by SpecGuard with a perfect verifier: the draft writes each step greedily,
the target goes on from it, and what still leads to the right answer is kept, all else rewritten. So
steps stand where verification meets them, behind steps that are good. Signals are cheap to read
again from the tokens; the labels are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from pydantic import BaseModel, ConfigDict

from specguard_chains.decoding.answer import Answer, Proposal
from specguard_chains.decoding.boundaries import Boundary, Ending, StepShape
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Candidate, Engine, Reading, Session
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.steps import UNVERIFIED, Source
from specguard_chains.evaluation.checking import AnswerChecker
from specguard_chains.evaluation.labels import NO_DELIMITER, go_on
from specguard_chains.evaluation.problems import Problem, prompt_for
from specguard_chains.evaluation.records import ProblemKey, ProblemRecord

GREEDY = Sampling(temperature=0)


class Written(BaseModel):
    """A step as its model wrote it, without what was read of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: tuple[int, ...]
    text: str
    ending: Ending
    vocabulary: str

    @classmethod
    def of(cls, candidate: Candidate) -> Written:
        """Return what is kept of a candidate."""
        return cls(
            tokens=candidate.tokens,
            text=candidate.text,
            ending=candidate.ending,
            vocabulary=candidate.vocabulary,
        )

    def candidate(self) -> Candidate:
        """Return the candidate, for a session to read or accept."""
        unread = Reading(np.zeros(0, dtype=np.float32))
        return Candidate(self.tokens, self.text, unread, self.ending, self.vocabulary)


class RecordedStep(BaseModel):
    """A drafted step, whether it is good, and what came in its place."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    drafted: Written
    good: bool
    """Whether the target still reached the right answer from it."""
    kept: Written
    """What the answer went on with: the drafted step if it is good, else the target's."""
    others: tuple[str, ...]
    """What the draft sampled in the same place."""


class Recording(ProblemRecord):
    """The drafted steps of one problem."""

    steps: tuple[RecordedStep, ...]
    solvable: bool
    """Whether the target alone reaches the right answer."""
    right: bool
    """Whether the answer of all the kept steps is right."""
    own: Written
    """The draft's own greedy answer."""
    own_right: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Recorder:
    """Records problems with a pair of engines, which it holds meanwhile."""

    draft: Engine
    target: Engine
    checker: AnswerChecker
    num_others: int = 4
    max_tokens: int = 600
    shape: StepShape = field(default_factory=StepShape)
    others: Sampling = field(default_factory=lambda: Sampling(temperature=0.7, top_p=0.8))
    seed: int = 0
    hopeless_too: bool = False
    """Record problems that the target does not solve: there nearly every step is bad, whatever it
    says."""

    def record(self, problem: Problem) -> Recording:
        """Return a problem's drafted steps.

        Raises:
            SpecGuardError: A model fails, or the problem does not fit into its context.
        """
        start = perf_counter()
        request = Request(prompt_for(problem), GREEDY, max_tokens=self.max_tokens, seed=self.seed)
        with ExitStack() as stack:
            for engine in sorted({self.draft, self.target}, key=id):
                stack.enter_context(engine.exclusive())
            draft = stack.enter_context(closing(request.open(self.draft)))
            target = stack.enter_context(closing(request.open(self.target)))
            own = self._to_the_end(draft)
            ahead = self._to_the_end(target).text
            solvable = self.checker.check(ahead, problem).right
            answer = Answer(request, self.shape, draft, target)
            wanted = solvable or self.hopeless_too
            steps = (
                list(self._steps(problem, draft, target, answer, ahead, solvable)) if wanted else []
            )
            return Recording(
                **ProblemKey.of(problem)._asdict(),
                steps=tuple(steps),
                solvable=solvable,
                right=self.checker.check(answer.text, problem).right,
                own=Written.of(own),
                own_right=self.checker.check(own.text, problem).right,
                seconds=perf_counter() - start,
            )

    def _steps(
        self,
        problem: Problem,
        draft: Session,
        target: Session,
        answer: Answer,
        ahead: str,
        well: bool,
    ) -> Iterator[RecordedStep]:
        """Write the answer; `ahead` is how the target would end it, `well` whether rightly."""
        while not answer.finished:
            (drafted,) = answer.sample(draft, Source.DRAFT, 1)
            others = draft.sample(
                self.num_others, answer.boundary(), self.others, seed=(self.seed, answer.number)
            )
            kept, source = drafted, Source.DRAFT
            rest, good = self._outcome(problem, target, answer, drafted, ahead, well)
            if good:
                ahead, well = rest, True
            else:
                (kept,), source = answer.sample(target, Source.TARGET, 1), Source.TARGET
                ahead, well = self._outcome(problem, target, answer, kept, ahead, well)
            answer.extend(kept, source, Proposal([drafted], 0, UNVERIFIED))
            yield RecordedStep(
                drafted=Written.of(drafted),
                good=good,
                kept=Written.of(kept),
                others=tuple(other.text for other in others),
            )

    def _outcome(
        self,
        problem: Problem,
        target: Session,
        answer: Answer,
        step: Candidate,
        ahead: str,
        well: bool,
    ) -> tuple[str, bool]:
        """Return how the target ends the answer behind a step, and whether rightly.

        A step that it would write itself needs no second answer, unless it ends the answer before
        the target would. The target's own one may be another than before: in other batches
        near-ties can fall the other way.
        """
        as_before = ahead == step.text if step.ends_sequence else ahead.startswith(step.text)
        if as_before:
            return ahead[len(step.text) :], well
        rest = go_on(target, step, answer.tokens_left)
        return rest, self.checker.check(answer.text + step.text + rest, problem).right

    def _to_the_end(self, session: Session) -> Candidate:
        """Return the greedy answer of a model alone; its sequence stays."""
        boundary = Boundary(NO_DELIMITER, max_tokens=min(self.max_tokens, session.room))
        (whole,) = session.sample(1, boundary, GREEDY, seed=(0,))
        return whole
