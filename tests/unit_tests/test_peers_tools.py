"""Public reports about wrappers of local models: tools and agents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from specguard_chains import ChatSpecGuard
from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.engine import Prompt
from specguard_chains.messages import STEPS_KEY
from specguard_chains.templates import ChatTemplate
from tests.toy_engine import ANSWER, END, VOCABULARY, ToyEngine
from tests.unit_tests.test_peers_streaming import collected

pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")

CHATML_WITH_TOOLS = r"""{% if tools %}
{{- '<|im_start|>system\n# Tools\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{% endfor %}
{{- '<tool_call>\n{"name": <function-name>, "arguments": <args>}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""


class Talker(ToyEngine):
    """Answers its n-th turn with the n-th text, whatever it is asked; remembers the prompts."""

    def __init__(
        self, *answers: str, template: str = CHATML_WITH_TOOLS, constraints: bool = True
    ) -> None:
        super().__init__(self._logits, name="talker", context_length=16384)
        self.answers = answers
        self.template = template
        self.prompts: list[Prompt] = []
        self.texts: list[str] = []
        self.capabilities = replace(self.capabilities, constraints=constraints)

    def encode(self, prompt: Prompt) -> list[int]:
        assert self.template is not None
        text = ChatTemplate(self.template).render(prompt.messages, prompt.tools)
        self.prompts.append(prompt)
        self.texts.append(text)
        return [*text.encode(), ANSWER]

    def reply(self, prompt: str) -> str:
        """Return what the engine has to say to a rendered prompt."""
        turn = prompt.count("<|im_start|>assistant\n") - 1
        return self.answers[min(max(turn, 0), len(self.answers) - 1)]

    def _logits(self, tokens: tuple[int, ...]) -> FloatArray:
        start = tokens.index(ANSWER) if ANSWER in tokens else len(tokens)
        script = self.reply(bytes(tokens[:start]).decode(errors="replace")).encode()
        written = bytes(token for token in tokens[start + 1 :] if token < END)
        logits = np.zeros(VOCABULARY, dtype=np.float32)
        logits[END] = 5.0
        logits[[*b" \n\r\t"]] = -5.0  # if it cannot say what it wants, it need not say nothing
        if written != script and script.startswith(written):
            logits[script[len(written)]] = 20.0
        else:
            logits[END] = 20.0
        return logits


def talk(*answers: str, **options: Any) -> ChatSpecGuard:
    """A model that says these things, one a turn."""
    made = {name: options.pop(name) for name in ("template", "constraints") if name in options}
    defaults: dict[str, Any] = {"temperature": 0, "max_tokens": 400, "max_step_tokens": 512}
    engine = Talker(*answers, **made)
    return ChatSpecGuard(decoder="target", target=engine, **(defaults | options))


def talker(model: ChatSpecGuard) -> Talker:
    assert isinstance(model.target, Talker)
    return model.target


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def search(query: str) -> str:
    """Look something up."""
    return f"nothing about {query}"


class Sum(BaseModel):
    """A sum."""

    total: int


def call_text(name: str = "add", arguments: str = '{"a": 1, "b": 2}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ADD = call_text()
CALL = {"name": "add", "args": {"a": 1, "b": 2}}


async def _gathered(runnable: Any, question: Any) -> Any:
    chunks = await collected(runnable.astream(question))
    return sum(chunks[1:], start=chunks[0])


def _streamed(runnable: Any, question: Any) -> Any:
    chunks = list(runnable.stream(question))
    return sum(chunks[1:], start=chunks[0])


ANSWERS: dict[str, Callable[[Any, Any], Any]] = {
    "invoke": lambda r, q: r.invoke(q),
    "stream": _streamed,
    "batch": lambda r, q: r.batch([q])[0],
    "ainvoke": lambda r, q: asyncio.run(r.ainvoke(q)),
    "astream": lambda r, q: asyncio.run(_gathered(r, q)),
}
"""Each route's whole message."""


def calls_of(message: AIMessage) -> list[dict[str, Any]]:
    """Return name and arguments of the calls; their ids must be there, and differ."""
    ids = [call["id"] for call in message.tool_calls]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    return [{"name": call["name"], "args": call["args"]} for call in message.tool_calls]


# --- 14: characters beyond ASCII

UNICODE = ["你好啊集团", "こんにちは株式会社", "größe & <b>", "😀 \u202e rtl", 'say "hi"\n\\ end']


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize("text", UNICODE)
@pytest.mark.parametrize("route", ANSWERS)
def test_peers_014_arguments_hold_characters_and_no_escapes(
    route: str, text: str, escaped: bool
) -> None:
    arguments = json.dumps({"query": text}, ensure_ascii=escaped)
    model = talk(call_text("search", arguments), constraints=not escaped)  # they allow no escapes
    message = ANSWERS[route](model.bind_tools([search]), "Find it.")
    assert calls_of(message) == [{"name": "search", "args": {"query": text}}]


@pytest.mark.parametrize("text", UNICODE[:3])
def test_peers_014_the_template_gets_characters_and_no_escapes(text: str) -> None:
    @tool(description=text)
    def shout(word: str) -> str:
        return word

    model = talk("Done.")
    history = [
        HumanMessage("Find it."),
        AIMessage("", tool_calls=[{"name": "shout", "args": {"word": text}, "id": "1"}]),
        ToolMessage(text, tool_call_id="1"),
    ]
    model.bind_tools([shout]).invoke(history)
    prompt = talker(model).texts[0]
    assert prompt.count(text) == 3
    assert "\\u" not in prompt


# --- 36: tools in the prompt


@pytest.mark.parametrize("route", ANSWERS)
@pytest.mark.parametrize("choice", [None, "auto", "any", "add"])
def test_peers_036_bound_tools_reach_the_template(route: str, choice: Any) -> None:
    model = talk(ADD)
    ANSWERS[route](model.bind_tools([add, search], tool_choice=choice), "1 + 2?")
    assert talker(model).prompts
    for prompt, text in zip(talker(model).prompts, talker(model).texts, strict=True):
        assert [t["function"]["name"] for t in prompt.tools] == ["add", "search"]
        assert '"description": "Add two numbers."' in text


def test_peers_036_tools_reach_a_model_whose_template_knows_none() -> None:
    plain = CHATML_WITH_TOOLS[CHATML_WITH_TOOLS.index("{%- for message") :]
    model = talk(ADD, template=plain)
    message = model.bind_tools([add, search]).invoke("1 + 2?")
    assert calls_of(message) == [CALL]
    text = talker(model).texts[0]
    assert "Add two numbers." in text
    assert "Look something up." in text


def test_peers_036_without_tools_the_prompt_mentions_none() -> None:
    model = talk("Hello!")
    model.bind_tools([add])
    assert model.invoke("Hi").text == "Hello!"
    assert all(not prompt.tools and "add" not in str(prompt) for prompt in talker(model).prompts)


# --- 37, 39: tool_choice

NAMED: Any = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("choice", ["any", "required", True, "add", NAMED])
@pytest.mark.parametrize("route", ANSWERS)
def test_peers_037_a_call_can_be_required_of_several_tools(route: str, choice: Any) -> None:
    """Also of a model that would rather chat."""
    for answer in (ADD, "I would rather chat."):
        model = talk(answer).bind_tools([add, pick], tool_choice=choice)
        message = ANSWERS[route](model, "1 + 2?")
        (call,) = calls_of(message)
        wanted = ("add", "pick") if choice in ("any", "required", True) else ("add",)
        assert call["name"] in wanted
        assert answer != ADD or call == CALL
        assert message.text == ""
        assert message.response_metadata["finish_reason"] == "tool_calls"


@tool
def pick(colour: Literal["red", "green"]) -> str:
    """Pick a colour."""
    return colour


@pytest.mark.parametrize("choice", [None, "auto", False])
@pytest.mark.parametrize("route", ANSWERS)
def test_peers_037_in_auto_the_model_may_call_or_talk(route: str, choice: Any) -> None:
    talking = talk("Hello!").bind_tools([add, search], tool_choice=choice)
    message = ANSWERS[route](talking, "Hi")
    assert (message.text, calls_of(message)) == ("Hello!", [])
    assert message.response_metadata["finish_reason"] == "stop"
    if choice is not False:
        calling = talk(ADD).bind_tools([add, search], tool_choice=choice)
        assert calls_of(ANSWERS[route](calling, "1 + 2?")) == [CALL]


@pytest.mark.parametrize("route", ANSWERS)
def test_peers_037_none_means_no_calls(route: str) -> None:
    model = talk("Three.").bind_tools([add, search], tool_choice="none")
    message = ANSWERS[route](model, "1 + 2?")
    assert (message.text, calls_of(message)) == ("Three.", [])


@pytest.mark.parametrize("parallel", [None, True])
def test_peers_037_several_calls_in_one_answer(parallel: bool | None) -> None:
    model = talk(f"{ADD}\n{call_text('search', json.dumps({'query': 'x'}))}")
    message = model.bind_tools([add, search], parallel_tool_calls=parallel).invoke("Both!")
    assert calls_of(message) == [CALL, {"name": "search", "args": {"query": "x"}}]


def test_peers_037_one_call_where_they_must_not_be_parallel() -> None:
    model = talk(f"{ADD}\n{ADD}")
    message = model.bind_tools([add], parallel_tool_calls=False).invoke("Both!")
    assert calls_of(message) == [CALL]


@pytest.mark.parametrize("name", ["any_tool", "subtract", "none_", "auto_add"])
def test_peers_039_a_name_that_no_tool_has_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.*add.*search"):
        talk(ADD).bind_tools([add, search], tool_choice=name).invoke("1 + 2?")


def test_peers_039_choices_are_no_names() -> None:
    """Never is "any" sent on as the name of a tool, and a name may be given with several tools."""
    model = talk(ADD).bind_tools([add, pick], tool_choice="any")
    assert calls_of(model.invoke("1 + 2?")) == [CALL]
    for tools in ([add], [add, pick], [add, pick, search]):
        forced = talk("No.").bind_tools(tools, tool_choice="add")
        assert [call["name"] for call in calls_of(forced.invoke("1 + 2?"))] == ["add"]


# --- 38: agents with a response format


AS_TEXT, AS_CALL = '{"total": 3}', call_text("Sum", '{"total": 3}')


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("strategy", ["schema", "provider", "tool"])
def test_peers_038_an_agent_uses_a_tool_and_answers_by_a_schema(
    strategy: str, asynchronous: bool
) -> None:
    native = (ChatSpecGuard(decoder="target", target=Talker()).profile or {}).get(
        "structured_output"
    )
    response_format, last = {
        "schema": (Sum, AS_TEXT if native else AS_CALL),
        "provider": (ProviderStrategy(Sum), AS_TEXT),
        "tool": (ToolStrategy(Sum), AS_CALL),
    }[strategy]
    agent: Any = create_agent(talk(ADD, last), [add, search], response_format=response_format)
    question: Any = {"messages": [HumanMessage("1 + 2?")]}
    result = asyncio.run(agent.ainvoke(question)) if asynchronous else agent.invoke(question)
    assert result["structured_response"] == Sum(total=3)
    first = next(m for m in result["messages"] if isinstance(m, ToolMessage))
    assert (first.name, first.text) == ("add", "3")


def test_peers_038_an_agent_without_tools_answers_by_a_schema() -> None:
    agent = create_agent(talk('{"total": 3}'), [], response_format=ProviderStrategy(Sum))
    result = agent.invoke({"messages": [HumanMessage("1 + 2?")]})
    assert result["structured_response"] == Sum(total=3)


# --- 42: calls that are broken

BROKEN = {
    "cut in the arguments": '<tool_call>\n{"name": "add", "arguments": {"a": 1',
    "no closing brace": '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>',
    "single quotes": "<tool_call>\n{'name': 'add', 'arguments': {'a': 1}}\n</tool_call>",
    "no JSON": '<tool_call>\n{"name": "add", "arguments": {a}}\n</tool_call>',
    "a list": call_text(arguments="[1, 2]"),
    "a comma too much": call_text(arguments='{"a": 1,}'),
    "nothing": '<tool_call>\n{"name": "add", "arguments": \n</tool_call>',
}


@pytest.mark.parametrize("route", ANSWERS)
@pytest.mark.parametrize("case", BROKEN)
def test_peers_042_a_broken_call_is_told_apart_and_raises_nothing(route: str, case: str) -> None:
    """From a model that cannot be constrained, such as one on a server."""
    model = talk(BROKEN[case], constraints=False).bind_tools([add, search])
    message = ANSWERS[route](model, "1 + 2?")
    if message.tool_calls:  # read as it was meant
        assert [call["name"] for call in calls_of(message)] == ["add"]
    else:
        (broken,) = message.invalid_tool_calls
        assert broken["name"] in ("add", None)
        assert broken["id"]
    assert "<tool_call>" not in message.text


@pytest.mark.parametrize("route", ANSWERS)
@pytest.mark.parametrize("max_tokens", range(2, len(ADD) + 2, 9))
def test_peers_042_a_call_that_max_tokens_cuts_is_not_run(route: str, max_tokens: int) -> None:
    model = talk(ADD, max_tokens=max_tokens).bind_tools([add, search])
    message = ANSWERS[route](model, "1 + 2?")
    complete = max_tokens >= ADD.rindex("}")
    assert not message.tool_calls or complete
    if '"add"' in ADD[:max_tokens] and not complete:
        assert message.invalid_tool_calls[0]["name"] == "add"
    if not message.tool_calls:
        assert message.response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("case", BROKEN)
def test_peers_042_an_agent_survives_a_broken_call(case: str) -> None:
    agent = create_agent(talk(BROKEN[case], "Sorry.", constraints=False), [add])
    result = agent.invoke({"messages": [HumanMessage("1 + 2?")]})
    last = result["messages"][-1]
    assert isinstance(last, AIMessage)
    assert last.text == "Sorry." or last.invalid_tool_calls


def test_peers_042_the_model_may_try_again_with_its_broken_call_in_the_history() -> None:
    model = talk(BROKEN["cut in the arguments"], ADD, constraints=False)
    first = model.bind_tools([add]).invoke("1 + 2?")
    again = model.bind_tools([add]).invoke(
        [HumanMessage("1 + 2?"), first, HumanMessage("That was no JSON. Try again.")]
    )
    assert calls_of(again) == [CALL]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [('{"a": 1}', "b"), ('{"a": "one", "b": 2}', "integer"), ("{}", "a")],
)
def test_peers_042_arguments_against_the_schema_come_back_to_the_model(
    arguments: str, error: str
) -> None:
    """From a model that cannot be constrained: the tool's own error is the next message."""
    agent = create_agent(talk(call_text(arguments=arguments), "Sorry.", constraints=False), [add])
    result = agent.invoke({"messages": [HumanMessage("1 + 2?")]})
    (refusal,) = [m for m in result["messages"] if isinstance(m, ToolMessage)]
    assert refusal.status == "error"
    assert error in refusal.text
    assert result["messages"][-1].text == "Sorry."


def test_peers_042_a_constrained_model_keeps_to_the_schema() -> None:
    model = talk(call_text(arguments='{"colour": "blue"}').replace("add", "pick"))
    message = model.bind_tools([pick], tool_choice="any").invoke("Pick!")
    (call,) = calls_of(message)
    assert call["args"]["colour"] in ("red", "green")


# --- 44: raw calls in the text

BODY = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
FORMS = {
    "tags": ADD,
    "tags on one line": f"<tool_call>{BODY}</tool_call>",
    "fenced": f"```json\n{BODY}\n```",
    "fenced without a language": f"```\n{BODY}\n```",
    "bare": BODY,
    "indented": json.dumps(json.loads(BODY), indent=2),
    "doubled braces": "<tool_call>\n{" + BODY + "}\n</tool_call>",
    "doubled braces, bare": "{" + BODY + "}",
}


@pytest.mark.parametrize("constraints", [True, False])
@pytest.mark.parametrize("max_step_tokens", [1, 3, 16, 512])
@pytest.mark.parametrize("before", ["", "Let me add these.\n\n"])
@pytest.mark.parametrize("form", FORMS)
def test_peers_044_raw_calls_are_never_streamed_as_text(
    form: str, before: str, max_step_tokens: int, constraints: bool
) -> None:
    if constraints and form == "doubled braces":
        pytest.skip("the grammar does not allow them")
    model = talk(before + FORMS[form], max_step_tokens=max_step_tokens, constraints=constraints)
    chunks: list[Any] = list(model.bind_tools([add, search]).stream("1 + 2?"))
    texts = [chunk.text for chunk in chunks]
    assert "".join(texts).strip() == before.strip()
    whole = sum(chunks[1:], start=chunks[0])
    assert calls_of(whole) == [CALL]
    pieces = [piece for chunk in chunks for piece in chunk.tool_call_chunks]
    assert pieces
    assert {piece["index"] for piece in pieces} == {0}
    assert json.loads("".join(piece["args"] or "" for piece in pieces)) == CALL["args"]
    phases = [step["phase"] for step in whole.additional_kwargs[STEPS_KEY]]
    assert "tool_call" in phases


@pytest.mark.parametrize("max_step_tokens", [1, 3, 16, 512])
def test_peers_044_several_calls_are_streamed_one_after_the_other(max_step_tokens: int) -> None:
    two = f"{ADD}\n{call_text('search', json.dumps({'query': 'x'}))}"
    model = talk(two, max_step_tokens=max_step_tokens).bind_tools([add, search])
    chunks: list[Any] = list(model.stream("Both!"))
    assert "".join(chunk.text for chunk in chunks).strip() == ""
    pieces = [piece["index"] for chunk in chunks for piece in chunk.tool_call_chunks]
    assert pieces == sorted(pieces)
    assert set(pieces) == {0, 1}
    assert len(calls_of(sum(chunks[1:], start=chunks[0]))) == 2


def _from_events(runnable: Any, question: Any) -> Any:
    stream = runnable.stream_events(question, version="v3")
    assert list(stream)
    return stream.output


@pytest.mark.parametrize("route", [*ANSWERS, "v3"])
@pytest.mark.parametrize("output_version", ["v0", "v1"])
def test_peers_044_calls_between_texts_are_all_there(route: str, output_version: str) -> None:
    found = call_text("search", '{"query": "x"}')
    said = f"One {ADD} two {found} three {call_text('add', '{')} four"
    model = talk(said, constraints=False, output_version=output_version)
    answer: Any = {**ANSWERS, "v3": _from_events}[route](model.bind_tools([add, search]), "Go!")
    assert answer.text.split() == ["One", "two", "three", "four"]
    assert [call["name"] for call in answer.tool_calls] == ["add", "search"]
    assert [call["name"] for call in answer.invalid_tool_calls] == ["add"]


@pytest.mark.parametrize(
    "text",
    [
        'JSON looks like {"a": 1}, or like [1, 2].',
        '```json\n{"colour": "red"}\n```',
        "Use `<tool>` or <b>bold</b> text.",
        "f(x) = {x}",
        "a < b",
    ],
)
@pytest.mark.parametrize("max_step_tokens", [1, 512])
def test_peers_044_text_that_only_resembles_a_call_stays_text(
    text: str, max_step_tokens: int
) -> None:
    model = talk(text, max_step_tokens=max_step_tokens).bind_tools([add, search])
    message = _streamed(model, "Tell me.")
    assert (message.text, calls_of(message), message.invalid_tool_calls) == (text, [], [])


def test_peers_044_agents_stream_no_raw_calls() -> None:
    agent = create_agent(talk(ADD, "It is 3."), [add])
    parts: list[Any] = list(
        agent.stream({"messages": [HumanMessage("1 + 2?")]}, stream_mode="messages")
    )
    texts = [chunk.text for chunk, _ in parts if isinstance(chunk, AIMessage)]
    assert "".join(texts) == "It is 3."


# --- 45: async agents


async def test_peers_045_agents_work_async() -> None:
    question: Any = {"messages": [HumanMessage("1 + 2?")]}
    agent = create_agent(talk(ADD, "It is 3."), [add])
    result = await agent.ainvoke(question)
    assert [m.text for m in result["messages"]] == ["1 + 2?", "", "3", "It is 3."]
    updates = await collected(agent.astream(question, stream_mode="updates"))
    assert [next(iter(update)) for update in updates] == ["model", "tools", "model"]
    events = await collected(agent.astream_events(question, version="v2"))
    ends = [e for e in events if e["event"] == "on_chat_model_end"]
    assert [bool(e["data"]["output"].tool_calls) for e in ends] == [True, False]
    both = await asyncio.gather(agent.ainvoke(question), agent.ainvoke(question))
    assert {answer["messages"][-1].text for answer in both} == {"It is 3."}


# --- 8, 10: agents' streams


@pytest.mark.parametrize("output_version", ["v0", "v1"])
@pytest.mark.parametrize("max_step_tokens", [4, 512])
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_peers_008_an_agent_streams_each_message_once(
    asynchronous: bool, max_step_tokens: int, output_version: str
) -> None:
    said = "I will add them.\n\n"
    model = talk(
        said + ADD, "It is 3.", max_step_tokens=max_step_tokens, output_version=output_version
    )
    agent = create_agent(model, [add])
    question: Any = {"messages": [HumanMessage("1 + 2?")]}
    modes: Any = ["messages", "values"]
    parts: list[Any] = (
        await collected(agent.astream(question, stream_mode=modes))
        if asynchronous
        else list(agent.stream(question, stream_mode=modes))
    )
    chunks = [data[0] for mode, data in parts if mode == "messages"]
    texts: dict[str, str] = {}
    for chunk in chunks:
        if isinstance(chunk, AIMessage):
            texts[chunk.id or ""] = texts.get(chunk.id or "", "") + chunk.text
    assert [text.strip() for text in texts.values()] == [said.strip(), "It is 3."]
    final = [data for mode, data in parts if mode == "values"][-1]["messages"]
    answers = [message for message in final if isinstance(message, AIMessage)]
    assert [answer.id for answer in answers] == list(texts)
    assert [answer.text for answer in answers] == list(texts.values())
    assert all(answer.usage_metadata for answer in answers), "10: usage while streaming too"
    assert calls_of(answers[0]) == [CALL]
