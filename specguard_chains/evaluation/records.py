"""Records of problems in a file that runs go on with: whose they are, and of what settings.

Beside the files of a folder stands settings.json, which says for each of them what its records
depend on. Records of other settings are never mixed in, nor are those of another problem that has
the same id.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict

from specguard_chains.decoding.engine import Engine
from specguard_chains.decoding.steps import Source
from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.lines import Lines, open_lines
from specguard_chains.evaluation.problems import Problem
from specguard_chains.evaluation.whole_files import replace_file
from specguard_chains.models import ModelFile
from specguard_chains.options import SpecGuardOptions
from specguard_chains.roles import model_of

SETTINGS = "settings.json"
Settings = Mapping[str, Any]
"""By name, what records depend on; values of JSON's own types."""


class ProblemKey(NamedTuple):
    """What tells a problem from all others; ids are unique within a data set alone."""

    data: str
    problem: str
    digest: str
    """Of what is asked and of the answer: there may be other files of that name."""

    @classmethod
    def of(cls, problem: Problem) -> ProblemKey:
        """Return the key of a problem."""
        return cls(problem.data, problem.id, problem.digest)


class ProblemRecord(BaseModel):
    """What was found out about a problem, and which one it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    problem: str
    """Its id."""
    data: str
    digest: str

    @property
    def key(self) -> ProblemKey:
        """Which problem it is."""
        return ProblemKey(self.data, self.problem, self.digest)


Record = TypeVar("Record", bound=ProblemRecord)


@dataclass(frozen=True, slots=True)
class RecordFile(Generic[Record]):
    """A file of records, each a line, all made with the same settings."""

    path: Path
    kind: type[Record]
    settings: Settings
    option: str
    """The command-line option that names the folder."""

    def check(self) -> None:
        """Refuse to go on with records of other settings, at a time when nothing is done yet.

        Raises:
            EvaluationError: There are some; the message names each difference.
        """
        if not self.path.is_file() or not self.path.stat().st_size:
            return
        known = self._known().get(self.path.name)
        if known is None:
            raise EvaluationError(
                f"{self.path} has records, but no {SETTINGS} beside it says how they came about; "
                f"choose another folder ({self.option})"
            )
        new = _plain(self.settings)
        found = [
            f"{name} is {new.get(name)!r}, there {known.get(name)!r}"
            for name in dict.fromkeys((*new, *known))
            if new.get(name) != known.get(name)
        ]
        if found:
            raise EvaluationError(
                f"{self.path} has records of other settings: {'; '.join(found)}. Choose another "
                f"folder ({self.option}), or the settings that these records have; without the "
                "file its records are made anew"
            )

    @contextmanager
    def opened(self) -> Iterator[Lines[Record]]:
        """Give the file to add to; its folder is locked meanwhile.

        Raises:
            EvaluationError: It has records of other settings, is in use, or is damaged.
        """
        self.check()  # before lines of an older form are read, which would be called damaged
        with open_lines(self.path, self.kind.model_validate_json) as lines:
            self.check()
            self._settle()
            yield lines

    def _settle(self) -> None:
        content = self._known() | {self.path.name: _plain(self.settings)}
        replace_file(self.path.parent / SETTINGS, json.dumps(content, indent=1) + "\n")

    def _known(self) -> dict[str, dict[str, Any]]:
        """Return the settings of the folder's files by their names."""
        path = self.path.parent / SETTINGS
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
            return {str(name): dict(settings) for name, settings in plain.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise EvaluationError(
                f"{path} does not hold the settings of records ({error!r}); choose another folder "
                f"({self.option})"
            ) from error


def models_of(options: SpecGuardOptions, roles: Sequence[Source]) -> dict[str, Any]:
    """Return what records depend on of the models that write them: which, and how they compute.

    How many threads compute decides when a record is there, not what is in it.
    """
    models = {str(role): _name(model_of(options, role)) for role in roles}
    return models | {"n_ctx": options.n_ctx, "n_gpu_layers": options.n_gpu_layers}


def sampling_of(options: SpecGuardOptions) -> dict[str, Any]:
    """Return what drawn texts depend on."""
    return asdict(options.sampling()) | {"seed": options.seed or 0}


def _name(model: str | os.PathLike[str] | ModelFile | Engine) -> str:
    return model.name if isinstance(model, ModelFile | Engine) else os.fspath(model)


def _plain(settings: Settings) -> dict[str, Any]:
    """Return settings as they come back from JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(settings)))
    return plain
