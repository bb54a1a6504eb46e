"""Where the commands write: results to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

OUT = Console(highlight=False, markup=False)
ERR = Console(highlight=False, markup=False, stderr=True)


def print_json(value: dict[str, Any]) -> None:
    """Print a value as one line, at once."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
