"""When it does not pay to draft: after rejections the target goes on alone for a while.

A rejected step costs what its draft cost, and the next one after it is more often rejected too: the
problem is beyond the draft. `Patience` counts verdicts of the same answer and no seconds, so that
equal seeds give equal answers on every machine; what goes by seconds is in `slowdown`.
"""

from __future__ import annotations

from dataclasses import dataclass

from specguard_chains.decoding.slowdown import AnswerTime
from specguard_chains.decoding.steps import Judgement, Step, Verdict
from specguard_chains.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Patience:
    """How many rejections in a row stop drafting, and for how long."""

    rejections: int = 2
    steps: int = 4
    """Steps that the target then writes alone. Every further rejection doubles them; a step that is
    accepted brings the full patience back."""

    def __post_init__(self) -> None:
        """Validate."""
        for name in ("rejections", "steps"):
            if (value := getattr(self, name)) < 1:
                raise ConfigurationError(f"patience needs 1 or more {name}, not {value}")


class Pacing:
    """Tells for one answer, step by step, whether to draft."""

    def __init__(self, patience: Patience | None, time: AnswerTime | None = None) -> None:
        """Start with full patience; None never loses it, and without a time there is no limit."""
        self._patience = patience
        self._left = 0  # steps that the target is still to write alone
        self._rejected = 0  # in a row
        self._next = 0 if patience is None else patience.steps
        self._time = time

    def pauses(self) -> bool:
        """Whether the step in progress is not to be drafted. Counts it; ask once a step."""
        if self._time is not None and not self._time.drafts:
            return True
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def note(self, judgement: Judgement) -> None:
        """Take note of what was said of a step.

        One that would have been accepted and is the target's anyway says nothing of the draft.
        """
        undecided = judgement.critical or judgement.verdict is Verdict.UNVERIFIED
        if self._patience is None or undecided:
            return
        if judgement.verdict is Verdict.ACCEPTED:
            self._rejected, self._next = 0, self._patience.steps
            return
        self._rejected += 1
        if self._rejected >= self._patience.rejections:
            self._left, self._next = self._next, 2 * self._next

    def note_time(self, step: Step) -> None:
        """Take note of what a step has cost."""
        if self._time is not None:
            self._time.note(step)
