"""Measuring toys whose costs are known."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import pytest

from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.errors import ConfigurationError, EngineError
from specguard_chains.planning.measure import LEAST, Subject, measure, measure_pair
from tests.toy_engine import ToyEngine, random_policy, scripted_policy
from tests.unit_tests.planning_costs import Clock, TimedToy


def test_a_pass_takes_what_it_takes() -> None:
    clock = Clock()
    (costs,) = measure([Subject(TimedToy(clock, 10, 2))], clock=clock)
    for curve in (costs.verify, costs.read, costs.decode):
        assert curve is not None
        for size in curve.sizes:
            assert 1000 * curve.at(size) == pytest.approx(10 + 2 * size)
    assert costs.decode.sizes == (1, 2, 4, 8)
    assert costs.verify is not None
    assert costs.verify.sizes == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
    assert costs.context_tokens == 300
    assert costs.engine == "timed toy"
    assert costs.logits
    assert not costs.missing


def test_real_seconds_are_no_less_than_a_delay() -> None:
    engine = ToyEngine(random_policy(1, end=-30.0), delay_s=0.004)
    (costs,) = measure([Subject(engine)])
    assert costs.token_s >= 0.004
    assert costs.verify is not None
    assert costs.verify.at(1) >= 0.004
    assert costs.read.at(1) >= 0.004


def test_a_pair_with_attention_and_without() -> None:
    clock = Clock()
    draft, target = TimedToy(clock, 5, 1, name="small"), TimedToy(clock, 20, 3, name="large")
    told: list[tuple[int, int]] = []
    costs = measure_pair(
        draft,
        target,
        grounding=GroundingSpec(),
        attention_of="draft",
        threads=2,
        clock=clock,
        told=lambda done, total: told.append((done, total)),
    )
    assert (costs.draft.engine, costs.target.engine) == ("small", "large")
    assert 1000 * costs.draft.token_s == pytest.approx(6)
    assert 1000 * costs.target.token_s == pytest.approx(23)
    assert costs.draft_with_attention is not None
    assert costs.draft_with_attention.attention
    assert costs.target_with_attention is None
    assert costs.can_speculate
    assert costs.machine.threads == 2
    assert costs.machine.took_s == pytest.approx(clock.now_s, abs=0.06)
    assert "specguard_chains" in costs.machine.versions
    done, total = zip(*told, strict=True)
    assert done == tuple(range(1, len(told) + 1))
    assert total[-1] == len(told)
    assert all(a <= b for a, b in told)


def test_long_passes_are_repeated_less_often() -> None:
    clock = Clock()
    seldom, often = TimedToy(clock, 400, 0), TimedToy(clock, 1, 0)
    counts = []
    for engine in (seldom, often):
        told: list[int] = []
        measure([Subject(engine)], clock=clock, told=lambda done, _, told=told: told.append(done))
        counts.append(len(told))
    assert counts[0] == LEAST * 20
    assert counts[1] > counts[0]


def test_an_engine_with_less_room_has_fewer_candidates() -> None:
    clock = Clock()
    engine = TimedToy(clock, 10, 2)
    engine.capabilities = replace(engine.capabilities, max_candidates=3)
    (costs,) = measure([Subject(engine)], clock=clock)
    assert costs.decode.sizes == (1, 2)


def test_the_engine_can_be_used_afterwards() -> None:
    clock = Clock()
    engine = TimedToy(clock, 1, 1)
    measure([Subject(engine)], clock=clock)
    with engine.exclusive():
        pass


def test_a_context_that_is_too_short_is_named() -> None:
    engine = ToyEngine(random_policy(1), context_length=400)
    with pytest.raises(ConfigurationError, match=r"400 tokens is too short .* set n_ctx to 492"):
        measure([Subject(engine)])
    with engine.exclusive():  # and it is free again
        pass


def test_a_model_that_says_nothing_cannot_be_timed() -> None:
    engine = ToyEngine(scripted_policy(""), name="mute")
    with pytest.raises(EngineError, match="mute ends its text before 4 tokens"):
        measure([Subject(engine)])


class Served(TimedToy):
    """As a server: no logits, and each request takes a while of its own."""

    def __init__(self, clock: Clock, *, scoring: bool = True) -> None:
        super().__init__(clock, 10, 1, name="served")
        self.capabilities = replace(
            self.capabilities, in_process=False, logits=False, scoring=scoring, max_candidates=2
        )


def test_a_server_is_measured_by_its_answers() -> None:
    clock = Clock()
    (costs,) = measure([Subject(Served(clock))], clock=clock)
    assert 1000 * costs.decode.at(1) == pytest.approx(11)
    assert 1000 * costs.decode.at(2) == pytest.approx(12)
    assert costs.decode.sizes == (1, 2)
    tokens = costs.read.sizes[-1]
    assert 1000 * costs.read.at(tokens) == pytest.approx(10 + tokens, rel=0.05)
    assert costs.call_s == pytest.approx(0, abs=1e-9)
    assert not costs.logits
    assert any("by its answers only" in note for note in costs.missing)


def test_a_server_that_scores_nothing_says_so() -> None:
    clock = Clock()
    (costs,) = measure([Subject(Served(clock, scoring=False))], clock=clock)
    assert costs.verify is None
    assert any("does not read given text" in note for note in costs.missing)


def test_a_clock_is_told_by_default() -> None:
    start = perf_counter()
    draft = ToyEngine(random_policy(1, end=-30.0))
    costs = measure_pair(draft, ToyEngine(random_policy(2, end=-30.0)))
    assert 0 < costs.machine.took_s <= perf_counter() - start + 0.1
