"""Completions of one model on a server: what is sent, and what the answers mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

import numpy as np

from specguard_adapters.openai.errors import Translator
from specguard_adapters.openai.features import ServerFeatures
from specguard_adapters.openai.http import Cancelled, Client
from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.errors import ConfigurationError

T = TypeVar("T")
Payload = str | Sequence[int]
"""A prompt as it is sent: text, or token ids."""


ENDS = ("stop", "eos", "eos_token", "stop_sequence")
"""What servers call it that a model has ended its answer, or written a stop string."""


class Finish(Enum):
    """Why the server writes no more."""

    END = auto()
    """The model has ended its answer."""
    STOP = auto()
    """A stop string."""
    LIMIT = auto()
    """The token limit of the request, or of the context."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer."""

    text: str
    """Empty while a character is not finished."""
    logprob: float | None
    id: int | None
    """None where the server does not tell."""
    is_end: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """What has been added to one candidate."""

    index: int
    tokens: Sequence[Token]
    finish: Finish | None


class Completions:
    """Asks for completions in the way that the server's features allow."""

    def __init__(
        self, client: Client, model: str, features: ServerFeatures, translator: Translator
    ) -> None:
        """Ask for completions of a model."""
        self.features = features
        self._client = client
        self._model = model
        self._translator = translator

    def stream(
        self,
        prompt: Payload,
        n: int,
        max_tokens: int,
        sampling: Sampling,
        seed: int,
        stop: Sequence[str],
        consume: Callable[[Iterator[Event]], T],
        *,
        cancelled: Cancelled,
    ) -> T:
        """Return what `consume` makes of the events; see `Client.stream`."""
        body = self._drawing(prompt, max_tokens, sampling, seed)
        if n > 1:
            body["n"] = n
        if stop and self.features.stops:
            body |= {"stop": list(stop), "include_stop_str_in_output": True}

        def consume_raw(events: Iterator[Mapping[str, Any]]) -> T:
            return consume(self._events(events))

        return self._client.stream("completions", body, consume_raw, cancelled=cancelled)

    def write(
        self,
        prompt: Payload,
        max_tokens: int,
        sampling: Sampling,
        seed: int,
        *,
        cancelled: Cancelled,
    ) -> Event:
        """Return one candidate, not streamed."""
        body = self._drawing(prompt, max_tokens, sampling, seed)
        answer = self._client.post("completions", body, cancelled=cancelled)
        for event in self._events(iter([answer])):
            return event
        raise self._translator.lacking("choices")

    def score(self, prompt: Payload, tokens: Sequence[int], *, cancelled: Cancelled) -> FloatArray:
        """Return the log-probs of a prompt's last tokens."""
        body = {**self._body(prompt, 1), "temperature": 0}
        if self.features.scoring == "prompt_logprobs":
            body["prompt_logprobs"] = 0
        else:
            body |= {"echo": True, "logprobs": 1}
        answer = self._client.post("completions", body, cancelled=cancelled)
        try:
            logprobs: list[float | None]
            if self.features.scoring == "prompt_logprobs":
                logprobs = prompt_logprobs(answer, tokens)
            else:
                logprobs = echoed_logprobs(answer, self.features.echo_has_answer)[-len(tokens) :]
            scored = np.array(logprobs, dtype=np.float32)
        except (LookupError, TypeError, ValueError) as error:
            raise self._translator.lacking("log-probs of the prompt") from error
        if len(scored) != len(tokens):
            raise self._translator.lacking("log-probs of some of the prompt's tokens")
        return np.minimum(scored, 0)

    def incomplete(self) -> Exception:
        """Return the error of a stream that ends before its answers."""
        return self._translator.incomplete("ends before its time")

    def implausible(self, what: str) -> Exception:
        """Return the error of an answer that cannot be meant."""
        return self._translator.implausible(what)

    def _drawing(
        self, prompt: Payload, max_tokens: int, sampling: Sampling, seed: int
    ) -> dict[str, Any]:
        body = {**self._body(prompt, max_tokens), **self._settings(sampling), "seed": seed}
        if self.features.logprobs:
            body["logprobs"] = 1
        if self.features.token_ids:
            body["return_token_ids"] = True
        return body

    def _body(self, prompt: Payload, max_tokens: int) -> dict[str, Any]:
        prompt = prompt if isinstance(prompt, str) else list(prompt)
        return {"model": self._model, "prompt": prompt, "max_tokens": max_tokens}

    def _settings(self, sampling: Sampling) -> dict[str, Any]:
        """Return all settings that shape the distribution: servers' defaults are not neutral."""
        if sampling.greedy:
            sampling = Sampling(temperature=0, top_p=1)
        settings: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        if self.features.neutral is not None:
            settings |= {**self.features.neutral, "min_p": sampling.min_p}
            return settings | ({"top_k": sampling.top_k} if sampling.top_k else {})
        if sampling.top_k or sampling.min_p:
            raise ConfigurationError(
                f"the server of {self._model} takes no top_k and no min_p; leave them at 0, not "
                f"top_k={sampling.top_k} and min_p={sampling.min_p}"
            )
        return settings

    def _events(self, raw: Iterator[Mapping[str, Any]]) -> Iterator[Event]:
        for event in raw:
            for choice in event.get("choices") or ():
                try:
                    yield self._event(choice)
                except (AttributeError, LookupError, TypeError, ValueError) as error:
                    raise self.implausible(f"has a choice that cannot be read: {choice}") from error

    def _event(self, choice: Mapping[str, Any]) -> Event:
        finish = self._finish(choice)
        text = choice.get("text") or ""
        report = choice.get("logprobs") or {}
        texts: Sequence[str] = report.get("tokens") or ()
        logprobs: Sequence[float | None] = report.get("token_logprobs") or ()
        ids: Sequence[int | None] = choice.get("token_ids") or ()
        if not self.features.token_ids:
            ids = [None] * (len(logprobs) if self.features.logprobs else bool(text))
        if not self.features.logprobs:
            texts, logprobs = [""] * len(ids), [None] * len(ids)
        elif None in logprobs or len(logprobs) != len(ids):
            raise self._translator.lacking("log-probs")
        elif text and not ids:
            raise self._translator.lacking("token ids")
        ended = finish is Finish.END and self.features.token_ids and bool(ids)
        if ended:
            texts = [*texts[:-1], ""]
        if finish is Finish.STOP and texts and texts[-1].startswith(text):
            text = "".join(texts)  # servers cut the text after the stop string, within a token
        pieces = split(text, texts)
        tokens = [
            Token(piece, _float32(logprob), token_id, is_end=ended and i == len(ids) - 1)
            for i, (piece, logprob, token_id) in enumerate(zip(pieces, logprobs, ids, strict=True))
        ]
        return Event(int(choice.get("index") or 0), tokens, finish)

    def _finish(self, choice: Mapping[str, Any]) -> Finish | None:
        """Return why the server writes no more of a choice; only a model's own end is one."""
        reason = choice.get("finish_reason")
        if reason is None:
            return None
        if reason == "length":
            return Finish.LIMIT
        if reason in ENDS:
            return Finish.STOP if isinstance(choice.get("stop_reason"), str) else Finish.END
        raise self._translator.broken_off(str(reason))


