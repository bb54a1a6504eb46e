"""What a step costs: wall time and tokens, by who did the work."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Literal, Protocol

from specguard_chains.decoding.engine import Counters
from specguard_chains.decoding.steps import Source, StepSeconds, StepTokens


class Counting(Protocol):
    """A session, or what stands in for one."""

    counters: Counters


class Ledger:
    """What the step in progress has cost so far, by who did the work."""

    def __init__(self) -> None:
        """Start at nothing."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tokens: Counter[tuple[Source, str]] = Counter()

    @contextmanager
    def charge(
        self,
        source: Source,
        session: Counting,
        *,
        verify: bool = False,
        written_as: Literal["written", "proposed"] = "written",
    ) -> Iterator[None]:
        """Book the block's wall time, and the session's work in it as that model's.

        What blocks within it book is theirs. Of passes that several requests share, the time counts
        for each, and the tokens are its own.
        """
        before, booked = replace(session.counters), self._tokens.copy()
        try:
            with self.time("verify" if verify else source):
                yield
        finally:
            for what in ("written", "guessed", "read", "reused"):
                spent = getattr(session.counters, what) - getattr(before, what)
                booked_as = written_as if what == "written" else what
                self._tokens[source, booked_as] = booked[source, booked_as] + spent

    @contextmanager
    def time(self, what: Source | Literal["verify", "select"]) -> Iterator[None]:
        """Book the block's wall time, without that of blocks within it."""
        start, before = perf_counter(), sum(self._seconds.values())
        try:
            yield
        finally:
            within = sum(self._seconds.values()) - before
            self._seconds[what] += perf_counter() - start - within

    def count(self, source: Source, what: Literal["kept", "passes"], n: int) -> None:
        """Book drafted tokens that were kept, or passes over drafted tokens."""
        self._tokens[source, what] += n

    def settle(self) -> tuple[StepTokens, StepSeconds]:
        """Return the step's costs and start anew."""
        tokens, seconds = self._tokens, self._seconds
        self._tokens, self._seconds = Counter(), defaultdict(float)
        return StepTokens(
            drafted=tokens[Source.DRAFT, "written"],
            proposed=tokens[Source.DRAFT, "proposed"],
            kept=tokens[Source.DRAFT, "kept"],
            regenerated=tokens[Source.TARGET, "written"],
            salvaged=tokens[Source.TARGET, "guessed"],
            draft_read=tokens[Source.DRAFT, "read"],
            target_read=tokens[Source.TARGET, "read"],
            draft_reused=tokens[Source.DRAFT, "reused"],
            target_reused=tokens[Source.TARGET, "reused"],
            target_passes=tokens[Source.TARGET, "passes"],
        ), StepSeconds(
            draft=seconds[Source.DRAFT],
            verify=seconds["verify"],
            select=seconds["select"],
            target=seconds[Source.TARGET],
        )
