"""The command line as a user meets it: exit codes, two lines and no traceback for every mistake."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from entrypoint import demo, facts
from entrypoint.errors import Refusal
from entrypoint.wishes import gather

ROOT = Path(__file__).resolve().parents[2]


def run(*args, env=None, cwd=None):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHNEXT_", "CUDA_"))}
    return subprocess.run(
        [sys.executable, "-m", "entrypoint", *map(str, args)],
        env={**clean, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
        cwd=cwd or ROOT,
    )


def two_lines(done, code):
    lines = done.stderr.strip().splitlines()
    assert done.returncode == code, done.stderr
    assert [line.split(":")[0] for line in lines] == ["ERROR", "Fix"], done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "model"
    assert demo.make(out) and not demo.make(out)
    return out


@pytest.fixture
def box(tmp_path, model):
    return {
        "FLASHNEXT_DEVICE": "cpu",
        "FLASHNEXT_MODEL": str(model),
        "FLASHNEXT_DATA": str(tmp_path / "data"),
        "FLASHNEXT_STATE_DIR": str(tmp_path / "state"),
    }


def test_simulated_plan_as_text_and_json(tmp_path):
    text = run("plan", "--simulate", "3x3090", "--ram", "125GiB", "--explain", cwd=tmp_path)
    assert (
        text.returncode == 0
        and "--kv-cache-memory-bytes 550000000" in text.stdout
        and "left of what is free" in text.stdout
    )
    made = json.loads(run("plan", "--simulate", "3x3090", "--ram", "125GiB", "--json", cwd=tmp_path).stdout)
    assert made["argv"][:2] == ["serve", "/model"] and made["env"]["VLLM_PP_LAYER_PARTITION"] == "16,16,16"


@pytest.mark.parametrize(
    "args, code",
    [
        (["plann"], 2),
        (["plan", "--simulate", "3x3090"], 2),
        (["plan", "--ram", "5GiB"], 2),
        (["plan", "--simulate", "3x9999", "--ram", "125GiB"], 2),
        (["plan", "--simulate", "3x3090", "--ram", "much"], 2),
        (["plan", "--simulate", "1x3090", "--ram", "125GiB"], 3),
        (["plan", "--simulate", "3x3090", "--ram", "125GiB", "--context", "9999999"], 3),
        (["plan", "--simulate", "3x3090", "--ram", "125GiB", "--model", "/nowhere"], 4),
        (["plan", "--simulate", "3x3090", "--ram", "125GiB", "--frob", "1"], 2),
        (["explain", "/nowhere.log"], 2),
        (["serve", "--port", "x"], 2),
    ],
)
def test_mistakes(args, code, tmp_path):
    two_lines(run(*args, cwd=tmp_path), code)


def test_no_card_on_the_card_service(tmp_path, model):
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has cards")
    two_lines(run("prepare", "--model", model, "--data", tmp_path, cwd=tmp_path), 3)


def test_bind_to_the_world_needs_a_key(box, tmp_path):
    done = run("prepare", env={**box, "FLASHNEXT_BIND": "0.0.0.0"})
    two_lines(done, 3)
    key = tmp_path / "key"
    key.write_text("secret-1\n")
    assert run("prepare", env={**box, "FLASHNEXT_BIND": "0.0.0.0", "FLASHNEXT_API_KEY_FILE": str(key)}).returncode == 0


def test_prepare_makes_our_folders_and_touches_nothing_else(box, model, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in model.iterdir()}
    done = run("prepare", env=box)
    assert done.returncode == 0 and "prepared" in done.stdout
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["cache", "overlay", "table"]
    assert {p: p.stat().st_mtime_ns for p in model.iterdir()} == before


def test_prepare_makes_the_demo_model_inside_our_volume(tmp_path):
    env = {
        "FLASHNEXT_DEVICE": "cpu",
        "FLASHNEXT_DATA": str(tmp_path / "d"),
        "FLASHNEXT_MODEL": str(tmp_path / "d" / "demo"),
    }
    assert run("prepare", env=env).returncode == 0
    assert (tmp_path / "d" / "demo" / "model.safetensors").is_file()


def test_a_cut_weight_file_is_4(box, model, tmp_path):
    import shutil

    bad = tmp_path / "bad"
    shutil.copytree(model, bad)
    with open(bad / "model.safetensors", "r+b") as f:
        f.truncate(1000)
    two_lines(run("prepare", env={**box, "FLASHNEXT_MODEL": str(bad)}), 4)


def test_a_folder_that_cannot_be_written_is_5(box, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    two_lines(run("prepare", env={**box, "FLASHNEXT_DATA": str(blocked / "x")}), 5)


def test_a_taken_port_is_2_and_the_state_says_failed(box, tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        done = run("serve", env={**box, "FLASHNEXT_HOST": "127.0.0.1", "FLASHNEXT_PORT": str(port)})
    two_lines(done, 2)
    state = json.loads((tmp_path / "state" / "state.json").read_text())
    assert (state["phase"], state["exit_code"]) == ("failed", 2)


def test_no_vllm_is_6(box, tmp_path):
    port = 8000 + os.getpid() % 1000
    two_lines(
        run("serve", env={**box, "PATH": str(tmp_path), "FLASHNEXT_HOST": "127.0.0.1", "FLASHNEXT_PORT": str(port)}), 6
    )


@pytest.mark.parametrize("content", ["", "two words", "a\nb", "\x07"])
def test_odd_keys_are_refused_and_never_printed(tmp_path, content):
    f = tmp_path / "key"
    f.write_text(content)
    with pytest.raises(Refusal) as e:
        facts.read_api_key(gather({}, {"FLASHNEXT_API_KEY_FILE": str(f)}, None))
    assert e.value.code == 2 and (not content.strip() or content not in e.value.message)


def test_the_null_device_is_no_key_and_a_file_is_one(tmp_path):
    assert facts.read_api_key(gather({}, {"FLASHNEXT_API_KEY_FILE": "/dev/null"}, None)) is None
    (tmp_path / "k").write_text("abc\n")
    assert facts.read_api_key(gather({}, {"FLASHNEXT_API_KEY_FILE": str(tmp_path / "k")}, None)) == "abc"


def test_explain_reads_a_log(tmp_path):
    log = tmp_path / "x.log"
    log.write_text("INFO fine\nRuntimeError: CUDA out of memory.\n")
    assert json.loads(run("explain", log, "--json").stdout)[0]["id"] == "vram"
    log.write_text("INFO fine\n")
    assert "No known failure" in run("explain", log).stdout


def test_doctor_json_lists_points_and_exits_with_the_worst(tmp_path):
    done = run("doctor", "--json", cwd=tmp_path)
    points = {f["point"]: f for f in json.loads(done.stdout)}
    assert {"cards", "RAM", "checkpoint", "plan"} <= set(points)
    assert done.returncode == max(f["code"] for f in points.values() if f["verdict"] == "FAIL")


def test_a_check_starts_without_what_it_does_not_run(model, tmp_path):
    """What it imports was a third of the time that it took: other commands, and what typer converts values with."""
    code = "import sys; from entrypoint import cli\ntry: cli.main()\nfinally: sys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code, "checkpoint", "--json", "--model", str(model), "--env-file", "none"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert json.loads(done.stdout)["path"] == str(model)
    there = set(done.stderr.split())
    assert "entrypoint.lint" in there
    assert not there & {"pydantic", "rich", "asyncio", "entrypoint.plan", "entrypoint.doctor", "entrypoint.fetch"}
