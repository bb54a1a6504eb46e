"""Models on a server that speaks OpenAI's completion API, such as vLLM.

>>> from specguard_chains.adapters import OpenAIEngine
>>> engine = OpenAIEngine.from_url("openai://127.0.0.1:8000/my-model")  # doctest: +SKIP
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from pydantic import SecretStr

from specguard_adapters.openai.codec import Codec
from specguard_adapters.openai.completions import Completions
from specguard_adapters.openai.errors import CONTEXT_LENGTH, Translator
from specguard_adapters.openai.features import find_features
from specguard_adapters.openai.http import Client
from specguard_adapters.openai.ids import IdCodec
from specguard_adapters.openai.pieces import PieceCodec
from specguard_adapters.openai.prompts import Prompts
from specguard_adapters.openai.session import OpenAISession
from specguard_adapters.openai.settings import (
    check_numbers,
    checked_headers,
    is_local,
    plain_url,
    redacted,
    secret_key,
    tls,
    usable_length,
)
from specguard_adapters.openai.writer import Server
from specguard_chains.decoding.constraint import Constraint
from specguard_chains.decoding.engine import Capabilities, Prompt
from specguard_chains.decoding.fair_lock import FairLock
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.errors import (
    AttentionUnavailableError,
    ConfigurationError,
    ContextOverflowError,
    DecodingCancelled,
    EngineError,
    StatesUnavailableError,
)
from specguard_chains.templates import ChatTemplate

SCHEMES = {"openai": "http", "openais": "https"}


class OpenAIEngine:
    """An `Engine` over a model on a server, by `/v1/completions`.

    With vLLM, sequences consist of the model's own token ids. Other servers get text, and tokenize
    it anew with every request; special tokens in a step's text are then read as such.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str,
        api_key: str | SecretStr | None = None,
        context_length: int | None = None,
        chat_template: str | None = None,
        max_candidates: int = 16,
        timeout_s: float = 120.0,
        max_retries: int = 2,
        max_parallel: int = 1,
        verify: bool | str | os.PathLike[str] | ssl.SSLContext = True,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Ask the server what it can do; nothing is loaded here.

        Args:
            model: The model's name on the server.
            base_url: Where its API is, such as "http://127.0.0.1:8000/v1".
            api_key: The server's key, "" for none; None takes $OPENAI_API_KEY, if it is set. That
                one is sent by https and to this machine only.
            context_length: Most tokens of a sequence, for servers that do not tell or when fewer
                will do.
            chat_template: Jinja source, in place of the server's template.
            max_candidates: Most candidates that are sampled side by side.
            timeout_s: Longest time of one request, its repetitions included.
            max_retries: How often a request is repeated that failed for a reason that may pass.
            max_parallel: Requests that are admitted at a time; the server may batch them.
            verify: Check the server's certificate: by the authorities that certifi knows, or the
                file of another one, or a TLS context. False takes any certificate.
            headers: Sent with every request. With an Authorization among them no key is sent.

        Raises:
            ConfigurationError: A value does not suit the server.
            ServerError: The server cannot be reached, or refuses the requests.
        """
        base_url = plain_url(base_url)
        check_numbers(max_candidates, timeout_s, max_retries, max_parallel, context_length)
        sent = checked_headers(headers or {})
        secrets = list(sent.values())
        if any(name.lower() == "authorization" for name in sent):
            if api_key:
                raise ConfigurationError(
                    "api_key and headers both say how to sign in (Authorization); give one of them"
                )
            api_key = ""
        if (key := secret_key(api_key, base_url)) is not None:
            secrets.append(key.get_secret_value())
            sent["Authorization"] = f"Bearer {key.get_secret_value()}"
        template = ChatTemplate(chat_template) if chat_template is not None else None
        self.name = model
        self.base_url = base_url
        self._template = chat_template
        self._queue = FairLock(max_parallel)
        self._closed = False
        translator = Translator(base_url, model, secrets)
        self._client = Client(
            base_url,
            translator=translator,
            headers=sent,
            timeout_s=timeout_s,
            max_retries=max_retries,
            verify=base_url.startswith("https:") and tls(verify),
            direct=is_local(base_url),  # a proxy would see what need not leave this machine
        )
        try:
            self.features = find_features(self._client, model, translator)
            self._server = Server(
                name=model,
                vocabulary=f"{base_url} {model}",
                context_length=usable_length(context_length, self.features, base_url),
                max_candidates=max_candidates,
                completions=Completions(self._client, model, self.features, translator),
                codec=self._codec(template),
                check=self._check,
            )
            self._prompts = Prompts(self._server.codec)
        except BaseException:
            self.close()
            raise
        self.capabilities = Capabilities(
            in_process=False,
            logprobs=self.features.logprobs,
            scoring=self.features.scoring is not None,
            attention=False,
            max_candidates=max_candidates,
            max_parallel=max_parallel,
        )

    @classmethod
    def from_url(cls, url: str, **settings: Any) -> OpenAIEngine:
        """Return the engine of `openai://host:port/model`, or with `openais` by https.

        The path is the model's name, slashes included; the API is at `/v1` of the host.
        """
        scheme, _, rest = url.partition("://")
        scheme = scheme.lower()
        host, _, model = rest.partition("/")
        if scheme not in SCHEMES or not host or not model:
            raise ConfigurationError(
                f"{redacted(url)} is not the URL of a model on a server; write "
                "openai://host:port/model, or openais:// for https"
            )
        if "@" in host or "?" in rest or "#" in rest:
            raise ConfigurationError(
                f"{redacted(url)} has more than a host and a model; give keys as api_key or "
                "$OPENAI_API_KEY, and settings as arguments"
            )
        return cls(model, base_url=f"{SCHEMES[scheme]}://{host}/v1", **settings)

    def __repr__(self) -> str:
        return f"OpenAIEngine({self.name!r}, base_url={self.base_url!r})"

    @property
    def vocabulary(self) -> str:
        """See `Engine.vocabulary`. Of the same model elsewhere nobody knows that it is the same."""
        return self._server.vocabulary

    @property
    def context_length(self) -> int:
        """See `Engine.context_length`."""
        return self._server.context_length

    def encode(self, prompt: Prompt) -> list[int]:
        """See `Engine.encode`."""
        self._check(None)
        return self._prompts.encode(prompt)

    def text(self, tokens: list[int]) -> str:
        """Return what tokens mean."""
        return self._server.codec.text(tokens)

    def open(
        self,
        prompt: Prompt,
        *,
        grounding: GroundingSpec | None = None,
        cancelled: Callable[[], bool] | None = None,
        constraint: Constraint | None = None,
        state_layer: int | None = None,
    ) -> OpenAISession:
        """See `Engine.open`."""
        self._check(cancelled)
        if constraint is not None:
            raise ConfigurationError(
                f"{self.name} runs on a server, which cannot be held to a grammar step by step; "
                "take a model that runs in this process"
            )
        if grounding is not None:
            raise AttentionUnavailableError(
                f"{self.name} runs on a server, which gives no attention, and grounding needs it; "
                "draft with a local engine, or "
                + ("give no passages" if prompt.passages else "set confidence_weight=1")
            )
        if state_layer is not None:
            raise StatesUnavailableError(
                f"{self.name} runs on a server, which gives no hidden states, and a value head "
                "needs them; draft with a local engine, or set value_weight=0"
            )
        empty = not prompt.messages if prompt.text is None else not prompt.text
        tokens = [] if empty else self._prompts.encode(prompt, cancelled)
        if not tokens:
            raise ConfigurationError("the prompt is empty; give at least one message with text")
        if len(tokens) >= self.context_length:
            raise ContextOverflowError(
                f"the prompt has {len(tokens)} tokens and leaves no room in the context of "
                f"{self.context_length}; raise {CONTEXT_LENGTH}, have the server use a longer one, "
                "or shorten the prompt"
            )
        return OpenAISession(self._server, tokens, cancelled)

    def chat_template(self) -> str | None:
        """See `Engine.chat_template`. A server keeps its own to itself."""
        return self._template

    def exclusive(
        self, cancelled: Callable[[], bool] | None = None, *, max_waiting: int | None = None
    ) -> AbstractContextManager[None]:
        """See `Engine.exclusive`."""
        return self._queue.held(cancelled, max_waiting=max_waiting)

    def close(self) -> None:
        """See `Engine.close`. Requests that are under way are aborted."""
        self._closed = True
        self._client.close()

    def _check(self, cancelled: Callable[[], bool] | None) -> None:
        if self._closed:
            raise EngineError(f"the engine {self.name} is closed; make another one")
        if cancelled is not None and cancelled():
            raise DecodingCancelled("the request was cancelled")

    def _codec(self, template: ChatTemplate | None) -> Codec:
        if self.features.token_ids:
            return IdCodec(
                self._client,
                self.name,
                template,
                renders=self.features.chat_template,
                adds_space=self.features.adds_space,
            )
        return PieceCodec(self._client, self.name, template, self.features.dialect)
