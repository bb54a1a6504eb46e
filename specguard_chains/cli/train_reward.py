"""`specguard train-reward`: a value head for a draft, from its own solutions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from specguard_chains import value_heads
from specguard_chains.cli.failures import UsageError, reports_errors
from specguard_chains.cli.problem_parameters import Avoid, Limit, Skip, TrainingData
from specguard_chains.cli.progress import problems_bar
from specguard_chains.cli.settings import takes_options
from specguard_chains.cli.streams import ERR, OUT
from specguard_chains.cli.training_problems import training_problems
from specguard_chains.console import fetch_progress
from specguard_chains.decoding.engine import Engine
from specguard_chains.decoding.local_engine import LocalEngine
from specguard_chains.decoding.steps import Source
from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.checking import AnswerChecker
from specguard_chains.evaluation.problems import Problem, data_name, prompt_for
from specguard_chains.evaluation.records import (
    ProblemKey,
    RecordFile,
    models_of,
    sampling_of,
)
from specguard_chains.evaluation.solutions import Sampler, Solutions
from specguard_chains.evaluation.training import Examples, Trained, read_states, train
from specguard_chains.options import SpecGuardOptions
from specguard_chains.roles import load_engine

MAX_TOKENS = 400
SOLUTIONS = "solutions.jsonl"


@reports_errors
@takes_options(
    *("pair", "draft", "n_ctx", "n_threads", "n_gpu_layers", "max_tokens", "seed"),
    *("temperature", "top_p"),
    max_tokens=MAX_TOKENS,
    seed=0,
    n_ctx=2048,
)
def train_reward(
    options: SpecGuardOptions,
    data: TrainingData,
    work: Annotated[
        Path,
        typer.Option(
            metavar="folder", help="Where solutions are kept; a later run goes on with them."
        ),
    ],
    samples: Annotated[int, typer.Option(min=1, max=64, help="Solutions of each problem.")] = 8,
    limit: Limit = None,
    skip: Skip = 0,
    avoid: Avoid = None,
    layer: Annotated[
        int | None,
        typer.Option(
            min=0, help="Layer whose states are read, from 0; by default two thirds of the way up."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="file", help="Where to write; by default where it is looked for."),
    ] = None,
) -> None:
    """Train a value head of the draft, for rsd, best of n and --value-weight.

    The draft samples solutions; a logistic regression on its hidden state at the end of each step
    learns whether the solution ended right. Use problems for training, not the ones that you
    evaluate on.
    """
    file = _file(options, samples, work)
    file.check()
    seed = options.seed or 0
    problems = list(training_problems(data, avoid or [], limit=limit, skip=skip, seed=seed))
    with fetch_progress(ERR) as progress:
        engine = load_engine(
            options,
            Source.DRAFT,
            progress=progress,
            max_candidates=samples,
            candidate_tokens=options.max_tokens or MAX_TOKENS,
            attention=False,
            states=True,
        )
    layer = _layer(engine, layer)
    solutions = _sample(engine, problems, file, samples, options)
    examples = _examples(engine, layer, problems, solutions)
    trained = train(
        examples,
        draft=engine.name,
        layer=layer,
        seed=seed,
        data=[data_name(source) for source in data],
        skip=skip,
        samples=samples,
    )
    path = out or value_heads.own_folder() / value_heads.file_name(engine.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    trained.head.save(path)
    _report(trained, path)


def _file(options: SpecGuardOptions, samples: int, work: Path) -> RecordFile[Solutions]:
    """Return the file of solutions, with what they depend on."""
    limits = {"samples": samples, "max_tokens": options.max_tokens or MAX_TOKENS}
    settings = models_of(options, [Source.DRAFT]) | limits | sampling_of(options)
    return RecordFile(work / SOLUTIONS, Solutions, settings, "--work")


def _layer(engine: Engine, layer: int | None) -> int:
    if not isinstance(engine, LocalEngine):
        raise UsageError(
            f"{engine.name} runs on a server, which gives no hidden states; name a --draft that "
            "runs in this process"
        )
    return layer if layer is not None else 2 * engine.n_layer // 3


def _sample(
    engine: Engine,
    problems: Sequence[Problem],
    file: RecordFile[Solutions],
    samples: int,
    options: SpecGuardOptions,
) -> list[Solutions]:
    """Return the problems' solutions, those that are in the file already and new ones."""
    keys = [ProblemKey.of(problem) for problem in problems]
    with file.opened() as lines, AnswerChecker() as checker:
        known = {solutions.key: solutions for solutions in lines.records}
        missing = [problem for problem, key in zip(problems, keys, strict=True) if key not in known]
        sampler = Sampler(
            engine,
            checker,
            samples,
            options.max_tokens or MAX_TOKENS,
            options.sampling(),
            options.seed or 0,
        )
        with problems_bar("sampling", len(missing)) as advance:
            for problem in missing:
                sampled = sampler.sample(problem)
                known[sampled.key] = sampled
                lines.append(sampled.model_dump_json())
                advance()
    return [known[key] for key in keys]


def _examples(
    engine: Engine, layer: int, problems: Sequence[Problem], solutions: Iterable[Solutions]
) -> Examples:
    states, right, last, keys = [], [], [], []
    with problems_bar("reading", len(problems)) as advance:
        for problem, sampled in zip(problems, solutions, strict=True):
            for state, is_right, is_last in read_states(
                engine, layer, prompt_for(problem), sampled
            ):
                states.append(state)
                right.append(is_right)
                last.append(is_last)
                keys.append(sampled.key)
            advance()
    if not states:
        raise EvaluationError("no solution ended within --max-tokens; raise it")
    return Examples(np.stack(states), np.array(right), tuple(keys), np.array(last))


def _report(trained: Trained, path: Path) -> None:
    facts = trained.head.training
    OUT.print(
        f"{facts['steps']} steps of {facts['solutions']} solutions of {facts['problems']} "
        f"problems, {facts['right']:.0%} right",
        style="bold",
    )
    for name, estimate in (("step", trained.by_step), ("solution", trained.by_solution)):
        if estimate is not None:
            interval = "{:.3f} to {:.3f}".format(*estimate.interval) if estimate.interval else "–"
            OUT.print(
                f"AUROC by {name:8} {estimate.value:.3f} ({interval}), on problems that were not "
                "trained on"
            )
    OUT.print(f"written to {path}", soft_wrap=True)
