"""Measuring an engine of this process, pass by pass.

Before each pass the session is as it stands when a step begins: its context computed, the logits
after it known, nothing beside it in the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import cast

from specguard_chains.decoding.engine import Engine, LogitSession, Prompt
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.token_tree import TokenTree
from specguard_chains.errors import ConfigurationError
from specguard_chains.planning.costs import Costs, Curve, Kind
from specguard_chains.planning.probes import CONTEXT, FILLER, QUESTION, Clock, Probe, Prober

VERIFIED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
READ = (1, 4, 16, 64, 192)
WRITTEN = 4
"""Tokens that are written to time one."""


class LocalProber(Prober):
    """Measures an engine that computes here and shows its logits."""

    def __init__(self, engine: Engine, grounding: GroundingSpec | None, clock: Clock) -> None:
        """Open a session and fill its context."""
        super().__init__(engine, grounding, clock)
        self.probes = [
            *((Kind.VERIFY, size) for size in VERIFIED),
            *((Kind.READ, size) for size in READ),
            *((Kind.DECODE, k) for k in self._candidates),
        ]
        prompt = Prompt(messages=[{"role": "user", "content": QUESTION}])
        self._session = cast("LogitSession", engine.open(prompt, grounding=grounding))
        needed = max(CONTEXT, self._session.length) + max(*READ, *VERIFIED)
        if needed > self._session.length + self._session.room:
            self._session.close()
            raise ConfigurationError(
                f"a context of {engine.context_length} tokens is too short to measure "
                f"{engine.name} in; set n_ctx to {needed} or more"
            )
        self._filler = self._session.encode_text(FILLER)
        missing = max(CONTEXT - self._session.length, 0)
        self._session.extend(list(islice(cycle(self._filler), missing)))
        self._length = self._session.length

    def warm_up(self) -> None:
        """See `Prober.warm_up`."""
        self._settle()
        self.run((Kind.VERIFY, 2), 0)
        self.run((Kind.DECODE, self._candidates[-1]), 0)

    def run(self, probe: Probe, turn: int) -> float:
        """See `Prober.run`."""
        kind, size = probe
        self._settle()
        if kind == Kind.DECODE:
            return self.written(self._session, size, WRITTEN)[1]
        tokens = list(islice(cycle(self._filler), turn, turn + size))
        return self._verify(tokens) if kind == Kind.VERIFY else self._read(tokens)

    def costs(self) -> Costs:
        """See `Prober.costs`."""
        return Costs(
            engine=self.engine.name,
            context_tokens=self._length,
            attention=self.grounding is not None,
            decode=Curve.of({k: s / WRITTEN for k, s in self.curve(Kind.DECODE).items()}),
            read=Curve.of(self.curve(Kind.READ)),
            verify=Curve.of(self.curve(Kind.VERIFY)),
        )

    def close(self) -> None:
        """See `Prober.close`."""
        self._session.close()

    def _settle(self) -> None:
        """Have the logits after the context computed, and nothing else in the memory."""
        self._session.logits(TokenTree(()))

    def _verify(self, tokens: Sequence[int]) -> float:
        tree, node = TokenTree([1] * len(tokens)), 0
        for token in tokens:
            node = tree.add(token, node)
        start = self._clock()
        self._session.logits(tree)
        return self._clock() - start

    def _read(self, tokens: Sequence[int]) -> float:
        self._session.extend(tokens)
        start = self._clock()
        self._settle()
        seconds = self._clock() - start
        self._session.rollback(self._length)
        return seconds
