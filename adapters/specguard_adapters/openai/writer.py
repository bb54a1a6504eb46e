"""Having a server write candidates: together or one by one, until each of them has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from specguard_adapters.openai.codec import Codec
from specguard_adapters.openai.completions import Completions, Event
from specguard_adapters.openai.draft import Draft
from specguard_adapters.openai.errors import Passing
from specguard_adapters.openai.http import Cancelled
from specguard_chains.decoding.boundaries import Boundary, Ending
from specguard_chains.decoding.engine import Counters, Watch
from specguard_chains.decoding.sampling import Sampling


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
                before = len(draft.tokens)
                if draft.ending is None:
                    number = first + drafts.index(draft) + rounds * self.server.max_candidates
                    self._request([draft], drafts, number, watch)
                if draft.ending is None and len(draft.tokens) == before:
                    raise self.server.completions.odd("stops before it has begun")
        if not self.server.completions.features.token_ids:
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
        server = self.server
        lengths = [len(draft.tokens) for draft in drafts]

        def consume(events: Iterator[Event]) -> None:
            for draft, length in zip(drafts, lengths, strict=True):
                draft.cut(length)  # what a request that broke off has left
            stopped = set()
            for event in events:
                if not 0 <= event.index < len(drafts):
                    raise server.completions.odd(f"has a candidate {event.index} too many")
                self.counters.written += drafts[event.index].take(event)
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
            server.codec.payload([*self.tokens, *drafts[0].tokens]),
            len(drafts),
            min(draft.room for draft in drafts),
            self.sampling,
            self.seed + number,
            [self.boundary.delimiter, *self.boundary.stop],
            consume,
            cancelled=self.cancelled,
        )

    def _fill_gaps(self, draft: Draft, number: int) -> None:
        """Have a candidate written again, unstreamed, where the stream has lost characters.

        llama-cpp-python decodes each token of a stream by itself, and drops characters that are
        spread over several; the text of a whole answer has them [run, llama-cpp-python 0.3.36].
        """
        server = self.server
        event = server.completions.write(
            server.codec.payload(self.tokens),
            len(draft.tokens),
            self.sampling,
            self.seed + number,
            cancelled=self.cancelled,
        )
        draft.replace(event)


def _read_to_the_end(events: Iterator[Event]) -> None:
    """Let the server finish its stream, so that its connection can be used again."""
    with suppress(Passing):  # everything of interest is here
        deque(events, maxlen=0)


def _end_early(drafts: Sequence[Draft]) -> None:
    for draft in drafts:
        if draft.ending is None:
            draft.ending = Ending.REJECTED_EARLY
