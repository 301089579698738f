"""The main job on real input: the image on the CPU base, compose.yaml as it is, a real vLLM, real tokens.

The card service runs here too, as far as a machine without cards can: everything but the cards is real, the limits that a nested
engine may not set are taken out by an override file.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import openai
import pytest

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
KEY = "test-key-1"
# this machine's engine may not raise limits, and has no nvidia driver unless NVIDIA's hook (or a stand-in) is on its PATH
OVERRIDE = "services:\n  prepare: {ulimits: !reset null}\n  server: {ulimits: !reset null}\n"


class Project:
    """One compose project under a name of its own; `env` is what a user's .env would hold."""

    def __init__(self, folder: Path, **env: str):
        self.name = f"fn-{uuid.uuid4().hex[:8]}"
        self.override = folder / "override.yaml"
        self.override.write_text(OVERRIDE)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHNEXT_", "COMPOSE_"))}
        clean.pop("CUDA_VISIBLE_DEVICES", None)
        self.env = {**clean, "FLASHNEXT_PROJECT": self.name, **env}

    def __call__(self, *words: str, check: bool = False, timeout_s: int = 420) -> subprocess.CompletedProcess[str]:
        command = [
            "docker",
            "compose",
            "-f",
            str(ROOT / "compose.yaml"),
            "-f",
            str(self.override),
            "--profile",
            "demo",
            *words,
        ]
        done = subprocess.run(
            command, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )
        assert not check or done.returncode == 0, done.stderr[-3000:] + self.logs()
        return done

    def logs(self, service: str = "") -> str:
        words = ["logs", "--no-log-prefix", *([service] if service else [])]
        done = subprocess.run(
            ["docker", "compose", "-f", str(ROOT / "compose.yaml"), "--profile", "demo", *words],
            cwd=ROOT,
            env=self.env,
            capture_output=True,
            text=True,
        )
        return done.stdout[-6000:] + done.stderr[-2000:]

    def container(self, engine, service: str):
        label = [f"com.docker.compose.project={self.name}", f"com.docker.compose.service={service}"]
        return engine.containers.list(all=True, filters={"label": label})[0]


@pytest.fixture
def project(tmp_path, server_image):
    made: list[Project] = []

    def make(**env: str) -> Project:
        p = Project(
            tmp_path,
            FLASHNEXT_IMAGE=server_image,
            FLASHNEXT_DEMO_IMAGE=server_image,
            FLASHNEXT_PORT=str(free_port()),
            **env,
        )
        made.append(p)
        return p

    yield make
    for p in made:
        p("down", "--volumes", "--timeout", "1")


@pytest.fixture(scope="module")
def running(tmp_path_factory, engine, server_image):
    """The demo, up and healthy, with an API key from a secret file."""
    folder = tmp_path_factory.mktemp("compose")
    key = folder / "api_key"
    key.write_text(KEY + "\n")
    key.chmod(0o644)
    port = free_port()
    p = Project(folder, FLASHNEXT_DEMO_IMAGE=server_image, FLASHNEXT_PORT=str(port), FLASHNEXT_API_KEY_FILE=str(key))
    p.port = port
    p("up", "--detach", "--no-build", "--wait", "--wait-timeout", "400", "demo", check=True)
    yield p
    p("down", "--volumes", "--timeout", "5")


def client(p, key=KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{p.port}/v1", api_key=key, timeout=60, max_retries=0)


ASK = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}


def test_a_chat_completion_through_the_client_library(running):
    assert [m.id for m in client(running).models.list()] == ["demo"]
    answer = client(running).chat.completions.create(**ASK, max_tokens=8, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 8 and answer.choices[0].finish_reason == "length"


def test_streaming(running):
    chunks = list(
        client(running).chat.completions.create(**ASK, max_tokens=8, stream=True, extra_body={"ignore_eos": True})
    )
    assert len(chunks) >= 4 and chunks[-1].choices[0].finish_reason == "length"


def test_four_streams_at_once(running):
    done: list[int] = []

    def ask() -> None:
        done.append(
            client(running)
            .chat.completions.create(**ASK, max_tokens=32, extra_body={"ignore_eos": True})
            .usage.completion_tokens
        )

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=120)
    assert done == [32] * 4


def test_without_the_key_nobody_gets_in(running):
    with pytest.raises(openai.AuthenticationError):
        client(running, "wrong").chat.completions.create(**ASK, max_tokens=1)


def test_the_key_is_on_no_command_line_and_in_no_log(running, engine):
    container = running.container(engine, "demo")
    assert KEY not in json.dumps(container.attrs)
    assert all(KEY not in " ".join(row) for row in container.top(ps_args="-eo pid,args")["Processes"])
    assert KEY not in container.logs().decode()


