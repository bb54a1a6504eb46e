"""One question answered in front of the user, as `ask` and `chat` do it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rich.status import Status

from specguard_chains.assembly import assemble
from specguard_chains.call import Call
from specguard_chains.cli.streams import ERR, OUT, print_json
from specguard_chains.console import fetch_progress, print_metrics, print_step
from specguard_chains.decoding.decoder import Decoder
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.steps import Step
from specguard_chains.metrics import Metrics
from specguard_chains.options import SpecGuardOptions

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """An answer, or as much of it as there was when the user stopped it."""

    call: Call
    steps: tuple[Step, ...]
    stopped: bool

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(step.text for step in self.steps)

    @property
    def finish_reason(self) -> str:
        """Why the answer ends: "stop", "length" or "interrupted"."""
        if self.stopped or not self.steps:
            return "interrupted"
        return self.steps[-1].finish_reason or "interrupted"

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer."""
        return sum(step.answer_tokens for step in self.steps)

    @property
    def metrics(self) -> dict[str, Any]:
        """What the answer has cost."""
        if not self.steps:
            return Metrics.of(()).to_dict()
        metrics: dict[str, Any] = self.call.metadata(self.steps)["specguard"]
        return metrics

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as plain values."""
        read, written = self.call.input_tokens, self.output_tokens
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "seed": self.call.request.seed,
            "usage": {
                "input_tokens": read,
                "output_tokens": written,
                "total_tokens": read + written,
            },
            "metrics": self.metrics,
        }


class View(Protocol):
    """Shows an answer while it is being written."""

    def begin(self) -> None:
        """The models start to write."""

    def step(self, step: Step) -> None:
        """A step is verified."""

    def pause(self) -> None:
        """The models have stopped writing, for whatever reason."""

    def finish(self, outcome: Outcome) -> None:
        """The answer is complete, or was stopped."""


class JsonView:
    """One JSON object a line."""

    def begin(self) -> None:
        """See `View.begin`."""

    def step(self, step: Step) -> None:
        """See `View.step`."""
        print_json({"event": "step", **step.to_dict()})

    def pause(self) -> None:
        """See `View.pause`."""

    def finish(self, outcome: Outcome) -> None:
        """See `View.finish`."""
        print_json({"event": "result", **outcome.to_dict()})


class TerminalView:
    """Steps as they come, then what they have cost; says meanwhile what is being waited for."""

    def __init__(self) -> None:
        """Prepare."""
        self._status: Status | None = None

    def begin(self) -> None:
        """See `View.begin`."""
        if OUT.is_terminal:
            spinner = "line" if OUT.options.ascii_only else "dots"
            self._status = OUT.status("writing step 1", spinner=spinner)
            self._status.start()

    def step(self, step: Step) -> None:
        """See `View.step`."""
        print_step(OUT, step.to_dict())
        if self._status is not None:
            self._status.update(f"writing step {step.number + 1}")

    def pause(self) -> None:
        """See `View.pause`."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def finish(self, outcome: Outcome) -> None:
        """See `View.finish`."""
        if not outcome.steps:
            OUT.print("stopped before the first step")
            return
        if outcome.stopped:
            OUT.print("stopped; these are the steps that there were")
        elif outcome.finish_reason == "length":
            OUT.print("cut off here: max_tokens or the context is used up")
        print_metrics(OUT, outcome.metrics, outcome.output_tokens)


def view_for(as_json: bool) -> View:
    """Return the view that the user has asked for."""
    return JsonView() if as_json else TerminalView()


def load(options: SpecGuardOptions) -> Decoder:
    """Return the decoder; missing models are fetched before the user's eyes."""
    with fetch_progress(ERR) as progress:
        return assemble(options, progress=progress)


def answer(
    decoder: Decoder, options: SpecGuardOptions, messages: Sequence[Message], view: View
) -> Outcome:
    """Show the answer to the last message as it is being written; Ctrl-C stops it."""
    call = Call.of(decoder, Prompt(messages=messages), options)
    steps: list[Step] = []
    stopped = False
    try:
        with _shown(view), closing(call.steps()) as verified:
            for step in verified:
                steps.append(step)
                view.step(step)
    except KeyboardInterrupt:
        stopped = True
    outcome = Outcome(call, tuple(steps), stopped)
    view.finish(outcome)
    return outcome


@contextmanager
def _shown(view: View) -> Iterator[None]:
    view.begin()
    try:
        yield
    finally:
        view.pause()
