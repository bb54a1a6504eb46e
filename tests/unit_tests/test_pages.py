"""The code in README and docs runs, links lead somewhere, and the table of options is complete."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specguard_chains import adapters, assembly, call
from specguard_chains.decoding.decoder import Decoder
from specguard_chains.options import PAPERS_THRESHOLD, THRESHOLD, SpecGuardOptions
from tests.toy_engine import ToyEngine, scripted_policy

ROOT = Path(__file__).parents[2]
PAGES = {
    path: path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
FURTHER = (ROOT / "examples" / "README.md", ROOT / "tests" / "conformance" / "README.md")
OPTIONS = PAGES[ROOT / "docs" / "options.md"]


def python_blocks() -> list[tuple[Path, str]]:
    return [
        (path, block)
        for path, text in PAGES.items()
        for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    ]


def anchors(text: str) -> set[str]:
    """Return what links can lead to within a page, as GitHub names it."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *FURTHER], ids=lambda path: path.relative_to(ROOT))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), link
        assert not anchor or anchor in anchors(linked.read_text(encoding="utf-8")), link


def test_the_code_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pens = scripted_policy("12 pens are 4 times 3 pens.\n\n", "So they cost $16.")
    order = scripted_policy("3 times 84 and 216.\n\n", '```json\n{"euros": 421.2}\n```')
    draft, target = ToyEngine(pens), ToyEngine(pens)

    def assemble_toys(options: SpecGuardOptions) -> Decoder:
        engines = {"draft": draft, "target": target, "threshold": 0.0}
        return assembly.assemble(options.model_copy(update=engines))

    def toy_engine(model: str, *, max_candidates: int = 1, **_: Any) -> ToyEngine:
        engine = ToyEngine(scripted_policy("Yes."))
        engine.capabilities = replace(engine.capabilities, max_candidates=max_candidates)
        return engine

    monkeypatch.setattr(call, "assemble", assemble_toys)
    monkeypatch.setitem(vars(adapters), "HuggingFaceEngine", toy_engine)
    monkeypatch.setitem(vars(adapters), "OpenAIEngine", toy_engine)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "{{ messages }}")
    blocks = python_blocks()
    assert {path.name for path, _ in blocks} >= {"README.md", "engines.md"}
    names: dict[str, Any] = {}
    for path, block in blocks:
        draft.policy = target.policy = order if "with_structured_output" in block else pens
        exec(compile(block, str(path), "exec"), names)
    printed = capsys.readouterr().out
    assert "draft accepted" in printed
    assert printed.count("So they cost $16.") >= 2
    assert "SO THEY COST $16." in printed
    assert "euros=421.2" in printed
    assert names["message"].response_metadata["specguard"]["acceptance_rate"] == 1


def test_every_option_is_in_the_table_with_its_default() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.+?) \| ", OPTIONS, flags=re.MULTILINE)
    documented = {name for names, _ in rows for name in re.findall(r"\w+", names)}
    fields = SpecGuardOptions.model_fields
    assert set(fields) - documented == set()
    for names, default in rows:
        named = re.findall(r"\w+", names)
        if set(named) <= set(fields) and len(named) == 1:
            value = fields[named[0]].default
            if isinstance(value, int | float) and not isinstance(value, bool):
                assert default == str(value)
    assert f"| `threshold` | {THRESHOLD}, {PAPERS_THRESHOLD} | " in OPTIONS
