"""Facts of a text as a pydantic object, and an answer that is reasoned out before it is given."""

from pydantic import BaseModel, Field

from specguard_chains import ChatSpecGuard

NOTICE = (
    "Rosa Keller opened her bakery in Bern in 1987. Today her 14 employees bake for three markets, "
    "and she still closes the shop every Monday."
)
QUESTION = "A book costs 7 euros and a pen costs 2 euros. What do 3 books and 5 pens cost together?"


class Business(BaseModel):
    """A business that a text tells about."""

    owner: str
    city: str
    founded: int = Field(description="the year")
    employees: int


class Price(BaseModel):
    """The answer to a question about money."""

    euros: float


def main() -> None:
    llm = ChatSpecGuard(temperature=0, max_tokens=400)

    # While it is written, the JSON is held to the schema: it cannot come out malformed.
    extract = llm.with_structured_output(Business, include_raw=True)
    result = extract.invoke(f"Extract the facts from this text.\n\n{NOTICE}")
    print(repr(result["parsed"] or result["parsing_error"]))
    for step in result["raw"].additional_kwargs["specguard_steps"]:
        print(f"  written by the {step['source']}: {step['text']}")

    # A sum needs steps. They come first, free and verified, and are kept apart from the JSON.
    solve = llm.with_structured_output(Price, reason_first=True, include_raw=True)
    result = solve.invoke([("system", "Reason in a few short steps."), ("user", QUESTION)])
    print(repr(result["parsed"] or result["parsing_error"]))
    for step in result["raw"].additional_kwargs["specguard_steps"]:
        print(f"  {step['phase']} by the {step['source']}: {step['text'].strip()}")


if __name__ == "__main__":
    main()
