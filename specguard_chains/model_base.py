"""What the chat model and the plain LLM have in common: fields, identity, copies, token counts."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Self

from langchain_core.language_models.base import BaseLanguageModel
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, create_model, model_validator

from specguard_chains.call import Assembled, identity, model_name
from specguard_chains.decoding.engine import Engine, Prompt
from specguard_chains.decoding.steps import Step
from specguard_chains.engines import DEFAULT_N_CTX, kind_of
from specguard_chains.errors import ConfigurationError
from specguard_chains.options import SpecGuardOptions
from specguard_chains.parameters import (
    TypedErrors,
    checked_names,
    options_in_force,
    typed_errors,
)
from specguard_chains.roles import load_engine

NOT_IDENTIFYING = frozenset(
    {"api_key", "max_queue", "max_retries", "prompt_cache", "prompt_cache_gib"}
)
"""Options that change no answer."""
SHARED_BY_COPIES = ("draft", "target", "encoder", "cache", "rate_limiter")
"""What holds weights, locks, or what all copies are to have together."""


class SpecGuardModel(TypedErrors, SpecGuardOptions, BaseLanguageModel[Any]):
    """A LangChain model whose options are fields, and whose weights are loaded when first used."""

    model_config = ConfigDict(extra="ignore")  # as LangChain's classes; see _check_keywords

    of_a_call: ClassVar[frozenset[str]] = frozenset({"timeout", "stop_when", "review"})
    """Fields beside the options that a call may give anew."""

    streaming: bool | None = None
    """True lets `invoke` stream to handlers, False lets `stream` give one chunk."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds that an answer may take, waiting for its turn included; loading is not."""
    stop_when: Any = Field(default=None, exclude=True)
    """Ends an answer early: a function or Runnable that is asked about every step, sync or async,
    and returns True to end the answer with it. No cache is asked then, nor for a review."""
    review: Any = Field(default=None, exclude=True)
    """Takes part in verification: a function or Runnable that gets every step before it is kept,
    whoever wrote it, and returns "keep", "regenerate" (the target writes it anew) or "stop"."""
    trace_steps: bool = False
    """Show every step as a run below the model's run, for tracers that show no events."""

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
    def _set_specguard_version(self) -> Self:
        """Let traces show the package's version."""
        from specguard_chains import __version__

        self._add_version("specguard_chains", __version__)
        return self

    @property
    def model(self) -> str:
        """The name of what answers: the pair, or the models if they were given."""
        return model_name(self)

    @property
    def lc_secrets(self) -> builtins.dict[str, str]:
        """Where the parameters come from that are never shown."""
        return {"api_key": "OPENAI_API_KEY"}

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """Everything that changes an answer: caches tell models apart by it."""
        names = SpecGuardOptions.model_fields.keys() - NOT_IDENTIFYING
        hooks = {"stop_when": self.stop_when, "review": self.review}
        return {
            "model": self.model,
            **{name: identity(getattr(self, name)) for name in sorted(names)},
            **{name: f"{hook!r} at {id(hook):#x}" for name, hook in hooks.items() if hook},
        }

    def get_token_ids(self, text: str) -> list[int]:
        """Return the text's tokens in the target's vocabulary, as a prompt of its own."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self._tokens(Prompt(text=text))

    def _tokens(self, prompt: Prompt) -> list[int]:
        return load_engine(self, self.roles[-1]).encode(prompt)  # the target, if there is one

    def _in_force(self, stop: list[str] | None, overrides: Mapping[str, Any]) -> Self:
        """Return the model with the options of one call, validated, as its own.

        Args:
            stop: Stop strings of the call; None takes the configured ones, [] means none.
            overrides: Further options of the call, by name.

        Raises:
            ConfigurationError: A name is unknown or a value is wrong.
        """
        given = {
            name: value
            for name, value in overrides.items()
            if name != "stream" and not name.startswith("ls_")  # LangChain's, not the model's
        }
        own = self._checked({name: given.pop(name) for name in self.of_a_call & given.keys()})
        options = options_in_force(self, stop, given)
        own |= {name: getattr(options, name) for name in SpecGuardOptions.model_fields}
        model = self.model_copy(update=own)
        model.__dict__.pop("_serialized", None)  # LangChain's memory of the old options
        return model

    def _checked(self, own: Mapping[str, Any]) -> builtins.dict[str, Any]:
        """Return fields that a call gives anew in their types: True for "yes"."""
        with typed_errors():
            valid = _fields_of_a_call(type(self)).model_validate(own)
        return {name: getattr(valid, name) for name in own}

    def _without_cache_if_asked(self, overrides: Mapping[str, Any]) -> Self:
        """Return the model, without its cache if hooks take part in an answer.

        What they say is not known from what the model is asked, and may be another thing next time.
        """
        hooks = [overrides.get(name, getattr(self, name)) for name in ("stop_when", "review")]
        if all(hook is None for hook in hooks):
            return self
        return self.model_copy(update={"cache": False})

    def __deepcopy__(self, memo: builtins.dict[int, Any] | None = None) -> Self:
        """Copy the settings; engines, caches, limiters and handlers are shared."""
        memo = {} if memo is None else memo
        handlers = self.callbacks if isinstance(self.callbacks, list) else [self.callbacks]
        shared = [getattr(self, name, None) for name in SHARED_BY_COPIES]
        memo.update({id(value): value for value in [*shared, *handlers]})
        return super().__deepcopy__(memo)

    def __getstate__(self) -> builtins.dict[Any, Any]:
        """Return the settings for a pickle.

        Raises:
            ConfigurationError: One of them is an engine, whose weights cannot be pickled.
        """
        for role in ("draft", "target"):
            if isinstance(engine := getattr(self, role), Engine):
                raise ConfigurationError(
                    f"{role} is the loaded engine {engine.name}, which cannot be pickled; name the "
                    f"model by its file or name instead: {role}='model.gguf'"
                )
        return super().__getstate__()


@cache
def _fields_of_a_call(cls: type[SpecGuardModel]) -> type[BaseModel]:
    fields: Any = {name: (cls.model_fields[name].annotation, None) for name in cls.of_a_call}
    return create_model(cls.__name__, **fields)


def usage(steps: Sequence[Step], input_tokens: int) -> UsageMetadata:
    """Return what an answer has cost.

    The prompt's tokens are the target's, those of a step its writer's.
    """
    output_tokens = sum(step.answer_tokens for step in steps)
    reused = [
        sum(step.tokens.draft_reused for step in steps),
        sum(step.tokens.target_reused for step in steps),
    ]
    return UsageMetadata(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        total_tokens=input_tokens + output_tokens,
        input_token_details=InputTokenDetails(cache_read=min(input_tokens, max(reused))),
    )


def profile(options: SpecGuardOptions) -> ModelProfile:
    """Return what the models can do, as far as it is known without loading them.

    Agents read it: whether they may ask for JSON by a schema, when to shorten a conversation, and
    that pictures have to be left out. What only the weights tell, such as whether the model
    reasons between tags, is not in it.
    """
    models = _models(options)
    constrained = all(_can_be_constrained(model) for model in models)
    known = ModelProfile(
        name=model_name(options),
        text_inputs=True,
        image_inputs=False,
        image_url_inputs=False,
        image_tool_message=False,
        pdf_inputs=False,
        pdf_tool_message=False,
        audio_inputs=False,
        video_inputs=False,
        text_outputs=True,
        image_outputs=False,
        audio_outputs=False,
        video_outputs=False,
        attachment=False,
        temperature=options.decoder != "specguard-greedy",
        tool_calling=True,
        tool_call_streaming=True,
        tool_choice=constrained,
        structured_output=constrained,
    )
    windows = [_window(options, model) for model in models]
    if None not in windows:
        window = min(filter(None, windows))
        answer = options.max_tokens or 0  # room for it is asked for at the start
        if answer < window:
            known["max_input_tokens"] = window - answer
        known["max_output_tokens"] = min(options.max_tokens or window, window)
    return known


def _models(options: SpecGuardOptions) -> list[Any]:
    """Return what the options name for each model that is needed; None is one of the pair."""
    return [getattr(options, role) for role in options.roles]


def _can_be_constrained(model: Any) -> bool:
    if isinstance(model, Engine):
        return model.capabilities.constraints
    return model is None or kind_of(model) != "openai"


def _window(options: SpecGuardOptions, model: Any) -> int | None:
    """Return the context length that a model has or will have; None if its server decides."""
    if isinstance(model, Engine):
        return model.context_length
    if model is None or kind_of(model) != "openai":
        return options.n_ctx or DEFAULT_N_CTX
    return options.n_ctx
