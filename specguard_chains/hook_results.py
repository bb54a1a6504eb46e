"""What a hook says of a step, waited for on a decoding's thread when it is a coroutine's to say.

The coroutine runs in the event loop of whoever consumes the answer, or in one of its own. Nobody
waits for it any longer than for the answer.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import wait
from typing import Any

from specguard_chains.decoding.steps import Step
from specguard_chains.errors import DecodingCancelled
from specguard_chains.hooks import Hook

POLL_S = 0.05
"""How often it is asked whether to go on waiting."""
WAITED = "the request was cancelled while it waited for a hook"

Cancelled = Callable[[], bool]
"""Whether nobody wants the answer any more."""


def waiting(
    hook: Hook | None, cancelled: Cancelled, loop: asyncio.AbstractEventLoop | None
) -> Hook | None:
    """Return a hook that waits for what the coroutine of another one returns.

    Args:
        hook: The other one.
        cancelled: Ends the wait with DecodingCancelled.
        loop: Where coroutines run; None gives each of them a loop of its own.
    """
    if hook is None:
        return None

    def ask(step: Step) -> Any:
        if cancelled():  # else a coroutine might be made that no loop runs any more
            raise DecodingCancelled("the request was cancelled before it asked a hook")
        said = hook(step)
        if not inspect.isawaitable(said):
            return said
        if loop is None:
            return asyncio.run(_watched(said, cancelled))
        return _result(said, cancelled, loop)

    return ask


def _result(
    awaitable: Awaitable[Any], cancelled: Cancelled, loop: asyncio.AbstractEventLoop
) -> Any:
    """Let another thread's event loop run a coroutine, and return its result."""

    async def result() -> Any:
        return await awaitable

    future = asyncio.run_coroutine_threadsafe(result(), loop)
    while not wait([future], POLL_S).done:
        if cancelled():
            future.cancel()
            raise DecodingCancelled(WAITED)
    return future.result()


async def _watched(awaitable: Awaitable[Any], cancelled: Cancelled) -> Any:
    """Return the result of a coroutine, or cancel it; for a loop that runs nothing else."""
    task = asyncio.ensure_future(awaitable)
    while not (await asyncio.wait([task], timeout=POLL_S))[0]:
        if cancelled():  # `asyncio.run` cancels the task and waits for its end
            raise DecodingCancelled(WAITED)
    return task.result()