def test_health_state_and_user(running, engine):
    container = running.container(engine, "demo")
    assert container.attrs["State"]["Health"]["Status"] == "healthy"
    code, out = container.exec_run(["cat", "/run/flashnext/state.json"])
    state = json.loads(out)
    assert code == 0 and (state["phase"], state["model"]) == ("serving", "demo")
    assert state["startup"] == {"agrees": True, "compared": 2, "deviations": [], "not_said": []}
    code, out = container.exec_run(["flashnext-health", "--json"])
    assert code == 0 and json.loads(out)["status"] == "healthy"
    assert container.exec_run(["id", "-u"])[1].strip() == b"10001"
    assert container.exec_run(["printenv", "CUDA_VISIBLE_DEVICES"])[0] != 0, "an empty value would hide every card"


def test_nothing_outside_our_volume_can_be_written(running, engine):
    container = running.container(engine, "demo")
    for path in ("/x", "/opt/flashnext/x", "/etc/x"):
        assert container.exec_run(["touch", path])[0] != 0, path
    assert container.exec_run(["touch", "/var/lib/flashnext/x"])[0] == 0


def test_the_series_is_in_this_image_and_plan_runs_in_it(running, engine):
    container = running.container(engine, "demo")
    code, out = container.exec_run(
        ["sh", "-c", "python3 /opt/flashnext/patches/apply.py $(cat /opt/flashnext/patches/tree) --check"]
    )
    assert code == 0, out
    code, out = container.exec_run(
        ["flashnext", "plan", "--simulate", "3x3090", "--ram", "125GiB", "--json"],
        environment={"FLASHNEXT_DEVICE": "auto", "FLASHNEXT_MODEL": "", "FLASHNEXT_MODEL_NAME": ""},
    )
    assert code == 0 and json.loads(out)["env"]["VLLM_PP_LAYER_PARTITION"] == "16,16,16"


def test_image_is_under_3_gb(engine, server_image):
    assert engine.images.get(server_image).attrs["Size"] < 3_000_000_000


def test_zz_stop_in_mid_request(running, engine):
    """Last of the module: the request is cut, the container is gone within 15 s, with exit code 0."""
    container = running.container(engine, "demo")
    # The client is a process of its own that only reads: a busy thread in here would hold back the very stop that is timed.
    body = json.dumps({**ASK, "max_tokens": 1900, "stream": True, "ignore_eos": True})
    read = (
        "import sys, urllib.request as u\n"
        "answer = u.urlopen(u.Request(sys.argv[1], sys.argv[2].encode(), {'Content-Type': 'application/json', 'Authorization': 'Bearer ' + sys.argv[3]}))\n"
        "answer.read(1); print('seen', flush=True)\n"
        "while answer.read(65536): pass\n"
    )
    url = f"http://127.0.0.1:{running.port}/v1/chat/completions"
    reader = subprocess.Popen(
        [sys.executable, "-c", read, url, body, KEY], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert reader.stdout.readline() == "seen\n"
    began = datetime.datetime.now(datetime.timezone.utc)
    container.stop(timeout=30)  # the grace period of compose.yaml
    container.reload()
    assert container.attrs["State"]["ExitCode"] == 0 and not container.attrs["State"]["OOMKilled"]
    # When the container ended, not when the engine had unmounted it: that waits for the disk, which may still be writing the image
    # that was built a minute ago.
    ended = datetime.datetime.fromisoformat(container.attrs["State"]["FinishedAt"][:19] + "+00:00")
    took = (ended - began).total_seconds()
    assert -1 <= took < 15, took
    reader.wait(timeout=15)


# --- mistakes: each ends in its own words and code, nothing restarts for ever ---


def last_two(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("ERROR: ", "Fix: "))][-2:]


def test_a_bad_checkpoint_path_is_compose_s_own_refusal(project, tmp_path):
    done = project(FLASHNEXT_MODEL_DIR=str(tmp_path / "nowhere"))("up", "--detach", "--no-build", "server")
    assert done.returncode != 0 and "does not exist" in done.stderr
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    "content, code",
    [({}, 4), ({"config.json": "{"}, 4), ({"config.json": '{"architectures": ["Qwen4ExpForCausalLM"]}'}, 4)],
)
def test_a_bad_checkpoint_ends_in_prepare_and_server_never_starts(project, engine, tmp_path, content, code):
    model = tmp_path / "model"
    model.mkdir(mode=0o755)
    for name, text in content.items():
        (model / name).write_text(text)
    p = project(FLASHNEXT_MODEL_DIR=str(model))
    done = p("up", "--detach", "--no-build", "server")
    if "could not select device driver" in done.stderr:
        pytest.fail("this engine has no NVIDIA hook on its PATH, nor the stand-in of start-engine.sh")
    assert done.returncode != 0
    prepare = p.container(engine, "prepare")
    assert prepare.attrs["State"]["ExitCode"] == code
    assert [line.split(":")[0] for line in last_two(p.logs("prepare"))] == ["ERROR", "Fix"]
    assert p.container(engine, "server").attrs["State"]["Status"] == "created"
    assert sorted(x.name for x in model.iterdir()) == sorted(content)


