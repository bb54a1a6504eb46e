"""Reading all signals of recorded steps, from the draft and from the target.

Every signal is a number of a drafted step, the higher the better. Each form of grounding costs one
pass over the answer; everything else comes with the first of them, but for the entropy, which needs
the logits of each token.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import cast

import numpy as np
from pydantic import ConfigDict

from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.boundaries import Ending
from specguard_chains.decoding.engine import (
    Candidate,
    Engine,
    LogitSession,
    Prompt,
    Reading,
    Session,
)
from specguard_chains.decoding.grounding import GroundingForm, GroundingSpec
from specguard_chains.decoding.rewards import ValueHead
from specguard_chains.decoding.sampling import Sampling, distribution
from specguard_chains.decoding.selection import HashedNgrams
from specguard_chains.decoding.token_tree import TokenTree
from specguard_chains.evaluation.recordings import RecordedStep, Recording
from specguard_chains.evaluation.records import ProblemKey, ProblemRecord
from specguard_chains.evaluation.signal_table import LabelledStep
from specguard_chains.evaluation.solutions import steps_of, text_candidate

Signals = dict[str, float]
RAW = Sampling(temperature=1.0, top_p=1.0)
_NUMBER = re.compile(r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


class ReadSignals(ProblemRecord):
    """The signals of one problem's drafted steps."""

    model_config = ConfigDict(allow_inf_nan=False)

    steps: tuple[Signals, ...]
    """Of the recorded steps in their order; fewer if the answer outgrows a context."""
    own_steps: tuple[Signals, ...] = ()
    """Of the steps of the draft's own greedy answer."""


@dataclass(frozen=True, slots=True)
class Place:
    """A drafted step, and the step that its answer went on with."""

    drafted: Candidate
    kept: Candidate


@dataclass(frozen=True, slots=True)
class SignalReader:
    """Reads one model's signals of the drafted steps of an answer."""

    engine: Engine
    name: str
    """Begins the names of its signals, such as "draft"."""
    forms: Sequence[GroundingForm] = ()
    layers: int = 3
    entropy: bool = False
    head: ValueHead | None = None

    def read(self, prompt: Prompt, places: Sequence[Place]) -> list[Signals]:
        """Return each drafted step's signals; shorter if an answer outgrows the context.

        Raises:
            SpecGuardError: The engine cannot give what is asked for.
        """
        found: list[Signals] = [{} for _ in places]
        for number, form in enumerate(self.forms or [None]):
            spec = None if form is None else GroundingSpec.named(form, layers=self.layers)
            with self._session(prompt, spec, reads_state=number == 0) as session:
                for signals, drafted in zip(found, _walk(session, places), strict=False):
                    reading = session.read(drafted)
                    signals |= {} if number else self._of_tokens(reading)
                    signals |= {} if form is None else self._of_attention(reading, form)
        if self.entropy:
            with self._session(prompt, None, reads_state=False) as session:
                for signals, drafted in zip(found, _walk(session, places), strict=False):
                    signals |= self._of_entropy(_entropies(cast("LogitSession", session), drafted))
        return found

    def _of_tokens(self, reading: Reading) -> Signals:
        signals = {
            "confidence_min": reading.confidence,
            "confidence_mean": float(reading.logprobs.mean()),
        }
        if self.head is not None:
            signals["value"] = self.head.value(reading)
        return self._named(signals)

    def _of_attention(self, reading: Reading, form: GroundingForm) -> Signals:
        assert reading.grounding is not None
        return self._named(
            {
                f"grounding_{form}_min": float(reading.grounding.min()),
                f"grounding_{form}_mean": float(reading.grounding.mean()),
            }
        )

    def _of_entropy(self, entropies: FloatArray) -> Signals:
        return self._named(
            {"entropy_max": -float(entropies.max()), "entropy_mean": -float(entropies.mean())}
        )

    def _named(self, signals: Signals) -> Signals:
        return {f"{self.name}.{name}": value for name, value in signals.items()}

    @contextmanager
    def _session(
        self, prompt: Prompt, spec: GroundingSpec | None, *, reads_state: bool
    ) -> Iterator[Session]:
        layer = self.head.layer if self.head is not None and reads_state else None
        with self.engine.exclusive():
            opened = self.engine.open(prompt, grounding=spec, state_layer=layer)
            with closing(opened) as session:
                yield session


