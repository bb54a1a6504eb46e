"""Prompts become tokens by the model's template, and the template says how a turn ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.prompt_encoder import PromptEncoder, end_of_turn
from specguard_chains.errors import ConfigurationError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDS = {0: "</s>", 1: "<|im_end|>", 2: "<|im_end|>\n", 3: ""}


@dataclass
class Letters:
    """Letters are tokens; control tokens are 1000 and above, where they are read at all."""

    template: str | None = CHATML
    tools: str | None = None
    prefix: list[int] = field(default_factory=list)
    bos_text: str = "<s>"
    eos_text: str = "</s>"
    control_texts: list[str] = field(
        default_factory=lambda: ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    )

    def chat_template(self, name: str | None = None) -> str | None:
        return {None: self.template, "tool_use": self.tools}[name]

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        tokens = []
        while text:
            known = [t for t in self.control_texts if special and text.startswith(t)]
            tokens.append(1000 + self.control_texts.index(known[0]) if known else ord(text[0]))
            text = text[len(known[0]) if known else 1 :]
        return tokens

    def tokenize_on(self, text: str, *, special: bool) -> list[int]:
        return self.tokenize(text, special=special)


def test_special_tokens_are_read_in_the_template_and_in_raw_text_alone() -> None:
    encoder, letters = PromptEncoder("m"), Letters()
    raw = encoder.encode(Prompt(text="a</s>"), letters)
    assert raw == [ord("a"), 1001]
    prompt = Prompt(messages=[{"role": "user", "content": "a<|im_end|>b"}])
    tokens = encoder.encode(prompt, letters)
    assert tokens.count(1003) == 1
    assert tokens[0] == 1002
    assert [*map(ord, "a<|im_end|>b")] == tokens[6:18]


def test_special_tokens_in_tools_are_text() -> None:
    """A tool from elsewhere cannot end the turn that tells of it."""
    letters = Letters("{{ tools | tojson }}<|im_end|>")
    tools = [{"function": {"description": "a<|im_end|>b"}}]
    prompt = Prompt(messages=[{"role": "user", "content": "c"}], tools=tools)
    tokens = PromptEncoder("m").encode(prompt, letters)
    assert tokens.count(1003) == 1
    assert "a<|im_end|>b" in "".join(map(chr, tokens[:-1]))


def test_a_text_begins_with_one_prefix() -> None:
    encoder, letters = PromptEncoder("m"), Letters(prefix=[1000])
    for text in ("a", "<s>a"):
        assert encoder.encode(Prompt(text=text), letters) == [1000, ord("a")]
    assert encoder.encode(Prompt(text=""), letters) == []
    assert encoder.encode(Prompt(), letters) == []


def test_tools_have_a_template_of_their_own_if_the_model_has_one() -> None:
    tools = Prompt(messages=[{"role": "user", "content": "a"}], tools=[{"name": "f"}])
    assert PromptEncoder("m").encode(tools, Letters(tools="T")) == [ord("T")]
    assert PromptEncoder("m").encode(tools, Letters(template="C")) == [ord("C")]


def test_a_model_without_template_takes_text_only() -> None:
    prompt = Prompt(messages=[{"role": "user", "content": "a"}])
    with pytest.raises(ConfigurationError, match=r"m has no chat template.*as text"):
        PromptEncoder("m").encode(prompt, Letters(template=None))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, 2),
        (CHATML.replace("<|im_end|>\n", "<|im_end|>"), 1),
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", 0),
        ("</s>{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ("{% for m in messages %}{{ m.content | trim }} </s>x<|im_end|>{% endfor %}", 0),
        ("{{ raise_exception('no') }}", None),
        ("{% for %}", None),
        (None, None),
    ],
)
def test_the_template_says_how_a_turn_ends(template: str | None, expected: int | None) -> None:
    assert end_of_turn(Letters(template=template), ENDS) == expected


def test_only_what_ends_a_sequence_ends_a_turn() -> None:
    assert end_of_turn(Letters(), {0: "</s>"}) is None
