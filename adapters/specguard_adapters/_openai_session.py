"""One growing sequence on a server that keeps nothing of it: every request sends it whole.

The server's prefix cache makes that cheap. The counters tell what a server with a cache that
forgets nothing has computed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from specguard_adapters._openai_codec import Codec
from specguard_adapters._openai_completions import Completions, Event
from specguard_adapters._openai_draft import Draft
from specguard_adapters._openai_errors import Passing
from specguard_adapters._openai_http import Cancelled
from specguard_chains.decoding.boundaries import Boundary, Ending
from specguard_chains.decoding.cache import common_prefix
from specguard_chains.decoding.engine import Candidate, Counters, Reading, Watch
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.errors import ConfigurationError, ContextOverflowError, EngineError

_WHOLE = (Ending.BOUNDARY, Ending.STOP_STRING, Ending.END_OF_SEQUENCE)
"""Steps that end so end with a whole character."""


PATIENCE_S = 1.0
"""Translating a foreign step is too little work to be cancelled at, unless the server hangs."""


@dataclass(frozen=True, slots=True)
class Server:
    """What sessions of one engine share."""

    name: str
    vocabulary: str
    context_length: int
    max_candidates: int
    completions: Completions
    codec: Codec
    check: Callable[[Cancelled], None]
    """Raises if there must be no more requests."""


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
        self._drafts: list[Draft] = []
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
    ) -> list[Candidate]:
        """See `Session.sample`. Equal candidates (greedy sampling) are written once.

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
        drafts = [Draft(boundary, codec, dangling, self._cancelled) for _ in range(distinct)]
        writer = _Writer(self, boundary, sampling, _first_seed(seed))
        watch = watch if self._server.completions.features.logprobs else None
        self._note_read()
        self._drafts, self._read = drafts, []
        if self._server.completions.features.several or distinct == 1:
            writer.write(drafts, 0, watch)
        else:
            writer.write_each(drafts, watch)
        candidates = [draft.candidate(self._server.vocabulary) for draft in drafts]
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
        self._drafts, self._read = [], tokens
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
        known = [*(draft.tokens for draft in self._drafts), self._read]
        self._computed += max(common_prefix(one, tokens) for one in known)
        same = [draft.may_dangle for draft in self._drafts if draft.tokens == tokens]
        foreign = candidate.vocabulary != self._server.vocabulary
        self._may_dangle = not foreign and candidate.ending not in _WHOLE and same != [False]
        self._tokens += tokens
        self._forget_drafts()

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
        self._forget_drafts()
        if length < len(self._tokens):
            del self._tokens[length:]
            self._computed = min(self._computed, length)
            self._may_dangle = length > self._prompt_length

    def close(self) -> None:
        """See `Session.close`."""
        self._closed = True
        self._forget_drafts()

    def _dangling(self) -> list[int]:
        """Return the tokens of the character that the sequence begins and does not finish."""
        if not self._may_dangle:
            return []
        return self._server.codec.unfinished(self._tokens[self._prompt_length :], self._cancelled)

    def _note_read(self) -> None:
        """Count what the server has to read of the sequence."""
        self.counters.read += len(self._tokens) - self._computed
        self._computed = len(self._tokens)

    def _forget_drafts(self) -> None:
        self._drafts, self._read, self._translated = [], [], None

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
                f"{self._server.context_length} are taken; have the server use a longer one, or "
                "shorten the prompt"
            )


@dataclass(frozen=True, slots=True)
class _Writer:
    """Has the server write candidates."""

    session: OpenAISession
    boundary: Boundary
    sampling: Sampling
    seed: int

    def write(self, drafts: Sequence[Draft], first: int, watch: Watch | None) -> None:
        """Write candidates side by side; the first one's number is `first`.

        A server that stops by itself may stop too early, as blank text is no step: then each of
        the candidates goes on alone.
        """
        self._request(drafts, drafts, first, watch)
        rounds = 0
        while open_drafts := [draft for draft in drafts if draft.ending is None]:
            rounds += 1
            for draft in open_drafts:
                if draft.ending is None:
                    number = first + drafts.index(draft) + rounds * self._max_candidates
                    self._request([draft], drafts, number, watch)
        if not self.session._server.completions.features.token_ids:
            for number, draft in enumerate(drafts, first):
                if draft.has_gaps:
                    self._fill_gaps(draft, number)

    def write_each(self, drafts: Sequence[Draft], watch: Watch | None) -> None:
        """Write candidates one after the other, for servers that cannot otherwise.

        A candidate that is denied is put aside, and written in full only if another one can be
        accepted.
        """
        for number, draft in enumerate(drafts):
            self.write([draft], number, watch)
            if watch is not None and not draft.denied(watch):
                watch = None
        if watch is None:
            for number, draft in enumerate(drafts):
                if draft.ending is Ending.REJECTED_EARLY:
                    draft.cut(0)
                    self.write([draft], number, None)

    def _request(
        self, drafts: Sequence[Draft], group: Sequence[Draft], number: int, watch: Watch | None
    ) -> None:
        """Write with one request until the server stops, each draft has ended, or all are denied.

        Drafts that are written together have written equally much.
        """
        session = self.session
        server = session._server
        lengths = [len(draft.tokens) for draft in drafts]

        def consume(events: Iterator[Event]) -> None:
            for draft, length in zip(drafts, lengths, strict=True):
                draft.cut(length)  # what a request that broke off has left
            stopped = set()
            for event in events:
                session.counters.written += drafts[event.index].take(event)
                if watch is not None and all(draft.denied(watch) for draft in group):
                    _end_early(group)
                    return
                if event.finish is not None:
                    stopped.add(event.index)
                if len(stopped) == len(drafts):
                    _read_to_the_end(events)
                    return
                if all(d.ending or i in stopped for i, d in enumerate(drafts)):
                    return
            raise server.completions.incomplete()

        server.completions.stream(
            server.codec.payload([*session._tokens, *drafts[0].tokens]),
            len(drafts),
            min(draft.room for draft in drafts),
            self.sampling,
            self.seed + number,
            [self.boundary.delimiter, *self.boundary.stop],
            consume,
            cancelled=session._cancelled,
        )

    def _fill_gaps(self, draft: Draft, number: int) -> None:
        """Have a candidate written again, unstreamed, where the stream has lost characters.

        llama-cpp-python decodes each token of a stream by itself, and drops characters that are
        spread over several; the text of a whole answer has them [run, llama-cpp-python 0.3.36].
        """
        server = self.session._server
        event = server.completions.write(
            server.codec.payload(self.session._tokens),
            len(draft.tokens),
            self.sampling,
            self.seed + number,
            cancelled=self.session._cancelled,
        )
        draft.replace(event)

    @property
    def _max_candidates(self) -> int:
        return self.session._server.max_candidates


def _after(seconds: float, cancelled: Cancelled) -> Cancelled:
    """Ask whether a request was cancelled only after some time."""
    since = time.monotonic()
    return cancelled and (lambda: time.monotonic() - since > seconds and cancelled())


def _read_to_the_end(events: Iterator[Event]) -> None:
    """Let the server finish its stream, so that its connection can be used again."""
    with suppress(Passing):  # everything of interest is here
        deque(events, maxlen=0)


def _end_early(drafts: Sequence[Draft]) -> None:
    for draft in drafts:
        if draft.ending is None:
            draft.ending = Ending.REJECTED_EARLY


def _first_seed(seed: Sequence[int]) -> int:
    """Return the first candidate's seed, small enough for every server."""
    return int(np.random.SeedSequence([int(part) for part in seed]).generate_state(1)[0]) >> 2
