"""Checking how an engine for a server is set up, before anything is sent."""

from __future__ import annotations

import os
import re
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from specguard_adapters.openai.features import ServerFeatures
from specguard_chains.errors import ConfigurationError


def secret_key(api_key: str | SecretStr | None) -> SecretStr | None:
    """Return the key that is given, else the environment's, if there is one."""
    if api_key is None:
        api_key = os.environ.get("OPENAI_API_KEY") or None
    return SecretStr(api_key) if isinstance(api_key, str) else api_key


def check_url(base_url: str) -> None:
    """Refuse what is not the plain address of an API."""
    try:
        parts = urlsplit(base_url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ConfigurationError(f"base_url {shown(base_url)} is not a URL") from None
    if not valid:
        raise ConfigurationError(
            f"base_url {shown(base_url)} is not the address of an API; write for example "
            "http://127.0.0.1:8000/v1"
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigurationError(
            f"base_url {shown(base_url)} has more than an address; give keys as api_key or "
            "$OPENAI_API_KEY"
        )


def shown(url: str) -> str:
    """Return a URL without what may be secret in it."""
    return repr(re.sub(r"(?<=//)[^/]*@|[?#].*", "…", url))


def check_numbers(
    max_candidates: int, timeout_s: float, max_retries: int, context_length: int | None
) -> None:
    """Refuse numbers that cannot work."""
    if max_candidates < 1:
        raise ConfigurationError(f"max_candidates must be at least 1, not {max_candidates}")
    if not timeout_s > 0:
        raise ConfigurationError(f"timeout_s must be more than 0 seconds, not {timeout_s}")
    if max_retries < 0:
        raise ConfigurationError(f"max_retries must be at least 0, not {max_retries}")
    if context_length is not None and context_length < 2:
        raise ConfigurationError(f"context_length must be at least 2, not {context_length}")


def usable_length(asked: int | None, features: ServerFeatures, base_url: str) -> int:
    """Return the usable length: one token less than the server's, as reading writes one."""
    has = features.max_length
    if asked is None and has is None:
        raise ConfigurationError(
            f"the server at {base_url} does not tell how long its context is; give context_length"
        )
    if asked is not None and has is not None and asked > has:
        raise ConfigurationError(
            f"context_length={asked} is longer than the {has} tokens of the server at {base_url}; "
            "lower it"
        )
    return (asked or has or 0) - 1


def tls(verify: bool | str | os.PathLike[str] | ssl.SSLContext) -> bool | ssl.SSLContext:
    """Return what httpx takes for checking certificates."""
    if isinstance(verify, bool | ssl.SSLContext):
        return verify
    if not Path(verify).is_file():
        raise ConfigurationError(f"verify={os.fspath(verify)!r} is not a file of certificates")
    return ssl.create_default_context(cafile=os.fspath(verify))
