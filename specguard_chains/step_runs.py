"""Verified steps as runs below the model's run, for tracers, which show runs but no events.

LangChain starts a run now and ends it later, but a step is known only when it is complete. So a
run is started and ended at once, and in LangChain's own tracers its start is then moved back by
the seconds that the step took. Other handlers see the seconds in the outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from langchain_core.callbacks import AsyncCallbackManager, BaseCallbackHandler, CallbackManager
from langchain_core.tracers.base import AsyncBaseTracer, BaseTracer

NAME = "specguard.verify_step"
"""What the runs are called."""

PlainStep = Mapping[str, Any]
"""A step as `Step.to_dict` gives it."""

_INPUTS = ("number", "phase", "source", "candidates", "chosen", "threshold")
_OUTPUTS = (
    *("verdict", "score", "confidence", "grounding", "value", "rejected_early"),
    *("text", "tokens", "seconds", "finish_reason"),
)


@dataclass(frozen=True, slots=True)
class Owner:
    """The run of a model, in whose name steps are reported."""

    run_id: UUID
    tags: list[str] | None = None
    metadata: dict[str, Any] | None = None

    def event(self) -> dict[str, Any]:
        """Return what an event of the run is marked with."""
        return {"run_id": self.run_id, "tags": self.tags, "metadata": self.metadata}

    def child(self, handlers: Sequence[BaseCallbackHandler]) -> dict[str, Any]:
        """Return what makes a callback manager of runs below the run."""
        return {
            "handlers": [handler for handler in handlers if self._is_known_to(handler)],
            "parent_run_id": self.run_id,
            "tags": list(self.tags or ()),
            # What LangChain says of a model there does not hold for a step.
            "metadata": {
                key: value
                for key, value in (self.metadata or {}).items()
                if not key.startswith("ls_")
            },
        }

    def _is_known_to(self, handler: BaseCallbackHandler) -> bool:
        """Whether the handler can tell what a run below the run belongs to.

        On async routes, LangChain (core 1.8.3) does not tell the start of a plain LLM's run to a
        handler that has one with `run_inline` beside it. Its tracers would take the runs below for
        traces of their own.
        """
        tracer = handler if isinstance(handler, BaseTracer | AsyncBaseTracer) else None
        return tracer is None or self.run_id in tracer.order_map


def trace(handlers: Sequence[BaseCallbackHandler], step: PlainStep, owner: Owner) -> None:
    """Report a step as a complete run below its owner."""
    manager = CallbackManager(**owner.child(handlers))
    # With deferred inputs LangSmith's tracer sends the run at its end, in one request.
    run = manager.on_chain_start(None, _of(step, _INPUTS), name=NAME, defers_inputs=True)
    _move_back(handlers, run.run_id, step)
    run.on_chain_end(_of(step, _OUTPUTS))


async def atrace(handlers: Sequence[BaseCallbackHandler], step: PlainStep, owner: Owner) -> None:
    """Report a step as a complete run below its owner."""
    manager = AsyncCallbackManager(**owner.child(handlers))
    run = await manager.on_chain_start(None, _of(step, _INPUTS), name=NAME, defers_inputs=True)
    _move_back(handlers, run.run_id, step)
    await run.on_chain_end(_of(step, _OUTPUTS))


def _of(step: PlainStep, keys: Sequence[str]) -> dict[str, Any]:
    return {key: step[key] for key in keys}


def _move_back(handlers: Sequence[BaseCallbackHandler], run_id: UUID, step: PlainStep) -> None:
    """Let the run begin when the step did, though not before the runs that precede it."""
    start = datetime.now(UTC) - timedelta(seconds=sum(step["seconds"].values()))
    for tracer in handlers:
        if not isinstance(tracer, BaseTracer | AsyncBaseTracer):
            continue
        if (run := tracer.run_map.get(str(run_id))) is None:  # the tracer ignores chains
            continue
        run.start_time = max(start, *_earliest(tracer, run))
        trace_id, order = tracer.order_map[run.id]
        run.dotted_order = _moved(order, run.start_time)
        tracer.order_map[run.id] = trace_id, run.dotted_order


def _earliest(tracer: BaseTracer | AsyncBaseTracer, run: Any) -> Iterator[datetime]:
    """Yield the times before which the run cannot have begun."""
    yield datetime.min.replace(tzinfo=UTC)
    if (parent := tracer.run_map.get(str(run.parent_run_id))) is not None:
        yield parent.start_time
        yield from (child.end_time for child in parent.child_runs if child.end_time is not None)


def _moved(dotted_order: str, start: datetime) -> str:
    """Return a run's place in its trace, `<parent's>.<start><run id>`, with another start."""
    parent, dot, own = dotted_order.rpartition(".")
    _, _, run_id = own.partition("Z")
    return f"{parent}{dot}{start:%Y%m%dT%H%M%S%fZ}{run_id}"
