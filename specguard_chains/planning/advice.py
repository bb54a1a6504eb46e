"""Which setting to take, and why: the fastest, and the target alone where nothing is faster.

Time is all that is looked at. The draft alone is never advised: nothing checks what it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specguard_chains.decoding.steps import Source
from specguard_chains.errors import ConfigurationError
from specguard_chains.planning.costs import Kind, PairCosts
from specguard_chains.planning.model import Prediction, pays_from
from specguard_chains.planning.settings import Setting, Workload
from specguard_chains.planning.work import LOOK


@dataclass(frozen=True, slots=True)
class Advice:
    """What to take."""

    best: Prediction
    reason: str
    """One sentence."""


def advise(predictions: Sequence[Prediction], workload: Workload, costs: PairCosts) -> Advice:
    """Return the setting to take. The target alone must be among the predictions.

    Raises:
        ConfigurationError: It is not.
    """
    alone = next((each for each in predictions if each.setting.method == "target"), None)
    if alone is None:
        raise ConfigurationError("there is nothing to compare with: predict the target alone too")
    rivals = [each for each in predictions if each.setting.method not in ("target", "draft")]
    best = min(rivals, key=lambda each: each.total_s, default=alone)
    if best.total_s >= alone.total_s:
        return Advice(alone, _why_not(rivals, workload, costs))
    if best.setting.speculating is not None:
        return Advice(best, _why_speculate(best.setting, costs))
    return Advice(best, _why_draft(best.setting, workload, costs))


def _why_not(rivals: Sequence[Prediction], workload: Workload, costs: PairCosts) -> str:
    judging = [each for each in rivals if each.setting.judges]
    if not judging:
        return "nothing else is faster"
    setting = min(judging, key=lambda each: each.total_s).setting
    drafted, later_read, written = _token_ms(setting, workload, costs)
    price = _price(setting, drafted, later_read, written)
    rate = pays_from(setting, workload, costs)
    if drafted + later_read < written:
        if rate is None:
            return f"{price}, which saves less than rejected steps cost, at any acceptance"
        return f"{price}: drafting pays from {rate:.0%} of accepted steps on"
    if setting.verify_with == "target":  # no answer goes without it
        return f"{price}: drafting saves no time"
    untouched = f"{price}: drafting pays only in answers that the target never touches"
    if rate is None:
        return untouched
    return f"{untouched}, of which there are enough from {rate:.0%} of accepted steps on"


def _why_draft(setting: Setting, workload: Workload, costs: PairCosts) -> str:
    price = _price(setting, *_token_ms(setting, workload, costs))
    assert setting.acceptance is not None
    rate, untouched = setting.acceptance.rate, setting.acceptance.untouched
    if untouched is None:
        untouched = setting.acceptance.of_drafted**workload.steps
    return (
        f"{price}; {rate:.0%} of the steps are accepted, {untouched:.0%} of the answers as a whole"
    )


def _why_speculate(setting: Setting, costs: PairCosts) -> str:
    speculating = setting.speculating
    assert speculating is not None
    block = speculating.drafted + 1
    verified = 1000 * costs.target.seconds(Kind.VERIFY, block)
    drafted = 1000 * speculating.drafted * costs.draft.token_s
    alone = 1000 * speculating.tokens_per_pass * costs.target.token_s
    return (
        f"{speculating.tokens_per_pass:.1f} tokens at a time take {drafted:.0f} ms to draft and "
        f"{verified:.0f} ms to verify, and {alone:.0f} ms one by one; the text stays the target's"
    )


def _token_ms(setting: Setting, workload: Workload, costs: PairCosts) -> tuple[float, float, float]:
    """Return milliseconds of a drafted token, of reading it, and of one of the target."""
    reads = setting.attention_of
    draft = costs.of(Source.DRAFT, attention=reads == "draft")
    target = costs.of(Source.TARGET, attention=reads == "target")
    step = workload.answer_tokens / workload.steps
    kind = Kind.VERIFY if setting.verify_with == "target" else Kind.READ
    if setting.looks:
        step = min(step, LOOK)
    return (
        1000 * draft.decode.at(setting.drafted_candidates or setting.candidates),
        1000 * target.seconds(kind, step) / step,
        1000 * costs.target.token_s,
    )


def _price(setting: Setting, drafted: float, read: float, written: float) -> str:
    how = "judged" if setting.verify_with == "target" else "later read"
    return (
        f"a drafted and {how} token takes {drafted:.0f} + {read:.0f} ms, one that the "
        f"target writes alone {written:.0f} ms"
    )
