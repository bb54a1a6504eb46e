"""Published process reward models on transformers.

>>> from specguard_chains.adapters import ProcessRewardModel
>>> prm = ProcessRewardModel("Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B")  # doctest: +SKIP
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specguard_adapters.reward.kinds import RewardKind, reward_of
from specguard_adapters.reward.loading import load
from specguard_adapters.reward.network import Network
from specguard_adapters.reward.tokens import RewardTokens
from specguard_chains.decoding.local_engine import check_at_least_one
from specguard_chains.errors import ConfigurationError, ContextOverflowError, EngineError


class ProcessRewardModel:
    """A `RewardModel` over a model of transformers.

    Each call reads the conversation and all steps so far. What one of the latest texts has in
    common with it is not computed again, so that a step costs its own tokens only, also where
    several answers are written in turns.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | None = None,
        *,
        kind: str | RewardKind | None = None,
        n_ctx: int | None = None,
        reuse: bool = True,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        local_files_only: bool = False,
    ) -> None:
        """Load a model.

        Args:
            model: Its name on the hub, a folder, or a GGUF file if it gives verdicts by tokens.
                What was fetched from the hub before is taken from its cache.
            tokenizer: The same for the tokenizer; None takes the model's own.
            kind: What the model reads and how its reward is read, by name or described; see
                `specguard_adapters.reward.KINDS`. None finds it out.
            n_ctx: Most tokens that it reads; None takes what its config says.
            reuse: Keep what was computed of the latest texts for the next calls. In formats of 16
                bits, rewards then depend a little (about 0.003) on what was computed together.
            device: Such as "cpu" or "cuda:1"; None takes a GPU if there is one.
            dtype: Number format, such as "bfloat16"; None takes the one that the file has.
            revision: Branch, tag or commit on the hub.
            trust_remote_code: Run the code that comes with the model, if any, in place of the one
                here. It computes everything anew for every step.
            local_files_only: Never ask the hub.

        Raises:
            ModelNotFoundError: The model is neither here nor obtainable.
            ModelIntegrityError: Its files are damaged.
            EngineError: transformers cannot load it.
            ConfigurationError: The kind is unknown or does not suit the model.
        """
        check_at_least_one(n_ctx=n_ctx)
        loaded = load(
            model,
            tokenizer,
            kind,
            device=device,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            local_files_only=local_files_only,
        )
        self.name = loaded.name
        self.kind = loaded.kind
        config = loaded.model.config.get_text_config()
        self._n_ctx: int | None = n_ctx or getattr(config, "max_position_embeddings", None)
        self._tokens = RewardTokens(loaded.tokenizer, loaded.kind, loaded.name)
        self._network: Network | None = Network(
            loaded.model, loaded.kind.head, self._tokens.verdicts, loaded.name, reuse=reuse
        )
        self._lock = threading.Lock()  # the tokenizer and the memory serve one at a time

    def __call__(self, messages: Sequence[Mapping[str, Any]], steps: Sequence[str]) -> float:
        """Return the reward of the newest step, in [0, 1].

        Raises:
            ContextOverflowError: Conversation and steps are too long for the model.
            ConfigurationError: There is no step, or the messages do not suit the model.
            EngineError: The model fails, or is closed.
        """
        with self._lock:
            if self._network is None:
                raise EngineError(f"the reward model {self.name} is closed; load it again")
            tokens = self._tokens.encode(messages, steps)
            if self._n_ctx is not None and len(tokens) > self._n_ctx:
                raise ContextOverflowError(
                    f"the conversation and its {len(steps)} steps have {len(tokens)} tokens, and "
                    f"the reward model {self.name} reads {self._n_ctx} at most; shorten them, or "
                    "raise n_ctx if the model can read more"
                )
            numbers = self._network(tokens)
        if len(numbers) != self.kind.size:
            raise ConfigurationError(
                f"{self.name} gives {len(numbers)} numbers a token, and scale="
                f"{str(self.kind.scale)!r} needs {self.kind.size}; give a RewardKind with "
                "another scale"
            )
        return reward_of(numbers, self.name)

    def clear(self) -> None:
        """Forget what was computed, so that the next call reads all of its text."""
        with self._lock:
            if self._network is not None:
                self._network.clear()

    def close(self) -> None:
        """Free the model. Calls of a closed one raise EngineError."""
        with self._lock:
            self._network = None
