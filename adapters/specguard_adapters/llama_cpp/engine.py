"""GGUF models on llama.cpp, through llama-cpp-python's low-level bindings.

>>> from specguard_chains.adapters import LlamaCppEngine
>>> engine = LlamaCppEngine("model.gguf", n_ctx=4096, attention=True)  # doctest: +SKIP
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from specguard_adapters.llama_cpp.cache import LlamaCppCache, sequences_of
from specguard_adapters.llama_cpp.checks import check_attention, check_states
from specguard_adapters.llama_cpp.context import Context
from specguard_adapters.llama_cpp.log import log
from specguard_adapters.llama_cpp.settings import (
    MAX_SEQUENCES,
    ContextSettings,
    available_cores,
    check_choices,
)
from specguard_adapters.llama_cpp.shared import SharedContext
from specguard_adapters.llama_cpp.tap import AttentionTap
from specguard_adapters.llama_cpp.weights import Weights, load_weights
from specguard_chains.decoding import compute_thread
from specguard_chains.decoding.batcher import Outcome, Part
from specguard_chains.decoding.engine import Capabilities, Prompt
from specguard_chains.decoding.local_engine import LocalEngine, check_at_least_one, check_sizes
from specguard_chains.decoding.prompt_encoder import PromptEncoder
from specguard_chains.errors import ConfigurationError, EngineError
from specguard_chains.models.cache import check_own_file


class LlamaCppEngine(LocalEngine):
    """An `Engine` over a GGUF file."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_ctx: int = 4096,
        max_candidates: int = 4,
        candidate_tokens: int = 256,
        attention: bool = False,
        attention_layers: int = 3,
        states: bool = False,
        n_threads: int | None = None,
        n_gpu_layers: int = 0,
        n_batch: int = 512,
        n_ubatch: int = 128,
        kv_type: Literal["f16", "f32"] = "f16",
        use_mmap: bool = False,
        repack: bool = True,
        max_parallel: int = 1,
        prompt_cache: str | os.PathLike[str] | None = None,
        prompt_cache_gib: float = 4.0,
        verbose: bool = False,
    ) -> None:
        """Load a model; engines of the same file share its weights.

        Args:
            path: The GGUF file.
            n_ctx: Most tokens of a sequence, prompt included.
            max_candidates: Most candidates that are sampled side by side.
            candidate_tokens: Tokens of a candidate that memory is reserved for.
            attention: Give attention, which grounding needs; turns flash attention off.
            attention_layers: Most last layers whose attention can be read.
            states: Give hidden states, which a value head needs.
            n_threads: Threads; None is one for each physical core that the process may use.
            n_gpu_layers: Layers to place on a GPU, -1 for all.
            n_batch: Most tokens handed to llama.cpp at once.
            n_ubatch: Most tokens computed at once.
            kv_type: Number format of the KV memory.
            use_mmap: Map the file instead of reading it. Loads faster and shares memory between
                processes; weights that llama.cpp rearranges for the processor are held twice.
            repack: Let llama.cpp rearrange weights for the processor. Without, a token has the same
                numbers to the last bit alone and among up to seven [run, x86], so that speculative
                decoding writes the target's own text even where two tokens are nearly tied.
            max_parallel: Requests that are admitted at a time, and computed together: memory for
                as many contexts is reserved, and more rounding: a sum's last digit depends on what
                is computed with it.
            prompt_cache: A folder in which the keys and values of long system messages and lists of
                tools are kept for processes to come. With `attention` and parallel requests,
                one is loaded only while the context is empty.
            prompt_cache_gib: Most GiB of all files in this folder.
            verbose: Pass llama.cpp's own log on to the logger "specguard_chains.llama_cpp".

        Raises:
            ModelNotFoundError: There is no such file.
            ModelIntegrityError: The file is not a GGUF file, or damaged.
            EngineError: llama.cpp cannot load the file.
            ConfigurationError: A value does not suit the model.
            AttentionUnavailableError: This llama.cpp does not show its attention.
            StatesUnavailableError: This llama.cpp does not show its hidden states.
        """
        super().__init__(max_parallel=max_parallel)
        check_at_least_one(
            n_ctx=n_ctx,
            max_candidates=max_candidates,
            candidate_tokens=candidate_tokens,
            attention_layers=attention_layers,
            n_threads=n_threads,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
        )
        check_choices(max_candidates=max_candidates, kv_type=kv_type, n_gpu_layers=n_gpu_layers)
        log.verbose |= verbose
        self._weights: Weights | None = load_weights(
            check_own_file(Path(path)), n_gpu_layers, use_mmap=use_mmap, repack=repack
        )
        model = self._model
        if model.obstacle:
            raise ConfigurationError(
                f"{model.path} cannot be used: the model {model.obstacle}; take a causal "
                "transformer"
            )
        check_sizes(
            model.path,
            n_ctx=n_ctx,
            trained=model.n_ctx_train,
            attention_layers=attention_layers if attention else 0,
            n_layer=model.n_layer,
        )
        self.name = model.path.stem
        self.capabilities = Capabilities(
            in_process=True,
            logits=True,
            attention=attention,
            states=states,
            max_candidates=max_candidates,
            max_candidate_tokens=candidate_tokens,
            constraints=True,
            max_parallel=max_parallel,
        )
        self.context_length = n_ctx
        self.n_layer = model.n_layer
        self._attention_layers = attention_layers
        self._settings = ContextSettings(
            cells=n_ctx + (max_candidates - 1) * candidate_tokens,
            sequences=sequences_of(
                max_candidates, window=model.window, exports=prompt_cache is not None
            ),
            n_batch=n_batch,
            n_ubatch=min(n_ubatch, n_batch),
            n_threads=n_threads or available_cores(),
            kv_type=kv_type,
            flash_attention=not attention and kv_type != "f32",
        )
        self._width = self._settings.sequences  # of a session
        self._shared: SharedContext | None = None
        self._sharing = threading.Lock()
        most = self._most_sessions()
        if max_parallel > 1:
            self._prefixes.max_idle = min(max_parallel, most - max_parallel)
        if attention:
            compute_thread.run(lambda: check_attention(model, self._settings, attention_layers))
        if states:
            compute_thread.run(lambda: check_states(model, self._settings))
        self._prompts = PromptEncoder(self.name)
        self._share_prompts(
            prompt_cache,
            prompt_cache_gib,
            n_batch if n_batch % self._settings.n_ubatch else self._settings.n_ubatch,
            model.identity()
            | self._settings.identity()
            | {"long_rope": model.long_rope(self._most_cells)},
        )

    @property
    def vocabulary(self) -> str:
        """See `Engine.vocabulary`."""
        return self._model.vocabulary.fingerprint

    @property
    def n_tokens(self) -> int:
        """See `Tokenizer.n_tokens`."""
        return self._model.vocabulary.n_tokens

    @property
    def end_token(self) -> int:
        """See `Tokenizer.end_token`."""
        return self._model.end_of_turn

    def encode(self, prompt: Prompt) -> list[int]:
        """See `Engine.encode` and `PromptEncoder.encode`."""
        return self._prompts.encode(prompt, self._model)

    def chat_template(self) -> str | None:
        """See `Engine.chat_template`."""
        return self._prompts.source(self._model, tools=True)

    def encode_text(self, text: str) -> list[int]:
        """See `Tokenizer.encode_text`."""
        return self._model.tokenize_on(text, special=False)

    def token_bytes(self, token: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        return self._model.token_bytes(token)

    def is_end(self, token: int) -> bool:
        """See `Tokenizer.is_end`."""
        return self._model.is_end(token)

    def new_cache(self) -> LlamaCppCache:
        """See `LocalEngine.new_cache`. Parallel requests share a context."""
        if self.capabilities.max_parallel == 1:
            return self._cache(self._context(self._settings))
        shared = self._shared_context()
        first = shared.take()
        if first is None and self._prefixes.evict():
            first = shared.take()
        if first is None:  # a request with several sessions: one of them computes on its own
            return self._cache(self._context(self._own_settings))
        return self._cache(shared.context, first, on_close=partial(shared.give_back, first))

    def compute(self, parts: Sequence[Part]) -> Sequence[Outcome]:
        """See `LocalEngine.compute`."""
        return self._shared_context().compute(parts)

    def close(self) -> None:
        """See `Engine.close`."""
        super().close()
        if self._shared is not None:
            self._shared.close()
        self._weights = None

    def _cache(
        self, context: Context, first: int = 0, on_close: Callable[[], None] | None = None
    ) -> LlamaCppCache:
        return LlamaCppCache(
            context,
            context_length=self.context_length,
            max_candidates=self.capabilities.max_candidates,
            attention_layers=self._attention_layers,
            window=self._model.window,
            first=first,
            on_close=on_close,
        )

    def _context(self, settings: ContextSettings) -> Context:
        has = self.capabilities
        tap = AttentionTap() if has.attention or has.states else None
        return Context(self._model, settings, tap)

    def _shared_context(self) -> SharedContext:
        """Return the context of parallel requests, which is made when it is first needed."""
        with self._sharing:
            if self._shared is None:
                slots = self.capabilities.max_parallel + self._prefixes.max_idle
                settings = replace(
                    self._settings,
                    cells=self._most_cells,
                    sequences=slots * self._width,
                )
                self._shared = SharedContext(
                    self._context(settings),
                    slots=slots,
                    width=self._width,
                    evict=self._prefixes.evict,
                )
            return self._shared

    @property
    def _most_cells(self) -> int:
        """The size of the context of parallel requests, or of the only one."""
        return self.capabilities.max_parallel * self._settings.cells

    @property
    def _own_settings(self) -> ContextSettings:
        """Those of a context beside the one of parallel requests, with the same numbers."""
        sizes = (self._settings.cells, self._most_cells)
        own, most = map(self._model.long_rope, sizes)
        return self._settings if own == most else replace(self._settings, cells=self._most_cells)

    def _most_sessions(self) -> int:
        """Return how many sessions llama.cpp has sequences for.

        Raises:
            ConfigurationError: There are more requests.
        """
        most = MAX_SEQUENCES // self._width
        if self.capabilities.max_parallel > most:
            lower = f"max_parallel to {most}, or max_candidates" if most else "max_candidates"
            raise ConfigurationError(
                f"max_parallel={self.capabilities.max_parallel} with max_candidates="
                f"{self.capabilities.max_candidates} needs more than llama.cpp's {MAX_SEQUENCES} "
                f"sequences; lower {lower}"
            )
        return most

    @property
    def _model(self) -> Weights:
        if self._weights is None:
            raise EngineError(f"the engine {self.name} is closed; load the model again")
        return self._weights
