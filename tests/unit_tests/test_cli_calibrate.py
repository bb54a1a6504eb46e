"""`specguard calibrate` with toy models, on problems that are not evaluated on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from specguard_chains.cli import answering, app
from specguard_chains.decoding.calibration import FALLBACK, Calibration
from specguard_chains.decoding.decoder import Decoder
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.verification import EnsembleVerifier
from tests.toy_engine import ToyEngine, random_policy


def noisy_pair(*_: Any, **__: Any) -> Decoder:
    """Signals must differ from step to step for bounds to exist."""
    draft, target = (
        ToyEngine(random_policy(seed, end=-2.0), name=f"toy {seed}") for seed in (1, 2)
    )
    return SpecGuardDecoder(draft, target, EnsembleVerifier(FALLBACK))


def specguard(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["calibrate", *map(str, arguments)])


def test_calibrate_leaves_out_what_will_be_evaluated_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "assemble", noisy_pair)
    alike = "How many pens are there in 3 boxes of 12 pens?"
    data, test, out = (tmp_path / name for name in ("train.jsonl", "test.jsonl", "bounds.json"))
    others = ("How old is the captain?", "What does a lamp cost in this shop?")
    data.write_text("".join(json.dumps({"question": q}) + "\n" for q in (alike, *others)))
    row = {"question": alike.replace("12", "10"), "answer": "30"}
    test.write_text(json.dumps(row) + "\n")
    flags = ["--data", data, "--avoid", test, "--max-tokens", "80", "--out", out]
    result = specguard(*flags)
    assert result.exit_code == 0, result.stderr
    assert "1 problems resemble problems to avoid and are left out: train/1" in result.stderr
    assert Calibration.load(out).problems == 2
    result = specguard(*flags, "--limit", "1")
    assert result.exit_code == 1
    assert "resemble problems to avoid; give others" in " ".join(result.stderr.split())
