"""From options to a ready decoder: models found and loaded once a process, bounds looked up."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from specguard_chains import calibrations, engines, rewards
from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.boundaries import StepShape
from specguard_chains.decoding.calibration import Calibration
from specguard_chains.decoding.decoder import Decoder
from specguard_chains.decoding.engine import Engine
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.rewards import TextReward
from specguard_chains.decoding.rivals import (
    AcceptAll,
    LengthVerifier,
    RandomVerifier,
    RewardVerifier,
    TargetJudge,
)
from specguard_chains.decoding.selection import Selector
from specguard_chains.decoding.specguard import SpecGuardDecoder, VerifyWith
from specguard_chains.decoding.speculative import SpeculativeDecoder
from specguard_chains.decoding.steps import Source
from specguard_chains.decoding.verification import EnsembleVerifier, Verifier
from specguard_chains.decoding.voting import VotingDecoder, best_confidence, best_value, majority
from specguard_chains.engines import kind_of
from specguard_chains.errors import ConfigurationError
from specguard_chains.loaded import Loaded
from specguard_chains.models import Progress
from specguard_chains.models.cache import no_progress
from specguard_chains.options import SPECGUARD, SpecGuardOptions, drafts_one_first
from specguard_chains.rewards import required_reward, reward, value_head
from specguard_chains.roles import load_engine, model_of, reader_of

if TYPE_CHECKING:
    from specguard_chains.adapters import SentenceEncoder

logger = logging.getLogger(__name__)

SELECTING = ("selector", "random", "length")
"""Methods to compare with that select among candidates, as SpecGuard does."""

generation = 0
"""Counts the calls of `unload`: decoders of an earlier generation have closed engines."""


def assemble(options: SpecGuardOptions, *, progress: Progress = no_progress) -> Decoder:
    """Return the decoder that the options describe.

    Engines are shared by everything in this process that asks for the same model and settings.

    Raises:
        SpecGuardError: A model cannot be found, fetched or loaded, or a calibration not be read.
    """
    _check_prompt_cache(options)
    needed = [load_engine(options, source, progress=progress) for source in options.roles]
    if options.decoder.endswith("-majority"):
        return VotingDecoder(_writer(options, *needed), options.num_samples, majority)
    if options.decoder.endswith("-best-of-n"):
        return _best_of_n(options, *needed)
    return _writer(options, *needed)


def _check_prompt_cache(options: SpecGuardOptions) -> None:
    """Refuse a folder that no model would use."""
    models = (model_of(options, source) for source in options.roles)
    if options.prompt_cache is not None and all(
        isinstance(model, Engine) or kind_of(model) == "openai" for model in models
    ):
        raise ConfigurationError(
            f"prompt_cache={options.prompt_cache!r} is for models that are loaded here by name: "
            "leave it out, as a server caches prompts itself, and an engine of your own takes "
            "prompt_cache where you make it"
        )


def _writer(options: SpecGuardOptions, *needed: Engine) -> Decoder:
    """Return the decoder that writes one answer."""
    shape = StepShape(options.step_delimiter, options.max_step_tokens)
    if options.method == "speculative":
        draft = needed[0] if Source.DRAFT in options.roles else None
        return SpeculativeDecoder(draft, needed[-1], options.speculation(), shape)
    grounding = GroundingSpec.named(options.grounding, layers=options.grounding_layers)
    if len(needed) == 1:
        return SoloDecoder(needed[0], options.roles[0], shape, passage_grounding=grounding)
    draft, target = needed
    if options.method in SPECGUARD:
        return _specguard(options, draft, target, shape, grounding)
    selects = options.method in SELECTING
    return SpecGuardDecoder(
        draft,
        target,
        _rival(options, draft, target),
        num_candidates=_candidates(options, options.num_candidates if selects else 1),
        num_target_candidates=_candidates(options, options.num_target_candidates if selects else 1),
        select=_selector(options),
        grounding_from=reader_of(options),
        grounding=grounding,
        shape=shape,
        salvage=options.salvage,
        hand_back=options.hand_back,
        patience=options.pacing(),
    )


def _rival(options: SpecGuardOptions, draft: Engine, target: Engine) -> Verifier:
    """Return the verifier of a method to compare with."""
    match options.method:
        case "rsd":
            return RewardVerifier(required_reward(options, draft.name), options.score_threshold())
        case "specreason":
            return TargetJudge(target, options.score_threshold())
        case "selector":
            return AcceptAll()
        case "random":
            return RandomVerifier(options.acceptance_rate)
        case _:
            return LengthVerifier(options.max_accepted_tokens)


def _best_of_n(options: SpecGuardOptions, engine: Engine) -> Decoder:
    """Return a model alone whose answers are ranked by a reward, or else by their confidence."""
    found = reward(options, engine.name)
    if found is None and not engine.capabilities.logprobs:
        raise ConfigurationError(
            f"nothing tells which answer is best: {engine.name} gives no log-probs, and no value "
            "head of it is known; name a reward_model, or take a server that gives log-probs"
        )
    if found is None:
        logger.warning(
            "no reward model is named and no value head of %s is known: the best of %d answers is "
            "the one whose least confident step is the most confident",
            engine.name,
            options.num_samples,
        )
    rating = found if isinstance(found, TextReward) else None
    scorer = AcceptAll() if found is None or rating else RewardVerifier(found)
    shape = StepShape(options.step_delimiter, options.max_step_tokens)
    return VotingDecoder(
        SoloDecoder(engine, options.roles[0], shape, scorer=scorer, rating=rating),
        options.num_samples,
        best_confidence if found is None else best_value,
    )


def _specguard(
    options: SpecGuardOptions,
    draft: Engine,
    target: Engine,
    shape: StepShape,
    grounding: GroundingSpec,
) -> SpecGuardDecoder:
    reader = reader_of(options)
    _tell(options, reader)
    calibration = _calibration(options, draft, target, reader, grounding)
    candidates = _candidates(options, options.num_candidates)
    one_first = drafts_one_first(candidates, options.doubt_margin, options.target_confidence)
    doubts = one_first or options.target_confidence is not None
    return SpecGuardDecoder(
        draft,
        target,
        EnsembleVerifier(
            calibration,
            confidence_weight=options.confidence_weight if reader else 1.0,
            threshold=options.score_threshold(),
            value_head=value_head(options, draft.name),
            value_weight=options.value_weight,
            doubt_margin=options.doubt_margin if doubts else 0.0,
        ),
        num_candidates=candidates,
        num_target_candidates=_candidates(options, options.num_target_candidates),
        one_first=one_first,
        target_confidence=options.target_confidence,
        select=_selector(options),
        verify_with=options.verify_with,
        grounding_from=reader,
        grounding=grounding,
        shape=shape,
        early_rejection=options.early_rejection,
        salvage=options.salvage,
        hand_back=options.hand_back,
        patience=options.pacing(),
        slowdown=options.slowdown(),
        rewriting=options.rewriting(),
    )


def unload() -> None:
    """Free every model that this process has loaded; the next request loads anew."""
    global generation
    engines.unload()
    rewards.unload()
    _encoders.unload()
    generation += 1  # only now: who assembles meanwhile may have got an engine that is closed


def _candidates(options: SpecGuardOptions, n: int) -> int:
    return 1 if options.sampling().greedy else n


def _tell(options: SpecGuardOptions, reader: VerifyWith | None) -> None:
    """Log where grounding does not come from the model whose confidence is judged."""
    if options.confidence_weight == 1 or reader == options.verify_with:
        return
    if reader is None:
        logger.warning(
            "neither the draft nor the target shows its attention: steps are judged by confidence "
            "alone, as with confidence_weight=1; load one of them with attention=True for grounding"
        )
    elif reader == "target":
        logger.warning(
            "the draft does not show its attention: the target reads every drafted step to ground "
            "it; confidence_weight=1 saves that"
        )


def _selector(options: SpecGuardOptions) -> Selector:
    if options.encoder is None or callable(options.encoder):
        return Selector(options.encoder)
    if isinstance(options.encoder, str | os.PathLike):
        return Selector(_encoders.get(os.fspath(options.encoder)))
    raise ConfigurationError(
        "encoder must be a model's name, a folder or a function from texts to vectors, not "
        f"{type(options.encoder).__name__}"
    )


def _load_encoder(model: str) -> SentenceEncoder:
    from specguard_chains.adapters import SentenceEncoder

    return SentenceEncoder(model)


_encoders = Loaded(_load_encoder)


def _calibration(
    options: SpecGuardOptions,
    draft: Engine,
    target: Engine,
    reader: VerifyWith | None,
    grounding: GroundingSpec,
) -> Calibration:
    if options.calibration is not None:
        return Calibration.load(Path(options.calibration))
    return calibrations.find(draft.name, target.name, options.verify_with, reader, grounding)
