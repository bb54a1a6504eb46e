"""Tokens as llama.cpp takes them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt


class Batch:
    """A `llama_batch` over NumPy arrays: n tokens, each in one sequence or several."""

    def __init__(self, room: int) -> None:
        """Reserve room for so many tokens."""
        self._tokens = np.zeros(room, dtype=np.int32)
        self._positions = np.zeros(room, dtype=np.int32)
        self._counts = np.zeros(room, dtype=np.int32)
        self._sequences = np.zeros(0, dtype=np.int32)  # of all tokens, one after the other
        self._pointers = np.zeros(room, dtype=np.uintp)  # to each token's first
        self._outputs = np.zeros(room, dtype=np.int8)
        self._struct = llama_cpp.llama_batch(
            n_tokens=0,
            token=pointer(self._tokens, llama_cpp.llama_token),
            embd=None,
            pos=pointer(self._positions, llama_cpp.llama_pos),
            n_seq_id=pointer(self._counts, ctypes.c_int32),
            seq_id=pointer(self._pointers, ctypes.POINTER(llama_cpp.llama_seq_id)),
            logits=pointer(self._outputs, ctypes.c_int8),
        )

    def fill(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        wanted: Sequence[int],
    ) -> Any:
        """Return the struct with these tokens in it."""
        n = len(tokens)
        self._tokens[:n] = tokens
        self._positions[:n] = positions
        self._counts[:n] = counts = [len(own) for own in sequences]
        self._sequences = np.array([s for own in sequences for s in own], dtype=np.int32)
        first = np.cumsum([0, *counts[:-1]]) * self._sequences.itemsize
        self._pointers[:n] = self._sequences.ctypes.data + first
        self._outputs[:n] = wanted
        self._struct.n_tokens = n
        return self._struct


def pointer(array: npt.NDArray[Any], kind: Any) -> Any:
    """Return a C pointer to an array's data, which must outlive it."""
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
