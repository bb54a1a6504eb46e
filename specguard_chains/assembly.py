"""From options to a ready decoder: models found and loaded once a process, bounds looked up."""

from __future__ import annotations

import os
import threading
from functools import cache
from pathlib import Path
from typing import Any

from specguard_chains import calibrations
from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.boundaries import StepShape
from specguard_chains.decoding.calibration import Calibration
from specguard_chains.decoding.decoder import Decoder
from specguard_chains.decoding.engine import Engine
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.selection import Encoder, Selector
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.steps import Source
from specguard_chains.decoding.verification import EnsembleVerifier
from specguard_chains.errors import ConfigurationError
from specguard_chains.models import Progress, find_pair, resolve
from specguard_chains.models.cache import no_progress
from specguard_chains.options import SpecGuardOptions

_engines: dict[tuple[Any, ...], Engine] = {}
_loading = threading.Lock()

generation = 0
"""Counts the calls of `unload`: decoders of an earlier generation have closed engines."""


def assemble(options: SpecGuardOptions, *, progress: Progress = no_progress) -> Decoder:
    """Return the decoder that the options describe.

    Engines are shared by everything in this process that asks for the same file and settings.

    Raises:
        SpecGuardError: A model cannot be found, fetched or loaded, or a calibration not be read.
    """
    shape = StepShape(options.step_delimiter, options.max_step_tokens)
    if options.decoder in ("draft", "target"):
        source = Source(options.decoder)
        return SoloDecoder(_engine(options, source, progress), source, shape)
    grounding = GroundingSpec.named(options.grounding, layers=options.grounding_layers)
    draft = _engine(options, Source.DRAFT, progress)
    target = _engine(options, Source.TARGET, progress)
    verifier = EnsembleVerifier(
        _calibration(options, draft, target, grounding),
        confidence_weight=options.confidence_weight,
        threshold=options.threshold,
    )
    return SpecGuardDecoder(
        draft,
        target,
        verifier,
        num_candidates=_candidates(options),
        select=_selector(options),
        verify_with=options.verify_with,
        grounding=grounding,
        shape=shape,
        early_rejection=options.early_rejection,
    )


def unload() -> None:
    """Free every model that this process has loaded; the next request loads anew."""
    global generation
    with _loading:
        generation += 1
        while _engines:
            _engines.popitem()[1].close()


def _candidates(options: SpecGuardOptions) -> int:
    return 1 if options.sampling().greedy else options.num_candidates


def _engine(options: SpecGuardOptions, source: Source, progress: Progress) -> Engine:
    """Return the engine of a role, loaded unless the process has it already."""
    model = _model(options, source)
    if isinstance(model, Engine):
        return model
    path = resolve(model, progress=progress)
    # A role's engine is the same for every decoder, and so then is its text: what a model writes
    # depends in the last digits on how its attention is computed. One model in both roles is one
    # engine.
    twice = _model(options, Source.DRAFT) == _model(options, Source.TARGET)
    settings: dict[str, Any] = {
        "n_ctx": options.n_ctx,
        "n_threads": options.n_threads,
        "n_gpu_layers": options.n_gpu_layers,
        "max_candidates": options.num_candidates,
        "candidate_tokens": options.max_step_tokens,
        "attention": _reads_attention(options, None if twice else source),
        "attention_layers": options.grounding_layers,
    }
    key = (path, *settings.items())
    with _loading:
        if key not in _engines:
            from specguard_chains.adapters import LlamaCppEngine

            _engines[key] = LlamaCppEngine(path, **settings)
        return _engines[key]


def _model(options: SpecGuardOptions, source: Source) -> Any:
    """Return what the options name for a role: an engine, a file or a known model."""
    model = options.draft if source is Source.DRAFT else options.target
    if model is None:
        pair = find_pair(options.pair)
        return pair.draft if source is Source.DRAFT else pair.target
    if isinstance(model, str | os.PathLike | Engine):
        return model
    raise ConfigurationError(
        f"{source} must be a GGUF file, a model name or an Engine, not {type(model).__name__}"
    )


def _reads_attention(options: SpecGuardOptions, source: Source | None) -> bool:
    """Whether the model in this role (None: in both) is asked for grounding."""
    return options.confidence_weight < 1 and source in (None, Source(options.verify_with))


def _selector(options: SpecGuardOptions) -> Selector:
    if options.encoder is None or callable(options.encoder):
        return Selector(options.encoder)
    if isinstance(options.encoder, str | os.PathLike):
        return Selector(_sentence_encoder(os.fspath(options.encoder)))
    raise ConfigurationError(
        "encoder must be a model's name, a folder or a function from texts to vectors, not "
        f"{type(options.encoder).__name__}"
    )


@cache
def _sentence_encoder(model: str) -> Encoder:
    from specguard_chains.adapters import SentenceEncoder

    return SentenceEncoder(model)


def _calibration(
    options: SpecGuardOptions, draft: Engine, target: Engine, grounding: GroundingSpec
) -> Calibration:
    if options.calibration is not None:
        return Calibration.load(Path(options.calibration))
    return calibrations.find(draft.name, target.name, options.verify_with, grounding)
