"""Timing what an engine computes: the part that is the same wherever it computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from statistics import median

from specguard_chains.decoding.boundaries import Boundary
from specguard_chains.decoding.engine import Candidate, Engine, Session
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.errors import EngineError
from specguard_chains.planning.costs import Costs

Clock = Callable[[], float]
Probe = tuple[str, int]
"""Kind of a pass, and its size."""

CONTEXT = 300
"""Tokens of context that passes are timed at."""
CANDIDATES = (1, 2, 4, 8)
TRIES = 4
"""So often a text is asked for that does not end of itself."""
QUESTION = "Tell in plain words how bread is baked, from the grain to the loaf."
FILLER = (
    "First the grain is cleaned and milled, and the flour rests for a week or two. The baker takes "
    "500 grams of it, adds 340 grams of water, 10 grams of salt and some yeast, and kneads the "
    "dough until it is smooth. It rises in a warm place for 90 minutes, is folded twice, shaped, "
    "and left alone again. Meanwhile the oven heats to 240 degrees. After 35 minutes the crust is "
    "brown, the loaf sounds hollow, and it cools on a rack before anybody cuts it. "
)
NO_END = "\0\0\0\0"
"""Ends no step."""


class Prober(ABC):
    """Times an engine's passes, and keeps the times."""

    probes: Sequence[Probe]

    def __init__(self, engine: Engine, grounding: GroundingSpec | None, clock: Clock) -> None:
        """Open a session."""
        self.engine = engine
        self.grounding = grounding
        self._clock = clock
        self._times: dict[Probe, list[float]] = defaultdict(list)
        self._seeds = count()
        self._candidates = [k for k in CANDIDATES if k <= engine.capabilities.max_candidates]

    @abstractmethod
    def warm_up(self) -> None:
        """Compute what only the first pass has to."""

    @abstractmethod
    def run(self, probe: Probe, turn: int) -> float:
        """Return the seconds that it takes."""

    @abstractmethod
    def costs(self) -> Costs:
        """Return what has been measured."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back."""

    def time(self, probe: Probe, turn: int) -> None:
        """Time a pass once more."""
        self._times[probe].append(self.run(probe, turn))

    def spent_s(self, probe: Probe) -> float:
        """Return for how long a pass has been timed in all."""
        return sum(self._times[probe])

    def curve(self, kind: str) -> dict[int, float]:
        """Return the medians of what was timed, by size."""
        return {size: median(t) for (what, size), t in self._times.items() if what == kind and t}

    def written(self, session: Session, k: int, tokens: int) -> tuple[list[Candidate], float]:
        """Return k candidates of so many tokens each, and the seconds that they took.

        Raises:
            EngineError: One of them ends before, each time that they are asked for.
        """
        boundary = Boundary(delimiter=NO_END, max_tokens=tokens)
        for _ in range(TRIES):
            start = self._clock()
            candidates = session.sample(k, boundary, Sampling(), seed=(next(self._seeds),))
            seconds = self._clock() - start
            if all(len(candidate.tokens) >= tokens for candidate in candidates):
                return candidates, seconds
        raise EngineError(
            f"{self.engine.name} ends its text before {tokens} tokens, {TRIES} times in a row: "
            "what a token takes cannot be measured; take a chat model"
        )
