"""An agent with two tools and an answer by schema: 20 tasks, SpecGuard against its target alone.

    python benchmarks/agent.py --out agent.jsonl
    python benchmarks/agent.py --decoder specguard --critical-steps target --limit 5 --out a.jsonl

Each task is one run of LangChain's `create_agent` with a price list and a calculator; it is solved
if the number in the structured answer is right. The decoders take turns on every task, each from a
cold prompt cache, so that drift of the machine hits all alike. Results are appended as they come,
each with its settings and a digest of the code; a run that is started again goes on where it
stopped, and one with other settings neither takes nor reports the results of the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from specguard_chains import ChatSpecGuard
from specguard_chains.assembly import assemble
from specguard_chains.evaluation.invocation import digest_of_sources
from specguard_chains.evaluation.lines import Lines, open_lines
from specguard_chains.evaluation.statistics import wilson_interval
from specguard_chains.messages import STEPS_KEY

PRICES = {
    "chair": 84,
    "clock": 46,
    "desk": 216,
    "lamp": 37,
    "mirror": 73,
    "rug": 58,
    "shelf": 129,
    "vase": 19,
}
SYSTEM = (
    "You work in a furniture shop. Prices are in euros. Look prices up with look_up_price and "
    "compute with calculate; do not guess. When you know the result, answer."
)
MAX_TURNS = 6
"""Most answers of the model in one task."""


@tool
def look_up_price(item: str) -> str:
    """Return the price of one item of the shop, in euros."""
    price = PRICES.get(item.strip().lower())
    return f"no {item!r} here; there are: {', '.join(PRICES)}" if price is None else str(price)


@tool
def calculate(a: float, operation: Literal["+", "-", "*", "/"], b: float) -> str:
    """Return the result of one operation on two numbers."""
    match operation:
        case "+":
            result = a + b
        case "-":
            result = a - b
        case "*":
            result = a * b
        case _ if b == 0:
            return "nothing can be divided by 0"
        case _:
            result = a / b
    return f"{result:g}" if abs(result) < 1e6 else str(result)


class Result(BaseModel):
    """The answer to the customer's question."""

    number: float = Field(description="the number that was asked for")


TASKS = {
    "What does a lamp cost?": 37,
    "How much is a desk?": 216,
    "Tell me the price of a rug.": 58,
    "What is the price of the mirror?": 73,
    "How much do you want for a clock?": 46,
    "What does one vase cost?": 19,
    "What is 27 times 43?": 1161,
    "Add 1384 and 2758.": 4142,
    "How much is 5013 minus 1847?": 3166,
    "What is 156 divided by 12?": 13,
    "Multiply 312 by 18.": 5616,
    "What is 968 plus 4477?": 5445,
    "What do 12 lamps cost?": 444,
    "What do 7 chairs cost?": 588,
    "What do a desk and a shelf cost together?": 345,
    "How much more does a desk cost than a mirror?": 143,
    "What do 15 rugs cost?": 870,
    "I pay for a clock with 100 euros. How much change do I get?": 54,
    "What do 9 vases cost?": 171,
    "How much cheaper is a rug than a chair?": 26,
}


@dataclass
class Outcome:
    """What one agent run has come to."""

    task: str
    decoder: str
    settings: dict[str, Any]
    """Of all decoders of the run."""
    solved: bool
    answer: float | None
    error: str | None
    turns: int
    tool_calls: list[dict[str, Any]]
    steps: int
    events: int
    accepted: int
    """Drafted steps that passed."""
    steps_by_source: dict[str, int]
    call_steps_by_source: dict[str, int]
    """Steps that are tool calls."""
    input_tokens: int
    output_tokens: int
    seconds: float


class Listener(BaseCallbackHandler):
    """Counts step events; keeps the messages of all turns, those of a run that fails too."""

    def __init__(self) -> None:
        self.events = 0
        self.messages: list[AIMessage] = []

    def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        self.events += name == "specguard_step"

    def on_llm_end(self, response: Any, **_: Any) -> None:
        self.messages.append(response.generations[0][0].message)


STRATEGIES: dict[str, Any] = {
    "auto": Result,
    "text": ProviderStrategy(Result),
    "tool": ToolStrategy(Result),
}
"""How an agent asks for its answer; auto lets LangChain choose by the model's profile."""


def run(model: ChatSpecGuard, decoder: str, settings: dict[str, Any], task: str) -> Outcome:
    """Let an agent do a task, from a cold prompt cache."""
    for engine in assemble(model).engines:
        engine.clear()  # type: ignore[attr-defined]
    agent: Any = create_agent(
        model,
        [look_up_price, calculate],
        system_prompt=SYSTEM,
        response_format=STRATEGIES[settings["strategy"]],
    )
    listener, answer, error = Listener(), None, None
    start = time.perf_counter()
    try:
        state = agent.invoke(
            {"messages": [HumanMessage(task)]},
            {"callbacks": [listener], "recursion_limit": 2 * MAX_TURNS},
        )
        answer = state["structured_response"].number
    except Exception as failure:  # whatever ends the run, the task is not solved
        error = f"{type(failure).__name__}: {failure}"[:300]
    seconds = time.perf_counter() - start
    steps = [step for m in listener.messages for step in m.additional_kwargs[STEPS_KEY]]
    usage: list[Any] = [message.usage_metadata for message in listener.messages]
    return Outcome(
        task=task,
        decoder=decoder,
        settings=settings,
        solved=answer == TASKS[task],
        answer=answer,
        error=error,
        turns=len(listener.messages),
        tool_calls=[
            {"name": call["name"], "args": call["args"]}
            for message in listener.messages
            for call in message.tool_calls
        ],
        steps=len(steps),
        events=listener.events,
        accepted=sum(step["verdict"] == "accepted" for step in steps),
        steps_by_source=by_source(steps),
        call_steps_by_source=by_source([s for s in steps if s["phase"] == "tool_call"]),
        input_tokens=sum(tokens["input_tokens"] for tokens in usage),
        output_tokens=sum(tokens["output_tokens"] for tokens in usage),
        seconds=seconds,
    )


