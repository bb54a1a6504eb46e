"""The rollout against the paper's own formula, written out as matrix products."""

from __future__ import annotations

from functools import cache
from typing import get_args

import numpy as np
import pytest

from specguard_chains.decoding.grounding import (
    FloatArray,
    GroundingForm,
    GroundingSpec,
    Rollout,
    average_heads,
    rollout_reference,
)
from specguard_chains.errors import ConfigurationError
from tests.toy_engine import HEADS, attention_row

FORMS = get_args(GroundingForm)
SLOTS = 160

Path = tuple[int, ...]
"""The tokens from the first of the prompt to one of a step: each has its own attention row."""

row_of = cache(attention_row)


def full_attention(path: Path, layers: int) -> FloatArray:
    """Causal probabilities of all tokens of a path, shape (layers, heads, N, N)."""
    full = np.zeros((layers, HEADS, len(path), len(path)), dtype=np.float32)
    for layer in range(layers):
        for i in range(len(path)):
            full[layer, :, i, : i + 1] = row_of(path[: i + 1], layer)
    return full


def reference(path: Path, context: int, spec: GroundingSpec) -> FloatArray:
    return rollout_reference(full_attention(path, spec.layers), context, spec)


class Memory:
    """Writes paths into a rollout, each token into a random free slot."""

    def __init__(self, spec: GroundingSpec, rng: np.random.Generator) -> None:
        self.rollout = Rollout(spec, SLOTS)
        self._rng = rng
        self._free = [int(slot) for slot in rng.permutation(SLOTS)]
        self.slots: dict[Path, int] = {}

    def write(self, paths: list[Path], *, context: bool) -> FloatArray:
        """Compute the last token of each path in one forward pass; return their grounding."""
        for path in paths:
            self.slots[path] = self._free.pop()
        own = np.array([self.slots[path] for path in paths])
        positions = [len(path) - 1 for path in paths]
        self.rollout.begin(own, context=context, positions=positions)
        for layer in range(self.rollout.spec.layers):
            rows = np.zeros((HEADS, len(paths), SLOTS), dtype=np.float32)
            for i, path in enumerate(paths):
                seen = [self.slots[path[: n + 1]] for n in range(len(path))]
                rows[:, i, seen] = row_of(path, layer)
            self.rollout.absorb(layer, rows, own)
        return self.rollout.grounding(own)

    def free(self, path: Path) -> None:
        self._free.append(self.slots.pop(path))
        self._rng.shuffle(self._free)


def extend(path: Path, tokens: list[int]) -> list[Path]:
    """The paths to each of some tokens that follow each other after a path."""
    return [(*path, *tokens[: n + 1]) for n in range(len(tokens))]


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("form", FORMS)
def test_token_by_token_equals_the_formula(form: str, layers: int) -> None:
    spec = GroundingSpec.named(form, layers=layers)
    memory = Memory(spec, np.random.default_rng(layers))
    prompt, step = extend((), list(range(6))), list(range(6, 30))
    memory.write(prompt, context=True)
    grounding = [memory.write([path], context=False)[0] for path in extend(prompt[-1], step)]
    expected = reference((*prompt[-1], *step), len(prompt), spec)
    np.testing.assert_allclose(grounding, expected, atol=1e-6)
    assert np.ptp(expected) > 0.01, "the numbers tell rows apart"


