"""`./flashnext up, status, logs, down` as a person types them: with Docker and no card, and without Docker at all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
import uuid
from pathlib import Path

import pytest

from build import host
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


def launcher(*words: str, env: dict[str, str], timeout_s: int = 600) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FLASHNEXT_") or k.startswith("FLASHNEXT_TEST_")}
    return subprocess.run(
        [sys.executable, str(ROOT / "flashnext"), *words],
        cwd=ROOT,
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )


def ask(printed: str) -> dict:
    """Send the very request that `up` printed."""
    url, body = re.search(r"^curl (\S+) .*-d '(.*)'$", printed, re.MULTILINE).groups()
    request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_up_status_logs_down_with_docker_and_no_card(engine, cpu_base_image, base_image):
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has cards")
    env = {
        "FLASHNEXT_PROJECT": f"fn-{uuid.uuid4().hex[:8]}",
        "FLASHNEXT_PORT": str(free_port()),
        "FLASHNEXT_DEMO_IMAGE": "flashnext-test-launcher:1",
        "FLASHNEXT_PYTHON_IMAGE": base_image,
    }
    began = time.monotonic()
    up = launcher("up", env=env)
    try:
        assert up.returncode == 0, up.stderr + up.stdout
        assert time.monotonic() - began < 600
        assert "running the CPU demo" in up.stderr and "a real token came back" in up.stderr
        assert ask(up.stdout)["usage"]["completion_tokens"] >= 1
        status = launcher("status", "--json", env=env)
        row = json.loads(status.stdout)[0]
        assert status.returncode == 0 and (row["service"], row["health"], row["phase"]) == (
            "demo",
            "healthy",
            "serving",
        )
        assert "Application startup complete" in launcher("logs", env=env).stdout
        again = launcher("up", env=env)
        assert again.returncode == 0 and "Serving demo" in again.stdout
    finally:
        down = launcher("down", "--volumes", env=env)
    assert down.returncode == 0
    assert launcher("status", env=env).returncode == 1
    engine.images.remove("flashnext-test-launcher:1", force=True)


def test_a_mistake_reaches_the_user_with_its_code(engine, cpu_base_image, base_image):
    env = {"FLASHNEXT_PROJECT": f"fn-{uuid.uuid4().hex[:8]}", "FLASHNEXT_STREAMS": "many"}
    done = launcher("up", env=env)
    assert done.returncode == 2
    assert [line.split(":")[0] for line in done.stderr.strip().splitlines()[-2:]] == ["ERROR", "Fix"]


def test_what_prepare_tells_is_passed_on_while_compose_starts(engine, base_image, monkeypatch, capsys):
    """A container as compose labels `prepare`'s; compose itself, which would need cards here, is what waits for it."""
    project = f"fn-{uuid.uuid4().hex[:8]}"
    labels = {"com.docker.compose.project": project, "com.docker.compose.service": "prepare"}
    words = "for n in 1 2 3; do echo flashnext: table: $n of 3 >&2; echo noise; sleep 1; done; echo other >&2"
    seen = []

    def compose(*words_, capture):
        running = engine.containers.run(base_image, ["sh", "-c", words], labels=labels, detach=True)
        try:
            while engine.containers.get(running.id).status != "exited":
                time.sleep(0.2)
            time.sleep(2.5)  # a turn of the loop
            return subprocess.CompletedProcess(words_, 0, "", "")
        finally:
            seen.append(capsys.readouterr().err)
            running.remove(force=True)

    monkeypatch.setattr(host, "_config", lambda: {"name": project})
    monkeypatch.setattr(host, "_compose", compose)
    assert host._start(engine, "server").returncode == 0
    told = [f"flashnext: table: {n} of 3" for n in (1, 2, 3)]
    assert seen[0].splitlines() == told, "before compose came back"
    assert capsys.readouterr().err == ""


def test_up_and_down_without_docker():
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has cards")
    env = {"DOCKER_HOST": "unix:///nowhere.sock", "FLASHNEXT_PORT": str(free_port())}
    up = launcher("up", env=env)
    try:
        assert up.returncode == 0, up.stderr + up.stdout
        assert "with Docker you would get" in up.stderr
        assert ask(up.stdout)["usage"]["completion_tokens"] >= 1
        status = launcher("status", env=env)
        assert status.returncode == 0 and "as planned: 2 figures" in status.stdout
        twice = launcher("up", env=env)
        assert twice.returncode == 2 and "running already" in twice.stderr
    finally:
        down = launcher("down", env=env)
    assert (down.returncode, down.stdout.strip()) == (0, "stopped")


@pytest.mark.parametrize("words, code", [((), 2), (("up", "--frob"), 2), (("help",), 0), (("image", "frob"), 2)])
def test_usage(words, code):
    done = launcher(*words, env={})
    assert done.returncode == code and "Traceback" not in done.stderr
