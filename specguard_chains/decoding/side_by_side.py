"""Jobs of one request, done side by side on places of its engines that no other request needs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from typing import Generic, TypeVar

from specguard_chains.decoding import compute_thread
from specguard_chains.decoding.engine import Engine
from specguard_chains.errors import QueueFullError

T = TypeVar("T")
Cancelled = Callable[[], bool]
Job = Callable[[Cancelled], T]
"""It asks at every token whether it should give up."""


def side_by_side(
    jobs: Sequence[Job[T]],
    engines: Sequence[Engine],
    cancelled: Cancelled | None,
    *,
    most: int | None = None,
) -> list[T]:
    """Return what each of the jobs returns, in their order; `most` at a time, None for no limit.

    The caller holds a place of each engine (`Engine.exclusive`), on which the jobs are done one
    after the other. Threads of their own do some of them meanwhile, each on a free place: they wait
    for none, so that requests cannot wait for each other in a circle, and hold one for a single job
    only, so that others get their turn.

    Raises:
        BaseException: What the first job to fail has raised; the others are cancelled.
    """
    places = [engine.capabilities.max_parallel for engine in engines]
    if compute_thread.is_current():  # others' passes would wait for this thread, which waits
        places.append(1)
    return _Jobs(jobs, engines, cancelled).do(min(places if most is None else [*places, most]))


class _Jobs(Generic[T]):
    def __init__(
        self, jobs: Sequence[Job[T]], engines: Sequence[Engine], cancelled: Cancelled | None
    ) -> None:
        self._pending = deque(enumerate(jobs))
        self._engines = engines
        self._cancelled_by_caller = cancelled
        self._results: dict[int, T] = {}
        self._errors: list[BaseException] = []
        self._given_up = False
        self._helpers: list[threading.Thread] = []

    def do(self, most: int) -> list[T]:
        """Do all of them, `most` at a time."""
        try:
            while self._pending:
                self._call_helpers(most - 1)
                self._do_next()
            self._wait()
        finally:  # interrupted, perhaps
            self._given_up = True
            self._wait()
        if self._errors:
            raise self._errors[0]
        return [self._results[index] for index in sorted(self._results)]

    def _call_helpers(self, most: int) -> None:
        """Start threads for the jobs beyond the next one, `most` at a time."""
        self._helpers = [helper for helper in self._helpers if helper.is_alive()]
        for _ in range(min(most, len(self._pending) - 1) - len(self._helpers)):
            # A daemon, so that a vote cannot keep the process alive; whoever votes waits for it.
            helper = threading.Thread(
                target=copy_context().run, args=(self._help,), name="specguard-helper", daemon=True
            )
            helper.start()
            self._helpers.append(helper)

    def _help(self) -> None:
        while self._pending and (place := _free_place(self._engines)) is not None:
            with place:
                self._do_next()

    def _do_next(self) -> None:
        try:
            index, job = self._pending.popleft()
        except IndexError:  # another thread was faster
            return
        try:
            self._results[index] = job(self._cancelled)
        except BaseException as error:
            self._errors.append(error)
            self._given_up = True
            self._pending.clear()

    def _cancelled(self) -> bool:
        by_caller = self._cancelled_by_caller
        return self._given_up or (by_caller is not None and by_caller())

    def _wait(self) -> None:
        for helper in self._helpers:
            helper.join()


def _free_place(engines: Sequence[Engine]) -> ExitStack | None:
    """Hold a place of each engine; return what gives them back, None if one has none to spare."""
    with ExitStack() as stack:
        try:
            for engine in engines:
                stack.enter_context(engine.exclusive(max_waiting=0))
        except QueueFullError:
            return None
        return stack.pop_all()
