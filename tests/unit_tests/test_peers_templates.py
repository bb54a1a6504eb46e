"""Public reports about wrappers of local models: roles that templates refuse, tokens put twice."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from specguard_chains import ChatSpecGuard
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.prompt_encoder import PromptEncoder
from specguard_chains.templates import ChatTemplate
from tests.toy_engine import ANSWER, ToyEngine, scripted_policy
from tests.unit_tests.test_peers_streaming import ROUTES, text_of
from tests.unit_tests.test_prompt_encoder import Letters
from tests.unit_tests.test_templates import CHATML

GEMMA = """{{ bos_token }}{% for message in messages %}
{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
<{{ message.role }}>{{ message.content }}
{% endfor %}"""

DOUBLES = [
    SystemMessage("system one"),
    SystemMessage("system two"),
    HumanMessage("human one"),
    HumanMessage("human two"),
    AIMessage("answer one"),
    AIMessage("answer two"),
    HumanMessage("human three"),
]


class TemplatedEngine(ToyEngine):
    """A toy with a chat template of its own; it remembers what it was asked."""

    def __init__(self, template: str) -> None:
        super().__init__(scripted_policy("One a.\n\n", "Two b."))
        self.template = template
        self.rendered_by = ChatTemplate(template, bos_token="<s>")
        self.prompts: list[str] = []

    def encode(self, prompt: Prompt) -> list[int]:
        text = prompt.text or self.rendered_by.render(prompt.messages, prompt.tools)
        self.prompts.append(text)
        return [*text.encode(), ANSWER]


def prompt_of(template: str, messages: list[BaseMessage]) -> str:
    """Answer the messages, and return the prompt that the template has made of them."""
    engine = TemplatedEngine(template)
    answer = ChatSpecGuard(decoder="target", target=engine).invoke(messages)
    assert answer.text == "One a.\n\nTwo b."
    return engine.prompts[0]


def assert_in_order(text: str, *parts: str) -> None:
    places = [text.find(part) for part in parts]
    assert -1 not in places, text
    assert places == sorted(places), text
    assert all(text.count(part) == 1 for part in parts), text


def test_peers_028_neighbours_of_one_role_are_merged_where_roles_must_alternate() -> None:
    prompt = prompt_of(GEMMA, DOUBLES[2:])
    assert_in_order(prompt, *(str(message.content) for message in DOUBLES[2:]))
    assert [prompt.count(f"<{role}>") for role in ("user", "assistant")] == [2, 1]


@pytest.mark.parametrize("doubles", [DOUBLES, [DOUBLES[0], *DOUBLES[2:]]])
def test_peers_028_and_029_a_template_that_refuses_both_gets_neither(doubles: Any) -> None:
    prompt = prompt_of(GEMMA, doubles)
    assert_in_order(prompt, *(str(message.content) for message in doubles))
    assert [prompt.count(f"<{role}>") for role in ("user", "assistant", "system")] == [2, 1, 0]


def test_peers_028_a_template_that_takes_doubles_gets_them_as_they_are() -> None:
    prompt = prompt_of(CHATML, DOUBLES)
    assert [prompt.count(f"<|im_start|>{r}") for r in ("system", "user", "assistant")] == [2, 3, 3]


def test_peers_028_results_of_tools_are_not_merged_into_neighbours() -> None:
    calls: Any = [{"id": name, "name": name, "args": {}} for name in ("one", "two")]
    prompt = prompt_of(
        CHATML,
        [
            HumanMessage("Call both."),
            AIMessage("", tool_calls=calls),
            ToolMessage("result one", tool_call_id="one"),
            ToolMessage("result two", tool_call_id="two"),
        ],
    )
    assert prompt.count("<|im_start|>user\n<tool_response>") == 2
    assert_in_order(prompt, "result one", "result two")


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_peers_029_a_system_text_is_folded_into_the_first_user_turn(turns: int) -> None:
    talk: list[BaseMessage] = [HumanMessage("turn 0")]
    for turn in range(1, turns):
        talk += [AIMessage(f"answer {turn}"), HumanMessage(f"turn {turn}")]
    prompt = prompt_of(GEMMA, [SystemMessage("Be brief."), *talk])
    assert prompt.startswith("<s><user>Be brief.")
    assert_in_order(prompt, "Be brief.", *(str(message.content) for message in talk))


@pytest.mark.parametrize("route", ROUTES)
def test_peers_029_a_system_text_is_folded_on_every_route(route: str) -> None:
    engine = TemplatedEngine(GEMMA)
    model = ChatSpecGuard(decoder="target", target=engine)
    chain: Any = (lambda question: [SystemMessage("Be brief."), HumanMessage(question)]) | model  # type: ignore[operator]
    if route == "batch":
        assert chain.batch(["Hi"])[0].text == "One a.\n\nTwo b."
    else:
        assert text_of(chain, route) == "One a.\n\nTwo b."
    assert all(prompt.startswith("<s><user>Be brief.") for prompt in engine.prompts)


@pytest.mark.parametrize(
    ("messages", "parts"),
    [
        ([SystemMessage("Be brief.")], ["Be brief."]),
        (
            [SystemMessage("Be brief."), AIMessage("Hello!"), HumanMessage("Hi")],
            ["Be brief.", "Hello!", "Hi"],
        ),
        (
            [
                HumanMessage("Hi"),
                AIMessage("Hello!"),
                SystemMessage("Be brief."),
                HumanMessage("?"),
            ],
            ["Hi", "Hello!", "Be brief.", "?"],
        ),
    ],
    ids=["alone", "before an answer", "later on"],
)
def test_peers_029_a_system_text_is_taken_wherever_it_stands(
    messages: list[BaseMessage], parts: list[str]
) -> None:
    assert_in_order(prompt_of(GEMMA, messages), *parts)


@pytest.mark.parametrize(
    "template", ["{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", "{{ 'a' }}"]
)
@pytest.mark.parametrize("prefix", [[], [1000]])
def test_peers_032_a_prompt_begins_with_one_token_that_begins_sequences(
    prefix: list[int], template: str
) -> None:
    """Whether the template writes it, the tokenizer adds it, both do or neither."""
    letters = Letters(template=template, prefix=prefix)
    encode = PromptEncoder("m").encode
    for prompt in (
        Prompt(messages=[{"role": "user", "content": "a"}]),
        Prompt(messages=[{"role": "user", "content": "<s>a"}]),
        Prompt(text="<s>a" if "bos_token" in template else "a"),
    ):
        ids = encode(prompt, letters)
        assert ids.count(1000) == (1 if prefix or "bos_token" in template else 0)
        assert ids.count(1000) == 0 or ids[0] == 1000
