"""Parameters that are given to a class or with a call: checked, and the options they come to."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from specguard_chains.errors import ConfigurationError
from specguard_chains.options import SpecGuardOptions


class TypedErrors(BaseModel):
    """Raises ConfigurationError where pydantic finds a wrong value."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Validate the values."""
        with typed_errors():
            super().__init__(*args, **kwargs)


@contextmanager
def typed_errors() -> Iterator[None]:
    """Turn pydantic's error into a ConfigurationError that names parameter, value and rule."""
    try:
        yield
    except ValidationError as error:
        raise ConfigurationError("; ".join(map(_explain, error.errors()))) from error


def _explain(error: Mapping[str, Any]) -> str:
    if error["type"] == "value_error":  # raised by a validator of ours, with its own words
        return str(error["ctx"]["error"])
    name = ".".join(map(str, error["loc"]))
    if name.startswith("api_key"):
        return f"{name}: {error['msg']}"
    return f"{name}={error['input']!r}: {error['msg']}"


def refuse_secrets(given: Mapping[str, Any]) -> None:
    """Refuse a key that is given with a call: LangChain shows a call's parameters to tracers.

    Raises:
        ConfigurationError: There is one.
    """
    if "api_key" in given:
        raise ConfigurationError(
            "api_key cannot be given in a call, as traces and caches would show it; give it to the "
            "class, or set OPENAI_API_KEY"
        )


def checked_names(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return parameters by their own names: `model` is LangChain's name of `pair`.

    Raises:
        ConfigurationError: One of them is unknown, or both names of one are given.
    """
    parameters = dict(given)
    if "model" in parameters:
        model = parameters.pop("model")
        if parameters.setdefault("pair", model) != model:
            raise ConfigurationError(
                f"pair={parameters['pair']!r} and model={model!r} are two names of one parameter; "
                "give one of them"
            )
    for name in parameters:
        if name not in known:
            close = get_close_matches(name, known)
            hint = f"did you mean {' or '.join(close)}?" if close else "it would be ignored"
            raise ConfigurationError(f"there is no parameter {name!r}; {hint}")
    return parameters


def options_in_force(
    options: SpecGuardOptions, stop: list[str] | None, overrides: Mapping[str, Any]
) -> SpecGuardOptions:
    """Return the options of one call, validated anew: fields may have been assigned since.

    Args:
        options: What was configured.
        stop: Stop strings of the call; None takes the configured ones, [] means none.
        overrides: Further options of the call, by name.

    Raises:
        ConfigurationError: A name is unknown or a value is wrong.
    """
    names = SpecGuardOptions.model_fields
    values = {name: getattr(options, name) for name in names}
    refuse_secrets(overrides)
    changes = checked_names(overrides, names)
    if "pair" in changes:  # else the models that were configured would win
        values |= {"draft": None, "target": None}
    values |= changes
    if stop is not None:
        values["stop"] = stop
    with typed_errors():
        return SpecGuardOptions.model_validate(values)
