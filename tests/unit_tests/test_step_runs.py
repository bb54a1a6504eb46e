"""Steps as runs below the model's run: on every route, once each, in the right place and time."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers import LangChainTracer
from langchain_core.tracers.base import AsyncBaseTracer, BaseTracer
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from langchain_core.tracers.schemas import Run

from specguard_chains.step_runs import NAME
from tests.unit_tests import routes
from tests.unit_tests.routes import MODELS, MODELS_IN_SHAPES, ROUTES, SHAPES, collect, prompts

pytestmark = [
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning"),
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning"),
]


class Collector(RunCollectorCallbackHandler):
    """A tracer of LangChain's that keeps the trees of runs."""


class AsyncCollector(AsyncBaseTracer):
    def __init__(self) -> None:
        super().__init__()
        self.traced_runs: list[Run] = []

    async def _persist_run(self, run: Run) -> None:
        self.traced_runs.append(run)


def flat(runs: list[Run]) -> list[Run]:
    return [found for run in runs for found in (run, *flat(run.child_runs))]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("model", "shape"), MODELS_IN_SHAPES)
def test_every_step_is_one_run_below_the_models_run(model: str, shape: str, route: str) -> None:
    if route.endswith("events_v3") and routes.without_v3(model, shape):
        return
    # An async tracer is told in another way; which one matters little where the shape changes.
    collector = AsyncCollector() if shape in ("top", "agent") else Collector()
    runnable = SHAPES[shape](MODELS[model](trace_steps=True))
    ROUTES[route](runnable, routes.value(shape), {"callbacks": [collector], "tags": ["t"]})
    runs = flat(collector.traced_runs)
    if (model, shape, route) == ("llm", "graph", "astream_events_v3"):
        # The run of the model is hidden from this tracer, see `Log.model_runs`.
        assert NAME not in [run.name for run in runs]
        return
    models = [run for run in runs if run.run_type in ("llm", "chat_model")]
    assert len(models) == prompts(route)
    for run in models:
        assert [child.inputs["number"] for child in run.child_runs] == [1, 2, 3]
        for child in run.child_runs:
            check(child, run)
    assert sum(run.name == NAME for run in runs) == 3 * prompts(route)
    assert not collector.run_map, "a run has no end"


def check(run: Run, parent: Run) -> None:
    assert (run.name, run.run_type, run.error) == (NAME, "chain", None)
    assert run.parent_run_id == parent.id
    assert run.trace_id == parent.trace_id
    assert run.dotted_order.startswith(parent.dotted_order + ".")
    assert run.dotted_order.endswith(f"Z{run.id}")
    assert "t" in (run.tags or ())
    assert run.outputs is not None
    drafted = run.inputs["number"] != 2
    assert run.inputs["source"] == ("draft" if drafted else "target")
    assert len(run.inputs["candidates"]) == 1
    assert run.outputs["verdict"] == ("accepted" if drafted else "rejected")
    assert run.outputs["text"] == routes.STEPS[run.inputs["number"] - 1]
    assert run.outputs.keys() >= {"score", "confidence", "grounding", "value"}
    assert not any(key.startswith("ls_") for key in run.metadata)


@pytest.mark.parametrize("route", ROUTES)
def test_runs_are_as_long_as_their_steps_and_do_not_overlap(route: str) -> None:
    collector = Collector()
    ROUTES[route](routes.chat(trace_steps=True), "hi", {"callbacks": [collector]})
    for run in flat(collector.traced_runs):
        begin = run.start_time
        for child in run.child_runs:
            assert child.outputs
            assert child.end_time
            assert begin <= child.start_time <= child.end_time
            # A step that waited in the queue for its consumer may show as shorter.
            took = timedelta(seconds=sum(child.outputs["seconds"].values()))
            assert child.end_time - child.start_time < took + timedelta(seconds=0.5)
            begin = child.end_time
        orders = [child.dotted_order for child in run.child_runs]
        assert orders == sorted(orders)


