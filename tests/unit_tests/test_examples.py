"""The examples run, and say what they are to say; no weights are needed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from functools import partial
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import httpx
import pytest

from specguard_chains import ChatSpecGuard, Step
from tests.toy_engine import ToyEngine, scripted_policy
from tests.unit_tests import toy_chat

EXAMPLES = Path(__file__).parents[2] / "examples"
Scripted = Callable[..., ModuleType]


def load(name: str) -> ModuleType:
    """Return an example as a module of its own."""
    spec = util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec
    assert spec.loader
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """Returns an example in which every ChatSpecGuard writes these steps, with the options given.

    A list of lists gives each answer its own steps: one toy engine knows one script.
    """

    def example(name: str, *answers: list[str]) -> ModuleType:
        module = load(name)
        scripts = iter(answers)

        class Toy(ChatSpecGuard):
            def _call(self, *args: Any, **kwargs: Any) -> Any:
                engine = toy_chat.engine_of(toy_chat.scripted(*next(scripts)))
                toy = self.model_copy(update={"decoder": "target", "target": engine})
                return ChatSpecGuard._call(toy, *args, **kwargs)

        monkeypatch.setattr(module, "ChatSpecGuard", Toy)
        return module

    return example


def test_every_example_is_tested_and_short() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.stem}"' in here, path.name
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) < 60, path.name
        assert lines[0].startswith('"""')


