"""The LangChain chat model whose answers are drafted small, verified step by step, and repaired."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from specguard_chains.answer_plan import AnswerPlan
from specguard_chains.asked import Asked
from specguard_chains.batches import Batches
from specguard_chains.call import Call
from specguard_chains.callbacks import adispatch, dispatch
from specguard_chains.chunks import ChunkWriter
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.steps import Step
from specguard_chains.errors import ConfigurationError
from specguard_chains.hooks import Hooks
from specguard_chains.messages import as_mappings, plain_text, to_template
from specguard_chains.model_base import SpecGuardModel, profile
from specguard_chains.model_binding import BindsTools, ModelBinding
from specguard_chains.parameters import refuse_secrets
from specguard_chains.step_parser import StepSource
from specguard_chains.tapped_chat_model import TappedChatModel


class ChatSpecGuard(StepSource, BindsTools, Batches, TappedChatModel):
    r"""A chat model that drafts with a small model and rewrites only the steps that fail a check.

    Setup:
        Install the package with an engine; the models are fetched when they are first used.

        .. code-block:: bash

            pip install "specguard_chains[llama-cpp]"

    Instantiate:
        .. code-block:: python

            from specguard_chains import ChatSpecGuard

            llm = ChatSpecGuard()  # a small pair of models that runs anywhere
            llm = ChatSpecGuard(draft="small.gguf", target="large.gguf", threshold=0.8, seed=1)

        All fields of `SpecGuardOptions` are parameters; ``model`` is another name for ``pair``.
        An unknown parameter is an error.

    Other engines, in any mix:
        .. code-block:: python

            llm = ChatSpecGuard(draft="small.gguf", target="openai://127.0.0.1:8000/large-model")
            llm = ChatSpecGuard(draft="HuggingFaceTB/SmolLM2-135M-Instruct", target="large.gguf")

        An engine object takes all settings of its own, such as a device or a number format.

    Invoke:
        .. code-block:: python

            message = llm.invoke("What is 12 * 13?")
            message.text
            message = llm.invoke("What is 12 * 13?", stop=["\n\n"], temperature=0)

        Any option can be overridden in a call or by ``bind``; ``stop=[]`` means no stop strings.
        With ``seed=None`` every answer is another one; the seed that was drawn is in
        ``message.response_metadata["seed"]`` and gives the same answer again.

    Stream:
        One chunk per verified step.

        .. code-block:: python

            for chunk in llm.stream("What is 12 * 13?"):
                print(chunk.text, end="", flush=True)

        The model goes on with the next step while the chunk is being used. Leaving the loop
        stops it at the next token.

    Async:
        .. code-block:: python

            message = await asyncio.wait_for(llm.ainvoke("What is 12 * 13?"), timeout=60)
            async for chunk in llm.astream("What is 12 * 13?"):
                print(chunk.text, end="", flush=True)

        The event loop stays free, and cancelling the task stops the model at its next token.

    Tool calling:
        .. code-block:: python

            from pydantic import BaseModel, Field

            class GetWeather(BaseModel):
                '''Get the weather in a city.'''

                city: str = Field(description="Such as Rome")

            message = llm.bind_tools([GetWeather]).invoke("Do I need an umbrella in Oslo?")
            message.tool_calls

        Calls are held to the tools' names and schemas while they are written. See `bind_tools`.

    Structured output:
        .. code-block:: python

            class Joke(BaseModel):
                '''A joke.'''

                setup: str
                punchline: str

            llm.with_structured_output(Joke).invoke("Tell me a joke about cats")

        With ``reason_first=True`` the model reasons in verified steps before it answers. See
        `with_structured_output`.

    Step events:
        Callback handlers get ``on_custom_event("specguard_step", step, run_id=...)`` for every
        step, on every route, as an event of the model's own run; `Step` says what is in it. The
        steps are also in the message, and can be had without LangChain's callbacks:

        .. code-block:: python

            message.additional_kwargs["specguard_steps"][0]["verdict"]
            for step in llm.steps("What is 12 * 13?"):
                print(step.source, step.score, step.text)

    Usage:
        .. code-block:: python

            message.usage_metadata  # tokens of prompt and answer, and what caches had
            message.response_metadata["specguard"]["acceptance_rate"]
    """

    of_a_call: ClassVar[frozenset[str]] = SpecGuardModel.of_a_call | {"reasoning_steps"}

    reasoning_steps: bool = False
    """Count every step before the last one as reasoning, apart from the answer's text, for models
    that do not mark their reasoning."""
    # What LangChain asks about the model

    @property
    def _llm_type(self) -> str:
        return "specguard"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        own = {"reasoning_steps": self.reasoning_steps, "output_version": self.output_version}
        return {**super()._identifying_params, **own}

    def _resolve_model_profile(self) -> ModelProfile | None:
        return profile(self)

    def _get_invocation_params(
        self, stop: list[str] | None = None, **kwargs: Any
    ) -> builtins.dict[str, Any]:
        """Name the stop strings in force; a call's None would hide the configured ones."""
        refuse_secrets(kwargs)
        return super()._get_invocation_params(self.stop if stop is None else stop, **kwargs)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return super()._get_ls_params(self.stop if stop is None else stop, **kwargs)

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """Tell answers in a cache apart by what tools and schemas say: a class has but a name."""
        asked = Asked.taken_from(kwargs)
        return super()._get_llm_string(stop, **kwargs, asked=asked)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Return how many tokens the prompt has that the template makes of these messages.

        LangChain also counts parts of conversations, in any order. Where the template takes no such
        part, the tokens of its text are counted.
        """
        asked = Asked.taken_from({"tools": tools})
        plan = AnswerPlan.of(asked, self, self._assembled.decoder(self).engines)
        mappings = as_mappings(messages)
        try:
            return len(self._tokens(plan.prompt(mappings)))
        except ConfigurationError:
            return len(self._tokens(Prompt(text=plain_text(mappings))))

    if not TYPE_CHECKING:  # LangChain's own binding says more to type checkers

        def bind(self, **kwargs):
            """See `Runnable.bind`."""
            return ModelBinding(bound=self, kwargs=kwargs)

    # Answers

    def steps(
        self, input: LanguageModelInput, *, stop: list[str] | None = None, **overrides: Any
    ) -> Iterator[Step]:
        """Yield the verified steps of an answer; no callbacks are called."""
        if self.rate_limiter is not None:
            self.rate_limiter.acquire(blocking=True)
        call, _ = self._call(self._convert_input(input).to_messages(), stop, overrides)
        yield from call.steps()

    async def asteps(
        self, input: LanguageModelInput, *, stop: list[str] | None = None, **overrides: Any
    ) -> AsyncIterator[Step]:
        """Yield the verified steps of an answer; no callbacks are called."""
        if self.rate_limiter is not None:
            await self.rate_limiter.aacquire(blocking=True)
        messages = self._convert_input(input).to_messages()
        call, _ = await self._acall(messages, stop, overrides)
        async with aclosing(call.asteps()) as steps:
            async for step in steps:
                yield step

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, run_manager, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        async with aclosing(self._astream(messages, stop, run_manager, **kwargs)) as chunks:
            return generate_from_stream(iter([chunk async for chunk in chunks]))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call, writer = self._call(messages, stop, kwargs)
        for step in call.steps():
            chunks = writer.chunks(step)
            if run_manager is not None:  # else the tap sees the chunk
                dispatch(run_manager, step, self.trace_steps)
            for chunk in chunks:
                yield ChatGenerationChunk(message=chunk)
        last = writer.last(call.input_tokens, call.metadata(writer.steps))
        yield ChatGenerationChunk(message=last)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[ChatGenerationChunk]:
        call, writer = await self._acall(messages, stop, kwargs)
        async with aclosing(call.asteps()) as steps:
            async for step in steps:
                chunks = writer.chunks(step)
                if run_manager is not None:
                    await adispatch(run_manager, step, self.trace_steps)
                for chunk in chunks:
                    yield ChatGenerationChunk(message=chunk)
        # A prompt is counted by a tokenizer, or by a server, for which the event loop cannot wait.
        input_tokens = await asyncio.to_thread(lambda: call.input_tokens)
        last = writer.last(input_tokens, call.metadata(writer.steps))
        yield ChatGenerationChunk(message=last)

    def _call(
        self,
        messages: Sequence[BaseMessage],
        stop: list[str] | None,
        overrides: Mapping[str, Any],
        *,
        asynchronous: bool = False,
    ) -> tuple[Call, ChunkWriter]:
        """Return an answer's decoding, and what makes a message of it.

        Loads the models when they are first used.
        """
        own = dict(overrides)
        passages = own.pop("passages", ())
        asked = Asked.taken_from(own)
        model = self._in_force(stop, own)
        hooks = Hooks.of(model.stop_when, model.review, asynchronous=asynchronous)
        decoder = self._assembled.decoder(model)
        plan = AnswerPlan.of(asked, model, decoder.engines)
        call = Call.of(
            decoder,
            plan.prompt(to_template(messages), passages),
            model,
            timeout_s=model.timeout,
            constraint=plan.constraint,
            sections=plan.sections,
            opened=plan.opened,
            hooks=hooks,
        )
        writer = ChunkWriter(
            plan.reader(),
            reasoning_steps=model.reasoning_steps,
            output_version=model.output_version,
        )
        return call, writer

    async def _acall(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, overrides: Mapping[str, Any]
    ) -> tuple[Call, ChunkWriter]:
        """Do the same without holding up the event loop."""
        return await asyncio.to_thread(self._call, messages, stop, overrides, asynchronous=True)
