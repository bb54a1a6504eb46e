"""Predicting the time of an answer from the costs of passes and from how verification goes.

A model alone takes read(P) of its prompt of P tokens and A times decode(1) for A tokens.
Speculative decoding takes A / e passes at e tokens a pass: gamma passes of the draft and
verify(gamma + 1) of the target each. That its draft is asked less after rejections (`adaptive`) is
in gamma and e if they come from recorded runs. What methods that judge steps take is in `judging`.

Neglected: that candidates differ in length, so that the longest takes more passes; the selection
among them, reward models and value heads; contexts longer or shorter than the one that was measured
at; and everything outside of the engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from specguard_chains.decoding.steps import Source
from specguard_chains.errors import ConfigurationError
from specguard_chains.planning.costs import Kind, PairCosts
from specguard_chains.planning.judging import judging_work
from specguard_chains.planning.settings import Setting, Speculating, Workload
from specguard_chains.planning.work import (
    Passes,
    Seconds,
    Work,
    decode,
    proposing,
    read,
    seconds_of,
)

T = TypeVar("T")
SEARCH_STEPS = 40
"""Halvings of [0, 1] in which an acceptance is found."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What an answer takes in a setting."""

    setting: Setting
    seconds: Seconds
    all_accepted_s: float | None
    """The bound: nothing is rejected. None where nothing is judged."""
    none_accepted_s: float | None
    tokens: float
    """Of the answer."""

    @property
    def total_s(self) -> float:
        """Seconds of the answer."""
        return self.seconds.total

    @property
    def token_ms(self) -> float:
        """Milliseconds a token of the answer."""
        return 1000 * self.total_s / self.tokens


def predict(setting: Setting, workload: Workload, costs: PairCosts) -> Prediction:
    """Return what an answer is expected to take.

    Raises:
        ConfigurationError: What a part of it costs is not known, or how verification goes.
    """

    def seconds(at: Setting) -> Seconds:
        return seconds_of(work_of(at, workload, costs), costs)

    def bound(rate: float) -> float | None:
        if not setting.judges or setting.acceptance is None:
            return None
        return seconds(accepting(setting, rate, untouched=rate)).total

    return Prediction(setting, seconds(setting), bound(1.0), bound(0.0), workload.answer_tokens)


def accepting(setting: Setting, rate: float, *, untouched: float | None = None) -> Setting:
    """Return a setting with another acceptance rate; everything else goes as before."""
    assert setting.acceptance is not None
    change = {"rate": rate, "untouched": untouched}
    acceptance = setting.acceptance.model_copy(update=change)
    return setting.model_copy(update={"acceptance": acceptance})


def pays_from(setting: Setting, workload: Workload, costs: PairCosts) -> float | None:
    """Return the acceptance rate from which a setting is faster than the target alone.

    Steps being accepted independently of each other. None if no acceptance suffices.
    """
    alone = predict(Setting(label="target", method="target"), workload, costs).total_s

    def pays(rate: float) -> bool:
        at = accepting(setting, rate)
        return seconds_of(work_of(at, workload, costs), costs).total < alone

    if not pays(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def work_of(setting: Setting, workload: Workload, costs: PairCosts) -> Work:
    """Return the passes that an answer is expected to take."""
    if setting.method in ("target", "draft"):
        return _alone(Source(setting.method), workload)
    if setting.method == "speculative":
        if not costs.can_speculate:
            raise ConfigurationError(
                f"{setting.label} needs logits of both models and one vocabulary, which "
                f"{costs.draft.engine} and {costs.target.engine} do not have; leave it out"
            )
        return _speculative(_known(setting.speculating, setting), workload)
    acceptance = _known(setting.acceptance, setting)
    if not costs.target.logits:  # what is right of a step is not computed in blocks
        acceptance = acceptance.model_copy(update={"salvaged": 0.0})
    return judging_work(setting, acceptance, workload)


def _alone(source: Source, workload: Workload) -> Work:
    passes = (read(workload.prompt_tokens), decode(workload.answer_tokens))
    if source is Source.DRAFT:
        return Work(draft=passes, draft_calls=workload.steps)
    return Work(target=passes, target_calls=workload.steps)


def _speculative(speculating: Speculating, workload: Workload) -> Work:
    passes = workload.answer_tokens / speculating.tokens_per_pass
    return Work(
        draft=proposing(workload.prompt_tokens, speculating.pending, speculating.drafted, passes),
        target=(
            read(workload.prompt_tokens),
            Passes(Kind.VERIFY, speculating.drafted + 1, passes),
        ),
    )


def _known(value: T | None, setting: Setting) -> T:
    if value is None:
        raise ConfigurationError(
            f"{setting.label}: nothing is said of how many of its tokens or steps are accepted; "
            "set acceptance or speculating"
        )
    return value
