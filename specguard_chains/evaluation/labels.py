"""Whether a step is good: does the target, going on greedily from it, still reach the right answer?

That is the label that signals are measured by, and the oracle that verifies by it shows what a
perfect verifier could do. It costs the target an answer a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from specguard_chains.decoding.boundaries import Boundary
from specguard_chains.decoding.engine import Candidate, Reading, Session
from specguard_chains.decoding.rivals import AcceptAll
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.steps import Judgement, Verdict
from specguard_chains.decoding.verification import Situation
from specguard_chains.evaluation.checking import AnswerChecker
from specguard_chains.evaluation.problems import Problem

NO_DELIMITER = "\0"
"""No model writes it: the rest of an answer is one step."""


def go_on(target: Session, candidate: Candidate, tokens_left: int) -> str:
    """Return how the target ends an answer greedily after a candidate; its sequence stays.

    Args:
        target: Its sequence.
        candidate: Behind which it goes on.
        tokens_left: How many tokens the answer may still have, those of the candidate included.

    Raises:
        DecodingCancelled: The request was cancelled.
    """
    left = min(tokens_left, target.room) - len(candidate.tokens)
    if candidate.ends_sequence or left < 1 or not target.fits(candidate):
        return ""
    length = target.length
    target.accept(candidate)
    try:
        boundary = Boundary(NO_DELIMITER, max_tokens=min(left, target.room))
        (rest,) = target.sample(1, boundary, Sampling(temperature=0), seed=(0,))
    finally:
        target.rollback(length)
    return rest.text


@dataclass(frozen=True)
class OracleVerifier(AcceptAll):
    """Accepts a step from which the target still reaches the right answer."""

    problem: Problem
    checker: AnswerChecker

    def judge(self, candidate: Candidate, reading: Reading, situation: Situation) -> Judgement:
        """See `Verifier.judge`. The score is 1 or 0."""
        rest = go_on(situation.target, candidate, situation.tokens_left)
        text = "".join([*situation.steps, candidate.text, rest])
        good = self.checker.check(text, self.problem).right
        return Judgement(
            Verdict.ACCEPTED if good else Verdict.REJECTED,
            score=float(good),
            confidence=reading.confidence,
            grounding=reading.min_grounding,
            threshold=1.0,
        )
