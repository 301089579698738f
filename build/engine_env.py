"""Makes the CPU engine's environment, .flashnext/engine: vLLM 0.30.0 for the CPU, as build/cpu-base has it, without Docker.

Used by the demo where there is no Docker, and by the engine tests (`extras`). Pinned by locks/cpu-base.txt; made anew when a lock
changes; built under another name and renamed, so a broken download never looks whole.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .errors import Exit, Refusal
from .image import REPOSITORY, find_links_folders

PYTHON = "3.11"  # what the lock was resolved for


def _run(step: list[str], what: str) -> None:
    done = subprocess.run(step, capture_output=True, text=True)
    if done.returncode:
        last = ((done.stderr.strip() or done.stdout.strip()).splitlines() or ["no output"])[-1]
        raise Refusal(
            f"{what} failed: {last}", "check the network and the free disk space, then try again", Exit.DOCKER
        )


def _uv() -> str:
    found = Path(sys.executable).with_name("uv")
    return str(found) if found.exists() else shutil.which("uv") or "uv"


def ensure(root: Path = REPOSITORY, extras: Path | None = None) -> Path:
    """The Python of the engine environment, made where need be. `extras` is a further requirements file.

    Raises Refusal (code 8). Takes a torch wheel from pip's find-links folders where there is one (PIP_FIND_LINKS), else the CPU
    build from PyTorch's own index, which uv knows.
    """
    home = root / ".flashnext" / ("engine-test" if extras else "engine")
    locks = [root / "build" / "locks" / "cpu-base.txt", *([extras] if extras else [])]
    want = hashlib.sha256(b"\0".join(p.read_bytes() for p in locks)).hexdigest()
    marker, python = home / "lock.sha256", home / "bin" / "python"
    if marker.is_file() and marker.read_text() == want and python.exists():
        return python
    sys.stderr.write(f"flashnext: installing vLLM 0.30.0 for the CPU into .flashnext/{home.name} (once, 2.2 GB)\n")
    shutil.rmtree(home, ignore_errors=True)
    try:
        _run([_uv(), "venv", "--quiet", "--python", PYTHON, str(home)], f"making a Python {PYTHON} environment")
        wheels = [f for f in find_links_folders(os.environ) if any(f.glob("torch-*+cpu-*.whl"))]
        source = [w for f in wheels for w in ("--find-links", str(f))] or ["--torch-backend=cpu"]
        _run(
            [
                _uv(),
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                *source,
                "--python",
                str(python),
                *(w for p in locks for w in ("-r", str(p))),
            ],
            "installing the CPU engine",
        )
        site = next((home / "lib").glob("python3.*")) / "site-packages"
        # vLLM asks for the version of the distribution `vllm`, and takes the CPU platform by the `+cpu` in it.
        info = site / "vllm-0.30.0+cpu.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.30.0+cpu\n")
        if not extras:
            _run([str(python), str(root / "patches" / "apply.py"), str(site)], "applying the patch series")
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    marker.write_text(want)
    return python
