"""The off-switch: nothing is drafted while drafting makes answers too slow.

Whether drafting pays depends on the machine, the models and what they are asked, and shows only as
it is tried. So the seconds of all answers so far are held against what the target alone would have
taken for them, at its own pace where it wrote undrafted; a step is drafted only if the loss, with
that of another drafted step, stays within a share of that. Where drafting pays there is no loss.

Unlike `pacing`, this goes by seconds: what is drafted, and so the text, differs between machines
and from one request to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

from specguard_chains.decoding.steps import Source, Step
from specguard_chains.errors import ConfigurationError

ENOUGH_TOKENS = 32
"""Of the target's own, before its pace is known."""


@dataclass(slots=True)
class _Sums:
    """Of some steps: how many, their seconds, and their tokens in answers and prompts."""

    steps: int = 0
    seconds: float = 0.0
    written: int = 0
    prompt_read: int = 0

    def add(self, step: Step, prompt_read: int) -> None:
        spent = step.seconds
        self.steps += 1
        self.seconds += spent.draft + spent.verify + spent.select + spent.target
        self.written += step.answer_tokens
        self.prompt_read += prompt_read


@dataclass(slots=True, eq=False)
class Slowdown:
    """How much slower than the target alone a decoder's answers may be, and are."""

    limit: float
    """As a share of the seconds of the target alone: 0.05 is a twentieth more."""
    _all: _Sums = field(default_factory=_Sums, init=False)
    _drafted: _Sums = field(default_factory=_Sums, init=False)
    _writing: _Sums = field(default_factory=_Sums, init=False)
    """Undrafted steps before which the target had nothing to read."""
    _reading: _Sums = field(default_factory=_Sums, init=False)
    """Undrafted steps before which it read a prompt, and nothing else."""
    _lock: Lock = field(default_factory=Lock, init=False)

    def __post_init__(self) -> None:
        """Validate."""
        if not 0 <= self.limit < float("inf"):
            raise ConfigurationError(
                f"max_slowdown must be 0 or more, such as 0.05 for a twentieth, not {self.limit}"
            )

    def allows_draft(self) -> bool:
        """Whether the loss will stay within the limit if another step is drafted."""
        with self._lock:
            if self._writing.written + self._reading.written < ENOUGH_TOKENS:
                return False
            alone = self._alone(self._all)
            lost = self._all.seconds - alone
            drafted = self._drafted
            # Until one was drafted: in vain, at the price of another one.
            next_loss = lost / drafted.steps if drafted.steps else alone / self._all.steps
            return lost + max(next_loss, 0.0) <= self.limit * alone

    def note(self, step: Step, prompt_read: int) -> None:
        """Take note of what a step has cost.

        Args:
            step: It has been drafted if there are candidates.
            prompt_read: Tokens of the prompt that the target has read for it.
        """
        read = step.tokens.target_read
        with self._lock:
            self._all.add(step, prompt_read)
            if step.num_candidates:
                self._drafted.add(step, prompt_read)
            elif read == prompt_read:
                (self._reading if read else self._writing).add(step, prompt_read)

    def _alone(self, steps: _Sums) -> float:
        """Return the seconds that the target alone would have taken."""
        writing, reading = self._writing, self._reading
        if writing.written < ENOUGH_TOKENS:  # answers of one step: prompts are in the pace
            seconds, written = writing.seconds + reading.seconds, writing.written + reading.written
            return steps.written * seconds / written
        token_s = writing.seconds / writing.written
        prompts_s = max(reading.seconds - reading.written * token_s, 0.0)
        prompt_token_s = prompts_s / reading.prompt_read if reading.prompt_read else 0.0
        return steps.written * token_s + steps.prompt_read * prompt_token_s


class Unread:
    """Tells for one answer what of its prompt the target reads, and for which step."""

    def __init__(self) -> None:
        """Begin with nothing read."""
        self._drafted = 0  # tokens of the answer that the target has not read yet

    def prompt_read(self, step: Step) -> int:
        """Return the tokens of the prompt that the target has read for a step. Ask once a step."""
        read = step.tokens.target_read
        self._drafted += round(step.tokens.drafted / max(step.num_candidates, 1))
        of_prompt = max(read - self._drafted, 0)
        if read or step.source is Source.TARGET:
            self._drafted = 0
        return of_prompt