def test_the_quickstart_shows_steps_and_the_answer(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = scripted("quickstart", ["12 is 4 times 3.\n\n", "They cost $16."])
    monkeypatch.setattr(example, "resolve_pair", lambda pair, progress: None)
    example.main()
    said = capsys.readouterr().out
    assert "[1] target" in said
    assert "2 steps: 2 by target" in said
    assert said.count("They cost $16.") == 2


def test_each_step_shows_its_passages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("rag_grounding")
    draft, target = (ToyEngine(scripted_policy("It costs $12.\n\n", "3 days.")) for _ in range(2))
    toy = partial(ChatSpecGuard, draft=draft, target=target)
    monkeypatch.setattr(example, "ChatSpecGuard", toy)
    example.main()
    said = capsys.readouterr().out.splitlines()
    assert [said[0], said[4]] == ["It costs $12.", "3 days."]
    for passages in (said[1:4], said[5:8]):
        shares = [float(line.strip().partition("%")[0]) for line in passages]
        assert 0 < sum(shares) <= 100
        assert max(shares) > min(shares)


def test_the_chain_shows_a_line_for_each_step_and_stops_after_the_box(
    scripted: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ["3 * 12 is 36.\n\n", "So 36 * 2 is \\boxed{72}.\n\n", "Of no use: 99."]
    scripted("chain", steps).main()
    assert capsys.readouterr().out.splitlines() == [
        "step 1 by the target, score 0.00: numbers 3, 12, 36",
        "step 2 by the target, score 0.00: numbers 36, 2, 72",
    ]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_the_agent_tells_who_wrote_its_calls(
    scripted: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(
        "agent",
        [call("look_up_price", item="lamp")],
        ["It costs 37 euros."],
        [call("multiply", a=27, b=43)],
        ["It is 1161."],
    ).main()
    said = capsys.readouterr().out
    assert said.count("tool_call by the target, unverified, no score") == 2
    assert "the target calls look_up_price({'item': 'lamp'})" in said
    assert "look_up_price says 37" in said
    assert "answer: It costs 37 euros." in said
    assert "the target calls multiply({'a': 27, 'b': 43})" in said
    assert "multiply says 1161" in said
    assert said.rstrip().endswith("answer: It is 1161.")


def test_the_extraction_prints_objects(
    scripted: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = '{"owner": "Rosa Keller", "city": "Bern", "founded": 1987, "employees": 14}'
    steps = [
        "3 children pay 18 euros.\n\n",
        "2 adults pay 24 euros.\n\n",
        '```json\n{"euros": 42}\n```',
    ]
    scripted("structured_extraction", [facts], steps).main()
    said = capsys.readouterr().out
    assert "Business(owner='Rosa Keller', city='Bern', founded=1987, employees=14)" in said
    assert "Price(euros=42.0)" in said
    assert "reasoning by the target: 3 children pay 18 euros." in said
    assert re.search(r'answer by the target: ```json\n{"euros": 42}', said)


def test_the_graph_streams_text_and_steps(
    scripted: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted("langgraph_app", ["It relaxes.\n\n", "It rises."]).main()
    said = capsys.readouterr().out
    assert [int(number) for number in re.findall(r"^\[(\d)\] by the target", said, re.M)] == [1, 2]
    assert said.count("It relaxes.") == said.count("It rises.") == 1
    assert "the node 'answer'" in said


# Step review


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("3 * 12 = 36 and 36 / 2 = 18", 0),
        ("It makes 2 + 3 * 4 = 14.", 0),
        ("2 + 3 * 4 = 20", 1),
        (r"\( 46 \times 37 = 1702 \)", 0),
        ("1,204 - 4 = 1,200", 0),
        ("10 / 3 = 3.33", 0),
        ("10 / 3 = 3.43", 1),
        ("347 × 286 = 99,142, then 193 × 78 = 15,054.", 1),
        ("(2 + 3) * 4 = 20", 0),
        ("5 / 0 = 0", 0),
        ("08 + 1 = 9", 0),
        ("x = 3", 0),
        ("on 12-11-2020 = a day", 0),
        ("9" * 5000 + " * 2 = 7", 0),
        ("2 + 3 = 1 + 4", 0),
        ("3 * 4 = 6 * 2 = 13", 1),
        ("12x + 3 * 4 = 20", 0),
        ("20 / 80 = 25 %", 0),
        ("- $46 * $37 = $1,702.50", 1),
        ("- 7 - 8 + 1 = 0", 0),
        ("7 - 8 + 2 = 1.", 0),
        ("193 boxes * 78 screws/box = 15174 screws", 1),
        ("193 boxes * 78 screws/box = 15054 screws", 0),
    ],
)
def test_the_calculator_finds_wrong_equations(text: str, wrong: int) -> None:
    assert len(list(load("step_review").mistakes(text))) == wrong


def test_a_wrong_step_is_written_anew(
    scripted: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    example = scripted("step_review", ["12 * 12 = 145.\n\n", "1 + 1 = 2."])
    example.main()
    said = capsys.readouterr().out
    assert said.count("✗ step 1 by the target: 12*12=145 should be 144") == 3
    assert "[1] ✗ ✗ ✗ by the target: 12 * 12 = 145." in said
    assert "[2] ✓ by the target: 1 + 1 = 2." in said


# The web service


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Callable[[ChatSpecGuard], ModuleType]:
    """Returns the service with this model in it."""

    def example(llm: ChatSpecGuard) -> ModuleType:
        serve = load("serve")
        monkeypatch.setattr(serve, "llm", llm)
        return serve

    return example


async def request(app: Any, method: str, path: str, **sent: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        return await client.request(method, path, **sent)


def events(text: str) -> list[tuple[str, Any]]:
    """Return name and data of each event of a stream."""
    blocks = text.strip().split("\n\n")
    fields = [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]
    return [(event["event"], json.loads(event["data"])) for event in fields]


async def test_the_service_sends_each_step_and_then_the_cost(service: Any) -> None:
    serve = service(toy_chat.pair(seed=1))
    response = await request(serve.app, "POST", "/ask", json={"question": "why?"})
    assert response.headers["content-type"].startswith("text/event-stream")
    *steps, (last, cost) = events(response.text)
    assert [name for name, _ in steps] == ["step"] * 3
    assert [step["source"] for _, step in steps] == ["draft", "target", "draft"]
    assert [Step.from_dict(step).text for _, step in steps] == [
        "One a.\n\n",
        "Dos b.\n\n",
        "Three c.",
    ]
    assert last == "done"
    assert cost["finish_reason"] == "stop"
    assert cost["usage"]["output_tokens"] == sum(step["answer_tokens"] for _, step in steps)
    assert cost["specguard"]["acceptance_rate"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("options", "step_delay_s", "message"),
    [({"timeout": 0.05}, 0.01, "timeout=0.05"), ({"max_tokens": 10**6}, 0.0, "max_tokens=1000000")],
)
async def test_the_service_tells_errors_as_events(
    options: dict[str, Any], step_delay_s: float, message: str, service: Any
) -> None:
    serve = service(toy_chat.endless(delay_s=step_delay_s, **options))
    response = await request(serve.app, "POST", "/ask", json={"question": "why?"})
    assert response.status_code == 200
    name, error = events(response.text)[-1]
    assert name == "error"
    assert message in error["message"]


async def test_the_service_says_when_its_queue_is_full(service: Any) -> None:
    llm = toy_chat.endless(delay_s=0.002, max_queue=0, max_tokens=60)
    serve = service(llm)
    asked = [request(serve.app, "POST", "/ask", json={"question": "why?"}) for _ in range(3)]
    last = [events(response.text)[-1] for response in await asyncio.gather(*asked)]
    assert sorted(name for name, _ in last) == ["done", "error", "error"]
    assert all("max_queue=0" in data["message"] for name, data in last if name == "error")


@pytest.mark.parametrize("body", [{}, {"question": ""}, {"question": "a" * 4001}, {"question": 1}])
async def test_the_service_refuses_what_is_no_question(body: Any, service: Any) -> None:
    serve = service(toy_chat.scripted())
    assert (await request(serve.app, "POST", "/ask", json=body)).status_code == 422


async def test_the_service_gives_the_page(service: Any) -> None:
    response = await request(service(toy_chat.scripted()).app, "GET", "/")
    assert response.headers["content-type"].startswith("text/html")
    assert "http://" not in response.text
    assert "https://" not in response.text, "it loads nothing from elsewhere"
    assert "innerHTML" not in response.text, "a model's text is no HTML"


@pytest.mark.parametrize("slow_client", [False, True])
async def test_a_client_that_goes_away_stops_the_model(slow_client: bool, service: Any) -> None:
    llm = toy_chat.endless(delay_s=0.001)
    app, engine = service(llm).app, toy_chat.engine_of(llm)
    gone, bodies = asyncio.Event(), [b'{"question": "why?"}']

    async def receive() -> dict[str, Any]:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            gone.set()
            if slow_client:  # the service waits for it, in the middle of its events
                await asyncio.sleep(0.2)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/ask",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    try:
        await asyncio.wait_for(app(scope, receive, send), 10)
    except* anyio.BrokenResourceError:  # FastAPI 0.165 writes on, to nobody
        assert slow_client
    passes = engine.forward_passes
    assert passes > 0
    await asyncio.sleep(0.1)
    assert engine.forward_passes <= passes + 1
