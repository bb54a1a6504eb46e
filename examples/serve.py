"""A web service that sends each verified step to the browser the moment that it is settled.

    python examples/serve.py        # and open http://127.0.0.1:8000

A client that goes away stops the model at its next token.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import uvicorn
from fastapi import Depends, FastAPI
from fastapi.responses import FileResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from langchain_core.messages import AIMessageChunk
from pydantic import BaseModel, Field

from specguard_chains import ChatSpecGuard, SpecGuardError

app = FastAPI(title="Verified steps")
# One answer at a time; up to 8 wait for their turn, one more is told that the queue is full.
llm = ChatSpecGuard(temperature=0, max_tokens=400, max_queue=8, timeout=300)


class Question(BaseModel):
    question: Annotated[str, Field(min_length=1, max_length=4000)]


async def answer(asked: Question) -> AsyncIterator[AsyncIterator[AIMessageChunk]]:
    """Give the chunks of an answer; it is stopped with the request, whatever ends that."""
    async with aclosing(llm.astream(asked.question)) as chunks:
        yield chunks


@app.post("/ask", response_class=EventSourceResponse)
async def ask(
    chunks: Annotated[AsyncIterator[AIMessageChunk], Depends(answer)],
) -> AsyncIterator[ServerSentEvent]:
    """Yield an event a step, then one with what the answer has cost; or one with an error."""
    try:
        async for chunk in chunks:
            for step in chunk.additional_kwargs.get("specguard_steps", ()):
                yield ServerSentEvent(event="step", data=step)
            if chunk.chunk_position == "last":
                cost = {**chunk.response_metadata, "usage": chunk.usage_metadata}
                yield ServerSentEvent(event="done", data=cost)
    except SpecGuardError as error:  # its text is written for users
        yield ServerSentEvent(event="error", data={"message": str(error)})


@app.get("/", include_in_schema=False)
def page() -> FileResponse:
    return FileResponse(Path(__file__).with_name("page.html"))


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=8000)
