"""A calculator takes part in verification: steps with a wrong equation are written anew."""

import ast
import operator
import re
from collections.abc import Iterator
from fractions import Fraction

from specguard_chains import ChatSpecGuard, Review, Step

QUESTION = (
    "A factory packs 347 boxes with 286 screws each, and 193 boxes with 78 screws each. "
    "How many screws are packed altogether?"
)
SYSTEM = "Reason step by step. Write every calculation as a plain equation like 12 * 3 = 36."

NUMBER = r"\d[\d,]*(?:\.\d+)?"
EQUATION = re.compile(rf"(?<![\d+*/(.-])({NUMBER}(?:\s*[-+*/]\s*{NUMBER})+)\s*=\s*({NUMBER})")
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def value(node: ast.expr) -> Fraction:
    """Return an expression's value; nothing but numbers and the four operations is known."""
    match node:
        case ast.Constant(int() | float() as number):
            return Fraction(str(number))
        case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](value(left), value(right))
    raise ValueError(f"not arithmetic: {ast.unparse(node)}")


def mistakes(text: str) -> Iterator[str]:
    """Yield the equations in a text that are wrong."""
    for left, right in EQUATION.findall(text.replace("×", "*").replace(r"\times", "*")):
        exact = value(ast.parse(left.replace(",", ""), mode="eval").body)
        if abs(exact - Fraction(right.replace(",", ""))) > abs(exact) / 1000:  # it may be rounded
            yield f"{left} = {right}, but it is {float(exact):g}"


def review(step: Step) -> Review:
    wrong = list(mistakes(step.text))
    for equation in wrong:
        print(f"  ✗ step {step.number} by the {step.source}: {equation}")
    return Review.REGENERATE if wrong else Review.KEEP


def main() -> None:
    llm = ChatSpecGuard(seed=1, max_tokens=300)
    for step in llm.steps([("system", SYSTEM), ("user", QUESTION)], review=review):
        versions = "".join(" ✗" if said is Review.REGENERATE else " ✓" for said in step.reviews)
        print(f"[{step.number}] {step.source}{versions}: {step.text.strip()}")


if __name__ == "__main__":
    main()
