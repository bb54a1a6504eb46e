"""The off-switch: answers are not drafted while drafting makes them too slow.

Whether drafting pays depends on the machine, the models and what they are asked, and shows only as
it is tried. So the seconds of the answers so far are held against what the target alone would have
taken for them, at its own pace where it wrote undrafted. An answer is drafted, from its beginning
to its end, if the loss, with that of another drafted answer, stays within a share of that. Where
drafting pays there is no loss. Texts are measured in characters, as two models need not have the
same tokens; what is long past is forgotten, as a machine is not always equally fast.

Unlike `pacing`, this goes by seconds: what is drafted, and so the text, differs between machines
and from one request to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

from specguard_chains.decoding.steps import Step
from specguard_chains.errors import ConfigurationError

ENOUGH_CHARACTERS = 256
"""Of the target's own, before its pace is known."""
MEMORY = 0.5 ** (1 / 100)
"""What an answer counts for one answer later: half as much after a hundred."""
UNTRIED = 0.5
"""The loss that is expected of the first drafted answer, as a share of an answer's time."""


@dataclass(slots=True)
class _Sums:
    seconds: float = 0.0
    characters: float = 0.0
    prompt_tokens: float = 0.0
    """That the target has read, or would have."""

    def add(self, seconds: float, characters: int, prompt_tokens: int) -> None:
        self.seconds += seconds
        self.characters += characters
        self.prompt_tokens += prompt_tokens

    def fade(self) -> None:
        self.seconds *= MEMORY
        self.characters *= MEMORY
        self.prompt_tokens *= MEMORY


@dataclass(slots=True, eq=False)
class Slowdown:
    """How much slower than the target alone a decoder's answers may be, and are."""

    limit: float
    """As a share of the seconds of the target alone: 0.05 is a twentieth more."""
    _all: _Sums = field(default_factory=_Sums, init=False)
    _begun: _Sums = field(default_factory=_Sums, init=False)
    """Undrafted first steps, by the target's seconds: it has read the prompt for them."""
    _went_on: _Sums = field(default_factory=_Sums, init=False)
    """Later undrafted steps, by the target's seconds."""
    _answers: float = field(default=0.0, init=False)
    _drafted: float = field(default=0.0, init=False)
    """Of these, the drafted ones that have ended."""
    _in_flight: int = field(default=0, init=False)
    """Drafted ones that have not."""
    _lock: Lock = field(default_factory=Lock, init=False)

    def __post_init__(self) -> None:
        """Validate."""
        if not 0 < self.limit < float("inf"):
            raise ConfigurationError(
                f"max_slowdown must be above 0, such as 0.05 for a twentieth, not {self.limit}"
            )

    def begin(self, prompt_tokens: int) -> AnswerTime:
        """Begin with another answer, which must be ended.

        Args:
            prompt_tokens: Of the prompt, in the target's vocabulary.
        """
        with self._lock:
            for sums in (self._all, self._begun, self._went_on):
                sums.fade()
            drafts = self._allows()
            self._answers = MEMORY * self._answers + 1
            self._drafted *= MEMORY
            self._in_flight += drafts
        return AnswerTime(self, prompt_tokens, drafts)

    def end(self) -> None:
        """Take note that a drafted answer has ended, complete or not."""
        with self._lock:
            self._in_flight -= 1
            self._drafted += 1

    def note(self, step: Step, prompt_tokens: int) -> None:
        """Take note of what a step has cost.

        Args:
            step: It was drafted if there are candidates.
            prompt_tokens: Of the prompt, that the target alone would have read for it.
        """
        spent, characters = step.seconds, len(step.text)
        seconds = spent.draft + spent.verify + spent.select + spent.target
        with self._lock:
            self._all.add(seconds, characters, prompt_tokens)
            if step.num_candidates == 0:
                pace = self._begun if step.number == 1 else self._went_on
                pace.add(spent.target, characters, prompt_tokens)

    def _allows(self) -> bool:
        """Whether the loss is expected to stay within the limit if another answer is drafted.

        Those in flight are expected to lose as much as one that is yet to begin.
        """
        if self._begun.characters + self._went_on.characters < ENOUGH_CHARACTERS:
            return False
        alone = self._alone_s()
        lost = self._all.seconds - alone
        if self._drafted < MEMORY**200:  # long ago, or never
            next_loss = UNTRIED * alone / self._answers
        else:
            next_loss = max(lost / self._drafted, 0.0)
        return lost + (self._in_flight + 1) * next_loss <= self.limit * alone

    def _alone_s(self) -> float:
        """Return the seconds that the target alone would have taken for all answers."""
        begun, went_on, everything = self._begun, self._went_on, self._all
        if 10 * went_on.characters < begun.characters:  # answers of one step: prompts in the pace
            seconds = begun.seconds + went_on.seconds
            return everything.characters * seconds / (begun.characters + went_on.characters)
        character_s = went_on.seconds / went_on.characters
        prompts_s = max(begun.seconds - begun.characters * character_s, 0.0)
        prompt_token_s = prompts_s / begun.prompt_tokens if begun.prompt_tokens else 0.0
        return everything.characters * character_s + everything.prompt_tokens * prompt_token_s


@dataclass(frozen=True, slots=True)
class AnswerTime:
    """One answer's part in a `Slowdown`."""

    _account: Slowdown
    _prompt_tokens: int
    drafts: bool
    """Whether its steps may be drafted."""

    def note(self, step: Step) -> None:
        """Take note of what a step has cost.

        With the first one the target has read the prompt, but for what it found in a cache.
        """
        read = self._prompt_tokens - step.tokens.target_reused if step.number == 1 else 0
        self._account.note(step, max(read, 0))

    def end(self) -> None:
        """Take note that the answer has ended, complete or not; once."""
        if self.drafts:
            self._account.end()
