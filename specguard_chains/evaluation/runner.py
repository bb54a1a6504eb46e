"""Every arm solves every problem; what is recorded already is not solved again.

The arms take turns on each problem, so that drift of the machine hits all alike, and another one
begins each time. Each starts with empty caches, of prompts and of reward models: an arm that found
the prompt read already, by the same model in another arm, would look faster than it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Any

from specguard_chains import background, rewards
from specguard_chains.assembly import assemble
from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.engine import Engine, Prompt
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.steps import Source, Step
from specguard_chains.errors import (
    ContextOverflowError,
    EngineError,
    EvaluationError,
    ServerError,
    SpecGuardError,
)
from specguard_chains.evaluation.arms import Arm, Assemble, draft_alone
from specguard_chains.evaluation.checking import AnswerChecker
from specguard_chains.evaluation.controls import History, matched
from specguard_chains.evaluation.folder import ResultsLog
from specguard_chains.evaluation.judging import judged_by
from specguard_chains.evaluation.memory import peak_rss_mb, reset_peak
from specguard_chains.evaluation.results import Attempt, Result
from specguard_chains.evaluation.tasks import Plan, Task

logger = logging.getLogger(__name__)

WARM_UP = Request(
    Prompt(messages=[{"role": "user", "content": "Hello"}]), Sampling(temperature=0), max_tokens=1
)


@dataclass(slots=True)
class Runner:
    """Solves what a plan has and a log has not."""

    plan: Plan
    log: ResultsLog
    checker: AnswerChecker
    make: Assemble = assemble
    on_begin: Callable[[Task], None] = lambda task: None
    on_end: Callable[[Result], None] = lambda result: None
    decoders: dict[str, Decoder] = field(default_factory=dict)
    """Those that are ready, by the labels of their arms; see `take`."""
    _warm: set[int] = field(default_factory=set)
    """Engines that have computed something."""

    def take(self, arm: Arm, decoder: Decoder) -> None:
        """Let a decoder solve the problems of an arm.

        Raises:
            EvaluationError: The arm's results so far were judged by other bounds or value heads.
        """
        self.log.note(arm.label, judged_by(decoder))
        self.decoders[arm.label] = decoder

    def run(self) -> None:
        """Solve what is still to be done.

        A control that cannot be matched yet is no attempt: its wrong answer would be the doing of
        the arm that it controls. It stays pending.

        Raises:
            SpecGuardError: An arm does not work at all, or a recorded problem was another one; what
                was done until then is recorded.
        """
        for task in self.plan.pending(self.log):
            try:
                options = self._matched(task)
            except EvaluationError as error:
                logger.warning("%s is left out: %s", task.problem.id, error)
                continue
            self.on_begin(task)
            result = self._solve(task, options)
            self.log.append(result)
            self.on_end(result)

    def _solve(self, task: Task, options: Mapping[str, Any]) -> Result:
        """Return the result of a task; what goes wrong with this problem alone is part of it."""
        seed = self.plan.seed_of(task)
        started = time()
        decoder = self._decoder(task, options)
        self._prepare(decoder.engines)
        rewards.forget(task.arm.options)
        attempt = solve(decoder, task.arm.request(task.problem, seed))
        checked = None
        if attempt.error is None:
            checked = self.checker.check(attempt.text, task.problem)
        return Result(
            problem=task.problem.id,
            data=task.data,
            arm=task.arm.label,
            right=checked is not None and checked.right,
            extracted=checked.extracted if checked else None,
            timed_out=checked is not None and checked.timed_out,
            seed=seed,
            controls=task.arm.controls,
            started=round(started, 1),
            problem_digest=task.problem.digest,
            **options,
            **attempt.figures(),
        )

    def _matched(self, task: Task) -> dict[str, Any]:
        """Return the options of a control on a problem.

        Raises:
            EvaluationError: There is nothing yet to match it to.
        """
        if task.arm.controls is None:
            return {}
        draft = draft_alone(self.plan.arms)
        history = History(
            controlled=self._results(task, task.arm.controls, until=task.index + 1),
            own=self._results(task, task.arm.label, until=task.index),
            drafts=self._results(task, draft.label, until=task.index + 1) if draft else (),
        )
        return matched(task.arm, history)

    def _results(self, task: Task, label: str, *, until: int) -> list[Result]:
        """Return an arm's results on the first problems of a data set, in their order."""
        problems = self.plan.data[task.data][:until]
        results = (self.log.get((task.data, problem.id, label)) for problem in problems)
        return [result for result in results if result is not None]

    def _decoder(self, task: Task, options: Mapping[str, Any]) -> Decoder:
        label = task.arm.label
        if task.arm.same_for_all and label in self.decoders:
            return self.decoders[label]
        decoder = task.arm.decoder_for(task.problem, self.checker, matched=options, make=self.make)
        self.take(task.arm, decoder)
        return decoder

    def _prepare(self, engines: Sequence[Engine]) -> None:
        """Let engines compute for the first time, which loads what they need; empty their caches.

        Neither belongs to the time of the arm that comes first.
        """
        for engine in engines:
            if id(engine) not in self._warm:
                list(background.run(SoloDecoder(engine, Source.TARGET), WARM_UP))
                self._warm.add(id(engine))
                if not hasattr(engine, "clear"):
                    logger.warning(
                        "the prompt cache of %s cannot be cleared: arms that use it may find the "
                        "prompt read already, and look faster than they are",
                        engine.name,
                    )
            if hasattr(engine, "clear"):
                with engine.exclusive():
                    engine.clear()


def solve(decoder: Decoder, request: Request) -> Attempt:
    """Return what a decoder writes, also if an error of this one request has ended it.

    Raises:
        SpecGuardError: The decoder would fail on other problems too.
    """
    steps: list[Step] = []
    reset_peak()
    error, start = None, perf_counter()
    try:
        with closing(background.run(decoder, request)) as written:
            for step in written:
                steps.append(step)  # those before an error count
    except SpecGuardError as failure:
        if not _concerns_one_request(failure):
            raise
        error = f"{type(failure).__name__}: {failure}"
    return Attempt(steps, perf_counter() - start, peak_rss_mb(), error)


def _concerns_one_request(error: SpecGuardError) -> bool:
    """Whether other problems may go well: a server that is down is no problem's fault."""
    if isinstance(error, ContextOverflowError | TimeoutError):
        return True
    return isinstance(error, EngineError) and not isinstance(error, ServerError)