def read_signals(
    readers: Sequence[SignalReader], prompt: Prompt, recording: Recording
) -> ReadSignals:
    """Return the signals of a problem's drafted steps, and of the draft's own answer's steps.

    Raises:
        SpecGuardError: An engine cannot give what its reader asks for.
    """
    steps = [of_texts(step, number) for number, step in enumerate(recording.steps, start=1)]
    places = [Place(step.drafted.candidate(), step.kept.candidate()) for step in recording.steps]
    *begun, last = steps_of(recording.own.text) or [""]
    ended = recording.own.ending is Ending.END_OF_SEQUENCE
    written = [*map(text_candidate, begun), text_candidate(last, ends=ended)]
    own = [Place(step, step) for step in written]
    own_steps: list[Signals] = [{} for _ in own]
    for reader in readers:
        steps = _joined(steps, reader.read(prompt, places))
        own_steps = _joined(own_steps, replace(reader, forms=reader.forms[:1]).read(prompt, own))
    return ReadSignals(
        **recording.key._asdict(),
        steps=tuple(steps),
        own_steps=tuple(own_steps),
    )


def labelled(
    recordings: Sequence[Recording],
    signals: Sequence[ReadSignals],
    places: Mapping[ProblemKey, int],
) -> list[LabelledStep]:
    """Return the drafted steps of problems with their signals and labels.

    Args:
        recordings: Of all problems.
        signals: Of those that have steps.
        places: Of the problems in their data sets, from 0.
    """
    by_problem = {recording.key: recording for recording in recordings}
    return [
        LabelledStep(each.problem, each.data, places[each.key], step.good, read)
        for each in signals
        for step, read in zip(by_problem[each.key].steps, each.steps, strict=False)
    ]


def _joined(known: Sequence[Signals], read: Sequence[Signals]) -> list[Signals]:
    """Return each step's signals together; the shorter list decides."""
    return [one | more for one, more in zip(known, read, strict=False) if more]


def of_texts(step: RecordedStep, number: int) -> Signals:
    """Return what a step's text alone says, and what the draft would have written else.

    `agreement_*` compares it with the other candidates: whether they have the same numbers, the
    same last number, similar words; `agreement_entropy` is the entropy of their last numbers, as
    semantic entropy (Kuhn et al., arXiv 2302.09664) has it of meanings.
    """
    text, others = step.drafted.text, step.others
    signals = {"length": -float(len(step.drafted.tokens)), "position": -float(number)}
    if not others:
        return signals
    vectors = HashedNgrams()([text, *others]).astype(np.float64)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    numbers = [_numbers(each) for each in (text, *others)]
    last = [each[-1:] for each in numbers]
    shares = np.array(list(Counter(map(tuple, last)).values())) / len(last)
    return signals | {
        "agreement_numbers": float(np.mean([set(numbers[0]) == set(n) for n in numbers[1:]])),
        "agreement_last": float(np.mean([last[0] == n for n in last[1:]])),
        "agreement_words": float((vectors[1:] @ vectors[0]).mean()),
        "agreement_entropy": float((shares * np.log(shares)).sum()),
    }


def _numbers(text: str) -> list[str]:
    """Return the numbers of a text in their order, without commas between thousands."""
    return [number.replace(",", "") for number in _NUMBER.findall(text)]


def _walk(session: Session, places: Sequence[Place]) -> Iterator[Candidate]:
    """Yield each drafted step while the session stands before it."""
    for place in places:
        if not (session.fits(place.drafted) and session.fits(place.kept)):
            return
        yield place.drafted
        session.accept(place.kept)


def _entropies(session: LogitSession, candidate: Candidate) -> FloatArray:
    """Return the entropy of the distribution that each token was drawn from, in nats."""
    tokens = session.tokens_of(candidate)
    tree = TokenTree([1] * len(tokens))
    node, entropies = 0, []
    remaining = iter(tokens)
    while block := list(islice(remaining, 32)):
        for token in block:
            node = tree.add(token, node)
        for row in session.logits(tree):
            p = distribution(row, RAW)
            entropies.append(-float(np.sum(p * np.log(np.where(p > 0, p, 1.0)))))
    return np.array(entropies[: len(tokens)], dtype=np.float32)
