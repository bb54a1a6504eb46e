"""Sequences of the server's own token ids, as vLLM gives and takes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from specguard_adapters.openai.codec import CHARACTER_TOKENS, UNFINISHED, no_template
from specguard_adapters.openai.completions import Payload, Token
from specguard_adapters.openai.http import Cancelled, Client
from specguard_chains.decoding.engine import Prompt
from specguard_chains.errors import ConfigurationError, EngineError, ServerError
from specguard_chains.templates import ChatTemplate, Messages, Shield, forms
from specguard_chains.tools.history import with_arguments_as_text, with_text_ids

ANCHOR = "\n"
"""Text before a text: the space is put before it."""
REFUSED = (400, 422)
"""Statuses of messages that a template, or what checks them before it, does not take."""
_LOOKS_SPECIAL = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


class IdCodec:
    """A `Codec` of token ids."""

    def __init__(
        self,
        client: Client,
        model: str,
        template: ChatTemplate | None,
        *,
        renders: bool,
        adds_space: bool,
    ) -> None:
        """Tokenize by the server, and have it render messages unless a template is given.

        Args:
            client: Talks to the server.
            model: The model's name.
            template: Takes the place of the server's.
            renders: Whether the server has a template.
            adds_space: Whether its tokenizer puts a space before a text.
        """
        self._renders = renders
        self._adds_space = adds_space
        self._controls: dict[int, bool] = {}
        self._client = client
        self._model = model
        self._template = template

    def encode(self, prompt: Prompt, cancelled: Cancelled = None) -> list[int]:
        """See `Codec.encode`. Special tokens are read in raw text and in the template only."""
        if prompt.text is not None:
            return self._tokenize(prompt.text, cancelled, bounds=True)[0] if prompt.text else []
        if self._template is None and not self._renders:
            raise no_template(self._model)
        shield = Shield(self._specials(_strings([*prompt.messages, *prompt.tools]), cancelled))
        hidden, tools = shield.hide(prompt.messages), shield.hide(prompt.tools)
        if self._template is not None:
            text = self._template.render(hidden, tools)
            return self._pieces(shield, text, cancelled, bounds=True)
        tokens = self._render(hidden, tools, cancelled)
        if (hidden, tools) == (list(prompt.messages), list(prompt.tools)):
            return tokens
        text = self.text(tokens, cancelled)
        if self._tokenize(text, cancelled)[0] != tokens:
            raise ConfigurationError(
                f"messages spell special tokens of {self._model}, and its server gives no text "
                "back in which they could be told from real ones; give chat_template, or change "
                "the messages"
            )
        return self._pieces(shield, text, cancelled)

    def encode_text(
        self, text: str, before: Sequence[int], cancelled: Cancelled = None
    ) -> list[int]:
        """See `Codec.encode_text`. Special tokens in the text stay text."""
        if not text:
            return []
        tokens, spelled = self._continue(text, cancelled)
        specials = [
            string
            for token, string in zip(tokens, spelled, strict=False)
            if _LOOKS_SPECIAL.fullmatch(string) and self._is_control(token, cancelled)
        ]
        if not specials:
            return tokens
        cut = re.compile(
            "|".join(rf"(?<={re.escape(s[0])})(?={re.escape(s[1:])})" for s in specials)
        )
        return [t for part in cut.split(text) for t in self._continue(part, cancelled)[0]]

    def payload(self, tokens: Sequence[int]) -> Payload:
        """See `Codec.payload`."""
        return list(tokens)

    def number(self, token: Token) -> int:
        """See `Codec.number`."""
        assert token.id is not None
        return token.id

    def unfinished(self, tokens: Sequence[int], cancelled: Cancelled = None) -> list[int]:
        """See `Codec.unfinished`."""
        tail = list(tokens[-2 * CHARACTER_TOKENS :])
        for size in range(min(CHARACTER_TOKENS, len(tail))):
            if not self.text(tail[: len(tail) - size], cancelled).endswith(UNFINISHED):
                return tail[len(tail) - size :]
        return []

    def text(self, tokens: Sequence[int], cancelled: Cancelled = None) -> str:
        """See `Codec.text`. Control tokens are spelled out."""
        body = {"model": self._model, "tokens": list(tokens)}
        text: str = self._client.post("/detokenize", body, cancelled=cancelled)["prompt"]
        return text

    def can_end(self, tokens: Sequence[int], length: int) -> bool:
        """See `Codec.can_end`."""
        return True

    def _render(self, messages: Messages, tools: Messages, cancelled: Cancelled) -> list[int]:
        """Return the tokens of messages in the server's template, in the first form that it takes.

        The API has the arguments of calls as JSON text and ids as text, and no other form of them.
        """
        body: dict[str, Any] = {"add_generation_prompt": True}
        if tools:
            body["tools"] = list(tools)
        refusal: ServerError | None = None
        for form in forms(with_arguments_as_text(with_text_ids(messages))):
            try:
                tokens: list[int] = self._post({**body, "messages": list(form)}, cancelled)[
                    "tokens"
                ]
            except ServerError as error:
                if error.status not in REFUSED:
                    raise
                refusal = refusal or error
            else:
                return tokens
        assert refusal is not None
        raise refusal

    def _specials(self, strings: Sequence[str], cancelled: Cancelled) -> list[str]:
        """Return what in some texts is the spelling of a special token."""
        found = {match for string in strings for match in _LOOKS_SPECIAL.findall(string)}
        tokens = {text: self._tokenize(text, cancelled)[0] for text in found}
        return [
            text
            for text, own in tokens.items()
            if len(own) == 1 and self._is_control(own[0], cancelled)
        ]

    def _is_control(self, token: int, cancelled: Cancelled) -> bool:
        """Whether a token is no text: the server writes nothing if it is made to write it.

        Others, such as `<tool_call>`, have a name and are text all the same.
        """
        if token not in self._controls:
            body = {
                "model": self._model,
                "prompt": [token],
                "max_tokens": 1,
                "temperature": 0,
                "logit_bias": {str(token): 100},
                "return_token_ids": True,
            }
            answer = self._client.post("completions", body, cancelled=cancelled)
            choice = answer["choices"][0]
            self._controls[token] = choice["token_ids"] != [token] or not choice["text"]
        return self._controls[token]

    def _pieces(
        self, shield: Shield, text: str, cancelled: Cancelled, *, bounds: bool = False
    ) -> list[int]:
        tokens: list[int] = []
        for piece in shield.pieces(text):
            if piece.literal:
                tokens += self.encode_text(piece.text, tokens, cancelled)
            else:
                tokens += self._tokenize(piece.text, cancelled, bounds=bounds and not tokens)[0]
        return tokens

    def _continue(self, text: str, cancelled: Cancelled) -> tuple[list[int], list[str]]:
        """Return the tokens of text that goes on after other text, and how they are spelled."""
        if not self._adds_space:
            return self._tokenize(text, cancelled)
        anchor, _ = self._tokenize(ANCHOR, cancelled)
        tokens, spelled = self._tokenize(ANCHOR + text, cancelled)
        if tokens[: len(anchor)] != anchor:
            raise EngineError(
                f"the server of {self._model} does not tokenize {text[:20]!r} as a continuation; "
                "take a draft with the same tokenizer on the same server"
            )
        return tokens[len(anchor) :], spelled[len(anchor) :]

    def _tokenize(
        self, text: str, cancelled: Cancelled, *, bounds: bool = False
    ) -> tuple[list[int], list[str]]:
        """Return tokens and how they are spelled; special ones are read as such."""
        body = {"prompt": text, "add_special_tokens": bounds, "return_token_strs": True}
        answer = self._post(body, cancelled)
        return answer["tokens"], answer.get("token_strs") or []

    def _post(self, body: Mapping[str, Any], cancelled: Cancelled) -> Any:
        return self._client.post("/tokenize", {"model": self._model, **body}, cancelled=cancelled)


def _strings(value: Any) -> list[str]:
    """Return all texts in messages."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [s for item in value for s in _strings(item)] if isinstance(value, Sequence) else []
