"""Causal models of transformers, from the hub, a folder, a GGUF file, or already loaded.

>>> from specguard_chains.adapters import HuggingFaceEngine
>>> engine = HuggingFaceEngine("Qwen/Qwen2.5-0.5B-Instruct", attention=True)  # doctest: +SKIP
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from specguard_adapters.huggingface.cache import HuggingFaceCache
from specguard_adapters.huggingface.checks import check
from specguard_adapters.huggingface.loading import load
from specguard_adapters.huggingface.model import Model
from specguard_adapters.huggingface.tokenizer import HuggingFaceTokenizer, copy_of
from specguard_chains.decoding import compute_thread
from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.engine import Capabilities, Prompt
from specguard_chains.decoding.local_engine import LocalEngine, check_at_least_one, check_sizes
from specguard_chains.decoding.prompt_encoder import PromptEncoder
from specguard_chains.decoding.trail import LONG
from specguard_chains.errors import ConfigurationError, EngineError


class HuggingFaceEngine(LocalEngine):
    """An `Engine` over a causal model of transformers."""

    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedModel,
        tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
        *,
        n_ctx: int = 4096,
        max_candidates: int = 4,
        candidate_tokens: int = 256,
        attention: bool = False,
        attention_layers: int = 3,
        states: bool = False,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        device_map: str | dict[str, Any] | None = None,
        quantization_config: Any = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        local_files_only: bool = False,
        logits_processor: LogitsProcessorList | None = None,
        n_threads: int | None = None,
        n_batch: int = 512,
        max_parallel: int = 1,
        prompt_cache: str | os.PathLike[str] | None = None,
        prompt_cache_gib: float = 4.0,
    ) -> None:
        """Load a model; engines that load the same one in the same way share it.

        Args:
            model: A name on the hub, a folder, a GGUF file, or a model that is already loaded.
                What was fetched from the hub before is taken from its cache.
            tokenizer: The same for the tokenizer; None takes the model's own.
            n_ctx: Most tokens of a sequence, prompt included.
            max_candidates: Most candidates that are sampled side by side.
            candidate_tokens: Tokens of a candidate that there is room for.
            attention: Give attention, which grounding needs.
            attention_layers: Most last layers whose attention can be read.
            states: Give hidden states, which a value head needs.
            device: Such as "cpu" or "cuda:1"; None takes a GPU if there is one.
            dtype: Number format, such as "bfloat16"; None takes the one that the file has.
            device_map: Spreads the model over devices; see transformers.
            quantization_config: Such as a BitsAndBytesConfig; see transformers.
            trust_remote_code: Run code that comes with the model.
            revision: Branch, tag or commit on the hub.
            local_files_only: Never ask the hub.
            logits_processor: Changes the logits that are drawn from, not the log-probs that are
                reported. The engine then gives no logits, which lossless decoding needs.
            n_threads: Threads on a CPU; None leaves that to torch.
            n_batch: Most tokens computed at once.
            max_parallel: Requests that are admitted at a time; their passes take turns, as a row of
                this engine's cells belongs to one sequence and its branches.
            prompt_cache: A folder in which the keys and values of long system messages and lists of
                tools are kept for processes to come.
            prompt_cache_gib: Most GiB of all files in this folder.

        Raises:
            ModelNotFoundError: The model is neither here nor obtainable.
            ModelIntegrityError: Its files are damaged.
            EngineError: transformers cannot load it.
            ConfigurationError: A value does not suit the model, or the model is of a kind that
                cannot be used.
            AttentionUnavailableError: The model does not show its attention.
            StatesUnavailableError: The model does not show its hidden states.
        """
        super().__init__(max_parallel=max_parallel)
        check_at_least_one(
            n_ctx=n_ctx,
            max_candidates=max_candidates,
            candidate_tokens=candidate_tokens,
            attention_layers=attention_layers,
            n_threads=n_threads,
            n_batch=n_batch,
        )
        options = {
            "dtype": dtype,
            "device_map": device_map,
            "quantization_config": quantization_config,
            "trust_remote_code": trust_remote_code,
            "revision": revision,
        }
        loaded = load(model, tokenizer, device, options, local_files_only=local_files_only)
        self.name = loaded.name
        self.context_length = n_ctx
        self.capabilities = Capabilities(
            in_process=True,
            logits=logits_processor is None,
            attention=attention,
            states=states,
            max_candidates=max_candidates,
            max_candidate_tokens=candidate_tokens,
            constraints=True,
            max_parallel=max_parallel,
        )
        self._model = Model(loaded.model, loaded.name, n_threads)
        self.n_layer = self._model.n_layer
        self._shared: PreTrainedTokenizerBase | None = loaded.tokenizer  # kept for other engines
        self._tokenizer = copy_of(loaded.tokenizer, self._model.n_vocab, loaded.name)
        self._ends = self._tokenizer.ends(_end_tokens(loaded.model))
        self._end_token = self._tokenizer.end_of_turn(self._ends)
        # Candidates that turn away from a guess leave up to a block of it behind.
        self._cells = n_ctx + (max_candidates - 1) * candidate_tokens + LONG
        self._attention_layers = attention_layers
        self._n_batch = n_batch
        if logits_processor is not None:
            self.process_logits = _processed_by(logits_processor)
        layers = attention_layers if attention else 0
        check_sizes(
            loaded.name,
            n_ctx=n_ctx,
            trained=self._model.n_ctx_train,
            attention_layers=layers,
            n_layer=self._model.n_layer,
        )
        try:
            compute_thread.run(lambda: check(self._model, layers))
            if states:
                compute_thread.run(self._model.check_states)
            identity = {} if prompt_cache is None else self._identity(loaded.origin, n_threads)
            self._share_prompts(prompt_cache, prompt_cache_gib, n_batch, identity)
        except BaseException:
            self._model.close()
            raise
        self._prompts = PromptEncoder(self.name)

    @property
    def vocabulary(self) -> str:
        """See `Engine.vocabulary`."""
        return self._opened_tokenizer().vocabulary.fingerprint

    @property
    def n_tokens(self) -> int:
        """See `Tokenizer.n_tokens`."""
        return self._opened_tokenizer().vocabulary.n_tokens

    @property
    def end_token(self) -> int:
        """See `Tokenizer.end_token`."""
        return self._end_token

    def encode(self, prompt: Prompt) -> list[int]:
        """See `Engine.encode` and `PromptEncoder.encode`."""
        return self._prompts.encode(prompt, self._opened_tokenizer())

    def chat_template(self) -> str | None:
        """See `Engine.chat_template`."""
        return self._prompts.source(self._opened_tokenizer(), tools=True)

    def encode_text(self, text: str) -> list[int]:
        """See `Tokenizer.encode_text`."""
        return self._tokenizer.tokenize_on(text, special=False)

    def token_bytes(self, token: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        return self._tokenizer.token_bytes(token)

    def is_end(self, token: int) -> bool:
        """See `Tokenizer.is_end`."""
        self._tokenizer.check(token)
        return token in self._ends

    def new_cache(self) -> HuggingFaceCache:
        """See `LocalEngine.new_cache`."""
        return HuggingFaceCache(
            self._model,
            cells=self._cells,
            max_candidates=self.capabilities.max_candidates,
            attention_layers=self._attention_layers,
            n_batch=self._n_batch,
        )

    def close(self) -> None:
        """See `Engine.close`."""
        super().close()
        self._model.close()
        self._shared = None

    def _identity(self, origin: tuple[Any, ...] | None, n_threads: int | None) -> dict[str, Any]:
        """Return what tells the numbers that are computed from others.

        Raises:
            ConfigurationError: That is not known, or they cannot be stored.
        """
        if origin is None:
            raise ConfigurationError(
                "prompt_cache needs to tell the model from others, and this one was given loaded; "
                "give its name or folder, or leave prompt_cache out"
            )
        self._model.check_one_piece()
        on_gpu = self._model.device.type == "cuda"
        return {
            "library": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "machine": torch.cuda.get_device_name(self._model.device)
            if on_gpu
            else [torch.backends.cpu.get_cpu_capability(), n_threads or torch.get_num_threads()],
            "model": [str(part) for part in origin],
            "dtype": str(self._model.dtype),
            "attention": self.capabilities.attention,
            "n_batch": self._n_batch,
        }

    def _opened_tokenizer(self) -> HuggingFaceTokenizer:
        if self._closed:
            raise EngineError(f"the engine {self.name} is closed; load the model again")
        return self._tokenizer


def _end_tokens(model: PreTrainedModel) -> list[int]:
    """Return the end tokens that the model's generation settings name."""
    settings = getattr(model, "generation_config", None) or model.config
    ends = getattr(settings, "eos_token_id", None)
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _processed_by(processor: LogitsProcessorList) -> Any:
    """Return a function (all tokens so far, logits) -> logits that applies transformers' own."""

    def process(tokens: Sequence[int], logits: FloatArray) -> FloatArray:
        ids = torch.as_tensor(tokens, dtype=torch.long)[None]
        processed: FloatArray = processor(ids, torch.from_numpy(logits)[None])[0].float().numpy()
        return processed

    return process