def test_the_card_service_without_cards_is_refused_by_the_plan(project, engine, tmp_path):
    model = tmp_path / "model"
    subprocess.run(["python3", "-m", "entrypoint.demo", str(model)], cwd=ROOT, check=True, capture_output=True)
    p = project(FLASHNEXT_MODEL_DIR=str(model))
    assert p("up", "--detach", "--no-build", "server").returncode != 0
    assert p.container(engine, "prepare").attrs["State"]["ExitCode"] == 3
    assert "no NVIDIA card can be used" in last_two(p.logs("prepare"))[0]


@pytest.mark.parametrize("value", [None, "0,2"])
def test_cards_are_named_only_where_the_user_names_them(project, value):
    p = project()
    if value:
        p.env["CUDA_VISIBLE_DEVICES"] = value
    config = json.loads(p("config", "--format", "json", check=True).stdout)
    assert config["services"]["server"]["environment"].get("CUDA_VISIBLE_DEVICES") == value


def test_a_taken_port(project, engine):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        p = project()
        p.env["FLASHNEXT_PORT"] = str(s.getsockname()[1])
        done = p("up", "--detach", "--no-build", "demo")
    assert done.returncode != 0 and ("in use" in done.stderr or "allocated" in done.stderr)


def test_a_wrong_digest(project):
    p = project()
    p.env["FLASHNEXT_DEMO_IMAGE"] = "127.0.0.1:1/flashnext@sha256:" + "0" * 64
    done = p("up", "--detach", "--no-build", "demo")
    assert done.returncode != 0 and "127.0.0.1:1" in done.stderr


@pytest.mark.parametrize(
    "env, code, words",
    [
        ({"FLASHNEXT_STREAMS": "many"}, 2, "FLASHNEXT_STREAMS"),
        ({"FLASHNEXT_CONTEXT": "1000000"}, 3, "longer than the model"),
        ({"FLASHNEXT_BIND": "0.0.0.0"}, 3, "API key"),
        ({"FLASHNEXT_EXTRA_ARGS": "--api-key abc"}, 3, "FLASHNEXT_API_KEY_FILE"),
        ({"FLASHNEXT_EXTRA_ARGS": "--frobnicate 1"}, 6, "parser does not take"),
    ],
)
def test_wishes_that_cannot_work_end_with_their_code(project, engine, env, code, words):
    p = project(**env)
    p.override.write_text(OVERRIDE + '  demo: {restart: "no"}\n')
    p("up", "--detach", "--no-build", "demo", check=True)
    container = p.container(engine, "demo")
    assert container.wait(timeout=180)["StatusCode"] == code
    lines = last_two(container.logs().decode())
    assert [line.split(":")[0] for line in lines] == ["ERROR", "Fix"] and words in " ".join(lines)
    assert "Traceback" not in container.logs().decode()


def test_a_secret_that_our_user_cannot_read(project, engine, tmp_path):
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    p = project(FLASHNEXT_API_KEY_FILE=str(key))
    p.override.write_text(OVERRIDE + '  demo: {restart: "no"}\n')
    p("up", "--detach", "--no-build", "demo", check=True)
    container = p.container(engine, "demo")
    assert container.wait(timeout=60)["StatusCode"] == 2
    text = container.logs().decode()
    assert "cannot be read" in text and "chmod" in text and KEY not in text


def test_restarts_are_bounded(project, engine):
    p = project(FLASHNEXT_STREAMS="0")
    p("up", "--detach", "--no-build", "demo", check=True)
    container = p.container(engine, "demo")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        container.reload()
        if container.attrs["State"]["Status"] == "exited" and container.attrs["RestartCount"] == 3:
            break
        time.sleep(0.5)
    time.sleep(3)
    container.reload()
    assert (container.attrs["RestartCount"], container.attrs["State"]["ExitCode"]) == (3, 2)


def test_compose_up_from_a_registry_by_digest(project, engine, registry, server_image, tool):
    """push, remove, pull by digest, and compose up from that reference (as far as `prepare`)."""
    tag = f"{registry.address}/flashnext:test"
    tool("tag", server_image, tag)
    tool("push", tag)
    digest = next(d for d in engine.images.get(tag).attrs["RepoDigests"] if d.startswith(registry.address))
    engine.images.remove(tag)
    p = project(FLASHNEXT_STREAMS="0")
    p.env["FLASHNEXT_DEMO_IMAGE"] = digest
    p.override.write_text(OVERRIDE + '  demo: {restart: "no"}\n')
    p("up", "--detach", "--no-build", "demo", check=True)
    container = p.container(engine, "demo")
    assert container.attrs["Config"]["Image"] == digest
    assert container.wait(timeout=60)["StatusCode"] == 2
    engine.images.remove(digest)
