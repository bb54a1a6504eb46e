"""A LangChain chain whose answer is drafted small, verified step by step, and repaired."""

from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from rich.console import Console

from specguard_chains import ChatSpecGuard
from specguard_chains.console import fetch_progress, print_metrics, print_step, print_text
from specguard_chains.models import DEFAULT_PAIR, resolve_pair

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{{}}."
QUESTION = "A shop sells 3 pens for $4. What do 12 pens cost?"
console = Console(highlight=False)


class StepPrinter(BaseCallbackHandler):
    """Prints each step the moment that it is verified, and in the end what all has cost."""

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        if name == "specguard_step":
            print_step(console, data)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        message = response.generations[0][0].message
        metrics = message.response_metadata["specguard"]
        print_metrics(console, metrics, message.usage_metadata["output_tokens"])


def main() -> None:
    with fetch_progress(console) as progress:
        resolve_pair(DEFAULT_PAIR, progress=progress)  # 1.6 GB, once
    prompt = ChatPromptTemplate([("system", INSTRUCTION), ("user", "{question}")])
    # Every step is drafted here, to show its verdict; by default drafting pauses after a rejection.
    chain = prompt | ChatSpecGuard(temperature=0, patience=0, max_tokens=600) | StrOutputParser()

    console.print(f"{QUESTION}\n", style="bold")
    answer = chain.invoke({"question": QUESTION}, config={"callbacks": [StepPrinter()]})

    console.print("\nThe answer, as the chain returns it:", style="bold")
    print_text(console, answer)


if __name__ == "__main__":
    main()
