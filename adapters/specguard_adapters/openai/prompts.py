"""The tokens of the last prompts: who counts a prompt first and opens it then asks once."""

from __future__ import annotations

import threading
from collections import OrderedDict

from specguard_adapters.openai.codec import Codec
from specguard_adapters.openai.http import Cancelled
from specguard_chains.decoding.engine import Prompt

KEPT = 64
"""Requests come side by side: each is opened in its turn, and counted at its end."""


class Prompts:
    """Encodes prompts, and remembers the last ones."""

    def __init__(self, codec: Codec) -> None:
        """Remember nothing yet."""
        self._codec = codec
        self._guard = threading.Lock()
        self._known: OrderedDict[str, list[int]] = OrderedDict()

    def encode(self, prompt: Prompt, cancelled: Cancelled = None) -> list[int]:
        """Return a prompt's tokens."""
        key = repr(prompt)  # messages may be changed later; and the order of their keys counts
        with self._guard:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return list(known)
        tokens = self._codec.encode(prompt, cancelled)
        with self._guard:
            self._known[key] = list(tokens)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return tokens
