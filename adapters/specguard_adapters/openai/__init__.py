"""Models on a server that speaks OpenAI's completion API."""

from specguard_adapters.openai.engine import OpenAIEngine

__all__ = ["OpenAIEngine"]