def test_a_run_begins_when_its_step_began() -> None:
    collector = Collector()
    model = routes.chat(trace_steps=True)
    model.target.delay_s = model.draft.delay_s = 0.01
    model.invoke("hi", {"callbacks": [collector]})
    for child in collector.traced_runs[0].child_runs:
        assert child.outputs
        assert child.end_time
        took = sum(child.outputs["seconds"].values())
        assert took > 0.02
        assert (child.end_time - child.start_time).total_seconds() > 0.5 * took


@pytest.mark.parametrize("route", ROUTES)
def test_without_the_option_there_are_no_such_runs(route: str) -> None:
    collector = Collector()
    ROUTES[route](routes.chat(), "hi", {"callbacks": [collector]})
    assert NAME not in [run.name for run in flat(collector.traced_runs)]


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_astream_events_show_steps_as_chains_below_the_model(version: Any) -> None:
    model = routes.chat(trace_steps=True)
    events = asyncio.run(collect(model.astream_events("hi", version=version)))
    starts = [event["run_id"] for event in events if event["event"] == "on_chat_model_start"]
    steps = [event for event in events if event["name"] == NAME]
    assert [event["event"] for event in steps] == ["on_chain_start", "on_chain_end"] * 3
    for event in steps:
        assert version == "v1" or event["parent_ids"] == starts
    assert [
        event["data"]["output"]["verdict"] for event in steps if event["event"].endswith("end")
    ] == ["accepted", "rejected", "accepted"]


@pytest.mark.parametrize("route", ROUTES)
def test_langsmith_gets_each_step_in_one_request(route: str) -> None:
    class Client:
        """What the tracer calls of LangSmith's client."""

        def __init__(self) -> None:
            self.created: list[dict[str, Any]] = []
            self.updated: list[dict[str, Any]] = []

        def create_run(self, **run: Any) -> None:
            self.created.append(run)

        def update_run(self, **run: Any) -> None:
            self.updated.append(run)

    client = Client()
    tracer = LangChainTracer(project_name="test", client=client)  # type: ignore[arg-type]
    ROUTES[route](routes.chat(trace_steps=True), "hi", {"callbacks": [tracer]})
    steps = [run for run in client.created if run["name"] == NAME]
    assert len(steps) == 3 * prompts(route)
    assert NAME not in [run["name"] for run in client.updated]
    model_runs = {run["id"] for run in client.created if run["run_type"] == "llm"}
    for run in steps:
        assert run["parent_run_id"] in model_runs
        assert run["inputs"]["number"] in (1, 2, 3)
        assert run["outputs"]["text"]
        assert run["end_time"] >= run["start_time"]
        assert f"{run['start_time']:%Y%m%dT%H%M%S%fZ}{run['id']}" in run["dotted_order"]


def test_a_handler_that_ignores_chains_is_left_alone() -> None:
    class Ignoring(BaseTracer):
        ignore_chain = True  # type: ignore[assignment]

        def _persist_run(self, run: Run) -> None:
            assert not run.child_runs

    class Plain(BaseCallbackHandler):
        ignore_chain = True  # type: ignore[assignment]

        def on_chain_start(self, *_: Any, **__: Any) -> None:
            raise AssertionError("it ignores chains")

    for route in ("invoke", "stream"):
        ROUTES[route](routes.chat(trace_steps=True), "hi", {"callbacks": [Ignoring(), Plain()]})


def test_what_failed_leaves_no_run_open() -> None:
    class Broken(BaseCallbackHandler):
        raise_error = True

        def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
            if data["number"] == 2:
                raise RuntimeError("broken")

    for route in ("invoke", "stream", "ainvoke", "astream"):
        collector = Collector()
        with pytest.raises(RuntimeError, match="broken"):
            ROUTES[route](routes.chat(trace_steps=True), "hi", {"callbacks": [collector, Broken()]})
        (run,) = collector.traced_runs
        assert run.error
        assert [child.error for child in run.child_runs] == [None]
        assert not collector.run_map
