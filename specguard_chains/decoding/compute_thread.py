"""The one thread on which the models of this process compute.

llama.cpp's OpenMP build keeps a team of threads for every thread that it is called from, and as
soon as there are more of them than cores, all of them sleep at every barrier instead of spinning.
On two cores a second calling thread makes each token a third slower, for good. So whoever decodes
in the background does it here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from queue import SimpleQueue
from typing import TypeVar

from specguard_chains.decoding.fair_lock import FairLock

T = TypeVar("T")

_jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
_turn = FairLock()
_start = threading.Lock()
_thread: threading.Thread | None = None


def run(job: Callable[[], T], cancelled: Callable[[], bool] | None = None) -> T:
    """Return what a job returns, or raise what it raises; others wait in order.

    Raises:
        DecodingCancelled: `cancelled` said so before the job began.
    """
    if is_current():
        return job()
    with _turn.held(cancelled):
        _ensure_started()
        results: list[T] = []
        errors: list[BaseException] = []
        done = threading.Event()
        context = copy_context()

        def work() -> None:
            try:
                results.append(context.run(job))
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        _jobs.put(work)
        done.wait()
    if errors:
        raise errors.pop()
    return results.pop()


def submit(job: Callable[[], None]) -> None:
    """Have a job done next, before whoever waits; it must raise nothing."""
    _ensure_started()
    _jobs.put(job)


def is_current() -> bool:
    """Whether this is the compute thread."""
    return threading.current_thread() is _thread


def _ensure_started() -> None:
    global _thread
    with _start:
        if _thread is None or not _thread.is_alive():  # a fork has only the thread that forked
            _thread = threading.Thread(target=_work, name="specguard-compute", daemon=True)
            _thread.start()


def _work() -> None:
    while True:
        _jobs.get()()
