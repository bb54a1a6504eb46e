"""Real models by name, and a tiny one whose numbers are exact."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from specguard_chains.models import resolve

ModelPath = Callable[[str], Path]


@pytest.fixture(scope="session")
def model_path() -> ModelPath:
    """Returns a known model's file, fetched at first use."""
    return lambda name: resolve(name)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random transformer in float32: four layers, and a vocabulary that adds spaces."""
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="session")
def windowed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a sliding window of 16 tokens in layers 0 to 2."""
    return write_tiny(tmp_path_factory.mktemp("models") / "windowed.gguf", window=16)


@pytest.fixture(scope="session")
def recurrent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mamba: it has a state in place of a KV cache."""
    return write_recurrent(tmp_path_factory.mktemp("models") / "recurrent.gguf")


WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN = 64, 4, 4, 2, 96
PIECES = ["\u2581", *"abcdefghijklmnopqrstuvwxyz.,", "\u2581a", "\u2581the", "he", "th", "in", "er"]
VOCABULARY = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *PIECES]
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def write_tiny(
    path: Path,
    *,
    window: int = 0,
    seed: int = 20,
    extra: dict[str, Any] | None = None,
    more: dict[str, npt.NDArray[np.float32]] | None = None,
) -> Path:
    """Write a tiny model, with `extra` metadata and `more` tensors."""
    architecture = "cohere2" if window else "llama"
    settings = {
        "context_length": 512,
        "embedding_length": WIDTH,
        "block_count": LAYERS,
        "feed_forward_length": HIDDEN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
    }
    tensors = weights(1 if window else 8, seed)
    if window:  # another architecture: it has no output matrix of its own, and one norm a layer
        settings |= {"attention.sliding_window": window, "logit_scale": 5.0}
        unused = [name for name in tensors if "ffn_norm" in name or name == "output.weight"]
        for name in unused:
            del tensors[name]
    metadata: dict[str, Any] = {"general.architecture": architecture}
    metadata |= {f"{architecture}.{key}": value for key, value in settings.items()}
    metadata |= vocabulary() | (extra or {})
    path.write_bytes(gguf(metadata, tensors | (more or {})))
    return path


def write_long_rope(path: Path, extra: dict[str, Any] | None = None) -> Path:
    """The tiny model with other factors for positions in contexts of more than 512 tokens."""
    scaling = {"type": "longrope", "original_context_length": 512}
    extra = (extra or {}) | {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    factors = {"short": 1.0, "long": 4.0}
    pairs = WIDTH // HEADS // 2
    more = {
        f"rope_factors_{name}.weight": np.full(pairs, factor, dtype=np.float32)
        for name, factor in factors.items()
    }
    return write_tiny(path, extra=extra, more=more)


def transformer(folder: Path, *, window: int = 0, seed: int = 20) -> tuple[Any, Any]:
    """The same weights as `write_tiny` gives llama.cpp, for transformers: (model, tokenizer)."""
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    if window:
        model = transformers.MistralForCausalLM(
            transformers.MistralConfig(sliding_window=window, **settings)
        )
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.load_state_dict(transformers_weights(weights(8, seed)))
    path = write_tiny(folder / "tokenizer.gguf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), gguf_file=path.name)
    return model.eval(), tokenizer


@lru_cache(maxsize=1)  # they take gigabytes
def gguf_transformer(name: str) -> tuple[Any, Any]:
    """A known model's file as transformers reads it, in float32: (model, tokenizer)."""
    import gguf

    from specguard_adapters.huggingface import loading

    def mapped(*place: Any, **settings: Any) -> Any:
        """Slices of a plain array are made many times faster than those of a memory map."""
        return np.asarray(memmap(*place, **settings))

    memmap = np.memmap
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "memmap", mapped)
        patch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))  # else it is read three times
        loaded = loading.load(resolve(name), None, "cpu", {}, local_files_only=True)
    return loaded.model, loaded.tokenizer


NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""A tensor's name in GGUF files -> in transformers."""


