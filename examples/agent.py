"""An agent with two tools that tells who wrote each of its tool calls, and how sure that was."""

from typing import Any

from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, ToolMessage

from specguard_chains import ChatSpecGuard

SYSTEM = (
    "You work in a furniture shop. Look prices up with look_up_price and compute with multiply; "
    "do not guess. When you know the result, answer in one sentence."
)
PRICES = {"chair": 84, "desk": 216, "lamp": 37}


def look_up_price(item: str) -> str:
    """Return the price of one item of the shop, in euros."""
    return str(PRICES.get(item.lower(), f"no {item!r} here; there are {', '.join(PRICES)}"))


def multiply(a: float, b: float) -> str:
    """Return the product of two numbers."""
    return f"{a * b:g}"


class Watch(BaseCallbackHandler):
    """Prints each step of the agent's model the moment that it is verified."""

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        if name == "specguard_step":
            score = "no score" if data["score"] is None else f"score {data['score']:.2f}"
            print(f"  {data['phase']} by the {data['source']}, {score}: {data['text'].strip()}")


def main() -> None:
    llm = ChatSpecGuard(temperature=0, max_tokens=120)
    agent: Any = create_agent(llm, [look_up_price, multiply], system_prompt=SYSTEM)
    question = {"messages": [("user", "What do 12 lamps cost?")]}
    state = agent.invoke(question, {"callbacks": [Watch()], "recursion_limit": 12})

    print("\nThe conversation:")
    for message in state["messages"]:
        match message:
            case AIMessage(tool_calls=[_, *_]):
                calls = [f"{call['name']}({call['args']})" for call in message.tool_calls]
                steps = message.additional_kwargs["specguard_steps"]
                authors = [step["source"] for step in steps if step["phase"] == "tool_call"]
                print(f"  calls {', '.join(calls)}, written by the {', '.join(authors)}")
            case ToolMessage():
                print(f"  {message.name} says {message.text}")
            case _:
                print(f"  {message.type}: {message.text}")


if __name__ == "__main__":
    main()
