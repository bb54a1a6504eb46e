"""LangChain's own tests of chat models; those for real models run on a toy."""

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from specguard_chains import ChatSpecGuard
from tests.toy_engine import ToyEngine, random_policy

TARGET = ToyEngine(random_policy(1, end=-40.0), name="toy-target", context_length=500)
DRAFT = ToyEngine(random_policy(2, end=-40.0), name="toy-draft", context_length=500)


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatSpecGuard


class TestOnToys(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatSpecGuard

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"draft": DRAFT, "target": TARGET, "seed": 1, "temperature": 1.0}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {**super().standard_chat_model_params, "max_tokens": 40}
