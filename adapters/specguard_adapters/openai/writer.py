"""Having a server write candidates: together or one by one, until each of them has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from specguard_adapters.openai.candidate import CandidateInProgress
from specguard_adapters.openai.codec import Codec
from specguard_adapters.openai.completions import Completions, Event
from specguard_adapters.openai.errors import TransientError
from specguard_adapters.openai.http import Cancelled
from specguard_chains.decoding.boundaries import Boundary, Ending
from specguard_chains.decoding.engine import Counters, Watch
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.errors import ServerError

Candidates = Sequence[CandidateInProgress]


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


@dataclass(frozen=True, slots=True)
class Writer:
    """Has the server write candidates."""

    server: Server
    tokens: Sequence[int]
    """What the candidates continue."""
    counters: Counters
    cancelled: Cancelled
    boundary: Boundary
    sampling: Sampling
    seed: int

    def write(self, candidates: Candidates, first: int, watch: Watch | None) -> None:
        """Write candidates side by side; the first one's number is `first`.

        A server that stops by itself may stop too early, as blank text is no step: then each of
        the candidates goes on alone.
        """
        self._request(candidates, candidates, first, watch)
        rounds = 0
        while unfinished := [candidate for candidate in candidates if candidate.ending is None]:
            rounds += 1
            for candidate in unfinished:
                before = len(candidate.tokens)
                if candidate.ending is None:
                    number = first + candidates.index(candidate)
                    number += rounds * self.server.max_candidates
                    self._request([candidate], candidates, number, watch)
                if candidate.ending is None and len(candidate.tokens) == before:
                    raise self.server.completions.implausible("stops before it has begun")
        if not self.server.completions.features.token_ids:
            for number, candidate in enumerate(candidates, first):
                if candidate.has_gaps:
                    self._fill_gaps(candidate, number)

    def write_each(self, candidates: Candidates, watch: Watch | None) -> None:
        """Write candidates one after the other, for servers that cannot otherwise.

        A candidate that is denied is put aside, and written in full only if another one can be
        accepted.
        """
        for number, candidate in enumerate(candidates):
            self.write([candidate], number, watch)
            if watch is not None and not candidate.denied(watch):
                watch = None
        if watch is None:
            for number, candidate in enumerate(candidates):
                if candidate.ending is Ending.REJECTED_EARLY:
                    candidate.cut(0)
                    self.write([candidate], number, None)

    def _request(
        self, candidates: Candidates, group: Candidates, number: int, watch: Watch | None
    ) -> None:
        """Write with one request until the server stops, all have ended, or the group is denied.

        Candidates that are written together have written equally much.
        """
        server = self.server
        lengths = [len(candidate.tokens) for candidate in candidates]

        def consume(events: Iterator[Event]) -> None:
            for candidate, length in zip(candidates, lengths, strict=True):
                candidate.cut(length)  # what a request that broke off has left
            stopped = set()
            for event in events:
                if not 0 <= event.index < len(candidates):
                    raise server.completions.implausible(f"has a candidate {event.index} too many")
                self.counters.written += candidates[event.index].take(event)
                if watch is not None and all(candidate.denied(watch) for candidate in group):
                    _end_early(group)
                    return
                if event.finish is not None:
                    stopped.add(event.index)
                if len(stopped) == len(candidates):
                    _read_to_the_end(events)
                    return
                if all(c.ending or i in stopped for i, c in enumerate(candidates)):
                    return
            raise server.completions.incomplete()

        server.completions.stream(
            server.codec.payload([*self.tokens, *candidates[0].tokens]),
            len(candidates),
            min(candidate.room for candidate in candidates),
            self.sampling,
            self.seed + number,
            [self.boundary.delimiter, *self.boundary.stop],
            consume,
            cancelled=self.cancelled,
        )

    def _fill_gaps(self, candidate: CandidateInProgress, number: int) -> None:
        """Have a candidate written again, unstreamed, where the stream has lost characters.

        llama-cpp-python decodes each token of a stream by itself, and drops characters that are
        spread over several; the text of a whole answer has them [run, llama-cpp-python 0.3.36].
        """
        server = self.server
        event = server.completions.write(
            server.codec.payload(self.tokens),
            len(candidate.tokens),
            self.sampling,
            self.seed + number,
            cancelled=self.cancelled,
        )
        candidate.replace(event)


def _read_to_the_end(events: Iterator[Event]) -> None:
    """Let the server finish its stream, so that its connection can be used again."""
    with suppress(TransientError, ServerError):  # everything of interest is here
        deque(events, maxlen=0)


def _end_early(candidates: Candidates) -> None:
    for candidate in candidates:
        if candidate.ending is None:
            candidate.ending = Ending.REJECTED_EARLY
