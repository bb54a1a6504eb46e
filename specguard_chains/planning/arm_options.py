"""The options of a recorded arm, to be pasted: as a command has them, and as Python does."""

from __future__ import annotations

from collections.abc import Mapping
from shlex import join
from typing import Any

from specguard_chains.errors import ConfigurationError, EvaluationError
from specguard_chains.evaluation.command import flags_of
from specguard_chains.evaluation.settings import SHARED, UNRECORDED, RunSettings
from specguard_chains.options import SpecGuardOptions
from specguard_chains.parameters import checked_names, typed_errors


def options_of(settings: RunSettings, arm: str) -> dict[str, Any]:
    """Return an arm's options as far as they differ from the defaults of today.

    Raises:
        EvaluationError: One of them is no option any more, or its value is not allowed any more.
    """
    own = settings.arms[arm]
    shared = {name: getattr(settings, name) for name in SHARED}
    fields = SpecGuardOptions.model_fields
    # A default that is no option any more made no difference.
    usual = {name: value for name, value in settings.defaults.items() if name in fields}
    options = {name: value for name, value in (usual | shared | own).items() if name != "controls"}
    try:
        with typed_errors():
            SpecGuardOptions(**checked_names(options, fields))
    except ConfigurationError as error:
        raise EvaluationError(
            f"the options of arm {arm!r} are those of an older version, of which one is not "
            f"possible any more ({error}); run it anew in another folder"
        ) from error
    return {name: value for name, value in options.items() if value != fields[name].default}


def younger_options(settings: RunSettings) -> list[str]:
    """Return the options that did not exist when a run was begun, and of which it knows nothing."""
    known = {*settings.defaults, *SHARED, *UNRECORDED}
    return [name for name in SpecGuardOptions.model_fields if name not in known]


def as_flags(options: Mapping[str, Any]) -> str:
    """Return options as `specguard ask` and the other commands take them."""
    return join(flags_of(options))


def as_python(options: Mapping[str, Any]) -> str:
    """Return the call that makes a chat model of these options."""
    return f"ChatSpecGuard({', '.join(f'{name}={value!r}' for name, value in options.items())})"
