"""Reports of runs: what they say, and that the page stands alone."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation import report
from specguard_chains.evaluation.arms import parse_arms
from specguard_chains.evaluation.command import command_of
from specguard_chains.evaluation.settings import RunSettings
from specguard_chains.evaluation.summary import Run, summary_of
from specguard_chains.evaluation.svg import INK, Plot, drawn
from specguard_chains.evaluation.tables import CONTROLS, PAIRED, RESULTS, TIME, WORK, beside
from specguard_chains.evaluation.wording import (
    between,
    chance,
    listed,
    number,
    percent,
    points,
    ratio,
    without_folders,
)
from specguard_chains.options import SpecGuardOptions
from tests.unit_tests import toy_evaluation
from tests.unit_tests.toy_results import (
    ARMS,
    SECRET,
    STARTED,
    four_problems,
    judged,
    result,
    settings,
    step,
    unverified,
    write,
)

matplotlib = pytest.importorskip("matplotlib")

VOID = {"meta", "br", "path", "use"}
NASTY = 'x"<script>alert(1)</script>|`$a_b$` 解'


class Page(HTMLParser):
    """What is on a page, checked for being well formed as it is read."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.words: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        self.words.setdefault(self.open[-1] if self.open else "", []).append(data)

    def values(self, name: str) -> list[str]:
        return [value for _, attribute, value in self.attributes if attribute == name]


def written(folder: Path) -> tuple[str, Page]:
    report.write(folder)
    markdown = (folder / "report.md").read_text(encoding="utf-8")
    return markdown, check_alone((folder / "report.html").read_text(encoding="utf-8"))


def check_alone(text: str) -> Page:
    """Return the page, which needs nothing else and is whole."""
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not page.values("src")
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    assert [id_ for id_, times in Counter(page.ids).items() if times > 1] == []
    referred = [value.removeprefix("#") for value in page.values("href")]
    assert all(value.startswith("#") for value in page.values("href"))
    referred += page.values("aria-labelledby") + re.findall(r"url\(#([^)]*)\)", text)
    assert set(referred) <= set(page.ids)
    assert not re.search("#fe00", text)  # every marker colour is one of the page's
    defined = set(re.findall(r"(--[\w-]+):", text))
    assert set(re.findall(r"var\((--[\w-]+)\)", text)) <= defined
    return page


