"""The plan of a pair: predictions, what to take, and what pairs of other ratios would gain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from specguard_chains.errors import ConfigurationError
from specguard_chains.planning.advice import advise
from specguard_chains.planning.costs import PairCosts
from specguard_chains.planning.from_results import Check
from specguard_chains.planning.model import pays_from, predict
from specguard_chains.planning.settings import Setting, Workload

RATIOS = (3.0, 5.0, 10.0, 20.0)
"""Of a token of the target to one of the draft, in time."""

NEAR = 0.1
"""Ratios this near to the pair's own are left out, as a share of it."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Row(_Record):
    """What an answer takes in a setting."""

    setting: Setting
    seconds: float
    draft_s: float
    target_s: float
    token_ms: float
    """A token of the answer."""
    ratio: float
    """To the target alone."""
    all_accepted_s: float | None
    """The bound: nothing is rejected. None where nothing is judged."""
    none_accepted_s: float | None
    pays_from: float | None
    """Acceptance of steps, independently of each other, from which it beats the target alone; None
    if there is none, or nothing is judged."""


class AtRatio(_Record):
    """Time ratios to the target alone, if the draft were cheaper or dearer."""

    ratio: float
    """Of a token of the target to one of the draft."""
    measured: bool
    """Whether it is this pair's own ratio."""
    by_setting: dict[str, float]


class Plan(_Record):
    """What is to be expected of a pair, and what it rests on."""

    costs: PairCosts
    workload: Workload
    rows: tuple[Row, ...]
    recommended: str
    """Label of a setting."""
    reason: str
    at_ratios: tuple[AtRatio, ...]
    checks: tuple[Check, ...] = ()
    """Recorded times beside those that the costs amount to."""
    notes: tuple[str, ...] = ()
    """What is assumed, and what is not known."""

    def save(self, path: Path) -> None:
        """Write the plan to a file."""
        path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")


def plan(
    costs: PairCosts,
    settings: Sequence[Setting],
    workload: Workload,
    *,
    checks: Sequence[Check] = (),
    notes: Sequence[str] = (),
) -> Plan:
    """Return the plan for settings, of which one must be the target alone.

    Raises:
        ConfigurationError: None is, or what one of them costs is not known.
    """
    predictions = [predict(setting, workload, costs) for setting in settings]
    advice = advise(predictions, workload, costs)
    alone = next(each.total_s for each in predictions if each.setting.method == "target")
    rows = [
        Row(
            setting=each.setting,
            seconds=each.total_s,
            draft_s=each.seconds.draft,
            target_s=each.seconds.target,
            token_ms=each.token_ms,
            ratio=each.total_s / alone,
            all_accepted_s=each.all_accepted_s,
            none_accepted_s=each.none_accepted_s,
            pays_from=pays_from(each.setting, workload, costs) if each.setting.judges else None,
        )
        for each in predictions
    ]
    return Plan(
        costs=costs,
        workload=workload,
        rows=tuple(rows),
        recommended=advice.best.setting.label,
        reason=advice.reason,
        at_ratios=tuple(at_ratios(costs, settings, workload)),
        checks=tuple(checks),
        notes=tuple(notes),
    )


def at_ratios(
    costs: PairCosts,
    settings: Sequence[Setting],
    workload: Workload,
    ratios: Sequence[float] = RATIOS,
) -> list[AtRatio]:
    """Return time ratios at this pair's cost ratio and at others, at the same acceptance."""
    found = []
    others = [ratio for ratio in ratios if abs(ratio / costs.ratio - 1) > NEAR]
    for ratio in sorted([costs.ratio, *others]):
        here = costs.at_ratio(ratio)
        seconds = {each.label: predict(each, workload, here).total_s for each in settings}
        alone = next(seconds[each.label] for each in settings if each.method == "target")
        found.append(
            AtRatio(
                ratio=ratio,
                measured=ratio == costs.ratio,
                by_setting={label: each / alone for label, each in seconds.items()},
            )
        )
    return found


def load_costs(path: Path) -> PairCosts:
    """Return the costs that a plan's file holds.

    Raises:
        ConfigurationError: It cannot be read, or is no plan.
    """
    try:
        return Plan.model_validate_json(path.read_text(encoding="utf-8")).costs
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path} does not hold a plan with costs ({error}); write one with "
            "`specguard plan --out`"
        ) from error
