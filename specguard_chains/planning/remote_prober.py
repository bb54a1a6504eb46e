"""Measuring an engine by the texts that it writes and reads, as that of a server.

What a token takes is the difference between a long text and a short one, what a prompt takes is the
wait for the first token after a new one. Beyond that, every request takes a time of its own.
"""

from __future__ import annotations

from itertools import cycle, islice

from specguard_chains.decoding.engine import Engine, Prompt
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.planning.costs import Costs, Curve, Kind
from specguard_chains.planning.probes import CONTEXT, FILLER, Clock, Probe, Prober

WRITTEN = 16
"""Tokens of a long text; a short one has one."""
PROMPTS = (64, CONTEXT)
SCORED = (16, 64)
SHORTEST_S = 1e-6
"""A difference of times that noise has made nothing of."""


class RemoteProber(Prober):
    """Measures an engine by the texts that it writes and reads, as a server's."""

    CALL = "call"

    def __init__(self, engine: Engine, grounding: GroundingSpec | None, clock: Clock) -> None:
        """Open a session."""
        super().__init__(engine, grounding, clock)
        scored = SCORED if engine.capabilities.scoring else ()
        self.probes = [
            (self.CALL, 1),
            *((Kind.DECODE, k) for k in self._candidates),
            *((Kind.READ, size) for size in PROMPTS),
            *((Kind.VERIFY, size) for size in scored),
        ]
        self._session = engine.open(self._prompt("", CONTEXT), grounding=grounding)
        self._lengths: dict[int, int] = {}  # of prompts in the engine's own tokens

    def warm_up(self) -> None:
        """See `Prober.warm_up`."""
        self.written(self._session, 1, 1)

    def run(self, probe: Probe, turn: int) -> float:
        """See `Prober.run`. Seconds are those of whole requests."""
        kind, size = probe
        if kind == self.CALL:
            return self.written(self._session, 1, 1)[1]
        if kind == Kind.DECODE:
            return self.written(self._session, size, WRITTEN)[1]
        if kind == Kind.READ:
            return self._wait_for_first(turn, size)
        candidate = self.written(self._session, 1, size)[0][0]
        start = self._clock()
        self._session.read(candidate)
        return self._clock() - start

    def costs(self) -> Costs:
        """See `Prober.costs`."""
        call = self.curve(self.CALL)[1]
        written = self.curve(Kind.DECODE)
        latency = max(call - (written[1] - call) / (WRITTEN - 1), 0.0)
        decode = {
            k: max((seconds - latency) / WRITTEN, SHORTEST_S) for k, seconds in written.items()
        }
        read = {
            self._lengths[size]: max(seconds - call, SHORTEST_S)
            for size, seconds in self.curve(Kind.READ).items()
        }
        verify = {
            tokens: max(seconds - latency, SHORTEST_S)
            for tokens, seconds in self.curve(Kind.VERIFY).items()
        }
        return Costs(
            engine=self.engine.name,
            context_tokens=self._session.length,
            attention=self.grounding is not None,
            decode=Curve.of(decode),
            read=Curve.of(read),
            verify=Curve.of(verify) if verify else None,
            logits=False,
            call_s=latency,
            missing=self._missing(),
        )

    def close(self) -> None:
        """See `Prober.close`."""
        self._session.close()

    def _wait_for_first(self, turn: int, tokens: int) -> float:
        """Return how long the first token after a prompt takes that nobody has read before."""
        session = self.engine.open(self._prompt(f"{turn} {next(self._seeds)}. ", tokens))
        try:
            self._lengths[tokens] = session.length
            return self.written(session, 1, 1)[1]
        finally:
            session.close()

    def _prompt(self, start: str, tokens: int) -> Prompt:
        """Return a prompt of about so many tokens, four characters being one."""
        text = start + "".join(islice(cycle(FILLER), 4 * tokens))
        return Prompt(messages=[{"role": "user", "content": text}])

    def _missing(self) -> tuple[str, ...]:
        notes = [
            f"{self.engine.name} is measured by its answers only: a request's own time is taken "
            "for the same, whatever is computed"
        ]
        if not self.engine.capabilities.scoring:
            notes.append(f"{self.engine.name} does not read given text with log-probs")
        return tuple(notes)
