"""Sequences of pieces of text, for servers that take and give text only.

The number of a piece is its text, read as a number: nothing is to be kept for it, and all engines
have the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from specguard_adapters.openai.codec import no_template
from specguard_adapters.openai.completions import Payload, Token
from specguard_adapters.openai.features import TOKENIZERS, Dialect
from specguard_adapters.openai.http import Cancelled, Client
from specguard_chains.decoding.engine import Prompt
from specguard_chains.templates import ChatTemplate

_BEGINS = b"\x01"
_GOES_ON = b"\x02"
"""Marks a piece that does not begin where a token is known to begin."""


class PieceCodec:
    """A `Codec` of text; how many tokens it has, the server tells.

    Text that the model has not written is cut into as many pieces as it has tokens; where the
    tokens end within it, nobody knows. Special tokens in it cannot be told from text: such a server
    reads them everywhere.
    """

    def __init__(
        self, client: Client, model: str, template: ChatTemplate | None, dialect: Dialect
    ) -> None:
        """Have the server count tokens, and render messages by a template."""
        self._client = client
        self._model = model
        self._template = template
        self._dialect = dialect

    def encode(self, prompt: Prompt, cancelled: Cancelled = None) -> list[int]:
        """See `Codec.encode`."""
        text = prompt.text
        if text is None:
            if self._template is None:
                raise no_template(self._model)
            text = self._template.render(prompt.messages, prompt.tools)
        return cut(text, self._count(text, cancelled)) if text else []

    def encode_text(
        self, text: str, before: Sequence[int], cancelled: Cancelled = None
    ) -> list[int]:
        """See `Codec.encode_text`."""
        if not text:
            return []
        start = self.text(before)
        return cut(text, self._count(start + text, cancelled) - self._count(start, cancelled))

    def payload(self, tokens: Sequence[int]) -> Payload:
        """See `Codec.payload`."""
        return self.text(tokens)

    def number(self, token: Token) -> int:
        """See `Codec.number`."""
        return _number(_BEGINS, token.text)

    def unfinished(self, tokens: Sequence[int], cancelled: Cancelled = None) -> list[int]:
        """See `Codec.unfinished`. Text has whole characters only."""
        return []

    def text(self, tokens: Sequence[int], cancelled: Cancelled = None) -> str:
        """See `Codec.text`."""
        return "".join(_bytes(token)[1:].decode(errors="surrogatepass") for token in tokens)

    def can_end(self, tokens: Sequence[int], length: int) -> bool:
        """See `Codec.can_end`."""
        return length == len(tokens) or not _bytes(tokens[length]).startswith(_GOES_ON)

    def _count(self, text: str, cancelled: Cancelled) -> int:
        path, name = TOKENIZERS[self._dialect]
        body = {"model": self._model, name: text}
        return len(self._client.post(path, body, cancelled=cancelled)["tokens"])


def cut(text: str, count: int) -> list[int]:
    """Return the numbers of a text in `count` pieces of about equal length, at least one."""
    count = max(count, 1)
    ends = [len(text) * i // count for i in range(count + 1)]
    pieces = [text[start:end] for start, end in pairwise(ends)]
    return [_number(_GOES_ON if i else _BEGINS, piece) for i, piece in enumerate(pieces)]


def _number(mark: bytes, text: str) -> int:
    return int.from_bytes(mark + text.encode(errors="surrogatepass"))


def _bytes(number: int) -> bytes:
    return number.to_bytes((number.bit_length() + 7) // 8)
