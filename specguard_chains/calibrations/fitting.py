"""Measuring a pair's signals on training problems, to draw its bounds from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from specguard_chains import background
from specguard_chains.calibrations import signals
from specguard_chains.decoding.calibration import FALLBACK, Bounds, Calibration
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Candidate, Prompt, Reading
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.steps import Judgement, Step, Verdict
from specguard_chains.decoding.verification import Situation
from specguard_chains.errors import CalibrationError

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."


@dataclass(frozen=True, slots=True)
class AcceptAll:
    """Accepts every step and records its signals."""

    needs_confidence: bool = True
    needs_grounding: bool = True
    state_layer: int | None = None
    asks_others: bool = False
    readings: list[Reading] = field(default_factory=list)

    def can_accept(self, confidence: float, grounding: float | None) -> bool:
        """See `Verifier.can_accept`."""
        return True

    def judge(self, candidate: Candidate, reading: Reading, situation: Situation) -> Judgement:
        """See `Verifier.judge`."""
        self.readings.append(reading)
        return Judgement(
            Verdict.ACCEPTED, confidence=reading.confidence, grounding=reading.min_grounding
        )


def reasoning_prompt(question: str) -> Prompt:
    """Return the prompt that asks for steps and a boxed answer."""
    return Prompt(
        messages=[
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": question},
        ]
    )


def fit(
    decoder: SpecGuardDecoder,
    questions: Iterable[str],
    *,
    max_tokens: int = 600,
    on_step: Callable[[int, Step], None] = lambda problem, step: None,
) -> Calibration:
    """Return the 1st and 99th percentiles of both signals over the draft's steps.

    Args:
        decoder: Its engines, grounding and `verify_with` are used; its verifier is not.
        questions: Training problems; about 50 give stable bounds.
        max_tokens: Limit of an answer.
        on_step: Told every step as it comes, with the number of its problem from 0.

    Raises:
        CalibrationError: There are too few steps to draw bounds from.
    """
    verifier = AcceptAll(needs_grounding=decoder.grounding_from is not None)
    fitting = SpecGuardDecoder(
        decoder.draft,
        decoder.target,
        verifier,
        num_candidates=1,
        verify_with=decoder.verify_with,
        grounding_from=decoder.grounding_from,
        grounding=decoder.grounding,
        shape=decoder.shape,
    )
    problems = 0
    for problems, question in enumerate(questions, start=1):
        request = Request(
            reasoning_prompt(question), Sampling(temperature=0), max_tokens=max_tokens
        )
        for step in background.run(fitting, request):
            on_step(problems - 1, step)
    if len(verifier.readings) < 2:
        raise CalibrationError("no steps to calibrate on; give at least one problem")
    return Calibration(
        confidence=Bounds.of([reading.confidence for reading in verifier.readings]),
        grounding=(
            Bounds.of([reading.min_grounding or 0.0 for reading in verifier.readings])
            if verifier.needs_grounding
            else FALLBACK.grounding
        ),
        draft=decoder.draft.name,
        target=decoder.target.name,
        verify_with=signals(decoder.verify_with, decoder.grounding_from),
        grounding_form=decoder.grounding.form,
        grounding_layers=decoder.grounding.layers,
        problems=problems,
        steps=len(verifier.readings),
    )


def read_questions(path: Path, limit: int | None = None, skip: int = 0) -> dict[int, str]:
    """Return the `question` fields of a JSON-lines file by the numbers of their lines from 1.

    Raises:
        CalibrationError: The file cannot be read, or a line has no question.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            stop = None if limit is None else skip + limit
            return {
                number: str(json.loads(line)["question"])
                for number, line in islice(enumerate(lines, start=1), skip, stop)
                if line.strip()
            }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CalibrationError(
            f"cannot read problems from {path}: {error!r}; it must hold one JSON object a line "
            'with a "question"'
        ) from error
