"""Dockerfile, compose.yaml, .env.example and the table of wishes agree; the launcher needs the standard library only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from entrypoint.wishes import FOREIGN, table

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
# set by compose itself, or meaningless inside a container
NOT_PASSED = {
    "FLASHNEXT_MODEL",
    "FLASHNEXT_DEVICE",
    "FLASHNEXT_HOST",
    "FLASHNEXT_PORT",
    "FLASHNEXT_DATA",
    "FLASHNEXT_STATE_DIR",
}
OF_TESTS = {"FLASHNEXT_SHARED", "FLASHNEXT_ENGINE_PYTHON"}


def test_compose_passes_every_wish():
    passed = set(COMPOSE["x-wishes"])
    assert {w.env for w in table()} - NOT_PASSED <= passed
    assert {n for n in passed if n.startswith("FLASHNEXT_")} <= {w.env for w in table()}


def test_no_empty_value_hides_the_cards():
    """CUDA reads an empty CUDA_VISIBLE_DEVICES as "no card"; without a value compose leaves an unset variable out."""
    assert COMPOSE["x-wishes"]["CUDA_VISIBLE_DEVICES"] is None


def test_env_example_documents_every_name_and_nothing_else():
    named = set(re.findall(r"^#?(FLASHNEXT_[A-Z0-9_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert named == {w.env for w in table()} | (FOREIGN - OF_TESTS)


def test_env_example_is_readable_as_it_stands():
    from entrypoint.wishes import gather

    text = (ROOT / ".env.example").read_text()
    live = re.sub(r"^#(FLASHNEXT_|CUDA_)", r"\1", text, flags=re.MULTILINE)
    env = dict(line.split("=", 1) for line in live.splitlines() if re.match(r"[A-Z_]+=", line))
    wishes = gather({}, env, None)
    assert wishes.value("context") == 262144 and wishes.value("host_kv_max") == 56 << 30


def test_services_are_hardened():
    for name, service in COMPOSE["services"].items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["init"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
    server = COMPOSE["services"]["server"]
    assert server["restart"] == "on-failure:3" and server["shm_size"] == "8gb"
    assert server["depends_on"]["prepare"]["condition"] == "service_completed_successfully"
    model = next(v for v in server["volumes"] if isinstance(v, dict) and v["target"] == "/model")
    assert model["read_only"] and model["bind"] == {"create_host_path": False}
    assert all(
        p.startswith("${FLASHNEXT_BIND:-127.0.0.1}:") for s in COMPOSE["services"].values() for p in s.get("ports", [])
    )


def test_grace_period_is_longer_than_drain_and_margin():
    from entrypoint.supervisor import STOP_MARGIN_S

    drain = next(w.default for w in table() if w.name == "drain")
    assert int(COMPOSE["services"]["server"]["stop_grace_period"].rstrip("s")) > drain + STOP_MARGIN_S
    assert drain + STOP_MARGIN_S < 12, "docker stop has to stay under 15 s"


def test_versions_agree():
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert f"flashnext:{version}" in COMPOSE["services"]["server"]["image"]
    assert f"flashnext-demo:{version}" in COMPOSE["services"]["demo"]["image"]
    assert f"ARG VERSION={version}" in (ROOT / "Dockerfile").read_text()


@pytest.mark.parametrize("name", ["Dockerfile", "build/cpu-base/Dockerfile"])
def test_dockerfiles_pass_hadolint_and_need_no_frontend_image(name):
    done = subprocess.run([Path(sys.executable).with_name("hadolint"), ROOT / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# syntax" not in (ROOT / name).read_text()


def test_the_launcher_imports_the_standard_library_only():
    tree = ast.parse((ROOT / "flashnext").read_text())
    names = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert names <= set(sys.stdlib_module_names)


def test_imports_stay_inside_their_house():
    """entrypoint never imports vllm or torch, healthcheck nothing but the standard library."""
    for folder, banned in {
        "entrypoint": {"vllm", "torch", "build", "docker"},
        "healthcheck": {"vllm", "torch", "entrypoint", "build", "yaml", "rich"},
    }.items():
        for path in (ROOT / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = (
                    [a.name for a in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                    if isinstance(node, ast.ImportFrom) and not node.level
                    else []
                )
                assert not {n.split(".")[0] for n in names} & banned, path


def test_ruff_is_clean():
    ruff = Path(sys.executable).with_name("ruff")
    done = subprocess.run([ruff, "check", ".", "flashnext"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    done = subprocess.run([ruff, "format", "--check", ".", "flashnext"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_no_machine_paths_or_package_hosts_in_what_is_committed():
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    host = re.compile(r"https?://[a-z0-9.-]*(?:" + "|".join(("pypi", "pythonhosted", "debian", "npmjs")) + ")")
    for name in filter(None, files):
        text = (ROOT / name).read_text(errors="replace") if (ROOT / name).is_file() else ""
        assert not host.search(text), name
        assert str(ROOT) not in text, name
