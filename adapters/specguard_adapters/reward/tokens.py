"""A reward model's tokenizer: pieces of text to tokens, and the tokens that a kind needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from specguard_adapters.reward.kinds import Layout, RewardKind
from specguard_adapters.reward.layout import Messages, lay_out
from specguard_chains.errors import ConfigurationError


class RewardTokens:
    """Conversations and steps as tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kind: RewardKind, name: str) -> None:
        """Use a tokenizer.

        Raises:
            ConfigurationError: It lacks what the kind needs.
        """
        self._tokenizer = tokenizer
        self._kind = kind
        self._name = name
        chat = kind.layout in (Layout.CHAT, Layout.TURNS)
        if chat and not tokenizer.chat_template:
            raise ConfigurationError(
                f"{name} has no chat template, which the reward kind {kind.name!r} needs; give "
                "the tokenizer of the model that it was trained from, or another kind"
            )
        first = None if chat else tokenizer.bos_token_id  # templates write it themselves
        self._first = [] if first is None else [first]
        self._tag = self._last(kind.tag, "tag") if kind.tag else None
        self.verdicts = tuple(self._only(text) for text in (kind.bad, kind.good) if text)
        """The tokens that call a step bad and good."""

    def encode(self, messages: Messages, steps: Sequence[str]) -> list[int]:
        """Return what the model reads, up to where the reward stands.

        Raises:
            ConfigurationError: The messages cannot be laid out.
        """
        tokens = [*self._first]
        for piece in lay_out(self._kind, messages, steps, self._render):
            tokens += self._encode(piece)
        if self._tag is not None and tokens[-1:] != [self._tag]:
            raise ConfigurationError(
                f"the tokenizer of {self._name} joins the tag {self._kind.tag!r} to the end of "
                f"the step {steps[-1][-20:]!r}; give a RewardKind with layout='pieces'"
            )
        return tokens

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def _render(self, messages: Messages, begin_answer: bool) -> str:
        try:
            text: Any = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=begin_answer,
            )
        except Exception as error:  # templates raise what they like
            raise ConfigurationError(
                f"the chat template of {self._name} refuses the conversation "
                f"({type(error).__name__}: {error}); leave out what it does not know, or give a "
                "RewardKind with layout='text'"
            ) from error
        return str(text)

    def _only(self, text: str) -> int:
        token = self._last(text, "word")
        if len(self._encode(text)) > 1:
            raise self._lacks(text, "word")
        return token

    def _last(self, text: str, role: str) -> int:
        """Return the last token of text, which must spell all of it but spaces."""
        tokens = self._encode(text)
        spelled = self._tokenizer.decode(tokens[-1:]) if tokens else ""
        if spelled.strip(" ") != text.strip(" "):
            raise self._lacks(text, role)
        return tokens[-1]

    def _lacks(self, text: str, role: str) -> ConfigurationError:
        return ConfigurationError(
            f"the vocabulary of {self._name} has no token for the {role} {text.strip(' ')!r}, "
            f"which the reward kind {self._kind.name!r} needs; give another kind, or a "
            f"RewardKind with the {role} that the model was trained with"
        )
