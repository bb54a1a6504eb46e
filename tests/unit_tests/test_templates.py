"""Chat templates as transformers renders them, and text that looks like special tokens."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from specguard_chains.errors import ConfigurationError
from specguard_chains.templates import ChatTemplate, Piece, Shield

CHATML = r"""{{- bos_token }}{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\nBe kind.<|im_end|>\n' -}}
    {% endif %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' -}}
{% endif %}"""

# The rules of Gemma's and Mistral's templates: no system message, roles take turns.
STRICT = """{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}
{% endif %}
{% for message in messages %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate') }}
{% endif %}
[{{ message.role }}]{{ message.content }}
{% endfor %}"""

SYSTEM = {"role": "system", "content": "Be brief."}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_a_prompt_ends_where_the_model_goes_on() -> None:
    template = ChatTemplate(CHATML, "<s>", "</s>")
    text = "<s><|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert template.render([user("Hi")]) == text + "<|im_start|>assistant\n"
    assert template.render([user("Hi")], add_generation_prompt=False) == text


def test_tools_reach_the_template_as_json_without_html_escapes() -> None:
    tool = {"name": "größer", "description": "a < b & 'c' > d"}
    template = ChatTemplate("{% for tool in tools %}{{ tool | tojson }}{% endfor %}")
    assert template.render([user("Hi")], [tool]) == json.dumps(tool, ensure_ascii=False)
    indented = ChatTemplate("{{ tools | tojson(indent=2) }}")
    assert indented.render([user("Hi")], [tool]) == json.dumps([tool], ensure_ascii=False, indent=2)


def test_no_tools_are_none() -> None:
    assert ChatTemplate("{{ tools is none }}").render([user("Hi")]) == "True"


def test_loops_can_break_and_time_can_be_told() -> None:
    loop = "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}"
    assert ChatTemplate(loop + "{% endfor %}").render([user("a"), user("b")]) == "a"
    now = ChatTemplate("{{ strftime_now('%Y') }}").render([user("a")])
    assert int(now) in {datetime.now().year, datetime.now().year - 1}


def test_the_tag_for_training_does_nothing() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert ChatTemplate(source).render([user("a"), user("b")]) == "ab"


def test_a_template_cannot_leave_its_sandbox() -> None:
    for source in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(ConfigurationError, match="refuses"):
            ChatTemplate(source).render([user("a")])


def test_a_broken_template_is_named() -> None:
    with pytest.raises(ConfigurationError, match="line 2"):
        ChatTemplate("{{ bos_token }}\n{% for %}")


def test_a_system_message_goes_into_the_first_user_message_if_it_must() -> None:
    template = ChatTemplate(STRICT)
    assert template.render([SYSTEM, user("Hi")]) == "[user]Be brief.\n\nHi\n"
    talk = [SYSTEM, user("Hi"), assistant("Ho"), user("He")]
    assert template.render(talk) == "[user]Be brief.\n\nHi\n[assistant]Ho\n[user]He\n"


def test_neighbours_of_one_role_are_merged_if_they_must() -> None:
    template = ChatTemplate(STRICT)
    assert template.render([user("a"), user("b"), assistant("c")]) == "[user]a\n\nb\n[assistant]c\n"
    assert template.render([SYSTEM, user("a"), user("b")]) == "[user]Be brief.\n\na\n\nb\n"


def test_neighbours_are_merged_whoever_spoke_and_thought() -> None:
    template = ChatTemplate(STRICT)
    named = [{**user("a"), "name": "Ann"}, {**user("b"), "name": "Bob"}]
    assert template.render(named) == "[user]a\n\nb\n"
    thoughts = [{**assistant("c"), "reasoning_content": "C"}, {**assistant("d"), "name": "writer"}]
    assert template.render([*named, *thoughts]) == "[user]a\n\nb\n[assistant]c\n\nd\n"
    examples = [{**SYSTEM, "name": "example_user"}, {**SYSTEM, "name": "example_assistant"}]
    told = "[user]Be brief.\n\nBe brief.\n\nHi\n"
    assert template.render([*examples, user("Hi")]) == told


def test_merged_neighbours_keep_a_name_that_they_share_and_all_thoughts() -> None:
    source = (
        "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}"
        "{{ messages[0].name }}: {{ messages[0].reasoning_content }}"
    )
    one = {**assistant("a"), "name": "Ann", "reasoning_content": "A"}
    other = {**assistant("b"), "name": "Ann", "reasoning_content": "B"}
    assert ChatTemplate(source).render([one, other]) == "Ann: A\n\nB"
    assert ChatTemplate(source).render([one, assistant("b")]) == ": A"
    assert ChatTemplate(source).render([one, {**assistant("b"), "name": "Bob"}]) == ": A"


def test_messages_that_a_template_takes_stay_as_they_are() -> None:
    text = ChatTemplate(CHATML).render([SYSTEM, user("a"), user("b")])
    assert text.count("<|im_start|>user") == 2
    assert text.count("<|im_start|>system\nBe brief.") == 1


def test_content_parts_are_merged_as_parts() -> None:
    source = (
        "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}"
        "{% for part in messages[0].content %}({{ part.text }}){% endfor %}"
    )
    parts = [{"type": "text", "text": "b"}]
    assert ChatTemplate(source).render([user("a"), user(parts)]) == "(a)(b)"


def test_what_no_form_satisfies_is_refused_with_the_templates_own_words() -> None:
    with pytest.raises(ConfigurationError, match="Conversation roles must alternate"):
        ChatTemplate(STRICT).render([assistant("a"), user("b")])


def test_messages_are_not_changed() -> None:
    messages = [SYSTEM, user("a"), user("b")]
    before = json.dumps(messages)
    ChatTemplate(STRICT).render(messages)
    Shield(["a"]).hide(messages)
    assert json.dumps(messages) == before


@pytest.fixture
def shield() -> Shield:
    return Shield(["<|im_end|>", "</s>", "<s>"])


def pieces(shield: Shield, messages: list[dict[str, Any]]) -> list[Piece]:
    return list(shield.pieces(ChatTemplate(CHATML).render(shield.hide(messages))))


def test_special_tokens_in_messages_are_text(shield: Shield) -> None:
    before, literal, after = pieces(shield, [user("a<|im_end|>b")])
    assert before.text.endswith("user\na")
    assert (before.literal, after.literal) == (False, False)
    assert literal == Piece("<|im_end|>", literal=True)
    assert after.text == "b<|im_end|>\n<|im_start|>assistant\n"


def test_a_shielded_prompt_reads_as_an_unshielded_one(shield: Shield) -> None:
    messages = [user("<s>struck</s> \ue0000\ue000 <|im_end|>"), assistant("</s>")]
    text = "".join(piece.text for piece in pieces(shield, messages))
    assert text == ChatTemplate(CHATML).render(messages)


def test_everything_in_a_message_is_shielded(shield: Shield) -> None:
    call = {"function": {"name": "f", "arguments": {"x": ["</s>", 1, None]}}}
    hidden = shield.hide([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert hidden[0]["tool_calls"][0]["function"]["arguments"]["x"][1:] == [1, None]
    text = ChatTemplate("{{ messages[0].tool_calls | tojson }}").render(hidden)
    assert [p.text for p in shield.pieces(text) if p.literal] == ["</s>"]
