"""A candidate while the server writes it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specguard_adapters.openai.codec import CHARACTER_TOKENS, UNFINISHED, Codec
from specguard_adapters.openai.completions import Event, Finish, Token
from specguard_adapters.openai.http import Cancelled
from specguard_chains.decoding.boundaries import Boundary, Ending, StepText
from specguard_chains.decoding.engine import Candidate, Reading, Watch


class CandidateInProgress:
    """One candidate's tokens, cut as every engine cuts a step."""

    def __init__(
        self, boundary: Boundary, codec: Codec, dangling: Sequence[int], cancelled: Cancelled
    ) -> None:
        """Start empty; `dangling` begins a character that the candidate has to finish."""
        self.tokens: list[int] = []
        self.ending: Ending | None = None
        self._boundary = boundary
        self._codec = codec
        self._dangling = list(dangling)
        self._cancelled = cancelled
        self._logprobs: list[float] = []
        self._pieces: list[str] = []
        self._text = StepText(boundary)

    @property
    def room(self) -> int:
        """Tokens that it may still gain."""
        return self._boundary.max_tokens - len(self.tokens)

    @property
    def may_dangle(self) -> bool:
        """Whether it may end within a character."""
        return bool(self._pieces) and not self._pieces[-1]

    @property
    def has_gaps(self) -> bool:
        """Whether tokens have no text of their own: they may be parts of characters."""
        return not all(self._pieces)

    def denied(self, watch: Watch) -> bool:
        """Whether a watch says that it cannot be accepted any more."""
        return bool(self._logprobs) and not watch(min(self._logprobs), None)

    def cut(self, length: int) -> None:
        """Go back to the first `length` tokens, none of which ended it."""
        del self.tokens[length:], self._logprobs[length:], self._pieces[length:]
        self.ending = None
        self._text = StepText(self._boundary)
        for piece in self._pieces:
            self._text.add(_bytes(piece))

    def take(self, event: Event) -> int:
        """Append what belongs to the step; return the number of tokens."""
        before = len(self.tokens)
        for token in event.tokens:
            if self.ending is None:
                self._append(token)
        if self.ending is None and event.finish is Finish.END:
            self.ending = Ending.END_OF_SEQUENCE
        elif self.ending is None and event.finish is Finish.LIMIT:
            self.ending = Ending.STEP_LIMIT
        return len(self.tokens) - before

    def replace(self, event: Event) -> None:
        """Take another answer's tokens instead, up to where this one ended."""
        ending = self.ending
        self.cut(0)
        self.take(event)
        if ending is Ending.REJECTED_EARLY:
            self.ending = ending

    def finished(self, vocabulary: str) -> Candidate:
        """Return the candidate once it has ended."""
        assert self.ending is not None
        reading = Reading(np.array(self._logprobs, dtype=np.float32))
        return Candidate(tuple(self.tokens), self._text.text, reading, self.ending, vocabulary)

    def _append(self, token: Token) -> None:
        self.tokens.append(self._codec.number(token))
        if token.logprob is not None:
            self._logprobs.append(token.logprob)
        piece = token.text
        if self._dangling and not any(self._pieces):
            piece = self._finished_character()
        self._pieces.append(piece)
        if token.is_end:
            self.ending = Ending.END_OF_SEQUENCE
        else:
            self.ending = self._text.add(_bytes(piece))

    def _finished_character(self) -> str:
        """Return the character that began before this step, once it is complete.

        Servers know nothing of where the prompt's last character ends: the text that they give
        here is none, or repeats the prompt's [run, vLLM 0.32].
        """
        text = self._codec.text([*self._dangling, *self.tokens], self._cancelled)
        incomplete = text.endswith(UNFINISHED) and len(self.tokens) < CHARACTER_TOKENS
        return "" if incomplete else text


def _bytes(piece: str) -> bytes:
    return piece.encode(errors="replace")
