"""Whether an answer is right: math-verify in a process of its own, with a real time limit.

math-verify limits its time by signals, which reach a main thread only and no long operation of the
interpreter, such as a gigantic power. Here the comparison runs in another process, which is killed
when it takes too long. It is a plain subprocess: it needs no importable `__main__`, and works from
any thread and inside of any event loop (which it keeps waiting; use a thread there).
"""

from __future__ import annotations

import json
import logging
import math
import os
import selectors
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Self

from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.extraction import extracted_answer, letter_in, letters_of
from specguard_chains.evaluation.problems import Problem

logger = logging.getLogger("specguard_chains.evaluation")

STARTUP_LIMIT_S = 120
"""How long the worker may take to load math-verify, on a machine that is busy."""

MISSING = (
    'answers are compared by math-verify, which is missing: pip install "specguard_chains[bench]"'
)
_BOOT = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from specguard_chains.evaluation.checking_worker import serve; serve(int(sys.argv[1]))"
)


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of an answer."""

    right: bool
    extracted: str | None
    """The answer that the text gives; None if it gives none, which is wrong."""
    timed_out: bool
    """Whether comparing it took too long; it counts as wrong then."""


class AnswerChecker:
    r"""Compares answers with the right ones; a context manager around one worker process.

    The answer is taken from the text alone, see `extraction`: the last complete `\boxed{...}`; else
    the last number if the right answer is a number; else the text has no answer and is wrong. Of
    choices the letter is compared.

    Args:
        timeout_s: How long one comparison may take.
    """

    def __init__(self, timeout_s: float = 5.0) -> None:
        if not 0 < timeout_s < math.inf:
            raise EvaluationError(f"timeout_s is {timeout_s}; it must be a positive number")
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._open = False
        self._worker: _Worker | None = None

    def __enter__(self) -> Self:
        if find_spec("math_verify") is None:
            raise EvaluationError(MISSING)
        self._open = True
        self._worker = _Worker(self.timeout_s)  # loads while the caller loads models
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker process; the checker is of no use any more."""
        with self._lock:
            self._open = False
            self._drop_worker()

    def check(self, text: str, problem: Problem) -> Checked:
        """Return whether the text's answer is the problem's.

        Can be called from any thread; calls wait for one another.

        Raises:
            EvaluationError: The checker is not open, or its worker does not start.
        """
        extracted = extracted_answer(text, problem)
        letters = letters_of(problem)
        if extracted is None:
            return Checked(right=False, extracted=None, timed_out=False)
        if problem.choices or extracted in tuple(letters):
            right = extracted == letter_in(problem.answer)
            return Checked(right, extracted, timed_out=False)
        try:
            return Checked(self.equal(problem.answer, extracted), extracted, timed_out=False)
        except TimeoutError:
            return Checked(right=False, extracted=extracted, timed_out=True)

    def equal(self, gold: str, given: str) -> bool:
        """Return whether an answer equals the right one, both as they would stand in a box.

        Raises:
            TimeoutError: It took longer than `timeout_s`.
            EvaluationError: As of `check`.
        """
        with self._lock:
            if not self._open:
                raise EvaluationError(
                    'the checker is closed; use "with AnswerChecker() as checker"'
                )
            for attempt in (1, 2):
                try:
                    return self._asked(gold, given)
                except EOFError:
                    # Nothing to do with the answer, perhaps: killed from outside while idle.
                    logger.warning(
                        "the worker crashed on %.200r, %.200r (%d)", gold, given, attempt
                    )
            return False

    def _asked(self, gold: str, given: str) -> bool:
        """Ask the worker, a new one if need be; one that did not answer properly is dropped."""
        worker = self._worker = self._worker or _Worker(self.timeout_s)
        try:
            worker.wait_until_ready()
            answer = worker.ask([gold, given], self.timeout_s)
        except BaseException:  # after an interrupt, too, its answer would be taken for the next one
            self._drop_worker()
            raise
        if "failure" in answer:
            logger.info("%.200r, %.200r: cannot be compared: %s", gold, given, answer["failure"])
        return bool(answer["equal"])

    def _drop_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()


class _Worker:
    """The process that compares, and the lines that go to and fro."""

    def __init__(self, timeout_s: float) -> None:
        self._ready = False
        self._rest = b""
        own_limit_s = str(math.ceil(timeout_s) + 60)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, own_limit_s, *map(str, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Return once math-verify is loaded.

        Raises:
            EvaluationError: It cannot be loaded.
        """
        if self._ready:
            return
        try:
            answer = self._line(time.monotonic() + STARTUP_LIMIT_S)
        except (EOFError, TimeoutError) as error:
            late = isinstance(error, TimeoutError)
            with suppress(subprocess.TimeoutExpired):  # its end follows the end of its output
                self._process.wait(0 if late else 5)
            what = "took too long" if late else "failed"
            raise EvaluationError(
                f"starting the process that compares answers {what} (exit status "
                f'{self._process.returncode}); try {sys.executable} -c "import math_verify"'
            ) from error
        if "error" in answer:
            raise EvaluationError(f"{MISSING} ({answer['error']})")
        self._ready = True

    def ask(self, question: list[str], timeout_s: float) -> dict[str, Any]:
        """Return the answer to a question.

        Raises:
            TimeoutError: There was none in time.
            EOFError: The process has ended.
        """
        assert self._process.stdin is not None
        deadline = time.monotonic() + timeout_s
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
        except OSError as error:
            raise EOFError from error
        return self._line(deadline)

    def kill(self) -> None:
        """End the process, whatever it is doing, and leave nothing of it."""
        self._process.kill()
        with self._process:  # closes the pipes and waits
            pass

    def _line(self, deadline: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    raise TimeoutError
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise EOFError
                self._rest += chunk
        line, self._rest = self._rest.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer
