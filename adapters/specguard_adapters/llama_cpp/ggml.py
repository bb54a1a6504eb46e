"""ggml's tensors, as far as they are read while a graph is computed: their names, shapes, data."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from specguard_chains.errors import EngineError

F32, I64 = llama_cpp.GGML_TYPE_F32, llama_cpp.GGML_TYPE_I64


class _InitParams(ctypes.Structure):
    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


def _load_library() -> ctypes.CDLL:
    """Return ggml's base library, the one that llama_cpp itself has loaded."""
    folder = Path(llama_cpp.llama_cpp._base_path)
    names = ("libggml-base.so", "libggml-base.dylib", "ggml-base.dll", "libggml-base.dll")
    for name in names:
        if (folder / name).exists():
            return ctypes.CDLL(str(folder / name))
    raise EngineError(f"none of {', '.join(names)} is in {folder}; reinstall llama-cpp-python")


_lib = _load_library()


def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(_lib, name)
    function.restype, function.argtypes = result, arguments
    return function


_pointer, _size, _long, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int
_init = _function("ggml_init", _pointer, _InitParams)
_free = _function("ggml_free", None, _pointer)
_overhead = _function("ggml_tensor_overhead", _size)
_new_2d = _function("ggml_new_tensor_2d", _pointer, _pointer, _int, _long, _long)
_new_1d = _function("ggml_new_tensor_1d", _pointer, _pointer, _int, _long)
_set_rows = _function("ggml_set_rows", _pointer, _pointer, _pointer, _pointer, _pointer)

name_of = _function("ggml_get_name", ctypes.c_char_p, _pointer)
"""Tensor -> its name."""
nbytes = _function("ggml_nbytes", _size, _pointer)
"""Tensor -> how many bytes it holds."""
read = _function("ggml_backend_tensor_get", None, _pointer, _pointer, _size, _size)
"""Copies of a tensor, to an address, from an offset, so many bytes."""


class Layout:
    """Reads of `struct ggml_tensor` what has no function to ask for it.

    Where it stands is learned from tensors made for the purpose, so that nothing is read where it
    may not be.
    """

    def __init__(self) -> None:
        """Learn it.

        Raises:
            EngineError: It cannot be found.
        """
        memory = ctypes.create_string_buffer(1 << 16)
        context = _init(_InitParams(len(memory), ctypes.addressof(memory), True))
        try:
            table = _new_2d(context, F32, 1009, 883)
            index = _new_1d(context, I64, 7)
            write = _set_rows(context, table, _new_2d(context, F32, 1009, 7), index)
            size = _overhead()
            self._shape = _find(table, size, np.array([1009, 883, 1, 1], dtype=np.int64))
            self._type = _find(index, size, np.array([I64], dtype=np.int32))
            self._second_source = _find(write, size, np.array([index], dtype=np.uint64))
        finally:
            _free(context)

    def shape(self, tensor: int) -> tuple[int, int, int, int]:
        """Return how long a tensor is in each dimension, the innermost one first."""
        first, second, third, fourth = (_long * 4).from_address(tensor + self._shape)
        return first, second, third, fourth

    def type(self, tensor: int) -> int:
        """Return the number format, such as `F32`."""
        return ctypes.c_int32.from_address(tensor + self._type).value

    def second_source(self, tensor: int) -> int:
        """Return the second of the tensors that this one is computed from, 0 if there is none."""
        return ctypes.c_void_p.from_address(tensor + self._second_source).value or 0


def _find(tensor: int, size: int, value: npt.NDArray[Any]) -> int:
    """Return the offset of a value in a struct."""
    struct = ctypes.string_at(tensor, size)
    for offset in range(0, size - value.nbytes + 1, value.itemsize):
        if struct[offset : offset + value.nbytes] == value.tobytes():
            return offset
    raise EngineError("ggml's tensors are not laid out as expected")
