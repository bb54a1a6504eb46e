"""A LangGraph app that streams two things at once: the answer's text, and how it was verified."""

from typing import Any

from langgraph.graph import END, START, MessagesState, StateGraph

from specguard_chains import ChatSpecGuard
from specguard_chains.callbacks import LangGraphStepWriter

SYSTEM = ("system", "Answer with a numbered list, one line for each point.")
QUESTION = "What are three reasons to let bread dough rest before it is baked?"


def build(llm: ChatSpecGuard) -> Any:
    """Return a graph whose one node lets the model answer."""

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [llm.invoke([SYSTEM, *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_edge(START, "answer")
    graph.add_edge("answer", END)
    return graph.compile()


def main() -> None:
    app = build(ChatSpecGuard(temperature=0, max_tokens=160, step_delimiter="\n"))
    parts = app.stream(
        {"messages": [("user", QUESTION)]},
        {"callbacks": [LangGraphStepWriter()]},  # puts the steps into the custom stream
        stream_mode=["custom", "messages"],
    )
    for mode, part in parts:
        if mode == "custom":
            step = part["data"]
            score = "no score" if step["score"] is None else f"score {step['score']:.2f}"
            print(f"[{step['number']}] by the {step['source']}, {step['verdict']}, {score}\n")
        else:
            chunk, metadata = part
            print(chunk.text.strip(), flush=True)
    print(f"The text came from the node {metadata['langgraph_node']!r}.")


if __name__ == "__main__":
    main()
