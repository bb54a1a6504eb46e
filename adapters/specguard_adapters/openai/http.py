"""Requests to a model server that end in time, can be cancelled, and are repeated where it helps.

httpx runs on an event loop of the client's own, in a thread of its own. The calling thread waits
for what arrives and asks meanwhile, every `POLL_S`, whether the request is still wanted. A request
that is not is aborted: its connection is closed, so that the server stops generating.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import httpx

from specguard_adapters.openai.errors import TransientError, Translator
from specguard_adapters.openai.events import event_data
from specguard_adapters.openai.retries import retrying
from specguard_chains.errors import DecodingCancelled, EngineError, SpecGuardError

T = TypeVar("T")
Cancelled = Callable[[], bool] | None
Json = Mapping[str, Any]

POLL_S = 0.02
CONNECT_S = 10.0
"""Longest wait for a connection, if the whole request may take longer."""
CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Call:
    """One request, however often it is sent."""

    method: str
    url: str
    body: Json | None
    stream: bool
    deadline: float
    cancelled: Cancelled

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()


@dataclass(frozen=True, slots=True)
class _Failure:
    """What the loop's thread hands over instead of a result."""

    error: Exception


_END = object()


class Client:
    """Sends JSON to a server and receives JSON, whole or as a stream of events."""

    def __init__(
        self,
        base_url: str,
        *,
        translator: Translator,
        headers: Mapping[str, str],
        timeout_s: float,
        max_retries: int,
        verify: bool | ssl.SSLContext,
        direct: bool,
    ) -> None:
        """Start the thread; nothing is sent yet.

        Args:
            base_url: Where the API is, `…/v1`.
            translator: Makes errors of what goes wrong.
            headers: Sent with every request.
            timeout_s: Longest time of one request, repetitions included.
            max_retries: How often a request is repeated at most.
            verify: Whether certificates are checked, or a TLS context.
            direct: Pass over the environment's proxies.
        """
        self.base_url = base_url
        self.root = base_url.removesuffix("/v1")
        self._translator = translator
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._closed = False
        self._pid = os.getpid()
        self._tasks: set[asyncio.Task[None]] = set()
        self._guard = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="specguard-http", daemon=True
        )
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=min(CONNECT_S, timeout_s)),
            verify=verify,
            mounts={f"all://{httpx.URL(base_url).netloc.decode()}": None} if direct else None,
        )
        self._thread.start()
        # Also when nobody closes it: connections that are only forgotten raise warnings.
        self._end = weakref.finalize(self, _end, self._loop, self._thread, self._http, self._tasks)

    def get(self, path: str, *, cancelled: Cancelled = None) -> Any:
        """Return what the server has at a path: below `base_url`, or with "/" below its root."""
        return self._request("GET", path, None, next, cancelled)

    def post(self, path: str, body: Json, *, cancelled: Cancelled = None) -> Any:
        """Return the server's answer."""
        return self._request("POST", path, body, next, cancelled)

    def stream(
        self,
        path: str,
        body: Json,
        consume: Callable[[Iterator[Json]], T],
        *,
        cancelled: Cancelled = None,
    ) -> T:
        """Return what `consume` makes of the server's events.

        Once it returns, the rest of the stream is aborted. It is called anew if the request is
        repeated, and should raise `TransientError` if the stream ends before its time.
        """
        return self._request("POST", path, {**body, "stream": True}, consume, cancelled)

    def close(self) -> None:
        """Abort all requests and end the thread."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
        self._end()

    def _request(
        self,
        method: str,
        path: str,
        body: Json | None,
        consume: Callable[[Iterator[Any]], T],
        cancelled: Cancelled,
    ) -> T:
        """Send a request until it succeeds, its time is over, or it failed too often."""
        url = f"{self.root}{path}" if path.startswith("/") else f"{self.base_url}/{path}"
        deadline = time.monotonic() + self._timeout_s
        call = _Call(method, url, body, consume is not next, deadline, cancelled)
        repeated = retrying(
            self._max_retries, lambda: call.left_s, lambda seconds: self._pause(seconds, call)
        )
        result: T = repeated(self._attempt, call, consume)
        return result

    def _attempt(self, call: _Call, consume: Callable[[Iterator[Any]], T]) -> T:
        with self._arrivals(call) as arrivals:
            return consume(arrivals)

    @contextmanager
    def _arrivals(self, call: _Call) -> Iterator[Iterator[Any]]:
        """Send a request once; give what arrives. It is aborted when the context is left."""
        arrived: SimpleQueue[Any] = SimpleQueue()
        started: list[asyncio.Task[None]] = []

        def start() -> None:
            task = self._loop.create_task(self._send(call, arrived.put))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: arrived.put(_END))
            started.append(task)

        self._check(call)  # a lock may be held for ever after a fork
        with self._guard:
            self._check(call)
            self._loop.call_soon_threadsafe(start)
        ended = False

        def arrivals() -> Iterator[Any]:
            nonlocal ended
            while not ended:
                self._check(call)
                try:
                    item = arrived.get(timeout=POLL_S)
                except Empty:
                    continue
                if isinstance(item, _Failure):
                    raise item.error
                ended = item is _END
                if not ended:
                    yield item
            self._check(call)

        try:
            yield arrivals()
        finally:
            with self._guard:
                if not self._closed:
                    self._loop.call_soon_threadsafe(lambda: started[0].cancel())
            while not ended:  # wait until the connection is closed
                ended = arrived.get() is _END

    async def _send(self, call: _Call, put: Callable[[Any], None]) -> None:
        """Put what arrives, or a failure."""
        try:
            async with (
                asyncio.timeout(call.left_s),
                self._http.stream(call.method, call.url, json=call.body) as response,
            ):
                if not response.is_success:
                    await response.aread()
                    raise self._translator.refusal(response)
                if call.stream:
                    async for event in self._events(response):
                        put(event)
                else:
                    put(self._translator.parse(await response.aread(), response))
        except TimeoutError:
            put(_Failure(self._translator.timeout(call.url, self._timeout_s)))
        except (SpecGuardError, TransientError) as error:
            put(_Failure(error))
        except Exception as error:
            put(_Failure(self._translator.failure(error, call.url)))

    async def _events(self, response: httpx.Response) -> AsyncIterator[Json]:
        """Yield the JSON objects of a stream of server-sent events."""
        self._translator.expect_events(response)
        async for data in event_data(response.aiter_bytes()):
            yield self._translator.event(data, response)

    def _pause(self, seconds: float, call: _Call) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._check(call)
            time.sleep(min(left, POLL_S))

    def _check(self, call: _Call) -> None:
        if os.getpid() != self._pid:
            raise EngineError(
                f"the engine at {self.base_url} was made before this process was forked, and its "
                "connections belong to the other one; make an engine here"
            )
        if self._closed:
            raise EngineError(f"the engine at {self.base_url} is closed; make another one")
        if call.cancelled is not None and call.cancelled():
            raise DecodingCancelled("the request was cancelled")


def _end(
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    http: httpx.AsyncClient,
    tasks: set[asyncio.Task[None]],
) -> None:
    """Abort all requests and end the thread."""

    async def shut_down() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await http.aclose()

    if threading.current_thread() is thread:  # collected as garbage just there
        loop.call_soon(loop.stop)
        return
    asyncio.run_coroutine_threadsafe(shut_down(), loop).result(CLOSE_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(CLOSE_S)
    loop.close()
