"""The lock file, which base a build takes, archive names, and what `verify` reads from a configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from build import lock
from build.archive import checksum_file, compression
from build.cli import main
from build.errors import Refusal
from build.lock import DEFAULT_BASE, Lock, choose_base
from build.verify import INSIDE, LABELS, SERIES_LABEL, config_checks, read_inside

DIGEST = "sha256:" + "ab" * 32
LOCK = Lock(DEFAULT_BASE, DIGEST, ("linux/amd64", "linux/arm64"), "2026-11-30T12:00:00Z")


def test_a_lock_comes_back_as_written(tmp_path):
    path = tmp_path / "locks" / "base.json"
    lock.write(path, LOCK)
    assert lock.read(path) == LOCK
    assert json.loads(path.read_text()) == {
        "schema": 1,
        "ref": "vllm/vllm-openai:v0.30.0",
        "digest": DIGEST,
        "platforms": ["linux/amd64", "linux/arm64"],
        "locked_at": "2026-11-30T12:00:00Z",
    }
    assert [p.name for p in path.parent.iterdir()] == ["base.json"]


def test_no_lock_file_is_no_lock(tmp_path):
    assert lock.read(tmp_path / "base.json") is None


GOOD = {"schema": 1, "ref": "a:1", "digest": DIGEST, "platforms": [], "locked_at": "x"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[]", "list"),
        ("null", "NoneType"),
        (json.dumps({**GOOD, "schema": 2}), "schema 2"),
        (json.dumps({**GOOD, "digest": "sha256:short"}), "64 hex digits"),
        (json.dumps({**GOOD, "platforms": None}), "not iterable"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "ref"}), "no key 'ref'"),
    ],
)
def test_a_damaged_lock_file_is_refused(tmp_path, text, why):
    path = tmp_path / "base.json"
    path.write_text(text)
    with pytest.raises(Refusal) as refused:
        lock.read(path)
    assert refused.value.code == 2
    assert why in refused.value.message
    assert "image lock" in refused.value.fix


@pytest.mark.parametrize(
    ("requested", "locked", "expected"),
    [
        (None, None, "vllm/vllm-openai:v0.30.0"),
        (None, LOCK, f"vllm/vllm-openai:v0.30.0@{DIGEST}"),
        ("vllm/vllm-openai:v0.30.0", LOCK, f"vllm/vllm-openai:v0.30.0@{DIGEST}"),
        ("vllm/vllm-openai:v0.31.0", LOCK, "vllm/vllm-openai:v0.31.0"),
        ("flashnext-cpu-base:0.30.0", LOCK, "flashnext-cpu-base:0.30.0"),
        ("flashnext-cpu-base:0.30.0", None, "flashnext-cpu-base:0.30.0"),
    ],
)
def test_which_base_a_build_takes(requested, locked, expected):
    assert choose_base(requested, locked, None) == expected


def test_a_platform_that_the_locked_base_lacks_is_refused():
    assert choose_base(None, LOCK, "linux/arm64").endswith(DIGEST)
    with pytest.raises(Refusal) as refused:
        choose_base(None, LOCK, "linux/s390x")
    assert refused.value.code == 2
    assert "linux/amd64, linux/arm64" in refused.value.message


@pytest.mark.parametrize(
    ("name", "how"),
    [("a.tar", "none"), ("a.tar.gz", "gzip"), ("a.tgz", "gzip"), ("a.tar.zst", "zstd"), ("a.b.tar", "none")],
)
def test_the_ending_chooses_the_compression(name, how):
    assert compression(Path("/x") / name) == how


@pytest.mark.parametrize("name", ["a", "a.zip", ".tar", "a.gz", "a.tar.xz", "tar"])
def test_other_endings_are_usage_errors(name):
    with pytest.raises(Refusal) as refused:
        compression(Path("/x") / name)
    assert refused.value.code == 2


def test_the_checksum_lies_beside():
    assert checksum_file(Path("/x/a.tar.gz")) == Path("/x/a.tar.gz.sha256")


GOOD_CONFIG = {
    "Labels": {
        **dict.fromkeys((*LABELS, SERIES_LABEL), "x"),
        "org.opencontainers.image.revision": "0123456789abcdef0123456789abcdef01234567",
    },
    "User": "10001:10001",
    "Healthcheck": {"Test": ["CMD", "/opt/flashnext/bin/flashnext-health"]},
    "Entrypoint": ["/opt/flashnext/bin/flashnext"],
}


def failing(config: dict) -> list[str]:
    return [c.name for c in config_checks(config) if not c.ok]


def test_a_good_configuration_passes():
    assert failing(GOOD_CONFIG) == []


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"Labels": None}, ["labels", "revision"]),
        ({"Labels": {**GOOD_CONFIG["Labels"], SERIES_LABEL: " "}}, ["labels"]),
        ({"Labels": {**GOOD_CONFIG["Labels"], "org.opencontainers.image.revision": "a" * 40 + "-dirty"}}, ["revision"]),
        ({"User": ""}, ["user"]),
        ({"User": "root"}, ["user"]),
        ({"User": "0:0"}, ["user"]),
        ({"Healthcheck": None}, ["healthcheck"]),
        ({"Healthcheck": {"Test": ["NONE"]}}, ["healthcheck"]),
        ({"Healthcheck": {"Test": ["CMD-SHELL", "curl x"]}}, ["healthcheck"]),
        ({"Healthcheck": {"Test": ["CMD", "/bin/sh", "-c", "x"]}}, ["healthcheck"]),
        ({"Entrypoint": None}, ["entrypoint"]),
        ({"Entrypoint": ["/bin/sh", "-c", "flashnext"]}, ["entrypoint"]),
        ({"Entrypoint": ["bash", "-c", "flashnext"]}, ["entrypoint"]),
    ],
)
def test_each_fault_of_a_configuration_is_named(change, names):
    assert failing({**GOOD_CONFIG, **change}) == names


def test_a_check_that_printed_nothing_has_failed():
    output = 'INFO vllm says hello\nflashnext-check: {"name": "series label", "ok": true, "detail": "ab"}\n'
    checks = read_inside(output, "exit code 132: Illegal instruction")
    assert [c.name for c in checks] == list(INSIDE)
    assert [c.ok for c in checks] == [True, False, False]
    assert "exit code 132" in checks[1].detail


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["bild"], "No such command"),
        (["pull"], "Missing argument"),
        (["pull", "Upper"], "not an image reference"),
        (["tag", "a:1", f"b@{DIGEST}"], "digest"),
        (["build", "--build-arg", "novalue"], "NAME=VALUE"),
        (["build", "--progress", "loud"], "--progress"),
        (["save", "a:1", "x.zip"], "known way"),
        (["lock", "--check", "--lock-file", "/nonexistent/base.json"], "no lock file"),
        (["cpu-base", "--context", "/nonexistent"], "there is no"),
    ],
)
def test_usage_errors_are_two_lines_and_exit_2(words, part, capsys, monkeypatch):
    # no engine there: a usage error is told before anybody is asked
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    assert main(words) == 2
    said = capsys.readouterr()
    lines = said.err.strip().splitlines()
    assert said.out == ""
    assert lines[0].startswith("ERROR: ")
    assert part in lines[0]
    assert lines[1].startswith("Fix: ")
    assert len(lines) == 2


def test_no_command_shows_the_help(capsys):
    assert main([]) == 2
    said = capsys.readouterr()
    assert "cpu-base" in said.out + said.err


def test_a_failure_with_json_is_an_object_too(capsys):
    assert main(["save", "a:1", "x.zip", "--json"]) == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["exit_code"] == 2
    assert said.err.startswith("ERROR: ")
