"""A LangChain model that drafts small, verifies every step, and rewrites only what fails.

>>> from specguard_chains import ChatSpecGuard
>>> ChatSpecGuard().invoke("What is 12 * 13?").text  # doctest: +SKIP

Importing the package loads no engine and no LangChain; a name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specguard_chains.callbacks import LangGraphStepWriter
    from specguard_chains.chat_model import ChatSpecGuard
    from specguard_chains.console import ConsoleStepHandler
    from specguard_chains.decoding.boundaries import Phase
    from specguard_chains.decoding.steps import Review, Source, Step, Verdict
    from specguard_chains.errors import (
        AttentionUnavailableError,
        CalibrationError,
        ConfigurationError,
        ContextOverflowError,
        DecodingCancelled,
        DecodingTimeoutError,
        EngineError,
        EvaluationError,
        ModelIntegrityError,
        ModelNotFoundError,
        QueueFullError,
        SpecGuardError,
    )
    from specguard_chains.llm import SpecGuardLLM
    from specguard_chains.metrics import Metrics
    from specguard_chains.options import SpecGuardOptions
    from specguard_chains.step_parser import StepChain, StepParser
    from specguard_chains.telemetry import OTelStepHandler

__version__ = "0.1.0"

_MODULES = {
    "ChatSpecGuard": "chat_model",
    "ConsoleStepHandler": "console",
    "LangGraphStepWriter": "callbacks",
    "Metrics": "metrics",
    "OTelStepHandler": "telemetry",
    "Phase": "decoding.boundaries",
    "Review": "decoding.steps",
    "Source": "decoding.steps",
    "SpecGuardLLM": "llm",
    "SpecGuardOptions": "options",
    "Step": "decoding.steps",
    "StepChain": "step_parser",
    "StepParser": "step_parser",
    "Verdict": "decoding.steps",
    "AttentionUnavailableError": "errors",
    "CalibrationError": "errors",
    "ConfigurationError": "errors",
    "ContextOverflowError": "errors",
    "DecodingCancelled": "errors",
    "DecodingTimeoutError": "errors",
    "EngineError": "errors",
    "EvaluationError": "errors",
    "ModelIntegrityError": "errors",
    "ModelNotFoundError": "errors",
    "QueueFullError": "errors",
    "SpecGuardError": "errors",
}

__all__ = [
    "AttentionUnavailableError",
    "CalibrationError",
    "ChatSpecGuard",
    "ConfigurationError",
    "ConsoleStepHandler",
    "ContextOverflowError",
    "DecodingCancelled",
    "DecodingTimeoutError",
    "EngineError",
    "EvaluationError",
    "LangGraphStepWriter",
    "Metrics",
    "ModelIntegrityError",
    "ModelNotFoundError",
    "OTelStepHandler",
    "Phase",
    "QueueFullError",
    "Review",
    "Source",
    "SpecGuardError",
    "SpecGuardLLM",
    "SpecGuardOptions",
    "Step",
    "StepChain",
    "StepParser",
    "Verdict",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
