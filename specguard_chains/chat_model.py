"""The LangChain chat model whose answers are drafted small, verified step by step, and repaired."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
    Callbacks,
)
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from specguard_chains.call import (
    Assembled,
    Call,
    TypedErrors,
    checked_names,
    counting_engine,
    identity,
    model_name,
    options_in_force,
    refuse_secrets,
)
from specguard_chains.callbacks import adispatch, atapped, dispatch, tapped
from specguard_chains.decoding.engine import Engine, Prompt
from specguard_chains.decoding.steps import Step
from specguard_chains.messages import last_chunk, step_chunk, to_template
from specguard_chains.options import SpecGuardOptions


class ChatSpecGuard(TypedErrors, SpecGuardOptions, BaseChatModel):
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

            message.usage_metadata  # tokens of prompt and answer, by the target's tokenizer
            message.response_metadata["specguard"]["acceptance_rate"]
    """

    model_config = ConfigDict(extra="ignore")  # as LangChain's classes; see _check_keywords

    streaming: bool | None = None
    """True lets `invoke` stream to handlers, False lets `stream` give one chunk."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds that an answer may take, waiting for its turn included; loading is not."""

    _assembled: Assembled = PrivateAttr(default_factory=Assembled)

    @model_validator(mode="before")
    @classmethod
    def _check_keywords(cls, values: Any) -> Any:
        """Refuse unknown parameters (LangChain's base class would drop them silently)."""
        if not isinstance(values, Mapping):
            return values
        known = {
            name for field, info in cls.model_fields.items() for name in (field, info.alias) if name
        }
        return checked_names(values, known)

    @model_validator(mode="after")
    def _set_specguard_version(self) -> ChatSpecGuard:
        """Let traces show the package's version."""
        from specguard_chains import __version__

        self._add_version("specguard_chains", __version__)
        return self

    # What LangChain asks about the model

    @property
    def model(self) -> str:
        """The name of what answers: the pair, or the models if they were given."""
        return model_name(self)

    @property
    def _llm_type(self) -> str:
        return "specguard"

    @property
    def lc_secrets(self) -> builtins.dict[str, str]:
        """Where the parameters come from that are never shown."""
        return {"api_key": "OPENAI_API_KEY"}

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """Everything that changes an answer: caches tell models apart by it."""
        names = SpecGuardOptions.model_fields.keys() - {"api_key", "max_retries"}
        return {
            "model": self.model,
            **{name: identity(getattr(self, name)) for name in sorted(names)},
        }

    def _get_invocation_params(
        self, stop: list[str] | None = None, **kwargs: Any
    ) -> builtins.dict[str, Any]:
        """Name the stop strings in force; a call's None would hide the configured ones."""
        refuse_secrets(kwargs)
        return super()._get_invocation_params(self.stop if stop is None else stop, **kwargs)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return super()._get_ls_params(self.stop if stop is None else stop, **kwargs)

    def get_token_ids(self, text: str) -> list[int]:
        """Return the text's tokens in the target's vocabulary, as a prompt of its own."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return counting_engine(self._assembled.decoder(self)).encode(Prompt(text=text))

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Return how many tokens the prompt has that the template makes of these messages."""
        prompt = Prompt(to_template(messages), [convert_to_openai_tool(t) for t in tools or ()])
        return len(counting_engine(self._assembled.decoder(self)).encode(prompt))

    # Answers

    def steps(
        self, input: LanguageModelInput, *, stop: list[str] | None = None, **overrides: Any
    ) -> Iterator[Step]:
        """Yield the verified steps of an answer; no callbacks are called."""
        yield from self._call(self._convert_input(input).to_messages(), stop, overrides).steps()

    async def asteps(
        self, input: LanguageModelInput, *, stop: list[str] | None = None, **overrides: Any
    ) -> AsyncIterator[Step]:
        """Yield the verified steps of an answer; no callbacks are called."""
        messages = self._convert_input(input).to_messages()
        call = await asyncio.to_thread(self._call, messages, stop, overrides)
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
        call = self._call(messages, stop, kwargs)
        steps = []
        for step in call.steps():
            steps.append(step)
            if run_manager is not None:  # else the tap sees the chunk
                dispatch(run_manager, step)
            yield ChatGenerationChunk(message=step_chunk(step))
        yield ChatGenerationChunk(message=_last_chunk(call, steps))

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[ChatGenerationChunk]:
        call = await asyncio.to_thread(self._call, messages, stop, kwargs)
        steps = []
        async with aclosing(call.asteps()) as decoded:
            async for step in decoded:
                steps.append(step)
                if run_manager is not None:
                    await adispatch(run_manager, step)
                yield ChatGenerationChunk(message=step_chunk(step))
        yield ChatGenerationChunk(message=_last_chunk(call, steps))

    def _call(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, overrides: Mapping[str, Any]
    ) -> Call:
        """Return what is needed for one answer. Loads the models when they are first used."""
        own = {
            name: value
            for name, value in overrides.items()
            if name != "stream" and not name.startswith("ls_")  # LangChain's, not the model's
        }
        timeout_s = own.pop("timeout", self.timeout)
        options = options_in_force(self, stop, own)
        prompt = Prompt(to_template(messages))
        return Call.of(self._assembled.decoder(options), prompt, options, timeout_s=timeout_s)

    def __deepcopy__(self, memo: builtins.dict[int, Any] | None = None) -> ChatSpecGuard:
        """Copy the settings; engines are shared, as weights cannot be copied."""
        memo = {} if memo is None else memo
        memo.update({id(m): m for m in (self.draft, self.target) if isinstance(m, Engine)})
        return super().__deepcopy__(memo)

    # The entry points of LangChain: only the tap is added (see `callbacks`)

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        """See `BaseChatModel.generate`."""
        refuse_secrets(kwargs)
        callbacks = tapped(callbacks, self.callbacks, self.verbose)
        return super().generate(messages, stop, callbacks, **kwargs)

    async def agenerate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        """See `BaseChatModel.agenerate`."""
        refuse_secrets(kwargs)
        callbacks = atapped(callbacks, self.callbacks, self.verbose)
        return await super().agenerate(messages, stop, callbacks, **kwargs)

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
        config["callbacks"] = tapped(config.get("callbacks"), self.callbacks, self.verbose)
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
        config["callbacks"] = atapped(config.get("callbacks"), self.callbacks, self.verbose)
        stream = super().astream(input, config, stop=stop, **kwargs)
        async with aclosing(cast("AsyncGenerator[AIMessageChunk]", stream)) as chunks:
            async for chunk in chunks:
                yield chunk


def _last_chunk(call: Call, steps: Sequence[Step]) -> AIMessageChunk:
    return last_chunk(steps, call.input_tokens, call.metadata(steps))
