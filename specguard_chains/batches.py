"""Several inputs of one model at a time, as LangChain asks them: when one fails, the others stop.

LangChain's batches wait for every answer that is being written, also after an error and when their
caller is interrupted (Ctrl-C). Here those stop at their next token, and the others do not begin.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from langchain_core.runnables import Runnable
from langchain_core.runnables.config import ContextThreadPoolExecutor

from specguard_chains.background import stopped_by
from specguard_chains.errors import DecodingCancelled
from specguard_chains.together import NOT_BEGUN

T = TypeVar("T")


class Batches:
    """A base of models that have such batches; each input is a call of its own, as is its error.

    To type checkers they are LangChain's.
    """

    if not TYPE_CHECKING:

        def batch(self, inputs, config=None, *, return_exceptions=False, **kwargs):
            """See `Runnable.batch`; an error that is raised stops the others, as does Ctrl-C."""
            return _Turns(self, return_exceptions).all(inputs, config, **kwargs)

        def batch_as_completed(self, inputs, config=None, *, return_exceptions=False, **kwargs):
            """See `Runnable.batch_as_completed`; whoever leaves it stops the others."""
            return _Turns(self, return_exceptions).as_completed(inputs, config, **kwargs)

        async def abatch(self, inputs, config=None, *, return_exceptions=False, **kwargs):
            """See `Runnable.abatch`; an error that is raised stops the others."""
            return await _Turns(self, return_exceptions).aall(inputs, config, **kwargs)

        def abatch_as_completed(self, inputs, config=None, *, return_exceptions=False, **kwargs):
            """See `Runnable.abatch_as_completed`; whoever leaves it stops the others."""
            return _Turns(self, return_exceptions).aas_completed(inputs, config, **kwargs)


class _Turns(Runnable[Any, Any]):
    """A model during one batch: LangChain's own batches ask it, which can be stopped here."""

    def __init__(self, model: Runnable[Any, Any], return_exceptions: bool) -> None:
        """Begin; errors that are to be returned are results, and stop nothing."""
        self._model = model
        self._results: tuple[type[Exception], ...] = (Exception,) if return_exceptions else ()
        self._options: dict[str, Any] = {"return_exceptions": return_exceptions}
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        """What has stopped the others; they fail too, and LangChain may see that first."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        """Return the model's answer to one of the inputs, unless another one has failed."""
        if self._stop.is_set():
            raise DecodingCancelled(NOT_BEGUN)
        try:
            with stopped_by(self._stop):
                return self._model.invoke(input, config, **kwargs)
        except self._results:
            raise
        except BaseException as error:
            if not self._stop.is_set():
                self._failure = error
                self._stop.set()  # here, as this thread may take the next one before anyone wakes
            raise

    async def ainvoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        """Do the same without holding up the event loop."""
        if self._stop.is_set():  # nobody looks at this task, and asyncio would log an error of it
            raise asyncio.CancelledError(NOT_BEGUN)
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._tasks.add(task)
        try:
            return await self._model.ainvoke(input, config, **kwargs)
        except self._results:
            raise
        except BaseException:
            self._stop.set()
            raise
        finally:
            self._tasks.discard(task)

    def all(self, inputs: list[Any], config: Any, **kwargs: Any) -> list[Any]:
        """Return all answers, in the order of their inputs."""
        if len(inputs) < 2:
            return self.batch(inputs, config, **self._options, **kwargs)
        with self._thread() as thread:
            return self._done(thread, self.batch, inputs, config, **self._options, **kwargs)

    def as_completed(self, inputs: Sequence[Any], config: Any, **kwargs: Any) -> Iterator[Any]:
        """Yield each answer with the number of its input, as soon as it is complete."""
        results: Any = self.batch_as_completed(inputs, config, **self._options, **kwargs)
        if len(inputs) < 2:
            yield from results
            return
        with self._thread() as thread:
            try:
                while (result := self._done(thread, next, results, None)) is not None:
                    yield result
            finally:
                thread.submit(results.close)  # there, as it may still be running there

    @contextmanager
    def _thread(self) -> Iterator[ContextThreadPoolExecutor]:
        """Give a thread for LangChain to wait on, so that an interrupt of this one comes through.

        After the context nobody wants what is still being written.
        """
        thread = ContextThreadPoolExecutor(1)
        try:
            yield thread
        finally:
            self._stop.set()
            thread.shutdown()
            self._failure = None  # else its traceback would keep itself alive

    def _done(
        self, thread: ContextThreadPoolExecutor, job: Callable[..., T], *args: Any, **kwargs: Any
    ) -> T:
        """Return what a job returns on another thread; if it fails, raise what failed first."""
        done = thread.submit(job, *args, **kwargs)
        try:
            wait([done])
            if self._failure is not None and done.exception() is not None:
                raise self._failure
            return done.result()
        finally:
            del done  # as it holds the error, whose traceback holds this

    async def aall(self, inputs: list[Any], config: Any, **kwargs: Any) -> list[Any]:
        """Return all answers, in the order of their inputs."""
        try:
            return await self.abatch(inputs, config, **self._options, **kwargs)
        finally:
            await self._cancel()

    async def aas_completed(
        self, inputs: Sequence[Any], config: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Yield each answer with the number of its input, as soon as it is complete."""
        results: Any = self.abatch_as_completed(inputs, config, **self._options, **kwargs)
        try:
            async with aclosing(results):
                async for result in results:
                    yield result
        finally:
            await self._cancel()

    async def _cancel(self) -> None:
        """Cancel the tasks that are still running, and wait for their end."""
        self._stop.set()
        for task in self._tasks:
            if not task.cancelling():  # else the handlers that are being told would be cancelled
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
