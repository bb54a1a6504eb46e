"""What can go wrong with a model server, as errors that say where and what to do about it."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import httpx

from specguard_chains.errors import (
    ConfigurationError,
    ContextOverflowError,
    ServerAuthenticationError,
    ServerError,
    ServerTimeoutError,
)

REPEATABLE = frozenset({408, 425, 429, 500, 502, 503, 504})
_OVERFLOW = re.compile("maximum (context|model) length")
CONTEXT_LENGTH = "n_ctx (context_length of the engine)"
"""What is to be changed, by its name for users of chat models and of engines."""
EXCERPT = 300
"""Most characters of a server's own words in a message."""


ABORTED = "abort"
"""The finish reason of a request that a server gives up for reasons of its own, such as a pause."""


class TransientError(Exception):
    """An error that may be gone if the request is repeated."""

    def __init__(self, error: ServerError, retry_after_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.retry_after_s = retry_after_s


class Translator:
    """Makes errors of answers and exceptions; no secret appears in them."""

    def __init__(self, base_url: str, model: str, secrets: Iterable[str]) -> None:
        """Speak of this server and model; never repeat any of the secrets."""
        self.base_url = base_url
        self._model = model
        self._secrets = [secret for secret in secrets if secret]
        self.models: Sequence[str] = ()
        """What the server has, once it is known."""

    def refusal(self, response: httpx.Response) -> Exception:
        """Return the error of an answer whose status is not a success."""
        status = response.status_code
        told = self._scrub(_message(response))
        where = f"the server at {self.base_url}"
        if status in (401, 403):
            return ServerAuthenticationError(
                f"{where} does not accept the API key (status {status}): {told}; give api_key or "
                "set OPENAI_API_KEY",
                status=status,
            )
        if status == 400 and _OVERFLOW.search(told):
            return ContextOverflowError(
                f"{where} has no room for a request: {told}; lower {CONTEXT_LENGTH}, or have "
                "it use a longer one"
            )
        if status == 404:
            return ServerError(self._not_found(response, told), status=status)
        remedy = "change the request's settings"
        if status == 429:
            remedy = "ask less often, or raise max_retries"
        elif status >= 500 or status in REPEATABLE:
            remedy = "look into its log"
        elif status < 400:
            remedy = "give the address that it names as base_url"
        error = ServerError(
            f"{where} refuses a request for {self._model} (status {status}, "
            f"{response.url.path}): {told}; {remedy}",
            status=status,
        )
        return TransientError(error, retry_after_s(response)) if status in REPEATABLE else error

    def broken_off(self, reason: str) -> Exception:
        """Return the error of an answer that the server has ended before the model did."""
        error = ServerError(
            f"the server at {self.base_url} has broken off an answer of {self._model} "
            f"(finish_reason {reason!r}); ask again, or look into its log"
        )
        return TransientError(error) if reason == ABORTED else error

    def failure(self, error: Exception, url: str) -> Exception:
        """Return the error of a request that got no whole answer."""
        told = self._scrub(str(error)) or type(error).__name__
        if (tls := _tls_error(error)) is not None:
            return _caused(ServerError(self._tls_refusal(tls, told)), error)
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            message = f"no server answers at {self.base_url}: {told}; start it, or correct its URL"
        elif isinstance(error, httpx.TransportError) and not isinstance(
            error, httpx.UnsupportedProtocol | httpx.LocalProtocolError
        ):
            message = f"the connection to {url} broke: {told}; look into the server's log"
        else:
            # Without its cause: what httpx refuses to send, it may spell out.
            return ConfigurationError(f"no request can be sent to {url}: {told}; correct base_url")
        return _caused(TransientError(ServerError(message)), error)

    def timeout(self, url: str, timeout_s: float) -> ServerTimeoutError:
        """Return the error of a request that took too long."""
        return ServerTimeoutError(
            f"{url} has not answered within timeout_s={timeout_s:g}; raise it, or see what keeps "
            "the server busy"
        )

    def parse(self, body: bytes, response: httpx.Response) -> Any:
        """Return an answer's JSON."""
        if "text/html" in response.headers.get("content-type", ""):
            raise ServerError(
                f"{response.url} answers with a web page: {self._excerpt(body)}; correct base_url, "
                "which ends in /v1 as a rule"
            )
        try:
            return json.loads(body)
        except ValueError as error:
            raise TransientError(self._nonsense(body, response)) from error

    def expect_events(self, response: httpx.Response) -> None:
        """Refuse an answer that is not a stream of events."""
        kind = response.headers.get("content-type", "")
        if "text/event-stream" not in kind:
            raise ServerError(
                f"{response.url} answers with {kind or 'an unknown type'} where a stream of events "
                "was asked for; it cannot stream, or base_url is wrong"
            )

    def event(self, data: str, response: httpx.Response) -> Mapping[str, Any]:
        """Return an event's JSON object.

        Raises:
            ServerError: The event tells of an error.
        """
        try:
            event = json.loads(data)
        except ValueError as error:
            raise TransientError(self._nonsense(data.encode(), response)) from error
        if not isinstance(event, dict):
            raise TransientError(self._nonsense(data.encode(), response))
        if told := event.get("error"):
            broken = ServerError(
                f"{response.url} broke off an answer of {self._model}: "
                f"{self._scrub(_told(told))}; look into the server's log"
            )
            code = told.get("code") if isinstance(told, dict) else None
            raise TransientError(broken) if code in REPEATABLE else broken
        return event

    def incomplete(self, what: str) -> TransientError:
        """Return the error of an answer that ends before its time."""
        return TransientError(
            ServerError(
                f"an answer of {self._model} at {self.base_url} {what}; look into the server's log"
            )
        )

    def lacking(self, what: str) -> ServerError:
        """Return the error of an answer that has less than the server could give at first."""
        return ServerError(
            f"an answer of {self._model} at {self.base_url} lacks {what}, which earlier ones had; "
            "was the server restarted with other settings? Make the engine anew"
        )

    def implausible(self, what: str) -> ServerError:
        """Return the error of an answer that cannot be meant."""
        return ServerError(
            f"an answer of {self._model} at {self.base_url} {self._scrub(what)}; is an "
            "OpenAI-compatible server there?"
        )

    def no_model(self) -> str:
        """Say that the server does not have the model, and which it has."""
        has = f"; it has {', '.join(self.models)}" if self.models else ""
        return f"the server at {self.base_url} has no model {self._model!r}{has}"

    def _not_found(self, response: httpx.Response, told: str) -> str:
        if "model" in told.lower():
            return f"{self.no_model()} (status 404: {told})"
        return (
            f"the server at {self.base_url} has no {response.url.path} (status 404: {told}); "
            "correct base_url, which ends in /v1 as a rule"
        )

    def _tls_refusal(self, error: ssl.SSLError, told: str) -> str:
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                f"the certificate of {self.base_url} is not accepted: {told}; have it signed by an "
                "authority that this machine trusts, or give the authority's file as verify"
            )
        return f"{self.base_url} does not speak TLS as it should: {told}; is it http, not https?"

    def _nonsense(self, body: bytes, response: httpx.Response) -> ServerError:
        return ServerError(
            f"{response.url} answers with what is not JSON: {self._excerpt(body)}; is an "
            "OpenAI-compatible server there?"
        )

    def _excerpt(self, body: bytes) -> str:
        return repr(self._scrub(body.decode(errors="replace")))

    def _scrub(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}…"


def retry_after_s(response: httpx.Response) -> float | None:
    """Return how long the server asks to wait, if it says so in seconds."""
    try:
        return max(0.0, float(response.headers.get("retry-after", "")))
    except ValueError:  # absent, or a date
        return None


def _message(response: httpx.Response) -> str:
    """Return a server's own words, in whichever of the usual forms they come."""
    try:
        body = response.json()
    except ValueError:
        return str(response.text).strip() or str(response.reason_phrase)
    if isinstance(body, dict):
        for key in ("error", "message", "detail"):
            if body.get(key):
                return _told(body[key])
    return str(response.text)


def _told(value: Any) -> str:
    if isinstance(value, dict) and value.get("message"):
        return str(value["message"])
    return value if isinstance(value, str) else json.dumps(value)


def _tls_error(error: BaseException | None) -> ssl.SSLError | None:
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error
