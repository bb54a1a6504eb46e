"""The most memory that this process has held at once.

It is the resident set: also the pages of model files that are mapped into memory, and everything
that the process has loaded for others, such as the models of an evaluation's other arms. Swapped
pages and a GPU's memory are not in it. Figures of one run can be compared with each other; the
memory that a decoder needs by itself is that of a run with it alone.
"""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

PROCESS = Path("/proc/self")
RESET_PEAK = "5"


def reset_peak() -> None:
    """Measure anew from here on, where the system allows it (Linux), else go on."""
    with suppress(OSError):
        (PROCESS / "clear_refs").write_text(RESET_PEAK)


def peak_rss_mb() -> float:
    """Return the peak since `reset_peak`, where it has no effect since the start, in 10^6 bytes."""
    with suppress(OSError):
        for line in (PROCESS / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
