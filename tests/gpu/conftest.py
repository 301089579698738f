"""Where the experiments of this folder run, and the loud reason where they cannot.

FLASHNEXT_GPU_SITE names the folder that holds the patched vllm/ and flashnext/ (in the image: its Python's site-packages;
default: where this Python imports vllm from). FLASHNEXT_GPU_WORK keeps checkpoints and compiled kernels between runs.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess

import pytest

from . import experiments


def card_count() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return 0
    return len([line for line in listed.stdout.splitlines() if line.startswith("GPU ")])


def skip(reason: str) -> None:
    pytest.skip(f"GPU TESTS DID NOT RUN: {reason}")


@pytest.fixture(scope="session")
def card_names() -> list[str]:
    count = card_count()
    if not count:
        skip("nvidia-smi lists no card on this machine")
    return [str(n) for n in range(count)]


@pytest.fixture(scope="session")
def place(card_names, tmp_path_factory) -> experiments.Place:
    site = os.environ.get("FLASHNEXT_GPU_SITE")
    if site is None:
        found = importlib.util.find_spec("vllm")
        if found is None or found.origin is None:
            skip("this Python has no vllm; name the patched tree in FLASHNEXT_GPU_SITE")
        site = pathlib.Path(found.origin).parent.parent
    if not (pathlib.Path(site) / "flashnext").is_dir():
        skip(f"{site} has no engine package: apply the series first (python3 patches/apply.py {site})")
    work = os.environ.get("FLASHNEXT_GPU_WORK")
    work = pathlib.Path(work) if work else tmp_path_factory.mktemp("gpu")
    work.mkdir(parents=True, exist_ok=True)
    return experiments.Place(pathlib.Path(site).resolve(), work, work / "logs")
