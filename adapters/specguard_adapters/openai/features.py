"""What a server can do, found out once by small requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from specguard_adapters.openai.errors import Translator
from specguard_adapters.openai.http import Client
from specguard_chains.errors import (
    ConfigurationError,
    ServerAuthenticationError,
    ServerError,
)

Dialect = Literal["vllm", "llama_cpp_python"]

TOKENIZERS: Mapping[Dialect, tuple[str, str]] = {
    "vllm": ("/tokenize", "prompt"),
    "llama_cpp_python": ("/extras/tokenize", "input"),
}
"""Where a text is tokenized, and the name that it has in the request."""

SPACE = "\u2581"
"""How SentencePiece spells a space."""
SAMPLE = "The capital of Italy is"
WRITTEN = 8
"""Tokens that the probes have the model write."""
NEAR = 1.0
"""Log-probs of the same token that differ by less are the same number, rounded differently. What
servers mix up differs by several units."""

_NEUTRAL: Mapping[Dialect, Mapping[str, Any]] = {
    "vllm": {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    "llama_cpp_python": {"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0},
}
"""Settings that leave the model's distribution alone. The servers' own defaults do not: vLLM takes
them from the model's folder, llama-cpp-python has top_k=40, min_p=0.05, repeat_penalty=1.1."""


@dataclass(frozen=True, slots=True)
class ServerFeatures:
    """What a server can do with a model."""

    dialect: Dialect
    """Whose endpoints it has beside the standard ones."""
    adds_space: bool
    """Its tokenizer puts a space before a text, as those of SentencePiece often do."""
    max_length: int | None
    """The longest sequence, if it says."""
    neutral: Mapping[str, Any] | None
    """Settings to be sent that shape nothing; None if it takes the standard ones only."""
    logprobs: bool
    """Tokens come with raw log-probs."""
    token_ids: bool
    """Prompts may be token ids, and tokens come with theirs."""
    several: bool
    """It writes several candidates in one request."""
    stops: bool
    """It stops after a stop string and tells which one it was."""
    scoring: Literal["prompt_logprobs", "echo"] | None
    """How it tells the log-probs of a prompt, if at all."""
    echo_has_answer: bool
    """Whether echoed log-probs include those of the answer after the prompt."""
    chat_template: bool
    """It renders chat messages."""


def find_features(client: Client, model: str, translator: Translator) -> ServerFeatures:
    """Ask a server what it can do.

    Raises:
        ServerError: It cannot be reached, or refuses what every server must do.
        ConfigurationError: It has no such model, or cannot tokenize.
    """
    return _Probes(client, model, translator).features()


