"""What a decoder that judges steps needs of its engines, told before it runs."""

from __future__ import annotations

from specguard_chains.decoding.boundaries import StepShape
from specguard_chains.decoding.engine import Engine
from specguard_chains.decoding.verification import Verifier
from specguard_chains.errors import ConfigurationError


def check_confidence(draft: Engine, verifier: Verifier) -> None:
    """Refuse a draft that cannot give the confidence that is to be judged."""
    if verifier.needs_confidence and not draft.capabilities.logprobs:
        raise ConfigurationError(
            f"{draft.name} gives no log-probs, which confidence needs; set verify_with='target', "
            "or take a server that gives them"
        )


def check_scoring(target: Engine, remedy: str) -> None:
    """Refuse a target that cannot read what the draft has written."""
    if not target.capabilities.scoring:
        raise ConfigurationError(
            f"{target.name} cannot score text that it has not written; {remedy}, or take a server "
            "that gives the log-probs of prompts"
        )


def check_candidates(
    engine: Engine, n: int, shape: StepShape, asked: str = "num_candidates"
) -> None:
    """Refuse what an engine has reserved no memory for; `asked` is the option that asks for it.

    Raises:
        ConfigurationError: It cannot sample n candidate steps side by side.
    """
    has = engine.capabilities
    if n > has.max_candidates:
        raise ConfigurationError(
            f"{asked}={n} is more than the {has.max_candidates} that {engine.name} has "
            "room for; load it with a larger max_candidates"
        )
    reserved = has.max_candidate_tokens
    if n > 1 and reserved is not None and shape.max_tokens > reserved:
        raise ConfigurationError(
            f"steps of {shape.max_tokens} tokens are longer than the {reserved} that "
            f"{engine.name} has room for in each candidate; load it with larger candidate_tokens"
        )
