"""GGUF models on llama.cpp."""

from specguard_adapters.llama_cpp.engine import LlamaCppEngine

__all__ = ["LlamaCppEngine"]
