"""The stages of a chain of steps: messages -> steps, and one function's call for every step.

A stage gets the stream of the one before it and passes on what it has as soon as it has it. It
closes that stream when it is closed itself or fails, so that a model stops when nobody wants the
rest: LangChain's own helpers leave that to the garbage collector.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.utils import ConfigurableFieldSpec

from specguard_chains.decoding.steps import Step
from specguard_chains.errors import ConfigurationError
from specguard_chains.messages import STEPS_KEY


class ParseSteps(Runnable[Any, Any]):
    """Takes the steps out of messages and message chunks."""

    def __repr__(self) -> str:
        return "StepParser()"

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> list[Step]:
        """Return the steps of a message."""
        return list(self.transform(iter([input])))

    async def ainvoke(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> list[Step]:
        """Return the steps of a message."""
        return self.invoke(input)

    def transform(
        self, input: Iterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[Step]:
        """Yield the steps of a stream of messages.

        Raises:
            ConfigurationError: There is something else in it, or no step at all.
        """
        found = False
        with _closed(input):
            for message in input:
                for step in _steps_of(message):
                    found = True
                    yield step
        _require(found)

    async def atransform(
        self, input: AsyncIterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Step]:
        """Do the same."""
        found = False
        async with _aclosed(input):
            async for message in input:
                for step in _steps_of(message):
                    found = True
                    yield step
        _require(found)


class EachStep(Runnable[Any, Any]):
    """Calls a runnable once for every item of a list or of a stream, one after the other."""

    def __init__(self, called: Runnable[Any, Any]) -> None:
        self.called = called

    def __repr__(self) -> str:
        return f"EachStep({self.called!r})"

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        """What can be configured in the runnable."""
        return self.called.config_specs

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> list[Any]:
        """Return the result of every item."""
        return [self.called.invoke(item, config) for item in input]

    async def ainvoke(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> list[Any]:
        """Return the result of every item."""
        return [await self.called.ainvoke(item, config) for item in input]

    def transform(
        self, input: Iterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[Any]:
        """Yield the result of every item as soon as the item is there."""
        with _closed(input):
            for item in input:
                yield self.called.invoke(item, config)

    async def atransform(
        self, input: AsyncIterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Yield the result of every item as soon as the item is there."""
        async with _aclosed(input):
            async for item in input:
                yield await self.called.ainvoke(item, config)


def _steps_of(message: Any) -> Iterator[Step]:
    if not isinstance(message, BaseMessage):
        raise ConfigurationError(
            f"StepParser reads messages of ChatSpecGuard, not {type(message).__name__}; put it "
            "right after the model"
        )
    plain: list[Mapping[str, Any]] = message.additional_kwargs.get(STEPS_KEY, [])
    yield from map(Step.from_dict, plain)


def _require(found: bool) -> None:
    if not found:
        raise ConfigurationError(
            "the message has no verified steps: StepParser reads messages of ChatSpecGuard"
        )


@contextmanager
def _closed(items: Iterator[Any]) -> Iterator[None]:
    """Close an iterator at the end if it can be closed."""
    try:
        yield
    finally:
        if (close := getattr(items, "close", None)) is not None:
            close()


@asynccontextmanager
async def _aclosed(items: AsyncIterator[Any]) -> AsyncIterator[None]:
    """Close an iterator at the end if it can be closed."""
    try:
        yield
    finally:
        if (aclose := getattr(items, "aclose", None)) is not None:
            await aclose()
