"""Which requests are repeated, when, and how often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tenacity import RetryCallState, Retrying, stop_after_attempt, wait_exponential, wait_random
from tenacity.retry import retry_if_exception_type

from specguard_adapters.openai.errors import TransientError

BACKOFF_S, LONGEST_BACKOFF_S = 0.25, 8.0


def retrying(
    max_retries: int, left_s: Callable[[], float], sleep: Callable[[float], None]
) -> Retrying:
    """Return what repeats a function while it raises `TransientError`, and then raises the error.

    Args:
        max_retries: Most repetitions.
        left_s: How much time is left; who would have to wait longer gives up.
        sleep: Waits for some seconds.
    """
    return Retrying(
        retry=retry_if_exception_type(TransientError),
        wait=_wait_s,
        stop=_any_of(
            stop_after_attempt(max_retries + 1), lambda state: state.upcoming_sleep >= left_s()
        ),
        sleep=sleep,
        retry_error_callback=_give_up,
    )


_backoff_s = wait_exponential(BACKOFF_S, LONGEST_BACKOFF_S) + wait_random(0, BACKOFF_S)


def _wait_s(state: RetryCallState) -> float:
    """Wait exponentially longer, or as long as the server asks for."""
    backoff: float = _backoff_s(state)
    error = state.outcome.exception() if state.outcome else None
    asked = error.retry_after_s if isinstance(error, TransientError) else None
    return max(backoff, asked or 0.0)


def _any_of(*stops: Callable[[RetryCallState], bool]) -> Callable[[RetryCallState], bool]:
    return lambda state: any(stop(state) for stop in stops)


def _give_up(state: RetryCallState) -> Any:
    assert state.outcome is not None
    error = state.outcome.exception()
    assert isinstance(error, TransientError)
    raise error.error from error.__cause__
