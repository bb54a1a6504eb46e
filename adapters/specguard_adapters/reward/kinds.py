"""The kinds of published process reward models: what they read, where the reward stands in it.

A kind is found by the model's architecture, or by its name where the architecture is a plain
language model. Whoever has a model of another kind describes it with a `RewardKind`.

>>> from dataclasses import replace
>>> by_line = replace(KINDS["skywork-prm"], name="skywork-prm by line", tag=chr(10))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import exp, isfinite

from specguard_chains.errors import ConfigurationError, EngineError


class Layout(StrEnum):
    """How a conversation and the steps of its answer become the model's input."""

    CHAT = "chat"
    """By the chat template; the steps are the assistant's one turn."""
    TURNS = "turns"
    """By the chat template; every step is a user's turn, which the assistant calls good or bad.
    The first step follows the question in the same turn, earlier steps have been called good."""
    TEXT = "text"
    """The question and the steps as one text, behind the tokenizer's first token."""
    PIECES = "pieces"
    """The same, but question, steps and tags are tokenized one by one."""


class Head(StrEnum):
    """What gives numbers, and how its weights are called."""

    LANGUAGE = "language"
    """The language model's own logits."""
    SCORE = "score"
    """The linear layer of transformers' token and sequence classifiers (`score`)."""
    MLP = "mlp"
    """Two linear layers with a ReLU between them (`score.0`, `score.2`)."""
    VALUE = "value"
    """One linear layer (`v_head.summary`)."""
    OWN = "own"
    """Code that comes with the model; what it gives first are numbers for every token."""


class Scale(StrEnum):
    """How numbers become a reward."""

    SIGMOID = "sigmoid"
    """Sigmoid of the only number."""
    CLASSES = "classes"
    """Softmax over two classes; the second one is good."""
    TOKENS = "tokens"
    """Softmax over the logits of two tokens, the good one and the bad one."""


@dataclass(frozen=True, slots=True)
class RewardKind:
    """How a reward model is asked about the newest step of an answer."""

    name: str
    layout: Layout
    head: Head
    scale: Scale
    tag: str = ""
    """Follows every step. The reward is read at the last token of the newest step's tag; at the
    step's last token if there is no tag, or in turns where the assistant's verdict would begin."""
    between: str = ""
    """Stands between a tag and the next step."""
    question_end: str = ""
    """Stands between the question and the first step, where no chat template does."""
    good: str = ""
    """The token that calls a step good."""
    bad: str = ""

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        by_tokens = self.scale is Scale.TOKENS
        if [bool(self.good), bool(self.bad)] != [by_tokens] * 2:
            raise ConfigurationError(
                f"the reward kind {self.name!r} has good={self.good!r} and bad={self.bad!r}; "
                "give both for scale='tokens', and neither for another scale"
            )
        if self.head is not Head.OWN and by_tokens != (self.head is Head.LANGUAGE):
            raise ConfigurationError(
                f"the reward kind {self.name!r} has head={str(self.head)!r} and "
                f"scale={str(self.scale)!r}; 'language' goes with 'tokens', the others do not"
            )

    @property
    def size(self) -> int:
        """How many numbers a reward is made of."""
        return 1 if self.scale is Scale.SIGMOID else 2


