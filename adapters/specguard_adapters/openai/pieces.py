"""Sequences of pieces of text, for servers that take and give text only."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache

from specguard_adapters.openai.codec import no_template
from specguard_adapters.openai.completions import Payload, Token
from specguard_adapters.openai.features import TOKENIZERS, Dialect
from specguard_adapters.openai.http import Cancelled, Client
from specguard_chains.decoding.engine import Prompt
from specguard_chains.templates import ChatTemplate

FILLER = 0
"""Stands for the second and later tokens of a piece that the model has not written."""


class PieceCodec:
    """A `Codec` of text; how many tokens it has, the server tells.

    Text that the model has not written is one piece, followed by as many fillers as it has tokens
    more. Special tokens in it cannot be told from text: such a server reads them everywhere.
    """

    def __init__(
        self,
        client: Client,
        model: str,
        template: ChatTemplate | None,
        dialect: Dialect,
        base_url: str,
    ) -> None:
        """Number pieces as all codecs of this server's model do."""
        self._client = client
        self._model = model
        self._template = template
        self._dialect = dialect
        self._numbers = _numbers(base_url, model)

    def encode(self, prompt: Prompt, cancelled: Cancelled = None) -> list[int]:
        """See `Codec.encode`."""
        text = prompt.text
        if text is None:
            if self._template is None:
                raise no_template(self._model)
            text = self._template.render(prompt.messages, prompt.tools)
        return self._filled(text, self._count(text, cancelled)) if text else []

    def encode_text(
        self, text: str, before: Sequence[int], cancelled: Cancelled = None
    ) -> list[int]:
        """See `Codec.encode_text`."""
        if not text:
            return []
        start = self.text(before)
        count = self._count(start + text, cancelled) - self._count(start, cancelled)
        return self._filled(text, max(count, 1))

    def payload(self, tokens: Sequence[int]) -> Payload:
        """See `Codec.payload`."""
        return self.text(tokens)

    def number(self, token: Token) -> int:
        """See `Codec.number`."""
        return self._numbers.of(token.text)

    def unfinished(self, tokens: Sequence[int], cancelled: Cancelled = None) -> list[int]:
        """See `Codec.unfinished`. Text has whole characters only."""
        return []

    def text(self, tokens: Sequence[int], cancelled: Cancelled = None) -> str:
        """See `Codec.text`."""
        return "".join(map(self._numbers.text, tokens))

    def can_end(self, tokens: Sequence[int], length: int) -> bool:
        """See `Codec.can_end`. A filler's text stands before it."""
        return length == len(tokens) or tokens[length] != FILLER

    def _filled(self, text: str, count: int) -> list[int]:
        return [self._numbers.of(text), *[FILLER] * (count - 1)]

    def _count(self, text: str, cancelled: Cancelled) -> int:
        path, name = TOKENIZERS[self._dialect]
        body = {"model": self._model, name: text}
        return len(self._client.post(path, body, cancelled=cancelled)["tokens"])


class _Numbers:
    """Numbers for pieces of text, the same for everybody in this process."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._texts = [""]  # the filler's
        self._known: dict[str, int] = {}

    def of(self, text: str) -> int:
        with self._guard:
            if text not in self._known:
                self._known[text] = len(self._texts)
                self._texts.append(text)
            return self._known[text]

    def text(self, number: int) -> str:
        return self._texts[number]


@cache
def _numbers(base_url: str, model: str) -> _Numbers:
    return _Numbers()