@pytest.mark.parametrize("form", FORMS)
def test_a_block_equals_token_by_token(form: str) -> None:
    spec = GroundingSpec.named(form)
    prompt = extend((), list(range(10)))
    step = extend(prompt[-1], list(range(10, 25)))
    blocks, single = (Memory(spec, np.random.default_rng(seed)) for seed in (1, 2))
    blocks.write(prompt, context=True)
    for path in prompt:
        single.write([path], context=True)
    np.testing.assert_allclose(
        [*blocks.write(step[:7], context=False), *blocks.write(step[7:], context=False)],
        [single.write([path], context=False)[0] for path in step],
        atol=1e-6,
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("form", FORMS)
def test_any_history_of_branches_equals_the_formula(form: str, seed: int) -> None:
    """Branches interleave; one is kept, in part or whole, or none; freed slots are used again."""
    rng = np.random.default_rng(seed)
    spec = GroundingSpec.named(form)
    memory = Memory(spec, rng)
    memory.write(extend((), rng.integers(100, size=7).tolist()), context=True)
    context = max(memory.slots, key=len)
    for _ in range(6):
        lengths = rng.integers(1, 7, size=rng.integers(1, 5))
        branches = [
            extend(context, [1000 * b + int(t) for t in rng.integers(100, size=length)])
            for b, length in enumerate(lengths)
        ]
        grounding: list[list[float]] = [[] for _ in branches]
        for t in range(max(lengths)):
            live = [b for b, branch in enumerate(branches) if t < len(branch)]
            values = memory.write([branches[b][t] for b in live], context=False)
            for b, value in zip(live, values, strict=True):
                grounding[b].append(float(value))
        for branch, values in zip(branches, grounding, strict=True):
            expected = reference(branch[-1], len(context), spec)
            np.testing.assert_allclose(values, expected, atol=1e-6)

        chosen = int(rng.integers(-1, len(branches)))  # -1: all are rejected
        kept = [] if chosen < 0 else branches[chosen][: rng.integers(len(branches[chosen])) + 1]
        memory.rollout.commit(np.array([memory.slots[path] for path in kept], dtype=np.intp))
        for path in {path for branch in branches for path in branch} - set(kept):
            memory.free(path)
        context = kept[-1] if kept else context
        if chosen < 0:  # what another model wrote instead is read as context
            foreign = extend(context, rng.integers(5000, 6000, size=3).tolist())
            memory.write(foreign, context=True)
            context = foreign[-1]


def test_an_accepted_step_counts_as_context_and_a_rejected_one_does_not() -> None:
    spec = GroundingSpec.named("dense")
    memory = Memory(spec, np.random.default_rng(0))
    prompt = extend((), list(range(5)))
    memory.write(prompt, context=True)
    step = extend(prompt[-1], list(range(5, 10)))
    memory.write(step, context=False)
    (following,) = extend(step[-1], [99])
    (apart,) = memory.write([following], context=False)
    memory.free(following)
    memory.rollout.commit(np.array([memory.slots[path] for path in step]))
    (within,) = memory.write([following], context=False)
    np.testing.assert_allclose(apart, reference(following, 5, spec)[-1], atol=1e-6)
    np.testing.assert_allclose(within, reference(following, 10, spec)[-1], atol=1e-6)
    assert apart < within


def test_reading_as_context_equals_committing_a_step() -> None:
    spec = GroundingSpec.named("sparse")
    read, committed = (Memory(spec, np.random.default_rng(seed)) for seed in (3, 4))
    prompt = extend((), list(range(5)))
    step = extend(prompt[-1], list(range(5, 10)))
    (after,) = extend(step[-1], [10])
    for memory in (read, committed):
        memory.write(prompt, context=True)
        memory.write(step, context=memory is read)
    committed.rollout.commit(np.array([committed.slots[path] for path in step]))
    np.testing.assert_allclose(
        read.write([after], context=False), committed.write([after], context=False), atol=1e-6
    )


@pytest.mark.parametrize("form", ["dense", "renormalised"])
def test_without_lost_mass_the_steps_own_block_is_enough(form: str) -> None:
    """METHODS.md: G = 1 - B^(L) ... B^(1) 1, with B the step's own block of attention."""
    spec, context, total = GroundingSpec.named(form), 9, 20
    full = full_attention(tuple(range(total)), spec.layers)
    own = np.ones(total - context)
    for layer in full:
        own = average_heads(layer, spec)[context:, context:] @ own
    np.testing.assert_allclose(rollout_reference(full, context, spec), 1 - own, atol=1e-5)


def test_dropping_small_entries_only_takes_mass_away() -> None:
    path = tuple(range(40))
    sparse, dense = (reference(path, 15, GroundingSpec.named(f)) for f in ("sparse", "dense"))
    assert (sparse <= dense + 1e-6).all()
    assert (sparse < dense - 0.01).any()
    assert (dense <= 1 + 1e-6).all()


def test_grounding_is_all_of_a_row_that_sees_only_the_context() -> None:
    spec = GroundingSpec.named("dense", layers=2)
    rollout = Rollout(spec, 4)
    rollout.begin(np.array([0, 1]), context=True, positions=[0, 1])
    rollout.begin(np.array([2, 3]), context=False, positions=[2, 3])
    rows = np.array([[[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.3, 0.7, 0, 0], [0, 0, 0.25, 0.75]]])
    for layer in range(2):
        rollout.absorb(layer, rows.astype(np.float32), np.arange(4))
    # The last token looks at the step alone; only through its first token at the context.
    np.testing.assert_allclose(rollout.grounding(np.array([2, 3])), [1.0, 0.25])


def test_the_threshold_applies_in_each_head_before_the_mean() -> None:
    attention = np.array(
        [
            [[0.005, 0.015, 0.48, 0.5, 0.0]],
            [[0.405, 0.001, 0.094, 0.491, 0.009]],
        ],
        dtype=np.float32,
    )
    spec = GroundingSpec(threshold=0.01)
    expected = [0.405 / 2, 0.015 / 2, (0.48 + 0.094) / 2, (0.5 + 0.491) / 2, 0.0]
    np.testing.assert_allclose(average_heads(attention, spec), [expected], rtol=1e-6)


def test_an_entry_at_the_threshold_stays() -> None:
    attention = np.array([[[0.25, 0.125, 0.625]]], dtype=np.float32)
    kept = average_heads(attention, GroundingSpec(threshold=0.25))
    np.testing.assert_array_equal(kept, np.float32([[0.25, 0.0, 0.625]]))


def test_renormalised_rows_sum_to_one_and_an_empty_row_stays_empty() -> None:
    attention = np.array(
        [[[0.2, 0.3, 0.5], [0.3, 0.3, 0.4]], [[0.9, 0.05, 0.05], [0.4, 0.3, 0.3]]],
        dtype=np.float32,
    )
    spec = GroundingSpec(threshold=0.45, renormalise=True)
    rows = average_heads(attention, spec)
    np.testing.assert_allclose(rows, [[0.9 / 1.4, 0, 0.5 / 1.4], [0, 0, 0]], rtol=1e-6)


def test_dense_rows_are_the_mean_of_the_heads() -> None:
    attention = row_of(tuple(range(20)), 0)[:, None]
    np.testing.assert_allclose(
        average_heads(attention, GroundingSpec.named("dense")), attention.mean(axis=0), rtol=1e-6
    )


def test_the_attention_given_is_left_as_it_is() -> None:
    attention = row_of(tuple(range(20)), 0)[:, None].copy()
    before = attention.copy()
    average_heads(attention, GroundingSpec.named("renormalised"))
    np.testing.assert_array_equal(attention, before)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_goes_by_its_name(form: str) -> None:
    assert GroundingSpec.named(form).form == form


def test_the_default_is_the_sparse_form_over_three_layers() -> None:
    assert GroundingSpec() == GroundingSpec.named("sparse") == GroundingSpec(3, 0.01, False)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"layers": 0}, "0"),
        ({"layers": -2}, "-2"),
        ({"threshold": -0.5}, "-0.5"),
        ({"threshold": 1.0}, "1.0"),
        ({"threshold": float("nan")}, "nan"),
    ],
)
def test_wrong_values_are_named(wrong: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{next(iter(wrong))}.* not {named}"):
        GroundingSpec(**wrong)


def test_an_unknown_form_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'sparce'.*sparse, dense, renormalised"):
        GroundingSpec.named("sparce")


@pytest.mark.parametrize("form", FORMS)
def test_rows_may_be_averaged_elsewhere(form: str) -> None:
    spec = GroundingSpec.named(form, layers=1)
    path = tuple(range(12))
    slots = np.arange(len(path))
    (attention,) = full_attention(path, layers=1)
    whole, averaged = Rollout(spec, SLOTS), Rollout(spec, SLOTS)
    for rollout in (whole, averaged):
        rollout.begin(slots[:5], context=True, positions=range(5))
        rollout.begin(slots[5:], context=False, positions=range(5, len(slots)))
    whole.absorb(0, attention, slots)
    averaged.absorb_averaged(0, average_heads(attention, spec), slots)
    np.testing.assert_array_equal(averaged.grounding(slots), whole.grounding(slots))


@pytest.mark.parametrize("form", FORMS)
def test_tokens_that_move_keep_their_values(form: str) -> None:
    """As in a cache that closes the holes which other candidates have left behind."""
    spec = GroundingSpec.named(form)
    memory = Memory(spec, np.random.default_rng(0))
    prompt = extend((), list(range(6)))
    step = extend(prompt[-1], list(range(6, 12)))
    memory.write(prompt, context=True)
    for path in step:
        memory.write([path], context=False)
    paths = [*prompt, *step]
    before = np.array([memory.slots[path] for path in paths])
    after = np.arange(len(paths))  # overlaps with where others still lie
    memory.rollout.move(before, after)
    memory.slots = dict(zip(paths, after.tolist(), strict=True))
    memory._free = list(range(len(paths), SLOTS))
    more = extend(step[-1], list(range(12, 18)))
    grounding = [memory.write([path], context=False)[0] for path in more]
    expected = reference(more[-1], len(prompt), spec)
    np.testing.assert_allclose(grounding, expected[len(step) :], atol=1e-6)
