"""Right and wrong answers, compared by the real math-verify in its own process.

None of these tests is skipped: without math-verify they fail.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specguard_chains.decoding.final_answer import bare_number, plain_words
from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation import checking, checking_worker
from specguard_chains.evaluation.checking import AnswerChecker, Checked
from specguard_chains.evaluation.extraction import extracted_answer
from specguard_chains.evaluation.problems import Problem

ENDLESS = r"\boxed{9^{9^{9}}}"


def problem(answer: str, *choices: str, question: str = "How much?") -> Problem:
    return Problem("a", question, answer, "test", choices)


@pytest.fixture(scope="module")
def checker() -> Iterator[AnswerChecker]:
    with AnswerChecker(timeout_s=30) as checker:  # the machine may be busy
        yield checker


def is_right(checker: AnswerChecker, text: str, answer: str) -> bool:
    return checker.check(text, problem(answer)).right


RIGHT = r"""
18          | 18 ; 18.0 ; 18.00 ; 018 ; \$18 ; $18 ; 18. ; 18\% ; 18^\circ
18          | x = 18 ; 3 \times 6 = 18 ; 18 dollars ; 18\text{ dollars} ; 18 eggs per day ; 18 cm^2
18          | \text{18 eggs} ; 18\,\text{m/s} ; 18 \text{ cm}^{2} ; 18\ \text{km/h} ; 18h ; +18
18          | \text{The answer is } 18 ; \frac{36}{2}
-18         | -18 ; -\$18 ; \$-18
70000       | 70,000 ; \$70,000 ; \$70{,}000 ; 70\,000 ; 70,\!000 ; 70 000
70000       | 7 \times 10^4 ; 70 thousand
1234567     | 1,234,567 ; 1{,}234{,}567 ; 1234567.0
18000000    | 18 \text{ million} ; 18 million dollars ; 18,000,000
\$32,\!348  | 32348 ; \$32,348
20 $cm^{2}  | 20 ; 20 cm^2 ; 20 \text{ cm}^2
0.5         | \frac{1}{2} ; 1/2 ; .5 ; 50\%
3.5         | 3\frac{1}{2} ; 3 1/2 ; \frac72
5.3\%       | 5.3\% ; 5.3 ; 0.053
17.5%       | 17.5 ; 17.5\%
\frac{14}{3} | \frac{14}{3} ; \dfrac{14}{3} ; \tfrac{14}3 ; 14/3 ; 4\frac{2}{3}
\frac{14}{3} | 4.666666667 ; \frac{28}{6}
\frac{270}7\text{ degrees} | \frac{270}{7} ; \frac{270}{7}^\circ
2\sqrt{3}   | \sqrt{12} ; 2 \sqrt{3} \text{ cm}
2^{1009}    | 2^{1009}
[1, 2)      | [1,2) ; \left[1, 2\right) ; x \in [1,2) ; 1 \le x < 2
(-\infty, 0) \cup (1, \infty) | (-\infty,0)\cup(1,+\infty)
\{x|-2\leq x < 1\} | \{x \mid -2 \leq x < 1\} ; [-2, 1) ; -2 \le x < 1
\left( 3, \frac{\pi}{2} \right) | (3, \frac{\pi}{2}) ; (3, \pi/2)
(1, 2)      | (1,2) ; \left( 1, 2 \right)
\{1, 2\}    | \{2, 1\} ; 2, 1 ; x=1 \text{ or } x=2
-2,0,2      | 2, 0, -2 ; \{-2,0,2\} ; -2, 0, \text{ and } 2
48$, $384   | 48, 384 ; 48 \text{ and } 384
90^{\circ}$,$60^{\circ} | 60^\circ, 90^\circ
f(x)=-1$,$f(x)=x+1 | f(x) = x+1, f(x) = -1
y = 2x+3    | y=2x+3 ; 2x+3
x^2+2x+1    | (x+1)^2
6 - 5i      | -5i + 6
m_{\max }=n^{2}-n-1 | n^2-n-1
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{bmatrix}1\\2\end{bmatrix}
52_8        | 52_8 ; 52_{8} ; 52
A_2         | A_2 ; A_{2}
1:58 am     | 1:58 am ; 1:58 \text{ a.m.} ; 1:58\text{ AM}
\text{Evelyn} | \text{Evelyn} ; Evelyn ; \textbf{Evelyn} ; evelyn.
\text{ellipse} | an ellipse ; \text{Ellipse}
yes         | \text{Yes} ; yes
"""

WRONG = r"""
18          | 81 ; 180 ; -18 ; 1,8 ; 18, 19 ; 18x ; 18 \pi ; 18 pi ; 18 million ; 18 \text{ million}
18          | 18 or 19 ; 18 \text{ or } 19 ; \text{I do not know} ; a = 18, b = 3 ; 18^2 ; x ; 0
5           | 5 \text{ hours and } 30 \text{ minutes} ; 5:30 ; 5\frac{1}{2}
70000       | 70.000 ; 7,000 ; 70,00
\frac{14}{3} | \frac{3}{14} ; 4.67 ; 14
2\sqrt{3}   | 3.46 ; 2 ; 3
[1, 2)      | (1,2) ; [1,2] ; 1
\{x|-2\leq x < 1\} | (-2, 1) ; 1 ; -2
\{x|x=3k,k\in \mathbb{Z}\} | 3
\left( 3, \frac{\pi}{2} \right) | (3, \frac{\pi}{3}) ; 3 ; (\frac{\pi}{2}, 3)
(1, 2)      | (2,1) ; (1, 2, 3)
\{1, 2\}    | \{1\} ; 2
48$, $384   | 48 ; 384
x^2+2x+1    | x^2+2x ; (x-1)^2
p - q       | q - p
m_{\max }=n^{2}-n-1 | n^2-n+1
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 2 \\ 1 \end{pmatrix}
52_8        | 52_9 ; 52_5 ; 42_8 ; 25 ; 42_{10} ; 101010_2
1:58 am     | 1:58 pm ; 1:59 am
5 pm        | 5 \text{ a.m.} ; 6 pm
A_2         | A_3 ; A
\text{Evelyn} | \text{Briana} ; \text{Evelyn and Briana}
\text{Navin} | \text{Vanin}
\text{even} | \text{odd} ; \text{not even}
"""


def pairs(table: str) -> list[tuple[str, str]]:
    rows = (line.split(" | ") for line in table.strip().splitlines())
    return [(gold.strip(), given) for gold, all_ in rows for given in all_.strip().split(" ; ")]


class TestAnswers:
    @pytest.mark.parametrize(("gold", "given"), pairs(RIGHT))
    def test_right_ones(self, checker: AnswerChecker, gold: str, given: str) -> None:
        assert is_right(checker, rf"So the answer is \boxed{{{given}}}.", gold)

    @pytest.mark.parametrize(("gold", "given"), pairs(WRONG))
    def test_wrong_ones(self, checker: AnswerChecker, gold: str, given: str) -> None:
        assert not is_right(checker, rf"So the answer is \boxed{{{given}}}.", gold)

    @pytest.mark.parametrize(
        ("text", "answer", "expected"),
        [
            (r"\boxed{17}, no: \boxed{18}", "18", Checked(True, "18", False)),
            (r"\boxed{18}, no: \boxed{17}", "18", Checked(False, "17", False)),
            (r"\boxed{18}. Check: 17 + 1 = 18, and 20 - 2 = 5", "18", Checked(True, "18", False)),
            (r"\boxed{18} and then \boxed{1", "18", Checked(True, "18", False)),
            ("It makes 9 * 2 = $18 a day.", "18", Checked(True, "18", False)),
            ("It makes 1,800 dollars.", "1800", Checked(True, "1800", False)),
            ("It is 3/4.", "0.75", Checked(True, "3/4", False)),
            ("So x^2 + 1 is the answer", "x^2 + 1", Checked(False, None, False)),
            ("I cannot say.", "18", Checked(False, None, False)),
            ("", "18", Checked(False, None, False)),
        ],
    )
    def test_where_the_answer_is_found(
        self, checker: AnswerChecker, text: str, answer: str, expected: Checked
    ) -> None:
        assert checker.check(text, problem(answer)) == expected

    def test_the_question_is_no_answer(self, checker: AnswerChecker) -> None:
        asked = problem("18", question=r"Is it 18? Put your final answer within \boxed{18}.")
        assert checker.check("I do not know.", asked) == Checked(False, None, False)
        assert checker.check(r"I must use \boxed{}. Well.", asked) == Checked(False, None, False)
        assert checker.check("Perhaps 17.", asked) == Checked(False, "17", False)

    def test_the_right_answer_lends_no_form_to_a_given_one(self, checker: AnswerChecker) -> None:
        assert not is_right(checker, r"\boxed{x}", "y")
        assert not is_right(checker, r"\boxed{18", "x = 18")


class TestLetters:
    @pytest.mark.parametrize(
        "text",
        [
            *(r"\boxed{B}", r"\boxed{(B)}", r"\boxed{B.}", r"\boxed{\text{B}}", r"\boxed{b}"),
            *(
                r"\boxed{\text{(B)}}",
                r"\boxed{\textbf{(B)}\ 42}",
                r"\boxed{B. 42}",
                r"$\boxed{B)}$",
            ),
            *(r"\boxed{(B) 42}", r"\boxed{\text{Option B}}", r"\boxed{A}, no: \boxed{B}"),
            *(r"\boxed{42}", r"\boxed{\text{42}}", r"\boxed{$42$}"),
            *("The answer is (B).", "The answer is B.", "**Answer: B**", "So it must be\n\n(B)"),
            *("The answer is option B.", "The correct option is (B).", "So:\n**Option B**"),
            *("The answer is (B), because option C ignores friction.", "Choice A is wrong.\n\nB"),
        ],
    )
    def test_the_right_letter(self, checker: AnswerChecker, text: str) -> None:
        choices = problem("B", "41", "42", "43", "44")
        assert checker.check(text, choices) == Checked(True, "B", False)

    @pytest.mark.parametrize(
        ("text", "extracted"),
        [
            (r"\boxed{A}", "A"),
            (r"\boxed{(A)}, not (B)", "A"),
            (r"\boxed{41}", "A"),
            (r"\boxed{A \text{ or } B}", r"A \text{ or } B"),
            (r"\boxed{(A) and (B)}", "(A) and (B)"),
            (r"\boxed{E}", "E"),
            (r"\boxed{45}", "45"),
            ("The answer is a number. B would fit.", None),
            ("Between A and B", None),
            ("Option B is out.", None),
            ("", None),
        ],
    )
    def test_not_the_right_letter(
        self, checker: AnswerChecker, text: str, extracted: str | None
    ) -> None:
        choices = problem("B", "41", "42", "43", "44")
        assert checker.check(text, choices) == Checked(False, extracted, False)

    def test_a_letter_beats_what_an_option_is_called(self, checker: AnswerChecker) -> None:
        assert checker.check(r"\boxed{A}", problem("A", "C", "D")).right
        assert checker.check(r"\boxed{B}", problem("A", "B", "C")).extracted == "A"

    @pytest.mark.parametrize("gold", ["D", r"\text{(D)}"])
    def test_choices_may_be_in_the_question(self, checker: AnswerChecker, gold: str) -> None:
        asked = problem(gold, question="Which? (A) 1 (B) 2 (C) 3 (D) 4")
        for text in (r"\boxed{D}", r"\boxed{\text{(D)}}", r"\boxed{(D)~4}", "The answer is (D)."):
            assert checker.check(text, asked) == Checked(True, "D", False)
        assert checker.check(r"\boxed{C}", asked) == Checked(False, "C", False)


class TestForms:
    @pytest.mark.parametrize(
        "answer", ["x", "18x", "18 or 19", "18 pi", "18 dozen", "", "1,2", "-"]
    )
    def test_no_numbers(self, answer: str) -> None:
        assert bare_number(answer) is None

    @pytest.mark.parametrize(
        ("answer", "number"),
        [
            *(("18", "18"), ("-1,800.50", "-1800.50"), (r"\$1{,}800", "1800"), (".5 kg", ".5")),
            *(("3/4 of a cup", "3/4"), (r"\frac{1}{2}", r"\frac{1}{2}"), ("5 m^2", "5")),
        ],
    )
    def test_numbers(self, answer: str, number: str) -> None:
        assert bare_number(answer) == number

    def test_variables_are_no_words(self) -> None:
        assert plain_words("AB") is plain_words("xyz") is plain_words("x + y") is None
        assert plain_words(r"\text{No}") == "no"
        assert plain_words("the left-hand side") == "left-hand side"

    def test_odd_texts_take_no_time(self) -> None:
        start = time.perf_counter()
        for part in ("{", r"\boxed{", "1,", "(A) ", r"\text{", "answer is ", "a and 1 ", r"\{x|"):
            text = part * 5000
            for answer in (problem("18"), problem("A", "1", "2"), problem("x + 1")):
                extracted_answer(rf"{text} \boxed{{{text}", answer)
                extracted_answer(rf"\boxed{{{text.replace('{', '(')}}}", answer)
        assert time.perf_counter() - start < 20


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    status = Path(f"/proc/{pid}/stat")  # ended, though nobody has asked for its exit status yet
    return status.exists() and ") Z " in status.read_text()


def pid_of(checker: AnswerChecker) -> int:
    assert checker._worker is not None
    return checker._worker.pid


class TestTheProcess:
    def test_what_takes_too_long_is_wrong_and_the_next_answer_is_checked(self) -> None:
        with AnswerChecker(timeout_s=1) as checker:
            assert checker.equal("1", "1")
            first = pid_of(checker)
            start = time.perf_counter()
            assert checker.check(ENDLESS, problem("18")) == Checked(False, "9^{9^{9}}", True)
            assert time.perf_counter() - start < 30
            assert gone(first)
            checker.timeout_s = 30
            assert is_right(checker, r"\boxed{18}", "18")
            assert pid_of(checker) != first

    def test_it_survives_a_crash(self, caplog: pytest.LogCaptureFixture) -> None:
        with AnswerChecker(timeout_s=30) as checker:
            assert is_right(checker, r"\boxed{18}", "18")
            first = pid_of(checker)
            os.kill(first, signal.SIGKILL)
            assert is_right(checker, r"\boxed{18}", "18")
            assert "crashed" in caplog.text
            last = pid_of(checker)
        assert gone(first)
        assert gone(last)

    def test_an_answer_that_crashes_it_is_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        boot = checking._BOOT.replace(
            "serve(int(",
            "import specguard_chains.evaluation.checking_worker as w, os; "
            "compared = w._compared; "
            "w._compared = lambda a, b: os._exit(1) if b == '666' else compared(a, b); serve(int(",
        )
        monkeypatch.setattr(checking, "_BOOT", boot)
        with AnswerChecker(timeout_s=30) as checker:
            assert checker.check(r"\boxed{666}", problem("18")) == Checked(False, "666", False)
            assert is_right(checker, r"\boxed{18}", "18")

    def test_an_interrupted_question_leaves_no_answer_behind(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with AnswerChecker(timeout_s=30) as checker:
            assert checker.equal("1", "1")
            line = checking._Worker._line

            def interrupted(*_: object) -> None:
                raise KeyboardInterrupt

            monkeypatch.setattr(checking._Worker, "_line", interrupted)
            with pytest.raises(KeyboardInterrupt):
                checker.equal("1", "1")
            monkeypatch.setattr(checking._Worker, "_line", line)
            assert not checker.equal("1", "2")

    def test_many_threads_can_share_it(self, checker: AnswerChecker) -> None:
        def check(number: int) -> bool:
            return is_right(checker, rf"\boxed{{{number}}}", str(number // 2 * 2))

        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(check, range(64)))
        assert found == [number % 2 == 0 for number in range(64)]

    async def test_it_works_inside_of_an_event_loop(self, checker: AnswerChecker) -> None:
        assert is_right(checker, r"\boxed{18}", "18")
        checks = [asyncio.to_thread(is_right, checker, rf"\boxed{{{i}}}", "1") for i in range(3)]
        assert await asyncio.gather(*checks) == [False, True, False]

    def test_no_thread_or_process_is_left(self) -> None:
        threads = set(threading.enumerate())
        with AnswerChecker() as checker:
            first = pid_of(checker)
        assert gone(first)
        with AnswerChecker(timeout_s=30) as checker:
            checker.equal("1", "1")
            second = pid_of(checker)
        checker.close()
        assert gone(second)
        assert set(threading.enumerate()) == threads

    def test_it_is_of_no_use_outside_of_its_context(self) -> None:
        checker = AnswerChecker()
        with pytest.raises(EvaluationError, match="the checker is closed; use"):
            checker.check("18", problem("18"))
        with checker:
            pass
        with pytest.raises(EvaluationError, match="the checker is closed; use"):
            checker.check("18", problem("18"))

    @pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
    def test_a_time_limit_is_positive(self, timeout_s: float) -> None:
        with pytest.raises(EvaluationError, match="timeout_s is"):
            AnswerChecker(timeout_s=timeout_s)

    def test_a_script_without_a_main_guard_can_use_it(self, tmp_path: Path) -> None:
        # multiprocessing would run such a script again in its child.
        lines = (
            "from specguard_chains.evaluation.checking import AnswerChecker",
            "from specguard_chains.evaluation.problems import Problem",
            "with AnswerChecker(timeout_s=30) as checker:",
            "    print(checker.check('18', Problem('a', '?', '18')).right)",
        )
        script = tmp_path / "script.py"
        script.write_text("\n".join(lines))
        from_file = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, timeout=120, check=False
        )
        from_stdin = subprocess.run(
            [sys.executable, "-"],
            input=script.read_text(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (from_file.stdout, from_file.stderr) == ("True\n", "")
        assert (from_stdin.stdout, from_stdin.stderr) == ("True\n", "")

    def test_it_ends_with_an_owner_that_is_killed(self) -> None:
        lines = (
            "import os, signal",
            "from specguard_chains.evaluation.checking import AnswerChecker",
            "with AnswerChecker(timeout_s=30) as checker:",
            "    checker.equal('1', '1')",
            "    print(checker._worker.pid, flush=True)",
            "    os.kill(os.getpid(), signal.SIGKILL)",
        )
        owner = subprocess.run(
            [sys.executable, "-c", "\n".join(lines)], capture_output=True, timeout=120, check=False
        )
        deadline = time.monotonic() + 60
        while not gone(int(owner.stdout)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert gone(int(owner.stdout))

    def test_the_system_ends_a_comparison_that_nobody_waits_for(self) -> None:
        boot = "from specguard_chains.evaluation.checking_worker import serve; serve(1)"
        worker = subprocess.run(
            [sys.executable, "-c", boot],
            input=json.dumps(["18", "9^{9^{9}}"]).encode() + b"\n",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=120,
            check=False,
        )
        assert worker.returncode == -signal.SIGALRM

    def test_without_math_verify_it_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checking, "find_spec", lambda name: None)
        with pytest.raises(EvaluationError, match=r"math-verify.*specguard_chains\[bench\]"):
            AnswerChecker().__enter__()

    def test_a_broken_math_verify_is_named(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "math_verify.py").write_text("import something_that_is_missing")
        monkeypatch.syspath_prepend(tmp_path)
        with (
            AnswerChecker() as checker,
            pytest.raises(EvaluationError, match="something_that_is_m"),
        ):
            checker.equal("1", "2")

    def test_a_worker_that_does_not_start_is_an_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(checking, "_BOOT", "raise SystemExit(3)")
        with AnswerChecker() as checker, pytest.raises(EvaluationError, match="exit status 3"):
            checker.equal("1", "2")

    def test_what_libraries_print_is_no_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        boot = checking._BOOT.replace(
            "serve(int(",
            "import specguard_chains.evaluation.checking_worker as w; compared = w._compared; "
            "w._compared = lambda a, b: (print('noise'), compared(a, b))[1]; serve(int(",
        )
        monkeypatch.setattr(checking, "_BOOT", boot)
        with AnswerChecker(timeout_s=30) as checker:
            assert checker.equal("1", "1.0")


def test_an_error_within_the_library_is_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gold: str, given: str) -> bool:
        raise MemoryError

    monkeypatch.setattr(checking_worker, "equal", fail)
    assert checking_worker._compared("1", "2") == {"equal": False, "failure": "MemoryError()"}
