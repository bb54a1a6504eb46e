"""Which passes an answer is expected to take if its steps are drafted and judged.

An answer of A tokens in N steps follows a prompt of P. In the mean a share a of the steps is
accepted, and a share u of the answers as a whole. A step has s tokens; accepted ones may be shorter
than those of the target (`length`). Of the steps of the target a share d is drafted; these are
rejected, and those that are not follow them (`patience`), so that the target writes in runs of
1 / d steps. f is the drafted part of its steps, g the salvaged one, in the mean over all of them
(`settings`). Passes of the draft and of the target, and how often:

    draft     read(P); decode(k), s times an accepted step and f s times one of the target;
              read((1 - g) s / d) after each run of the target but one that ends the answer
    target    nothing in u of the answers. In each other one read(P) and (1 - a) N / (1 - u) steps
              in m = d (1 - a) N / (1 - u) runs: each step (1 - g) s times decode(k), and blocks of
              verify(8) for the rest. It reads accepted steps only when it next writes, all in one
              pass. Any order of accepted steps, n in number, and runs being as likely as another,
              the n / (m + 1) steps after the last run are never read, and the others in
              m n / (m + n) passes.
    judging   by the target's own signals: it reads what is drafted, in blocks of at most 32, or of
              12 if it looks at steps in progress, and does not read accepted steps again. If it
              draws one candidate, what it has read of a rejected step is all that is salvaged, so
              that this takes no blocks. No answer goes without the target. The same holds where the
              draft judges, and grounding is read from the target, but for what the draft gives up.

A draft that begins with one candidate draws the others in part of the steps, and the target, as the
judge, then reads another one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specguard_chains.decoding.local import READ_BLOCK
from specguard_chains.planning.costs import Kind
from specguard_chains.planning.settings import Acceptance, Setting, Workload
from specguard_chains.planning.work import BLOCK, LOOK, Passes, Work, decode, read, verify


def judging_work(setting: Setting, acceptance: Acceptance, workload: Workload) -> Work:
    """Return the passes that an answer is expected to take if steps of it are judged."""
    counts = _Counts.of(acceptance, workload)
    target_judges = setting.verify_with == "target"
    if target_judges or setting.attention_of == "target":
        reading = (read(counts.prompt), *_read_to_judge(setting, counts))
    else:
        reading = _catching_up(counts)
    held = target_judges and setting.rewrites == 1  # read so as to judge
    return Work(
        draft=tuple(_drafting(setting, counts)),
        target=(*reading, *_writing(counts, setting.rewrites, held=held)),
        draft_calls=counts.drafted_steps,
        target_calls=counts.rejected + (counts.drafted_steps if target_judges else 0.0),
        draft_attention=setting.attention_of == "draft",
        target_attention=setting.attention_of == "target",
    )


@dataclass(frozen=True, slots=True)
class _Counts:
    """Expected steps and tokens of an answer."""

    acceptance: Acceptance
    prompt: float
    steps: float
    answer: float

    @classmethod
    def of(cls, acceptance: Acceptance, workload: Workload) -> _Counts:
        return cls(
            acceptance, workload.prompt_tokens, workload.steps, answer=workload.answer_tokens
        )

    @property
    def accepted(self) -> float:
        return self.acceptance.rate * self.steps

    @property
    def rejected(self) -> float:
        """Steps of the target, drafted or not."""
        return self.steps - self.accepted

    @property
    def target_step(self) -> float:
        """Tokens of a step of the target."""
        return self.answer / (self.accepted * self.acceptance.length + self.rejected)

    @property
    def accepted_step(self) -> float:
        return self.target_step * self.acceptance.length

    @property
    def runs(self) -> float:
        """Of steps of the target, one after the other: a rejected one, and those not drafted."""
        return self.rejected * (1 - self.acceptance.undrafted)

    @property
    def drafted_steps(self) -> float:
        return self.accepted + self.runs

    @property
    def untouched(self) -> float:
        """Share of answers that the target does not touch."""
        known = self.acceptance.untouched
        return self.acceptance.of_drafted**self.steps if known is None else known


def _drafting(setting: Setting, counts: _Counts) -> Iterator[Passes]:
    """Yield the draft's passes."""
    acceptance, k = counts.acceptance, setting.candidates
    drawn = setting.drafted_candidates or k
    rejected = acceptance.drafted_of_rejected * counts.rejected
    tokens = counts.accepted_step * counts.accepted + counts.target_step * rejected
    yield read(counts.prompt)
    if setting.one_first and k > 1:
        yield decode(tokens)
        yield decode(tokens * (drawn - 1) / (k - 1), k - 1)
    else:
        yield decode(tokens, drawn)
    foreign = counts.target_step * (1 - acceptance.salvaged) / (1 - acceptance.undrafted)
    yield read(foreign, counts.runs * (1 - 1 / max(counts.drafted_steps, 1.0)))


def _read_to_judge(setting: Setting, counts: _Counts) -> Iterator[Passes]:
    """Yield the passes in which the target reads what is drafted."""
    acceptance, block = counts.acceptance, LOOK if setting.looks else READ_BLOCK
    part = acceptance.drafted_of_rejected / (1 - acceptance.undrafted)
    yield from verify(counts.accepted_step, counts.accepted, block=block)
    if setting.verify_with == "target":  # the draft, as the judge, gives them up unread
        yield from verify(counts.target_step * part, counts.runs, block=block)
    if setting.one_first:
        others = ((setting.drafted_candidates or 1.0) - 1) / setting.candidates
        yield from verify(counts.answer / counts.steps, counts.drafted_steps * others)


def _catching_up(counts: _Counts) -> tuple[Passes, ...]:
    """Return how the target reads the prompt, and how accepted steps before it writes."""
    touched = 1 - counts.untouched
    if not (touched and counts.rejected):
        return read(counts.prompt, 0.0), read(counts.answer, 0.0)
    # In runs whose untouched answers are shorter than others, the mean can leave what is possible.
    each = min(max(counts.rejected / touched, 1.0), counts.steps)
    accepted = counts.steps - each
    runs = max(each * counts.runs / counts.rejected, 1.0)
    times = runs * accepted / (runs + accepted)
    steps = accepted * runs / (runs + 1) / times if times else 0.0
    return read(counts.prompt, touched), read(steps * counts.accepted_step, touched * times)


def _writing(counts: _Counts, k: int, *, held: bool) -> tuple[Passes, ...]:
    """Return the passes in which the target writes k candidates of its steps.

    `held` says that it holds what it salvages.
    """
    written = counts.rejected * counts.target_step
    salvaged = counts.acceptance.salvaged * written
    left = max(counts.acceptance.drafted_of_rejected * written - salvaged, 0.0)
    in_vain = min(counts.runs * BLOCK / 2, left)  # half of the last one
    blocks = (salvaged + in_vain) / BLOCK if salvaged and not held else 0.0
    return decode(written - salvaged, k), Passes(Kind.VERIFY, BLOCK, blocks)
