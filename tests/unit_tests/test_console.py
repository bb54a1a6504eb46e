"""What people see of steps, metrics and downloads."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from specguard_chains.console import ConsoleStepHandler, fetch_progress, print_metrics, print_step
from specguard_chains.decoding.steps import Source, Step, StepSeconds, StepTokens, Verdict
from specguard_chains.metrics import Metrics
from tests.unit_tests import toy_chat


def step(**changes: Any) -> Step:
    values: dict[str, Any] = {
        "number": 1,
        "text": "2 + 2 = 4.\n\n",
        "source": Source.DRAFT,
        "verdict": Verdict.ACCEPTED,
        "score": 0.834,
        "confidence": -0.42,
        "grounding": 0.31,
        "threshold": 0.7,
        "rejected_early": False,
        "num_candidates": 4,
        "chosen": 0,
        "candidates": (),
        "tokens": StepTokens(drafted=32, kept=8, draft_read=20, target_reused=7),
        "seconds": StepSeconds(draft=1.5, verify=0.25),
        "span": (0, 12),
        "answer_tokens": 8,
    }
    return Step(**(values | changes))


def console(width: int = 80, **settings: Any) -> Console:
    return Console(file=io.StringIO(), width=width, highlight=False, **settings)


def shown(at: Console) -> str:
    assert isinstance(at.file, io.StringIO)
    return at.file.getvalue()


def printed(one: Step, width: int = 80) -> str:
    at = console(width)
    print_step(at, one.to_dict())
    return shown(at)


REJECTED = {"source": Source.TARGET, "verdict": Verdict.REJECTED, "score": 0.412}


def test_an_accepted_step_is_one_line_and_its_text() -> None:
    assert printed(step()).splitlines() == [
        "[1] draft  accepted  score 0.83 ≥ 0.70  conf -0.42  ground 0.31  1.8 s",
        "2 + 2 = 4.",
        "",
    ]


def test_a_wide_terminal_names_the_signals_in_full() -> None:
    assert "confidence -0.42  grounding 0.31" in printed(step(), width=120)


def test_a_rejected_step_says_who_wrote_it_instead() -> None:
    assert printed(step(**REJECTED)).startswith("[1] target  draft rejected  score 0.41 < 0.70")


def test_after_early_rejection_only_a_bound_of_the_score_is_known() -> None:
    assert "score ≤0.41 < 0.70" in printed(step(**REJECTED, rejected_early=True))


def test_an_unverified_step_has_no_verdict() -> None:
    nothing = dict.fromkeys(("score", "confidence", "grounding", "threshold"))
    one = step(verdict=Verdict.UNVERIFIED, source=Source.TARGET, **nothing)
    assert printed(one).startswith("[1] target  1.8 s\n")


def test_a_value_is_shown_where_there_is_one() -> None:
    assert "ground 0.31  value 0.88\n" in printed(step(value=0.875))
    assert "grounding 0.31  value 0.88" in printed(step(value=0.875), width=120)
    older = step().to_dict()
    del older["value"]
    at = console()
    print_step(at, older)
    assert shown(at) == printed(step())


def test_without_attention_no_grounding_is_shown() -> None:
    assert "ground" not in printed(step(grounding=None))


@pytest.mark.parametrize("width", [80, 96, 120])
def test_the_longest_usual_line_fits(width: int) -> None:
    one = step(number=12, **REJECTED, rejected_early=True, confidence=-3.21)
    assert len(printed(one, width).splitlines()) == 3


@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_narrow_terminal_gets_whole_facts_on_more_lines(width: int) -> None:
    facts = printed(step(), width).split("2 + 2")[0].splitlines()
    assert len(facts) > 1
    assert all(len(line) <= max(width, 30) for line in facts)
    assert " ".join(" ".join(facts).split()) == (
        "[1] draft accepted score 0.83 ≥ 0.70 conf -0.42 ground 0.31 1.8 s"
    )
    assert any("score 0.83 ≥ 0.70" in line for line in facts)


def test_a_terminal_without_unicode_gets_ascii() -> None:
    at = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=80)
    print_step(at, step().to_dict())
    at.file.seek(0)
    assert "score 0.83 >= 0.70" in at.file.read()


@pytest.mark.parametrize("text", ["[bold]x[/bold]", "[/]", r"\[x] = \boxed{4}", ":smile: `a`"])
def test_the_text_of_a_model_is_no_markup(text: str) -> None:
    assert text in printed(step(text=text))


def test_a_model_cannot_send_commands_to_the_terminal() -> None:
    assert printed(step(text="a\x1b[2Jb\x07c\x9bd\r\te")).splitlines()[1].split() == [
        "a[2Jbcd",
        "e",
    ]


def test_a_pipe_gets_long_lines_as_they_are() -> None:
    assert "word " * 50 in printed(step(text="word " * 50 + "end"))


def test_a_terminal_gets_long_lines_wrapped_between_words() -> None:
    at = console(force_terminal=True, color_system=None)
    print_step(at, step(text="word " * 50 + "end").to_dict())
    assert all(set(line.split()) <= {"word", "end"} for line in shown(at).splitlines()[1:])


def test_metrics_say_who_wrote_what_in_which_time() -> None:
    steps = [step(), step(**REJECTED, number=2, seconds=StepSeconds(draft=0.5, target=1.75))]
    at = console(width=100)
    print_metrics(at, Metrics.of(steps).to_dict(), output_tokens=16)
    assert shown(at).splitlines() == [
        "2 steps: 1 by draft, 1 by target  50% accepted  16 tokens in 4.0 s  4.0 tokens/s",
        "draft 2.0 s  verify 0.2 s  target 1.8 s  draft read 40 tokens, reused 0",
        "    target read 0 tokens, reused 14",
    ]


def test_the_time_of_choosing_is_part_of_the_whole() -> None:
    at = console(width=100)
    one = step(seconds=StepSeconds(draft=1.0, select=0.5))
    print_metrics(at, Metrics.of([one]).to_dict(), output_tokens=3)
    assert "3 tokens in 1.5 s  2.0 tokens/s" in shown(at)
    assert "draft 1.0 s  select 0.5 s" in shown(at)


def test_metrics_of_nothing() -> None:
    at = console()
    print_metrics(at, Metrics.of(()).to_dict(), output_tokens=0)
    assert shown(at) == "no steps  0 tokens in 0.0 s\n"


def test_metrics_warn_of_fallback_bounds() -> None:
    at = console()
    print_metrics(at, Metrics.of([step()]).to_dict() | {"calibrated": False}, output_tokens=8)
    assert "not calibrated" in shown(at)


def test_no_download_shows_no_bar() -> None:
    at = console()
    with fetch_progress(at):
        pass
    assert shown(at) == ""


def test_a_download_shows_bytes_and_rate() -> None:
    at = console(force_terminal=True)
    with fetch_progress(at) as progress:
        progress(0, 0, "waiting for another process")
        for done in (10_000_000, 50_000_000, 100_000_000):
            progress(done, 100_000_000, "fetching model.gguf")
    assert "100.0/100.0 MB" in shown(at)
    assert "fetching model.gguf" in shown(at)


def test_a_handler_prints_each_step_as_it_comes() -> None:
    out = console(120)
    toy_chat.pair().invoke("hi", {"callbacks": [ConsoleStepHandler(out)]})
    printed = text_of(out)
    assert "[1] draft" in printed
    assert "[2] target  draft rejected" in printed
    assert printed.index("One a.") < printed.index("Dos b.") < printed.index("Three c.")


def test_a_step_that_was_not_drafted_says_so() -> None:
    out = console()
    print_step(out, step(paused=True, verdict=Verdict.UNVERIFIED, score=None).to_dict())
    assert "not drafted for now" in text_of(out)


def test_a_critical_step_is_named_one() -> None:
    out = console(120)
    print_step(out, step(critical=True, verdict=Verdict.UNVERIFIED, score=None).to_dict())
    assert "critical" in text_of(out)


def text_of(out: Console) -> str:
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()
