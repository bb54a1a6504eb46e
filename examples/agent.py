"""An agent with two tools that tells who wrote each of its tool calls, and how sure that was."""

from typing import Any, Literal

from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, ToolMessage

from specguard_chains import ChatSpecGuard

SYSTEM = (
    "You sell furniture. Never guess a price: call look_up_price. Never compute yourself: call "
    "multiply. Then answer in one sentence."
)
QUESTIONS = [
    "What is the price of a lamp? Use the tool.",
    "I buy 27 rugs at 43 euros each. What do they cost together? Use the tool.",
]


def look_up_price(item: Literal["chair", "desk", "lamp"]) -> str:
    """Return the price of one item of the shop, in euros."""
    return str({"chair": 84, "desk": 216, "lamp": 37}[item])


def multiply(a: float, b: float) -> str:
    """Return the product of two numbers."""
    return f"{a * b:g}"


class PrintSteps(BaseCallbackHandler):
    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        if name == "specguard_step":
            score = "no score" if data["score"] is None else f"score {data['score']:.2f}"
            print(f"    {data['phase']} by the {data['source']}, {data['verdict']}, {score}")


def main() -> None:
    llm = ChatSpecGuard(temperature=0, max_tokens=120)
    agent: Any = create_agent(llm, [look_up_price, multiply], system_prompt=SYSTEM)
    for question in QUESTIONS:
        print(question)
        asked = {"messages": [("user", question)]}
        state = agent.invoke(asked, {"callbacks": [PrintSteps()], "recursion_limit": 12})
        for message in state["messages"][1:]:
            match message:
                case AIMessage(tool_calls=[_, *_]):
                    steps = message.additional_kwargs["specguard_steps"]
                    authors = [step["source"] for step in steps if step["phase"] == "tool_call"]
                    for call, author in zip(message.tool_calls, authors, strict=True):
                        print(f"  the {author} calls {call['name']}({call['args']})")
                case ToolMessage():
                    print(f"  {message.name} says {message.text}")
                case _:
                    print(f"  answer: {message.text}")


if __name__ == "__main__":
    main()
