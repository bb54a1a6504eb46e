"""What can be shown of a run of `specguard bench`: figures, and results without any text.

    python benchmarks/publish.py bench docs/evidence/bench

Beside the reports there are settings.json and results.jsonl.gz, which holds no text of problems or
answers. Unpacked (`gunzip --keep results.jsonl.gz`), the folder is a run that the same command
goes on with, on another machine too.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
from dataclasses import asdict
from pathlib import Path

from specguard_chains.evaluation import report, summary
from specguard_chains.evaluation.folder import RESULTS, SETTINGS
from specguard_chains.evaluation.settings import RunSettings

SHOWN = ("summary.json", "problems.csv", "report.md", "report.html", "accuracy.svg")


def textless(line: str) -> str:
    """Return a result without what was written."""
    return json.dumps(json.loads(line) | {"text": ""})


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
        shutil.copyfile(given.run / name, given.out / name)
    settings = RunSettings.load(given.run / SETTINGS)
    public = [each.public() for each in settings.invocations]
    content = json.dumps(asdict(settings) | {"invocations": public}, indent=1)
    (given.out / SETTINGS).write_text(content + "\n", encoding="utf-8")
    lines = (given.run / RESULTS).read_text(encoding="utf-8").splitlines()
    content = "".join(f"{textless(line)}\n" for line in lines)
    # Without a time, so that equal results are equal files.
    (given.out / f"{RESULTS}.gz").write_bytes(gzip.compress(content.encode(), mtime=0))


if __name__ == "__main__":
    main()
