"""Engines, encoders and reward models by name, loaded when they are first used.

>>> from specguard_chains.adapters import LlamaCppEngine
>>> engine = LlamaCppEngine("model.gguf", n_ctx=4096)  # doctest: +SKIP

Other packages add engines through the entry point group `specguard_chains.engines`: the engine's
class then has its own name here.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specguard_adapters.huggingface import HuggingFaceEngine
    from specguard_adapters.llama_cpp import LlamaCppEngine
    from specguard_adapters.openai import OpenAIEngine
    from specguard_adapters.reward.model import ProcessRewardModel
    from specguard_adapters.sentence import SentenceEncoder

__all__ = [
    "HuggingFaceEngine",
    "LlamaCppEngine",
    "OpenAIEngine",
    "ProcessRewardModel",
    "SentenceEncoder",
]

GROUP = "specguard_chains.engines"

_OWN = {
    "LlamaCppEngine": ("specguard_adapters.llama_cpp", {"llama_cpp"}, "llama-cpp"),
    "HuggingFaceEngine": (
        "specguard_adapters.huggingface",
        {"accelerate", "gguf", "torch", "transformers"},
        "transformers",
    ),
    "OpenAIEngine": ("specguard_adapters.openai", {"httpx", "tenacity"}, "openai"),
    "ProcessRewardModel": (
        "specguard_adapters.reward.model",
        {"accelerate", "gguf", "torch", "transformers"},
        "transformers",
    ),
    "SentenceEncoder": ("specguard_adapters.sentence", {"sentence_transformers"}, "sentence"),
}
"""Class -> (module, the packages that it needs, the extra that installs them)."""


def __getattr__(name: str) -> Any:
    """Import a class."""
    if name in _OWN:
        return _load_own(name)
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    others = {_class_name(entry): entry for entry in entry_points(group=GROUP)}
    if name in others:
        return others[name].load()
    known = ", ".join(sorted({*_OWN, *others}))
    raise AttributeError(f"there is no {name!r}; there are {known}")


def __dir__() -> list[str]:
    """List the classes, whether or not their packages are installed."""
    return sorted({*_OWN, *map(_class_name, entry_points(group=GROUP))})


def _load_own(name: str) -> Any:
    module, packages, extra = _OWN[name]
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name not in packages:
            raise
        raise ImportError(
            f"{name} needs {error.name}, which is not installed: "
            f"pip install 'specguard_chains[{extra}]'"
        ) from error


def _class_name(entry: EntryPoint) -> str:
    return entry.attr.rpartition(".")[2] or entry.name
