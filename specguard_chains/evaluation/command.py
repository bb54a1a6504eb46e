"""The command that a run can be had by, put together from its settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from shlex import join
from typing import Any

from specguard_chains.errors import SpecGuardError
from specguard_chains.evaluation.arms import GREEDY, parse_arms
from specguard_chains.evaluation.problems import Half
from specguard_chains.evaluation.settings import SHARED, RunSettings
from specguard_chains.evaluation.wording import without_folders
from specguard_chains.options import SpecGuardOptions

OF_ARMS = ("decoder", "controls")
TEMPERATURE = "temperature"


def command_of(settings: RunSettings, counts: Mapping[str, int]) -> str | None:
    """Return the commands of a run, one for each number of problems; None if it cannot be told.

    That is so if commands with different settings have added to it. The commands are read again to
    be sure that they mean these settings. Folders of this machine are not in them.

    Args:
        settings: Of the run.
        counts: How many problems of each data set have been attempted.
    """
    settings = settings.told_today()
    for shared in _candidates(settings):
        arms = _listing(settings, shared)
        read = _read(settings, shared, arms)
        if read is not None and read.arms == settings.arms:
            flags = [*flags_of(shared), "--seed", str(settings.seed)]
            rest = _joined(["--decoders", arms]), _joined(flags)
            return "\n".join(
                " \\\n  ".join([_joined(_begin(limit, counts, settings.only)), *rest])
                for limit in dict.fromkeys(counts.values())
            )
    return None


def _candidates(settings: RunSettings) -> Iterator[dict[str, Any]]:
    """Yield what may have been set for all arms: what all have, the temperature perhaps."""
    first, *others = settings.arms.values() or [{}]
    common = {
        name: value
        for name, value in first.items()
        if name not in OF_ARMS and all(arm.get(name) == value for arm in others)
    }
    usual = SpecGuardOptions.model_fields
    models = {name: value for name in SHARED if (value := getattr(settings, name)) is not None}
    models = {k: v for k, v in models.items() if v != usual[k].default}
    yield models | {name: value for name, value in common.items() if name != TEMPERATURE}
    yield models | common


def _listing(settings: RunSettings, shared: Mapping[str, Any]) -> str:
    """Return the arms as `--decoders` has them, by their labels alone where these say it all."""
    arms = settings.arms
    spelled = {label: _spelled(label, arms, shared) for label in arms}
    words = {label: label if _is_wording(label, arms[label]) else spelled[label] for label in arms}
    # An arm may be called as its decoder and have other settings than that has by default.
    for controls in (False, True):  # which have the settings of what they control
        read = _read(settings, shared, ",".join(words.values()))
        for label, arm in arms.items():
            if ("controls" in arm) == controls and (read is None or read.arms.get(label) != arm):
                words[label] = spelled[label]
    return ",".join(words.values())


def _is_wording(label: str, arm: Mapping[str, Any]) -> bool:
    """Whether a label may be what an arm was written as."""
    return _name(arm) in (label, re.split(r":(?=\w+=)", label)[0])


def _name(arm: Mapping[str, Any]) -> str:
    decoder, controlled = arm.get("decoder", "specguard"), arm.get("controls")
    return decoder if controlled is None else f"{decoder}@{controlled}"


def _spelled(label: str, arms: Mapping[str, Mapping[str, Any]], shared: Mapping[str, Any]) -> str:
    """Return an arm with its label and the settings that are its own."""
    arm = arms[label]
    decoder, controlled = arm.get("decoder", "specguard"), arm.get("controls")
    implied = dict(shared)
    if controlled is not None:
        implied[TEMPERATURE] = arms.get(controlled, {}).get(TEMPERATURE)
    elif decoder in GREEDY:
        implied.setdefault(TEMPERATURE, 0.0)
    own = {option: value for option, value in arm.items() if implied.get(option) != value}
    settings = [
        f":{option}={_text(value)}"
        for option, values in own.items()
        if option not in OF_ARMS
        for value in _each(values)
    ]
    return f"{label}={_name(arm)}{''.join(settings)}"


def _read(settings: RunSettings, shared: Mapping[str, Any], arms: str) -> RunSettings | None:
    """Return what a list of arms means; None if it means nothing, or other shared settings."""
    try:
        options = SpecGuardOptions(**shared, seed=settings.seed)
        read = RunSettings.of(options, parse_arms(arms, options), settings.data, settings.seed)
    except (SpecGuardError, ValueError):
        return None
    same = all(getattr(read, name) == getattr(settings, name) for name in SHARED)
    return read.told_today() if same else None


def _begin(limit: int, counts: Mapping[str, int], only: Half) -> Iterator[str]:
    yield from ("specguard", "bench")
    for name, count in counts.items():
        if count == limit:
            yield from ("--data", name)
    if only != "all":
        yield from ("--only", only)
    yield from ("--limit", str(limit), "--out", "folder")


def flags_of(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of options as commands take them."""
    for name, values in options.items():
        flag = name.replace("_", "-")
        if isinstance(values, bool):
            yield f"--{flag}" if values else f"--no-{flag}"
            continue
        for value in _each(values):
            yield from (f"--{flag}", _text(value))


def _joined(words: Iterable[str]) -> str:
    return join(map(without_folders, words))


def _each(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]


def _text(value: Any) -> str:
    return str(value).replace("\n", r"\n").replace("\t", r"\t")
