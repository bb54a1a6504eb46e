"""The entry points of LangChain's chat models, on which all handlers are to hear of the steps."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, cast

from langchain_core.callbacks import Callbacks
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config

from specguard_chains.callbacks import atapped, tapped
from specguard_chains.model_base import SpecGuardModel
from specguard_chains.parameters import refuse_secrets


class TappedChatModel(SpecGuardModel, BaseChatModel):
    """A chat model to whose callbacks the tap is added, whichever way it is asked.

    See `callbacks`. Its chunks have the steps in them.
    """

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        """See `BaseChatModel.generate`."""
        refuse_secrets(kwargs)
        callbacks = tapped(callbacks, self.callbacks, self.verbose, self.trace_steps)
        model = self._without_cache_if_asked(kwargs)
        return super(TappedChatModel, model).generate(messages, stop, callbacks, **kwargs)

    async def agenerate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        """See `BaseChatModel.agenerate`."""
        refuse_secrets(kwargs)
        callbacks = atapped(callbacks, self.callbacks, self.verbose, self.trace_steps)
        model = self._without_cache_if_asked(kwargs)
        return await super(TappedChatModel, model).agenerate(messages, stop, callbacks, **kwargs)

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """Yield the answer as message chunks, one per verified step and an empty last one."""
        refuse_secrets(kwargs)
        config = ensure_config(config)
        config["callbacks"] = tapped(
            config.get("callbacks"), self.callbacks, self.verbose, self.trace_steps
        )
        yield from super().stream(input, config, stop=stop, **kwargs)

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """Yield the answer as message chunks, one per verified step and an empty last one."""
        refuse_secrets(kwargs)
        config = ensure_config(config)
        config["callbacks"] = atapped(
            config.get("callbacks"), self.callbacks, self.verbose, self.trace_steps
        )
        stream = super().astream(input, config, stop=stop, **kwargs)
        async with aclosing(cast("AsyncGenerator[AIMessageChunk]", stream)) as chunks:
            async for chunk in chunks:
                yield chunk
