"""llama.cpp's log: taken off standard error, kept for messages, passed on if asked."""

from __future__ import annotations

import logging
from collections import deque

import llama_cpp

logger = logging.getLogger("specguard_chains.llama_cpp")


class _Log:
    """Takes llama.cpp's log: quiet unless asked, with the latest errors kept for messages."""

    LEVELS = (0, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)  # ggml.h

    def __init__(self) -> None:
        self.verbose = False
        self.errors: deque[str] = deque(maxlen=8)
        self._level = logging.DEBUG
        self._callback = llama_cpp.llama_log_callback(self._write)
        llama_cpp.llama_log_set(self._callback, None)

    def _write(self, level: int, text: bytes | None, _: int | None) -> None:
        if level < len(self.LEVELS):  # a level beyond them continues the line before
            self._level = self.LEVELS[level]
        line = (text or b"").decode("utf-8", "replace").strip()
        if self._level == logging.ERROR and line:
            self.errors.append(line)
        if self.verbose and line.strip("."):
            logger.log(self._level, line)

    def latest_error(self) -> str:
        return self.errors[-1] if self.errors else "no reason given"


log = _Log()
