"""Measuring what the passes of engines cost, through the same calls that decoders make.

Every engine's passes take turns, so that a machine that slows down does so for all of them; the
figure is the median of several turns. A long pass is repeated less often than a short one, which a
disturbance changes more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter

from specguard_chains.decoding.engine import Engine
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.evaluation.invocation import cpu_model
from specguard_chains.planning.costs import Costs, Machine, PairCosts
from specguard_chains.planning.local_prober import LocalProber
from specguard_chains.planning.probes import Clock, Prober
from specguard_chains.planning.remote_prober import RemoteProber

LEAST, MOST = 2, 5
"""How often a pass is timed."""
ENOUGH_S = 0.6
"""A pass that has been timed for so long in all need not be timed again."""
COMPUTING = ("llama_cpp", "torch", "transformers", "numpy")
"""Modules whose versions costs depend on, if they are loaded."""
PACKAGES = {"llama_cpp": "llama-cpp-python"}

Told = Callable[[int, int], None]
"""(passes timed so far, passes to time as far as is known)."""


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine, and the attention that is read while it computes."""

    engine: Engine
    grounding: GroundingSpec | None = None


def _silent(done: int, total: int) -> None:
    """Tell nobody."""


def measure(
    subjects: Sequence[Subject], *, clock: Clock = perf_counter, told: Told = _silent
) -> list[Costs]:
    """Return the costs of engines, in their order. They are held meanwhile.

    Raises:
        ConfigurationError: A context is too small to measure in.
        EngineError: A model ends its text at once, however often it is asked.
    """
    with ExitStack() as stack:
        for engine in {id(each.engine): each.engine for each in subjects}.values():
            stack.enter_context(engine.exclusive())
        probers = [stack.enter_context(closing(_prober(each, clock))) for each in subjects]
        for prober in probers:
            prober.warm_up()
        _take_turns(probers, told)
        return [prober.costs() for prober in probers]


def measure_pair(
    draft: Engine,
    target: Engine,
    *,
    plain_draft: Engine | None = None,
    grounding: GroundingSpec | None = None,
    attention_of: str | None = None,
    threads: int | None = None,
    clock: Clock = perf_counter,
    told: Told = _silent,
) -> PairCosts:
    """Return the costs of a pair, without and with the attention that grounding is read from.

    Args:
        draft: As it drafts for who judges its steps.
        target: The large model.
        plain_draft: The draft, loaded for who reads no attention; None if that is no other engine.
        grounding: The attention that is read.
        attention_of: Whose: "draft", "target", or None if none is read.
        threads: That the engines were told to use.
        clock: Tells seconds.
        told: Is told how far the measurement is.
    """
    start = clock()
    subjects = {"draft": Subject(plain_draft or draft), "target": Subject(target)}
    if attention_of is not None:
        reader = draft if attention_of == "draft" else target
        subjects[f"{attention_of}_with_attention"] = Subject(reader, grounding or GroundingSpec())
    costs = dict(
        zip(subjects, measure(list(subjects.values()), clock=clock, told=told), strict=True)
    )
    return PairCosts(
        draft=costs["draft"],
        target=costs["target"],
        draft_with_attention=costs.get("draft_with_attention"),
        target_with_attention=costs.get("target_with_attention"),
        same_vocabulary=draft.vocabulary == target.vocabulary,
        machine=_machine(threads, clock() - start),
    )


def _prober(subject: Subject, clock: Clock) -> Prober:
    has = subject.engine.capabilities
    kind = LocalProber if has.in_process and has.logits else RemoteProber
    return kind(subject.engine, subject.grounding, clock)


def _take_turns(probers: Sequence[Prober], told: Told) -> None:
    done = 0
    for turn in range(MOST):
        waiting = [
            (prober, probe)
            for prober in probers
            for probe in prober.probes
            if turn < LEAST or prober.spent_s(probe) < ENOUGH_S
        ]
        for place, (prober, probe) in enumerate(waiting):
            prober.time(probe, turn)
            done += 1
            rest = max(LEAST - 1 - turn, 0) * len(waiting)
            told(done, done + len(waiting) - 1 - place + rest)


def _machine(threads: int | None, took_s: float) -> Machine:
    return Machine(
        cpu=cpu_model(),
        cores=os.cpu_count() or 1,
        threads=threads,
        versions=_versions(),
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
        took_s=round(took_s, 1),
    )


def _versions() -> dict[str, str]:
    found = {"specguard_chains": version("specguard_chains")}
    for module in COMPUTING:
        if module in sys.modules:
            name = PACKAGES.get(module, module)
            try:
                found[name] = version(name)
            except PackageNotFoundError:  # it came in another way than as a package
                found[name] = str(getattr(sys.modules[module], "__version__", "unknown"))
    return found
