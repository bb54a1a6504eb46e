"""Recorded steps, their signals, and the table of what these are worth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specguard_chains.decoding.calibration import Bounds
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.rewards import ValueHead
from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation import signal_report
from specguard_chains.evaluation.lines import open_lines, read_lines
from specguard_chains.evaluation.problems import Problem, prompt_for
from specguard_chains.evaluation.recordings import Recorder, Recording, Written
from specguard_chains.evaluation.regression import splits
from specguard_chains.evaluation.signal_table import LabelledStep, fit, halves, table
from specguard_chains.evaluation.signals import (
    Place,
    ReadSignals,
    SignalReader,
    labelled,
    of_texts,
    read_signals,
)
from specguard_chains.evaluation.solutions import Sampler, Solutions, steps_of
from specguard_chains.evaluation.statistics import auroc
from specguard_chains.evaluation.threshold_table import Kept, threshold_table
from specguard_chains.evaluation.training import Examples, read_states, train, unseen_scores
from tests.toy_engine import END, ToyEngine, hidden_state, random_policy, scripted_policy

PROBLEM = Problem(id="p/1", question="What is one and one?", answer="2", data="p")


@dataclass
class Contains:
    """Takes an answer for right if it contains one of some words."""

    words: Sequence[str]

    def check(self, text: str, problem: Problem) -> Any:
        return SimpleNamespace(right=any(word in text for word in self.words))


def recorded(
    draft: Sequence[str], target: Sequence[str], right: Sequence[str], **settings: Any
) -> Recording:
    recorder = Recorder(
        ToyEngine(scripted_policy(*draft), name="draft"),
        ToyEngine(scripted_policy(*target), name="target"),
        Contains(right),  # type: ignore[arg-type]
        **settings,
    )
    return recorder.record(PROBLEM)


# Recording


def test_a_step_is_good_if_the_target_still_gets_there() -> None:
    recording = recorded(
        ["a\n\n", "b\n\n", "c"], ["A\n\n", "B\n\n", "C"], ["A\n\nB\n\nC", "a\n\nB\n\nC"]
    )
    assert [step.good for step in recording.steps] == [True, False, False]
    assert [step.drafted.text for step in recording.steps] == ["a\n\n", "b\n\n", "c"]
    assert [step.kept.text for step in recording.steps] == ["a\n\n", "B\n\n", "C"]
    assert recording.right
    assert not recording.own_right


def test_what_the_target_would_write_itself_needs_no_second_answer() -> None:
    same = ["a\n\n", "b\n\n", "c"]
    target = ToyEngine(scripted_policy(*same), name="target")
    draft = ToyEngine(scripted_policy(*same), name="draft")
    recording = Recorder(draft, target, Contains(["c"])).record(PROBLEM)  # type: ignore[arg-type]
    assert [step.good for step in recording.steps] == [True] * 3
    alone = len(prompt_text()) + 1 + len("a\n\nb\n\nc") + 1
    assert target.computed_tokens <= 2 * alone, "its own answer and what it reads of the steps"


def prompt_text() -> str:
    return "".join(f"<{m['role']}>{m['content']}" for m in prompt_for(PROBLEM).messages)


def test_problems_that_the_target_does_not_solve_are_recorded_on_demand() -> None:
    draft, target = ["a\n\n", "b"], ["A\n\n", "B"]
    assert recorded(draft, target, ["x"]).steps == ()
    recording = recorded(draft, target, ["x"], hopeless_too=True)
    assert [step.good for step in recording.steps] == [False, False]
    assert not recording.solvable
    assert "".join(step.kept.text for step in recording.steps) == "A\n\nB"


def test_a_good_step_saves_a_problem_that_the_target_does_not_solve() -> None:
    recording = recorded(["a\n\n", "b"], ["A\n\n", "B"], ["a\n\nB"], hopeless_too=True)
    assert [step.good for step in recording.steps] == [True, False]
    assert recording.right
    assert not recording.solvable


def test_a_step_that_ends_the_answer_too_early_is_bad() -> None:
    """Also if the target would begin with the same words, as it would go on behind them."""
    recording = recorded(["a\n\n", "b"], ["a\n\n", "b\n\n", "2"], ["2"])
    assert [step.good for step in recording.steps][:2] == [True, False]
    assert recording.right


def test_a_target_that_writes_otherwise_than_before_is_asked_again() -> None:
    """In other batches near-ties fall otherwise: what it wrote at first is no outcome then."""
    target = [scripted_policy("pA\n\n", "B\n\n", "2")]

    class Turning(Contains):
        def check(self, text: str, problem: Problem) -> Any:
            target[0] = scripted_policy("pZ\n\n", "Y\n\n", "2")
            return super().check(text, problem)

    recording = Recorder(
        ToyEngine(scripted_policy("a\n\n", "Y\n\n", "2"), name="draft"),
        ToyEngine(lambda tokens: target[0](tokens), name="target"),
        Turning(["pA\n\nB\n\n2", "pZ\n\nY\n\n2"]),  # type: ignore[arg-type]
    ).record(PROBLEM)
    assert [step.kept.text for step in recording.steps] == ["pZ\n\n", "Y\n\n", "2"]
    assert [step.good for step in recording.steps] == [False, True, True]


def test_other_candidates_are_drawn_in_the_same_place() -> None:
    draft = ToyEngine(random_policy(1, end=-3.0), name="draft")
    target = ToyEngine(random_policy(1, end=-3.0), name="target")
    recorder = Recorder(draft, target, Contains([""]), num_others=3, max_tokens=60)  # type: ignore[arg-type]
    first, second = recorder.record(PROBLEM), recorder.record(PROBLEM)
    assert all(len(step.others) == 3 for step in first.steps)
    assert len({text for step in first.steps for text in step.others}) > 3
    assert first.steps == second.steps, "the seed decides"


# Files


def test_a_torn_line_is_left_out_and_overwritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, parse = tmp_path / "folder" / "lines.jsonl", Solutions.model_validate_json
    records = [
        Solutions(problem=f"p/{i}", data="p", digest="0", solutions=(), seconds=0.5)
        for i in range(3)
    ]
    with open_lines(path, parse) as lines:
        assert lines.records == ()
        for record in records[:2]:
            lines.append(record.model_dump_json())
            assert read_lines(path, parse)[-1] == record, "at once"
    with path.open("a") as file:
        file.write('{"problem": "p/2", "da')
    assert read_lines(path, parse) == records[:2]
    assert not caplog.text
    with open_lines(path, parse) as lines:
        assert list(lines.records) == records[:2]
        lines.append(records[2].model_dump_json())
    assert "lines.jsonl is not whole" in caplog.text
    assert read_lines(path, parse) == records
    path.write_text('{"problem": 1}\n')
    damaged = pytest.raises(EvaluationError, match=r"line 1 of .*lines\.jsonl is damaged")
    with damaged, open_lines(path, parse):
        pass
    assert path.read_text() == '{"problem": 1}\n'


def test_a_file_in_a_folder_is_added_to_by_one_run_at_a_time(tmp_path: Path) -> None:
    parse = Solutions.model_validate_json
    refused = pytest.raises(EvaluationError, match="another run is writing to")
    with open_lines(tmp_path / "a", parse), refused, open_lines(tmp_path / "b", parse):
        pass
    with open_lines(tmp_path / "a", parse), open_lines(tmp_path / "other" / "a", parse):
        pass
    with pytest.raises(EvaluationError, match="cannot be written"), open_lines(tmp_path, parse):
        pass
    with pytest.raises(EvaluationError, match="cannot be read"):
        read_lines(tmp_path / "none", parse)


def test_recordings_survive_their_file(tmp_path: Path) -> None:
    recording = recorded(["a\n\n", "é\u2028b"], ["A\n\n", "B"], ["a"])
    path, parse = tmp_path / "r.jsonl", Recording.model_validate_json
    with open_lines(path, parse) as lines:
        lines.append(recording.model_dump_json())
    assert read_lines(path, parse) == [recording]


# Signals

HEAD = ValueHead(draft="draft", layer=1, weights=(1.0, 0.0, 0.0, 0.0), bias=0.0)


def test_signals_are_those_of_the_decoder() -> None:
    """What is read again from the tokens is what verification sees while the draft writes."""
    engine = ToyEngine(random_policy(3, end=-3.0), name="draft")
    recording = Recorder(engine, engine, Contains([""]), max_tokens=60).record(PROBLEM)  # type: ignore[arg-type]
    places = [Place(s.drafted.candidate(), s.kept.candidate()) for s in recording.steps]
    assert len(places) > 1
    reader = SignalReader(engine, "draft", ["sparse", "direct"], entropy=True, head=HEAD)
    found = reader.read(prompt_for(PROBLEM), places)
    tokens = [*engine.encode(prompt_for(PROBLEM))]
    for signals, place in zip(found, places, strict=True):
        logprobs, entropies = [], []
        for token in place.drafted.tokens:
            logits = engine.policy(tuple(tokens)).astype(np.float64)
            p = np.exp(logits - logits.max())
            p /= p.sum()
            logprobs.append(np.log(p[token]))
            entropies.append(-(p[p > 0] * np.log(p[p > 0])).sum())
            tokens.append(token)
        assert signals["draft.confidence_min"] == pytest.approx(min(logprobs), abs=1e-4)
        assert signals["draft.confidence_mean"] == pytest.approx(np.mean(logprobs), abs=1e-4)
        assert signals["draft.entropy_max"] == pytest.approx(-max(entropies), abs=1e-4)
        assert signals["draft.entropy_mean"] == pytest.approx(-np.mean(entropies), abs=1e-4)
        state = hidden_state(tuple(tokens))
        assert signals["draft.value"] == pytest.approx(1 / (1 + np.exp(-state[0])), abs=1e-4)
        assert 0 <= signals["draft.grounding_sparse_min"] <= signals["draft.grounding_sparse_mean"]
        assert signals["draft.grounding_direct_min"] <= 1


def test_agreement_looks_at_numbers_and_words() -> None:
    recording = recorded(["so 3 + 4 = 7\n\n", "b"], ["A\n\n", "B"], ["7"], hopeless_too=True)
    step = recording.steps[0].model_copy(
        update={"others": ("so 4 + 3 = 7\n\n", "so 3 + 4 = 8\n\n")}
    )
    signals = of_texts(step, 1)
    assert signals["agreement_numbers"] == 0.5
    assert signals["agreement_last"] == 0.5
    assert signals["agreement_entropy"] == pytest.approx(
        2 / 3 * np.log(2 / 3) + 1 / 3 * np.log(1 / 3)
    )
    assert 0.5 < signals["agreement_words"] < 1
    assert signals["length"] == -len("so 3 + 4 = 7\n\n")
    alone = of_texts(step.model_copy(update={"others": ()}), 2)
    assert alone == {"length": signals["length"], "position": -2.0}


def test_thousands_are_parts_of_their_number() -> None:
    recording = recorded(["so 1,000\n\n", "b"], ["A\n\n", "B"], ["7"], hopeless_too=True)
    step = recording.steps[0].model_copy(update={"others": ("so 2,000\n\n", "so 1000\n\n")})
    signals = of_texts(step, 1)
    assert signals["agreement_last"] == signals["agreement_numbers"] == 0.5


def test_steps_that_outgrow_a_context_are_left_out() -> None:
    draft, target = ["a" * 30 + "\n\n", "b" * 30], ["A\n\n", "B"]
    recording = recorded(draft, target, [""])
    small = ToyEngine(scripted_policy(*draft), context_length=len(prompt_text()) + 40)
    read = read_signals([SignalReader(small, "draft")], prompt_for(PROBLEM), recording)
    assert len(read.steps) == 1
    assert [step.good for step in labelled([recording], [read], {recording.key: 0})] == [True]


# The table


def steps_with(
    aurocs: dict[str, float], *, problems: int = 400, seed: int = 0
) -> list[LabelledStep]:
    """Steps whose signals are normal with the distance between classes that gives an AUROC."""
    from statistics import NormalDist

    rng = np.random.default_rng(seed)
    steps = []
    for problem in range(problems):
        for _ in range(4):
            good = bool(rng.random() < 0.7)
            signals = {"length": float(rng.normal())}
            for name, area in aurocs.items():
                distance = NormalDist().inv_cdf(area) * np.sqrt(2)
                signals[name] = float(rng.normal() + distance * good)
            steps.append(LabelledStep(f"p/{problem}", "p", problem, good, signals))
    return steps


def test_signals_of_known_worth_come_out_within_their_intervals() -> None:
    known = {"strong": 0.85, "weak": 0.6, "nothing": 0.5}
    rows = {row.name: row for row in table(steps_with(known), [("strong", "weak")])}
    for name, area in known.items():
        row = rows[name]
        assert row.odd is not None and row.odd.interval is not None
        low, high = row.odd.interval
        assert low < area < high
        assert row.even == pytest.approx(area, abs=0.05)
    assert rows["nothing"].over_length is not None
    low, high = rows["nothing"].over_length.interval or (1, 1)
    assert low < 0 < high
    assert rows["strong"].over_length is not None
    assert (rows["strong"].over_length.interval or (0, 0))[0] > 0.2
    both = rows["strong + weak"]
    assert both.fitted
    assert both.odd is not None and both.odd.value > 0.85
    assert rows["length"].over_length is None


def test_what_is_fitted_to_noise_is_worth_nothing_on_the_half_it_was_fitted_to() -> None:
    noise = {f"n{i:02}": 0.5 for i in range(20)}
    steps = steps_with(noise, problems=24)
    fitted = tuple(noise)
    rows = {row.name: row for row in table(steps, [fitted])}
    even, _ = halves(steps)
    labels = [step.good for step in even]
    matrix = np.array([[step.signals[name] for name in fitted] for step in even])
    own = fit(fitted, even).decision_function(matrix)
    assert auroc(own, labels) > 0.7, "as a figure of training it would lead the table"  # type: ignore[operator]
    row = rows[" + ".join(fitted)]
    assert row.even is not None and row.even < 0.65
    assert row.odd is not None and row.odd.value < 0.65


def test_a_combination_of_too_few_problems_has_no_figure_where_choices_are_made() -> None:
    steps = [
        LabelledStep(f"p/{n}", "p", n, n == 0, {"length": float(n), "a": float(-n)})
        for n in range(8)
    ]
    (row,) = [row for row in table(steps, [("length", "a")]) if row.fitted]
    assert row.even is None, "all good steps are of one problem: without it there is no fit"


def test_what_cannot_be_fitted_has_no_figure_on_the_other_half() -> None:
    """Steps that are all good on the even half teach nothing: no fit is no worth of a half."""
    rng = np.random.default_rng(0)
    steps = [
        LabelledStep(
            f"p/{n}", "p", n, n % 2 == 0 or n % 4 == 1, {name: rng.normal() for name in "ab"}
        )
        for n in range(40)
    ]
    steps = [replace(step, signals={**step.signals, "length": step.signals["b"]}) for step in steps]
    rows = {row.name: row for row in table(steps, [("a", "b")])}
    assert rows["a"].odd is not None, "needs no fit"
    assert rows["a"].over_length is None
    assert rows["a + b"].odd is None
    assert rows["a + b"].over_length is None


def test_a_signal_that_is_the_length_adds_nothing_to_it() -> None:
    steps = [
        LabelledStep(
            s.problem, s.data, s.place, s.good, dict.fromkeys(("length", "copy"), s.signals["a"])
        )
        for s in steps_with({"a": 0.8})
    ]
    rows = {row.name: row for row in table(steps)}
    assert rows["copy"].over_length is not None
    assert rows["copy"].over_length.value == pytest.approx(0, abs=1e-9)


def test_halves_go_by_the_places_of_problems_in_their_files() -> None:
    """A problem without steps, as the target does not solve it, moves no other to another half."""
    steps = [
        LabelledStep(f"{data}/{place}", data, place, True, {})
        for data, places in {"a": (0, 3, 4), "b": (1, 2, 5)}.items()
        for place in places
        for _ in range(2)
    ]
    even, odd = halves(steps)
    assert [s.problem for s in even[::2]] == ["a/0", "a/4", "b/2"]
    assert [s.problem for s in odd[::2]] == ["a/3", "b/1", "b/5"]


def test_steps_of_problems_with_the_same_id_are_of_two_clusters() -> None:
    steps = steps_with({"a": 0.8}, problems=40)
    named = [LabelledStep("1", str(s.place), s.place, s.good, s.signals) for s in steps]
    assert table(named) == table(steps)


def test_steps_that_are_all_good_have_no_auroc() -> None:
    steps = [LabelledStep(f"p/{n}", "p", n, True, {"length": float(n), "a": 0.0}) for n in range(6)]
    assert all(row.even is None and row.odd is None for row in table(steps, [("length", "a")]))
    with pytest.raises(EvaluationError, match="no steps"):
        table([])
    odd = LabelledStep("p/9", "p", 9, True, {"length": 1.0})
    with pytest.raises(EvaluationError, match="different signals"):
        table([*steps, odd])


def test_reports_say_what_was_measured(tmp_path: Path) -> None:
    recording = recorded(
        ["a\n\n", "b\n\n", "c"], ["A\n\n", "B\n\n", "C"], ["a\n\nB\n\nC"], hopeless_too=True
    )
    engine = ToyEngine(scripted_policy("a\n\n", "b\n\n", "c"))
    read = read_signals([SignalReader(engine, "draft", ["sparse"])], prompt_for(PROBLEM), recording)
    assert isinstance(read, ReadSignals)
    steps = labelled([recording], [read], {recording.key: 0})
    rows = table(steps, signal_report.combinations(steps))
    answers = signal_report.whole_answers([recording], [read], {recording.key: 0})
    assert [(answer.good, answer.place) for answer in answers] == [(False, 0)]
    signal_report.write(tmp_path, rows, steps, answers, [recording])
    page = (tmp_path / "signals.md").read_text()
    assert "1 problems (p)" in page
    assert "draft.confidence_min" in page
    plain = json.loads((tmp_path / "signals.json").read_text())
    assert plain["facts"]["steps"] == 3
    assert plain["facts"]["good_steps"] == 1
    assert "by cross-validation" in page
    assert "one and one" not in page, "the data set's texts stay out"


def test_thresholds_keep_steps_by_their_confidence_in_nats(tmp_path: Path) -> None:
    name = "target.confidence_min"
    values = [(0, True, -1.0), (0, True, -2.0), (0, False, -2.6), (1, True, -0.5), (1, False, -9.0)]
    steps = [
        LabelledStep(f"p/{at}", "p", at, good, {name: value, "length": 0.0})
        for at, good, value in values
    ]
    rows = threshold_table(steps, name, Bounds(low=-10.0, high=0.0))
    row = {row.threshold: row for row in rows}[0.75]
    assert row.nats == -2.5
    assert (row.even, row.odd) == (Kept(2, 2, 1, 0), Kept(1, 1, 1, 0))
    assert (row.even.share, row.even.good_share) == (2 / 3, 1)
    assert rows[0].even == Kept(2, 2, 1, 1)
    assert Kept(0, 0, 0, 0).share is None
    signal_report.write(tmp_path, table(steps), steps, [], [], rows)
    page = (tmp_path / "signals.md").read_text()
    assert "| 0.75 | −2.50 | 66.7 % | 100.0 % | 1 of 1 | 50.0 % | 100.0 % | 1 of 1 |" in page


# Value heads


def test_solutions_are_sampled_side_by_side_and_by_seed() -> None:
    engine = ToyEngine(random_policy(2, end=-1.0), name="draft")
    sampler = Sampler(engine, Contains(["a"]), 5, 80)  # type: ignore[arg-type]
    first, second = sampler.sample(PROBLEM), sampler.sample(PROBLEM)
    assert first.solutions == second.solutions
    assert len({solution.text for solution in first.solutions}) > 1
    assert all(solution.right == ("a" in solution.text) for solution in first.solutions)


@pytest.mark.parametrize("text", ["", "a", "a\n\nb", "a\n\n\nb\n\n", "\n\na", "a\nb\n\nc\n"])
def test_steps_of_a_text_are_the_text(text: str) -> None:
    steps = steps_of(text)
    assert "".join(steps) == text
    assert all(step.endswith("\n\n") for step in steps[:-1])


def test_states_are_those_at_the_ends_of_steps() -> None:
    engine = ToyEngine(scripted_policy("x"), name="draft")
    prompt = Prompt(text="q")
    solutions = Solutions.model_validate(
        {
            "problem": "p",
            "data": "p",
            "digest": "0",
            "seconds": 0,
            "solutions": [
                {"text": "a\n\nbc\n\nd", "right": True},
                {"text": "e\n\nf", "right": False},
            ],
        }
    )
    read = list(read_states(engine, 1, prompt, solutions))
    assert [(right, last) for _, right, last in read] == [
        (True, False),
        (True, False),
        (True, True),
        (False, False),
        (False, True),
    ]
    start = tuple(engine.encode(prompt))
    texts = ["a\n\n", "a\n\nbc\n\n", "a\n\nbc\n\nd", "e\n\n", "e\n\nf"]
    for (state, _, last), text in zip(read, texts, strict=True):
        end = [END] if last else []  # decoders read it too
        np.testing.assert_array_equal(state, hidden_state((*start, *text.encode(), *end)))


def examples(signal: float, *, problems: int = 60, width: int = 8, seed: int = 0) -> Examples:
    rng = np.random.default_rng(seed)
    right = rng.random(problems * 6) < 0.5
    states = rng.normal(size=(len(right), width)).astype(np.float32)
    states[:, 0] += signal * right
    states = states * 5 + 3
    names = tuple(f"p/{i // 6}" for i in range(len(right)))
    return Examples(states, right, names, np.arange(len(right)) % 3 == 2)


def test_a_head_finds_what_the_states_know() -> None:
    trained = train(examples(2.0), draft="d", layer=3, data=["x"])
    assert trained.by_step is not None and trained.by_step.interval is not None
    low, high = trained.by_step.interval
    assert low < 0.921 < high, "two normal distributions two standard deviations apart"
    facts = trained.head.training
    assert facts["data"] == ["x"]
    assert (facts["problems"], facts["solutions"], facts["steps"]) == (60, 120, 360)
    assert facts["auroc_by_step"][0] == round(trained.by_step.value, 4)
    held = examples(2.0, seed=1)
    weights = np.array(trained.head.weights)
    logits = held.states @ weights + trained.head.bias
    assert ((logits > 0) == held.right).mean() > 0.8


def test_a_head_that_learns_nothing_says_so() -> None:
    trained = train(examples(0.0), draft="d", layer=3)
    assert trained.by_step is not None and trained.by_step.interval is not None
    assert trained.by_step.interval[0] < 0.5


def test_problems_are_not_split_between_training_and_judging() -> None:
    """States that only tell the problem would else look like knowledge of the outcome."""
    rng = np.random.default_rng(0)
    right = np.repeat(rng.random(40) < 0.5, 10)
    states = np.repeat(rng.normal(size=(40, 64)), 10, axis=0).astype(np.float32)
    names = tuple(f"p/{i // 10}" for i in range(400))
    trained = train(Examples(states, right, names, np.ones(400, dtype=bool)), draft="d", layer=0)
    assert trained.by_step is not None and trained.by_step.value < 0.75


def test_what_judges_a_head_has_not_chosen_its_regularisation() -> None:
    """Other outcomes of some problems change nothing of how the others' heads score these."""
    known = examples(0.3, problems=30, width=40)
    scores = unseen_scores(known)
    for _, test in splits(known.problems):
        right = known.right.copy()
        right[test] = ~right[test]
        changed = unseen_scores(Examples(known.states, right, known.problems, known.last))
        np.testing.assert_array_equal(changed[test], scores[test])


def test_too_little_to_learn_from_is_an_error() -> None:
    few = examples(1.0, problems=3)
    with pytest.raises(EvaluationError, match="3 problems are too few"):
        train(few, draft="d", layer=0)
    known = examples(1.0)
    alike = Examples(known.states, np.ones_like(known.right), known.problems, known.last)
    with pytest.raises(EvaluationError, match="all right or all wrong"):
        train(alike, draft="d", layer=0)


def test_written_steps_keep_what_a_session_needs() -> None:
    engine = ToyEngine(scripted_policy("a\n\n", "b"))
    recording = recorded(["a\n\n", "b"], ["a\n\n", "b"], [""])
    written = recording.steps[0].drafted
    assert Written.of(written.candidate()) == written
    assert written.vocabulary == engine.vocabulary
