"""Verified steps as LangChain events: `on_custom_event("specguard_step", step)` of the model's run.

LangChain hands the model a run manager on some routes only. On `stream`, `astream` and whenever a
streaming handler is attached it hands over none, yet reports every chunk to all handlers. So the
steps travel in the chunks, and a private handler, the *tap*, turns them back into events there;
where there is a run manager, `dispatch` uses it and the tap never sees the chunk. Either way each
step is one event with the run id, tags and metadata of the model's own run and, with
`trace_steps`, a run below it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from langchain_core.callbacks import (
    AsyncCallbackHandler,
    AsyncCallbackManager,
    AsyncCallbackManagerForLLMRun,
    BaseCallbackHandler,
    CallbackManager,
    CallbackManagerForLLMRun,
    Callbacks,
)
from langchain_core.callbacks.manager import ahandle_event, handle_event
from langchain_core.outputs import ChatGenerationChunk, GenerationChunk

from specguard_chains.decoding.steps import Step
from specguard_chains.messages import STEPS_KEY
from specguard_chains.step_runs import Owner, PlainStep, atrace, trace

EVENT = "specguard_step"
"""The event's name; its data is the step as plain values (`Step.to_dict`)."""

_HOOK = ("on_custom_event", "ignore_custom_event", EVENT)
_Chunk = ChatGenerationChunk | GenerationChunk | None


def dispatch(manager: CallbackManagerForLLMRun, step: Step, trace_steps: bool = False) -> None:
    """Report a step to the handlers of the run."""
    _report(manager.handlers, step.to_dict(), _owner(manager), trace_steps)


async def adispatch(
    manager: AsyncCallbackManagerForLLMRun, step: Step, trace_steps: bool = False
) -> None:
    """Report a step to the handlers of the run."""
    await _areport(manager.handlers, step.to_dict(), _owner(manager), trace_steps)


def _report(
    handlers: list[BaseCallbackHandler], step: PlainStep, owner: Owner, trace_steps: bool
) -> None:
    handle_event(handlers, *_HOOK, step, **owner.event())
    if trace_steps:
        trace(handlers, step, owner)


async def _areport(
    handlers: list[BaseCallbackHandler], step: PlainStep, owner: Owner, trace_steps: bool
) -> None:
    await ahandle_event(handlers, *_HOOK, step, **owner.event())
    if trace_steps:
        await atrace(handlers, step, owner)


class LangGraphStepWriter(BaseCallbackHandler):
    """Passes step events on to `stream_mode="custom"` of the LangGraph graph that the model is in.

    Callback events and custom stream parts are different channels of LangGraph. Use it as
    `graph.stream(inputs, {"callbacks": [LangGraphStepWriter()]}, stream_mode="custom")`; each part
    is a mapping with the keys event, run_id and data. `graph.stream_events(version="v3")` shows
    them with `transformers=[langgraph.stream.CustomTransformer]`. Outside of a graph it does
    nothing.
    """

    # No `run_inline`: the context of the node is copied to wherever this runs, and beside a handler
    # with it LangChain (core 1.8.3) tells no other one the start of a plain LLM's async run.

    def __init__(self) -> None:
        from langgraph.config import get_stream_writer

        self._get_writer = get_stream_writer

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Write a step to the graph's stream."""
        if name != EVENT:
            return
        try:
            write = self._get_writer()
        except (KeyError, RuntimeError):  # in a chain, or in nothing at all
            return
        write({"event": name, "run_id": str(run_id), "data": data})


def tapped(
    callbacks: Callbacks, own: Callbacks, verbose: bool, trace_steps: bool = False
) -> Callbacks:
    """Return the callbacks of a sync call with the tap among them.

    The manager is made here, once, and handed to LangChain: a second one would make a second
    tracer, in whose eyes the first one's runs are orphans.
    """
    manager = CallbackManager.configure(callbacks, own, verbose)
    if manager.handlers and not any(isinstance(h, _Tap) for h in manager.handlers):
        manager.add_handler(_Tap(manager.handlers, trace_steps), inherit=False)
    return manager


def atapped(
    callbacks: Callbacks, own: Callbacks, verbose: bool, trace_steps: bool = False
) -> Callbacks:
    """Return the callbacks of an async call with the tap among them."""
    manager = AsyncCallbackManager.configure(callbacks, own, verbose)
    if manager.handlers and not any(isinstance(h, _AsyncTap) for h in manager.handlers):
        manager.add_handler(_AsyncTap(manager.handlers, trace_steps), inherit=False)
    return manager


class _TapState:
    """The handlers beside a tap, and what the tap has learnt about the runs in progress."""

    raise_error = True  # of handlers that want it; LangChain has logged all others' errors

    def __init__(self, siblings: Sequence[BaseCallbackHandler], trace_steps: bool) -> None:
        self._siblings = list(siblings)
        self._trace_steps = trace_steps
        self._runs: dict[UUID, Owner] = {}

    def _begin(self, run_id: UUID, about: dict[str, Any]) -> None:
        self._runs[run_id] = Owner(run_id, about.get("tags"), about.get("metadata"))

    def _of_run(self, run_id: UUID) -> Owner:
        return self._runs.get(run_id) or Owner(run_id)

    def _end(self, run_id: UUID) -> None:
        self._runs.pop(run_id, None)


class _Tap(_TapState, BaseCallbackHandler):
    """Turns steps in chunks into events, on sync routes."""

    run_inline = True  # else the event comes after the consumer has the chunk

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: Any, *, run_id: UUID, **about: Any
    ) -> None:
        self._begin(run_id, about)

    def on_llm_new_token(
        self, token: Any, *, chunk: _Chunk = None, run_id: UUID, **kwargs: Any
    ) -> None:
        for step in _steps_in(chunk):
            _report(self._siblings, step, self._of_run(run_id), self._trace_steps)

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id)


class _AsyncTap(_TapState, AsyncCallbackHandler):
    """Turns steps in chunks into events, on async routes."""

    run_inline = True

    async def on_chat_model_start(
        self, serialized: dict[str, Any], messages: Any, *, run_id: UUID, **about: Any
    ) -> None:
        self._begin(run_id, about)

    async def on_llm_new_token(
        self, token: Any, *, chunk: _Chunk = None, run_id: UUID, **kwargs: Any
    ) -> None:
        for step in _steps_in(chunk):
            await _areport(self._siblings, step, self._of_run(run_id), self._trace_steps)

    async def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id)

    async def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id)


def _owner(manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun) -> Owner:
    return Owner(manager.run_id, manager.tags, manager.metadata)


def _steps_in(chunk: _Chunk) -> list[dict[str, Any]]:
    message = getattr(chunk, "message", None)
    return [] if message is None else message.additional_kwargs.get(STEPS_KEY, [])
