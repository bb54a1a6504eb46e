"""A calculator takes part in verification: steps with a wrong equation are written anew."""

import re
from collections.abc import Iterator
from fractions import Fraction

from specguard_chains import ChatSpecGuard, Review, Step

SYSTEM = (
    "Solve the problem step by step. Write one calculation per line, always with its result, "
    "like 3 * 12 = 36."
)
QUESTION = "A factory packs 64 boxes of 87 screws and 48 boxes of 76. How many screws is that?"
NUMBER = r"\d[\d,]{0,14}(?:\.\d{1,9})?"
EQUATION = re.compile(  # neither its beginning nor its end is a part of something larger
    rf"(?<![\w+*/().,-])({NUMBER}(?:(?:[-+*]|/(?!0)){NUMBER})+)=({NUMBER})(?!\d|[.,]\d|[-+*/=%(])"
)


def value(expression: str) -> Fraction:
    """Return the exact value of a sum of products."""
    total = Fraction(0)
    for sign, term in re.findall(r"([-+]?)([^-+]+)", expression):
        product = Fraction(f"{sign}1")
        for operation, number in re.findall(r"([*/]?)([\d.]+)", term):
            product *= 1 / Fraction(number) if operation == "/" else Fraction(number)
        total += product
    return total


def mistakes(text: str) -> Iterator[str]:
    """Yield what is wrong about the equations in a text; results may be rounded."""
    text = re.sub(r"\\?\$", "", text.replace("×", "*").replace(r"\times", "*"))
    text = re.sub(r"(?<=\d) [a-z]+(?:/[a-z]+)?(?= [-+*/=])", "", text)  # units
    text = re.sub(r"(?<=[\w)]) *([-+*/=%]) *", r"\1", text)
    for left, right in EQUATION.findall(text):
        last_digit = Fraction(1, 10 ** len(right.partition(".")[2]))
        exact = value(left.replace(",", ""))
        if abs(exact - Fraction(right.replace(",", ""))) > last_digit / 2:
            yield f"{left}={right} should be {exact}"


def review(step: Step) -> Review:
    for mistake in (wrong := list(mistakes(step.text))):
        print(f"  ✗ step {step.number} by the {step.source}: {mistake}")
    return Review.REGENERATE if wrong else Review.KEEP


def main() -> None:
    # A line is a step, so that a mistake costs a line and not a paragraph.
    llm = ChatSpecGuard(step_delimiter="\n", seed=2, max_tokens=100, review=review)
    for step in llm.steps([("system", SYSTEM), ("user", QUESTION)]):
        marks = " ".join("✓" if said is Review.KEEP else "✗" for said in step.reviews)
        print(f"[{step.number}] {marks} by the {step.source}: {step.text.strip()}")


if __name__ == "__main__":
    main()
