"""The settings that the chat model, the command line and the benchmarks share, by one name each."""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from specguard_chains.decoding.decoder import CriticalSteps
from specguard_chains.decoding.grounding import GroundingForm
from specguard_chains.decoding.pacing import Patience
from specguard_chains.decoding.rewriting import Proposer, SpeculativeRewriting
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.slowdown import Slowdown
from specguard_chains.decoding.speculation import Children, Speculation
from specguard_chains.decoding.steps import Source

DecoderName = Literal[
    "specguard",
    "specguard-greedy",
    "speculative",
    "target",
    "draft",
    "selector",
    "rsd",
    "rsd-majority",
    "specreason",
    "target-majority",
    "draft-majority",
    "target-best-of-n",
    "draft-best-of-n",
    "random",
    "length",
]

SPECGUARD = ("specguard", "specguard-greedy")
PATIENCE = 1
"""SpecGuard's own, unless another is given."""
THRESHOLD, PAPERS_THRESHOLD = 0.8, 0.7
"""SpecGuard's own, and that of the methods to compare with."""

TOOL_INSTRUCTION = (
    "Call a tool only if you need its result to answer. When the results that you need are there, "
    "answer the user in plain words and call no tool."
)
SCHEMA_INSTRUCTION = "Give the answer as JSON that follows this schema:\n{schema}"

MAX_LEAVES = 64
"""Most branches of a draft's tree."""
MAX_SPECULATIVE_TOKENS = 31
"""With the token before them they are one pass: llama.cpp has room for 32 rows of logits."""


def usual_threshold(method: str) -> float:
    """Return the score from which a method keeps drafted steps, unless another one is given."""
    return THRESHOLD if method in SPECGUARD else PAPERS_THRESHOLD


def usual_patience(method: str, hand_back: int | None) -> int:
    """Return how many rejections stop a method's drafting, unless another number is given."""
    return PATIENCE if method in SPECGUARD and hand_back is None else 0


def drafts_one_first(
    candidates: int, doubt_margin: float | None, target_confidence: float | None
) -> bool:
    """Return whether the draft begins with one of several candidates.

    Recorded runs that are older than a margin of 1 have None for it.
    """
    margin = 1.0 if doubt_margin is None else doubt_margin
    return candidates > 1 and margin < 1 and target_confidence is None


