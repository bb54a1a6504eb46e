"""What a local engine adds: the forward pass over a KV memory, and a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy.typing as npt

from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.grounding import GroundingSpec, Rollout
from specguard_chains.errors import ConfigurationError

State = Mapping[str, npt.NDArray[Any]]
"""What a cache holds of a prompt, by names that are the cache's own."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What a forward pass gives for its n tokens."""

    logits: FloatArray
    """Shape (n, vocabulary), or (1, vocabulary) if only the last row was asked for; valid until
    this cache's next forward pass."""
    grounding: FloatArray | None
    """Shape (n,); None if no grounding is read."""
    passages: FloatArray | None = None
    """The attention paid to each passage, shape (n, P); None if none are read."""
    states: FloatArray | None = None
    """Hidden states of a step's tokens, shape (n, width); None if none are read."""


class Cache(Protocol):
    """KV memory of one sequence and of branches that share its beginning.

    Branch 0 is the sequence itself. The caller says which token stands at which position of which
    branch; the cache computes and remembers. After an error the caller calls `keep` with what was
    there before, and everything that the failed call has left behind must go.
    """

    @property
    def shareable(self) -> bool:
        """Whether other caches of the engine can `share` what this one holds."""
        ...

    def configure(
        self,
        grounding: GroundingSpec | None,
        cancelled: Callable[[], bool] | None,
        state_layer: int | None = None,
    ) -> None:
        """Prepare for a session. The cache is empty if the form of grounding changes.

        If only its passages change, the cache holds at most what stands before them. The hidden
        states after layer `state_layer`, counted from 0 and below the last, are read in passes over
        steps.
        """
        ...

    def share(self, other: Any, length: int) -> bool:
        """Begin with the first `length` tokens of another cache's sequence; this one is empty.

        They are context there, and stay it meanwhile; `other` is of the same engine, and its form
        of grounding is the same. False if the two have no memory in common: nothing was done.
        """
        ...

    def fork(self, n: int, length: int) -> None:
        """Let branches 1 to n - 1 share the first `length` tokens of branch 0."""
        ...

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        branches: Sequence[Sequence[int]],
        *,
        context: bool,
        all_logits: bool,
    ) -> Rows:
        """Compute tokens, each of which stands on one branch or on several that are equal so far.

        A token sees all that its branches hold before it, from earlier in the same call too.
        `context` says that the tokens belong to the context and not to a step in progress.
        """
        ...

    def cut(self, branch: int, length: int) -> None:
        """Drop what a branch holds of a step from position `length` on; others keep theirs."""
        ...

    def keep(self, branch: int, length: int) -> None:
        """Make a branch's first `length` tokens the sequence, and drop all the rest.

        The kept part of a step becomes context for the grounding of later ones.
        """
        ...

    def export(self, length: int) -> State:
        """Return what it holds of its sequence's first `length` tokens, for `restore`.

        They are context, and there are no branches. Only asked of engines with a prompt cache.
        """
        ...

    @property
    def restorable(self) -> bool:
        """Whether `restore` may find a place once this cache is empty; others may take it first."""
        ...

    def restore(self, state: State, length: int) -> bool:
        """Begin with `length` tokens that a cache of an engine like this one has exported.

        This one is empty. False if there is no place for them: nothing was done.
        """
        ...

    def close(self) -> None:
        """Free the memory."""
        ...


class Tokenizer(Protocol):
    """What a session needs to know of tokens."""

    @property
    def vocabulary(self) -> str:
        """Fingerprint of the vocabulary."""
        ...

    @property
    def n_tokens(self) -> int:
        """How many ids have a meaning; a model may have rows for more, which nobody draws from."""
        ...

    @property
    def end_token(self) -> int:
        """The token with which the model ends its turn."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Tokenize text as it stands: special tokens in it stay text, nothing is added."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of a token, empty for control tokens."""
        ...

    def is_end(self, token: int) -> bool:
        """Whether the token ends a sequence."""
        ...


@dataclass(slots=True, eq=False)
class CachedSequence:
    """A cache and the tokens that it holds: what one session leaves to the next."""

    cache: Cache
    grounding: GroundingSpec | None = None
    tokens: list[int] = field(default_factory=list)
    prompt_logits: tuple[int, FloatArray] | None = None
    """(n, logits after the first n tokens) of the latest prompt, so that the same prompt again
    gives the very same numbers."""
    reading: Sequence[int] = ()
    """The prompt that a session is reading into it, while others may share what it holds."""

    def clear(self) -> None:
        """Forget all tokens."""
        self.cut(0)

    def keep_prefix(self, prompt: Sequence[int]) -> int:
        """Drop all but the tokens that a prompt begins with; return their number."""
        length = common_prefix(self.tokens, prompt)
        self.cut(length)
        return length

    def cut(self, length: int) -> None:
        """Drop all but the first `length` tokens."""
        self.cache.keep(0, length)
        del self.tokens[length:]
        if self.prompt_logits is not None and self.prompt_logits[0] > length:
            self.prompt_logits = None

    def usable(self, prompt: Sequence[int], grounding: GroundingSpec | None) -> int:
        """Return how many of a prompt's first tokens it holds, read as they are to be read."""
        return self._in_common(self.tokens, prompt, grounding)

    def coming(self, prompt: Sequence[int], grounding: GroundingSpec | None) -> int:
        """Return the same for the time when it has read what it is reading."""
        return self._in_common(self.reading, prompt, grounding)

    def share(self, other: CachedSequence, length: int) -> bool:
        """Begin with the first tokens of another sequence, see `Cache.share`."""
        if not self.cache.share(other.cache, length):
            return False
        self.tokens = other.tokens[:length]
        latest = other.prompt_logits
        self.prompt_logits = latest if latest is not None and latest[0] <= length else None
        return True

    def _in_common(
        self, held: Sequence[int], prompt: Sequence[int], grounding: GroundingSpec | None
    ) -> int:
        length = common_prefix(held, prompt)
        if self.grounding == grounding:
            return length
        if self.grounding is None or grounding is None:
            return 0
        if not grounding.same_but_for_passages(self.grounding):
            return 0
        return int(min(length, self.grounding.before_passages, grounding.before_passages))


def rollout_for(
    spec: GroundingSpec | None, latest: Rollout | None, *, attention_layers: int, slots: int
) -> Rollout | None:
    """Return the rollout of a session: the latest one if its form is the same, None for none.

    The cache holds at most what stands before the passages, if these change.

    Raises:
        ConfigurationError: More layers are to be read than the engine shows.
    """
    if spec is None:
        return None
    if spec.layers > attention_layers:
        raise ConfigurationError(
            f"grounding over {spec.layers} layers needs more than the engine's "
            f"attention_layers={attention_layers}; load the model with more"
        )
    if latest is None or not latest.spec.same_but_for_passages(spec):
        return Rollout(spec, slots)
    if latest.spec != spec:
        latest.change_passages(spec)
    return latest


def check_branches(n: int, max_candidates: int) -> None:
    """Refuse more branches than a cache has room for.

    Raises:
        ConfigurationError: There are more.
    """
    if n > max_candidates:
        raise ConfigurationError(
            f"{n} candidates are more than the engine's max_candidates={max_candidates}; load the "
            "model with more"
        )


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many leading tokens two sequences share."""
    length = min(len(first), len(second))
    return next((n for n in range(length) if first[n] != second[n]), length)
