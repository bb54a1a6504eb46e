"""Which of the retrieved passages each step of an answer leans on, read while it is written."""

from langchain_core.messages import HumanMessage, SystemMessage

from specguard_chains import ChatSpecGuard

PASSAGES = [
    "Returns: goods can be sent back within 30 days if they are unused and in their box.",
    "Delivery: parcels arrive within 3 working days; express delivery costs $12.",
    "Warranty: all devices are repaired free of charge for 24 months.",
]
QUESTION = "How much does express delivery cost, and how long does a usual parcel take?"


def main() -> None:
    attention = {"verify_with": "draft", "confidence_weight": 0.3}  # by default none is read
    llm = ChatSpecGuard(temperature=0, max_tokens=80, **attention)
    messages = [
        SystemMessage("Answer in one or two short sentences from the user's passages."),
        HumanMessage("\n\n".join([*PASSAGES, QUESTION])),
    ]
    answer = llm.invoke(messages, passages=PASSAGES)  # texts that stand in the prompt to the letter

    for step in answer.additional_kwargs["specguard_steps"]:
        print(step["text"].strip())
        # Long passages get more than short ones of the same weight: compare what a character gets.
        dense = [share / len(text) for share, text in zip(step["passages"], PASSAGES, strict=True)]
        for share, weight, text in zip(step["passages"], dense, PASSAGES, strict=True):
            bar = "█" * round(40 * weight / sum(dense))
            print(f"  {share:6.1%} of its attention  {bar:<40}  {text[:36]}…")


if __name__ == "__main__":
    main()