class SpecGuardOptions(BaseModel):
    """Which models write, and how their steps are checked. Values are validated before use."""

    model_config = ConfigDict(
        arbitrary_types_allowed=True,
        extra="forbid",
        hide_input_in_errors=True,  # one of them is a secret; `call` names the others
        use_attribute_docstrings=True,
    )

    pair: str = "qwen2.5-coder-0.5b-1.5b"
    """A named pair of models; see `specguard models`."""
    draft: Any = None
    """The small model: a GGUF file, a known name, a folder or hub name (transformers), a server's
    openai://host:port/model, or an `Engine`; overrides the pair's."""
    target: Any = None
    """The large model, named in the same ways; overrides the pair's."""

    decoder: DecoderName = "specguard"
    """specguard, specguard-greedy (temperature 0, one candidate), speculative (token by token, the
    target's own text), one model alone, or a method to compare with: see docs/options.md."""
    num_candidates: int = Field(default=4, ge=1, le=64)
    """Candidate steps that are drafted at a time (the paper's k, there 16)."""
    num_target_candidates: int = Field(default=1, ge=1, le=64)
    """Candidates that the target samples of a step that it writes (the paper's k again); each costs
    it about as much as the first, unless it runs on a GPU."""
    doubt_margin: float = Field(default=0.1, ge=0, le=1)
    """Draft one candidate, and the others only if its score is nearer to the threshold than this;
    1 drafts all of them at once."""
    target_confidence: float | None = Field(default=None, le=0)
    """In such doubt ask the target in place of drafting others: the step is kept if the mean of its
    tokens' log-probabilities, read by the target, is at least this."""
    encoder: Any = None
    """How candidates are compared: a sentence-transformers model's name or folder, or a function
    from texts to vectors; by default hashed words and trigrams, which need no model."""
    threshold: float | None = Field(default=None, ge=0, le=1)
    """Score from which a drafted step is kept (tau). By default 0.8, and in the methods to compare
    with the papers' 0.7."""
    confidence_weight: float = Field(default=1.0, ge=0, le=1)
    """Weight of confidence against grounding in the score (beta; the paper's is 0.3); 1 needs no
    attention."""
    value_weight: float = Field(default=0.0, ge=0, le=1)
    """Weight of the draft's value head against confidence and grounding together."""
    reward_model: Any = None
    """What rates steps for rsd, best of n and value_weight: a value head's file, a process reward
    model's name or folder (transformers), or a function; by default the draft's own value head."""
    verify_with: Literal["draft", "target"] = "target"
    """Whose signals are judged. The target's cost it a pass over each step and tell more."""
    grounding: GroundingForm = "sparse"
    """Which attention grounding is computed from."""
    grounding_layers: int = Field(default=3, ge=1)
    """How many of the last layers are rolled out."""
    calibration: str | None = None
    """A calibration file; by default the pair's own, from the cache or the package."""
    step_delimiter: str = Field(default="\n\n", min_length=1)
    """What ends a step."""
    max_step_tokens: int = Field(default=256, ge=1)
    """A longer step is cut there and goes on as the next one."""
    early_rejection: bool = True
    """Stop drafting a step that can no longer be accepted; the text is the same without, unless
    hand_back goes by how much was drafted."""
    salvage: bool = True
    """Compute what the target writes like a rejected step several tokens at a time; the text is
    the same without (with speculate_rewrites its law)."""
    hand_back: int | None = Field(default=None, ge=1)
    """After a rejection the target writes only so many tokens beyond what the draft had written,
    and the draft goes on, as with a new step; by default the target finishes the step."""
    patience: int | None = Field(default=None, ge=0)
    """After so many rejected steps in a row the target goes on without a draft; 0 always drafts. By
    default 1, and 0 with hand_back and in the methods to compare with."""
    pause_steps: int = Field(default=4, ge=1)
    """How many steps it then writes before one is drafted again; doubled if that one is rejected,
    too."""
    max_slowdown: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Draft answers of specguard only while the latest ones have together taken at most this share
    more than the target alone would have for the same texts, by the clock: 0.05 is a twentieth. The
    first ones are not drafted, and texts depend on how fast the machine is."""
    critical_steps: CriticalSteps = "verify"
    """Whether tool calls and the last step may come from the draft if they pass (verify), or are
    the target's in any case (target)."""

    num_samples: int = Field(default=4, ge=1, le=64)
    """Answers that a majority vote or best of n chooses from."""
    acceptance_rate: float = Field(default=0.5, ge=0, le=1)
    """Share of steps that the decoder random accepts, a control."""
    max_accepted_tokens: int = Field(default=64, ge=0)
    """Longest step that the decoder length accepts, a control."""

    speculate_with: Proposer = "draft"
    """What the speculative decoder drafts with: the draft, or what the prompt and the answer so far
    repeat, which is copied from there; then no draft is loaded."""
    speculate_rewrites: bool = False
    """Let the target write its own steps by speculative decoding, too. Pays where a few tokens cost
    the target little more than one: on GPUs, and with drafts that are much smaller."""
    num_speculative_tokens: int = Field(default=4, ge=1, le=MAX_SPECULATIVE_TOKENS)
    """Most tokens that the speculative decoder drafts at a time."""
    speculative_tree: list[Annotated[int, Field(ge=1, le=64)]] | None = Field(
        default=None, min_length=1, max_length=16
    )
    """Children of every drafted token, by depth, such as 3, 2, 1: a tree in place of a chain."""
    speculative_children: Children = "independent"
    """How the children in a tree are drawn; at temperature 0 they are the likeliest tokens."""
    adaptive_speculation: bool = True
    """Draft fewer tokens after a rejection, and none after one that the draft finds unlikely."""

    temperature: float = Field(default=0.7, ge=0)
    """0 is greedy decoding."""
    top_p: float = Field(default=0.8, gt=0, le=1)
    """Sample among the likeliest tokens that together reach this probability."""
    top_k: int = Field(default=0, ge=0)
    """Sample among this many of the likeliest tokens; 0 is no limit."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Sample among tokens at least this likely relative to the likeliest."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of an answer; None lets the context decide."""
    stop: list[str] | None = None
    """The answer is cut before the first of these strings."""
    seed: int | None = Field(default=None, ge=0)
    """Equal seeds give equal answers; None draws a new one per request."""
    tool_instruction: str = TOOL_INSTRUCTION
    """What the system message says about tools when there are some; "" for nothing."""
    schema_instruction: str = SCHEMA_INSTRUCTION
    """What the system message says about an answer in JSON, with {schema} in it; "" for nothing."""

    n_ctx: int | None = Field(default=None, ge=16)
    """Context length in tokens; None is 4096 for models in this process, and a server's own."""
    n_threads: int | None = Field(default=None, ge=1)
    """Threads that compute; None takes the machine's cores."""
    n_gpu_layers: int = Field(default=0, ge=-1)
    """Layers that are computed on a GPU, where llama-cpp-python was built for one; -1 for all."""
    api_key: SecretStr | None = None
    """Key of the servers that run the draft or the target; by default the environment's
    OPENAI_API_KEY, which is not sent unencrypted to other machines."""
    max_retries: int = Field(default=2, ge=0)
    """How often a request to a server is tried again."""
    max_parallel: int = Field(default=1, ge=1, le=64)
    """Requests that a model answers at a time; models in this process reserve memory for each,
    where as many idle conversations stay, and llama.cpp computes them together."""
    prompt_cache: str | None = Field(default=None, min_length=1)
    """A folder where models in this process keep what they have computed of long system messages
    and lists of tools, for processes that come later; the text is the same without."""
    prompt_cache_gib: float = Field(default=4.0, gt=0)
    """Most GiB of its files; those that were used least recently go first."""
    max_queue: int = Field(default=1024, ge=0)
    """So many other requests may wait for the same model; one more is refused at once."""

    @property
    def method(self) -> str:
        """The decoder, without what is done with several of its answers."""
        return self.decoder.removesuffix("-majority").removesuffix("-best-of-n")

    @property
    def roles(self) -> tuple[Source, ...]:
        """Whose models are needed."""
        if self.method == "speculative" and self.speculate_with == "prompt":
            return (Source.TARGET,)
        return (Source(self.method),) if self.method in ("draft", "target") else tuple(Source)

    def sampling(self) -> Sampling:
        """Return how tokens are drawn; the greedy decoder ignores the temperature."""
        greedy = self.decoder == "specguard-greedy"
        return Sampling(
            temperature=0.0 if greedy else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
        )

    def score_threshold(self) -> float:
        """Return the score from which a drafted step is kept."""
        return usual_threshold(self.method) if self.threshold is None else self.threshold

    def pacing(self) -> Patience | None:
        """Return when the target goes on without a draft; None is never."""
        usual = usual_patience(self.method, self.hand_back)
        rejections = usual if self.patience is None else self.patience
        return Patience(rejections, self.pause_steps) if rejections else None

    def slowdown(self) -> Slowdown | None:
        """Return a new account of how much slower answers may be than the target's; None is any."""
        return None if self.max_slowdown is None else Slowdown(self.max_slowdown)

    @field_validator("speculative_tree")
    @classmethod
    def _check_tree(cls, tree: list[int] | None) -> list[int] | None:
        if prod(tree or ()) > MAX_LEAVES:
            raise ValueError(
                f"speculative_tree={tree} has {prod(tree or ())} branches; {MAX_LEAVES} at most"
            )
        return tree

    def rewriting(self) -> SpeculativeRewriting | None:
        """Return how the target of SpecGuard writes several tokens at a time; None is not."""
        if not self.speculate_rewrites:
            return None
        return SpeculativeRewriting(self.speculation(), self.speculate_with)

    def speculation(self) -> Speculation:
        """Return what the draft of a speculative decoder proposes at a time."""
        return Speculation(
            tuple(self.speculative_tree or [1] * self.num_speculative_tokens),
            self.speculative_children,
            adaptive=self.adaptive_speculation,
        )
