"""One request decoded on a thread of its own, and its steps handed to whoever consumes them.

The decoding does not wait for its consumer: a consumer that asks the same models something else
between two steps queues behind this request, which goes on meanwhile, and nobody waits for ever.
Whoever stops consuming (closes or drops the iterator, presses Ctrl-C, cancels the task) stops the
decoding at its next token; requests that belong together can be stopped together (`stopped_by`).
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from queue import SimpleQueue
from weakref import WeakSet

from specguard_chains.decoding import compute_thread
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.engine import Engine
from specguard_chains.decoding.steps import Step
from specguard_chains.errors import ConfigurationError, DecodingCancelled
from specguard_chains.hook_results import waiting

EXIT_TIMEOUT_S = 10.0
"""How long the end of the process waits for the token that is being computed."""


@dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException


_held: ContextVar[frozenset[int]] = ContextVar("specguard_held", default=frozenset())
"""The engines of the requests within which this code runs."""
_stops: ContextVar[tuple[threading.Event, ...]] = ContextVar("specguard_stops", default=())
"""What stops the requests that are made by this code."""

_Item = Step | _Failure | None
"""What the thread sends; None is the end."""


@contextmanager
def stopped_by(stop: threading.Event) -> Iterator[None]:
    """Let an event end, at their next token, the requests that are made within this context.

    Their consumers get DecodingCancelled.
    """
    token = _stops.set((*_stops.get(), stop))
    try:
        yield
    finally:
        _stops.reset(token)


def run(decoder: Decoder, request: Request) -> Generator[Step]:
    """Yield the steps of a request as they come; errors of the decoder are raised unchanged."""
    items: SimpleQueue[_Item] = SimpleQueue()
    worker = _Worker(decoder, request, items.put)
    worker.start()
    try:
        while (item := items.get()) is not None:
            yield _step(item)
    finally:
        worker.stop()


async def arun(decoder: Decoder, request: Request) -> AsyncGenerator[Step]:
    """Yield the steps of a request as they come, without holding up the event loop."""
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[_Item] = asyncio.Queue()

    def emit(item: _Item) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(items.put_nowait, item)

    worker = _Worker(decoder, request, emit, loop=loop)
    worker.start()
    try:
        while (item := await items.get()) is not None:
            yield _step(item)
    finally:
        worker.stop()


def _step(item: Step | _Failure) -> Step:
    """Return a step, or raise what the decoder raised."""
    if isinstance(item, _Failure):
        try:
            raise item.error
        finally:
            del item  # else the error's traceback would keep itself alive
    return item


class _Worker:
    """The thread of one request."""

    def __init__(
        self,
        decoder: Decoder,
        request: Request,
        emit: Callable[[_Item], None],
        *,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Prepare; `loop` is the consumer's, if it has one: coroutines of hooks run there."""
        self._decoder = decoder
        self._cancelled_by_caller = request.cancelled
        self._request = replace(
            request,
            cancelled=self._cancelled,
            review=waiting(request.review, self._cancelled, loop),
            stop_when=waiting(request.stop_when, self._cancelled, loop),
        )
        self._emit = emit
        self._loop = loop
        self._stopped = threading.Event()
        self._stops = (self._stopped, *_stops.get())
        # A daemon, so that an iterator that somebody still holds cannot keep the process alive.
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._work,), name="specguard", daemon=True
        )

    def start(self) -> None:
        """Begin to decode."""
        _workers.add(self)
        # Exit handlers run last registered first, and an engine registers the one that frees its
        # memory when it is loaded: while a thread still computes in it, that is a crash.
        atexit.unregister(_stop_all)
        atexit.register(_stop_all)
        self._thread.start()

    def stop(self) -> None:
        """Let the decoding end at its next token. Does not wait for that."""
        self._stopped.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout_s)

    def _work(self) -> None:
        try:
            self._decode()
        except BaseException as error:
            self._emit(_Failure(error))
        else:
            self._emit(None)

    def _decode(self) -> None:
        """Emit all steps, holding the engines that the decoder needs.

        All requests take their engines in the same order, so that no two wait for each other.
        """
        with ExitStack() as stack:
            engines = sorted(self._decoder.engines, key=id)
            _refuse_held(engines)
            for engine in engines:
                held = engine.exclusive(self._cancelled, max_waiting=self._request.max_waiting)
                stack.enter_context(held)
            _held.set(_held.get() | {id(engine) for engine in engines})
            if not self._asks_others and all(_admits_one(engine) for engine in engines):
                compute_thread.run(self._emit_steps, self._cancelled)
            else:  # only the forward passes go there: nobody waits for a server or person with it
                self._emit_steps()

    @property
    def _asks_others(self) -> bool:
        """Whether the decoding waits for more than its engines."""
        hooks = (self._request.review, self._request.stop_when)
        return hooks != (None, None) or getattr(self._decoder, "asks_others", False)

    def _emit_steps(self) -> None:
        steps = self._decoder.decode(self._request)
        with ExitStack() as stack:
            stack.callback(getattr(steps, "close", _nothing))
            for step in steps:
                self._emit(step)
                if step.finish_reason is None and self._cancelled():
                    raise DecodingCancelled("the request was cancelled")

    def _cancelled(self) -> bool:
        """Whether nobody wants the rest; asked at every token."""
        by_caller = self._cancelled_by_caller
        return (
            any(stop.is_set() for stop in self._stops)
            or (self._loop is not None and self._loop.is_closed())
            or (by_caller is not None and by_caller())
        )


def _admits_one(engine: Engine) -> bool:
    """Whether an engine computes in this process, for one request at a time."""
    return engine.capabilities.in_process and engine.capabilities.max_parallel == 1


def _refuse_held(engines: Iterable[Engine]) -> None:
    """Refuse a request that would wait for the one within which it is made.

    Raises:
        ConfigurationError: A function that takes part in the decoding asks the same model.
    """
    for engine in engines:
        if id(engine) in _held.get():
            raise ConfigurationError(
                f"{engine.name} is asked within an answer that it is writing itself, and would "
                "wait for ever; let the reviewer, reward model or encoder of that answer ask "
                "another model"
            )


def _nothing() -> None:
    """Close an iterator that needs no closing."""


_workers: WeakSet[_Worker] = WeakSet()


def _stop_all() -> None:
    """Let no thread compute while the interpreter and the engines' libraries are taken down."""
    workers = list(_workers)
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.join(EXIT_TIMEOUT_S)
