"""llama-cpp-python's own server, started for tests and surely stopped."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.integration_tests.conftest import VOCABULARY, write_tiny

START_S = 60.0
LONGEST = 6
"""Pieces of several letters at the end of the tiny model's vocabulary."""


def letters_model(path: Path) -> Path:
    """Write the tiny model with single letters only, so that a text has one tokenization."""
    return write_tiny(path, extra={"tokenizer.ggml.tokens": [*VOCABULARY[:-LONGEST], *"ABCDEF"]})


@contextmanager
def serve(path: Path, alias: str, *, n_ctx: int) -> Iterator[str]:
    """Serve a GGUF file; yield the URL of its engine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "model": path,
        "model_alias": alias,
        "n_ctx": n_ctx,
        "n_threads": 1,
        "logits_all": True,
        "host": "127.0.0.1",
        "port": port,
    }
    arguments = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    server = subprocess.Popen(
        [sys.executable, "-m", "llama_cpp.server", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait(server, port)
        yield f"openai://127.0.0.1:{port}/{alias}"
    finally:
        server.kill()
        server.wait()


def _wait(server: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        assert server.poll() is None, "the server has ended; is llama-cpp-python[server] installed?"
        try:
            httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5)
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError("the server does not answer")
