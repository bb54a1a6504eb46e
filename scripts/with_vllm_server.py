"""Run a command beside a vLLM server of its own, which is stopped when the command ends.

    python scripts/with_vllm_server.py -- python -m pytest tests/integration_tests/test_vllm.py

The command finds the server in SPECGUARD_VLLM_URL and its key in OPENAI_API_KEY. If
SPECGUARD_VLLM_URL is set already, that server is used and none is started.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import vllm_environment

from specguard_chains.models import cache_folder, find_file, resolve

REPOSITORY = Path(__file__).resolve().parents[1]
URL = "SPECGUARD_VLLM_URL"
HOST = "127.0.0.1"
STOP_TIMEOUT_S = 20.0

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_HOST_IP": HOST,
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> int:
    """Return the command's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-coder-0.5b-instruct", help="a known model")
    parser.add_argument("--environment", type=Path, default=REPOSITORY / ".venv-vllm")
    parser.add_argument("--max-model-len", type=int, default=1024, help="tokens of the context")
    parser.add_argument("--start-timeout-s", type=float, default=600.0)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if os.environ.get(URL):
        return subprocess.run(options.command).returncode
    python = vllm_environment.prepare(options.environment)
    folder = convert(options.model, python)
    key = secrets.token_urlsafe()
    port = free_port()
    log = options.environment / "server.log"
    arguments = ["--served-model-name", options.model, "--max-model-len", options.max_model_len]
    with serve(python, folder, port, key, arguments, log) as server:
        wait_until_ready(server, port, options.start_timeout_s, log)
        found = {URL: f"openai://{HOST}:{port}/{options.model}", "OPENAI_API_KEY": key}
        return subprocess.run(options.command, env=os.environ | found).returncode


def convert(model: str, python: Path) -> Path:
    """Return the folder of a known model in vLLM's format, made once from its GGUF file."""
    folder = cache_folder() / f"{find_file(model).name}-bfloat16"
    if not folder.exists():
        gguf = resolve(model)
        print(f"Converting {gguf.name} …", flush=True)
        script = REPOSITORY / "scripts" / "gguf_to_safetensors.py"
        subprocess.run([python, script, gguf, folder], check=True)
    return folder


@contextmanager
def serve(
    python: Path, folder: Path, port: int, key: str, arguments: list[object], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the server in a process group of its own, and end the whole group afterwards."""
    # The command `vllm` asks for the version of a package of that name, which vllm-cpu is not.
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    command += ["--host", HOST, "--port", port, "--dtype", "bfloat16", "--enforce-eager"]
    command += ["--max-num-seqs", 16, *arguments]
    with log.open("wb") as output:
        server = subprocess.Popen(
            [str(part) for part in command],
            env=os.environ | SETTINGS | {"VLLM_API_KEY": key},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )
    try:
        yield server
    finally:
        stop(server)


def end_with_parent() -> None:
    """Ask Linux to end this process when its parent dies, even by SIGKILL."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server, politely at first, and every process that it has started."""
    server.terminate()
    try:
        server.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print(f"vLLM did not stop within {STOP_TIMEOUT_S:g} s and is killed.", file=sys.stderr)
    with suppress(ProcessLookupError):  # nothing is left of the group
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def wait_until_ready(
    server: subprocess.Popen[bytes], port: int, timeout_s: float, log: Path
) -> None:
    """Return once the server answers.

    Raises:
        SystemExit: It has ended, or does not answer in time.
    """
    print(f"Starting vLLM on {HOST}:{port} (about a minute); log: {log}", flush=True)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"vLLM ended with status {server.returncode}:\n{tail(log)}")
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"vLLM does not answer after {timeout_s:g} s:\n{tail(log)}")


def tail(log: Path, lines: int = 30) -> str:
    """Return the last lines of the log."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
