"""`python -m build` as a user runs it, against a real engine and a real registry."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import docker.errors
import pytest

ROOT = Path(__file__).resolve().parents[2]


def write_dockerfile(folder: Path, base: str, *lines: str) -> Path:
    (folder / "Dockerfile").write_text("\n".join((f"ARG BASE_IMAGE={base}", "FROM ${BASE_IMAGE}", *lines, "")))
    return folder


@pytest.fixture
def context(tmp_path, base_image) -> Path:
    folder = tmp_path / "context"
    folder.mkdir()
    return write_dockerfile(folder, base_image, "RUN echo hello > /hello")


def build_small(tool, folder: Path, tag: str, *words: str) -> dict:
    """An image of 300 kB of noise and nothing else, quick to carry about."""
    folder.mkdir(exist_ok=True)
    (folder / "content").write_bytes(os.urandom(300_000))
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY content /content\n")
    return tool.json("build", "--context", folder, "--tag", tag, *words)


@pytest.fixture
def small_image(tool, tmp_path, unique_name) -> str:
    build_small(tool, tmp_path / "small", f"{unique_name}:small")
    return f"{unique_name}:small"


def refused(answer: subprocess.CompletedProcess[str], code: int, part: str) -> None:
    """The answer is one ERROR line with `part` in it, one Fix line, no traceback, and this exit code."""
    lines = answer.stderr.splitlines()
    errors = [line for line in lines if line.startswith("ERROR: ")]
    assert answer.returncode == code, answer.stderr
    assert len(errors) == 1, answer.stderr
    assert part in errors[0]
    assert lines[-1].startswith("Fix: ")
    assert "Traceback" not in answer.stderr


def test_build_push_remove_and_pull_by_digest(tool, engine, registry, context, base_image, unique_name):
    ref = f"{registry.address}/{unique_name}:1"
    built = tool.json("build", "--context", context, "--base", base_image, "--tag", ref, "--tag", f"{unique_name}:also")
    assert built["base"] == base_image
    image = engine.images.get(ref)
    assert image.id == built["image_id"] == engine.images.get(f"{unique_name}:also").id
    assert image.labels["org.opencontainers.image.base.name"] == base_image
    assert image.labels["org.opencontainers.image.version"] == "unknown"  # a folder without pyproject.toml
    assert image.labels["org.opencontainers.image.created"].endswith("Z")

    pushed = tool.json("push", ref)
    assert pushed["pinned"] == f"{registry.address}/{unique_name}@{pushed['digest']}"
    # the registry itself, not the engine's memory of it
    blobs = registry.data / "docker/registry/v2/blobs/sha256"
    digest = pushed["digest"].removeprefix("sha256:")
    manifest = (blobs / digest[:2] / digest / "data").read_bytes()
    assert hashlib.sha256(manifest).hexdigest() == digest
    assert json.loads(manifest)["config"]["digest"] == built["image_id"]

    for tag in (ref, f"{unique_name}:also"):
        engine.images.remove(tag, force=True)
    with pytest.raises(docker.errors.ImageNotFound):
        engine.images.get(built["image_id"])

    pulled = tool.json("pull", pushed["pinned"], "--tag", f"{unique_name}:back")
    assert (pulled["id"], pulled["digest"]) == (built["image_id"], pushed["digest"])
    assert engine.containers.run(f"{unique_name}:back", ["cat", "/hello"], remove=True) == b"hello\n"


def test_pull_by_tag_shows_progress_on_stderr_and_the_result_on_stdout(tool, engine, registry, tmp_path, unique_name):
    ref = f"{registry.address}/{unique_name}:1"
    build_small(tool, tmp_path / "small", ref, "--progress", "none")
    digest = tool.json("push", ref)["digest"]
    engine.images.remove(ref, force=True)
    answer = tool("pull", ref, "--progress", "plain")
    assert answer.returncode == 0
    assert f"pull {ref}" in answer.stderr
    assert digest in answer.stdout
    assert engine.images.get(ref).tags == [ref]


def test_tag_gives_a_further_name(tool, engine, base_image, unique_name):
    answer = tool.json("tag", base_image, f"{unique_name}:x")
    assert engine.images.get(f"{unique_name}:x").id == answer["id"] == engine.images.get(base_image).id


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("push", "{name}:missing"), "No such image"),
        (("pull", "{registry}/{name}:missing"), "manifest unknown"),
        (("pull", "{registry}/{name}@sha256:" + "0" * 64), "manifest unknown"),
        (("pull", "127.0.0.1:1/{name}:1"), "connection refused"),
        (("tag", "{name}:missing", "{name}:x"), "No such image"),
        (("save", "{name}:missing", "{tmp}/x.tar"), "No such image"),
        (("verify", "{name}:missing"), "No such image"),
        (("lock", "{registry}/{name}:missing", "--lock-file", "{tmp}/base.json"), "manifest unknown"),
    ],
)
def test_what_is_not_there_is_exit_8(tool, registry, unique_name, tmp_path, words, part):
    known = {"name": unique_name, "registry": registry.address, "tmp": tmp_path}
    refused(tool(*(w.format(**known) for w in words)), 8, part)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_step_is_shown_with_its_last_lines_only(tool, context, base_image, unique_name):
    write_dockerfile(
        context, base_image, "RUN exec 2>&1; for i in $(seq 1 500); do echo row-$i; done; echo the cause >&2; exit 3"
    )
    answer = tool("build", "--context", context, "--base", base_image, "--tag", f"{unique_name}:1", "--json")
    refused(answer, 8, "exit code: 3, saying 'the cause'")
    lines = answer.stderr.splitlines()
    shown = lines[next(n for n, line in enumerate(lines) if line.startswith("--- ")) + 1 : lines.index("---")]
    assert shown == [f"row-{n}" for n in range(482, 501)] + ["the cause"]
    told = json.loads(answer.stdout)
    assert (told["ok"], told["exit_code"], told["step_output"]) == (False, 8, shown)


@pytest.mark.parametrize(
    ("lines", "words", "part", "fix"),
    [
        (("FROBNICATE /",), (), "unknown instruction: FROBNICATE", "correct the Dockerfile"),
        ((), ("--target", "nope"), 'target stage "nope" could not be found', "--target"),
        ((), ("--base", "127.0.0.1:1/none:1"), "connection refused", "host and port"),
        (("COPY missing /",), (), '"/missing": not found', ""),
    ],
)
def test_a_build_that_cannot_start_says_why(tool, context, base_image, unique_name, lines, words, part, fix):
    write_dockerfile(context, base_image, *lines)
    answer = tool("build", "--context", context, "--base", base_image, "--tag", f"{unique_name}:1", *words)
    refused(answer, 8, part)
    assert fix in answer.stderr.splitlines()[-1]


def test_no_dockerfile_is_a_usage_error(tool, tmp_path):
    refused(tool("build", "--context", tmp_path), 2, "there is no")


def test_the_second_build_takes_every_step_from_the_cache_and_no_cache_takes_none(
    tool, context, base_image, unique_name
):
    (context / "salt").write_text(unique_name)
    with (context / "Dockerfile").open("a") as file:
        file.write("COPY salt /salt\nRUN cat /salt\n")
    words = ("build", "--context", context, "--base", base_image, "--tag", f"{unique_name}:1")
    tool.json(*words)
    # RUN echo, COPY, RUN cat; FROM counts as cached or not as the engine likes
    assert tool.json(*words)["cached_steps"] in (3, 4)
    assert tool.json(*words, "--no-cache")["cached_steps"] in (0, 1)


def test_target_arguments_and_secrets_reach_the_build(tool, engine, tmp_path, base_image, unique_name):
    (tmp_path / "token").write_text("s3cret")
    (tmp_path / "Dockerfile").write_text(
        "ARG BASE_IMAGE\n"
        "FROM ${BASE_IMAGE} AS one\n"
        "ARG WORD\n"
        "RUN --mount=type=secret,id=token,required=true sha256sum < /run/secrets/token > /sum; echo $WORD > /word\n"
        "FROM one AS two\n"
        "RUN exit 9\n"
    )
    tool.json(
        *("build", "--context", tmp_path, "--base", base_image, "--target", "one", "--build-arg", "WORD=a=b c"),
        *("--secret", f"id=token,src={tmp_path}/token", "--tag", f"{unique_name}:1"),
    )
    output = engine.containers.run(f"{unique_name}:1", ["cat", "/word", "/sum"], remove=True).decode()
    assert output.splitlines()[0] == "a=b c"
    assert output.splitlines()[1].startswith(hashlib.sha256(b"s3cret").hexdigest())
    history = json.dumps(engine.images.get(f"{unique_name}:1").history())
    assert "s3cret" not in history


def test_source_date_epoch_dates_the_image(tool, engine, context, base_image, unique_name):
    env = {"SOURCE_DATE_EPOCH": "1700000000"}
    tool.json("build", "--context", context, "--base", base_image, "--tag", f"{unique_name}:1", env=env)
    image = engine.images.get(f"{unique_name}:1")
    assert image.labels["org.opencontainers.image.created"] == "2023-11-14T22:13:20Z"
    assert image.attrs["Created"].startswith("2023-11-14T22:13:20")


def test_a_platform_that_cannot_be_built_is_exit_8(tool, context, unique_name, registry):
    # the base has one platform only, so there is nothing to build another from
    answer = tool("build", "--context", context, "--platform", "linux/s390x", "--tag", f"{unique_name}:1")
    assert answer.returncode == 8
    assert "ERROR: the build" in answer.stderr


def test_lock_build_from_the_lock_and_a_moved_tag(tool, engine, registry, tmp_path, unique_name):
    base = f"{registry.address}/{unique_name}-base:v1"
    where = ("--lock-file", tmp_path / "locks" / "base.json")
    small = tmp_path / "small"
    build_small(tool, small, base)
    pushed = tool.json("push", base)
    old_layers = engine.images.get(base).attrs["RootFS"]["Layers"]

    locked = tool.json("lock", base, *where)
    assert locked["digest"] == pushed["digest"]
    assert locked["platforms"] == ["linux/amd64"]
    assert json.loads(where[1].read_text())["ref"] == base
    assert tool.json("lock", "--check", *where)["moved"] is False

    # the tag moves: other content under the same name, here and in the registry
    build_small(tool, small, base)
    tool.json("push", base)
    assert engine.images.get(base).attrs["RootFS"]["Layers"] != old_layers
    refused(tool("lock", "--check", *where), 9, f"{base} moved: locked {pushed['digest']}")

    # the build still takes the locked one
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "note").write_text(unique_name)
    (ours / "Dockerfile").write_text("ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nCOPY note /note\n")
    built = tool.json("build", "--context", ours, "--tag", f"{unique_name}:locked", *where)
    assert built["base"] == f"{base}@{pushed['digest']}"
    image = engine.images.get(f"{unique_name}:locked")
    assert image.attrs["RootFS"]["Layers"][:1] == old_layers
    assert image.labels["org.opencontainers.image.base.name"] == base
    assert image.labels["org.opencontainers.image.base.digest"] == pushed["digest"]

    relocked = tool.json("lock", *where)
    assert (relocked["ref"], relocked["digest"] == pushed["digest"]) == (base, False)
    tool.json("build", "--context", ours, "--tag", f"{unique_name}:relocked", *where)
    assert engine.images.get(f"{unique_name}:relocked").attrs["RootFS"]["Layers"][:1] != old_layers


def test_lock_pulls_nothing(tool, engine, registry, tmp_path, unique_name):
    ref = f"{registry.address}/{unique_name}:1"
    build_small(tool, tmp_path / "small", ref)
    digest = tool.json("push", ref)["digest"]
    engine.images.remove(ref, force=True)
    assert tool.json("lock", ref, "--lock-file", tmp_path / "base.json")["digest"] == digest
    with pytest.raises(docker.errors.ImageNotFound):
        engine.images.get(ref)


@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tgz", ".tar.zst"])
def test_save_and_load_bring_the_same_image_back(tool, engine, tmp_path, small_image, ending):
    if ending == ".tar.zst" and not shutil.which("zstd"):
        refused(tool("save", small_image, tmp_path / "x.tar.zst"), 2, "zstd")
        return
    image_id = engine.images.get(small_image).id
    file = tmp_path / "out" / f"image{ending}"
    file.parent.mkdir()
    saved = tool.json("save", small_image, file)
    assert sorted(p.name for p in file.parent.iterdir()) == [file.name, file.name + ".sha256"]
    assert hashlib.sha256(file.read_bytes()).hexdigest() == saved["sha256"]
    subprocess.run(["sha256sum", "--check", "--strict", file.name + ".sha256"], cwd=file.parent, check=True)
    engine.images.remove(small_image, force=True)
    loaded = tool.json("load", file)
    assert loaded["images"] == [small_image]
    assert engine.images.get(small_image).id == image_id


def test_a_damaged_archive_never_reaches_the_engine(tool, engine, tmp_path, small_image):
    file = tmp_path / "image.tar"
    tool.json("save", small_image, file)
    engine.images.remove(small_image, force=True)
    whole = file.read_bytes()
    one_bit = bytearray(whole)
    one_bit[len(whole) // 2] ^= 1
    for damaged in (bytes(one_bit), whole[:-512], whole + b"\0", b""):
        file.write_bytes(damaged)
        refused(tool("load", file), 9, "is damaged")
        with pytest.raises(docker.errors.ImageNotFound):
            engine.images.get(small_image)
    file.write_bytes(whole)
    assert tool.json("load", file)["images"] == [small_image]


def test_an_archive_without_its_checksum_is_refused_unless_asked(tool, engine, tmp_path, small_image):
    file = tmp_path / "image.tar"
    tool.json("save", small_image, file)
    (tmp_path / "image.tar.sha256").unlink()
    refused(tool("load", file), 9, "no image.tar.sha256")
    assert tool.json("load", file, "--no-check")["images"] == [small_image]
    (tmp_path / "image.tar.sha256").write_text("not a sum\n")
    refused(tool("load", file), 9, "does not begin with a sha256")


@pytest.mark.parametrize("content", [b"", b"no archive", gzip.compress(b"no archive")])
def test_something_else_than_an_image_is_refused(tool, tmp_path, content):
    file = tmp_path / "x.tar"
    file.write_bytes(content)
    answer = tool("load", file, "--no-check")
    assert answer.returncode in (8, 9)
    assert answer.stderr.splitlines()[-2].startswith("ERROR: ")


def test_files_and_folders_that_are_not_there_are_usage_errors(tool, tmp_path, small_image):
    refused(tool("load", tmp_path / "none.tar"), 2, "cannot read")
    refused(tool("save", small_image, tmp_path / "none" / "x.tar"), 2, "no folder")


def test_an_interrupted_save_leaves_no_file(tool, engine, tmp_path, base_image):
    file = tmp_path / "image.tar.gz"
    child = subprocess.Popen(
        [sys.executable, "-m", "build", "save", base_image, str(file)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    partial = file.with_name(file.name + ".partial")
    for _ in range(600):
        if partial.exists() and partial.stat().st_size > 1_000_000:
            break
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=30)
    assert child.returncode == 130
    assert "interrupted" in said
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_build_ends_its_builder(tool, context, base_image, unique_name):
    write_dockerfile(context, base_image, f"RUN echo {unique_name}; sleep 300")
    child = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "build",
            "build",
            "--context",
            context,
            "--base",
            base_image,
            "--tag",
            f"{unique_name}:1",
        ],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in child.stderr:
        if "start" in line and unique_name in line:
            break
    began = time.monotonic()
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=30)
    assert child.returncode == 130
    assert time.monotonic() - began < 15
    # (argv of the builder holds the tag; the step itself runs in the engine)
    running = subprocess.run(["pgrep", "-f", f"buildx.*{unique_name}"], capture_output=True, text=True)
    assert running.stdout == ""


@pytest.mark.parametrize("command", ["pull", "push", "save", "verify", "lock", "build", "cpu-base", "tag", "load"])
def test_without_an_engine_every_command_is_exit_8(tool, tmp_path, context, command):
    (tmp_path / "x.tar").write_bytes(b"")
    words = {
        "save": ("a:1", tmp_path / "y.tar"),
        "tag": ("a:1", "b:1"),
        "build": ("--context", context),
        "cpu-base": (),
        "lock": ("a:1", "--lock-file", tmp_path / "base.json"),
        "load": (tmp_path / "x.tar", "--no-check"),
    }.get(command, ("a:1",))
    answer = tool(command, *words, env={"DOCKER_HOST": f"unix://{tmp_path}/nobody.sock"})
    refused(answer, 8, "no Docker Engine answers at")
    assert "DOCKER_HOST" in answer.stderr.splitlines()[-1]


def test_without_buildx_a_build_says_what_to_install(tool, context, tmp_path, unique_name):
    empty = tmp_path / "bin"
    empty.mkdir()
    answer = tool("build", "--context", context, "--tag", f"{unique_name}:1", env={"PATH": str(empty)})
    refused(answer, 8, "`docker` command is not on PATH")
    # a CLI without the plugin answers `docker buildx version` like this
    (empty / "docker").write_text("#!/bin/sh\necho \"docker: 'buildx' is not a docker command.\" >&2\nexit 1\n")
    (empty / "docker").chmod(0o755)
    answer = tool("build", "--context", context, "--tag", f"{unique_name}:1", env={"PATH": f"{empty}:/bin:/usr/bin"})
    refused(answer, 8, "no buildx plugin")


def test_verify_names_every_fault_of_an_image_that_is_not_ours(tool, base_image):
    answer = tool("verify", base_image)
    assert answer.returncode == 9
    rows = [line.split() for line in answer.stdout.splitlines() if line.startswith(("PASS", "FAIL"))]
    assert {row[0] for row in rows} == {"FAIL"}
    assert len(rows) == 8
    refused(answer, 9, "failed 8 of 8 checks: labels, revision, user, healthcheck, entrypoint, series label")
    told = json.loads(tool("verify", base_image, "--json").stdout)
    assert told["ok"] is False
    assert all(not check["ok"] and check["detail"] for check in told["checks"])


@pytest.mark.slow
def test_verify_passes_the_real_image_and_the_real_parser_reads_our_plan(tool, server_image):
    answer = tool("verify", server_image, "--allow-dirty")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    rows = {line[6:22].strip(): line[:4] for line in answer.stdout.splitlines()}
    names = ("labels", "user", "healthcheck", "entrypoint", "series label", "series applied", "plan accepted")
    assert rows == dict.fromkeys(names, "PASS")


@pytest.mark.slow
def test_verify_names_what_was_tampered_with(tool, server_image, tmp_path, unique_name):
    vllm = "/opt/vllm/lib/python3*/site-packages/vllm"
    lines = (
        "ARG BASE_IMAGE",
        "FROM ${BASE_IMAGE}",
        "USER 0:0",
        f"RUN echo '#' >> $(ls {vllm}/models/qwen4_exp/common/qsa_cache.py)",
        # an engine that calls its option something longer: what our plan says is now a prefix, and argparse would take it
        f"RUN sed -i 's/--max-num-seqs/--max-num-seqs-total/' {vllm}/engine/arg_utils.py",
        "USER 10001:10001",
        "LABEL io.flashnext.series=0000",
        "",
    )
    (tmp_path / "Dockerfile").write_text("\n".join(lines))
    # not by the tool: its labels would cover these
    build = ("docker", "build", "-q", "-t", f"{unique_name}:1", "--build-arg", f"BASE_IMAGE={server_image}", tmp_path)
    subprocess.run(build, check=True, capture_output=True)
    answer = tool("verify", f"{unique_name}:1", "--allow-dirty")
    refused(answer, 9, "failed 3 of 7 checks: series label, series applied, plan accepted")
    seen = {line[6:22].strip(): line for line in answer.stdout.splitlines()}
    assert "vllm/models/qwen4_exp/common/qsa_cache.py drift" in seen["series applied"]
    assert "--max-num-seqs" in seen["plan accepted"]


@pytest.mark.slow
def test_the_cpu_base_runs_vllm_on_the_cpu_platform(engine, cpu_base_image):
    def run(*words: str) -> str:
        return engine.containers.run(cpu_base_image, list(words[1:]), entrypoint=[words[0]], remove=True).decode()

    assert run("vllm", "--version").splitlines()[-1] == "0.30.0+cpu"
    script = (
        "import importlib.metadata as m, json, os, shutil, torch, transformers, vllm\n"
        "from vllm.platforms import current_platform as p\n"
        "print(json.dumps([p.is_cpu(), m.version('vllm'), torch.__version__, transformers.__version__, "
        "os.environ.get('TORCH_COMPILE_DISABLE'), shutil.which('c++'), shutil.which('python3')]))\n"
    )
    answer = json.loads(run("python3", "-c", script).splitlines()[-1])
    assert answer == [True, "0.30.0+cpu", "2.13.0+cpu", "5.20.2", "1", None, "/opt/vllm/bin/python3"]
    image = engine.images.get(cpu_base_image)
    assert image.attrs["Size"] < 3_000_000_000
    assert image.attrs["Config"]["Entrypoint"] == ["vllm", "serve"]
    # what is installed is what the lock says, nothing more (the shim is the one exception)
    listed = run(
        "python3", "-c", "import importlib.metadata as m\nfor d in m.distributions(): print(d.name, d.version)"
    )
    normal = {(n.lower().replace("_", "-").replace(".", "-"), v) for n, v in map(str.split, listed.splitlines())}
    lock = (ROOT / "build/locks/cpu-base.txt").read_text().splitlines()
    assert normal - {tuple(x.split("==")) for x in lock if "==" in x} == {("vllm", "0.30.0+cpu")}
    assert len(normal) == sum("==" in x for x in lock) + 1


@pytest.mark.slow
def test_without_a_wheel_at_hand_the_cpu_base_asks_uv_for_the_cpu_build(tool, cpu_base_image, base_image, tmp_path):
    # The step differs from the cached one, so it runs; on a machine whose torch index cannot be reached it fails there, in
    # uv, which shows that the empty context is mounted and the other branch taken. Where it can be reached it succeeds.
    words = ("cpu-base", "--base", base_image, "--tag", "flashnext-test-nowheel:1", "--json")
    answer = tool(*words, env={"PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull})
    told = json.loads(answer.stdout)
    if answer.returncode == 0:
        assert told["size_bytes"] < 3_000_000_000
        subprocess.run(["docker", "image", "rm", "flashnext-test-nowheel:1"], check=True, capture_output=True)
        return
    refused(answer, 8, "the build failed at '[runtime")
    assert "torch" in "\n".join(told["step_output"])
