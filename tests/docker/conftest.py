"""A real Docker Engine, a real registry and the images that the tests under tests/docker start from.

What is already there is used: the engine of DOCKER_HOST (or the default one), images by their tags, programs on PATH.
What is missing is brought, as root on Debian with the scripts of a folder `shared` beside the clone (FLASHNEXT_SHARED
names another). Where that cannot be done the tests skip and say why; with CI set they fail instead, because a green run
that skipped its subject says nothing.

Environment: FLASHNEXT_SHARED, FLASHNEXT_TEST_ENGINE (folder of an engine that these tests may install, start and stop),
FLASHNEXT_TEST_BASE (a Debian 12 image with Python 3.11), FLASHNEXT_TEST_CPU_BASE (a ready CPU base).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import docker.errors
import pytest

from build.engine import connect
from build.errors import Refusal
from build.image import CPU_BASE_TAG, INPUTS_LABEL, inputs_digest

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("FLASHNEXT_SHARED") or ROOT.parent / "shared")
ENGINE_FOLDER = Path(os.environ.get("FLASHNEXT_TEST_ENGINE") or "/var/lib/flashnext-test-engine")
PUBLIC_BASE = "python:3.11-slim-bookworm"
STANDIN_BASE = "standin-base:bookworm"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.docker)


def unavailable(reason: str) -> None:
    """Skip, loudly; fail in CI."""
    if os.environ.get("CI"):
        pytest.fail(f"in CI these tests must run: {reason}", pytrace=False)
    pytest.skip(f"NO DOCKER TESTS RAN HERE: {reason}", allow_module_level=True)


def need_program(name: str, package: str) -> str:
    """Path of a program; its Debian package is installed if it is missing and that is possible."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    if not shutil.which(name, path=path):
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            unavailable(f"{name} is not installed (Debian package {package}), and only root on Debian can change that")
        quiet = {
            "check": True,
            "stdout": subprocess.DEVNULL,
            "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        }
        subprocess.run(["apt-get", "-qq", "update"], **quiet)
        subprocess.run(["apt-get", "-qq", "install", "-y", "--no-install-recommends", package], **quiet)
    found = shutil.which(name, path=path)
    assert found, f"package {package} brought no {name}"
    return found


@pytest.fixture(scope="session")
def engine(tmp_path_factory) -> Iterator[docker.DockerClient]:
    """A client of a running engine; DOCKER_HOST, PATH and the CLI's plugins are set so that `docker` means the same."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        socket_path = ENGINE_FOLDER / "engine.sock"
        try:
            client = connect()
        except Refusal as refusal:
            _use_own_engine(refusal, socket_path, stack)
            patch.setenv("DOCKER_HOST", f"unix://{socket_path}")
            patch.setenv("PATH", f"{ENGINE_FOLDER}/engine/usr/bin:{os.environ['PATH']}")
            plugins = ENGINE_FOLDER / "engine/usr/libexec/docker/cli-plugins"
            config = tmp_path_factory.mktemp("docker-config") / "config.json"
            config.write_text(json.dumps({"cliPluginsExtraDirs": [str(plugins)]}))
            patch.setenv("DOCKER_CONFIG", str(config.parent))
            client = connect()
        if not shutil.which("docker"):
            unavailable("an engine answers, but the `docker` command is not on PATH")
        yield client
        client.close()


def _use_own_engine(refusal: Refusal, socket_path: Path, stack: contextlib.ExitStack) -> None:
    """Make an engine answer at `socket_path`; one that we started is stopped at the session's end, its data stay."""
    scripts = SHARED / "docker"
    why_not = [f"{refusal.message};"]
    if not (scripts / "start-engine.sh").is_file():
        why_not.append(f"no {scripts}/start-engine.sh to start one with")
    elif os.geteuid() != 0:
        why_not.append("only root can start one")
    if len(why_not) > 1:
        unavailable(" ".join(why_not))
    for program, package in (("runc", "runc"), ("tini-static", "tini"), ("iptables", "iptables")):
        need_program(program, package)
    installed = ENGINE_FOLDER / "engine"
    if not (installed / "usr/sbin/dockerd").exists():
        ENGINE_FOLDER.mkdir(parents=True, exist_ok=True)
        # forky's compose and engine are the ones the compose file is written for
        subprocess.run([scripts / "install-docker.sh", installed, "forky"], check=True)
    data = ENGINE_FOLDER / "data"
    subprocess.run([scripts / "start-engine.sh", installed, data, socket_path], check=True)
    stack.callback(_stop_engine, data / "dockerd.pid")


def _stop_engine(pid_file: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
        for _ in range(150):
            os.kill(pid, 0)
            time.sleep(0.1)


@dataclasses.dataclass(frozen=True)
class Tool:
    """`python -m build` as a user runs it, from the repository's root."""

    def __call__(self, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "build", *map(str, words)],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
        )

    def json(self, *words: str, env: dict[str, str] | None = None) -> dict:
        """Run with --json; the answer of a run that must succeed."""
        answer = self(*words, "--json", env=env)
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)


