"""What an answer may look like: a grammar, and the tokens that it allows next.

The grammar is a text of llguidance (github.com/guidance-ai/llguidance): JSON schema, regular
expression, or its variation of Lark. It describes the whole answer, free text included, so that
an answer can reason first and end in JSON. Each session follows it in tokens of its own.

A constraint shapes what is drawn, and what is drawn from is also what is reported: log-probs are
those of the allowed tokens, renormalised. A model that had no choice is not unsure of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.errors import ConfigurationError, EngineError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from specguard_chains.decoding.cache import Tokenizer

NO_BLANK_LINES = r"\n? {0,32}"
"""White space between the parts of JSON: room for indentation, and none for endless blanks."""

DEAD_END = (
    "the constraint allows nothing here, not even an end: its grammar has a dead end; change the "
    "schema or the grammar"
)


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar for a whole answer."""

    grammar: str
    """As llguidance's `LLMatcher` takes it."""

    @classmethod
    def lark(cls, source: str) -> Constraint:
        """Return the constraint of a grammar in llguidance's variation of Lark."""
        from llguidance import LLMatcher

        return cls(LLMatcher.grammar_from_lark(source)).checked()

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Return the constraint of a regular expression, in the syntax of Rust's `regex`."""
        from llguidance import LLMatcher

        return cls(LLMatcher.grammar_from_regex(pattern)).checked()

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any]) -> Constraint:
        """Return the constraint of a JSON schema; {} allows any JSON."""
        from llguidance import LLMatcher

        defaults: Any = {"whitespace_pattern": NO_BLANK_LINES}
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"this is not a JSON schema: {error}; give an object of JSON's own types, {{}} for "
                "any JSON"
            ) from error
        return cls(grammar).checked()

    def checked(self) -> Constraint:
        """Return the constraint.

        Raises:
            ConfigurationError: The grammar is not valid, or uses what llguidance does not know.
        """
        from llguidance import LLMatcher

        failed, messages = LLMatcher.validate_grammar_with_warnings(self.grammar)
        if failed:
            raise ConfigurationError(
                f"the answer cannot be constrained so: {'; '.join(messages)}; change the schema or "
                "the grammar"
            )
        return self


class TokenTrie:
    """A vocabulary as llguidance walks it; a second of work for a large one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Take in a vocabulary; the tokenizer is asked for forced text later on."""
        from llguidance import LLTokenizer, TokenizerWrapper

        self.n_tokens = tokenizer.n_tokens
        self.ends = [token for token in range(self.n_tokens) if tokenizer.is_end(token)]
        wrapped = TokenizerWrapper(_Described(tokenizer, self.n_tokens))
        self.tokenizer: LLTokenizer = LLTokenizer(wrapped, eos_token=self.ends)

    def start(self, constraint: Constraint) -> Matcher:
        """Return a matcher at the beginning of an answer."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self.tokenizer, constraint.grammar, log_level=0)
        return Matcher(matcher, frozenset(self.ends), self.n_tokens)


class _Described:
    """A tokenizer in the words of llguidance."""

    def __init__(self, tokenizer: Tokenizer, n_tokens: int) -> None:
        self._encode: Callable[[str], list[int]] = tokenizer.encode_text
        self.eos_token_id = tokenizer.end_token
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token) for token in range(n_tokens)]
        self.special_token_ids = [token for token, data in enumerate(self.tokens) if not data]

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


class Matcher:
    """Follows an answer through its grammar."""

    def __init__(self, matcher: LLMatcher, ends: frozenset[int], n_tokens: int) -> None:
        """See `TokenTrie.start`."""
        self._matcher = matcher
        self._ends = ends
        self._n_tokens = n_tokens
        self._ended = False
        self._require_sound()

    def fork(self) -> Matcher:
        """Return another matcher at the same place."""
        other = Matcher(self._matcher.deep_copy(), self._ends, self._n_tokens)
        other._ended = self._ended
        return other

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on by tokens of the answer; what a draft proposes after its end is all the same.

        Raises:
            EngineError: The grammar does not allow them, or has grown too complex.
        """
        for token in tokens:
            self._ended = self._ended or token in self._ends
            if self._ended:
                return
            if not self._matcher.consume_token(token):
                self._require_sound()

    def admits(self, tokens: Sequence[int]) -> int:
        """Return how many of some tokens could follow, one after the other; an end never counts."""
        text = list(takewhile(lambda token: token not in self._ends, tokens))
        return 0 if self._ended else self._matcher.validate_tokens(text)

    def allowed(self, logits: FloatArray) -> FloatArray:
        """Return a copy of logits, shape (vocabulary,), in which forbidden tokens have -inf.

        After the end of the answer, nothing is forbidden.
        """
        if self._ended:
            return logits.copy()
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._require_sound()
        mask = np.unpackbits(bits, count=self._n_tokens, bitorder="little").view(bool)
        if not mask.any():
            raise EngineError(DEAD_END)
        return np.where(mask, logits, np.float32(-np.inf))

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n<")[0]  # then come traces
            if reason.startswith("NoExtension"):
                raise EngineError(DEAD_END)
            raise EngineError(f"the answer cannot follow its constraint: {reason}")
