"""LangChain's own tests of chat models; those for real models run on a toy."""

import json
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from specguard_chains import ChatSpecGuard
from tests.toy_engine import ToyEngine, random_policy
from tests.unit_tests.test_peers_tools import Talker, call_text

JOKE = {"setup": "Why do cats purr?", "punchline": "Because they can."}
REPLIES = {
    "magic_function_no_args()": call_text("magic_function_no_args", "{}"),
    "magic_function(3)": call_text("magic_function", '{"input": 3}'),
    "Pirate greeting": call_text("greeting_generator", '{"answer_style": "Pirate"}'),
    "weather in San Francisco": call_text("get_weather", '{"location": "San Francisco, CA"}'),
    "你好啊集团": call_text(
        "unicode_customer", '{"customer_name": "你好啊集团", "description": "technology"}'
    ),
    "こんにちは株式会社": call_text(
        "unicode_customer", '{"customer_name": "こんにちは株式会社", "description": "a company"}'
    ),
    "3 + 4": call_text("my_adder_tool", '{"a": 3, "b": 4}'),
    "Hello!": call_text("magic_function", '{"input": 1}'),
}
"""What is asked -> what a model with tools says to it."""


class Obedient(Talker):
    """Does what the tests ask for."""

    def reply(self, prompt: str) -> str:
        if "Joke" in prompt and "# Tools" in prompt:
            name = "JokeDict" if "JokeDict" in prompt else "Joke"
            return call_text(name, json.dumps(JOKE))
        if "joke" in prompt:
            return json.dumps(JOKE)
        known = [reply for question, reply in REPLIES.items() if question in prompt]
        called = "<|im_start|>tool" in prompt
        return known[0] if known and "# Tools" in prompt and not called else "Hello.\n\nWhat now?"


class AllFeatures:
    """What the suites are told about the model: everything but pictures and sound."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatSpecGuard

    @property
    def has_tool_calling(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def returns_usage_metadata(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    @property
    def enable_vcr_tests(self) -> bool:
        return True  # there is nothing to record: the answer is simply computed


class TestUnit(AllFeatures, ChatModelUnitTests):
    """Nothing is loaded."""


@pytest.mark.filterwarnings("ignore::pytest_benchmark.logger.PytestBenchmarkWarning")
class OnToys(AllFeatures, ChatModelIntegrationTests):
    def invoke_with_cache_read_input(self, *, stream: bool = False) -> Any:
        model = self.chat_model_class(**self.chat_model_params)
        model.invoke("Hello there, what now?")
        if not stream:
            return model.invoke("Hello there, what now?")
        chunks: list[Any] = list(model.stream("Hello there, what now?"))
        return sum(chunks[1:], start=chunks[0])

    @property
    def supports_model_override(self) -> bool:
        return False  # a toy has no name by which it could be found


class TestOnRandomToys(OnToys):
    """Any text whatever: the models disagree at every step."""

    TARGET = ToyEngine(random_policy(1, end=-40.0), name="toy-target", context_length=500)
    DRAFT = ToyEngine(random_policy(2, end=-40.0), name="toy-draft", context_length=500)

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"draft": self.DRAFT, "target": self.TARGET, "seed": 1, "temperature": 1.0}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {**super().standard_chat_model_params, "max_tokens": 40}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supports_json_mode(self) -> bool:
        return False

    @property
    def supports_anthropic_inputs(self) -> bool:
        return False


class TestOnObedientToys(OnToys):
    """Texts that use the tools; the draft's and the target's are the same."""

    TARGET = Obedient("")
    DRAFT = Obedient("")

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"draft": self.DRAFT, "target": self.TARGET, "temperature": 0}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {**super().standard_chat_model_params, "max_tokens": 300}
