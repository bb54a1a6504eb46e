"""Verifiers to compare with: of other methods, and controls that look at nothing.

Reward-guided decoding (RSD, arXiv 2501.19324) accepts a step whose reward is high enough.
SpecReason (arXiv 2504.07891) has the target read the step and answer with one digit. A signal that
beats neither chance nor the step's length, at the same acceptance rate, is worth nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.cache import common_prefix
from specguard_chains.decoding.engine import Candidate, Engine, LogitSession, Prompt, Reading
from specguard_chains.decoding.rewards import Reward
from specguard_chains.decoding.steps import Judgement, Verdict
from specguard_chains.decoding.token_tree import TokenTree
from specguard_chains.decoding.verification import Situation
from specguard_chains.errors import ConfigurationError, EngineError

JUDGE_INSTRUCTION = (
    "Rate the last step of the reasoning above on a scale from 0 (wrong or useless) to 9 "
    "(certainly correct and helpful). Answer with one digit and nothing else."
)
BLOCK = 32
"""Tokens that are read at once: their logits are held together."""


class _NeedsNothing:
    """The part of a verifier that looks at no signal while a step is being written."""

    needs_confidence = False
    needs_grounding = False
    state_layer: int | None = None
    asks_others = False

    def can_accept(self, confidence: float, grounding: float | None) -> bool:
        """See `Verifier.can_accept`."""
        return True


@dataclass(frozen=True)
class AcceptAll(_NeedsNothing):
    """Accepts every step: what remains is the selection among candidates."""

    def judge(self, candidate: Candidate, reading: Reading, situation: Situation) -> Judgement:
        """See `Verifier.judge`."""
        return _judgement(True, reading)


@dataclass(frozen=True)
class RandomVerifier(_NeedsNothing):
    """Accepts with a fixed probability, by the request's seed."""

    rate: float

    def judge(self, candidate: Candidate, reading: Reading, situation: Situation) -> Judgement:
        """See `Verifier.judge`."""
        seed = (situation.request.seed, situation.number, 7)
        score = 1.0 - np.random.default_rng(seed).random()  # in (0, 1], so that rate 0 keeps none
        return _judgement(score > 1 - self.rate, reading, score=score, threshold=1 - self.rate)


@dataclass(frozen=True)
class LengthVerifier(_NeedsNothing):
    """Accepts steps of at most so many tokens."""

    max_tokens: int

    def judge(self, candidate: Candidate, reading: Reading, situation: Situation) -> Judgement:
        """See `Verifier.judge`. The score is minus the length."""
        length = len(candidate.tokens)
        return _judgement(
            length <= self.max_tokens, reading, score=-length, threshold=-self.max_tokens
        )


@dataclass(frozen=True)
class RewardVerifier(_NeedsNothing):
    """Accepts a step whose reward is at least the threshold (delta, there 0.7)."""

    reward: Reward
    threshold: float = 0.7

    @property
    def state_layer(self) -> int | None:  # type: ignore[override]
        """See `Verifier.state_layer`."""
        return self.reward.state_layer

    @property
    def asks_others(self) -> bool:  # type: ignore[override]
        """See `Verifier.asks_others`."""
        return self.reward.asks_others

    def judge(self, candidate: Candidate, reading: Reading, situation: Situation) -> Judgement:
        """See `Verifier.judge`."""
        value = self.reward.rate(candidate, reading, situation)
        accepted = value >= self.threshold
        judgement = _judgement(accepted, reading, score=value, threshold=self.threshold)
        return replace(judgement, value=value)


@dataclass(frozen=True)
class TargetJudge(_NeedsNothing):
    """The target reads the step and answers with a digit; from 7 on it is accepted.

    The digit is the likeliest of the ten. What the target has read of an accepted step it does not
    read again, but for the last token. The score is a ninth of the digit, so that 0.7 stands for 7.
    """

    target: Engine
    threshold: float = 0.7
    instruction: str = JUDGE_INSTRUCTION

    def __post_init__(self) -> None:
        """Validate."""
        if not self.target.capabilities.logits:
            raise ConfigurationError(
                f"a target that judges steps must give logits, which {self.target.name} does not; "
                "take one that runs in this process, or decoder='specguard'"
            )

    def judge(self, candidate: Candidate, reading: Reading, situation: Situation) -> Judgement:
        """See `Verifier.judge`. A step that leaves no room for the question is rejected."""
        if situation.request.constraint is not None:
            raise ConfigurationError(
                "a target that judges steps asks itself in words, which a grammar forbids; take "
                "decoder='specguard' for structured output and required tool calls"
            )
        session = cast("LogitSession", situation.target)
        step = session.tokens_of(candidate)
        if candidate.ends_sequence:  # the question ends the turn, as the template does
            step = step[:-1]
        tokens = [*step, *self._question()]
        if len(tokens) >= session.room:
            return _judgement(False, reading, threshold=self.threshold)
        logits = _logits_after(session, tokens)
        digits = logits[[session.encode_text(str(digit))[-1] for digit in range(10)]]
        if not np.isfinite(digits).all():
            raise EngineError(
                f"the logits of {self.target.name} are not finite numbers; its file is faulty"
            )
        score = int(np.argmax(digits)) / 9
        return _judgement(score >= self.threshold, reading, score=score, threshold=self.threshold)

    def _question(self) -> list[int]:
        """Return the tokens that end the answer's turn and ask for the digit.

        They are what two conversations with different answers have in common at their ends.
        """
        one, other = (
            self.target.encode(
                Prompt(
                    messages=[
                        {"role": "user", "content": "?"},
                        {"role": "assistant", "content": answer},
                        {"role": "user", "content": self.instruction},
                    ]
                )
            )
            for answer in ("A", "1")
        )
        return one[len(one) - common_prefix(one[::-1], other[::-1]) :]


def _logits_after(session: LogitSession, tokens: Sequence[int]) -> FloatArray:
    """Return the logits after tokens that continue a sequence, which stays as it is."""
    tree = TokenTree([1] * len(tokens))
    node = 0
    for start in range(0, len(tokens), BLOCK):
        for token in tokens[start : start + BLOCK]:
            node = tree.add(token, node)
        rows = session.logits(tree)
    session.counters.read += len(tokens)
    last: FloatArray = rows[-1]
    return last


def _judgement(
    accepted: bool,
    reading: Reading,
    *,
    score: float | None = None,
    threshold: float | None = None,
) -> Judgement:
    return Judgement(
        Verdict.ACCEPTED if accepted else Verdict.REJECTED,
        score=score,
        confidence=reading.confidence if reading.logprobs.size else None,  # a server may give none
        grounding=reading.min_grounding,
        threshold=threshold,
    )