def test_accuracy_against_time_is_a_file_too(tmp_path: Path) -> None:
    lines = [result(i, arm, seconds=s) for i in range(3) for arm, s in (("target", 4), ("ours", 3))]
    folder = write(tmp_path, settings(ARMS), lines)
    markdown, _ = written(folder)
    assert "](accuracy.svg)" in markdown
    svg = (folder / "accuracy.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not re.search(r"var\(|#fe00|https?:(?!//www.w3.org/2000/svg)", svg)
    assert "1 target" in svg
    assert "2 ours" in svg


def table_rows(markdown: str, title: str) -> list[list[str]]:
    """Return the cells of the first table of a title."""
    lines = markdown[markdown.index(f"**{title}**") :].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    assert len({len(row) for row in rows}) == 1
    return [rows[0], *rows[2:]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, settings(ARMS), four_problems())


def test_what_ran_is_told(folder: Path) -> None:
    markdown, page = written(folder)
    for told in ("toy-pair", "toy (4 problems)", "Python 3.11.7", "Linux-6.1-x86_64", STARTED):
        assert told in markdown
        assert told in page.text
    assert "| ours | specguard-greedy | temperature = 0.0 |" in markdown
    assert "| random@ours | random, matched to ours | temperature = 0.0 |" in markdown


def test_the_table_of_results(folder: Path) -> None:
    markdown, page = written(folder)
    head, *rows = table_rows(markdown, "Results")
    assert head == ["arm", *(column.title for column in RESULTS)]
    assert rows[0] == [
        "target",
        "2/4",
        "50.0 % (15.0 to 85.0)",
        "0.0",
        "–",
        "11.5",
        "1.00 (–)",
        "–",
        "–",
    ]
    ours = dict(zip(head, rows[2], strict=True))
    assert ours["arm"] == "ours"
    assert ours["right"] == "3/4"
    assert ours["accuracy"] == "75.0 % (30.1 to 95.4)"
    assert ours["to target"] == "+25.0 (−36.2 to +69.9)"
    assert ours["time ratio"] == "0.52 (–)"  # of four problems
    assert (ours["steps kept"], ours["draft's tokens"]) == ("66.7 %", "66.7 %")
    assert "3/4" in page.words["td"]


def test_wins_and_losses_and_controls(folder: Path) -> None:
    markdown, _ = written(folder)
    _, *rows = table_rows(markdown, "Problem by problem against the target")
    assert [row[:4] for row in rows] == [
        *(["draft", "4", "0", "1"], ["ours", "4", "1", "0"], ["random@ours", "4", "0", "1"])
    ]
    _, control = table_rows(markdown, "Controls beside what they control")
    assert control[:5] == ["random@ours", "ours", "4", "50.0 %", "66.7 %"]
    assert control[5] == "+50.0 (−23.5 to +85.0)"


def test_each_arm_stands_beside_every_other_one(tmp_path: Path) -> None:
    lines = [
        result(i, arm, right=i % 2 == 0 or arm == "ours", seconds=seconds)
        for i in range(10)
        for arm, seconds in (("target", 4), ("ours", 3), ("draft", 2))
    ]
    folder = write(tmp_path, settings(ARMS), lines)
    markdown, page = written(folder)
    head, *rows = table_rows(markdown, "Time beside other arms")
    assert head == ["arm", "target", "draft", "ours"]
    assert rows[2] == ["ours", "0.75 (0.75 to 0.75)", "1.50 (1.50 to 1.50)", "–"]
    _, *rows = table_rows(markdown, "Right answers beside other arms")
    assert rows[1][:2] == ["draft", "0.0 (−27.8 to +27.8)"]
    assert rows[2][2].startswith("+50.0 (")
    assert "Below 1 the row's is faster." in page.text
    pairwise = summary_of(Run.read(folder))["pairwise"]
    assert pairwise["ours"]["draft"]["time_ratio"] == 1.5
    assert pairwise["draft"]["ours"]["difference"] == -0.5
    assert pairwise["ours"]["draft"]["timed_pairs"] == 10


def test_two_arms_are_compared_once(tmp_path: Path) -> None:
    lines = [result(i, arm) for i in range(3) for arm in ("target", "ours")]
    markdown, _ = written(write(tmp_path, settings(ARMS), lines))
    assert "**Time beside other arms**" not in markdown


def test_controls_stand_below_what_they_control(tmp_path: Path) -> None:
    arms = dict(reversed(ARMS.items()))
    run = Run.read(write(tmp_path, settings(arms), four_problems()))
    rows = summary_of(run)["decoders"]
    assert list(rows) == ["random@ours", "ours", "draft", "target"]
    assert list(beside(rows)) == ["ours", "random@ours", "draft", "target"]


def test_every_column_is_explained(folder: Path) -> None:
    markdown, page = written(folder)
    for column in (*RESULTS, *PAIRED, *CONTROLS, *TIME, *WORK):
        assert f"- *{column.title}*: {column.meaning}" in markdown
        assert column.meaning in page.text


def test_the_page_has_all_plots(folder: Path) -> None:
    many = [result(i, "ours", i % 2 == 0, steps=judged(0)) for i in range(12)]
    markdown, page = written(write(folder, settings(ARMS), [*four_problems(), *many]))
    assert page.tags["svg"] == 4
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(set(labels)) == 4
    assert "Left out" not in page.text
    assert "confidence" in page.words["text"]
    assert "<svg" not in markdown


def test_what_is_not_there_is_left_out_with_a_reason(tmp_path: Path) -> None:
    lines = [result(0, "draft", steps=[unverified("draft")])]
    _, page = written(write(tmp_path, settings(ARMS), lines))
    assert page.tags["svg"] == 1  # the time split
    assert "Left out: there are no time ratios, as no target took part." in page.text
    assert "Left out: at no position have 10 steps of an arm been judged." in page.text
    assert "Left out: no arm has judged a drafted step by a signal." in page.text


def test_positions_need_enough_steps(tmp_path: Path) -> None:
    lines = [result(i, "ours", steps=[step(), step()] if i else [step()]) for i in range(10)]
    _, page = written(write(tmp_path, settings(ARMS), lines))
    ticks = "".join(page.words["text"])
    assert "position of the step" in ticks  # the first has ten, the second nine


DEGENERATE: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
    "one arm": lambda: [result(i, "target", i > 1, steps=[unverified("target")]) for i in range(3)],
    "one problem": lambda: four_problems()[:4],
    "no target": lambda: [line for line in four_problems() if line["arm"] != "target"],
    "all wrong": lambda: [line | {"right": False} for line in four_problems()],
    "all right": lambda: [line | {"right": True} for line in four_problems()],
    "all errors": lambda: [
        line | {"right": False, "error": f"EngineError: {SECRET}", "steps": [], "tokens": 0}
        for line in four_problems()
    ],
    "target errs": lambda: [
        line | ({"right": False, "error": "EngineError: x"} if line["arm"] == "target" else {})
        for line in four_problems()
    ],
    "nothing drafted": lambda: [line | {"steps": []} for line in four_problems()],
    "nothing takes time": lambda: [line | {"seconds": 0.0} for line in four_problems()],
    "equal signals": lambda: [
        result(i, "ours", steps=[step(score=0.5, confidence=-0.1)]) for i in range(12)
    ],
    "apart": lambda: [result(0, "target"), result(1, "ours", data="other", steps=[step(score=1)])],
}


@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_runs_have_reports(tmp_path: Path, case: str) -> None:
    lines = list(DEGENERATE[case]())
    data = list(dict.fromkeys(line["data"] for line in lines))
    markdown, page = written(write(tmp_path, settings(ARMS, data=data), lines))
    for text in (markdown, page.text):
        assert "nan" not in text.lower().split()
        assert "None" not in text
        assert SECRET not in text
    for title in ("Results", "Time", "Work"):
        assert len(table_rows(markdown, title)) > 1


def test_several_data_sets_come_apart_and_together(tmp_path: Path) -> None:
    lines = [*four_problems(), *(line | {"data": "hard"} for line in four_problems())]
    markdown, page = written(write(tmp_path, settings(ARMS, data=("toy", "hard")), lines))
    heads = re.findall(r"^## (.*)$", markdown, flags=re.M)
    assert heads == [
        *("What ran", "toy", "hard", "All data sets"),
        *("What limits these figures", "What the columns mean"),
    ]
    assert "3/4" in page.text and "6/8" in page.text


def test_no_text_of_the_data_is_in_a_report(folder: Path) -> None:
    report.write(folder)
    for name in ("report.md", "report.html"):
        text = (folder / name).read_text()
        assert SECRET not in text
        assert "ducks" not in text
        assert "the answer is" not in text


def test_names_are_escaped(tmp_path: Path) -> None:
    run = settings({"target": ARMS["target"], NASTY: ARMS["ours"]}, data=(NASTY,), pair=NASTY)
    lines = [
        result(i, arm, i % 2 == 0, data=NASTY, steps=judged(i)) for i in range(12)
        for arm in ("target", NASTY)
    ]  # fmt: skip
    markdown, page = written(write(tmp_path, run, lines))
    assert "<script" not in (tmp_path / "report.html").read_text()
    assert NASTY in page.words["th"]
    assert NASTY in page.words["text"]  # in a drawing too, where $ begins no formula
    assert page.tags["script"] == 0
    prose = re.sub("```.*?```", "", markdown, flags=re.S)
    assert "<script" not in prose
    assert "`$" not in prose
    assert table_rows(markdown, "Results")[2][1] == "6/12"


def test_equal_results_give_equal_reports(tmp_path: Path) -> None:
    lines = four_problems()
    one = write(tmp_path / "a", settings(ARMS), lines)
    other = write(tmp_path / "b", settings(ARMS), reversed(lines))
    for folder in (one, other):
        report.write(folder)
    for name in ("report.md", "report.html"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


def test_a_run_without_results_has_no_report(tmp_path: Path) -> None:
    write(tmp_path, settings(ARMS), [])
    with pytest.raises(EvaluationError, match="has no results yet"):
        report.write(tmp_path)
    assert not (tmp_path / "report.md").exists()


def test_a_report_without_matplotlib(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(EvaluationError, match=r'pip install "specguard_chains\[bench\]"'):
        report.write(folder)


def test_matplotlib_is_loaded_late_and_left_as_it_was() -> None:
    code = """
import sys
from specguard_chains.evaluation import report
from specguard_chains.evaluation.svg import INK, drawn
assert "matplotlib" not in sys.modules
import matplotlib
names = [name for name in matplotlib.rcParams if name != "backend"]  # reading it loads pyplot
before = [matplotlib.rcParams[name] for name in names]
drawn("x", "x", 100, lambda figure: figure.subplots().plot([0, 1], color=INK))
assert [matplotlib.rcParams[name] for name in names] == before
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_a_drawing_is_equal_each_time_whatever_the_settings() -> None:
    def drawing() -> str:
        return drawn("x", 'a "b" <c>', 100, lambda figure: figure.subplots().plot([1], color=INK))

    first = drawing()
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        assert drawing() == first
    assert first.startswith(
        '<svg class="plot" viewBox="0 0 680 100" role="img" aria-label="a &quot;'
    )
    assert "DejaVu" not in first
    assert all(id_.startswith("x-") for id_ in re.findall(r'id="([^"]*)"', first))


def plot(page: Run, name: str) -> Plot:
    return next(p for p in report.report_of(page, summary_of(page)).plots if p.name == name)


def test_controls_have_no_signals(tmp_path: Path) -> None:
    lines = [result(0, "random@ours", steps=[step(score=0.5)]), result(0, "ours", steps=[step()])]
    run = Run.read(write(tmp_path, settings(ARMS), lines))
    assert plot(run, "signals").svg is None


def test_arms_look_alike_in_all_plots(tmp_path: Path) -> None:
    lines = [result(i, arm, steps=judged(i)) for i in range(10) for arm in ("target", "ours")]
    run = Run.read(write(tmp_path, settings(ARMS), lines))
    (of_accuracy,) = (e for e in plot(run, "accuracy").legend if e.label == "ours")
    (of_positions,) = (e for e in plot(run, "positions").legend if e.label == "ours")
    assert of_accuracy == of_positions
    assert of_accuracy.mark == "■ 2"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "toy has 4 problems here: an accuracy near one half has a 95 % interval about 70 "),
        ({}, "There are 3 comparisons with the target on each data set"),
        ({}, "random@ours accepts 50.0 % of the steps and ours 66.7 %: the control is not matched"),
        ({}, "ours is not shown to be more often right than random@ours: +50.0 points (−23.5 to "),
        ({"timed_out": True}, "could not be compared in time and count as wrong: target 4 of 4, "),
        ({"finish_reason": "length"}, "Answers were cut at the limit of 600 tokens"),
        ({"error": "EngineError: x"}, "Problems ended in an error, count as wrong"),
    ],
)
def test_what_limits_the_figures(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    lines = [line | change for line in four_problems()]
    _, page = written(write(tmp_path, settings(ARMS), lines))
    assert words in page.text


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    lines = [line for line in four_problems() if line["arm"] != "draft"][:-1]
    lines.append(result(0, "target", data="hard"))
    run = settings(ARMS, data=("toy", "hard", "later"))
    _, page = written(write(tmp_path, run, lines))
    for words in (
        "On toy, not every arm has attempted all 4 problems: random@ours (3).",
        "On hard there are no results of ours and random@ours.",
        "There are no results yet on later.",
        "There are no results yet of draft.",
    ):
        assert words in page.text


def caveats_of(folder: Path, lines: Iterable[dict[str, Any]], data: tuple[str, ...]) -> str:
    run = Run.read(write(folder, settings(ARMS, data=data), lines))
    return " ".join(report.report_of(run, summary_of(run)).caveats)


def test_what_the_figures_of_all_data_sets_are_over_is_told(tmp_path: Path) -> None:
    data = ("toy", "hard")
    lines = [
        *four_problems(),
        *(line | {"data": "hard"} for line in four_problems() if line["arm"] != "draft"),
        result(7, "draft", data="hard", error="EngineError: x", right=False),
    ]
    told = caveats_of(tmp_path / "most", lines, data)
    assert "are over the 4 problems that each of their arms has attempted, of 8." in told
    assert "leave out" not in told
    assert "are in no figure of time: draft 1 of 5." in told
    few = [line for line in lines if line["arm"] != "draft" or line["problem"] == "toy/0"]
    told = caveats_of(tmp_path / "few", few, data)
    assert "The figures of all data sets leave out draft (1): too few" in told
    alike = [line | {"data": name} for name in data for line in four_problems()]
    assert "all data sets are over" not in caveats_of(tmp_path / "alike", alike, data)


def test_arms_that_took_no_turns_are_told_of(tmp_path: Path) -> None:
    def started(hours: dict[str, float]) -> list[dict[str, Any]]:
        return [line | {"started": 3600 * hours.get(line["arm"], 0)} for line in four_problems()]

    told = caveats_of(tmp_path / "turns", started({"ours": 0.4}), ("toy",))
    assert "has hit all of them, if not all alike." in told
    more = [line | {"data": "more"} for line in started({})]
    lines = [*started({"ours": 24, "draft": 1}), *more]
    told = caveats_of(tmp_path / "apart", lines, ("toy", "more"))
    assert (
        "but not always: apart from target was draft on 4 of 8 problems and ours on 4 of 8 "
        "problems, when" in told
    )
    alone = [line for line in lines if line["arm"] != "target"]
    told = caveats_of(tmp_path / "alone", alone, ("toy", "more"))
    assert "apart from draft was ours on 4 of 8 problems and random@ours on 4 of 8" in told


def test_controls_are_to_match_on_each_data_set(tmp_path: Path) -> None:
    def lines(data: str, ours: int, random: int) -> list[dict[str, Any]]:
        return [
            result(
                *(i, arm),
                data=data,
                steps=[step()] * n + [step("rejected")] * (4 - n),
                controls="ours" if arm == "random@ours" else None,
            )
            for i in range(2)
            for arm, n in (("ours", ours), ("random@ours", random))
        ]

    given = [*lines("toy", 2, 1), *lines("hard", 1, 2)]
    told = caveats_of(tmp_path, given, ("toy", "hard"))
    assert "On toy, random@ours accepts 25.0 % of the steps and ours 50.0 %: the control" in told
    assert "On hard, random@ours accepts 50.0 % of the steps and ours 25.0 %: the control" in told
    assert "On all data sets, " not in told  # the two cancel out


COMMAND = {"draft": "/models/of mine/d.gguf", "target": "openai://host:80/t", "max_tokens": 80}


@pytest.mark.parametrize(
    ("arms", "shared"),
    [
        ("target,draft,specguard-greedy", {}),
        ("target,draft,specguard-greedy", {"temperature": 0.5, "threshold": 0.3}),
        ("target,specguard:num_candidates=8:threshold=0.5", {"seed": 7, "n_threads": 1}),
        ("t=target,draft,x=rsd:threshold=0.5,random@x,l=length@x:temperature=0.2", {}),
        ("specguard:temperature=0.0,oracle,selector:num_candidates=2", {"step_delimiter": "\n"}),
        ("speculative:speculative_tree=2:speculative_tree=3", {"adaptive_speculation": False}),
    ],
)
def test_the_command_means_the_same_settings(arms: str, shared: dict[str, Any]) -> None:
    options = SpecGuardOptions(**COMMAND | {"seed": 0} | shared)
    run = RunSettings.of(options, parse_arms(arms, options), ["a", "b"], options.seed or 0)
    command = command_of(run, {"a": 5, "b": 5})
    assert command is not None
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:6] == ["specguard", "bench", "--data", "a", "--data", "b"]
    flags = dict(zip(words[6::2], words[7::2], strict=False))
    assert flags["--limit"] == "5"
    assert (flags["--draft"], flags["--target"]) == ("d.gguf", COMMAND["target"])
    read = parse_arms(flags["--decoders"], options)
    assert RunSettings.of(options, read, ["a", "b"], options.seed or 0).arms == run.arms


@pytest.mark.parametrize(
    ("arms", "written"),
    [
        ("target,rsd=rsd:patience=2,random@rsd", "target,rsd=rsd:patience=2,random@rsd"),
        ("target,rsd=rsd:patience=0,random@rsd", "target,rsd,random@rsd"),  # it is the usual one
        ("draft,rsd=rsd:patience=1,length@rsd", "draft,rsd=rsd:patience=1,length@rsd"),
        ("target,specguard=specguard:threshold=0.9,oracle", None),
        (
            "target,rsd:patience=3,specguard:doubt_margin=1,oracle,length@specguard:doubt_margin=1,draft",
            None,
        ),
        ("target=target:temperature=0.5,draft", None),
    ],
)
def test_a_label_may_be_that_of_a_decoder(arms: str, written: str | None) -> None:
    options = SpecGuardOptions(seed=0, max_tokens=600)
    run = RunSettings.of(options, parse_arms(arms, options), ["a"], 0)
    command = command_of(run, {"a": 5})
    assert command is not None
    words = shlex.split(command.replace("\\\n", ""))
    assert words[words.index("--decoders") + 1] == (written or arms)


def test_data_sets_of_different_sizes_take_two_commands() -> None:
    options = SpecGuardOptions(seed=0, max_tokens=600)
    run = RunSettings.of(options, parse_arms("target,draft", options), ["a", "b"], 0)
    command = command_of(run, {"a": 60, "b": 24})
    assert command is not None
    assert re.findall(r"--data (\w) --limit (\d+)", command) == [("a", "60"), ("b", "24")]


def test_what_no_command_can_set_is_not_told_as_one(tmp_path: Path) -> None:
    run = settings(ARMS | {"ours": {"decoder": "gone"}})
    _, page = written(write(tmp_path, run, four_problems()))
    assert "No single command has the settings of all arms" in page.text


def test_folders_of_the_machine_are_not_told(tmp_path: Path) -> None:
    run = settings({"target": ARMS["target"]}, draft="/home/me/d.gguf", target="~/m/t.gguf")
    markdown, page = written(write(tmp_path, run, [result(0, "target")]))
    for text in (markdown, page.text):
        assert "d.gguf" in text and "t.gguf" in text
        assert "/home" not in text and "~/m" not in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/a/b c", "b c"),
        ("/d.gguf", "d.gguf"),
        ("/models/of mine/d.gguf", "d.gguf"),
        ("a / b", "a / b"),
        ("x=specguard:draft=/a/b.gguf,target", "x=specguard:draft=b.gguf,target"),
        ("openai://host:80/model", "openai://host:80/model"),
        ("Qwen/Qwen3", "Qwen/Qwen3"),
        ("models/x.gguf", "models/x.gguf"),
        ("~/x/y.gguf", "y.gguf"),
    ],
)
def test_paths_are_cut(text: str, shown: str) -> None:
    assert without_folders(text) == shown


def test_figures_in_words() -> None:
    assert [percent(0.625), percent(None)] == ["62.5 %", "–"]
    assert [points(x) for x in (0.025, -0.1, 0.0, -0.0001, None)] == [
        "+2.5",
        "−10.0",
        "0.0",
        "0.0",
        "–",
    ]
    assert [number(x) for x in (0, 0.123, 8.5, 9.999, 99.96, 1234.5, -0.5, None)] == [
        *("0", "0.12", "8.50", "10.0", "100", "1234", "−0.50", "–")
    ]
    assert [chance(p) for p in (0.0001, 0.0123, 0.5, 1, None)] == [
        *("< 0.001", "0.012", "0.50", "1.00", "–")
    ]
    assert ratio(0.826) == "0.83"
    assert between((0.1, 0.25), percent) == "\n(10.0 to 25.0)"
    assert between(None, percent) == ""
    assert [listed(["a"]), listed(["a", "b", "c"])] == ["a", "a, b and c"]


def test_a_run_of_decoders(tmp_path: Path) -> None:
    arms = "target,draft,x=specguard:num_candidates=2,random@x,length@x"
    toy_evaluation.run(tmp_path, n=12, arms=arms)
    _, page = written(tmp_path)
    assert page.tags["svg"] == 4
    assert "random, matched to x" in page.text
