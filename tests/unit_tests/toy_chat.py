"""Chat models that write what a test tells them to, through the real sessions and decoders."""

from typing import Any

from specguard_chains import ChatSpecGuard
from tests.paper import PAPER
from tests.toy_engine import Policy, ToyEngine, random_policy, scripted_policy

STEPS = ("One a.\n\n", "Two b.\n\n", "Three c.")
TEXT = "".join(STEPS)


def scripted(*steps: str, delay_s: float = 0.0, **options: Any) -> ChatSpecGuard:
    """A model that writes these steps, by default three, whatever it is asked."""
    return solo(scripted_policy(*(steps or STEPS)), delay_s=delay_s, **options)


def endless(*, delay_s: float = 0.0, **options: Any) -> ChatSpecGuard:
    """A model that repeats one step until something stops it."""
    return solo(scripted_policy("On and on.\n\n", end=False), delay_s=delay_s, **options)


def random(table: int = 0, **options: Any) -> ChatSpecGuard:
    """A model that writes something else for each seed."""
    return solo(random_policy(table, end=-2.0), **{"max_tokens": 60, **options})


def solo(policy: Policy, *, delay_s: float = 0.0, **options: Any) -> ChatSpecGuard:
    """A target alone."""
    engine = ToyEngine(policy, name="toy-target", delay_s=delay_s)
    return ChatSpecGuard(decoder="target", target=engine, **options)


def pair(**options: Any) -> ChatSpecGuard:
    """Draft and target; the draft is unsure of the second step, which the target rewrites."""
    draft = scripted_policy(*STEPS, logprobs=[-0.01, -4.0])
    target = scripted_policy("Uno a.\n\n", "Dos b.\n\n", "Tres c.")
    return ChatSpecGuard(
        draft=ToyEngine(draft, name="toy-draft"),
        target=ToyEngine(target, name="toy-target"),
        **{**PAPER, "confidence_weight": 1.0, "threshold": 0.5, **options},
    )


def engine_of(model: ChatSpecGuard) -> ToyEngine:
    assert isinstance(model.target, ToyEngine)
    return model.target
