"""Arms of an evaluation: a decoder with its settings under a label, as `--decoders` lists them.

    target,draft,specguard:num_candidates=8,conf=specguard:doubt_margin=1,random@conf

An arm is [label=]name[:option=value]..., its label by default all of that. `random@X` and
`length@X` are controls: they draft as arm X does, and accept as many of the steps as X, but at
random or by length alone (see `controls`). `oracle` accepts a step if the target, going on from it,
still reaches the right answer: what a perfect verifier could do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, get_args, get_origin

from specguard_chains.assembly import assemble
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.errors import ConfigurationError, EvaluationError
from specguard_chains.evaluation.checking import AnswerChecker
from specguard_chains.evaluation.problems import Problem, prompt_for
from specguard_chains.options import (
    SPECGUARD,
    DecoderName,
    SpecGuardOptions,
    drafts_one_first,
)
from specguard_chains.parameters import checked_names, typed_errors

ORACLE = "oracle"
RANDOM, LENGTH = "random", "length"
CONTROLS = (RANDOM, LENGTH)
GREEDY = frozenset(
    {
        *("target", "draft", "speculative", "rsd", "specreason", "specguard-greedy"),
        *(RANDOM, LENGTH, ORACLE),
    }
)
"""Run at temperature 0 unless one is given; the others live on variety."""
ONE_CANDIDATE = ("rsd", "specreason", "specguard-greedy")
"""Draft one candidate, whatever the option says."""
CHOOSES = ("-majority", "-best-of-n")
"""Ends of the names of decoders that choose among answers."""
JUDGES_NOTHING = ("target", "draft", "speculative", *CHOOSES)
"""Ends of the names of decoders whose steps have no acceptance rate to match."""

Assemble = Callable[[SpecGuardOptions], Decoder]
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Arm:
    """A decoder that takes part in an evaluation."""

    label: str
    options: SpecGuardOptions
    controls: str | None = None
    """Label of the arm whose acceptance rate this one is matched to."""
    oracle: bool = False

    @property
    def same_for_all(self) -> bool:
        """Whether one decoder solves all problems."""
        return self.controls is None and not self.oracle

    def decoder_for(
        self,
        problem: Problem,
        checker: AnswerChecker,
        *,
        matched: Mapping[str, Any] = NOTHING,
        make: Assemble = assemble,
    ) -> Decoder:
        """Return what solves a problem.

        Args:
            problem: The oracle knows its answer.
            checker: By which the oracle compares.
            matched: Options of a control, as `controls.matched` says.
            make: Assembles a decoder.
        """
        decoder = make(self.options.model_copy(update=dict(matched)))
        if not self.oracle:
            return decoder
        from specguard_chains.evaluation.labels import OracleVerifier

        assert isinstance(decoder, SpecGuardDecoder)
        return replace(decoder, verifier=OracleVerifier(problem, checker))

    def request(self, problem: Problem, seed: int) -> Request:
        """Return what the decoder is asked."""
        return Request(
            prompt_for(problem),
            self.options.sampling(),
            max_tokens=self.options.max_tokens,
            stop=tuple(self.options.stop or ()),
            seed=seed,
            critical_steps=self.options.critical_steps,
        )


def parse_arms(text: str, shared: SpecGuardOptions) -> tuple[Arm, ...]:
    """Return the arms of a list such as the module's docstring shows.

    Args:
        text: The list.
        shared: Settings of all arms that do not set them otherwise.

    Raises:
        EvaluationError: An arm, an option or a value does not exist; the message names it.
    """
    wordings = [_Wording.read(part.strip()) for part in text.split(",") if part.strip()]
    if not wordings:
        raise EvaluationError("no decoders; give at least one, such as target,specguard-greedy")
    arms: dict[str, Arm] = {}
    for wording in sorted(wordings, key=lambda wording: wording.is_control):  # controls know theirs
        if wording.label in arms:
            raise EvaluationError(
                f"two arms are called {wording.label!r}; give one of them a label of its own, such "
                f"as second={wording.name}"
            )
        build = _control if wording.is_control else _arm
        arms[wording.label] = build(wording, shared, arms)
    return tuple(arms[wording.label] for wording in wordings)


@dataclass(frozen=True, slots=True)
class _Wording:
    """An arm as it is written."""

    label: str
    name: str
    settings: tuple[str, ...]
    """Each an option=value."""

    @classmethod
    def read(cls, text: str) -> _Wording:
        head, *settings = re.split(r":(?=\w+=)", text)  # a value may have colons, as URLs do
        label, has_label, name = head.partition("=")
        return cls(label if has_label else text, name if has_label else head, tuple(settings))

    @property
    def is_control(self) -> bool:
        return "@" in self.name


def _arm(wording: _Wording, shared: SpecGuardOptions, known: Mapping[str, Arm]) -> Arm:
    """Return an arm that stands for itself."""
    names = (*get_args(DecoderName), ORACLE)
    if wording.name not in names:
        raise EvaluationError(
            f"arm {wording.label!r}: there is no decoder {wording.name!r}; there are "
            f"{', '.join(names)}, and {RANDOM}@X and {LENGTH}@X for another arm X"
        )
    oracle = wording.name == ORACLE
    given = _given(shared) | _read_settings(wording.label, wording.settings)
    if wording.name in GREEDY:
        given = {"temperature": 0.0} | given
    if oracle:  # it judges every step, and by no signal of theirs
        given = {"patience": 0, "verify_with": "draft"} | given | {"max_slowdown": None}
    given["decoder"] = "specguard-greedy" if oracle else wording.name
    return Arm(wording.label, _options(wording.label, given), oracle=oracle)


def _control(wording: _Wording, shared: SpecGuardOptions, known: Mapping[str, Arm]) -> Arm:
    """Return a control, which has the settings of the arm that it controls."""
    name, _, reference = wording.name.partition("@")
    if name not in CONTROLS:
        raise EvaluationError(
            f"arm {wording.label!r}: {name!r} is no control; there are {' and '.join(CONTROLS)}"
        )
    controlled, own = _resolve(wording, reference, known)
    if controlled.options.decoder.endswith(JUDGES_NOTHING):
        raise EvaluationError(
            f"arm {wording.label!r}: {controlled.label!r} does not judge steps, so that there is "
            "no acceptance rate to match"
        )
    if controlled.options.method in SPECGUARD and controlled.options.max_slowdown is not None:
        raise EvaluationError(
            f"arm {wording.label!r}: when {controlled.label!r} drafts is told by the clock "
            "(max_slowdown), which no control can do as often; control an arm without"
        )
    if _drafts_more_in_doubt(controlled.options):
        raise EvaluationError(
            f"arm {wording.label!r}: {controlled.label!r} drafts further candidates of a step that "
            "it doubts, which a control, that doubts none, cannot do as often; control an arm with "
            "doubt_margin=1, which always drafts all"
        )
    if name == LENGTH and draft_alone(known.values()) is None:
        raise EvaluationError(
            f"arm {wording.label!r} needs the lengths of the draft's steps; add the arm draft"
        )
    given = _given(controlled.options) | {
        "decoder": name,
        "temperature": controlled.options.sampling().temperature,
    }
    if (pacing := controlled.options.pacing()) is not None:  # pauses as often at the same rate
        given["patience"] = pacing.rejections
    if controlled.options.method in ONE_CANDIDATE:
        given |= {"num_candidates": 1, "num_target_candidates": 1}
    given |= _read_settings(wording.label, own)
    return Arm(wording.label, _options(wording.label, given), controls=controlled.label)


def _drafts_more_in_doubt(options: SpecGuardOptions) -> bool:
    return (
        options.method in SPECGUARD
        and not options.sampling().greedy
        and drafts_one_first(
            options.num_candidates, options.doubt_margin, options.target_confidence
        )
    )


def _resolve(
    wording: _Wording, reference: str, known: Mapping[str, Arm]
) -> tuple[Arm, tuple[str, ...]]:
    """Return the arm that a control names, and the control's own settings.

    The settings in a label look like those that may follow it: the longest label is meant.
    """
    for end in range(len(wording.settings), -1, -1):
        label = ":".join([reference, *wording.settings[:end]])
        if label in known and known[label].controls is None:
            return known[label], wording.settings[end:]
    labels = ", ".join(arm.label for arm in known.values() if arm.controls is None)
    raise EvaluationError(
        f"arm {wording.label!r}: there is no arm {reference!r} to control; there are: {labels}"
    )


def draft_alone(arms: Sequence[Arm] | Any) -> Arm | None:
    """Return the arm in which the draft writes alone, if there is one."""
    return next((arm for arm in arms if arm.options.decoder == "draft"), None)


def _given(options: SpecGuardOptions) -> dict[str, Any]:
    """Return the options that somebody has set."""
    return {name: getattr(options, name) for name in options.model_fields_set}


def _read_settings(label: str, settings: Sequence[str]) -> dict[str, Any]:
    """Return options by name; one that is a list takes a value each time that it is given."""
    read: dict[str, Any] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name in ("seed", "decoder"):
            raise EvaluationError(f"arm {label!r}: {name} cannot be set by an arm")
        if name == "api_key":  # results would hold it: in the label and in the command
            arm = label.split(":api_key=")[0]
            raise EvaluationError(f"arm {arm!r}: set the environment's OPENAI_API_KEY, not api_key")
        if name == "step_delimiter":
            value = value.replace(r"\n", "\n").replace(r"\t", "\t")
        if _is_list(name):
            read.setdefault(name, []).append(value)
        elif name in read:
            raise EvaluationError(f"arm {label!r}: {name} is given twice")
        else:
            read[name] = value
    return read


def _is_list(name: str) -> bool:
    field = SpecGuardOptions.model_fields.get(name)
    kinds = () if field is None else (field.annotation, *get_args(field.annotation))
    return any(get_origin(kind) is list for kind in kinds)


def _options(label: str, given: Mapping[str, Any]) -> SpecGuardOptions:
    """Return validated options."""
    try:
        with typed_errors():
            options = SpecGuardOptions(**checked_names(given, SpecGuardOptions.model_fields))
    except ConfigurationError as error:
        raise EvaluationError(f"arm {label!r}: {error}") from error
    sampling = options.sampling()
    if options.decoder.endswith(CHOOSES) and sampling.greedy and options.num_samples > 1:
        raise EvaluationError(
            f"arm {label!r}: with temperature={sampling.temperature} and top_k={sampling.top_k} "
            f"its {options.num_samples} answers would be the same; give it variety, as in "
            f"{options.decoder}:temperature=0.7, or num_samples=1"
        )
    return options
