"""The command line with toy models."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner, Result

from specguard_chains.cli import answering, app, calibrate, model_files
from specguard_chains.cli.chat import STOPPED
from specguard_chains.cli.settings import build
from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.calibration import FALLBACK, Bounds, Calibration
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.engine import Engine
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.steps import Source, Step
from specguard_chains.decoding.verification import EnsembleVerifier
from specguard_chains.errors import CalibrationError, EngineError, ModelNotFoundError
from specguard_chains.models import FILES, PAIRS, ModelFile, Progress
from specguard_chains.models.cache import partial_path
from specguard_chains.options import DecoderName, SpecGuardOptions
from tests.toy_engine import ToyEngine, random_policy, scripted_policy

CALIBRATION = Calibration(
    confidence=Bounds(low=-0.5, high=0.0), grounding=Bounds(low=0.0, high=1.0)
)
DRAFT = ToyEngine(scripted_policy("a = 1.\n\n", "b = 9.\n\n", "c = 3.", logprobs=[-0.05, -0.45]))
TARGET = ToyEngine(scripted_policy("A = 1.\n\n", "B = 2.\n\n", "C = 3."), name="large toy")


class Desk:
    """Stands in for `assemble`: hands out toy decoders and notes what they are asked."""

    def __init__(self) -> None:
        self.options: list[SpecGuardOptions] = []
        self.requests: list[Request] = []
        self.before_step: Callable[[int, int], None] = lambda turn, step: None
        """Called with the numbers of turn and step, both from 1."""

    def assemble(self, options: SpecGuardOptions, *, progress: Progress) -> Decoder:
        self.options.append(options)
        return Watched(self, _decoder(options))

    def contents(self, turn: int) -> list[tuple[str, str]]:
        """The messages of a turn, numbered from 1."""
        return [(m["role"], m["content"]) for m in self.requests[turn - 1].prompt.messages]


class Watched:
    """A decoder that tells the desk what happens."""

    def __init__(self, desk: Desk, decoder: Decoder) -> None:
        self._desk = desk
        self._decoder = decoder
        self.verifier = getattr(decoder, "verifier", None)

    @property
    def engines(self) -> tuple[Engine, ...]:
        return self._decoder.engines

    def decode(self, request: Request) -> Iterator[Step]:
        self._desk.requests.append(request)
        turn = len(self._desk.requests)
        self._desk.before_step(turn, 1)
        for step in self._decoder.decode(request):
            yield step
            self._desk.before_step(turn, step.number + 1)


def _decoder(options: SpecGuardOptions) -> Decoder:
    if options.decoder == "target":
        return SoloDecoder(TARGET, Source.TARGET)
    verifier = EnsembleVerifier(
        CALIBRATION, confidence_weight=1, threshold=options.score_threshold()
    )
    return SpecGuardDecoder(DRAFT, TARGET, verifier, num_candidates=2)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    desk = Desk()
    monkeypatch.setattr(answering, "assemble", desk.assemble)
    return desk


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SPECGUARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def specguard(*arguments: str | Path, input: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=input)


def events(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def press_ctrl_c(turn: int, step: int) -> Callable[[int, int], None]:
    """Return a hook that presses Ctrl-C and then waits, as a model that is still writing does."""

    def hook(now_turn: int, now_step: int) -> None:
        if (now_turn, now_step) == (turn, step):
            main = threading.main_thread().ident
            assert main is not None
            time.sleep(0.1)  # the steps before are shown
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.2)

    return hook


# Options


def test_every_setting_is_an_option_by_its_own_name() -> None:
    for command in ("ask", "chat"):
        text = specguard(command, "--help").stdout
        missing = [
            name
            for name in SpecGuardOptions.model_fields
            if f"--{name.replace('_', '-')}" not in text
        ]
        assert missing == ["api_key"], "a command line is no place for a secret"


def test_the_help_shows_the_defaults_and_ranges_of_the_options() -> None:
    text = " ".join(specguard("ask", "--help").stdout.split())
    assert "[from 0 to 1, default 0.1]" in text
    assert r"[default \n\n]" in text
    assert "[more than 0 and at most 1, default 0.8]" in text
    assert "None" not in text
    assert "Engine" not in text


def test_options_reach_the_decoder(desk: Desk) -> None:
    flags = "--threshold 0.2 --stop x --stop y --seed 7 --no-early-rejection --n-gpu-layers -1"
    result = specguard("ask", "q", *flags.split(), "--step-delimiter", r"\n", "--max-tokens", "50")
    assert result.exit_code == 0
    assert desk.options == [
        SpecGuardOptions(
            threshold=0.2,
            stop=["x", "y"],
            seed=7,
            early_rejection=False,
            n_gpu_layers=-1,
            step_delimiter="\n",
            max_tokens=50,
        )
    ]
    assert desk.requests[0].stop == ("x", "y")
    assert desk.requests[0].seed == 7


def test_no_options_are_the_defaults(desk: Desk) -> None:
    specguard("ask", "q")
    assert desk.options == [SpecGuardOptions()]


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--threshold", "2", "give a number from 0 to 1"),
        ("--threshold", "-1", "give a number from 0 to 1"),
        ("--threshold", "nan", "give a number from 0 to 1"),
        ("--threshold", "high", "give a number from 0 to 1"),
        ("--num-candidates", "0", "give a whole number from 1 to 64"),
        ("--num-candidates", "1.5", "give a whole number from 1 to 64"),
        ("--decoder", "best", f"give one of {', '.join(get_args(DecoderName))}"),
        ("--top-p", "0", "give a number more than 0 and at most 1"),
        ("--max-tokens", "0", "give a whole number at least 1"),
        ("--step-delimiter", "", "give text that is not empty"),
    ],
)
@pytest.mark.parametrize("command", [["ask", "q"], ["chat"]])
def test_a_wrong_value_is_one_line_that_names_option_value_and_range(
    command: list[str], flag: str, value: str, message: str, desk: Desk
) -> None:
    result = specguard(*command, flag, value)
    assert result.stderr.strip() == f"error: {flag} {value} is not possible: {message}"
    assert result.exit_code == 2
    assert not desk.options


def test_two_wrong_values_are_both_named() -> None:
    result = specguard("ask", "q", "--threshold", "2", "--seed", "-3")
    assert "--threshold 2" in result.stderr
    assert "--seed -3" in result.stderr


@pytest.mark.parametrize("flag", ["--bogus", "--thresh"])
def test_an_unknown_option_is_an_error(flag: str) -> None:
    result = specguard("ask", "q", flag, "1")
    assert result.exit_code == 2
    assert f"No such option: {flag}" in result.stderr


def test_escapes_stand_for_line_breaks_in_the_delimiter_only() -> None:
    options = build({"step_delimiter": r"\n\t", "stop": [r"\nu"]})
    assert options.step_delimiter == "\n\t"
    assert options.stop == [r"\nu"]


# ask


def test_ask_shows_steps_and_what_they_cost(desk: Desk) -> None:
    result = specguard("ask", "How much?")
    assert result.exit_code == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith("[1] draft  accepted  score 0.90 ≥ 0.80  conf -0.05")
    assert lines[1] == "a = 1."
    assert lines[3].startswith("[2] target  draft rejected  score ≤0.10 < 0.80  conf -0.45")
    assert lines[4] == "B = 2."
    assert "3 steps: 2 by draft, 1 by target  67% accepted" in result.stdout
    assert "\x1b" not in result.stdout
    assert desk.contents(1) == [("user", "How much?")]


def test_ask_with_one_model_gives_no_verdicts(desk: Desk) -> None:
    result = specguard("ask", "q", "--decoder", "target")
    assert "[1] target" in result.stdout
    assert "accepted" not in result.stdout


def test_ask_passes_a_system_message_on(desk: Desk) -> None:
    specguard("ask", "q", "--system", "Be brief.")
    assert desk.contents(1) == [("system", "Be brief."), ("user", "q")]


def test_ask_reads_the_question_from_standard_input(desk: Desk) -> None:
    specguard("ask", "-", input="two\nlines\n")
    assert desk.contents(1) == [("user", "two\nlines\n")]


@pytest.mark.parametrize("question", ["", "  \n"])
def test_an_empty_question_is_an_error(question: str, desk: Desk) -> None:
    for result in (specguard("ask", question), specguard("ask", "-", input=question)):
        assert result.exit_code == 2
        assert result.stderr.startswith("error: the question is empty")
    assert not desk.options


def test_ask_says_when_the_answer_was_cut_off(desk: Desk) -> None:
    assert "cut off here" in specguard("ask", "q", "--max-tokens", "3").stdout


def test_the_json_stream_is_steps_and_then_the_result(desk: Desk) -> None:
    result = specguard("ask", "q", "--json", "--seed", "5")
    assert result.stderr == ""
    *steps, last = events(result)
    assert [step["event"] for step in steps] == ["step"] * 3
    assert [step["number"] for step in steps] == [1, 2, 3]
    assert [step["source"] for step in steps] == ["draft", "target", "draft"]
    assert [step["verdict"] for step in steps] == ["accepted", "rejected", "accepted"]
    assert all(
        {"text", "score", "confidence", "grounding", "threshold"} <= step.keys() for step in steps
    )
    assert last["event"] == "result"
    assert last["text"] == "".join(step["text"] for step in steps) == "a = 1.\n\nB = 2.\n\nc = 3."
    assert last["finish_reason"] == "stop"
    assert last["seed"] == 5
    usage = last["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens"] == len("<user>q") + 1
    assert last["metrics"]["num_accepted_steps"] == 2
    assert last["metrics"]["calibrated"] is True


def test_the_json_stream_is_flushed_step_by_step(desk: Desk, monkeypatch: Any) -> None:
    seen: list[int] = []
    flushed: list[int] = []
    monkeypatch.setattr(
        answering, "print_json", lambda event: flushed.append(event.get("number", 0))
    )
    desk.before_step = lambda turn, step: (threading.Event().wait(0.1), seen.append(len(flushed)))[
        1
    ]
    specguard("ask", "q", "--json")
    assert seen == [0, 1, 2, 3]


def fails(error: Exception, step: int = 2) -> Callable[[int, int], None]:
    def hook(turn: int, now: int) -> None:
        if turn == 1 and now == step:
            raise error

    return hook


def test_an_error_is_one_line(desk: Desk) -> None:
    desk.before_step = fails(EngineError("llama.cpp gave up; load a smaller model"))
    result = specguard("ask", "q")
    assert result.exit_code == 1
    assert result.stderr == "error: llama.cpp gave up; load a smaller model\n"
    assert "a = 1." in result.stdout


def test_debug_adds_the_traceback(desk: Desk) -> None:
    desk.before_step = fails(EngineError("gave up"))
    result = specguard("ask", "q", "--debug")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("error: gave up\n")


def test_an_error_in_the_json_stream_is_its_last_event(desk: Desk) -> None:
    desk.before_step = fails(EngineError("gave up"))
    result = specguard("ask", "q", "--json")
    assert result.exit_code == 1
    assert events(result)[-1] == {"event": "error", "type": "EngineError", "message": "gave up"}
    assert result.stderr == ""


def test_a_fault_of_the_program_is_an_event_with_a_traceback_too(desk: Desk) -> None:
    desk.before_step = fails(ZeroDivisionError("by zero"))
    result = specguard("ask", "q", "--json")
    assert result.exit_code == 1
    assert events(result)[-1]["type"] == "ZeroDivisionError"
    assert "Traceback" in result.stderr


def test_a_wrong_option_is_an_event_too() -> None:
    result = specguard("ask", "q", "--json", "--threshold", "2")
    assert result.exit_code == 2
    (event,) = events(result)
    assert event["event"] == "error"
    assert "from 0 to 1" in event["message"]


def test_warnings_go_to_standard_error(desk: Desk) -> None:
    logger = logging.getLogger("specguard_chains.calibrations")
    desk.before_step = lambda turn, step: logger.warning("no bounds") if step == 1 else None
    result = specguard("ask", "q", "--json")
    assert result.stderr == "warning: no bounds\n"
    assert events(result)[-1]["event"] == "result"


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_stops_the_answer_and_shows_what_there_is(desk: Desk, as_json: bool) -> None:
    desk.before_step = press_ctrl_c(turn=1, step=3)
    result = specguard("ask", "q", *(["--json"] if as_json else []))
    assert result.exit_code == 130
    if as_json:
        last = events(result)[-1]
        assert last["finish_reason"] == "interrupted"
        assert last["text"] == "a = 1.\n\nB = 2.\n\n"
    else:
        assert "B = 2." in result.stdout
        assert "stopped" in result.stdout
        assert "2 steps" in result.stdout
    assert specguard("ask", "again").exit_code == 0


def test_ctrl_c_before_the_first_step(desk: Desk) -> None:
    desk.before_step = press_ctrl_c(turn=1, step=1)
    result = specguard("ask", "q", "--json")
    assert result.exit_code == 130
    assert events(result)[-1]["text"] == ""


def test_ctrl_c_while_the_models_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Decoder:
        raise KeyboardInterrupt

    monkeypatch.setattr(answering, "assemble", interrupted)
    assert specguard("ask", "q").exit_code == 130


def test_without_llama_cpp_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    for name in [name for name in sys.modules if name.startswith("specguard_adapters")]:
        monkeypatch.delitem(sys.modules, name)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    result = specguard("ask", "q", "--draft", model, "--target", model)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "pip install 'specguard_chains[llama-cpp]'" in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pair", "nope"], "Unknown model pair 'nope'"),
        (["--draft", "./missing.gguf"], "does not exist"),
        (["--decoder", "draft", "--draft", __file__], "not a GGUF file"),
    ],
)
def test_a_model_that_is_not_there_is_one_line(flags: list[str], message: str) -> None:
    result = specguard("ask", "q", *flags)
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


# chat


def chat(*lines: str, flags: Sequence[str] = ()) -> Result:
    return specguard("chat", *flags, input="".join(f"{line}\n" for line in lines))


ANSWER = "a = 1.\n\nB = 2.\n\nc = 3."


def test_chat_keeps_the_history(desk: Desk) -> None:
    result = chat("one", "two", flags=["--system", "S"])
    assert result.exit_code == 0
    assert desk.contents(2) == [
        ("system", "S"),
        ("user", "one"),
        ("assistant", ANSWER),
        ("user", "two"),
    ]


def test_a_second_turn_reads_only_what_is_new(desk: Desk) -> None:
    chat("/something else")  # the toys are shared by all tests
    first, second = (
        event["metrics"]
        for event in events(chat("a question", "another", flags=["--json"]))
        if event["event"] == "result"
    )
    assert first["draft_tokens_reused"] == len("<user>")
    assert second["draft_tokens_reused"] == len("<user>a question")
    assert "draft read" in chat("one").stdout


def test_chat_forgets_on_reset_but_for_the_system_message(desk: Desk) -> None:
    chat("one", "/reset", "two", flags=["--system", "S"])
    assert desk.contents(2) == [("system", "S"), ("user", "two")]


@pytest.mark.parametrize("ending", [["/exit", "not asked"], []])
def test_chat_ends_at_exit_and_at_the_end_of_the_input(desk: Desk, ending: list[str]) -> None:
    assert chat("one", *ending).exit_code == 0
    assert len(desk.requests) == 1


def test_chat_explains_itself(desk: Desk) -> None:
    result = chat("/help", "/nope", "", "   ")
    assert "/reset" in result.stdout
    assert "there is no command /nope" in result.stdout
    assert not desk.requests


@pytest.mark.parametrize("line", ["/usr/bin is what?", "/ means what?", "1/2"])
def test_a_question_may_begin_with_a_slash(desk: Desk, line: str) -> None:
    chat(line)
    assert desk.contents(1) == [("user", line)]


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(desk: Desk) -> None:
    desk.before_step = press_ctrl_c(turn=1, step=2)
    result = chat("one", "two")
    assert result.exit_code == 0
    assert "stopped" in result.stdout
    assert desk.contents(2) == [
        ("user", "one"),
        ("assistant", f"a = 1.\n\n\n\n{STOPPED}"),
        ("user", "two"),
    ]


def test_a_turn_stopped_before_its_first_step_leaves_no_trace(desk: Desk) -> None:
    desk.before_step = press_ctrl_c(turn=1, step=1)
    chat("one", "two")
    assert desk.contents(2) == [("user", "two")]


def test_ctrl_c_at_the_prompt_does_not_leave(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter([KeyboardInterrupt, "one", EOFError])

    def read_line(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read_line)
    result = specguard("chat")
    assert result.exit_code == 0
    assert "/exit leaves" in result.stdout
    assert len(desk.requests) == 1


def test_an_impatient_second_ctrl_c_does_not_leave(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(answering, "print_metrics", interrupted)
    assert chat("one", "two").exit_code == 0
    assert len(desk.requests) == 2


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_an_error_ends_the_turn_and_not_the_chat(desk: Desk, flags: list[str]) -> None:
    desk.before_step = fails(EngineError("gave up"))
    result = chat("one", "two", flags=flags)
    assert result.exit_code == 0
    assert desk.contents(2) == [("user", "two")]
    if flags:
        assert {"event": "error", "type": "EngineError", "message": "gave up"} in events(result)
    else:
        assert result.stderr == "error: gave up\n"


def test_a_json_chat_prints_nothing_but_events(desk: Desk) -> None:
    kinds = [e["event"] for e in events(chat("one", "/help", "two", flags=["--json"]))]
    assert kinds == ["step", "step", "step", "result"] * 2


def test_models_are_loaded_once_a_chat(desk: Desk) -> None:
    chat("one", "two", "/reset", "three")
    assert len(desk.options) == 1


# pull and models


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def fetch(file: ModelFile, *, progress: Progress) -> Path:
        names.append(file.name)
        for done in (0, file.size // 2, file.size):
            progress(done, file.size, f"fetching {file.file}")
        return Path("folder") / file.file

    monkeypatch.setattr(model_files, "fetch", fetch)
    return names


def test_pull_fetches_the_default_pair(fetched: list[str]) -> None:
    result = specguard("pull")
    assert result.exit_code == 0
    assert fetched == ["qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"]
    assert "ready, 491.4 MB, Apache-2.0" in result.stdout
    assert "folder/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf" in result.stdout
    assert "1.1/1.1 GB" in result.stderr


def test_a_pair_of_one_model_is_fetched_once(fetched: list[str]) -> None:
    specguard("pull", "smollm2-135m")
    assert fetched == ["smollm2-135m-instruct"]


def test_pull_fetches_a_single_model(fetched: list[str]) -> None:
    specguard("pull", "gemma-3-270m")
    assert fetched == ["gemma-3-270m"]


def test_pull_names_what_there_is(fetched: list[str]) -> None:
    result = specguard("pull", "smollm")
    assert result.exit_code == 2
    assert all(name in result.stderr for name in (*PAIRS, *FILES))
    assert not fetched


def test_a_failing_download_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(file: ModelFile, *, progress: Progress) -> Path:
        progress(1, 2, "fetching")
        raise ModelNotFoundError("no source has it")

    monkeypatch.setattr(model_files, "fetch", fetch)
    result = specguard("pull")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "error: no source has it"


def test_models_lists_what_is_here_and_where(own_cache: Path) -> None:
    folder = own_cache / "models"
    folder.mkdir(parents=True)
    file = FILES["smollm2-135m-instruct"]
    with partial_path(folder / file.file).open("wb") as stream:
        stream.truncate(file.size // 2)
    result = specguard("models")
    assert result.exit_code == 0
    rows = {
        line.split()[0]: " ".join(line.split())
        for line in result.stdout.splitlines()
        if line.strip()
    }
    assert rows["smollm2-135m-instruct"] == "smollm2-135m-instruct 50% here 98.4 MB Apache-2.0"
    assert rows["gemma-3-270m"] == "gemma-3-270m not here 253.1 MB Gemma Terms of Use"
    assert str(folder) in result.stdout


def test_models_as_json(own_cache: Path) -> None:
    rows = events(specguard("models", "--json"))
    assert [row["name"] for row in rows] == list(FILES)
    assert rows[0]["state"] == "absent"
    assert rows[0]["path"].startswith(str(own_cache))
    assert rows[0]["full_size"] == 491_400_064


# calibrate


@pytest.fixture
def noisy_pair(monkeypatch: pytest.MonkeyPatch) -> list[SpecGuardOptions]:
    """Signals must differ from step to step for bounds to exist."""
    options: list[SpecGuardOptions] = []

    def assemble(given: SpecGuardOptions, *, progress: Progress) -> Decoder:
        options.append(given)
        draft, target = (
            ToyEngine(random_policy(seed, end=-2.0), name=f"toy {seed}") for seed in (1, 2)
        )
        return SpecGuardDecoder(draft, target, EnsembleVerifier(FALLBACK))

    monkeypatch.setattr(answering, "assemble", assemble)
    return options


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(f'{{"question": "What is {n}"}}\n' for n in range(5)))
    return path


def test_calibrate_writes_where_it_is_looked_for(
    noisy_pair: list[SpecGuardOptions], problems: Path, own_cache: Path
) -> None:
    result = specguard("calibrate", "--data", problems, "--limit", "2", "--max-tokens", "80")
    assert result.exit_code == 0, result.stderr
    (path,) = (own_cache / "calibrations").iterdir()
    calibration = Calibration.load(path)
    assert calibration.problems == 2
    assert calibration.draft == "toy 1"
    assert "of 2 problems" in result.stdout
    assert f"{calibration.confidence.low:.3f} to {calibration.confidence.high:.3f}" in result.stdout
    assert str(path) in result.stdout
    assert "2/2 problems" in result.stderr
    assert noisy_pair[0].num_candidates == 1
    assert noisy_pair[0].confidence_weight < 1, "else there are no bounds of grounding"


def test_calibrate_takes_other_problems_and_another_place(
    noisy_pair: list[SpecGuardOptions], problems: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "bounds.json"
    flags = ["--skip", "3", "--max-tokens", "80", "--out", str(out)]
    assert specguard("calibrate", "--data", problems, *flags).exit_code == 0
    assert Calibration.load(out).problems == 2


def test_calibrate_needs_no_readable_bounds(
    noisy_pair: list[SpecGuardOptions], problems: Path
) -> None:
    specguard("calibrate", "--data", problems, "--limit", "1", "--max-tokens", "80")
    assert noisy_pair[0].calibration is not None


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        (None, [], "cannot read problems"),
        ("no json\n", [], "one JSON object a line"),
        ('{"text": "q"}\n', [], 'with a "question"'),
        ("\n", [], "no problems"),
        ('{"question": "q"}\n', ["--skip", "1"], "no problems after the first 1"),
    ],
)
def test_calibrate_says_what_is_wrong_with_the_data_before_it_loads(
    noisy_pair: list[SpecGuardOptions],
    tmp_path: Path,
    content: str | None,
    flags: list[str],
    message: str,
) -> None:
    data = tmp_path / "data.jsonl"
    if content is not None:
        data.write_text(content)
    result = specguard("calibrate", "--data", data, *flags)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert not noisy_pair


def test_calibrate_says_at_once_that_it_cannot_write(
    noisy_pair: list[SpecGuardOptions], problems: Path, tmp_path: Path
) -> None:
    result = specguard("calibrate", "--data", problems, "--out", tmp_path)
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr


def test_calibrate_keeps_an_earlier_file_when_it_fails(
    noisy_pair: list[SpecGuardOptions],
    monkeypatch: pytest.MonkeyPatch,
    problems: Path,
    tmp_path: Path,
) -> None:
    def fit(*args: Any, **kwargs: Any) -> Calibration:
        raise CalibrationError("too few steps")

    out = tmp_path / "bounds.json"
    FALLBACK.save(out)
    monkeypatch.setattr(calibrate, "fit", fit)
    result = specguard("calibrate", "--data", problems, "--out", out)
    assert result.exit_code == 1
    assert "error: too few steps" in result.stderr
    assert Calibration.load(out) == FALLBACK


# The rest


def test_version() -> None:
    result = specguard("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("specguard 0.")


def test_no_command_shows_the_help() -> None:
    result = specguard()
    assert "calibrate" in result.output
    assert "Traceback" not in result.output
