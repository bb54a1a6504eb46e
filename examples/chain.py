"""A chain that goes on with each verified step while the model writes the next one."""

import re
from dataclasses import dataclass

from langchain_core.prompts import ChatPromptTemplate

from specguard_chains import ChatSpecGuard, Step, StepParser

SYSTEM = r"Reason step by step, and put your final answer within \boxed{{}}."
QUESTION = "A bakery sells 3 trays of 12 muffins at $2 a muffin. How much does it earn?"


@dataclass
class Finding:
    """What the next link of the chain makes of a step."""

    step: int
    written_by: str
    score: float
    numbers: list[str]


def read(step: Step) -> Finding:
    numbers = re.findall(r"\d+(?:\.\d+)?", step.text)
    return Finding(step.number, step.source, step.score or 0.0, numbers)


def show(finding: Finding) -> str:
    about = f"step {finding.step} by the {finding.written_by}, score {finding.score:.2f}"
    return f"{about}: numbers {', '.join(finding.numbers) or 'none'}"


def has_result(step: Step) -> bool:
    """Say whether the answer may end here: what comes after the box is of no use to us."""
    return r"\boxed" in step.text


def main() -> None:
    prompt = ChatPromptTemplate([("system", SYSTEM), ("user", "{question}")])
    llm = ChatSpecGuard(temperature=0, max_tokens=250, stop_when=has_result)

    # Everything after the parser is called once for each step, as soon as the step is verified.
    chain = prompt | llm | StepParser() | read | show
    for line in chain.stream({"question": QUESTION}):
        print(line)


if __name__ == "__main__":
    main()