QWEN = RewardKind(
    "qwen-prm", layout=Layout.CHAT, head=Head.MLP, scale=Scale.CLASSES, tag="<extra_0>"
)
"""As the model card of Qwen/Qwen2.5-Math-PRM-7B says; Qwen2.5-Math-7B-PRM800K and ReasonFlux-PRM
are alike. The head is written here, so that the code which comes with the models is not run."""
SKYWORK = RewardKind(
    "skywork-prm",
    layout=Layout.PIECES,
    head=Head.VALUE,
    scale=Scale.SIGMOID,
    tag="\n\n",
    question_end="\n",
)
"""Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B and 7B, steps divided at blank lines as RSD (arXiv
2501.19324) does; the model card divides at line breaks."""
TOKEN_CLASSIFICATION = RewardKind(
    "token-classification",
    layout=Layout.PIECES,
    head=Head.SCORE,
    scale=Scale.CLASSES,
    tag="\n",
)
"""What TRL's PRMTrainer trains with its default step_separator."""
SEQUENCE_CLASSIFICATION = RewardKind(
    "sequence-classification",
    layout=Layout.CHAT,
    head=Head.SCORE,
    scale=Scale.SIGMOID,
    between="\n\n",
)
"""A reward model for whole answers that is asked about the answer's beginning."""
MATH_SHEPHERD = RewardKind(
    "math-shepherd",
    layout=Layout.TEXT,
    head=Head.LANGUAGE,
    scale=Scale.TOKENS,
    tag=" ки",
    between="\n",
    question_end=" ",
    good="+",
    bad="-",
)
"""As the model card of peiyi9979/math-shepherd-mistral-7b-prm says."""
RLHFLOW = RewardKind(
    "rlhflow-prm",
    layout=Layout.TURNS,
    head=Head.LANGUAGE,
    scale=Scale.TOKENS,
    question_end=" ",
    good="+",
    bad="-",
)
"""RLHFlow/Llama3.1-8B-PRM-Deepseek-Data and -Mistral-Data, as their evaluation code does."""

KINDS = {
    kind.name: kind
    for kind in (
        QWEN,
        SKYWORK,
        TOKEN_CLASSIFICATION,
        SEQUENCE_CLASSIFICATION,
        MATH_SHEPHERD,
        RLHFLOW,
    )
}
"""The known kinds by name."""

_BY_ARCHITECTURE = {
    "ForProcessRewardModel": QWEN,
    "ForPrmModel": SKYWORK,
    "ForTokenClassification": TOKEN_CLASSIFICATION,
    "ForSequenceClassification": SEQUENCE_CLASSIFICATION,
}
_BY_NAME = {"math-shepherd": MATH_SHEPHERD, "llama3.1-8b-prm": RLHFLOW}


def kind_called(name: str) -> RewardKind:
    """Return a known kind.

    Raises:
        ConfigurationError: There is none of that name.
    """
    if name not in KINDS:
        raise ConfigurationError(
            f"there is no reward kind {name!r}; there are {', '.join(KINDS)}, or give a RewardKind"
        )
    return KINDS[name]


def detect(name: str, architectures: Sequence[str], num_labels: int) -> RewardKind | None:
    """Return a model's kind, None if it is unknown.

    Args:
        name: The last part of its name on the hub, or its folder's name.
        architectures: What its config calls itself.
        num_labels: Numbers that a classifier gives.
    """
    for ending, kind in _BY_ARCHITECTURE.items():
        if any(architecture.endswith(ending) for architecture in architectures):
            return _scaled(kind, num_labels) if kind.head is Head.SCORE else kind
    return next((kind for part, kind in _BY_NAME.items() if part in name.lower()), None)


def _scaled(kind: RewardKind, num_labels: int) -> RewardKind:
    return replace(kind, scale=Scale.SIGMOID if num_labels == 1 else Scale.CLASSES)


def reward_of(numbers: Sequence[float], name: str) -> float:
    """Return the reward, in [0, 1]: the sigmoid of one number, or the softmax of two.

    Args:
        numbers: One number, or that of the bad class or token and that of the good one.
        name: The model's name, for messages.

    Raises:
        EngineError: They are not finite.
    """
    logit = numbers[-1] - numbers[0] if len(numbers) == 2 else numbers[0]
    if not isfinite(logit):
        raise EngineError(
            f"the reward that {name} gives is not a finite number; load it with dtype='float32' "
            "or 'bfloat16', or fetch its files again"
        )
    return 1 / (1 + exp(-logit)) if logit >= 0 else exp(logit) / (1 + exp(logit))