def split(text: str, texts: Sequence[str]) -> list[str]:
    """Divide a text among its tokens.

    Some of them hold a part of a character only, whose own text is none: such a character goes to
    the token that completes it.
    """
    pieces: list[str] = []
    at = 0
    for own in texts:
        found = text.find(own, at) if own else -1
        if found < 0:
            pieces.append("")
            continue
        if pieces:
            pieces[-1] += text[at:found]
        pieces.append(own if pieces else text[at:found] + own)
        at = found + len(own)
    return [*pieces[:-1], pieces[-1] + text[at:]] if pieces else []


def prompt_logprobs(answer: Mapping[str, Any], tokens: Sequence[int]) -> list[float | None]:
    """Return the log-probs of a prompt's last tokens from an answer with `prompt_logprobs`."""
    rows = answer["choices"][0]["prompt_logprobs"][-len(tokens) :]
    return [row[str(token)]["logprob"] for row, token in zip(rows, tokens, strict=True)]


def echoed_logprobs(answer: Mapping[str, Any], has_answer: bool) -> list[float | None]:
    """Return the log-probs of a prompt that was echoed, without those of the answer after it."""
    logprobs: list[float | None] = answer["choices"][0]["logprobs"]["token_logprobs"]
    written = answer["usage"]["completion_tokens"] if has_answer else 0
    return logprobs[: len(logprobs) - written]


def _float32(logprob: float | None) -> float | None:
    """Round as a `Reading` does, so that both compare equal."""
    return None if logprob is None else float(np.float32(min(logprob, 0.0)))
