"""The final answer of a text: its last box, else its last number."""

from __future__ import annotations

import time

import pytest

from specguard_chains.decoding.final_answer import final_answer


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
        ("25%", "25"),
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