@pytest.fixture(scope="session")
def tool(engine) -> Tool:
    return Tool()


@pytest.fixture(scope="session")
def base_image(engine) -> str:
    """A small Debian 12 with Python 3.11, by a tag that is in the engine."""
    named = os.environ.get("FLASHNEXT_TEST_BASE")
    for tag in [named] if named else [PUBLIC_BASE, STANDIN_BASE]:
        with contextlib.suppress(docker.errors.ImageNotFound):
            engine.images.get(tag)
            return tag
    with contextlib.suppress(docker.errors.APIError):
        engine.images.pull(named or PUBLIC_BASE)
        return named or PUBLIC_BASE
    script = SHARED / "docker" / "mkbase.sh"
    if named or not script.is_file() or os.geteuid() != 0:
        unavailable(f"{named or PUBLIC_BASE} is neither here nor to be pulled, and there is no way to make a stand-in")
    need_program("mmdebstrap", "mmdebstrap")
    subprocess.run([script, STANDIN_BASE], check=True)
    return STANDIN_BASE


@pytest.fixture(scope="session")
def cpu_base_image(engine, tool, base_image) -> str:
    """The CPU base, built if there is none from these very inputs (3 minutes; nothing to do afterwards)."""
    named = os.environ.get("FLASHNEXT_TEST_CPU_BASE")
    if named:
        engine.images.get(named)
        return named
    wanted = inputs_digest(base_image, ROOT / "build/cpu-base/Dockerfile", ROOT / "build/locks/cpu-base.txt")
    with contextlib.suppress(docker.errors.ImageNotFound):
        if engine.images.get(CPU_BASE_TAG).labels.get(INPUTS_LABEL) == wanted:
            return CPU_BASE_TAG
    with _replacing(engine, CPU_BASE_TAG):
        tool.json("cpu-base", "--base", base_image)
    return CPU_BASE_TAG


@contextlib.contextmanager
def _replacing(engine: docker.DockerClient, tag: str) -> Iterator[None]:
    """The image that had `tag` before the body, and has none after it, is removed."""
    old = next((image.id for image in engine.images.list(name=tag)), None)
    yield
    with contextlib.suppress(docker.errors.APIError):
        if old and not engine.images.get(old).tags:
            engine.images.remove(old)


@pytest.fixture(scope="session")
def server_image(engine, tool, cpu_base_image) -> str:
    """The real image on the CPU base, from this tree (seconds if nothing changed)."""
    tag = "flashnext-test-server:1"
    with _replacing(engine, tag):
        tool.json("build", "--base", cpu_base_image, "--tag", tag)
    return tag


@dataclasses.dataclass(frozen=True)
class Registry:
    """A registry of our own: `address` is 127.0.0.1:PORT, `data` what it stores."""

    address: str
    data: Path


@pytest.fixture(scope="session")
def registry(engine, tmp_path_factory) -> Iterator[Registry]:
    """A real registry on a free port, its data in a temporary folder."""
    program = need_program("docker-registry", "docker-registry")
    folder = tmp_path_factory.mktemp("registry")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = {
        "version": "0.1",
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}, "delete": {"enabled": True}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    (folder / "config.yml").write_text(json.dumps(config))
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([program, "serve", folder / "config.yml"], stdout=log, stderr=log)
        try:
            _wait_for_registry(server, port, folder / "log")
            yield Registry(f"127.0.0.1:{port}", folder / "data")
        finally:
            server.terminate()
            server.wait(timeout=10)


def _wait_for_registry(server: subprocess.Popen, port: int, log: Path) -> None:
    for _ in range(100):
        assert server.poll() is None, f"the registry ended at once: {log.read_text()[-500:]}"
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=1):
            return
        time.sleep(0.1)
    pytest.fail(f"the registry does not answer: {log.read_text()[-500:]}")


@pytest.fixture
def unique_name(engine) -> Iterator[str]:
    """A repository name nobody has; local images under it, or left without a name meanwhile, are removed afterwards."""
    name = f"flashnext-test-{uuid.uuid4().hex[:12]}"
    nameless = {"dangling": True}
    before = {image.id for image in engine.images.list(filters=nameless)}
    yield name
    mine = [ref for image in engine.images.list() for ref in (*image.tags, *image.attrs["RepoDigests"]) if name in ref]
    for ref in mine:
        with contextlib.suppress(docker.errors.APIError):
            engine.images.remove(ref, force=True)
    for image in engine.images.list(filters=nameless):
        if image.id not in before:
            with contextlib.suppress(docker.errors.APIError):
                engine.images.remove(image.id)
