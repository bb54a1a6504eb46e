"""Causal models of transformers."""

from specguard_adapters.huggingface.engine import HuggingFaceEngine

__all__ = ["HuggingFaceEngine"]
