"""Process reward models of every kind, tiny and random: their numbers against those by hand."""

from __future__ import annotations

import gc
import json
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn

from specguard_adapters.reward import KINDS, Head, Layout, RewardKind, Scale
from specguard_adapters.reward import network as reward_network
from specguard_adapters.reward.memory import TEXTS
from specguard_adapters.reward.tokens import RewardTokens
from specguard_chains.adapters import ProcessRewardModel
from specguard_chains.decoding.rewards import RewardModel
from specguard_chains.errors import (
    ConfigurationError,
    ContextOverflowError,
    EngineError,
    ModelIntegrityError,
    ModelNotFoundError,
)
from tests.unit_tests import toy_chat

pytestmark = pytest.mark.integration

MESSAGES = [{"role": "user", "content": "What is 2 + 3 + 4?"}]
STEPS = ["2 + 3 = 5.\n\n", "5 + 4 = 9.\n\n", "So it is 9."]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ["<|bos|>", "<|start|>", "<|end|>", "<extra_0>"]
WIDTH = 32


def tokenizer(without: str = "") -> Any:
    """Bytes, "\\n\\n" and ".\\n\\n" as in Qwen's vocabulary, a word in Cyrillic, special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["ĊĊ", ".ĊĊ"]
    vocabulary = {piece: n for n, piece in enumerate([*letters, *merged])}
    backend = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ"), (".", "ĊĊ")]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\.?\n+|[^\n.]+|\."), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("ки", normalized=False)] if without != "ки" else [])
    backend.add_special_tokens([text for text in SPECIAL if text != without])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|end|>"
    )
    fast.chat_template = TEMPLATE
    return fast


def config(kind: Any = transformers.Qwen2Config, **settings: Any) -> Any:
    return kind(
        vocab_size=len(tokenizer()),
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **settings,
    )


Score = Callable[[Sequence[int]], torch.Tensor]
"""Tokens -> the numbers at every one of them, computed by hand."""


@dataclass(frozen=True)
class Made:
    """A model in a folder, and how its reward is computed by hand."""

    folder: Path
    kind: str
    tokens: Callable[[int], list[int]]
    """How many steps -> what is read of them."""
    score: Score
    reward: Callable[[torch.Tensor], float]
    """The numbers at one token -> the reward."""

    def expected(self, steps: int) -> float:
        return self.reward(self.score(self.tokens(steps))[-1])


def sigmoid(row: torch.Tensor) -> float:
    (number,) = row.tolist()
    return 1 / (1 + math.exp(-number))


def second(row: torch.Tensor) -> float:
    assert len(row) == 2
    return float(row.softmax(-1)[1])


def stripped(steps: int) -> list[str]:
    return [step.strip() for step in STEPS[:steps]]


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def one_by_one(question_end: str, tag: str, steps: int) -> list[int]:
    tokens = [*encode("<|bos|>"), *encode(MESSAGES[0]["content"] + question_end)]
    for step in stripped(steps):
        tokens += encode(step) + encode(tag)
    return tokens


def chat(answer: str) -> list[int]:
    return encode(f"<|start|>user\n{MESSAGES[0]['content']}<|end|>\n<|start|>assistant\n{answer}")


def write(folder: Path, plain: Any, head: dict[str, torch.Tensor], **settings: Any) -> None:
    """Write a checkpoint as the published ones are: the model, its head and an unused output."""
    folder.mkdir()
    weights = {f"model.{name}": tensor for name, tensor in plain.state_dict().items()}
    weights |= {"lm_head.weight": torch.zeros_like(plain.embed_tokens.weight), **head}
    save_file({name: t.contiguous() for name, t in weights.items()}, folder / "model.safetensors")
    description = {**plain.config.to_dict(), "dtype": "float32", **settings}
    (folder / "config.json").write_text(json.dumps(description))
    tokenizer().save_pretrained(folder)


def make_qwen(folder: Path) -> Made:
    plain = transformers.Qwen2Model(config()).eval()
    head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    write(
        folder,
        plain,
        {f"score.{name}": tensor for name, tensor in head.state_dict().items()},
        architectures=["Qwen2ForProcessRewardModel"],
        auto_map={
            "AutoConfig": "evil.Config",
            "AutoModel": "evil.Qwen2ForProcessRewardModel",
        },
    )
    (folder / "evil.py").write_text("raise SystemExit('the code of the model was run')")
    return Made(
        folder,
        "qwen-prm",
        lambda n: chat("".join(step + "<extra_0>" for step in stripped(n))),
        lambda tokens: head(plain(torch.tensor([tokens])).last_hidden_state[0]),
        second,
    )


def make_skywork(folder: Path) -> Made:
    plain = transformers.Qwen2Model(config()).eval()
    head = nn.Linear(WIDTH, 1)
    write(
        folder,
        plain,
        {"v_head.summary.weight": head.weight.data, "v_head.summary.bias": head.bias.data},
        architectures=["Qwen2ForPrmModel"],
        auto_map={"AutoModel": "evil.Qwen2ForPrmModel"},
    )
    return Made(
        folder,
        "skywork-prm",
        lambda n: one_by_one("\n", "\n\n", n),
        lambda tokens: head(plain(torch.tensor([tokens])).last_hidden_state[0]),
        sigmoid,
    )


def save(folder: Path, model: Any) -> Any:
    folder.mkdir()
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model.eval()


def make_tokens(folder: Path, labels: int) -> Made:
    model = save(folder, transformers.Qwen2ForTokenClassification(config(num_labels=labels)))
    return Made(
        folder,
        "token-classification",
        lambda n: one_by_one("", "\n", n),
        lambda tokens: model(torch.tensor([tokens])).logits[0],
        sigmoid if labels == 1 else second,
    )


def make_sequences(folder: Path, labels: int) -> Made:
    settings = config(transformers.LlamaConfig, num_labels=labels)
    model = save(folder, transformers.LlamaForSequenceClassification(settings))

    return Made(
        folder,
        "sequence-classification",
        lambda n: chat("\n\n".join(stripped(n))),
        lambda tokens: model(torch.tensor([tokens])).logits,  # the last token's only
        sigmoid if labels == 1 else second,
    )


def verdict(row: torch.Tensor) -> float:
    (good,), (bad,) = encode("+"), encode("-")
    return float(row[[good, bad]].softmax(-1)[0])


def make_shepherd(folder: Path, **settings: Any) -> Made:
    model = transformers.MistralForCausalLM(config(transformers.MistralConfig, **settings))
    save(folder, model)
    question = MESSAGES[0]["content"]
    return Made(
        folder,
        "math-shepherd",
        lambda n: [
            *encode("<|bos|>"),
            *encode(f"{question} " + "\n".join(f"{step} ки" for step in stripped(n))),
        ],
        lambda tokens: model(torch.tensor([tokens])).logits[0],
        verdict,
    )


def make_rlhflow(folder: Path) -> Made:
    model = save(folder, transformers.LlamaForCausalLM(config(transformers.LlamaConfig)))

    def tokens(n: int) -> list[int]:
        first, *rest = stripped(n)
        turns = [
            f"<|start|>user\n{text}<|end|>\n<|start|>assistant\n"
            for text in (f"{MESSAGES[0]['content']} {first}", *rest)
        ]
        return encode("+<|end|>\n".join(turns))

    return Made(
        folder,
        "rlhflow-prm",
        tokens,
        lambda tokens: model(torch.tensor([tokens])).logits[0],
        verdict,
    )


MAKERS: dict[str, Callable[[Path], Made]] = {
    "Tiny-PRM": make_qwen,
    "Tiny-Open-PRM": make_skywork,
    "trl-prm": lambda folder: make_tokens(folder, 2),
    "trl-sigmoid": lambda folder: make_tokens(folder, 1),
    "sequence-rm": lambda folder: make_sequences(folder, 1),
    "sequence-classes": lambda folder: make_sequences(folder, 2),
    "math-shepherd-tiny": make_shepherd,
    "math-shepherd-windowed": lambda folder: make_shepherd(folder, sliding_window=8),
    "Llama3.1-8B-PRM-Tiny": make_rlhflow,
}


@pytest.fixture(scope="module", params=MAKERS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return MAKERS[request.param](tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture
def qwen(tmp_path: Path) -> Made:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return make_qwen(tmp_path / "Tiny-PRM")


@pytest.fixture(autouse=True, scope="module")
def one_thread_without_gradients() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them wait for each other longer than tiny models compute
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def load(made: Made, **settings: Any) -> ProcessRewardModel:
    return ProcessRewardModel(made.folder, **{"device": "cpu", **settings})


# --- the reward


def test_rewards_are_those_by_hand(made: Made) -> None:
    prm: RewardModel = load(made)
    rewards = [prm(MESSAGES, STEPS[:n]) for n in (1, 2, 3)]
    assert rewards == pytest.approx([made.expected(n) for n in (1, 2, 3)], abs=1e-5)
    assert all(0 < reward < 1 for reward in rewards)
    assert len({round(reward, 3) for reward in rewards}) == 3  # each step has its own


def test_the_kind_is_found(made: Made) -> None:
    prm = load(made)
    assert prm.name == made.folder.name
    assert prm.kind.name == made.kind
    assert load(made, kind=prm.kind).kind == prm.kind


# Sequence classifiers read no tag, and later a step's last token may be joined to what follows.
@pytest.mark.parametrize("made", [m for m in MAKERS if "sequence" not in m], indirect=True)
def test_a_steps_reward_does_not_depend_on_later_ones(made: Made) -> None:
    """One pass over the whole answer has every step's reward at the place where it was read."""
    prm = load(made)
    rows = made.score(made.tokens(3))
    together = [made.reward(rows[len(made.tokens(n)) - 1]) for n in (1, 2, 3)]
    assert [prm(MESSAGES, STEPS[:n]) for n in (1, 2, 3)] == pytest.approx(together, abs=1e-5)


