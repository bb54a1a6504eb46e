"""`specguard chat`: a conversation in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from specguard_chains.cli.answering import Message, View, answer, load, view_for
from specguard_chains.cli.ask import AsJson, System, opening
from specguard_chains.cli.failures import print_error, reports_errors
from specguard_chains.cli.settings import takes_options
from specguard_chains.cli.streams import OUT, print_json
from specguard_chains.decoding.decoder import Decoder
from specguard_chains.errors import SpecGuardError
from specguard_chains.options import SpecGuardOptions

STOPPED = "[stopped by the user]"
"""Ends an incomplete answer in the history, so that the model knows."""

HELP = """\
/reset   forget the conversation so far
/help    show this
/exit    leave; so does Ctrl-D
Ctrl-C   stop the answer; what it has so far stays in the conversation"""


@reports_errors
@takes_options()
def chat(options: SpecGuardOptions, as_json: AsJson = False, system: System = None) -> None:
    """Talk with the models; they remember.

    Earlier turns need not be computed again. Ctrl-C stops an answer, Ctrl-D leaves.
    """
    with suppress(ImportError):  # not on every system; without it a line cannot be edited
        import readline  # noqa: F401
    decoder = load(options)
    conversation = Conversation(decoder, options, view_for(as_json), opening(system), as_json)
    if not as_json:
        names = " -> ".join(engine.name for engine in decoder.engines)
        OUT.print(f"{options.decoder}: {names}   (/help lists the commands)\n", style="dim")
    conversation.run(lambda: input("" if as_json else "> "))


@dataclass(slots=True)
class Conversation:
    """The turns so far, and what the user's next line does."""

    decoder: Decoder
    options: SpecGuardOptions
    view: View
    opening: list[Message] = field(default_factory=list)
    as_json: bool = False
    turns: list[Message] = field(default_factory=list)

    def run(self, read_line: Callable[[], str]) -> None:
        """Take lines until the user leaves."""
        staying = True
        while staying:
            try:
                staying = self.take(read_line().strip())
            except EOFError:
                staying = False
                self._note("")
            except KeyboardInterrupt:
                self._note("\nCtrl-D or /exit leaves")

    def take(self, line: str) -> bool:
        """Do what a line asks for; return whether the conversation goes on."""
        match line:
            case "/exit":
                return False
            case "/reset":
                self.turns.clear()
                self._note("the conversation starts anew")
            case "/help":
                self._note(HELP)
            case _ if line.startswith("/") and line[1:].isalpha():
                self._note(f"there is no command {line}; /help lists those that exist")
            case _ if line:
                self.say(line)
        return True

    def say(self, text: str) -> None:
        """Answer a turn. One that fails, or is stopped before its first step, leaves no trace."""
        question = {"role": "user", "content": text}
        messages = [*self.opening, *self.turns, question]
        try:
            outcome = answer(self.decoder, self.options, messages, self.view)
        except SpecGuardError as error:
            self._show(error)
            return
        self._note("")
        if outcome.steps:
            content = f"{outcome.text}\n\n{STOPPED}" if outcome.stopped else outcome.text
            self.turns += [question, {"role": "assistant", "content": content}]

    def _note(self, text: str) -> None:
        if not self.as_json:
            OUT.print(text)

    def _show(self, error: SpecGuardError) -> None:
        if self.as_json:
            print_json({"event": "error", "type": type(error).__name__, "message": str(error)})
        else:
            print_error(error)
