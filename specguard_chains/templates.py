"""Chat templates, rendered as `transformers` renders them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specguard_chains.errors import ConfigurationError
from specguard_chains.tools.history import adaptations

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """A model's Jinja template: chat messages -> the text that the model continues."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        """Compile a template.

        Raises:
            ConfigurationError: The template is not valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigurationError(
                f"the model's chat template is broken (line {error.lineno}: {error}); "
                "give the prompt as text"
            ) from error
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self, messages: Messages, tools: Messages = (), *, add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt text.

        Many templates refuse what others take. A template that refuses system messages gets their
        text at the head of the first user message; one that insists on alternating roles gets
        neighbours of the same role merged; calls and their results come in the form that it takes.

        Raises:
            ConfigurationError: The template refuses the messages in every form.
        """
        error: Exception | None = None
        for adapted in forms(messages):
            try:
                return self._template.render(
                    messages=adapted,
                    tools=list(tools) or None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self._tokens,
                )
            except (TemplateError, TypeError) as refusal:
                error = error or refusal
        raise ConfigurationError(
            f"the model's chat template refuses these messages: {error}; change them, or give the "
            "prompt as text"
        ) from error


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a rendered prompt; in a `literal` one, special tokens are no more than text."""

    text: str
    literal: bool


class Shield:
    """Keeps text in messages that looks like special tokens from becoming special tokens.

    Such text travels through the template as a mark and is put back afterwards, as literal text.
    """

    MARK = "\ue000"  # for private use: no text has it, and if one has, it is hidden as well

    def __init__(self, specials: Iterable[str]) -> None:
        """Shield against tokens that are spelled like this."""
        longest_first = sorted({self.MARK, *specials}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)))
        self._hidden: list[str] = []

    def hide(self, value: Any) -> Any:
        """Return messages, or any part of them, with marks in place of special text."""
        if isinstance(value, str):
            return self._special.sub(self._mark, value)
        if isinstance(value, Mapping):
            return {key: self.hide(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.hide(item) for item in value]
        return value

    def pieces(self, rendered: str) -> Iterator[Piece]:
        """Yield a rendered prompt in parts, the hidden text put back."""
        for i, part in enumerate(re.split(f"{self.MARK}(\\d+){self.MARK}", rendered)):
            if part:
                yield Piece(self._hidden[int(part)], True) if i % 2 else Piece(part, False)

    def _mark(self, match: re.Match[str]) -> str:
        self._hidden.append(match[0])
        return f"{self.MARK}{len(self._hidden) - 1}{self.MARK}"


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model wrote, for training; here it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def forms(messages: Messages) -> Iterator[Messages]:
    """Yield the messages as they are, then in all forms that stricter templates take."""
    for adapted in adaptations(messages):
        yield from _adaptations(adapted)


def _adaptations(messages: Messages) -> Iterator[Messages]:
    """Yield the messages as they are, then in forms that stricter templates take."""
    seen: list[Messages] = []
    merged, folded = _merge_neighbours(messages), _fold_system(messages)
    both = _merge_neighbours(_fold_system(merged))  # several system messages become one first
    for adapted in (messages, merged, folded, _merge_neighbours(folded), both):
        if adapted not in seen:
            seen.append(adapted)
            yield adapted


def _fold_system(messages: Messages) -> Messages:
    """Put each system message at the head of the user message after it, or let it be one."""
    folded: list[Mapping[str, Any]] = []
    pending: Mapping[str, Any] | None = None
    for message in messages:
        if pending is not None and message.get("role") == "user":
            content = _joined(pending["content"], message.get("content"))
            message, pending = {**message, "content": content}, None
        folded += [] if pending is None else [pending]
        pending = None
        if message.get("role") == "system":
            pending = {**message, "role": "user"}
        else:
            folded.append(message)
    return folded if pending is None else [*folded, pending]


def _merge_neighbours(messages: Messages) -> Messages:
    """Join neighbours of the same role that consist of nothing but text."""
    merged: list[Mapping[str, Any]] = []
    for message in messages:
        if merged and _are_mergeable(merged[-1], message):
            merged[-1] = _merged(merged[-1], message)
        else:
            merged.append(message)
    return merged


_PLAIN = {"role", "content"}
_TEXTS = _PLAIN | {"name", "reasoning_content"}


def _are_mergeable(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two messages are texts of one role; calls and results stay apart."""
    plain = all(_PLAIN <= message.keys() <= _TEXTS for message in (first, second))
    return plain and first["role"] == second["role"] != "tool"


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return two messages as one, which has their name if they have the same."""
    merged = {
        key: value for key, value in second.items() if key != "name" or value == first.get("name")
    }
    merged["content"] = _joined(first["content"], second["content"])
    thoughts = [message.get("reasoning_content") for message in (first, second)]
    if any(thoughts):
        merged["reasoning_content"] = "\n\n".join(filter(None, thoughts))
    return merged


def _joined(first: Any, second: Any) -> Any:
    """Join two contents: texts, or lists of content parts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*_parts(first), *_parts(second)]


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return list(content or ())


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
