"""The plain LangChain LLM, prompt text in and text out; each verified step is an event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar, cast

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
    Callbacks,
)
from langchain_core.language_models import BaseLLM, LanguageModelInput
from langchain_core.messages import BaseMessage, HumanMessage, get_buffer_string
from langchain_core.outputs import GenerationChunk, LLMResult
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_core.runnables import RunnableConfig
from pydantic import Field

from specguard_chains.batches import Batches
from specguard_chains.call import Call
from specguard_chains.callbacks import adispatch, dispatch
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.steps import Step
from specguard_chains.hooks import Hooks
from specguard_chains.llm_chunks import last_chunk, result, step_chunk
from specguard_chains.llm_runs import PromptRun, joined, prompt_runs
from specguard_chains.messages import to_template
from specguard_chains.model_base import SpecGuardModel
from specguard_chains.model_binding import StepsBinding
from specguard_chains.parameters import refuse_secrets
from specguard_chains.together import atogether, places, together


class SpecGuardLLM(Batches, SpecGuardModel, BaseLLM):
    r"""A plain LLM that drafts with a small model and rewrites only the steps that fail a check.

    Setup:
        Install the package with an engine; the models are fetched when they are first used.

        .. code-block:: bash

            pip install "specguard_chains[llama-cpp]"

    Instantiate:
        .. code-block:: python

            from specguard_chains import SpecGuardLLM

            llm = SpecGuardLLM()  # the text is continued as it stands
            llm = SpecGuardLLM(chat_template=True)  # the text is what a user says to the model

        All fields of `SpecGuardOptions` are parameters; ``model`` is another name for ``pair``.
        An unknown parameter is an error.

    Invoke:
        .. code-block:: python

            text = llm.invoke("The capital of France is", max_tokens=20)
            texts = llm.batch(["1, 2, 3,", "a, b, c,"], stop=["\n"])

        Any option can be overridden in a call or by ``bind``; ``stop=[]`` means no stop strings.
        Caches tell calls with different options apart.

    Stream:
        One piece of text per verified step, and an empty one at the end.

        .. code-block:: python

            for text in llm.stream("The capital of France is"):
                print(text, end="", flush=True)

    Async:
        .. code-block:: python

            text = await asyncio.wait_for(llm.ainvoke("The capital of France is"), timeout=60)
            async for text in llm.astream("The capital of France is"):
                print(text, end="", flush=True)

        The event loop stays free, and cancelling the task stops the model at its next token.

    Step events:
        Callback handlers get ``on_custom_event("specguard_step", step, run_id=...)`` for every
        step, on every route, as an event of the prompt's own run, and ``on_llm_new_token`` with
        the same step in the chunk. The steps are also in the result, and can be had without
        LangChain's callbacks:

        .. code-block:: python

            generation = llm.generate(["The capital of France is"]).generations[0][0]
            generation.generation_info["specguard_steps"][0]["verdict"]
            for step in llm.steps("The capital of France is"):
                print(step.source, step.score, step.text)

    Usage:
        .. code-block:: python

            result = llm.generate(["The capital of France is"])
            result.llm_output["token_usage"]  # of all prompts
            result.generations[0][0].generation_info["specguard"]["acceptance_rate"]
    """

    of_a_call: ClassVar[frozenset[str]] = SpecGuardModel.of_a_call | {"chat_template", "passages"}

    chat_template: bool = False
    """True puts the prompt into the model's chat template as a message of the user, False lets the
    model continue it as raw text."""
    passages: tuple[str, ...] = ()
    """Texts that stand in the prompt to the letter: steps say how much they lean on each."""
    rate_limiter: BaseRateLimiter | None = Field(default=None, exclude=True)
    """Asked before every answer that no cache has."""

    @property
    def _llm_type(self) -> str:
        return "specguard-llm"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        own = {"chat_template": self.chat_template, "passages": self.passages}
        return {**super()._identifying_params, **own}

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Return how many tokens the prompt has that LangChain makes of these messages."""
        return len(self._tokens(self._prompt(get_buffer_string(messages))))

    if not TYPE_CHECKING:  # LangChain's own binding says more to type checkers

        def bind(self, **kwargs):
            """See `Runnable.bind`."""
            return StepsBinding(bound=self, kwargs=kwargs)

    # Answers

    def steps(
        self, input: LanguageModelInput, *, stop: list[str] | None = None, **overrides: Any
    ) -> Iterator[Step]:
        """Yield the verified steps of an answer; no callbacks are called."""
        if self.rate_limiter is not None:
            self.rate_limiter.acquire(blocking=True)
        yield from self._call(self._convert_input(input).to_string(), stop, overrides).steps()

    async def asteps(
        self, input: LanguageModelInput, *, stop: list[str] | None = None, **overrides: Any
    ) -> AsyncIterator[Step]:
        """Yield the verified steps of an answer; no callbacks are called."""
        if self.rate_limiter is not None:
            await self.rate_limiter.aacquire(blocking=True)
        prompt = self._convert_input(input).to_string()
        call = await self._acall(prompt, stop, overrides)
        async with aclosing(call.asteps()) as steps:
            async for step in steps:
                yield step

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        return joined(
            [result(list(self._stream(prompt, stop, run_manager, **kwargs))) for prompt in prompts]
        )

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        results = []
        for prompt in prompts:
            async with aclosing(self._astream(prompt, stop, run_manager, **kwargs)) as chunks:
                results.append(result([chunk async for chunk in chunks]))
        return joined(results)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        if self.rate_limiter is not None:
            self.rate_limiter.acquire(blocking=True)
        call = self._call(prompt, stop, kwargs)
        steps = []
        for step in call.steps():
            steps.append(step)
            if run_manager is not None:
                dispatch(run_manager, step, self.trace_steps)
            yield self._told(step_chunk(step), run_manager)
        yield self._told(last_chunk(call, steps), run_manager)

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[GenerationChunk]:
        if self.rate_limiter is not None:
            await self.rate_limiter.aacquire(blocking=True)
        call = await self._acall(prompt, stop, kwargs)
        steps = []
        async with aclosing(call.asteps()) as decoded:
            async for step in decoded:
                steps.append(step)
                if run_manager is not None:
                    await adispatch(run_manager, step, self.trace_steps)
                yield await self._atold(step_chunk(step), run_manager)
        # A prompt is counted by a tokenizer, or by a server, for which the event loop cannot wait.
        last = await asyncio.to_thread(last_chunk, call, steps)
        yield await self._atold(last, run_manager)

    def _told(
        self, chunk: GenerationChunk, run_manager: CallbackManagerForLLMRun | None
    ) -> GenerationChunk:
        """Return a chunk of which the handlers know: LangChain does not tell them."""
        if run_manager is not None and self.streaming is not False:
            run_manager.on_llm_new_token(chunk.text, chunk=chunk)
        return chunk

    async def _atold(
        self, chunk: GenerationChunk, run_manager: AsyncCallbackManagerForLLMRun | None
    ) -> GenerationChunk:
        if run_manager is not None and self.streaming is not False:
            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
        return chunk

    def _call(
        self,
        prompt: str,
        stop: list[str] | None,
        overrides: Mapping[str, Any],
        *,
        asynchronous: bool = False,
    ) -> Call:
        """Return what is needed for one answer. Loads the models when they are first used."""
        model = self._in_force(stop, overrides)
        hooks = Hooks.of(model.stop_when, model.review, asynchronous=asynchronous)
        return Call.of(
            self._assembled.decoder(model),
            model._prompt(prompt),
            model,
            timeout_s=model.timeout,
            hooks=hooks,
        )

    async def _acall(
        self, prompt: str, stop: list[str] | None, overrides: Mapping[str, Any]
    ) -> Call:
        """Do the same without holding up the event loop."""
        return await asyncio.to_thread(self._call, prompt, stop, overrides, asynchronous=True)

    def _prompt(self, text: str) -> Prompt:
        if self.chat_template:
            return Prompt(to_template([HumanMessage(text)]), passages=self.passages)
        return Prompt(text=text, passages=self.passages)

    # The entry points of LangChain: the options of a call become the model's own, since caches and
    # traces look at those only, and each prompt gets a run of its own (see `llm_runs`)

    def generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """See `BaseLLM.generate`; when a prompt fails, the others stop at their next token."""
        runs = prompt_runs(prompts, callbacks, kwargs)
        model = self._called(stop, kwargs)
        return joined(together(model._answer, runs, places(model)))

    async def agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """See `BaseLLM.agenerate`; when a prompt fails, the others stop at their next token."""
        runs = prompt_runs(prompts, callbacks, kwargs)
        model = self._called(stop, kwargs)
        return joined(await atogether(model._aanswer, runs, places(model)))

    def _answer(self, run: PromptRun) -> LLMResult:
        return super().generate([run.prompt], self.stop, run.callbacks, **run.arguments)

    async def _aanswer(self, run: PromptRun) -> LLMResult:
        return await super().agenerate([run.prompt], self.stop, run.callbacks, **run.arguments)

    def _called(self, stop: list[str] | None, overrides: Mapping[str, Any]) -> SpecGuardLLM:
        refuse_secrets(overrides)
        return self._in_force(stop, overrides)._without_cache_if_asked({})

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[str]:
        """Yield the answer's text, one piece per verified step and an empty one at the end."""
        model = self._called(stop, kwargs)
        if model.streaming is False:
            yield model.invoke(input, config)
        else:
            yield from super(SpecGuardLLM, model).stream(input, config, stop=model.stop)

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[str]:
        """Yield the answer's text, one piece per verified step and an empty one at the end."""
        model = self._called(stop, kwargs)
        if model.streaming is False:
            yield await model.ainvoke(input, config)
            return
        stream = super(SpecGuardLLM, model).astream(input, config, stop=model.stop)
        async with aclosing(cast("AsyncGenerator[str]", stream)) as texts:
            async for text in texts:
                yield text
