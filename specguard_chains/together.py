"""Calls that belong together, several at a time: when one fails, nobody waits for the others.

They stop at their next token, and those that have not begun do not; so does everything when the
caller is interrupted or cancelled.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import TypeVar

from langchain_core.runnables.config import ContextThreadPoolExecutor

from specguard_chains.background import stopped_by
from specguard_chains.decoding.engine import Engine
from specguard_chains.errors import DecodingCancelled
from specguard_chains.options import SpecGuardOptions

A = TypeVar("A")
T = TypeVar("T")

NOT_BEGUN = "another of the calls that belong together has failed"


def places(options: SpecGuardOptions) -> int:
    """Return how many requests at a time the models admit that the options name."""
    models = [getattr(options, role) for role in options.roles]
    return min(
        model.capabilities.max_parallel if isinstance(model, Engine) else options.max_parallel
        for model in models
    )


def together(job: Callable[[A], T], items: Sequence[A], at_a_time: int) -> list[T]:
    """Return what a function returns for each of the items, in their order.

    Raises:
        BaseException: What it has raised first.
    """
    if min(len(items), at_a_time) < 2:
        return [job(item) for item in items]
    stop = threading.Event()
    errors: list[BaseException] = []

    def turn(item: A) -> T:
        if stop.is_set():
            raise DecodingCancelled(NOT_BEGUN)
        try:
            return job(item)
        except BaseException as error:
            errors.append(error)
            stop.set()  # here, as this thread may take the next turn before the caller wakes up
            raise

    pool = ContextThreadPoolExecutor(min(len(items), at_a_time))
    try:
        with stopped_by(stop):
            turns = [pool.submit(turn, item) for item in items]
        wait(turns, return_when=FIRST_EXCEPTION)
    except BaseException:  # the caller is interrupted
        stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    if errors:
        raise errors[0]
    return [each.result() for each in turns]


async def atogether(
    job: Callable[[A], Awaitable[T]], items: Sequence[A], at_a_time: int
) -> list[T]:
    """Do the same without holding up the event loop; the others are cancelled as tasks."""
    if min(len(items), at_a_time) < 2:
        return [await job(item) for item in items]
    turns = asyncio.Semaphore(at_a_time)
    failed = asyncio.Event()

    async def turn(item: A) -> T:
        async with turns:
            if failed.is_set():
                raise DecodingCancelled(NOT_BEGUN)
            try:
                return await job(item)
            except BaseException:
                failed.set()  # here, as the next one may get this turn before the caller wakes up
                raise

    tasks = [asyncio.ensure_future(turn(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
