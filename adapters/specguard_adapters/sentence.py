"""Sentence embeddings for comparing candidates, as in the paper (section 3.1).

>>> from specguard_chains.adapters import SentenceEncoder
>>> encoder = SentenceEncoder("sentence-transformers/all-MiniLM-L6-v2")  # doctest: +SKIP
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.errors import EngineError, ModelNotFoundError

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
HUB_TIMEOUT_S = 5.0


class SentenceEncoder:
    """An `Encoder` over a sentence-transformers model."""

    asks_others = False
    """See `Selector.asks_others`: it computes in this process."""

    def __init__(
        self, model: str | os.PathLike[str] = DEFAULT_MODEL, device: str | None = None
    ) -> None:
        """Load a model.

        Args:
            model: A folder that holds the model, or its name on the hub; fetched once.
            device: Such as "cpu" or "cuda"; None lets the library choose.

        Raises:
            ImportError: sentence-transformers is not installed.
            ModelNotFoundError: The model is neither here nor obtainable, or not one of its kind.
        """
        self._name = os.fspath(model)
        self._model = _load(model, device)
        self._lock = threading.Lock()  # its tokenizer refuses a second thread

    def __call__(self, texts: Sequence[str]) -> FloatArray:
        """See `Encoder`. The model reads the beginning of a text that is too long for it.

        Raises:
            EngineError: It is closed.
        """
        with self._lock:
            if self._model is None:
                raise EngineError(f"the sentence encoder {self._name} is closed; load it again")
            vectors = self._model.encode(list(texts), show_progress_bar=False)
        return np.asarray(vectors, dtype=np.float32)

    def close(self) -> None:
        """Free the model. Calls of a closed one raise EngineError."""
        with self._lock:
            self._model = None


def _load(model: str | os.PathLike[str], device: str | None) -> Any:
    try:
        import sentence_transformers
    except ModuleNotFoundError as error:
        if error.name not in ("sentence_transformers", "torch"):
            raise
        raise ImportError(
            f"SentenceEncoder needs {error.name}, which is not installed: "
            "pip install 'specguard_chains[sentence]'"
        ) from error

    def load(name: str, *, local: bool) -> Any:
        return sentence_transformers.SentenceTransformer(
            name, device=device, local_files_only=local
        )

    path = Path(model).expanduser()
    if path.is_dir() or isinstance(model, os.PathLike) or not _looks_like_hub_name(model):
        return _load_folder(path, load)
    try:
        return load(model, local=True)
    except OSError:  # not among what was fetched before
        return _load_from_hub(model, load)


def _load_folder(path: Path, load: Any) -> Any:
    if not path.is_dir():
        raise ModelNotFoundError(
            f"the folder {path} does not exist; give one that SentenceTransformer.save has "
            f"written, or a name on the hub such as {DEFAULT_MODEL}"
        )
    try:
        return load(str(path), local=True)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"{path} holds no model for sentence-transformers ({_reason(error)}); give a folder "
            "that SentenceTransformer.save has written"
        ) from error


def _load_from_hub(name: str, load: Any) -> Any:
    try:
        # Without a network the library retries for 70 s [run, 6.2.0]: ask once first.
        import huggingface_hub as hub

        url = hub.hf_hub_url(name, "modules.json")
        hub.utils.get_session().head(url, timeout=HUB_TIMEOUT_S)
        return load(name, local=False)
    except Exception as error:  # the client's errors have no common base
        raise ModelNotFoundError(
            f"the hub did not give {name} ({_reason(error)}); check the name and the network and "
            "try again, or fetch the model by other means and give its folder"
        ) from error


def _looks_like_hub_name(name: str) -> bool:
    return not name.startswith(("~", ".", "/")) and name.count("/") <= 1


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
