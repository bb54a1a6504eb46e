"""A step while a model writes it."""

from __future__ import annotations

import numpy as np

from specguard_chains.decoding.boundaries import Boundary, Ending, StepText
from specguard_chains.decoding.cache import Tokenizer
from specguard_chains.decoding.engine import Candidate, Reading


class StepWriter:
    """Takes a step's tokens one by one and says when it ends."""

    def __init__(self, boundary: Boundary, tokenizer: Tokenizer, dangling: bytes = b"") -> None:
        """Start empty; `dangling` is an unfinished character that the answer ends with so far."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.grounding: list[float] = []
        self.ending: Ending | None = None
        """Set with the step's last token."""
        self._text = StepText(boundary, dangling)
        self._tokenizer = tokenizer

    def write(self, token: int, logprob: float) -> None:
        """Append a token with its raw log-probability."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self._tokenizer.is_end(token):
            self.ending = Ending.END_OF_SEQUENCE
        else:
            self.ending = self._text.add(self._tokenizer.token_bytes(token))

    def so_far(self) -> Candidate:
        """Return the step as if it ended here."""
        unread = Reading(np.array(self.logprobs, dtype=np.float32))
        return Candidate(
            tuple(self.tokens),
            self._text.text,
            unread,
            Ending.REJECTED_EARLY,
            self._tokenizer.vocabulary,
        )

    def candidate(self, *, grounded: bool = False) -> Candidate:
        """Return the step, once it has ended."""
        assert self.ending is not None
        return Candidate(
            tuple(self.tokens),
            self._text.text,
            Reading(
                np.array(self.logprobs, dtype=np.float32),
                np.array(self.grounding, dtype=np.float32) if grounded else None,
            ),
            self.ending,
            self._tokenizer.vocabulary,
        )