def test_reuse_equals_computing_anew(made: Made) -> None:
    """Forwards, backwards, another step in a step's place, another question, and the same again."""
    prm, anew = load(made), load(made, reuse=False)
    other = [{"role": "user", "content": "What is 2 + 3 + 5?"}]
    for messages, steps in (
        *((MESSAGES, STEPS[:n]) for n in (1, 2, 3, 3, 1, 2)),
        (MESSAGES, [STEPS[0], "5 + 4 = 8."]),
        (other, STEPS),
        (MESSAGES, STEPS),
    ):
        assert prm(messages, steps) == pytest.approx(anew(messages, steps), abs=1e-5)


def note_lengths(prm: ProcessRewardModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many tokens each coming pass computes; filled as they are."""
    lengths: list[int] = []
    forward = prm._network._state
    monkeypatch.setattr(
        prm._network,
        "_state",
        lambda tokens, cache: lengths.append(len(tokens)) or forward(tokens, cache),
    )
    return lengths


def test_only_what_is_new_is_computed(qwen: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    prm = load(qwen)
    lengths = note_lengths(prm, monkeypatch)
    for n in (1, 2, 3, 3):
        prm(MESSAGES, STEPS[:n])
    whole = [len(qwen.tokens(n)) for n in (1, 2, 3)]
    assert lengths == [whole[0], whole[1] - whole[0], whole[2] - whole[1], 1]


def test_answers_in_turns_go_on_from_their_own_beginnings(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as are remembered; the second of each one's steps is rejected and written anew."""
    prm, anew = load(made), load(made, reuse=False)
    lengths = note_lengths(prm, monkeypatch)
    answers = [[f"{n} it is.\n\n"] for n in range(TEXTS)]
    for step in (None, "Is it?", "No, it is.\n\n", "So be it."):
        for answer in answers:
            steps = [*answer, step] if step else answer
            assert prm(MESSAGES, steps) == pytest.approx(anew(MESSAGES, steps), abs=1e-5)
            if step != "Is it?":
                answer[:] = steps
    later = lengths[TEXTS:]
    own = len(made.tokens(1)) - len(encode(stripped(1)[0]))  # the question, and what stands around
    assert max(later) < own
    assert all(len({*later[n : n + TEXTS]}) == 1 for n in range(0, len(later), TEXTS))


def test_what_was_computed_can_be_forgotten(qwen: Made) -> None:
    prm = load(qwen)
    for _ in range(2):
        assert prm(MESSAGES, STEPS) == pytest.approx(qwen.expected(3), abs=1e-5)
        prm.clear()
        assert prm._network._remembered(qwen.tokens(3))[0] == 0


def test_reward_guided_decoding_asks_it_about_drafted_steps(qwen: Made) -> None:
    prm = load(qwen)
    chat = toy_chat.pair(decoder="rsd", reward_model=str(qwen.folder), seed=0)
    steps = [*chat.steps(MESSAGES[0]["content"])]
    before: list[str] = []
    for step in steps:
        assert step.value is not None
        assert (step.verdict == "accepted") == (step.value >= 0.5)
        if step.verdict == "accepted" or not before:  # what the draft has written is known
            drafted = step.text if step.verdict == "accepted" else toy_chat.STEPS[0]
            assert step.value == pytest.approx(prm(MESSAGES, [*before, drafted]), abs=1e-5)
        before.append(step.text)


def test_systems_words_are_read_by_models_that_chat(qwen: Made) -> None:
    prm = load(qwen)
    told = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    assert prm(told, STEPS) != pytest.approx(prm(MESSAGES, STEPS), abs=1e-6)


def test_threads_share_a_model(qwen: Made) -> None:
    prm = load(qwen)
    expected = [qwen.expected(n) for n in (1, 2, 3)] * 2
    seen: dict[int, float] = {}

    def rate(n: int) -> None:
        seen[n] = prm(MESSAGES, STEPS[: n % 3 + 1])

    threads = [threading.Thread(target=rate, args=[n]) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [seen[n] for n in range(6)] == pytest.approx(expected, abs=1e-5)


def test_a_kind_may_be_described(qwen: Made) -> None:
    """The same weights, asked in another way."""
    kind = replace(KINDS["qwen-prm"], name="mine", layout=Layout.TEXT, tag="<|end|>")
    tokens = encode(f"<|bos|>{MESSAGES[0]['content']}2 + 3 = 5.<|end|>")
    expected = second(qwen.score(tokens)[-1])
    assert load(qwen, kind=kind)(MESSAGES, STEPS[:1]) == pytest.approx(expected, abs=1e-5)


def test_the_number_format_is_handed_on(qwen: Made) -> None:
    prm = load(qwen, dtype="bfloat16")
    assert prm._network._model.dtype == torch.bfloat16
    assert prm(MESSAGES, STEPS) == pytest.approx(qwen.expected(3), abs=0.1)


def test_weights_may_lie_in_shards_or_in_torchs_format(tmp_path: Path) -> None:
    made = make_skywork(tmp_path / "Tiny-Open-PRM")
    weights = load_file(made.folder / "model.safetensors")
    (made.folder / "model.safetensors").unlink()
    torch.save(weights, made.folder / "pytorch_model.bin")
    assert load(made)(MESSAGES, STEPS) == pytest.approx(made.expected(3), abs=1e-5)
    (made.folder / "pytorch_model.bin").unlink()
    heads = {name: t for name, t in weights.items() if "v_head" in name}
    rest = {name: t for name, t in weights.items() if "v_head" not in name}
    places = {}
    for n, part in enumerate((rest, heads), start=1):
        file = f"model-0000{n}-of-00002.safetensors"
        save_file(part, made.folder / file)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (made.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load(made)(MESSAGES, STEPS) == pytest.approx(made.expected(3), abs=1e-5)


# --- code that comes with a model

OWN_CODE = """
import torch
from transformers import PreTrainedModel, Qwen2Config

class Config(Qwen2Config):
    pass

class Constant(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.numbers = torch.nn.Parameter(torch.zeros(2))
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, input_ids):
        return (self.numbers.expand(1, input_ids.shape[1], 2),)
"""


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that only its own code can compute."""
    folder = tmp_path / "coded"
    folder.mkdir()
    (folder / "code.py").write_text(OWN_CODE)
    code = {"AutoConfig": "code.Config", "AutoModel": "code.Constant"}
    description = {"architectures": ["Constant"], "auto_map": code, "model_type": "qwen2"}
    (folder / "config.json").write_text(json.dumps(config().to_dict() | description))
    save_file({"numbers": torch.tensor([0.5, 1.5])}, folder / "model.safetensors")
    tokenizer().save_pretrained(folder)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.syspath_prepend(tmp_path / "m")
    return folder


def test_code_is_run_only_if_it_is_asked_for(with_code: Path) -> None:
    remedy = r"\(its architecture is Constant\); give kind=.*read the code.*trust_remote_code=True"
    with pytest.raises(ConfigurationError, match=remedy):
        ProcessRewardModel(with_code, device="cpu")
    with pytest.raises(ConfigurationError, match=r"has no weights '.*' and \d+ more"):
        ProcessRewardModel(with_code, device="cpu", kind="qwen-prm")
    prm = ProcessRewardModel(with_code, device="cpu", kind="qwen-prm", trust_remote_code=True)
    assert prm.kind.head is Head.OWN
    assert prm(MESSAGES, STEPS) == pytest.approx(1 / (1 + math.exp(-1)))


def test_verdicts_need_a_language_model(with_code: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has no AutoModelForCausalLM, which.*'math-sh"):
        ProcessRewardModel(with_code, kind="math-shepherd", trust_remote_code=True)


def test_code_that_gives_too_many_numbers_is_told_of(with_code: Path) -> None:
    kind = RewardKind("mine", Layout.TEXT, Head.OWN, Scale.SIGMOID)
    prm = ProcessRewardModel(with_code, device="cpu", kind=kind, trust_remote_code=True)
    with pytest.raises(ConfigurationError, match=r"gives 2 numbers a token, and scale='sigmoid'"):
        prm(MESSAGES, STEPS)


def test_own_code_needs_some(qwen: Made, tmp_path: Path) -> None:
    made = make_tokens(tmp_path / "plain", 2)
    kind = RewardKind("mine", Layout.TEXT, Head.OWN, Scale.CLASSES)
    with pytest.raises(ConfigurationError, match=r"no code comes with plain; give another kind"):
        load(made, kind=kind, trust_remote_code=True)
    with pytest.raises(ConfigurationError, match=r"read the code that comes with Tiny-PRM.*give"):
        load(qwen, kind=kind)


# --- what goes wrong


def test_a_plain_model_is_no_reward_model(tmp_path: Path) -> None:
    folder = tmp_path / "chat-model"
    save(folder, transformers.Qwen2ForCausalLM(config()))
    with pytest.raises(
        ConfigurationError, match=r"chat-model is no reward model.*Qwen2ForCausalLM\); give kind="
    ):
        ProcessRewardModel(folder)
    for kind in ("qwen-prm", "skywork-prm", "token-classification"):
        with pytest.raises(ConfigurationError, match=rf"has no weights.*'{kind}'; give another"):
            ProcessRewardModel(folder, kind=kind)
    with pytest.raises(ConfigurationError, match=r"no reward kind 'best'; there are"):
        ProcessRewardModel(folder, kind="best")


@pytest.mark.parametrize(("lacking", "kind"), [("<extra_0>", "qwen-prm"), ("ки", "math-shepherd")])
def test_a_vocabulary_without_the_tag_is_refused(
    lacking: str, kind: str, qwen: Made, tmp_path: Path
) -> None:
    tokenizer(without=lacking).save_pretrained(tmp_path / "words")
    described = replace(KINDS[kind], head=Head.MLP, scale=Scale.CLASSES, good="", bad="")
    with pytest.raises(ConfigurationError, match=rf"no token for the tag '{lacking}'.*; give"):
        load(qwen, tokenizer=tmp_path / "words", kind=described)


def test_vocabularies_that_spell_spaces_have_the_tag(tmp_path: Path) -> None:
    """As Mistral's does: every word begins with its space, also the first one of a text."""
    letters = sorted({*"".join([MESSAGES[0]["content"], *STEPS, "ки+-"]), "\u2581"})
    pieces = ["<s>", *letters, "\u2581+", "\u2581-", "\u2581к", "\u2581ки"]
    merges = [("\u2581", "+"), ("\u2581", "-"), ("\u2581", "к"), ("\u2581к", "и")]
    backend = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    tokens = RewardTokens(words, KINDS["math-shepherd"], "shepherd")
    assert tokens.verdicts == (pieces.index("\u2581-"), pieces.index("\u2581+"))
    read = tokens.encode(MESSAGES, STEPS)
    assert read[0] == 0
    assert read[-1] == pieces.index("\u2581ки")
    assert read.count(pieces.index("\u2581ки")) == 3


def test_a_verdict_must_be_one_token(tmp_path: Path) -> None:
    made = make_shepherd(tmp_path / "math-shepherd-tiny")
    with pytest.raises(ConfigurationError, match=r"no token for the word 'good'.*; give"):
        load(made, kind=replace(KINDS["math-shepherd"], good="good"))


def test_a_chat_template_is_needed_for_chats(qwen: Made, tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template = None
    words.save_pretrained(tmp_path / "words")
    with pytest.raises(ConfigurationError, match=r"no chat template, which.*'qwen-prm' needs"):
        load(qwen, tokenizer=tmp_path / "words")
    words.chat_template = "{{ raise_exception('only two may speak') }}"
    words.save_pretrained(tmp_path / "words")
    with pytest.raises(ConfigurationError, match=r"refuses the conversation.*only two may speak"):
        load(qwen, tokenizer=tmp_path / "words")(MESSAGES, STEPS)


def test_a_tag_that_the_tokenizer_joins_to_the_step_is_told_of(tmp_path: Path) -> None:
    made = make_skywork(tmp_path / "Tiny-Open-PRM")
    prm = load(made, kind=replace(KINDS["skywork-prm"], layout=Layout.TEXT))
    with pytest.raises(ConfigurationError, match=r"joins the tag.*layout='pieces'"):
        prm(MESSAGES, ["2 + 3 = 5."])


def test_too_long_a_text_is_told_of(qwen: Made) -> None:
    prm = load(qwen)
    with pytest.raises(ContextOverflowError, match=r"1 steps have \d+ tokens.*reads 256 at most"):
        prm(MESSAGES, ["long " * 100])
    with pytest.raises(ContextOverflowError, match="reads 10 at most; shorten"):
        load(qwen, n_ctx=10)(MESSAGES, STEPS)
    assert 0 < load(qwen, n_ctx=1000)(MESSAGES, ["long " * 100]) < 1
    with pytest.raises(ConfigurationError, match="n_ctx must be at least 1"):
        load(qwen, n_ctx=0)


def test_no_step_is_refused(qwen: Made) -> None:
    with pytest.raises(ConfigurationError, match="no step to rate"):
        load(qwen)(MESSAGES, [])


@pytest.mark.parametrize(("labels", "scale"), [(2, Scale.SIGMOID), (3, Scale.CLASSES)])
def test_a_scale_that_does_not_suit_the_head_is_refused(
    labels: int, scale: Scale, tmp_path: Path
) -> None:
    made = make_tokens(tmp_path / "prm", labels)
    with pytest.raises(ConfigurationError, match=rf"gives {labels} numbers a token, and scale="):
        load(made, kind=replace(KINDS["token-classification"], scale=scale))


def test_a_model_that_reads_in_both_directions_is_not_reused(tmp_path: Path) -> None:
    settings = transformers.BertConfig(
        vocab_size=len(tokenizer()),
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.3,
        num_labels=2,
    )
    model = save(tmp_path / "bert", transformers.BertForTokenClassification(settings))
    with pytest.raises(ConfigurationError, match=r"cannot take up where.*reuse=False"):
        ProcessRewardModel(tmp_path / "bert", device="cpu")
    prm = ProcessRewardModel(tmp_path / "bert", device="cpu", reuse=False)
    tokens = torch.tensor([one_by_one("", "\n", 3)])
    expected = second(model(tokens).logits[0, -1])
    assert prm(MESSAGES, STEPS) == pytest.approx(expected, abs=1e-5)


def test_what_failed_is_not_reused(qwen: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    prm = load(qwen)
    prm(MESSAGES, STEPS[:1])

    def fails(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(prm._network._model.base_model.layers[1], "forward", fails)
        with pytest.raises(EngineError, match=r"memory does not suffice.*smaller dtype"):
            prm(MESSAGES, STEPS[:2])
    assert prm(MESSAGES, STEPS[:2]) == pytest.approx(qwen.expected(2), abs=1e-5)


def test_other_texts_are_forgotten_where_the_memory_does_not_suffice(
    qwen: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    prm = load(qwen)
    layer = prm._network._model.base_model.layers[1]
    forward = layer.forward

    def fails(*args: Any, **settings: Any) -> Any:
        if prm._network._memory:
            raise torch.OutOfMemoryError("no room")
        return forward(*args, **settings)

    for step in STEPS:
        prm(MESSAGES, [step])
    monkeypatch.setattr(layer, "forward", fails)
    assert prm(MESSAGES, STEPS[:2]) == pytest.approx(qwen.expected(2), abs=1e-5)


def test_numbers_that_are_none_are_told_of(qwen: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    prm = load(qwen)
    monkeypatch.setattr(reward_network.Network, "__call__", lambda *_: [math.nan, 0.0])
    with pytest.raises(EngineError, match=r"not a finite number; load it with"):
        prm(MESSAGES, STEPS)


def test_a_closed_model_is_freed_and_says_so(qwen: Made) -> None:
    prm = load(qwen)
    network = weakref.ref(prm._network)
    prm.close()
    prm.close()
    prm.clear()
    gc.collect()
    assert network() is None
    with pytest.raises(EngineError, match=f"{qwen.folder.name} is closed; load it again"):
        prm(MESSAGES, STEPS)


def test_missing_and_damaged_models_are_named(qwen: Made, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"does not exist; give"):
        ProcessRewardModel(tmp_path / "none")
    with pytest.raises(ModelNotFoundError, match=r"neither here nor on the hub.*give its folder"):
        ProcessRewardModel("nobody/no-such-prm", local_files_only=True)
    weights = qwen.folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelIntegrityError, match="damaged; fetch them again"):
        load(qwen)
