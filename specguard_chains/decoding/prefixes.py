"""Beginnings of prompts that the sessions of an engine have in common are read once.

A new session takes over what a running one has read of its prompt, or what an earlier request has
left behind. If several come at the same time, one of them reads what they have in common, and the
others wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from specguard_chains.decoding import compute_thread
from specguard_chains.decoding.cache import CachedSequence

WORTH_WAITING = 16
"""Tokens that another session must be about to read of a prompt for it to be waited for."""
POLL_S = 0.05
"""How often a session that waits asks whether it should give up."""


class Prefixes:
    """The sequences of an engine whose memory is shared: those in use, and those left behind."""

    def __init__(self, max_idle: int) -> None:
        """Start with none."""
        self.max_idle = max_idle
        """So many sequences are kept between requests at most."""
        self._changed = threading.Condition(threading.RLock())
        self._used: list[CachedSequence] = []
        self._idle: list[CachedSequence] = []  # the one that was used last comes last
        self._closed = False

    def add(self, sequence: CachedSequence) -> None:
        """Take in a session's sequence, which is empty."""
        with self._changed:
            self._used.append(sequence)

    def begin(
        self,
        sequence: CachedSequence,
        prompt: Sequence[int],
        check: Callable[[], None],
        away: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Let an empty sequence begin with as much of a prompt as others hold, and announce it.

        Waits, `away` from the passes, for sessions that are about to read more of it; `check` may
        raise meanwhile. Whoever has announced a prompt calls `finish`.
        """
        with self._changed:
            # On the compute thread the others could not go on meanwhile.
            if not compute_thread.is_current() and self._must_wait(sequence, prompt):
                with away():
                    while self._must_wait(sequence, prompt):
                        self._changed.wait(POLL_S)
                        check()
            others = [each for each in (*self._idle, *self._used) if each is not sequence]
            usable = {id(each): each.usable(prompt, sequence.grounding) for each in others}
            for other in sorted(others, key=lambda each: usable[id(each)], reverse=True):
                length = usable[id(other)]
                if length and sequence.share(other, length):
                    self._touch(other, whole=length == len(other.tokens))
                    break
            sequence.reading = prompt

    def grow(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """Tell how much of its prompt a sequence holds now."""
        with self._changed:
            sequence.tokens = list(tokens)
            self._changed.notify_all()

    def shrink(self, sequence: CachedSequence, length: int) -> None:
        """Tell that a sequence is about to drop all but its first tokens."""
        with self._changed:
            del sequence.tokens[length:]

    def finish(self, sequence: CachedSequence) -> None:
        """Tell that a sequence holds its prompt, or that it never will."""
        with self._changed:
            sequence.reading = ()
            self._changed.notify_all()

    def give_back(self, sequence: CachedSequence) -> None:
        """Keep what a session leaves behind for others, in place of what it has begun with."""
        with self._changed:
            self._used.remove(sequence)
            sequence.reading = ()
            self._changed.notify_all()
            if self._closed or not sequence.tokens or not sequence.cache.shareable:
                sequence.cache.close()
                return
            sequence.cut(len(sequence.tokens))  # branches take up room
            for other in [*self._idle]:
                held = sequence.usable(other.tokens, other.grounding)
                if held == len(other.tokens):
                    self._drop(other)
            self._idle.append(sequence)
            while len(self._idle) > self.max_idle:
                self.evict()

    def evict(self) -> bool:
        """Free the sequence that was not used for longest; False if there is none to free."""
        with self._changed:
            if self._idle:
                self._drop(self._idle[0])
                return True
            return False

    def clear(self) -> None:
        """Free all that is left behind."""
        while self.evict():
            pass

    def close(self) -> None:
        """Free it, and from now on everything at once."""
        self._closed = True
        self.clear()

    def _must_wait(self, sequence: CachedSequence, prompt: Sequence[int]) -> bool:
        """Whether another session is about to read more of a prompt than anybody holds."""
        spec = sequence.grounding
        coming = max((each.coming(prompt, spec) for each in self._used if each.reading), default=0)
        if coming < WORTH_WAITING:
            return False
        held = max(each.usable(prompt, spec) for each in (*self._idle, *self._used))
        return coming - held >= WORTH_WAITING

    def _touch(self, sequence: CachedSequence, *, whole: bool) -> None:
        """Count an idle sequence as used; one that is now held by another one is not needed."""
        if sequence in self._idle:
            if whole:
                self._drop(sequence)
            else:
                self._idle.remove(sequence)
                self._idle.append(sequence)

    def _drop(self, sequence: CachedSequence) -> None:
        self._idle.remove(sequence)
        sequence.cache.close()
