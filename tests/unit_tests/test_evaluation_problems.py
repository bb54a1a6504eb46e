"""Where problems come from, how they are asked, and which of them are nearly the same."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specguard_chains.calibrations.fitting import INSTRUCTION
from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.choices import LETTERS, arranged
from specguard_chains.evaluation.problems import (
    Problem,
    data_name,
    load_problems,
    near_duplicates,
    prompt_for,
)

OPTIONS = ["red", "green", "blue", "black"]


def write(folder: Path, *rows: Any, name: str = "sums.jsonl") -> Path:
    """Write a file of JSON lines; a string is a line as it stands."""
    path = folder / name
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def sums(folder: Path, n: int) -> Path:
    return write(
        folder, *({"id": f"s/{i}", "question": f"{i} + 1?", "answer": i} for i in range(n))
    )


def ids(problems: list[Problem]) -> list[str]:
    return [problem.id for problem in problems]


class TestFiles:
    def test_a_line_is_a_problem(self, tmp_path: Path) -> None:
        path = write(
            tmp_path,
            {"id": "a", "question": "1 + 1?", "answer": "2", "level": 3},
            "",
            {"question": "2 + 2?", "answer": 4},
            {"id": 7, "question": "1 / 2?", "answer": 0.5},
            {"id": "e", "question": "3 × 6?", "answer": "3 × 6 = <<3*6=18>>18\n#### 1,018"},
        )
        assert load_problems(path) == [
            Problem("a", "1 + 1?", "2", "sums"),
            Problem("sums/3", "2 + 2?", "4", "sums"),
            Problem("7", "1 / 2?", "0.5", "sums"),
            Problem("e", "3 × 6?", "1018", "sums"),
        ]
        assert load_problems(str(path)) == load_problems(path)
        assert data_name(path) == data_name(str(path)) == "sums"

    def test_some_can_be_chosen(self, tmp_path: Path) -> None:
        path = sums(tmp_path, 10)
        assert ids(load_problems(path, skip=2, limit=3)) == ["s/2", "s/3", "s/4"]
        assert ids(load_problems(path, only="even")) == ["s/0", "s/2", "s/4", "s/6", "s/8"]
        assert ids(load_problems(path, only="odd", skip=1, limit=2)) == ["s/3", "s/5"]
        assert ids(load_problems(path, skip=8, limit=5)) == ["s/8", "s/9"]
        assert load_problems(path, skip=10) == load_problems(path, limit=0) == []

    def test_the_halves_have_nothing_in_common(self, tmp_path: Path) -> None:
        path = sums(tmp_path, 11)
        even, odd = (set(ids(load_problems(path, only=half))) for half in ("even", "odd"))
        assert not even & odd
        assert even | odd == set(ids(load_problems(path)))

    @pytest.mark.parametrize(
        ("line", "complaint"),
        [
            ("{", "not JSON"),
            ("[1]", "a JSON list"),
            ("\N{BYTE ORDER MARK}{", "not JSON"),
            ({"answer": "1"}, '"question" is None'),
            ({"question": " ", "answer": "1"}, "\"question\" is ' '"),
            ({"question": "?"}, '"answer" is None'),
            ({"question": "?", "answer": ""}, "\"answer\" is ''"),
            ({"question": "?", "answer": True}, '"answer" is True'),
            ('{"question": "?", "answer": NaN}', '"answer" is nan'),
            ({"question": "?", "answer": ["1"]}, "\"answer\" is ['1']"),
            ({"id": None, "question": "?", "answer": "1"}, '"id" is None'),
            ({"id": "s/0", "question": "?", "answer": "1"}, "'s/0' has come before"),
            ({"question": "?", "answer": "E", "choices": OPTIONS}, "'E' is none of the 4 options"),
            ({"question": "?", "answer": 4, "choices": OPTIONS}, "4 is none of the 4 options"),
            ({"question": "?", "answer": "A", "choices": ["red"]}, "1 options"),
            ({"question": "?", "answer": "A", "choices": ["red", " "]}, "an option is empty"),
            ({"question": "?", "answer": "A", "choices": "red"}, "\"choices\" is 'red'"),
            ({"question": "?", "answer": "A", "options": [1, 2]}, '"choices" is [1, 2]'),
            ({"question": "?", "choices": OPTIONS}, '"answer" is None'),
        ],
    )
    def test_a_bad_line_is_named(self, tmp_path: Path, line: Any, complaint: str) -> None:
        path = write(tmp_path, {"id": "s/0", "question": "?", "answer": "1"}, "", line)
        with pytest.raises(EvaluationError) as refusal:
            load_problems(path)
        assert f"{path}, line 3: " in str(refusal.value)
        assert complaint in str(refusal.value)

    def test_bytes_that_are_no_text_are_named(self, tmp_path: Path) -> None:
        path = tmp_path / "sums.jsonl"
        path.write_bytes(b'{"question": "?", "answer": "1"}\n\xff\xfe\n')
        with pytest.raises(EvaluationError, match="line 2: not JSON"):
            load_problems(path)

    def test_what_is_not_asked_for_need_not_be_a_problem(self, tmp_path: Path) -> None:
        path = write(tmp_path, {"question": "?", "answer": "1"}, {"question": "?"}, "{")
        assert ids(load_problems(path, limit=1)) == ["sums/1"]
        with pytest.raises(EvaluationError, match="line 3"):
            load_problems(path, only="even")

    @pytest.mark.parametrize("source", ["no/such/file.jsonl", "nothing.jsonl", "nothing", "a/b/c"])
    def test_a_source_must_be_somewhere(self, source: str) -> None:
        with pytest.raises(EvaluationError, match=r"neither a file nor .* gsm8k, math500"):
            load_problems(source)

    def test_a_folder_is_no_source(self, tmp_path: Path) -> None:
        with pytest.raises(EvaluationError, match="neither a file"):
            load_problems(tmp_path)

    @pytest.mark.parametrize(
        "bad", [{"skip": -1}, {"limit": -1}, {"only": "first"}], ids=lambda bad: next(iter(bad))
    )
    def test_bad_selections_are_refused(self, tmp_path: Path, bad: dict[str, Any]) -> None:
        with pytest.raises(EvaluationError, match=next(iter(bad))):
            load_problems(sums(tmp_path, 3), **bad)


class TestChoices:
    @pytest.mark.parametrize("gold", ["C", "c", "(C)", "C.", 2, "2", "blue", " blue "])
    def test_the_right_option_keeps_its_text(self, gold: str | int) -> None:
        shown, letter = arranged(OPTIONS, gold, seed=0, problem_id="a")
        assert sorted(shown) == sorted(OPTIONS)
        assert shown[LETTERS.index(letter)] == "blue"

    def test_every_letter_is_right_about_equally_often(self) -> None:
        n = 4000
        letters = Counter(arranged(OPTIONS, 0, seed=1, problem_id=f"p/{i}")[1] for i in range(n))
        chi_square = sum((letters[letter] - n / 4) ** 2 / (n / 4) for letter in "ABCD")
        assert chi_square < 16.3  # 0.1 % point with 3 degrees of freedom

    def test_wrong_options_are_shuffled_too(self) -> None:
        orders = {arranged(OPTIONS, 0, seed=1, problem_id=f"p/{i}")[0] for i in range(500)}
        assert len(orders) == 24

    def test_the_order_hangs_on_seed_and_id_alone(self, tmp_path: Path) -> None:
        rows = [
            {"id": f"p/{i}", "question": "Which?", "choices": OPTIONS, "answer": "red"}
            for i in range(40)
        ]
        forwards = load_problems(write(tmp_path, *rows), seed=3)
        backwards = load_problems(write(tmp_path, *rows[::-1], name="b.jsonl"), seed=3, limit=20)
        shown = {problem.id: (problem.choices, problem.answer) for problem in forwards}
        assert all(shown[p.id] == (p.choices, p.answer) for p in backwards)
        others = load_problems(write(tmp_path, *rows), seed=4)
        assert sum(a == b for a, b in zip(forwards, others, strict=True)) < 10

    def test_the_order_never_changes(self) -> None:
        # Results of an interrupted run stay valid only as long as this holds.
        shown, letter = arranged(OPTIONS, "C", seed=0, problem_id="p/1")
        assert shown == ("red", "green", "black", "blue")
        assert letter == "D"

    def test_letters_of_the_data_set_are_taken_off(self) -> None:
        shown, letter = arranged(["A)21", "B)22.5", "C)7"], "B", seed=0, problem_id="a")
        assert sorted(shown) == ["21", "22.5", "7"]
        assert shown[LETTERS.index(letter)] == "22.5"

    @pytest.mark.parametrize(
        "last", ["All of the above", "Both A and C", "A and B", "only A", "None of the above"]
    )
    def test_options_that_speak_of_others_stay(self, last: str) -> None:
        options = ["one", "two", "three", last]
        assert arranged(options, "D", seed=5, problem_id="a") == (tuple(options), "D")

    @pytest.mark.parametrize(
        ("options", "gold"),
        [(["1", "2", "3"], 1), (["B", "A"], "A"), (["same", "same", "other"], "same")],
    )
    def test_what_can_mean_two_options_is_refused(self, options: list[str], gold: str) -> None:
        with pytest.raises(ValueError, match="can mean several options"):
            arranged(options, gold, seed=0, problem_id="a")

    def test_numbers_among_numbers_can_be_meant_by_letter(self) -> None:
        shown, letter = arranged(["1", "2", "3"], "A", seed=0, problem_id="a")
        assert shown[LETTERS.index(letter)] == "1"


class TestPrompts:
    def test_a_free_answer_is_asked_for_in_a_box(self) -> None:
        prompt = prompt_for(Problem("a", "1 + 1?", "2"))
        assert prompt.messages == [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": "1 + 1?"},
        ]

    def test_of_choices_the_letter_is_asked_for(self) -> None:
        prompt = prompt_for(Problem("a", "Which?", "B", "colours", ("red", "green")))
        system, user = (message["content"] for message in prompt.messages)
        assert r"letter of the right option within \boxed{}" in system
        assert user == "Which?\n\n(A) red\n(B) green"

    def test_the_answer_is_not_in_the_prompt(self, tmp_path: Path) -> None:
        path = write(tmp_path, {"question": "Six times seven?", "answer": "forty-two"})
        assert "forty-two" not in str(prompt_for(load_problems(path)[0]))


class Hub:
    """Stands in for the `datasets` library."""

    def __init__(self, rows: list[dict[str, Any]] | Exception) -> None:
        self.rows = rows
        self.asked: list[tuple[str, str | None, str]] = []

    def load_dataset(self, path: str, name: str | None = None, *, split: str) -> Any:
        self.asked.append((path, name, split))
        if isinstance(self.rows, Exception):
            raise self.rows
        return self.rows


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(rows: list[dict[str, Any]] | Exception) -> Hub:
        made = Hub(rows)
        module = SimpleNamespace(load_dataset=made.load_dataset)
        monkeypatch.setitem(sys.modules, "datasets", module)  # type: ignore[arg-type]
        return made

    return install


class TestHub:
    @pytest.mark.parametrize(
        ("source", "asked", "row", "question", "answer"),
        [
            (
                "gsm8k",
                ("openai/gsm8k", "main", "test"),
                {"question": "Eggs?", "answer": "16 - 3 = 13\n#### 1,300"},
                "Eggs?",
                "1300",
            ),
            (
                "math500",
                ("HuggingFaceH4/MATH-500", None, "test"),
                {"problem": "Root?", "solution": r"\boxed{\sqrt2}", "answer": r"\sqrt{2}"},
                "Root?",
                r"\sqrt{2}",
            ),
            (
                "svamp",
                ("ChilleD/SVAMP", None, "test"),
                {"Body": "Two cakes. ", "Question": "How many?", "Answer": "2.0"},
                "Two cakes. How many?",
                "2.0",
            ),
            (
                "asdiv",
                ("EleutherAI/asdiv", None, "validation"),
                {"body": "Nine apples.", "question": "How many?", "answer": "9 (apples)"},
                "Nine apples. How many?",
                "9",
            ),
            (
                "gaokao2023en",
                ("MARIO-Math-Reasoning/Gaokao2023-Math-En", None, "train"),
                {"question": "Set?", "answer": "[1, 2)", "source": "x", "id": 3},
                "Set?",
                "[1, 2)",
            ),
            (
                "olympiadbench",
                ("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train"),
                {"question": "Roots?", "final_answer": ["1", "-1"], "answer_type": "Numerical"},
                "Roots?",
                "1, -1",
            ),
        ],
    )
    def test_known_benchmarks_are_read(
        self,
        hub: Any,
        source: str,
        asked: tuple[str, str | None, str],
        row: dict[str, Any],
        question: str,
        answer: str,
    ) -> None:
        library = hub([row])
        assert load_problems(source) == [Problem(f"{source}/0", question, answer, source)]
        assert library.asked == [asked]
        assert data_name(source) == source

    @pytest.mark.parametrize(
        ("source", "row"),
        [
            ("aqua", {"question": "?", "options": ["A)1", "B)2", "C)3"], "correct": "B"}),
            ("mmlu", {"question": "?", "choices": ["1", "2", "3"], "answer": 1}),
            (
                "arc-challenge",
                {
                    "question": "?",
                    "choices": {"text": ["1", "2", "3"], "label": ["1", "2", "3"]},
                    "answerKey": "2",
                },
            ),
        ],
    )
    def test_multiple_choice_is_read(self, hub: Any, source: str, row: dict[str, Any]) -> None:
        hub([row])
        (problem,) = load_problems(source)
        assert problem.choices[LETTERS.index(problem.answer)] == "2"

    def test_any_data_set_can_be_named(self, hub: Any) -> None:
        library = hub([{"problem": "?", "answer": "1"}])
        assert load_problems("some/Things:hard:dev") == [Problem("Things/0", "?", "1", "Things")]
        load_problems("some/Things")
        load_problems("some/Things::dev")
        (problem,) = load_problems("openai/gsm8k:main:train")
        assert problem.data == "gsm8k"
        assert library.asked == [
            ("some/Things", "hard", "dev"),
            ("some/Things", None, "test"),
            ("some/Things", None, "dev"),
            ("openai/gsm8k", "main", "train"),
        ]

    def test_problems_without_an_answer_are_left_out_and_logged(
        self, hub: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        hub([{"question": "?", "answer": ""}, {"question": "!", "answer": "1"}])
        assert ids(load_problems("gaokao2023en")) == ["gaokao2023en/1"]
        assert "row 0 is left out" in caplog.text

    def test_other_fields_are_refused(self, hub: Any) -> None:
        hub([{"body": "?"}])
        with pytest.raises(EvaluationError, match=r"ChilleD/SVAMP:test, row 0.*\['body'\]"):
            load_problems("svamp")

    def test_without_a_network_a_file_is_asked_for(self, hub: Any) -> None:
        hub(ConnectionError("no route"))
        with pytest.raises(EvaluationError, match=r"openai/gsm8k.*no route.*a file of JSON lines"):
            load_problems("gsm8k")

    def test_without_the_library_it_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(EvaluationError, match=r"specguard_chains\[bench\].*a file of JSON lin"):
            load_problems("gsm8k")

    def test_a_file_comes_before_a_benchmark(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        write(tmp_path, {"question": "?", "answer": "1"}, name="gsm8k")
        assert ids(load_problems("gsm8k")) == ["gsm8k/1"]


def problem(name: str, question: str) -> Problem:
    return Problem(name, question, "1")


class TestNearDuplicates:
    def test_other_numbers_make_no_other_problem(self) -> None:
        training = [
            problem("a", "Anna has 3 apples and buys 1,200 more. How many does she have now?"),
            problem("b", "A train travels 60 miles in 2 hours. What is its speed?"),
        ]
        test = [
            problem("c", "What colour is the sky on a clear day in the middle of June?"),
            problem("d", "Anna has 17 apples and buys 2.5 more. How many does she have now?"),
            problem("e", "A TRAIN travels 10 miles in 4 hours - what is its speed?"),
        ]
        first, second = near_duplicates(training, test)
        assert first == ("a", "d", 1.0)
        assert second[:2] == ("b", "e")
        assert second[2] == pytest.approx(8 / 13)
        assert near_duplicates(training, test, 0.7) == [first]

    def test_common_phrases_are_not_enough(self) -> None:
        training = [problem("a", "How many pens did Ida buy in all, given 5 boxes of 12 pens?")]
        test = [problem("b", "How many pens did the teacher lose, if 9 of 30 pupils have none?")]
        assert near_duplicates(training, test) == []

    def test_operators_tell_short_problems_apart(self) -> None:
        training, test = [problem("a", "3 + 4")], [problem("b", "3 * 4"), problem("c", "5 + 6")]
        assert near_duplicates(training, test) == [("a", "c", 1.0)]

    def test_odd_questions_can_be_compared(self) -> None:
        odd = [problem("a", "?"), problem("b", "\N{SNOWMAN}"), problem("c", "7")]
        assert ("c", "c", 1.0) in near_duplicates(odd, odd)
        assert near_duplicates([], odd) == near_duplicates(odd, []) == []

    @pytest.mark.parametrize("threshold", [0, -1, 1.1, float("nan")])
    def test_a_threshold_is_a_share(self, threshold: float) -> None:
        with pytest.raises(ValueError, match="threshold"):
            near_duplicates([], [], threshold)

    def test_a_thousand_by_a_thousand_take_seconds(self) -> None:
        words = [f"word{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(400)]
        rng = random.Random(0)
        made = [
            problem(str(i), "How many are there in all? " + " ".join(rng.choices(words, k=45)))
            for i in range(1000)
        ]
        copied = problem("copy", made[17].question.replace("many", "few"))
        start = time.perf_counter()
        found = near_duplicates(made, [*made[500:], *made[:499], copied])
        assert time.perf_counter() - start < 10
        assert {(a, b) for a, b, _ in found} == {
            *((str(i), str(i)) for i in range(1000) if i != 499),
            ("17", "copy"),
        }