def by_source(steps: list[dict[str, Any]]) -> dict[str, int]:
    return {
        source: sum(step["source"] == source for step in steps) for source in ("draft", "target")
    }


def report(outcomes: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(outcome["decoder"] for outcome in outcomes))
    print("\n| decoder | solved | 95 % interval | s a task | tokens | steps | events | calls |")
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        rows = [outcome for outcome in outcomes if outcome["decoder"] == name]
        solved, n = sum(row["solved"] for row in rows), len(rows)
        low, high = wilson_interval(solved, n)
        steps, events, calls = (
            sum(values)
            for values in zip(
                *[(row["steps"], row["events"], len(row["tool_calls"])) for row in rows],
                strict=True,
            )
        )
        print(
            f"| {name} | {solved}/{n} = {solved / n:.0%} | {low:.0%} to {high:.0%} | "
            f"{statistics.mean(row['seconds'] for row in rows):.1f} | "
            f"{sum(row['output_tokens'] for row in rows)} | {steps} | {events} | {calls} |"
        )
    print("\nsteps, and among them tool calls, by who wrote them:")
    for name in names:
        rows = [outcome for outcome in outcomes if outcome["decoder"] == name]
        for what in ("steps_by_source", "call_steps_by_source"):
            counts = {source: sum(row[what][source] for row in rows) for source in rows[0][what]}
            print(f"  {name}, {what.removesuffix('_by_source')}: {counts}")


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options that all models have."""
    shared: dict[str, Any] = {
        "temperature": arguments.temperature,
        "max_tokens": arguments.max_tokens,
        "n_threads": arguments.threads,
        "seed": 1,
    }
    for name in ("confidence_weight", "threshold", "verify_with", "patience"):
        if (value := getattr(arguments, name)) is not None:
            shared[name] = value
    return shared


def variants(arguments: argparse.Namespace, shared: dict[str, Any]) -> dict[str, ChatSpecGuard]:
    """Return the models to compare, by the name that the report gives them."""
    models = {}
    for decoder in arguments.decoder:
        for critical in arguments.critical_steps if decoder.startswith("specguard") else [None]:
            name = decoder if critical is None else f"{decoder}, critical_steps={critical}"
            options = {} if critical is None else {"critical_steps": critical}
            models[name] = ChatSpecGuard(decoder=decoder, **options, **shared)
    return models


def solve(
    models: dict[str, ChatSpecGuard], tasks: list[str], settings: dict[str, Any], lines: Lines[Any]
) -> list[dict[str, Any]]:
    """Let all models do the tasks that are not done yet; return all outcomes of these settings."""
    outcomes = [outcome for outcome in lines.records if outcome.get("settings") == settings]
    if others := len(lines.records) - len(outcomes):
        print(f"{lines.path} has {others} results of other settings, which are left out")
    done = {(outcome["task"], outcome["decoder"]) for outcome in outcomes}
    for task in tasks:
        for name, model in models.items():
            if (task, name) in done:
                continue
            outcome = run(model, name, settings, task)
            outcomes.append(asdict(outcome))
            lines.append(json.dumps(outcomes[-1]))
            print(
                f"{task!r} {name}: {'solved' if outcome.solved else 'not solved'}, "
                f"{outcome.answer}, {len(outcome.tool_calls)} calls, {outcome.steps} steps, "
                f"{outcome.seconds:.1f} s {outcome.error or ''}",
                flush=True,
            )
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--decoder", nargs="+", default=["specguard", "target"])
    parser.add_argument(
        "--critical-steps", nargs="+", default=["verify", "target"], choices=["verify", "target"]
    )
    parser.add_argument("--strategy", default="auto", choices=STRATEGIES)
    parser.add_argument("--limit", type=int, default=len(TASKS))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--confidence-weight", type=float)
    parser.add_argument("--threshold", type=float)
    parser.add_argument("--verify-with", choices=["draft", "target"])
    parser.add_argument("--patience", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    shared = options_of(arguments)
    models = variants(arguments, shared)
    with open_lines(arguments.out, json.loads) as lines:
        for model in models.values():
            model.invoke("Hello", max_tokens=1)  # load it before the clock runs
        settings = shared | {"strategy": arguments.strategy, "sources": digest_of_sources()}
        tasks = list(TASKS)[: arguments.limit]
        outcomes = solve(models, tasks, settings, lines)
    report(outcomes)


if __name__ == "__main__":
    main()