def transformers_weights(tensors: dict[str, npt.NDArray[np.float32]]) -> dict[str, Any]:
    """Rename the tensors of a Llama; its heads' dimensions lie in pairs in GGUF files.

    llama.cpp turns neighbours by one angle, transformers each of the first half with its partner
    in the second.
    """
    import torch

    renamed = {}
    for name, tensor in tensors.items():
        *block, part, _ = name.split(".")
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(part)
        if heads:
            pairs = tensor.reshape(heads, -1, 2, tensor.shape[1])
            tensor = pairs.swapaxes(1, 2).reshape(tensor.shape)
        prefix = f"model.layers.{block[1]}." if block else ""
        renamed[f"{prefix}{NAMES[part]}.weight"] = torch.from_numpy(tensor.copy())
    return renamed


def write_recurrent(path: Path) -> Path:
    inner, rank, state, kernel = 2 * WIDTH, 4, 16, 4
    settings = {
        "context_length": 512,
        "embedding_length": WIDTH,
        "block_count": 1,
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": rank,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    shapes = {
        "token_embd.weight": (len(VOCABULARY), WIDTH),
        "output_norm.weight": (WIDTH,),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.ssm_in.weight": (2 * inner, WIDTH),
        "blk.0.ssm_conv1d.weight": (inner, kernel),
        "blk.0.ssm_conv1d.bias": (inner,),
        "blk.0.ssm_x.weight": (rank + 2 * state, inner),
        "blk.0.ssm_dt.weight": (inner, rank),
        "blk.0.ssm_dt.bias": (inner,),
        "blk.0.ssm_a": (inner, state),
        "blk.0.ssm_d": (inner,),
        "blk.0.ssm_out.weight": (WIDTH, inner),
    }
    metadata = {f"mamba.{key}": value for key, value in settings.items()}
    metadata = {"general.architecture": "mamba", **metadata, **vocabulary()}
    tensors = {name: np.ones(shape, dtype=np.float32) for name, shape in shapes.items()}
    path.write_bytes(gguf(metadata, tensors))
    return path


def vocabulary() -> dict[str, Any]:
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES)]
    scores = np.zeros(len(VOCABULARY), dtype=np.float32)
    scores[-len(PIECES) :] = -np.arange(len(PIECES), 0, -1)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": VOCABULARY,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": np.array(kinds, dtype=np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": True,
    }


def weights(token_gain: float, seed: int = 20) -> dict[str, npt.NDArray[np.float32]]:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        values = rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)
        return values.astype(np.float32)

    ones = np.ones(WIDTH, dtype=np.float32)
    keys = WIDTH * KV_HEADS // HEADS
    tokens = matrix(len(VOCABULARY), WIDTH, token_gain)
    output = matrix(len(VOCABULARY), WIDTH, gain=5)
    for rows in (tokens, output):
        rows[: -len(PIECES)] *= 0.01  # it writes what can be printed
    tensors = {
        "token_embd.weight": tokens,
        "output.weight": output,
        "output_norm.weight": ones,
    }
    for layer in range(LAYERS):
        block = {
            "attn_norm": ones,
            "attn_q": matrix(WIDTH, WIDTH, gain=1.5),
            "attn_k": matrix(keys, WIDTH, gain=1.5),
            "attn_v": matrix(keys, WIDTH),
            "attn_output": matrix(WIDTH, WIDTH),
            "ffn_norm": ones,
            "ffn_gate": matrix(HIDDEN, WIDTH),
            "ffn_up": matrix(HIDDEN, WIDTH),
            "ffn_down": matrix(WIDTH, HIDDEN),
        }
        tensors |= {f"blk.{layer}.{name}.weight": value for name, value in block.items()}
    return tensors


def gguf(metadata: dict[str, Any], tensors: dict[str, npt.NDArray[np.float32]]) -> bytes:
    """Return a GGUF file, version 3."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, tensor in tensors.items():
        shape = tensor.shape[::-1]
        head += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += struct.pack("<IQ", 0, len(data))  # float32
        data += _padded(tensor.tobytes())
    return _padded(head) + data


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 32)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case list():
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
        case np.ndarray():
            kind = {"int32": 5, "float32": 6}[str(value.dtype)]
            return struct.pack("<IIQ", 9, kind, len(value)) + value.tobytes()
    raise TypeError(f"no GGUF type for {type(value)}")
