"""The final answer of a text, its last box or else its last number, and which of them are equal."""

from __future__ import annotations

import time
from itertools import combinations

import pytest

from specguard_chains.decoding.final_answer import canonical_answer, final_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So \boxed{18}.", "18"),
        (r"\boxed{ 18 }", "18"),
        (r"First \boxed{1}, no: \boxed{2}. Check: 1 + 2 = 3.", "2"),
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"\boxed{\text{B}}", r"\text{B}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}, 5 of them", r"\left\{ x \right."),
        (r"\boxed{[1, \infty)} and 4 more", r"[1, \infty)"),
        (r"\boxed{3}, then cut off in \boxed{\frac{1}{", "3"),
        (r"cut off at once: 12 and \boxed{", "12"),
        (r"I must use \boxed{}. It is 4.", "4"),
        (r"It is \boxed{4}, as \boxed{} asks.", "4"),
        (r"\boxed{a = \boxed{5}}", "5"),
        (r"} and } \boxed{6} }", "6"),
        ("\\boxed{1,\n2}", "1,\n2"),
    ],
)
def test_the_last_complete_box_counts(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 18.", "18"),
        ("2 + 3 = 5 apples", "5"),
        ("It costs $1,234,567.50 in all.", "1234567.50"),
        (r"It costs \$1{,}234", "1234"),
        (r"about 12\,500 people", "12500"),
        ("1, 2 and 3,4", "4"),
        ("1,2345", "2345"),
        ("x = -5", "-5"),
        ("x = −5", "-5"),
        ("loses $-5.25", "-5.25"),
        ("10-3", "3"),
        ("(1+1)-3", "3"),
        ("between 3-5 days", "5"),
        ("a share of .25", ".25"),
        ("a share of 3/4.", "3/4"),
        ("a half, \\frac{1}{2}", "1/2"),
        ("a loss, $-\\dfrac{1}{2}$", "-1/2"),
        ("25%", "25%"),
        (r"a rise of $12.5\%$.", "12.5%"),
        (r"a rise of $12.5\,\text{ percent}$", "12.5%"),
        ("a rise of **25** per cent, as asked", "25%"),
        ("30% of 50 is 15", "15"),
        ("by 25 percentage points", "25"),
        ("12 cm^2", "12"),
        ("12 cm^{2}", "12"),
        ("12 of H2O, x_1", "12"),
        ("5m long", "5"),
        ("version 1.5", "1.5"),
        ("It is **42**", "42"),
    ],
)
def test_without_a_box_the_last_number_counts(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize("text", ["", "no idea", r"\boxed{}", r"\boxed{ }", "x^2"])
def test_a_text_may_hold_no_answer(text: str) -> None:
    assert final_answer(text) is None


@pytest.mark.parametrize(
    "text", [r"\boxed{" * 50_000, "1," * 50_000, "{" * 100_000, "9" * 100_000, "1,111" * 20_000]
)
def test_odd_texts_take_no_time(text: str) -> None:
    start = time.perf_counter()
    final_answer(text)
    assert time.perf_counter() - start < 5


# --- what is equal

EQUAL = r"""
18 ; 18.0 ;  18.00  ; 018 ; +18 ; \$18 ; $18 ; $18$ ; 18. ; 18 dollars ; 18 \text{ dollars}
18 ; 18\text{ eggs per day} ; \text{18 eggs} ; 18 cm^2 ; 18^\circ ; 18\,\text{m/s} ; 36/2
18 ; x = 18 ; x_1 = 18 ; x_{max} = 18 ; \text{total cost} = \$18.00 ; \theta=18
1000 ; 1{,}000 ; 1,000 ; 1\,000 ; 1 000 ; 1,\!000 ; \$1,000.00 ; 1000 \text{ km}
-5 ; −5 ; -5.0 ; -\$5 ; \$-5 ; y = -5 ; -\frac{10}{2}
0.5 ; .5 ; 1/2 ; \frac{1}{2} ; \dfrac12 ; 50\% ; 50% ; 50 percent ; \frac{2}{4} \text{ of a cup}
3.5 ; 3\frac{1}{2} ; 3 1/2 ; 7/2 ; \frac72
18\% ; 18% ; 18 \text{ percent} ; 18.0\% ; p = 18\%
B ; (B) ; b ; (b) ; B. ; \text{B} ; \textbf{(B)} ; B. 42 ; \text{Option B} ; \textbf{(B)}\ 42
\text{Evelyn} ; Evelyn ; evelyn. ; \textbf{Evelyn}
yes ; Yes ; \text{Yes} ; \text{yes}.
\left( 3, \frac{\pi}{2} \right) ; (3,\dfrac{\pi}{2}) ; ( 3, \tfrac{\pi}{2} )
x^2 + 1 ; x^2+1 ; $x^2+1$
18 or 19 ; 18 \text{ or } 19
"""

UNEQUAL = r"""
18 ; 18.1 ; -18 ; 18\% ; 180 ; 18 million ; 18x ; 18 \pi ; 18^2 ; 18 or 19 ; 18, 19 ; 18 dozen
1000 ; 1,00 ; 1.000 ; 1{,}000{,}000 ; 1000 \text{ thousand}
14/3 ; 4.67 ; 3/14
x = 3 ; x = 4 ; x \le 3 ; x = 3, y = 4 ; x = 3 \text{ or } x = 4 ; x^2 = 3
5 ; 5 \text{ hours and } 30 \text{ minutes} ; 5:30 ; 5\frac{1}{2} ; 5e
A ; B ; (C) ; (A)(B) ; (A) \text{ and } (B) ; D + 1
(x)(x+1) ; (x)(x-1) ; x
(1,2) ; (2,1) ; [1,2] ; 12
X+1 ; x+1
1/0 ; 2/0 ; 0
\text{even} ; \text{odd} ; \text{not even}
"""


def rows(table: str) -> list[list[str]]:
    return [line.split(" ; ") for line in table.strip().splitlines()]


@pytest.mark.parametrize("answers", rows(EQUAL), ids=lambda row: row[0])
def test_answers_that_say_the_same_are_equal(answers: list[str]) -> None:
    forms = {answer: canonical_answer(answer) for answer in answers}
    assert len(set(forms.values())) == 1, forms


def test_units_are_not_told_apart_as_the_library_strips_them() -> None:
    """If this fails, math-verify tells them apart now: let votes do so, too."""
    math_verify = pytest.importorskip("math_verify")
    hours, minutes = (
        math_verify.parse(rf"$5 \text{{ {unit}}}$", parsing_timeout=None)
        for unit in ("hours", "minutes")
    )
    assert math_verify.verify(hours, minutes, timeout_seconds=None)
    assert canonical_answer("5 hours") == canonical_answer("5 minutes")


@pytest.mark.parametrize("answers", rows(UNEQUAL), ids=lambda row: row[0])
def test_other_answers_are_not(answers: list[str]) -> None:
    for one, other in combinations(answers, 2):
        assert canonical_answer(one) != canonical_answer(other), (one, other)


@pytest.mark.parametrize(
    "part",
    ["{", "9", "1,", "1 ", "(A) ", r"\text{", "a and 1 ", r"\{x|", "x_", "x = ", "a ", r"\frac{1}"],
)
def test_odd_answers_take_no_time(part: str) -> None:
    start = time.perf_counter()
    assert canonical_answer(part * 5000) == canonical_answer(part * 5000)
    assert time.perf_counter() - start < 5
