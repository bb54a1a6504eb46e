"""The contract between the decoders and whatever runs a model.

An `Engine` is a loaded model with its tokenizer and chat template. A `Session` is one growing
sequence of tokens in that engine. Decoders hold sessions and never see tensors: they ask for
candidate continuations (`sample`), for the model's signals over given tokens (`read`), and say
what the sequence goes on with (`accept`).

Local engines share one implementation of all this, `decoding.local`; they add only the forward
pass. A remote engine implements `Engine` and `Session` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.boundaries import Boundary, Ending
from specguard_chains.decoding.constraint import Constraint
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.token_tree import TokenTree
from specguard_chains.errors import EngineError

if TYPE_CHECKING:
    from specguard_chains.decoding.step_writer import StepWriter


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the answer continues: chat messages for the model's template, or raw text."""

    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    text: str | None = None
    """Raw text, continued as it stands; no template is applied to it."""
    passages: Sequence[str] = ()
    """Texts that stand in the prompt to the letter, such as what a search has found: readings say
    how much of the attention is paid to each."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A model's signals over T tokens, read in the context that they continue."""

    logprobs: FloatArray
    """log p(token | everything before it), temperature 1; shape (T,)."""
    grounding: FloatArray | None = None
    """Attention mass that reaches the context before these tokens (ABGV); shape (T,), or one for
    each token of another model that read them. The last token of a candidate that was rejected
    early may lack it."""
    passages: FloatArray | None = None
    """What is paid to each of the prompt's passages of the attention that grounding is rolled out
    from, a mean over the layers. Shape (tokens of grounding, P); None if none are read."""
    state: FloatArray | None = None
    """Hidden state of the last of these tokens, shape (width,); None if none is read."""

    def __post_init__(self) -> None:
        """Refuse numbers that no verdict can rest on."""
        for signal in (self.logprobs, self.grounding, self.passages, self.state):
            if signal is not None and not isfinite(float(signal.sum())):
                raise EngineError("a model's signals are not finite numbers; its file is faulty")

    @property
    def confidence(self) -> float:
        """The lowest token log-probability (LPBV, paper section 3.3)."""
        return float(self.logprobs.min(initial=0.0))

    @property
    def min_grounding(self) -> float | None:
        """The lowest token grounding (ABGV, paper section 3.2), None if none was read."""
        if self.grounding is None or self.grounding.size < min(self.logprobs.size, 1):
            return None
        return float(self.grounding.min(initial=1.0))

    @property
    def passage_shares(self) -> tuple[float, ...]:
        """The attention paid to each passage, a mean over the tokens; () if none were read."""
        if self.passages is None or not len(self.passages):
            return ()
        return tuple(self.passages.mean(axis=0).tolist())


@dataclass(frozen=True, slots=True)
class Candidate:
    """One possible next step, as its model wrote it."""

    tokens: tuple[int, ...]
    text: str
    """The tokens' text, without the end-of-sequence token."""
    reading: Reading
    ending: Ending
    vocabulary: str
    """Fingerprint of the tokenizer that `tokens` belong to."""

    @property
    def ends_sequence(self) -> bool:
        """Whether the model ended its answer with this step."""
        return self.ending is Ending.END_OF_SEQUENCE


Watch = Callable[[float, float | None], bool]
"""(lowest log-prob, lowest grounding if known) so far -> whether a step can still be accepted."""

Look = Callable[[Candidate], bool]
"""A step so far -> whether it can still be accepted. It may let another model read the step."""


@dataclass(slots=True)
class Counters:
    """What a session has computed so far, in tokens."""

    read: int = 0
    """Tokens that the model read without writing them (prompt, foreign steps)."""
    written: int = 0
    """Tokens that the model sampled, over all candidates."""
    guessed: int = 0
    """Of these, the ones that a guess had right."""
    reused: int = 0
    """Prompt tokens taken over from an earlier request's cache."""


class Session(Protocol):
    """One growing sequence: the prompt and the accepted steps."""

    counters: Counters

    @property
    def length(self) -> int:
        """Tokens of the sequence, prompt included."""
        ...

    @property
    def room(self) -> int:
        """Tokens that still fit into the context."""
        ...

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
        """Return n candidate steps that continue the sequence; the sequence stays as it is.

        Candidate i draws from the generator seeded with (*seed, i), so that it does not depend
        on n. Once `watch` denies every candidate, drafting stops: early rejection. So it may once
        `look` denies the only one, which is asked now and then. What the candidates have in common
        with `guess` may be computed several tokens at a time; that changes no text (in speculative
        decoding, not its law).

        Raises:
            ContextOverflowError: The step and its candidates do not fit into the context.
            DecodingCancelled: The request was cancelled.
        """
        ...

    def read(self, candidate: Candidate) -> Reading:
        """Return this model's own signals over a candidate that continues the sequence."""
        ...

    def fits(self, candidate: Candidate) -> bool:
        """Whether there is room for a candidate, in this session's own tokens."""
        ...

    def accept(self, candidate: Candidate) -> None:
        """Continue the sequence with a candidate, whoever wrote it.

        What this session has computed for these tokens is kept, the rest of the candidates is
        dropped; foreign tokens are read only when the session is next asked for something. A
        candidate of another vocabulary is taken over as text.
        """
        ...

    def rollback(self, length: int) -> None:
        """Cut the sequence to its first `length` tokens."""
        ...

    def close(self) -> None:
        """Give the sequence's memory back to the engine, whose next session may reuse it."""
        ...


