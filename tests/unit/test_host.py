"""`./flashnext status` of a run without Docker: its state file, its process, and what the healthcheck finds."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from build import host
from entrypoint.boot import StateFile

REPAIRED = [
    "config.json: 3 config groups rebuilt from the weights' shapes",
    "generation_config.json: temperature, top_p restored",
]


@pytest.fixture
def state(tmp_path, monkeypatch):
    """The state file of a run that is alive: a process with our name in its command line, and nobody at its port."""
    monkeypatch.setattr(host, "LOCAL", tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        file = StateFile(tmp_path, "127.0.0.1", free.getsockname()[1])
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", "entrypoint"], stdin=subprocess.PIPE
    )
    file.update("loading", pid=child.pid)
    yield file
    child.communicate()


@pytest.mark.parametrize("repaired", [[], REPAIRED[:1], REPAIRED])
def test_status_says_what_was_repaired(state, capsys, repaired):
    state.update(repaired=repaired)
    assert host.main(["status"]) == 1  # no token can be had yet
    line = capsys.readouterr().out.strip()
    assert line.startswith("demo (no Docker)  running  loading weights  starting")
    assert [part for part in line.split("  ") if "repaired" in part] == (
        ["; ".join(f"repaired: {words}" for words in repaired)] if repaired else []
    )
    assert host.main(["status", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert row["repaired"] == ("; ".join(f"repaired: {words}" for words in repaired) or None)
    assert list(row) == ["service", "state", "phase", "health", "detail", "repaired", "startup"]
    assert (row["service"], row["phase"], row["startup"]) == ("demo (no Docker)", "loading weights", None)
