"""Checking how an engine for a server is set up, before anything is sent."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from specguard_adapters.openai.errors import CONTEXT_LENGTH
from specguard_adapters.openai.features import ServerFeatures
from specguard_chains.errors import ConfigurationError

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def plain_url(base_url: str) -> str:
    """Return the address of an API in one spelling; refuse what is more, or none.

    Raises:
        ConfigurationError: It is not the plain address of an API.
    """
    try:
        parts = urlsplit(base_url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ConfigurationError(f"base_url {redacted(base_url)} is not a URL") from None
    if not valid:
        raise ConfigurationError(
            f"base_url {redacted(base_url)} is not the address of an API; write for example "
            "http://127.0.0.1:8000/v1"
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigurationError(
            f"base_url {redacted(base_url)} has more than an address; give keys as api_key or "
            "$OPENAI_API_KEY"
        )
    return parts.geturl().rstrip("/")  # with the scheme in lower case


def redacted(url: str) -> str:
    """Return a URL without what may be secret in it."""
    return repr(re.sub(r"(?<=//)[^/]*@|[?#].*", "…", url))


def is_local(base_url: str) -> bool:
    """Whether a URL's host is this machine: what is sent there passes no network."""
    host = urlsplit(base_url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def secret_key(api_key: str | SecretStr | None, base_url: str) -> SecretStr | None:
    """Return the key that is given, else the environment's; None if there is none.

    Raises:
        ConfigurationError: It cannot be a key, or it is the environment's, which nobody has said
            to send to this server, and would pass the network in clear text.
    """
    if api_key is not None:
        given = api_key if isinstance(api_key, str) else api_key.get_secret_value()
        return _secret("api_key", given)
    key = _secret("$OPENAI_API_KEY", os.environ.get("OPENAI_API_KEY", ""))
    if key is not None and base_url.startswith("http:") and not is_local(base_url):
        raise ConfigurationError(
            f"$OPENAI_API_KEY would be sent in clear text to {base_url}; use openais:// (TLS), or "
            'pass api_key explicitly, "" for none'
        )
    return key


def checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers without white space around their values, which may be secret.

    Raises:
        ConfigurationError: Something in them cannot be sent.
    """
    for name in headers:
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise ConfigurationError(
                "headers has a name with other characters than HTTP allows; correct it"
            )
    return {name: _sendable(f"headers[{name!r}]", value) for name, value in headers.items()}


def _secret(name: str, value: str) -> SecretStr | None:
    value = _sendable(name, value)
    return SecretStr(value) if value else None


def _sendable(name: str, value: str) -> str:
    """Return a header's value, or refuse it without showing it."""
    if not isinstance(value, str):
        raise ConfigurationError(f"{name} must be text, not {type(value).__name__}")
    value = value.strip()
    if not (value.isascii() and value.isprintable()):
        raise ConfigurationError(
            f"{name} has other characters than printable ASCII ones, which no header can carry; "
            "was it copied whole, and nothing with it?"
        )
    return value


def check_numbers(
    max_candidates: int,
    timeout_s: float,
    max_retries: int,
    max_parallel: int,
    context_length: int | None,
) -> None:
    """Refuse numbers that cannot work."""
    if max_candidates < 1:
        raise ConfigurationError(f"max_candidates must be at least 1, not {max_candidates}")
    if not timeout_s > 0:
        raise ConfigurationError(f"timeout_s must be more than 0 seconds, not {timeout_s}")
    if max_retries < 0:
        raise ConfigurationError(f"max_retries must be at least 0, not {max_retries}")
    if max_parallel < 1:
        raise ConfigurationError(f"max_parallel must be at least 1, not {max_parallel}")
    if context_length is not None and context_length < 2:
        raise ConfigurationError(f"{CONTEXT_LENGTH} must be at least 2, not {context_length}")


def usable_length(asked: int | None, features: ServerFeatures, base_url: str) -> int:
    """Return the usable length: one token less than the server's, as reading writes one."""
    has = features.max_length
    if asked is None and has is None:
        raise ConfigurationError(
            f"the server at {base_url} does not tell how long its context is; give {CONTEXT_LENGTH}"
        )
    if asked is not None and has is not None and asked > has:
        raise ConfigurationError(
            f"the server at {base_url} has a context of {has} tokens, which is less than {asked}; "
            f"lower {CONTEXT_LENGTH}"
        )
    return (asked or has or 0) - 1


def tls(verify: bool | str | os.PathLike[str] | ssl.SSLContext) -> bool | ssl.SSLContext:
    """Return what httpx takes for checking certificates."""
    if isinstance(verify, bool | ssl.SSLContext):
        return verify
    if not Path(verify).is_file():
        raise ConfigurationError(f"verify={os.fspath(verify)!r} is not a file of certificates")
    return ssl.create_default_context(cafile=os.fspath(verify))