class _Probes:
    """The requests: one method per feature."""

    def __init__(self, client: Client, model: str, translator: Translator) -> None:
        self._client = client
        self._model = model
        self._translator = translator

    def features(self) -> ServerFeatures:
        max_length = self._model_length()
        dialect, adds_space = self._dialect()
        neutral, first = self._completion(_NEUTRAL[dialect])
        logprobs = _logprobs(first) is not None and self._raw_logprobs(first, neutral)
        token_ids = dialect == "vllm" and self._token_ids(first)
        scoring, has_answer = self._scoring(first) if logprobs else (None, False)
        return ServerFeatures(
            dialect=dialect,
            adds_space=adds_space,
            max_length=max_length,
            neutral=neutral,
            logprobs=logprobs,
            token_ids=token_ids,
            several=self._several(),
            stops=token_ids and self._stops(first),
            scoring=scoring,
            echo_has_answer=has_answer,
            chat_template=dialect == "vllm" and self._chat_template(),
        )

    def _model_length(self) -> int | None:
        """Return what the list of models says about the longest sequence."""
        listed = _or_none(lambda: self._client.get("models"))
        models = [entry for entry in (listed or {}).get("data", ()) if isinstance(entry, dict)]
        self._translator.models = [str(entry.get("id")) for entry in models]
        own = next((entry for entry in models if entry.get("id") == self._model), None)
        if models and own is None:
            raise ConfigurationError(f"{self._translator.no_model()}; name one of these")
        length = (own or {}).get("max_model_len")
        return length if isinstance(length, int) else None

    def _dialect(self) -> tuple[Dialect, bool]:
        """Return whose endpoints there are, and whether a text gains a space."""
        for dialect, (path, name) in TOKENIZERS.items():
            told = {"return_token_strs": True, "add_special_tokens": False}
            answer = self._post(path, **{name: SAMPLE}, **told)
            if answer.get("tokens"):
                spelled = answer.get("token_strs") or [""]
                return dialect, spelled[0].startswith(SPACE)
        raise ConfigurationError(
            f"the server at {self._client.base_url} has neither /tokenize (vLLM) nor "
            "/extras/tokenize (llama-cpp-python), without which no length can be told; use one "
            "of these servers, or correct base_url, which ends in /v1 as a rule"
        )

    def _completion(
        self, neutral: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any] | None, Mapping[str, Any]]:
        """Return the settings that the server takes, and a greedy answer with all it can tell."""
        refusal: ServerError | None = None
        for own, extra in (
            (neutral, {"logprobs": 1, "return_token_ids": True}),
            (neutral, {}),
            (None, {"logprobs": 1}),
            (None, {}),
        ):
            try:
                return own, self._complete(SAMPLE, **(own or {}), **extra)
            except ServerError as error:
                if not _lacks(error):
                    raise
                refusal = error
        assert refusal is not None
        raise refusal

    def _raw_logprobs(self, first: Mapping[str, Any], neutral: Mapping[str, Any] | None) -> bool:
        """Whether log-probs do not change with the settings of sampling."""
        if neutral is None:
            return True
        settings = {**neutral, "temperature": 0.3, "top_k": 1, "logprobs": 1, "max_tokens": 1}
        again = _or_none(lambda: self._complete(SAMPLE, **settings)) or {}
        raw, shaped = _logprobs(first) or [], _logprobs(again) or []
        return bool(raw and shaped) and abs(raw[0] - shaped[0]) < min(NEAR, abs(raw[0]) / 2 + 0.05)

    def _token_ids(self, first: Mapping[str, Any]) -> bool:
        choice = first["choices"][0]
        prompt, written = choice.get("prompt_token_ids"), choice.get("token_ids")
        if not prompt or not written:
            return False
        answer = _or_none(lambda: self._complete(prompt, return_token_ids=True))
        return bool(_choice(answer).get("prompt_token_ids") == prompt)

    def _several(self) -> bool:
        def indices(events: Iterator[Mapping[str, Any]]) -> set[int]:
            return {choice["index"] for event in events for choice in event.get("choices") or ()}

        body = {"model": self._model, "prompt": SAMPLE, "max_tokens": 2, "temperature": 1}
        streamed = _or_none(
            lambda: self._client.stream("completions", {**body, "n": 2, "seed": 1}, indices)
        )
        if streamed:
            return bool(streamed == {0, 1})
        self._client.stream("completions", body, indices)  # must work, or says why not
        return False

    def _stops(self, first: Mapping[str, Any]) -> bool:
        text = first["choices"][0]["text"]
        stop = text.strip()[:2]
        settings = {"stop": [stop], "include_stop_str_in_output": True}
        choice = _choice(_or_none(lambda: self._complete(SAMPLE, **settings)))
        stopped = choice.get("stop_reason") == stop
        return bool(stop) and stopped and str(choice.get("text")).endswith(stop)

    def _scoring(
        self, first: Mapping[str, Any]
    ) -> tuple[Literal["prompt_logprobs", "echo"] | None, bool]:
        """Compare what the server reads in its own answer with what it wrote there."""
        written = _logprobs(first) or []
        choice = first["choices"][0]
        if ids := choice.get("token_ids"):
            prompt = [*(choice.get("prompt_token_ids") or ()), *ids]
            answer = _or_none(lambda: self._complete(prompt, prompt_logprobs=0, max_tokens=1))
            rows = (_choice(answer).get("prompt_logprobs") or [])[-len(ids) :]
            read = [_value(row, token) for row, token in zip(rows, ids, strict=False)]
            if _difference(read, written) < NEAR:
                return "prompt_logprobs", False
        settings = {"echo": True, "logprobs": 1, "max_tokens": 1}
        answer = _or_none(lambda: self._complete(SAMPLE + choice["text"], **settings)) or {}
        read = (_choice(answer).get("logprobs") or {}).get("token_logprobs") or []
        new = (answer.get("usage") or {}).get("completion_tokens") or 0
        off = {has: _difference(read[: len(read) - has * new], written) for has in (False, True)}
        has_answer = off[True] < off[False]
        return ("echo", has_answer) if off[has_answer] < NEAR else (None, False)

    def _chat_template(self) -> bool:
        messages = [{"role": "user", "content": "Hello"}]
        return bool(self._post("/tokenize", messages=messages).get("tokens"))

    def _complete(self, prompt: str | Sequence[int], **settings: Any) -> Mapping[str, Any]:
        body = {"model": self._model, "prompt": prompt, "max_tokens": WRITTEN, "temperature": 0}
        answer = self._client.post("completions", body | settings)
        if not _choice(answer):
            raise ServerError(
                f"the server at {self._client.base_url} answers a completion without choices; is "
                "it OpenAI-compatible?"
            )
        return answer  # type: ignore[no-any-return]

    def _post(self, path: str, **body: Any) -> Mapping[str, Any]:
        answer = _or_none(lambda: self._client.post(path, {"model": self._model, **body}))
        return answer if isinstance(answer, dict) else {}


def _or_none(request: Callable[[], Any]) -> Any:
    """Return a request's answer, None if the server lacks what it asks for."""
    try:
        return request()
    except ServerAuthenticationError:
        raise
    except ServerError as error:
        if not _lacks(error):
            raise
        return None


def _lacks(error: ServerError) -> bool:
    """Whether a refusal says that the server cannot do something (rather than: not now)."""
    return error.status in (400, 404, 405, 415, 422, 500, 501)


def _choice(answer: Any) -> Mapping[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    return choices[0] if choices else {}


def _logprobs(answer: Mapping[str, Any]) -> list[float] | None:
    """Return an answer's log-probs if each of its tokens has one."""
    logprobs = (_choice(answer).get("logprobs") or {}).get("token_logprobs")
    return logprobs if logprobs and None not in logprobs else None


def _value(row: Any, token: int) -> float | None:
    entry = row.get(str(token)) if isinstance(row, dict) else None
    return entry.get("logprob") if isinstance(entry, dict) else None


def _difference(read: Sequence[float | None], written: Sequence[float]) -> float:
    """Return by how much a prompt's last log-probs differ at most from what was written."""
    pairs = list(zip(reversed(read), reversed(written), strict=False))
    known = [abs(one - other) for one, other in pairs if one is not None]
    return max(known) if known and len(known) == len(written) else inf
