"""A conversation and the steps of its answer as the text that a reward model reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from specguard_adapters.reward.kinds import Layout, RewardKind
from specguard_chains.errors import ConfigurationError

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, bool], str]
"""The chat template: messages, and whether to begin the assistant's turn."""

_HERE = "[[the steps]]"
"""Stands for them in a rendered conversation."""


def lay_out(
    kind: RewardKind, messages: Messages, steps: Sequence[str], render: Render
) -> list[str]:
    """Return what the model reads up to where the reward stands, in pieces to be tokenized.

    Steps lose the white space around them: the kind says what stands between them.

    Raises:
        ConfigurationError: There is no step, or the messages cannot be laid out.
    """
    if not steps:
        raise ConfigurationError("there is no step to rate; give at least one")
    steps = [step.strip() for step in steps]
    match kind.layout:
        case Layout.CHAT:
            return [_start(messages, render) + _joined(kind, steps)]
        case Layout.TURNS:
            return [render(_turns(kind, question(messages), steps), True)]
        case Layout.TEXT:
            return [question(messages) + kind.question_end + _joined(kind, steps)]
        case Layout.PIECES:
            tagged = chain.from_iterable((step, kind.tag + kind.between) for step in steps[:-1])
            return [question(messages) + kind.question_end, *tagged, steps[-1], kind.tag]


def question(messages: Messages) -> str:
    """Return what is asked, for models without roles: all but the system's messages.

    Raises:
        ConfigurationError: There is none, or one has something else than text.
    """
    texts = [_text(m.get("content")) for m in messages if m.get("role") != "system"]
    if not any(texts):
        raise ConfigurationError("the conversation has no question; give a message of the user")
    return "\n\n".join(filter(None, texts))


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, Mapping) else {"text": part} for part in content]
    for part in parts:
        if not isinstance(part.get("text"), str):
            raise ConfigurationError(
                f"a reward model reads text only, and a message has {part.get('type')!r}; "
                "leave it out"
            )
    return "".join(part["text"] for part in parts)


def _joined(kind: RewardKind, steps: Sequence[str]) -> str:
    return kind.between.join(step + kind.tag for step in steps)


def _start(messages: Messages, render: Render) -> str:
    """Return the conversation up to where the assistant's words begin."""
    text = render([*messages, {"role": "assistant", "content": _HERE}], False)
    start, found, _ = text.rpartition(_HERE)
    if not found:
        raise ConfigurationError(
            "the chat template of the reward model leaves out what the assistant says; give "
            "another tokenizer, or a RewardKind with layout='text'"
        )
    return start


def _turns(kind: RewardKind, asked: str, steps: Sequence[str]) -> Messages:
    texts = [asked + kind.question_end + steps[0], *steps[1:]]
    good = {"role": "assistant", "content": kind.good}
    turns = chain.from_iterable(({"role": "user", "content": text}, good) for text in texts)
    return [*turns][:-1]
