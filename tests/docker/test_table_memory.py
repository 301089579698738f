"""A table several times larger than what the cgroup allows never pushes the process over it: under a Docker memory limit.

The engine's Python of the image makes a table of 1.5 GiB in one container, out of the page cache when it is done (pages that
are in it already would be charged to nobody), and in another one, of 512 MiB without swap, gathers 600,000 random rows from
it with the engine's own code. What the kernel counted is read in the container, before it ends.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.docker.conftest import unavailable

SUPPORT = Path(__file__).resolve().parents[1] / "support"
PYTHON = "/opt/vllm/bin/python"
LIMIT_BYTES = 512 << 20
ROWS = 5_033_165  # 1.5 GiB
STEPS, STEP_ROWS = 73, 8_192
NEEDED_BYTES = 3_000_000_000

WRITE = "import sys; from pathlib import Path; import large_table; large_table.write(Path('/table'), int(sys.argv[1]))"

GATHER = r"""
import json, resource, sys
from pathlib import Path
import numpy as np
from flashnext import table_store
from flashnext.table_gather import Gatherer
from large_table import COLUMNS, ROW_BYTES, rows_of

rows, steps, step_rows = map(int, sys.argv[1:])


def counted():
    # What the kernel counted for this container so far, in the words of cgroup v2.
    two = Path("/sys/fs/cgroup")
    if (two / "memory.events").exists():
        events = dict(line.split() for line in (two / "memory.events").read_text().splitlines())
        peak = two / "memory.peak"
        return {"version": 2, "limit": int((two / "memory.max").read_text()), "oom": int(events["oom"]),
                "oom_kill": int(events["oom_kill"]), "current": int((two / "memory.current").read_text()),
                "peak": int(peak.read_text()) if peak.exists() else None}
    one = two / "memory"
    control = dict(line.split() for line in (one / "memory.oom_control").read_text().splitlines())
    number = lambda name: int((one / name).read_text())
    return {"version": 1, "limit": number("memory.limit_in_bytes"), "oom": int(control["under_oom"]),
            "oom_kill": int(control["oom_kill"]), "current": number("memory.usage_in_bytes"),
            "peak": number("memory.max_usage_in_bytes")}


def read_bytes():
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


table = table_store.open_checkpoint("/table", "layers.1.", rows, COLUMNS)
gatherer = Gatherer(table)
draw = np.random.default_rng(5)
out = np.empty((step_rows, ROW_BYTES), np.uint8)
before, read = counted(), read_bytes()
wrong = 0
for _ in range(steps):
    ids = draw.integers(0, rows, step_rows)
    gatherer.gather(ids, out)
    wrong += int((out != rows_of(ids)).any(axis=1).sum())
print(json.dumps({"before": before, "after": counted(), "read": read_bytes() - read, "wrong rows": wrong,
                  "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


@pytest.fixture
def folder(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    if free < NEEDED_BYTES:
        unavailable(f"{tmp_path} has {free:,} bytes free, and the table of this test needs {NEEDED_BYTES:,}")
    made = tmp_path / "table"
    made.mkdir()
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


def run(engine, image: str, code: str, *words: object, table: Path, mode: str, **limits: object) -> str:
    """Output of `code` in the engine's Python of the image. A killed or failed run is a ContainerError."""
    volumes = {str(table): {"bind": "/table", "mode": mode}, str(SUPPORT): {"bind": "/support", "mode": "ro"}}
    return engine.containers.run(
        image,
        ["-c", code, *map(str, words)],
        entrypoint=PYTHON,
        environment={"PYTHONPATH": "/support", "PYTHONDONTWRITEBYTECODE": "1"},
        volumes=volumes,
        network_mode="none",
        remove=True,
        **limits,
    ).decode()


def test_table_three_times_the_limit(engine, server_image, folder):
    run(engine, server_image, WRITE, ROWS, table=folder, mode="rw")
    assert sum(file.stat().st_blocks * 512 for file in folder.iterdir()) >= 3 * LIMIT_BYTES, "not sparse"
    said = run(
        engine, server_image, GATHER, ROWS, STEPS, STEP_ROWS, table=folder, mode="ro",
        mem_limit=LIMIT_BYTES, memswap_limit=LIMIT_BYTES,
    )  # fmt: skip
    seen = json.loads(said.splitlines()[-1])
    print(seen)
    after = seen["after"]
    assert after["limit"] == LIMIT_BYTES, "the engine set no memory limit, so this proves nothing"
    assert seen["wrong rows"] == 0
    # Read from the disk into a container that may hold a quarter of it, and that was full: pages were taken back for others.
    assert seen["read"] > 3 * LIMIT_BYTES
    assert (after["peak"] or after["current"]) > 0.95 * LIMIT_BYTES
    assert (after["oom"], after["oom_kill"]) == (0, 0)
    assert after["current"] <= LIMIT_BYTES and (after["peak"] or 0) <= LIMIT_BYTES
