"""Seconds of a model's passes on one machine, by how much a pass computes.

A pass is one run of the model over some tokens. Three kinds differ in what they compute for the
same number of tokens, and all else is made of them:

    decode(k)   one more token of each of k candidates, side by side; each drawn from its logits
    read(n)     n tokens that somebody else has written (a prompt, the other model's steps); only
                the last one's logits are computed
    verify(n)   n tokens of one continuation, with the logits of all of them

All at about `context_tokens` tokens of context: attention over a longer one costs more, which is
neglected. Seconds are wall time, of the engine's own work around the pass too (drawing a token,
rolling attention out), not of what decoders and callers do.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specguard_chains.decoding.steps import Source
from specguard_chains.errors import ConfigurationError


class Kind(StrEnum):
    """What a pass is for."""

    DECODE = "decode"
    READ = "read"
    VERIFY = "verify"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Curve(_Record):
    """Seconds by size, at the sizes that were measured."""

    sizes: tuple[int, ...] = Field(min_length=1)
    seconds: tuple[float, ...]

    @model_validator(mode="after")
    def _checked(self) -> Curve:
        if len(self.sizes) != len(self.seconds):
            raise ValueError(f"{len(self.sizes)} sizes and {len(self.seconds)} times")
        if self.sizes[0] < 1 or any(a >= b for a, b in pairwise(self.sizes)):
            raise ValueError(f"sizes must be positive and ascend, not {self.sizes}")
        if min(self.seconds) <= 0:
            raise ValueError(f"a pass takes time: {min(self.seconds)} s is none")
        return self

    @classmethod
    def of(cls, points: dict[int, float]) -> Curve:
        """Return the curve through seconds by size."""
        sizes = sorted(points)
        return cls(sizes=tuple(sizes), seconds=tuple(points[size] for size in sizes))

    def at(self, size: float) -> float:
        """Return the seconds at a size.

        In between linearly; beyond the last size with the last slope, which is never taken to fall;
        below the first one in proportion, so that a fraction of a pass costs its share. A single
        size is the cost of that many, however many there are.
        """
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0] or len(sizes) == 1:
            return seconds[0] * size / sizes[0]
        last = next((i for i, known in enumerate(sizes) if known >= size), len(sizes) - 1)
        slope = (seconds[last] - seconds[last - 1]) / (sizes[last] - sizes[last - 1])
        if size > sizes[-1]:
            return seconds[-1] + max(slope, 0.0) * (size - sizes[-1])
        return seconds[last] - slope * (sizes[last] - size)

    def scaled(self, factor: float) -> Curve:
        """Return the curve of a model that takes so many times as long."""
        return Curve(sizes=self.sizes, seconds=tuple(factor * each for each in self.seconds))


class Costs(_Record):
    """What one engine's passes cost."""

    engine: str
    context_tokens: int
    attention: bool = False
    """Whether attention was read meanwhile, as grounding needs it."""
    decode: Curve
    """By candidates; from one on."""
    read: Curve
    verify: Curve | None = None
    logits: bool = True
    """Whether the engine shows its logits; without, nothing is salvaged, and there is no
    speculative decoding."""
    call_s: float = Field(default=0.0, ge=0)
    """Seconds that each request to a server adds, whatever it computes."""
    missing: tuple[str, ...] = ()
    """What could not be measured, and why."""

    @property
    def token_s(self) -> float:
        """Seconds of a token that the model writes alone."""
        return self.decode.at(1)

    def read_token_s(self, tokens: float) -> float:
        """Return the seconds of each of some tokens that are read in one pass."""
        return self.read.at(tokens) / tokens

    def seconds(self, kind: Kind, size: float) -> float:
        """Return the seconds of a pass.

        Raises:
            ConfigurationError: It is not known what that kind of pass costs.
        """
        curve: Curve | None = getattr(self, kind)
        if curve is None:
            raise ConfigurationError(
                f"what {self.engine} takes to verify a block of tokens is not known: "
                f"{'; '.join(self.missing) or 'it was not measured'}; plan without speculative "
                "decoding, or with an engine that runs in this process"
            )
        return curve.at(size)

    def scaled(self, factor: float) -> Costs:
        """Return the costs of a model that takes so many times as long for everything."""
        curves = {
            kind.value: curve.scaled(factor)
            for kind in Kind
            if (curve := getattr(self, kind)) is not None
        }
        return self.model_copy(update=curves)


class Machine(_Record):
    """What the costs were measured on."""

    cpu: str
    cores: int
    threads: int | None
    """That the engines were told to use; None left it to them."""
    versions: dict[str, str]
    """Of the packages that compute."""
    measured: str
    """Date and time."""
    took_s: float
    """How long the measurement took."""


class PairCosts(_Record):
    """The costs of a draft and a target."""

    draft: Costs
    """Without attention: as it drafts for those who read none, and as it writes alone."""
    draft_with_attention: Costs | None = None
    target: Costs
    target_with_attention: Costs | None = None
    same_vocabulary: bool = True
    """Whether they exchange tokens, which speculative decoding needs."""
    machine: Machine

    @property
    def can_speculate(self) -> bool:
        """Whether token-level speculative decoding is possible."""
        return self.same_vocabulary and self.draft.logits and self.target.logits

    @property
    def ratio(self) -> float:
        """How many times as long as the draft the target takes to write a token."""
        return self.target.token_s / self.draft.token_s

    def at_ratio(self, ratio: float) -> PairCosts:
        """Return the costs with a draft that takes the target's time / ratio for a token.

        Its other passes become cheaper, or dearer, in the same proportion.
        """
        factor = self.ratio / ratio
        read = self.draft_with_attention
        return self.model_copy(
            update={
                "draft": self.draft.scaled(factor),
                "draft_with_attention": None if read is None else read.scaled(factor),
            }
        )

    def of(self, source: Source, *, attention: bool = False) -> Costs:
        """Return the costs of a role, as its model computes when attention is read or not.

        Raises:
            ConfigurationError: They were measured without attention, which is to be read.
        """
        plain, reading = (
            (self.draft, self.draft_with_attention)
            if source is Source.DRAFT
            else (self.target, self.target_with_attention)
        )
        if not attention:
            return plain
        if reading is None:
            raise ConfigurationError(
                f"the costs of {plain.engine} were measured without attention; measure them anew "
                "with these settings, or plan for confidence_weight=1"
            )
        return reading
