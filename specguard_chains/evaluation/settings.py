"""What the results of a run depend on, and whether another run can be added to them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

from specguard_chains.decoding.engine import Engine
from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.arms import ORACLE, Arm
from specguard_chains.evaluation.invocation import Invocation
from specguard_chains.evaluation.judging import JudgedBy
from specguard_chains.evaluation.problems import Half
from specguard_chains.options import SPECGUARD, SpecGuardOptions, usual_patience, usual_threshold

logger = logging.getLogger(__name__)

SHARED = ("pair", "draft", "target", "max_tokens", "n_threads")
"""Options that stand for the whole run, unless an arm has its own."""
UNRECORDED = frozenset(
    {
        *("api_key", "max_queue", "max_retries", "prompt_cache", "prompt_cache_gib"),
        *("schema_instruction", "seed", "tool_instruction"),
    }
)
"""Options that results do not depend on, or that are not an arm's own."""

BY_METHOD = {
    "threshold": (*SPECGUARD, "rsd", "specreason"),
    "patience": (*SPECGUARD, ORACLE, "rsd", "specreason", "selector", "random", "length"),
}
"""Options whose default depends on the method, and the methods that they mean something to."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of a run, as settings.json holds them."""

    version: str
    pair: str | None
    draft: str | None
    target: str | None
    data: tuple[str, ...]
    seed: int
    max_tokens: int | None
    n_threads: int | None
    arms: dict[str, dict[str, Any]]
    """By label, the options that differ from the defaults."""
    defaults: dict[str, Any]
    python: str
    platform: str
    started: str
    only: Half = "all"
    """Which of the problems of each data set."""
    invocations: tuple[Invocation, ...] = ()
    """Commands and machines that have added to the run, each once."""
    judged_by: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By label, the bounds and the value head that were found for an arm, see `judging`."""

    @classmethod
    def of(
        cls,
        options: SpecGuardOptions,
        arms: Sequence[Arm],
        data: Sequence[str],
        seed: int,
        *,
        only: Half = "all",
        arguments: Sequence[str] | None = None,
    ) -> RunSettings:
        """Return the settings of a run that begins now.

        Args:
            options: Those of all arms.
            arms: What is compared.
            data: Names of the data sets.
            seed: Of the run.
            only: Which of the problems of each data set.
            arguments: Of the process, its own name first; None if no command line began the run.
        """
        shared = {name: _plain(getattr(options, name)) for name in SHARED}
        defaults = _defaults()
        invocation = Invocation.here(arguments)
        return cls(
            version=invocation.version,
            data=tuple(data),
            seed=seed,
            arms={arm.label: _settings_of(arm, shared | defaults) for arm in arms},
            defaults=defaults,
            python=invocation.python,
            platform=invocation.platform,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            only=only,
            invocations=(invocation,),
            **shared,
        )

    @classmethod
    def load(cls, path: Path) -> RunSettings:
        """Return the settings that a file holds.

        Raises:
            EvaluationError: It cannot be read.
        """
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
            known = {each.name: (_earlier(plain) | plain)[each.name] for each in fields(cls)}
            invocations = tuple(Invocation(**each) for each in known["invocations"])
        except FileNotFoundError as error:
            raise EvaluationError(
                f"{path.parent} has no results, as it has no {path.name}; run `specguard bench` "
                "first, or name another folder"
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EvaluationError(
                f"{path} does not hold the settings of a run ({error!r}); choose another folder"
            ) from error
        return cls(**known | {"data": tuple(known["data"]), "invocations": invocations})

    @property
    def cpu(self) -> str | None:
        """The model of the processor that the run began on, None if it is not known any more."""
        return self.invocations[0].cpu if self.invocations else None

    @property
    def sources(self) -> str | None:
        """Digest of the code that the run began with, None if it is not known any more."""
        return self.invocations[0].sources if self.invocations else None

    def to_json(self) -> str:
        """Return the content of settings.json."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def joined(self, more: RunSettings, folder: Path) -> RunSettings:
        """Return the settings of this run with more arms and data.

        Raises:
            EvaluationError: The results would not be comparable; the message names each difference.
        """
        if found := list(self._differences(more)):
            raise EvaluationError(
                f"{folder} has results of other settings: {'; '.join(found)}. Choose another "
                "folder, or the settings that these results have"
            )
        for name in ("version", "sources", "python", "platform", "cpu"):
            if (old := getattr(self, name)) is not None and old != (new := getattr(more, name)):
                logger.warning(
                    "the run in %s was started with %s %s and goes on with %s: mind that when you "
                    "compare seconds",
                    *(folder, name, old, new),
                )
        defaults = more.defaults | self.defaults
        return replace(
            self,
            data=tuple(dict.fromkeys((*self.data, *more.data))),
            arms=more._arms_beside(defaults) | self.arms,
            defaults=defaults,
            invocations=tuple(dict.fromkeys((*self.invocations, *more.invocations))),
        )

    def judging(self, arm: str, found: JudgedBy, folder: Path, *, begun: bool) -> RunSettings:
        """Return these settings with what was found for an arm to judge steps by.

        Args:
            arm: Its label.
            found: See `judging.judged_by`.
            folder: Of the run.
            begun: Whether there are results of the arm.

        Raises:
            EvaluationError: These were judged by something else; the message names each difference.
        """
        before = self.judged_by.get(arm, found) if begun else found
        differences = [
            f"{name} of arm {arm!r} is {found.get(name)!r}, there {before.get(name)!r}"
            for name in sorted(before.keys() | found.keys())
            if before.get(name) != found.get(name)
        ]
        if differences:
            raise EvaluationError(
                f"{folder} has results of other bounds or value heads: {'; '.join(differences)}. "
                "Choose another folder, or name those of these results as calibration and "
                "reward_model"
            )
        return replace(self, judged_by=self.judged_by | {arm: dict(found)})

    def _differences(self, more: RunSettings) -> Iterator[str]:
        """Yield what keeps results of both from being compared, in words."""
        for name in (*SHARED, "seed", "only"):
            if (old := getattr(self, name)) != (new := getattr(more, name)):
                yield f"{name} is {new!r}, there {old!r}"
        for label in self.arms.keys() & more.arms.keys():
            old_arm, new_arm = (run._every_setting(label) for run in (self, more))
            # What was no option at the time, or is none any more, made no difference.
            either = self.arms[label].keys() | more.arms[label].keys()
            for name in sorted(either | (self.defaults.keys() & more.defaults.keys())):
                old, new = old_arm.get(name), new_arm.get(name)
                if old != new:
                    yield f"{name} of arm {label!r} is {new!r}, there {old!r}"

    def told_today(self) -> RunSettings:
        """Return the same settings beside the defaults that the options have now."""
        usual = _defaults()
        return replace(self, arms=self._arms_beside(usual), defaults=self.defaults | usual)

    def _arms_beside(self, usual: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return for each arm what differs from other defaults than its own."""

        def settings(label: str) -> dict[str, Any]:
            every = self.defaults | self.arms[label]
            found = {n: v for n, v in every.items() if n not in usual or v != usual[n]}
            own = {n: v for n, v in found.items() if n in usual or n in self.arms[label]}
            for name in BY_METHOD:  # told only where the method would have another one by itself
                less = {n: v for n, v in own.items() if n != name}
                if _in_force(dict(usual) | less)[name] == _in_force(dict(usual) | own)[name]:
                    own = less
            return own

        return {label: settings(label) for label in self.arms}

    def _every_setting(self, label: str) -> dict[str, Any]:
        """Return the options of an arm by name, defaults included."""
        every = self.defaults | {name: getattr(self, name) for name in SHARED} | self.arms[label]
        return every | _in_force(every)


def _defaults() -> dict[str, Any]:
    """Return the defaults of the options that are an arm's own."""
    return {
        name: _plain(option.default)
        for name, option in SpecGuardOptions.model_fields.items()
        if name not in UNRECORDED and name not in SHARED
    }


def _in_force(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return an arm's options of `BY_METHOD`, None where they mean nothing to it."""
    method = str(options.get("decoder")).removesuffix("-majority")
    usual = {
        "threshold": usual_threshold(method),
        "patience": usual_patience(method.replace(ORACLE, SPECGUARD[0]), options.get("hand_back")),
    }
    return {
        name: None if method not in methods else _or(options.get(name), usual[name])
        for name, methods in BY_METHOD.items()
    }


def _or(value: Any, usual: Any) -> Any:
    return usual if value is None else value


def _earlier(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the settings of older versions lack."""
    software = {name: plain[name] for name in ("version", "python", "platform")}
    invocation = {"command": None, "cpu": None, **software}
    return {"only": "all", "invocations": [invocation], "judged_by": {}}


def _settings_of(arm: Arm, usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return what distinguishes an arm."""
    options = {name: _plain(getattr(arm.options, name)) for name in usual}
    settings = {name: value for name, value in options.items() if value != usual[name]}
    if arm.oracle:
        settings["decoder"] = ORACLE
    if arm.controls is not None:
        settings["controls"] = arm.controls
    return settings


def _plain(value: Any) -> Any:
    """Return a setting as one of JSON's own types: of what is none of them, what tells it apart."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Engine):
        return value.name
    if callable(value):
        return str(getattr(value, "name", getattr(value, "__qualname__", type(value).__name__)))
    digest = blake2b(repr(value).encode(), digest_size=6).hexdigest()
    return f"{type(value).__name__} {digest}"
