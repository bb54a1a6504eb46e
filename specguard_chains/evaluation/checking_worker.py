"""The process that compares answers for `checking`: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from typing import TextIO

from specguard_chains.evaluation.equality import equal

MEMORY_LIMIT_BYTES = 4 << 30


def serve(own_limit_s: int) -> None:
    """Answer questions until there are no more.

    Args:
        own_limit_s: The system ends the process when one comparison takes longer, whatever the
            process is doing; it is to be longer than its owner waits. So none is left behind when
            the owner is killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    logging.disable(logging.WARNING)  # math-verify warns that its own time limits are off
    _limit_memory()
    _answer(answers, _imported())
    for line in sys.stdin:
        gold, given = json.loads(line)
        signal.alarm(own_limit_s)
        _answer(answers, _compared(gold, given))
        signal.alarm(0)


def _answer(answers: TextIO, answer: dict[str, object]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


def _imported() -> dict[str, object]:
    """Load the library ahead, so that no comparison is charged for it."""
    try:
        import_module("math_verify")
    except ImportError as error:
        return {"error": str(error)}
    return {"ready": True}


def _compared(gold: str, given: str) -> dict[str, object]:
    try:
        return {"equal": equal(gold, given)}
    except Exception as error:  # whatever the library makes of odd input
        return {"equal": False, "failure": repr(error)[:200]}


def _limit_memory() -> None:
    """Let a gigantic power fail instead of the machine."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
