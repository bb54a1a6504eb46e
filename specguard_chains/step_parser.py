"""Answers as `Step` objects, and everything piped after them called once for every step.

LangChain's functions wait for their whole input, so in an ordinary sequence a function after a
parser would be called once, at the end. A chain that has a `StepParser` in it is therefore not an
ordinary sequence but a `StepChain`, whose `|` makes the next function run for each step, while the
model writes the steps after it.

Which class a chain has is decided by `|`, and Python asks the right operand first only if its class
is a subclass of the left one's. That is why `StepParser` is nominally a sequence and a binding, and
why `ChatSpecGuard` has an operator of its own. Where `|` cannot be had, it fails rather than makes
an ordinary sequence; `StepParser.after` works everywhere.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, NoReturn, Self

from langchain_core.runnables import (
    Runnable,
    RunnableBinding,
    RunnableConfig,
    RunnableSequence,
)
from langchain_core.runnables.base import RunnableLike, coerce_to_runnable

from specguard_chains.errors import ConfigurationError
from specguard_chains.step_stages import EachStep, ParseSteps


class StepChain(RunnableBinding[Any, Any]):
    """A chain with a `StepParser` in it: `|` appends what is to be called for every step.

    `stream` yields the result of each step as soon as the step is verified, `invoke` returns the
    list of the results. An error of what is called stops the model.

    As a part of something larger the chain is a runnable that gives a list: in `prompt | (model |
    StepParser() | check) | report` it is `report` that gets the list of all results.
    """

    def __or__(self, other: RunnableLike[Any, Any]) -> Self:
        """Return the chain with one more call for every step."""
        if isinstance(other, StepParser):
            raise ConfigurationError("a chain has one StepParser, right after the model")
        return self._with(RunnableSequence(self.bound, EachStep(coerce_to_runnable(other))))

    def pipe(self, *others: RunnableLike[Any, Any], name: str | None = None) -> Any:
        """Return the chain with more calls for every step."""
        chain = reduce(or_, others, self)
        return chain.with_config(run_name=name) if name else chain

    def transform(
        self, input: Iterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[list[Any]]:
        """Yield each result in a list of its own: they add up to what `invoke` returns."""
        for result in super().transform(input, config, **kwargs):
            yield [result]

    async def atransform(
        self, input: AsyncIterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[list[Any]]:
        """Yield each result in a list of its own: they add up to what `ainvoke` returns."""
        async for result in super().atransform(input, config, **kwargs):
            yield [result]

    def with_alisteners(self, **listeners: Any) -> Any:
        """See `Runnable.with_alisteners`."""
        return self._with(self.bound.with_alisteners(**listeners))

    def with_fallbacks(self, fallbacks: Sequence[Runnable[Any, Any]], **options: Any) -> Any:
        """See `Runnable.with_fallbacks`; the fallbacks have a `StepParser` too."""
        return StepChain(bound=super().with_fallbacks(fallbacks, **options))

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return False: LangChain would not know the class."""
        return False

    def __repr__(self) -> str:
        return repr(self.bound)

    def _with(self, bound: Runnable[Any, Any]) -> Self:
        return self.model_copy(update={"bound": bound})


class _Sequence(RunnableSequence[Any, Any]):
    """A sequence in name only, so that `sequence | StepParser()` asks the parser."""

    first: Any = None
    middle: Any = ()
    last: Any = None

    def __init__(self, **fields: Any) -> None:
        super(RunnableSequence, self).__init__(**fields)

    @property
    def steps(self) -> NoReturn:
        """Refuse: LangChain asks for them where it makes an ordinary sequence."""
        raise ConfigurationError(
            "what follows would not be called for every step here, as LangChain makes an ordinary "
            "sequence; write StepParser().after(...) | ..., with what comes before in the brackets"
        )


class StepParser(StepChain, _Sequence):
    """Turns messages of `ChatSpecGuard` into `Step` objects, and calls what follows for each.

    .. code-block:: python

        chain = prompt | model | StepParser() | check  # the same as ... | StepParser(check)
        for result in chain.stream({"question": "What is 12 * 13?"}):
            ...  # of the first step, while the model writes the second one
        results = chain.invoke({"question": "What is 12 * 13?"})  # a list

    What follows may be a function, a coroutine function, a mapping or any runnable. `|` works after
    the model, after what `bind`, `with_config`, `with_retry` and `with_fallbacks` make of it, and
    after sequences and bindings. After anything else it raises a ConfigurationError; write
    `StepParser(check).after(anything)` there.
    """

    def __init__(self, *called: RunnableLike[Any, Any], **fields: Any) -> None:
        """Parse steps, and call this for each, one after the other.

        Args:
            called: What to call; each gets the result of the one before it.
            fields: Fields of `RunnableBinding`.
        """
        parse: Runnable[Any, Any] = ParseSteps()
        fields.setdefault("bound", reduce(_then_each, called, parse))
        super().__init__(**fields)

    def after(self, source: RunnableLike[Any, Any]) -> StepChain:
        """Return the chain of something that gives messages of `ChatSpecGuard`, and this."""
        if isinstance(source, StepChain):
            raise ConfigurationError("a chain has one StepParser, right after the model")
        return StepChain(bound=RunnableSequence(coerce_to_runnable(source), self._stage()))

    def __ror__(self, other: RunnableLike[Any, Any]) -> StepChain:
        return self.after(other)

    def _stage(self) -> Runnable[Any, Any]:
        """Return this as a part of a chain, which streams results that stand in no lists."""
        plain = not (self.kwargs or self.config or self.config_factories)
        fields = {name: getattr(self, name) for name in RunnableBinding.model_fields}
        return self.bound if plain else RunnableBinding(**fields)


class StepSource:
    """A base of runnables after which `| StepParser()` makes a `StepChain`.

    Bindings leave `|` to the parser, so a binding is made of what is none. To type checkers all of
    this is as LangChain has it.
    """

    if not TYPE_CHECKING:

        def __or__(self, other):
            return other.after(self) if isinstance(other, StepParser) else super().__or__(other)

        def with_retry(self, **options):
            """See `Runnable.with_retry`."""
            return RunnableBinding(bound=super().with_retry(**options))

        def with_fallbacks(self, fallbacks, **options):
            """See `Runnable.with_fallbacks`."""
            return RunnableBinding(bound=super().with_fallbacks(fallbacks, **options))


def _then_each(stages: Runnable[Any, Any], called: RunnableLike[Any, Any]) -> Runnable[Any, Any]:
    return RunnableSequence(stages, EachStep(coerce_to_runnable(called)))
