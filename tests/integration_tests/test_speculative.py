"""Speculative decoding on llama.cpp, with tiny float32 models whose numbers are exact to 1e-5."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from specguard_adapters.llama_cpp import LlamaCppEngine
from specguard_adapters.llama_cpp.context import Context
from specguard_chains.decoding.acceptance import chooser
from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.boundaries import Boundary
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import LogitSession, Prompt
from specguard_chains.decoding.sampling import Sampling, distribution
from specguard_chains.decoding.speculation import Children, Speculation
from specguard_chains.decoding.speculative import SpeculativeDecoder
from specguard_chains.decoding.speculative_session import SpeculativeSession
from specguard_chains.decoding.steps import Source, Step
from specguard_chains.decoding.token_tree import TokenTree
from specguard_chains.errors import DecodingCancelled
from specguard_chains.options import MAX_SPECULATIVE_TOKENS
from tests.integration_tests import conftest
from tests.integration_tests.conftest import PIECES, VOCABULARY, write_tiny

pytestmark = pytest.mark.integration

GREEDY = Sampling(temperature=0)
PROMPTS = [
    Prompt(text="the cat in the hat and the rat in the inn are thin, then there is a hen "),
    Prompt(text="a rat in the inn, "),
    Prompt(text="then he "),
]
CHAIN, TREE = (1, 1, 1, 1), (3, 2, 1)

Tensors = dict[str, npt.NDArray[np.float32]]
Load = Callable[..., LlamaCppEngine]


# --- models


def similar(tensors: Tensors) -> Tensors:
    """A draft that is right about half of the time."""
    rng = np.random.default_rng(5)
    return {
        name: values + np.float32(0.1 * abs(values).mean()) * noise(rng, values.shape)
        for name, values in tensors.items()
    }


def unrelated(tensors: Tensors) -> Tensors:
    rng = np.random.default_rng(77)
    return {
        name: rng.permutation(values.ravel()).reshape(values.shape)
        for name, values in tensors.items()
    }


def opposite(tensors: Tensors) -> Tensors:
    """What the target finds likeliest is least likely to this draft."""
    return tensors | {"output.weight": -tensors["output.weight"]}


def noise(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    return rng.standard_normal(shape).astype(np.float32)


def unchanged(tensors: Tensors) -> Tensors:
    return tensors


def _changed(
    change: Callable[[Tensors], Tensors], weights: Callable[..., Tensors], *arguments: Any
) -> Tensors:
    return change(weights(*arguments))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The target, drafts for it, and a model with a sliding window of 16 tokens."""
    folder, weights = tmp_path_factory.mktemp("pairs"), conftest.weights
    paths = {"windowed": write_tiny(folder / "windowed.gguf", window=16)}
    for change in (unchanged, similar, unrelated, opposite):
        with pytest.MonkeyPatch.context() as patch:
            changed = partial(_changed, change, weights)
            patch.setattr(conftest, "weights", changed)
            paths[change.__name__] = write_tiny(folder / f"{change.__name__}.gguf")
    return paths


@pytest.fixture
def load(models: dict[str, Path]) -> Iterator[Load]:
    """Loads models by name."""
    with ExitStack() as stack:

        def load(name: str, **settings: int) -> LlamaCppEngine:
            sizes: dict[str, Any] = {"n_ctx": 256, "max_candidates": 8, "candidate_tokens": 16}
            sizes |= settings
            engine = LlamaCppEngine(models[name], n_threads=1, kv_type="f32", **sizes)
            return stack.enter_context(closing(engine))

        yield load


# --- means


def text(steps: Sequence[Step]) -> str:
    return "".join(step.text for step in steps)


def total(steps: Sequence[Step], figure: str) -> int:
    return sum(getattr(step.tokens, figure) for step in steps)


def letters(n: int, seed: int) -> list[int]:
    first = len(VOCABULARY) - len(PIECES)
    return list(map(int, np.random.default_rng(seed).integers(first, len(VOCABULARY), n)))


def filled(widths: Sequence[int], seed: int = 0) -> TokenTree:
    """A tree of random tokens, of which no two siblings are equal."""
    tree, level, rng = TokenTree(widths), [0], np.random.default_rng(seed)
    first = len(VOCABULARY) - len(PIECES)
    for width in widths:
        level = [
            tree.add(first + int(token), parent)
            for parent in level
            for token in rng.permutation(len(PIECES))[:width]
        ]
    return tree


