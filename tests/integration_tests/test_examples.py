"""The examples on the default pair: each says something true."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import httpx
import pytest

from specguard_chains.assembly import unload
from tests.unit_tests.test_examples import events, load, request

pytestmark = pytest.mark.integration
Run = Callable[[str], str]


@pytest.fixture(scope="module", autouse=True)
def free_memory_afterwards() -> Iterator[None]:
    yield
    unload()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Returns what an example prints."""

    def example(name: str) -> str:
        load(name).main()
        return capsys.readouterr().out

    return example


def test_quickstart(run: Run) -> None:
    said = run("quickstart")
    assert re.search(r"^\[1\] (draft|target)", said, re.M)
    assert "16" in said.partition("The answer, as the chain returns it:")[2]


def test_chain(run: Run) -> None:
    lines = run("chain").splitlines()
    assert len(lines) > 1
    for number, line in enumerate(lines, start=1):
        assert re.match(rf"step {number} by the (draft|target), score [01]\.\d\d: numbers ", line)
    assert "72" in lines[-1], "the answer ends with the step that has the result"


def test_rag_grounding(run: Run) -> None:
    said = run("rag_grounding")
    assert "12" in said.splitlines()[0]
    shares = [float(share) for share in re.findall(r"([\d.]+)% of its attention", said)]
    assert len(shares) >= 3
    assert min(shares) >= 0
    assert max(shares) > min(shares)


def test_structured_extraction(run: Run) -> None:
    said = run("structured_extraction")
    assert "Business(owner='Rosa Keller', city='Bern', founded=1987, employees=14)" in said
    assert "Price(euros=31.0)" in said
    assert re.search(r"reasoning by the (draft|target): ", said), "the sum was reasoned out"


def test_agent(run: Run) -> None:
    said = run("agent")
    assert re.search(r"the (draft|target) calls look_up_price\({'item': 'lamp'}\)", said)
    assert "look_up_price says 37" in said
    assert re.search(r"answer: .*37", said)
    assert re.search(r"the (draft|target) calls multiply\(", said)
    assert re.search(r"multiply says 1161\n.*answer: .*1,?161", said, re.S)


def test_step_review(run: Run) -> None:
    said = run("step_review")
    steps = re.findall(r"^\[\d+\] ([✓✗ ]+) by the (?:draft|target): (.*)", said, re.M)
    assert steps
    assert any("=" in text for _, text in steps), "there is something to check"
    rewritten = sum(marks.count("✗") for marks, _ in steps)
    assert len(re.findall(r"✗ step \d+ by the \w+: .* should be ", said)) >= rewritten


def test_langgraph_app(run: Run) -> None:
    said = run("langgraph_app")
    assert re.search(r"^\[1\] by the (draft|target), (accepted|rejected), score [01]\.", said, re.M)
    assert "dough" in said
    assert "the node 'answer'" in said


async def test_serve() -> None:
    response: httpx.Response = await request(
        load("serve").app, "POST", "/ask", json={"question": "What is 17 * 3?"}, timeout=None
    )
    *steps, (last, cost) = events(response.text)
    assert last == "done"
    assert {name for name, _ in steps} == {"step"}
    assert "51" in "".join(step["text"] for _, step in steps)
    assert cost["specguard"]["num_steps"] == len(steps)
