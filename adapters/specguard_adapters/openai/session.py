"""One growing sequence on a server that keeps nothing of it: every request sends it whole.

The server's prefix cache makes that cheap. The counters tell what a server with a cache that
forgets nothing has computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from specguard_adapters.openai.candidate import CandidateInProgress
from specguard_adapters.openai.errors import CONTEXT_LENGTH
from specguard_adapters.openai.http import Cancelled
from specguard_adapters.openai.writer import Server, Writer
from specguard_chains.decoding.boundaries import Boundary, Ending
from specguard_chains.decoding.cache import common_prefix
from specguard_chains.decoding.engine import Candidate, Counters, Look, Reading, Watch
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.errors import ConfigurationError, ContextOverflowError, EngineError

_WHOLE = (Ending.BOUNDARY, Ending.STOP_STRING, Ending.END_OF_SEQUENCE)
"""Steps that end so end with a whole character."""
PATIENCE_S = 1.0
"""Translating a foreign step is too little work to be cancelled at, unless the server hangs."""


class OpenAISession:
    """A `Session` on a server."""

    def __init__(self, server: Server, prompt: Sequence[int], cancelled: Cancelled) -> None:
        """Start with a prompt."""
        self.counters = Counters()
        self._server = server
        self._cancelled = cancelled
        self._tokens = list(prompt)
        self._prompt_length = len(self._tokens)
        self._computed = 0  # tokens that the server has seen
        self._written: list[CandidateInProgress] = []
        self._read: list[int] = []  # the step that was read last
        self._may_dangle = False
        self._translated: tuple[str, list[int]] | None = None
        self._closed = False

    @property
    def length(self) -> int:
        """See `Session.length`."""
        return len(self._tokens)

    @property
    def room(self) -> int:
        """See `Session.room`."""
        return self._server.context_length - len(self._tokens)

    def sample(
        self,
        n: int,
        boundary: Boundary,
        sampling: Sampling,
        *,
        seed: Sequence[int],
        watch: Watch | None = None,
        guess: Candidate | None = None,
        look: Look | None = None,
    ) -> list[Candidate]:
        """See `Session.sample`. Equal candidates (greedy sampling) are written once.

        A server has its own ways to compute several tokens at a time: guesses are not sent.
        Candidate i has the seed of candidate 0 plus i, which is how vLLM seeds those of one
        request.
        """
        self._require_ready(boundary.max_tokens)
        if n > self._server.max_candidates:
            raise ConfigurationError(
                f"{n} candidates are more than the engine's max_candidates="
                f"{self._server.max_candidates}; make it with more"
            )
        distinct = 1 if sampling.greedy else n
        codec, dangling = self._server.codec, self._dangling()
        begun = [
            CandidateInProgress(boundary, codec, dangling, self._cancelled) for _ in range(distinct)
        ]
        writer = Writer(
            self._server,
            self._tokens,
            self.counters,
            self._cancelled,
            boundary,
            sampling,
            _first_seed(seed),
        )
        watch = watch if self._server.completions.features.logprobs else None
        self._note_read()
        self._written, self._read = begun, []
        if self._server.completions.features.several or distinct == 1:
            writer.write(begun, 0, watch)
        else:
            writer.write_each(begun, watch)
        candidates = [one.finished(self._server.vocabulary) for one in begun]
        return candidates if distinct == n else candidates * n

    def read(self, candidate: Candidate) -> Reading:
        """See `Session.read`."""
        tokens = self._own_tokens(candidate)
        self._require_ready(len(tokens))
        features = self._server.completions.features
        if features.scoring is None:
            raise ConfigurationError(
                f"the server of {self._server.name} does not tell (rightly) how likely a given "
                "text is, so it cannot verify with its own signals; set verify_with='draft', or "
                "use vLLM"
            )
        codec = self._server.codec
        scored = tokens
        if not features.token_ids:  # the server tokenizes the whole text anew
            scored = codec.encode_text(candidate.text, self._tokens, self._cancelled)
        logprobs = np.zeros(0, dtype=np.float32)
        if scored:
            payload = codec.payload([*self._tokens, *tokens])
            logprobs = self._server.completions.score(payload, scored, cancelled=self._cancelled)
        self._note_read()
        self.counters.read += len(scored)
        self._written, self._read = [], tokens
        return Reading(logprobs)

    def fits(self, candidate: Candidate) -> bool:
        """See `Session.fits`."""
        return len(self._own_tokens(candidate)) <= self.room

    def accept(self, candidate: Candidate) -> None:
        """See `Session.accept`."""
        tokens = self._own_tokens(candidate)
        self._require_room(len(tokens))
        if not tokens:
            return
        known = [*(one.tokens for one in self._written), self._read]
        self._computed += max(common_prefix(one, tokens) for one in known)
        same = [one.may_dangle for one in self._written if one.tokens == tokens]
        foreign = candidate.vocabulary != self._server.vocabulary
        self._may_dangle = not foreign and candidate.ending not in _WHOLE and same != [False]
        self._tokens += tokens
        self._forget_candidates()

    def rollback(self, length: int) -> None:
        """See `Session.rollback`."""
        if not self._prompt_length <= length <= len(self._tokens):
            raise ValueError(
                f"cannot roll back to {length} tokens: the prompt has {self._prompt_length}, "
                f"the sequence {len(self._tokens)}"
            )
        if not self._server.codec.can_end(self._tokens, length):
            raise EngineError(
                f"cannot roll back to {length} tokens, which is within a step that another model "
                f"wrote: the server of {self._server.name} gives no token ids"
            )
        self._forget_candidates()
        if length < len(self._tokens):
            del self._tokens[length:]
            self._computed = min(self._computed, length)
            self._may_dangle = length > self._prompt_length

    def close(self) -> None:
        """See `Session.close`."""
        self._closed = True
        self._forget_candidates()

    def _dangling(self) -> list[int]:
        """Return the tokens of the character that the sequence begins and does not finish."""
        if not self._may_dangle:
            return []
        return self._server.codec.unfinished(self._tokens[self._prompt_length :], self._cancelled)

    def _note_read(self) -> None:
        """Count what the server has to read of the sequence."""
        self.counters.read += len(self._tokens) - self._computed
        self._computed = len(self._tokens)

    def _forget_candidates(self) -> None:
        self._written, self._read, self._translated = [], [], None

    def _own_tokens(self, candidate: Candidate) -> list[int]:
        """The candidate's tokens in this session's vocabulary."""
        if candidate.vocabulary == self._server.vocabulary:
            return list(candidate.tokens)
        if self._translated is None or self._translated[0] != candidate.text:
            tokens = self._server.codec.encode_text(
                candidate.text, self._tokens, _after(PATIENCE_S, self._cancelled)
            )
            self._translated = candidate.text, tokens
        return list(self._translated[1])

    def _require_ready(self, tokens: int) -> None:
        if self._closed:
            raise EngineError("the session is closed; open another one")
        self._server.check(self._cancelled)
        self._require_room(tokens)

    def _require_room(self, tokens: int) -> None:
        if tokens > self.room:
            raise ContextOverflowError(
                f"{tokens} more tokens do not fit: {len(self._tokens)} of the context's "
                f"{self._server.context_length} are taken; raise {CONTEXT_LENGTH}, have the server "
                "use a longer one, or shorten the prompt"
            )


def _after(seconds: float, cancelled: Cancelled) -> Cancelled:
    """Ask whether a request was cancelled only after some time."""
    since = time.monotonic()
    return cancelled and (lambda: time.monotonic() - since > seconds and cancelled())


def _first_seed(seed: Sequence[int]) -> int:
    """Return the first candidate's seed, small enough for every server."""
    return int(np.random.SeedSequence([int(part) for part in seed]).generate_state(1)[0]) >> 2