def log_softmax(row: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    exact = row.astype(np.float64) - row.max()
    normal: npt.NDArray[np.float64] = exact - np.log(np.exp(exact).sum())
    return normal


def next_logprobs(session: LogitSession) -> npt.NDArray[np.float64]:
    return log_softmax(session.logits(TokenTree(()))[0])


def assert_like_fresh(session: LogitSession, load: Load, name: str, tokens: list[int]) -> None:
    """The session gives what one gives that has never seen anything but the prompt and these."""
    fresh = load(name).open(PROMPTS[0])
    fresh.extend(tokens)
    np.testing.assert_allclose(next_logprobs(session), next_logprobs(fresh), rtol=0, atol=5e-5)


# --- the text, at temperature 0


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("widths", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("draft", ["similar", "unrelated", "opposite", "unchanged"])
def test_greedy_text_is_the_targets_own(
    load: Load, draft: str, widths: tuple[int, ...], adaptive: bool
) -> None:
    target = load("unchanged")
    decoder = SpeculativeDecoder(load(draft), target, Speculation(widths, adaptive=adaptive))
    for prompt in PROMPTS[:2]:
        request = Request(prompt, sampling=GREEDY, seed=0, max_tokens=40)
        steps = list(decoder.decode(request))
        alone = list(SoloDecoder(target, Source.TARGET).decode(request))
        assert [step.text for step in steps] == [step.text for step in alone]
        kept, passes = total(steps, "kept"), total(steps, "target_passes")
        assert kept + passes >= 40
        if draft == "opposite":
            assert (kept, passes) == (0, 40)
        if draft == "similar":
            assert kept > 10


@pytest.mark.parametrize("most", [4, MAX_SPECULATIVE_TOKENS])
@pytest.mark.parametrize("name", ["unchanged", "windowed"])
def test_what_is_copied_from_the_prompt_changes_no_text(load: Load, name: str, most: int) -> None:
    target, kept = load(name), 0
    for adaptive in (True, False):
        decoder = SpeculativeDecoder(None, target, Speculation((1,) * most, adaptive=adaptive))
        for prompt in PROMPTS:
            request = Request(prompt, sampling=GREEDY, seed=0, max_tokens=100)
            steps = list(decoder.decode(request))
            assert text(steps) == text(list(SoloDecoder(target, Source.TARGET).decode(request)))
            kept += total(steps, "kept")
    assert kept > 40


def test_the_most_that_can_be_copied_is_one_pass(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp has no room for the logits of more rows at a time."""
    sizes, decode = [], Context.decode

    def counting(context: Context, tokens: Sequence[int], *rest: Any, **more: Any) -> Any:
        sizes.append(len(tokens))
        return decode(context, tokens, *rest, **more)

    session = load("unchanged").open(PROMPTS[0])
    session.logits(TokenTree(()))
    session.extend(letters(1, seed=1))
    monkeypatch.setattr(Context, "decode", counting)
    session.logits(filled((1,) * MAX_SPECULATIVE_TOKENS))
    assert sizes == [MAX_SPECULATIVE_TOKENS + 1]


@pytest.mark.parametrize("children", ["independent", "without-replacement"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(1, top_p=1)], ids=str)
def test_a_model_accepts_all_that_it_drafts_itself(
    load: Load, sampling: Sampling, children: Children
) -> None:
    engine = load("unchanged")
    decoder = SpeculativeDecoder(engine, engine, Speculation(CHAIN, children, adaptive=False))
    steps = list(decoder.decode(Request(PROMPTS[0], sampling=sampling, seed=3, max_tokens=60)))
    tokens = sum(step.answer_tokens for step in steps)
    blocks = sum(-(-step.answer_tokens // (len(CHAIN) + 1)) for step in steps)
    assert total(steps, "target_passes") == blocks
    assert total(steps, "kept") >= tokens - blocks


def test_a_full_context_is_used_to_its_last_token(load: Load) -> None:
    """Of 228 tokens, with no more memory than there must be beside them."""
    draft, target = (load(name, n_ctx=228, candidate_tokens=4) for name in ("similar", "unchanged"))
    prompt = Prompt(text=3 * str(PROMPTS[0].text))
    request = Request(prompt, sampling=GREEDY, seed=0)
    speculation = Speculation((8, 1, 1, 1), adaptive=False)
    steps = list(SpeculativeDecoder(draft, target, speculation).decode(request))
    assert text(steps) == text(list(SoloDecoder(target, Source.TARGET).decode(request)))
    assert sum(step.answer_tokens for step in steps) == 228 - len(target.encode(prompt))


# --- the law


@pytest.mark.parametrize(
    ("widths", "children"),
    [((1, 1), "independent"), ((3, 1), "without-replacement"), ((2, 2), "likeliest")],
    ids=str,
)
def test_two_sampled_tokens_follow_the_targets_law(
    load: Load, widths: tuple[int, ...], children: Children
) -> None:
    """Chi-square over all pairs of the first two tokens."""
    sampling, runs = Sampling(temperature=1.2, top_p=1, top_k=5), 400
    draft, target = (load(name).open(PROMPTS[0]) for name in ("similar", "unchanged"))
    start = target.length
    expected: dict[tuple[int, ...], float] = {}
    first = distribution(target.logits(TokenTree(()))[0], sampling)
    for token in np.flatnonzero(first):
        target.rollback(start)
        target.extend([int(token)])
        second = distribution(target.logits(TokenTree(()))[0], sampling)
        for other in np.flatnonzero(second):
            expected[int(token), int(other)] = runs * float(first[token] * second[other])
    target.rollback(start)

    session = SpeculativeSession(draft, target, Speculation(widths, children))
    choose, boundary = chooser(np.random.default_rng(11)), Boundary("\0", max_tokens=2)
    seen = Counter(session.write(boundary, sampling, choose).tokens for _ in range(runs))
    assert seen.keys() <= expected.keys()
    likely = [pair for pair in expected if expected[pair] >= 5]
    squares = [(seen[pair] - expected[pair]) ** 2 / expected[pair] for pair in likely]
    rest = runs - sum(expected[pair] for pair in likely)
    squares.append((runs - sum(seen[pair] for pair in likely) - rest) ** 2 / rest)
    degrees = len(likely)
    assert sum(squares) < degrees + 3.3 * (2 * degrees) ** 0.5, "beyond the 99.9th percentile"


# --- what a rejected proposal leaves behind


@pytest.mark.parametrize("grown", [True, False], ids=["level by level", "whole"])
@pytest.mark.parametrize("name", ["unchanged", "windowed"])
def test_after_every_rejection_length_the_logits_are_a_fresh_sessions(
    load: Load, name: str, grown: bool
) -> None:
    """As of a draft, which grows its chain, and as of a target, which reads it."""
    engine, chain = load(name), letters(6, seed=1)
    for accepted in range(len(chain) + 1):
        session, tree = engine.open(PROMPTS[0]), TokenTree((1,) * len(chain))
        node, sequence = 0, [*chain[:accepted], *letters(1, seed=2)]
        for token in chain:
            node = tree.add(token, node)
            if grown:
                session.logits(tree)
        if not grown:
            session.logits(tree)
        session.extend(sequence)
        assert_like_fresh(session, load, name, sequence)
        session.logits(filled((2, 1)))  # what is pending is read with it
        session.extend([])
        session.rollback(session.length)
        assert_like_fresh(session, load, name, sequence)
        session.close()


@pytest.mark.parametrize(
    ("widths", "settings"),
    [
        ((8, 1, 1, 1, 1, 1), {}),  # 48 nodes: more than one pass has rows for
        ((2, 2, 2), {"n_batch": 8}),
        ((4, 2, 1), {"n_batch": 16, "n_ubatch": 4}),
        ((1,) * 40, {}),  # longer than the window
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["unchanged", "windowed"])
def test_trees_of_any_size_leave_no_trace(
    load: Load, name: str, widths: tuple[int, ...], settings: dict[str, int]
) -> None:
    session, sequence = load(name, **settings).open(PROMPTS[0]), list[int]()
    for turn, share in enumerate((0.3, 0.0, 0.7, 1.0)):
        tree = filled(widths, seed=turn)
        rows = session.logits(tree)
        node = round(share * (len(tree.nodes) - 1))
        fresh = load(name).open(PROMPTS[0])
        fresh.extend([*sequence, *tree.path(node)])
        expected = next_logprobs(fresh)
        np.testing.assert_allclose(log_softmax(rows[node]), expected, rtol=0, atol=5e-5)
        path = [*tree.path(node), *letters(1, seed=turn)]
        session.extend(path)
        sequence += path
    assert_like_fresh(session, load, name, sequence)


def test_a_tree_can_be_cancelled_in_the_middle(load: Load) -> None:
    """llama.cpp asks between the parts of a pass; what it has computed by then must go."""
    engine, tree, sequence = load("unchanged"), filled((8, 1, 1, 1, 1, 1)), letters(2, seed=4)
    asked, answer = 0, -1  # the question that is answered with yes, counting from 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked - 1 == answer

    times, through = 0, False
    while not through:
        session = engine.open(PROMPTS[0], cancelled=cancelled)
        session.logits(TokenTree(()))
        session.extend(sequence)  # pending: read together with the tree
        asked, answer = 0, 7 * times
        try:
            session.logits(tree)
        except DecodingCancelled:
            times += 1
        finally:
            through, answer = asked <= answer, -1
        assert_like_fresh(session, load, "unchanged", sequence)
        session.close()
    assert times > 3


@pytest.mark.parametrize("tokens", [2, 5, 7])
def test_without_repacked_weights_a_batch_gives_the_bits_of_its_tokens_alone(
    tokens: int, model_path: conftest.ModelPath
) -> None:
    """So quantised models, too, write their own text when they are sped up."""
    path = model_path("qwen2.5-coder-0.5b-instruct")
    with closing(LlamaCppEngine(path, n_ctx=256, n_threads=2, repack=False)) as engine:
        text = engine.encode_text(" Paris. The capital of Spain is Madrid, and that of Portugal is")
        prompt = Prompt(text="The capital of Italy is Rome. The capital of France is")
        with closing(engine.open(prompt)) as alone, closing(engine.open(prompt)) as together:
            for start in range(0, len(text) - tokens, tokens):
                tree, node = TokenTree((1,) * tokens), 0
                for token in text[start : start + tokens]:
                    node = tree.add(token, node)
                rows = together.logits(tree).copy()
                for row, token in zip(rows, text[start : start + tokens], strict=False):
                    assert (alone.logits(TokenTree((1,)))[0] == row).all()
                    alone.extend([token])
                together.extend(text[start : start + tokens])
