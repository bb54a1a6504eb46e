"""What prompts begin with that others begin with, too, is computed once for all processes.

That is a system message and a list of tools: what is the same before whatever the user says. Their
state is loaded when a session first needs its prompt, and saved when one that has computed it is
closed. It has whole blocks of tokens, those that an engine computes at once, so that what follows
is computed in the same blocks, and rounded in the same way, with a stored state and without.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import inf
from typing import Any

from specguard_chains.decoding.cache import Cache, common_prefix
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.prompt_files import PromptFiles
from specguard_chains.errors import ConfigurationError

logger = logging.getLogger(__name__)

LEAST_TOKENS = 256
"""Less is computed about as soon as it is loaded, and costs a file."""
LEAST_GAIN = 64
"""Tokens that a stored state must have beyond what is in memory to be loaded."""
MOST_KNOWN = 64
"""Heads whose lengths are remembered."""


class PromptHeads:
    """The beginnings of an engine's prompts."""

    def __init__(
        self, files: PromptFiles, encode: Callable[[Prompt], list[int]], block: int
    ) -> None:
        """Keep states in files; `block` is how many tokens the engine computes at once."""
        self.files = files
        self.block = block
        self._encode = encode
        self._known: dict[str, list[int]] = {}  # the one that was used last comes last
        self._lock = threading.Lock()

    def of(
        self, prompt: Prompt, tokens: Sequence[int], grounding: GroundingSpec | None
    ) -> PromptHead:
        """Return the beginning of a session's prompt."""
        return PromptHead(self, prompt, tokens, grounding)

    def common(self, prompt: Prompt) -> list[int]:
        """Return the tokens that a prompt has in common with others of its system and tools."""
        head = _system(prompt.messages)
        if prompt.text is not None or not (head or prompt.tools):
            return []
        key = json.dumps([head, list(prompt.tools)], default=repr)
        with self._lock:
            known = self._known.pop(key, None)
            self._known[key] = self._rendered(prompt, head) if known is None else known
            if len(self._known) > MOST_KNOWN:
                del self._known[next(iter(self._known))]
            return self._known[key]

    def _rendered(self, prompt: Prompt, head: Sequence[Mapping[str, Any]]) -> list[int]:
        try:
            one, other = (
                self._encode(Prompt([*head, {"role": "user", "content": text}], prompt.tools))
                for text in ("a", "1")
            )
        except ConfigurationError as error:  # a template that wants more than these messages
            logger.debug("where prompts begin alike is not known: %s", error)
            return []
        return one[: common_prefix(one, other)]


class PromptHead:
    """The beginning of one session's prompt."""

    def __init__(
        self,
        heads: PromptHeads,
        prompt: Prompt,
        tokens: Sequence[int],
        grounding: GroundingSpec | None,
    ) -> None:
        """Start with nothing looked up."""
        self._heads = heads
        self._files = heads.files
        self._prompt = prompt
        self._tokens = list(tokens)
        self._grounding = grounding
        self._begun_at: int | None = None

    @cached_property
    def length(self) -> int:
        """Tokens whose state is worth a file; 0 if they are too few.

        Passages do not belong to it: what is paid to them is not in the file.
        """
        common = common_prefix(self._heads.common(self._prompt), self._tokens)
        length = min(common, self._most)
        length -= length % self._heads.block
        return length if length >= LEAST_TOKENS else 0

    @property
    def begun(self) -> bool:
        """Whether the prompt has been looked up."""
        return self._begun_at is not None

    def begin(self, cache: Cache, held: int, cut: Callable[[int], None]) -> int:
        """Return how many of the prompt's tokens a cache holds now that held some of them.

        `cut` drops all but the first tokens. A stored state replaces what is held, if there is a
        place for it. What is not in whole blocks is dropped if the head is about to be computed.
        """
        least = max(held + LEAST_GAIN, LEAST_TOKENS)
        stored = None
        if least <= self._most and cache.restorable:
            stored = self._files.load(self._tokens, self._grounding, least=least, most=self._most)
        if stored is not None:
            cut(0)
            held = stored.length if cache.restore(stored.state, stored.length) else 0
        elif held % self._heads.block and held < self.length:
            held -= held % self._heads.block
            cut(held)
        self._begun_at = held
        return held

    def keep(self, cache: Cache, held: int) -> None:
        """Save the head's state if this session has computed it; branches of the cache go."""
        if self._begun_at is None or held < LEAST_TOKENS:
            return
        try:
            tokens = self._tokens[: self.length]
            computed = self._begun_at < len(tokens) <= held
            if not computed or self._files.holds(tokens, self._grounding):
                return
            cache.keep(0, held)
            state = cache.export(len(tokens))
        except Exception as error:  # whatever it is, the answer is there, and must not fail
            logger.warning("a computed prompt is not kept: %s", error)
            return
        self._files.save(tokens, self._grounding, state)

    @property
    def _most(self) -> int:
        before = len(self._tokens) - 1  # the logits after the last one are needed
        passages = inf if self._grounding is None else self._grounding.before_passages
        return int(min(before, passages))


def _system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages before the first that is not the system's."""
    others = (n for n, m in enumerate(messages) if m.get("role") not in ("system", "developer"))
    return list(messages[: next(others, len(messages))])
