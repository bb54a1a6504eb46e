"""What can be shown of a run of `specguard bench`: figures, and results without any text.

    python benchmarks/publish.py bench docs/evidence/bench

Beside the reports there are settings.json and results.jsonl.gz, which holds no text of problems or
answers, nor what was taken from one. Unpacked (`gunzip --keep results.jsonl.gz`), the folder is a
run that the same command goes on with, on another machine too.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
from dataclasses import asdict
from pathlib import Path

from specguard_chains.evaluation import report, summary
from specguard_chains.evaluation.folder import RESULTS, SETTINGS, read_results
from specguard_chains.evaluation.results import Result
from specguard_chains.evaluation.settings import RunSettings

SHOWN = ("summary.json", "problems.csv", "report.md", "report.html", "accuracy.svg")


def textless(result: Result) -> str:
    """Return a line of a result without what was written."""
    return json.dumps(result.to_dict() | {"text": "", "extracted": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    summary.summarise(given.run)
    summary.per_problem(given.run)
    report.write(given.run)
    for name in SHOWN:
        if (given.run / name).exists():
            shutil.copyfile(given.run / name, given.out / name)
    settings = RunSettings.load(given.run / SETTINGS)
    public = [each.public() for each in settings.invocations]
    content = json.dumps(asdict(settings) | {"invocations": public}, indent=1)
    (given.out / SETTINGS).write_text(content + "\n", encoding="utf-8")
    content = "".join(f"{textless(result)}\n" for result in read_results(given.run))
    # Without a time, so that equal results are equal files.
    (given.out / f"{RESULTS}.gz").write_bytes(gzip.compress(content.encode(), mtime=0))


if __name__ == "__main__":
    main()
