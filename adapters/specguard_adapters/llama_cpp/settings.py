"""How a context of llama.cpp is set up."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp

from specguard_adapters.llama_cpp.weights import GPU
from specguard_chains.errors import ConfigurationError

MAX_SEQUENCES: int = llama_cpp.llama_max_parallel_sequences()
MAX_OUTPUTS = 32
"""Rows of logits that one decode may ask for; llama.cpp reserves memory for all of them."""
MAX_CANDIDATES = MAX_SEQUENCES - 1
KV_TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "f32": llama_cpp.GGML_TYPE_F32}


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """Sizes and types of a context; `cells` is the room for tokens, over all sequences."""

    cells: int
    sequences: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    kv_type: str
    flash_attention: bool

    @property
    def outputs(self) -> int:
        """How many rows of logits to have room for; fewer than sequences make llama.cpp abort."""
        return max(MAX_OUTPUTS, self.sequences)

    def identity(self) -> dict[str, Any]:
        """Return what keys and values depend on, by some of it in the last digit only."""
        names = ("n_batch", "n_ubatch", "n_threads", "kv_type", "flash_attention")
        return {name: getattr(self, name) for name in names}

    def params(self, callback: Any) -> Any:
        """Return them in llama.cpp's form; `callback` sees every node of the graph, if any does."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = self.cells
        params.n_batch = max(self.n_batch, self.sequences)  # else llama.cpp aborts
        params.n_ubatch = self.n_ubatch
        params.n_seq_max = self.sequences
        params.n_outputs_max = self.outputs
        params.n_threads = params.n_threads_batch = self.n_threads
        params.type_k = params.type_v = KV_TYPES[self.kv_type]
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO
            if self.flash_attention
            else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.kv_unified = True  # False splits the cells, and seq_cp would copy or abort
        params.swa_full = True  # else cells behind the window are gone and cannot be rolled back
        params.no_perf = True
        if callback is not None:
            params.cb_eval = callback
        return params


def check_choices(*, max_candidates: int, kv_type: str, n_gpu_layers: int) -> None:
    """Refuse what this llama.cpp does not offer.

    Raises:
        ConfigurationError: A value is not one of those that it has.
    """
    if max_candidates > MAX_CANDIDATES:
        raise ConfigurationError(
            f"max_candidates must be at most {MAX_CANDIDATES}, not {max_candidates}"
        )
    if kv_type not in KV_TYPES:
        raise ConfigurationError(f"kv_type must be one of {', '.join(KV_TYPES)}, not {kv_type!r}")
    if n_gpu_layers < -1:
        raise ConfigurationError(f"n_gpu_layers must be -1 (all) or more, not {n_gpu_layers}")
    if n_gpu_layers and not GPU:
        raise ConfigurationError(
            f"n_gpu_layers={n_gpu_layers} needs a llama-cpp-python that is built for a GPU, "
            "and this one is not; build it anew with CMAKE_ARGS, or set n_gpu_layers=0"
        )


def available_cores() -> int:
    """Return how many physical cores the process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    if affinity is None:
        return os.cpu_count() or 1
    cpus = affinity(0)
    cores = set()
    for cpu in cpus:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add(
                tuple((topology / part).read_text() for part in ("physical_package_id", "core_id"))
            )
        except OSError:
            return len(cpus)
    return len(cores)
