"""Which model plays which role, and what its engine must be able to do for it."""

from __future__ import annotations

import os
from dataclasses import replace
from math import prod
from typing import Any, cast, get_args

from specguard_chains import engines
from specguard_chains.decoding.engine import Engine
from specguard_chains.decoding.specguard import VerifyWith
from specguard_chains.decoding.steps import Source
from specguard_chains.engines import EngineSettings, kind_of
from specguard_chains.errors import ConfigurationError
from specguard_chains.models import Progress, find_pair
from specguard_chains.models.cache import no_progress
from specguard_chains.options import SpecGuardOptions
from specguard_chains.rewards import is_value_head


def load_engine(
    options: SpecGuardOptions,
    source: Source,
    *,
    progress: Progress = no_progress,
    **settings: Any,
) -> Engine:
    """Return the engine of a role, loaded unless the process has it already.

    Args:
        options: Which model, and how it is loaded.
        source: The role.
        progress: Told how much of a file is fetched.
        settings: Fields of `EngineSettings` that are to be others than the decoder needs.

    Raises:
        SpecGuardError: The model cannot be found, fetched or loaded.
    """
    model = model_of(options, source)
    if isinstance(model, Engine):
        return model
    # A role's engine is the same for every decoder that judges steps, and for a model alone, and so
    # then is its text: what a model writes depends in the last digits on how its attention is
    # computed. One model in both roles is one engine.
    both = _one_model(options)
    reader = reader_of(options)
    needed = EngineSettings(
        n_ctx=options.n_ctx,
        n_threads=options.n_threads,
        n_gpu_layers=options.n_gpu_layers,
        max_candidates=max(options.num_candidates, options.num_target_candidates, _leaves(options)),
        candidate_tokens=options.max_step_tokens,
        attention=reader is not None and (both or reader == source),
        attention_layers=options.grounding_layers,
        states=_shows_states(options, source),
        api_key=options.api_key,
        max_retries=options.max_retries,
        max_parallel=options.max_parallel,
        prompt_cache=options.prompt_cache,
        prompt_cache_gib=options.prompt_cache_gib,
    )
    return engines.load(model, replace(needed, **settings), progress)


def model_of(options: SpecGuardOptions, source: Source) -> engines.Reference | Engine:
    """Return what the options name for a role: an engine, a file or a known model."""
    model = options.draft if source is Source.DRAFT else options.target
    if model is None:
        pair = find_pair(options.pair)
        return pair.draft if source is Source.DRAFT else pair.target
    if isinstance(model, str | os.PathLike | Engine):
        return model
    raise ConfigurationError(
        f"{source} must be a model's name, a file, a folder, an openai:// URL or an Engine, not "
        f"{type(model).__name__}"
    )


def engine_name(options: SpecGuardOptions, source: Source) -> str:
    """Return the name of a role's engine, whether or not it is loaded."""
    model = model_of(options, source)
    return model.name if isinstance(model, Engine) else engines.name_of(model)


def reader_of(options: SpecGuardOptions) -> VerifyWith | None:
    """Return whose attention grounding is read from, None if nobody's.

    That is the model whose confidence is judged, if it can show its attention, else the other one.
    """
    if options.confidence_weight == 1 or options.method == "speculative":
        return None
    for role in sorted(get_args(VerifyWith), key=lambda role: role != options.verify_with):
        if _shows_attention(model_of(options, Source(role))):
            return cast("VerifyWith", role)
    return None


def _shows_attention(model: engines.Reference | Engine) -> bool:
    if isinstance(model, Engine):
        return model.capabilities.attention
    return kind_of(model) != "openai"


def _shows_states(options: SpecGuardOptions, source: Source) -> bool:
    """Whether a value head reads what the model of this role computes."""
    model = model_of(options, source)
    if isinstance(model, Engine) or kind_of(model) == "openai":  # it is as it is
        return False
    best_of_n = options.decoder.endswith("-best-of-n")
    rates = best_of_n or options.method == "rsd" or options.value_weight > 0
    writer = options.roles[0] if best_of_n else Source.DRAFT
    return (
        rates
        and (source is writer or _one_model(options))  # one model is one engine
        and is_value_head(options, engines.name_of(model))
    )


def _one_model(options: SpecGuardOptions) -> bool:
    """Whether the draft and the target are the same model."""
    draft, target = (model_of(options, source) for source in Source)
    if isinstance(draft, Engine) or isinstance(target, Engine):
        return draft is target
    return engines.same_model(draft, target)


def _leaves(options: SpecGuardOptions) -> int:
    """Return how many branches the tree of speculative decoding has."""
    speculates = options.method == "speculative" or options.speculate_rewrites
    return prod(options.speculative_tree or ()) if speculates else 1
