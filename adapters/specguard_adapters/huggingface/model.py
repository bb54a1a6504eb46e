"""A causal model of transformers as a function: tokens and cells in, logits out."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from specguard_adapters.huggingface.attention import NAME, ForwardPass, going_on
from specguard_adapters.huggingface.cells import Cells
from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.errors import (
    ConfigurationError,
    EngineError,
    SpecGuardError,
    StatesUnavailableError,
)

_engines: weakref.WeakKeyDictionary[PreTrainedModel, tuple[int, str]]
_engines = weakref.WeakKeyDictionary()  # a model -> how many use it, its own implementation
_counting = threading.Lock()


class NotEnoughMemoryError(EngineError):
    """A pass needs more memory than there is."""


class Model:
    """A loaded model, whose attention is `attention`'s from `adopt` until all of it close."""

    def __init__(self, model: PreTrainedModel, name: str, n_threads: int | None) -> None:
        """Use a model; `n_threads` is for its passes only, None for what torch is set to."""
        self.name = name
        self._model: PreTrainedModel | None = model
        self._n_threads = n_threads
        config = model.config.get_text_config(decoder=True)
        self.n_layer: int = config.num_hidden_layers
        self.n_vocab: int = config.vocab_size
        self.n_ctx_train: int | None = getattr(config, "max_position_embeddings", None)
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters
        self._adopted = False

    def adopt(self) -> None:
        """Take over the model's attention; other uses of the model do not notice.

        Raises:
            EngineError: It cannot be replaced.
        """
        model = self.weights
        if not model._can_set_attn_implementation():
            raise EngineError("its attention cannot be replaced")
        with _counting:
            count, own = _engines.get(model, (0, model.config._attn_implementation))
            _engines[model] = count + 1, own
            self._adopted = True
            model.set_attn_implementation(NAME)

    @property
    def dtype(self) -> torch.dtype:
        """The number format that it computes in."""
        dtype: torch.dtype = self.weights.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Where it is; where its embeddings are if it is spread over several devices."""
        device: torch.device = self.weights.get_input_embeddings().weight.device
        return device

    def check_one_piece(self) -> None:
        """Check that all of it computes on one device, in one number format.

        Raises:
            ConfigurationError: It does not, so that a stored prompt would not suit it.
        """
        weights = [p for p in self.weights.parameters() if p.is_floating_point()]
        if {(p.device, p.dtype) for p in weights} != {(self.device, self.dtype)}:
            raise ConfigurationError(
                f"prompt_cache needs {self.name} on one device and in one number format; leave out "
                "device_map and quantization_config, or prompt_cache"
            )

    def forward(
        self,
        tokens: Sequence[int],
        cells: Cells,
        coming: ForwardPass,
        *,
        all_logits: bool,
        state_layer: int | None = None,
    ) -> tuple[FloatArray, FloatArray | None]:
        """Compute a pass.

        Returns logits of shape (n, vocabulary), or (1, vocabulary) of the last token, and the
        hidden states after `state_layer`, shape (n, width), if one is named.

        Raises:
            EngineError: The memory does not suffice, or the model fails.
        """
        cells.coming = len(tokens)
        with torch.inference_mode(), going_on(coming):
            return self._run(
                tokens,
                all_logits=all_logits,
                state_layer=state_layer,
                position_ids=torch.as_tensor(coming.positions)[None],
                use_cache=True,
                **{self._cache_name: cells},
            )

    def reference(self, tokens: Sequence[int]) -> FloatArray:
        """Return the logits of tokens that nothing was before, by the model itself."""
        with torch.inference_mode():
            return self._run(tokens, all_logits=True, use_cache=False)[0]

    def check_states(self) -> None:
        """Check on a token that the model gives its hidden states.

        Raises:
            StatesUnavailableError: It does not.
        """
        with torch.inference_mode():
            self._run([0], all_logits=True, state_layer=0, use_cache=False)

    def close(self) -> None:
        """Let the model go."""
        model, self._model = self._model, None
        if model is None or not self._adopted:
            return
        with _counting:
            count, own = _engines[model]
            _engines[model] = count - 1, own
            if count == 1:
                del _engines[model]
                model.set_attn_implementation(own)

    @property
    def weights(self) -> PreTrainedModel:
        """The model as transformers knows it."""
        if self._model is None:
            raise EngineError(f"the engine {self.name} is closed; load the model again")
        return self._model

    def _states_after(self, layer: int, output: Any) -> torch.Tensor:
        """Return the hidden states that leave a layer below the last, shape (1, n, width)."""
        states = getattr(output, "hidden_states", None) or ()
        if len(states) != self.n_layer + 1:  # the embeddings come first
            raise StatesUnavailableError(
                f"{self.name} gives {len(states)} hidden states for {self.n_layer} layers; load it "
                "with states=False, and without a value head"
            )
        after: torch.Tensor = states[layer + 1]
        return after

    def _run(
        self,
        tokens: Sequence[int],
        *,
        all_logits: bool,
        state_layer: int | None = None,
        **arguments: Any,
    ) -> tuple[FloatArray, FloatArray | None]:
        model = self.weights
        device = self.device
        if self._keeps_logits:
            arguments["logits_to_keep"] = 0 if all_logits else 1
        if "position_ids" in arguments:
            arguments["position_ids"] = arguments["position_ids"].to(device)
        try:
            with _threads(self._n_threads):
                ids = torch.as_tensor(tokens, dtype=torch.long, device=device)[None]
                if state_layer is not None:
                    arguments["output_hidden_states"] = True
                output = model(input_ids=ids, **arguments)
                logits = _array(output.logits[0] if all_logits else output.logits[0, -1:])
                if state_layer is None:
                    return logits, None
                return logits, _array(self._states_after(state_layer, output)[0])
        except SpecGuardError:
            raise
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate" in str(error):
                raise NotEnoughMemoryError(
                    f"the memory does not suffice for {self.name} on {device}; lower n_ctx, "
                    "n_batch or max_candidates, or load it with a smaller dtype or a "
                    f"quantization_config. torch says: {_first_line(error)}"
                ) from error
            raise EngineError(f"{self.name} failed: {_first_line(error)}") from error


@contextmanager
def _threads(n: int | None) -> Iterator[None]:
    """Let torch compute with n threads, and as before afterwards."""
    before = torch.get_num_threads()
    if n is None or n == before:
        yield
        return
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _array(tensor: torch.Tensor) -> FloatArray:
    array: FloatArray = tensor.float().cpu().numpy()
    return array


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
