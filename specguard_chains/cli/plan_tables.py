"""A plan as tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import ASCII, SIMPLE_HEAD
from rich.table import Table

from specguard_chains.cli.streams import OUT
from specguard_chains.planning.costs import PairCosts
from specguard_chains.planning.plan import Plan, Row

COSTS = ("", "one token", "4 candidates", "64 read", "8 verified")
CHECKS = ("arm", "answers", "measured", "by counts", "by the means")
SETTINGS = ("setting", "accepted", "seconds", "ms a token", "ratio", "if all", "if none", "pays")


def print_plan(made: Plan) -> None:
    """Print a plan: costs, settings, what to take, other ratios, and what all that rests on."""
    _print_costs(made.costs)
    _print_rows(made)
    alone = " alone" if made.recommended == "target" else ""
    OUT.print(f"fastest: {made.recommended}{alone}: {made.reason}.", style="bold", soft_wrap=True)
    OUT.print("This is about time only: `specguard bench` says how often answers are right.")
    _print_ratios(made)
    _print_checks(made)
    for note in made.notes:
        OUT.print(f"- {note}", soft_wrap=True)


def _print_costs(costs: PairCosts) -> None:
    machine = costs.machine
    threads = f"{machine.threads} threads" if machine.threads else f"{machine.cores} cores"
    OUT.print(
        f"measured in {machine.took_s:.0f} s on {machine.cpu}, {threads}, {machine.measured}",
        soft_wrap=True,
    )
    table = _table("milliseconds a pass", COSTS)
    for role in ("draft", "draft_with_attention", "target", "target_with_attention"):
        if (each := getattr(costs, role)) is None:
            continue
        passes = [each.decode.at(1), each.decode.at(4), each.read.at(64)]
        cells = [f"{1000 * seconds:.1f}" for seconds in passes]
        verified = "–" if each.verify is None else f"{1000 * each.verify.at(8):.1f}"
        table.add_row(role.replace("_", " "), *cells, verified)
    OUT.print(table)


def _print_rows(made: Plan) -> None:
    sizes = made.workload
    title = (
        f"an answer of {sizes.answer_tokens:.0f} tokens in steps of {sizes.step_tokens:.0f}, after "
        f"a prompt of {sizes.prompt_tokens:.0f}"
    )
    table = _table(title, SETTINGS)
    for row in made.rows:
        table.add_row(*_cells(row))
    OUT.print(table)
    OUT.print(
        "ratio: to the target alone. if all, if none: seconds if every step is accepted, or none "
        "is. pays: acceptance from which it is faster than the target alone."
    )


def _cells(row: Row) -> list[str]:
    setting = row.setting
    acceptance, speculating = setting.acceptance, setting.speculating
    accepted = "–"
    if acceptance is not None:
        accepted = f"{acceptance.rate:.0%}"
    elif speculating is not None:
        accepted = f"{speculating.tokens_per_pass:.1f} a pass"
    pays = (
        "–" if not setting.judges else "never" if row.pays_from is None else f"{row.pays_from:.0%}"
    )
    return [
        setting.label,
        f"{accepted}{'*' if setting.assumed and accepted != '–' else ''}",
        f"{row.seconds:.2f}",
        f"{row.token_ms:.1f}",
        f"{row.ratio:.2f}",
        *("–" if s is None else f"{s:.2f}" for s in (row.all_accepted_s, row.none_accepted_s)),
        pays,
    ]


def _print_ratios(made: Plan) -> None:
    names = [f"1:{each.ratio:.3g}{' (this)' if each.measured else ''}" for each in made.at_ratios]
    title = "time ratio to the target alone, by draft to target seconds a token"
    table = _table(title, ("setting", *names))
    for row in made.rows:
        label = row.setting.label
        table.add_row(label, *(f"{each.by_setting[label]:.2f}" for each in made.at_ratios))
    OUT.print(table)


def _print_checks(made: Plan) -> None:
    if not made.checks:
        return
    table = _table("recorded runs, seconds an answer", CHECKS)
    for each in made.checks:
        cells = (
            f"{seconds:.2f} ({each.deviation(seconds):+.0%})"
            for seconds in (each.counted_s, each.predicted_s)
        )
        table.add_row(each.arm, str(each.answers), f"{each.measured_s:.2f}", *cells)
    OUT.print(table)


def _table(title: str, columns: Sequence[str]) -> Table:
    box = ASCII if OUT.options.ascii_only else SIMPLE_HEAD
    table = Table(title=title, title_justify="left", box=box, padding=(0, 1, 0, 0))
    table.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table
