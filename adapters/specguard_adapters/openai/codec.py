"""What a session needs to know of the tokens of a model that somebody else runs.

Where a server takes and gives token ids, a sequence consists of them (`ids`). Where it
knows text only, tokens are pieces of text, numbered here as they come (`pieces`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specguard_adapters.openai.completions import Payload, Token
from specguard_adapters.openai.http import Cancelled
from specguard_chains.decoding.engine import Prompt
from specguard_chains.errors import ConfigurationError

UNFINISHED = "\ufffd"
"""What servers write for a character that lacks bytes."""
CHARACTER_TOKENS = 4
"""A character has up to four bytes, thus as many tokens."""


class Codec(Protocol):
    """What a session needs to know of tokens."""

    def encode(self, prompt: Prompt, cancelled: Cancelled = None) -> list[int]:
        """Return a prompt's tokens."""
        ...

    def encode_text(
        self, text: str, before: Sequence[int], cancelled: Cancelled = None
    ) -> list[int]:
        """Return the tokens of a text that goes on after others."""
        ...

    def payload(self, tokens: Sequence[int]) -> Payload:
        """Return tokens as they are sent to the server."""
        ...

    def number(self, token: Token) -> int:
        """Return the number of a token that the server has written."""
        ...

    def unfinished(self, tokens: Sequence[int], cancelled: Cancelled = None) -> list[int]:
        """Return the tokens at the end that begin a character and do not finish it."""
        ...

    def text(self, tokens: Sequence[int], cancelled: Cancelled = None) -> str:
        """Return what tokens mean."""
        ...

    def can_end(self, tokens: Sequence[int], length: int) -> bool:
        """Whether the text of the first `length` tokens is known."""
        ...


def no_template(model: str) -> ConfigurationError:
    """Return the error that there is nothing to render messages by."""
    return ConfigurationError(
        f"the server of {model} does not render chat messages; give chat_template, the Jinja "
        "source of the model's template"
    )
