"""Whether a step leans on the passage that answers the question, on the default pair.

Five questions with three passages each, and every passage in every place: the passage with the
largest share of a step's attention ought to be the one that has the answer.
"""

from __future__ import annotations

import numpy as np
from langchain_core.messages import HumanMessage
from shared import DRAFTS_SIGNALS

from specguard_chains import ChatSpecGuard
from specguard_chains.evaluation.statistics import wilson_interval
from specguard_chains.messages import STEPS_KEY

CASES = (
    (
        (
            "The Danube rises in the Black Forest in Germany and flows through ten "
            "countries into the Black Sea.",
            "The Rhone rises in a glacier of the Swiss Alps and flows through Lake Geneva "
            "into the Mediterranean Sea.",
            "The Elbe rises in the Giant Mountains of Bohemia and flows through Hamburg "
            "into the North Sea.",
        ),
        "Into which sea does the Rhone flow, and through which lake?",
        1,
    ),
    (
        (
            "Returns: goods can be sent back within 30 days if they are unused and in their box.",
            "Delivery: parcels arrive within 3 working days; express delivery costs $12.",
            "Warranty: all devices are repaired free of charge for 24 months.",
        ),
        "How much does express delivery cost, and how long does a usual parcel take?",
        1,
    ),
    (
        (
            "Ada Lovelace wrote notes on the Analytical Engine in 1843, with a method to "
            "compute Bernoulli numbers.",
            "Grace Hopper wrote the compiler A-0 in 1952 and took part in the design of COBOL.",
            "Katherine Johnson computed the trajectory of Freedom 7 for NASA in 1961.",
        ),
        "Who wrote a compiler, when, and what was it called?",
        1,
    ),
    (
        (
            "The blue whale eats up to 4 tonnes of krill a day and grows 30 metres long.",
            "The giant squid lives at a depth of 300 to 1000 metres and has the largest "
            "eyes of all animals.",
            "The emperor penguin breeds in the Antarctic winter and can dive for 20 minutes.",
        ),
        "How long can the emperor penguin dive, and where does it breed?",
        2,
    ),
    (
        (
            "list.append(x) adds an item to the end of the list and returns None.",
            "list.sort() sorts the items of the list in place and returns None.",
            "list.pop(i) removes the item at the given position in the list and returns it.",
        ),
        "Which list method adds an item at the end, and what does it return?",
        0,
    ),
)
"""Passages, a question, and which passage answers it."""
ORDERS = ((0, 1, 2), (1, 2, 0), (2, 0, 1))


def main() -> None:
    """Print each step's shares, and how often the right passage has the largest."""
    llm = ChatSpecGuard(temperature=0, max_tokens=80, seed=1, **DRAFTS_SIGNALS)
    found = []
    for passages, question, right in CASES:
        for order in ORDERS:
            given = [passages[i] for i in order]
            text = "Answer in one or two short sentences from these passages."
            message = HumanMessage("\n\n".join([text, *given, question]))
            answer = llm.invoke([message], passages=given)
            for step in answer.additional_kwargs[STEPS_KEY]:
                shares = np.array(step["passages"])
                found.append(order[int(shares.argmax())] == right)
                told = "  ".join(f"{share:5.1%}" for share in shares)
                print(f"{told}  {'right' if found[-1] else 'WRONG'}  {step['text'].strip()[:60]}")
    low, high = wilson_interval(sum(found), len(found))
    print(
        f"the right passage has the largest share in {sum(found)} of {len(found)} steps "
        f"({low:.0%} to {high:.0%} if steps were independent, which those of one question are not; "
        "by chance 33%)"
    )


if __name__ == "__main__":
    main()
