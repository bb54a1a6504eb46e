"""Verified steps as LangChain events: `on_custom_event("specguard_step", step)` of the model's run.

LangChain hands the model a run manager on some routes only. On `stream`, `astream` and whenever a
streaming handler is attached it hands over none, yet reports every chunk to all handlers. So the
steps travel in the chunks, and a private handler, the *tap*, turns them back into events there;
where there is a run manager, `dispatch` uses it and the tap never sees the chunk. Either way each
step is one event with the run id, tags and metadata of the model's own run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
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

EVENT = "specguard_step"
"""The event's name; its data is the step as plain values (`Step.to_dict`)."""

_HOOK = ("on_custom_event", "ignore_custom_event", EVENT)
_Chunk = ChatGenerationChunk | GenerationChunk | None


def dispatch(manager: CallbackManagerForLLMRun, step: Step) -> None:
    """Report a step to the handlers of the run."""
    handle_event(manager.handlers, *_HOOK, step.to_dict(), **_owner(manager))


async def adispatch(manager: AsyncCallbackManagerForLLMRun, step: Step) -> None:
    """Report a step to the handlers of the run."""
    await ahandle_event(manager.handlers, *_HOOK, step.to_dict(), **_owner(manager))


class LangGraphStepWriter(BaseCallbackHandler):
    """Passes step events on to `stream_mode="custom"` of the LangGraph graph that the model is in.

    Callback events and custom stream parts are different channels of LangGraph. Use it as
    `graph.stream(inputs, {"callbacks": [LangGraphStepWriter()]}, stream_mode="custom")`; each part
    is a mapping with the keys event, run_id and data. Outside of a graph it does nothing.
    """

    run_inline = True  # the writer belongs to the context of the node

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Write a step to the graph's stream."""
        from langgraph.config import get_stream_writer

        if name == EVENT:
            with suppress(RuntimeError):  # not in a graph
                get_stream_writer()({"event": name, "run_id": str(run_id), "data": data})


def tapped(callbacks: Callbacks, own: Callbacks, verbose: bool) -> Callbacks:
    """Return the callbacks of a sync call with the tap among them.

    The manager is made here, once, and handed to LangChain: a second one would make a second
    tracer, in whose eyes the first one's runs are orphans.
    """
    manager = CallbackManager.configure(callbacks, own, verbose)
    if manager.handlers and not any(isinstance(h, _Tap) for h in manager.handlers):
        manager.add_handler(_Tap(manager.handlers), inherit=False)
    return manager


def atapped(callbacks: Callbacks, own: Callbacks, verbose: bool) -> Callbacks:
    """Return the callbacks of an async call with the tap among them."""
    manager = AsyncCallbackManager.configure(callbacks, own, verbose)
    if manager.handlers and not any(isinstance(h, _AsyncTap) for h in manager.handlers):
        manager.add_handler(_AsyncTap(manager.handlers), inherit=False)
    return manager


class _Siblings:
    """The handlers beside a tap, and what the tap has learnt about the runs in progress."""

    def __init__(self, handlers: Sequence[BaseCallbackHandler]) -> None:
        self.handlers = list(handlers)
        self._runs: dict[UUID, dict[str, Any]] = {}

    def begin(self, run_id: UUID, tags: list[str] | None, metadata: dict[str, Any] | None) -> None:
        self._runs[run_id] = {"run_id": run_id, "tags": tags, "metadata": metadata}

    def owner(self, run_id: UUID) -> dict[str, Any]:
        return self._runs.get(run_id, {"run_id": run_id})

    def end(self, run_id: UUID) -> None:
        self._runs.pop(run_id, None)


class _Tap(BaseCallbackHandler):
    """Turns steps in chunks into events, on sync routes."""

    run_inline = True  # else the event comes after the consumer has the chunk

    def __init__(self, siblings: Sequence[BaseCallbackHandler]) -> None:
        self._siblings = _Siblings(siblings)

    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: Any,
        *,
        run_id: UUID,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._siblings.begin(run_id, tags, metadata)

    def on_llm_new_token(
        self, token: Any, *, chunk: _Chunk = None, run_id: UUID, **kwargs: Any
    ) -> None:
        for step in _steps_in(chunk):
            handle_event(self._siblings.handlers, *_HOOK, step, **self._siblings.owner(run_id))

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._siblings.end(run_id)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._siblings.end(run_id)


class _AsyncTap(AsyncCallbackHandler):
    """Turns steps in chunks into events, on async routes."""

    run_inline = True

    def __init__(self, siblings: Sequence[BaseCallbackHandler]) -> None:
        self._siblings = _Siblings(siblings)

    async def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: Any,
        *,
        run_id: UUID,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._siblings.begin(run_id, tags, metadata)

    async def on_llm_new_token(
        self, token: Any, *, chunk: _Chunk = None, run_id: UUID, **kwargs: Any
    ) -> None:
        for step in _steps_in(chunk):
            await ahandle_event(
                self._siblings.handlers, *_HOOK, step, **self._siblings.owner(run_id)
            )

    async def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._siblings.end(run_id)

    async def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._siblings.end(run_id)


def _owner(manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun) -> dict[str, Any]:
    return {"run_id": manager.run_id, "tags": manager.tags, "metadata": manager.metadata}


def _steps_in(chunk: _Chunk) -> list[dict[str, Any]]:
    message = getattr(chunk, "message", None)
    return [] if message is None else message.additional_kwargs.get(STEPS_KEY, [])