class LogitSession(Session, Protocol):
    """A session that shows its model's logits, as lossless decoding needs them."""

    @property
    def tokens(self) -> Sequence[int]:
        """The sequence, prompt included; not to be kept, as it goes on."""
        ...

    def logits(self, tree: TokenTree) -> FloatArray:
        """Return the logits after each node that the tree has gained since it was last given here.

        The first call begins with node 0, the end of the sequence. The tree must be the same
        object until the sequence goes on; the sequence stays as it is.

        Returns:
            Shape (new nodes, vocabulary); valid until the session's next call.

        Raises:
            ContextOverflowError: The tree's longest path does not fit into the context.
            DecodingCancelled: The request was cancelled.
        """
        ...

    def tokens_of(self, candidate: Candidate) -> list[int]:
        """Return a candidate's tokens in this session's vocabulary."""
        ...

    def admits(self, tokens: Sequence[int]) -> int:
        """Return how many of some tokens the session's constraint allows, one after the other."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Return text's tokens; special tokens in it stay text, nothing is added."""
        ...

    def writer(self, boundary: Boundary) -> StepWriter:
        """Return an empty step that continues the sequence."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Continue the sequence with tokens of its own vocabulary.

        What a tree's path has in common with them is kept and not computed again.
        """
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can give, declared once at load time."""

    in_process: bool = False
    """It computes in this process: see `compute_thread`."""
    logprobs: bool = True
    """Candidates carry the log-probabilities of their tokens; without, their reading is empty."""
    scoring: bool = True
    """`Session.read` works: the model's signals over text that it has not written."""
    logits: bool = False
    """Sessions are `LogitSession`s."""
    attention: bool = False
    """Readings carry grounding if a session asks for it."""
    states: bool = False
    """Readings carry a hidden state if a session asks for it."""
    max_candidates: int = 1
    """Most candidates of one `sample`."""
    max_candidate_tokens: int | None = None
    """Most tokens of a step that is sampled in several candidates; None: no limit of its own."""
    constraints: bool = False
    """Sessions can be held to a `Constraint`."""
    max_parallel: int = 1
    """Requests that are admitted at a time."""


@runtime_checkable
class Engine(Protocol):
    """A loaded model with its tokenizer and chat template."""

    @property
    def name(self) -> str:
        """The model's name for people and metadata."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What sessions of this engine can give."""
        ...

    @property
    def vocabulary(self) -> str:
        """Fingerprint of the tokenizer; engines with equal ones exchange tokens."""
        ...

    @property
    def context_length(self) -> int:
        """The most tokens that a sequence may hold, prompt included."""
        ...

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the prompt's tokens, rendered by the model's chat template."""
        ...

    def open(
        self,
        prompt: Prompt,
        *,
        grounding: GroundingSpec | None = None,
        cancelled: Callable[[], bool] | None = None,
        constraint: Constraint | None = None,
        state_layer: int | None = None,
    ) -> Session:
        """Start a sequence with a prompt, reusing cached prefixes of earlier ones.

        Args:
            prompt: What the sequence starts with.
            grounding: Read attention in this form; None if nobody needs it.
            cancelled: Asked at every token; True raises DecodingCancelled.
            constraint: What the text after the prompt may look like: nothing else is drawn, and
                log-probs are those of the allowed tokens.
            state_layer: Read the hidden state that leaves this layer, counted from 0, at the end of
                each step; None if nobody needs it.

        Raises:
            ContextOverflowError: The prompt leaves no room for an answer.
            ConfigurationError: The engine cannot hold a session to a constraint, or a passage does
                not stand in the prompt whose attention is read.
            AttentionUnavailableError: Grounding was asked of an engine that has none.
            StatesUnavailableError: A hidden state was asked of an engine that has none.
        """
        ...

    def chat_template(self) -> str | None:
        """Return the Jinja source by which prompts with tools are rendered, None if not known."""
        ...

    def exclusive(
        self, cancelled: Callable[[], bool] | None = None, *, max_waiting: int | None = None
    ) -> AbstractContextManager[None]:
        """Admit a request; sessions are used within. Others queue in the order of their coming.

        Raises:
            DecodingCancelled: `cancelled` said so before the request was admitted.
            QueueFullError: `max_waiting` others are waiting already.
        """
        ...

    def close(self) -> None:
        """Free the model. Sessions of a closed engine raise EngineError."""
        ...
