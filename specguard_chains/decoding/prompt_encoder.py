"""Prompts as tokens: chat messages by the model's own template, raw text as it stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from specguard_chains.decoding.engine import Prompt
from specguard_chains.errors import ConfigurationError
from specguard_chains.templates import ChatTemplate, Shield

TOOL_USE = "tool_use"
"""What models call their template for prompts with tools, if it is one of its own."""


class ChatTokenizer(Protocol):
    """What a model's files say of its tokens and of its chat format."""

    @property
    def prefix(self) -> Sequence[int]:
        """What every text begins with: mostly nothing, or one token."""
        ...

    @property
    def control_texts(self) -> Sequence[str]:
        """How the control tokens are spelled."""
        ...

    @property
    def bos_text(self) -> str:
        """How the token is spelled that sequences begin with; "" if there is none."""
        ...

    @property
    def eos_text(self) -> str:
        """How the token is spelled that sequences end with; "" if there is none."""
        ...

    def chat_template(self, name: str | None = None) -> str | None:
        """Return the model's own chat template, or its one of that name, as Jinja source."""
        ...

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Return the text's tokens, nothing added; `special` reads special tokens in it."""
        ...

    def tokenize_on(self, text: str, *, special: bool) -> list[int]:
        """Return the tokens of text that continues other text."""
        ...


class PromptEncoder:
    """Encodes prompts for one model; it keeps the compiled templates, and not the model."""

    def __init__(self, name: str) -> None:
        """Start without templates; `name` is the model's, for messages."""
        self._name = name
        self._templates: dict[bool, ChatTemplate] = {}

    def encode(self, prompt: Prompt, tokenizer: ChatTokenizer) -> list[int]:
        """Return a prompt's tokens. Special tokens are read in raw text and in the template.

        In messages and tools they stay text: nobody can end a turn by writing `<|im_end|>` in one.

        Raises:
            ConfigurationError: The model has no template, or it refuses the messages.
        """
        if prompt.text is not None:
            tokens = tokenizer.tokenize(prompt.text, special=True)
        else:
            tokens = self._encode_messages(prompt, tokenizer) if prompt.messages else []
        prefix = [*tokenizer.prefix]
        return tokens if not tokens or tokens[: len(prefix)] == prefix else [*prefix, *tokens]

    def source(self, tokenizer: ChatTokenizer, *, tools: bool) -> str | None:
        """Return the template for prompts with tools or without, None if there is none."""
        return (tokenizer.chat_template(TOOL_USE) if tools else None) or tokenizer.chat_template()

    def _encode_messages(self, prompt: Prompt, tokenizer: ChatTokenizer) -> list[int]:
        template = self._template(tokenizer, tools=bool(prompt.tools))
        shield = Shield(tokenizer.control_texts)
        text = template.render(shield.hide(prompt.messages), shield.hide(prompt.tools))
        tokens: list[int] = []
        for piece in shield.pieces(text):
            tokenize = tokenizer.tokenize_on if tokens else tokenizer.tokenize
            tokens += tokenize(piece.text, special=not piece.literal)
        return tokens

    def _template(self, tokenizer: ChatTokenizer, *, tools: bool) -> ChatTemplate:
        """Return the model's template for tools, its usual one if there is none."""
        if tools not in self._templates:
            source = self.source(tokenizer, tools=tools)
            if source is None:
                raise ConfigurationError(
                    f"{self._name} has no chat template; give the prompt as text, or take an "
                    "instruction-tuned model"
                )
            ends = tokenizer.bos_text, tokenizer.eos_text
            self._templates[tools] = ChatTemplate(source, *ends)
        return self._templates[tools]


def end_of_turn(tokenizer: ChatTokenizer, ends: Mapping[int, str]) -> int | None:
    """Return the token with which the chat template ends the model's turn.

    None if it has no template, or one that writes none of `ends`: the tokens that end a sequence,
    with their spelling.
    """
    source = tokenizer.chat_template()
    if source is None:
        return None
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": ANSWER}]
    try:
        template = ChatTemplate(source, tokenizer.bos_text, tokenizer.eos_text)
        text = template.render(turns, add_generation_prompt=False)
    except ConfigurationError:  # whoever gives messages will hear of it
        return None
    _, _, behind = text.rpartition(ANSWER)
    places = {token: behind.find(spelled) for token, spelled in ends.items() if spelled}
    written = {token: place for token, place in places.items() if place >= 0}
    return min(written, key=lambda token: (written[token], -len(ends[token])), default=None)


ANSWER = "answer"
