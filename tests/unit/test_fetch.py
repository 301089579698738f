"""Fetching over real HTTP from a server of our own: resumed, verified, refused with two lines; nothing here leaves the machine."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from entrypoint import demo, fetch, lint
from entrypoint.checkpoint import read_checkpoint
from entrypoint.errors import Exit, Refusal
from tests.support.hub import COMMIT, Hub

pytest.importorskip("huggingface_hub")
ROOT = Path(__file__).resolve().parents[2]
REPO = "someone/a-model"
WEIGHTS = "model.safetensors"
BIG = "big.bin"
"""huggingface_hub writes blocks of 10 MB, and only whole blocks outlive a cut."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    out = tmp_path_factory.mktemp("source") / "m"
    demo.make(out)
    return out


@pytest.fixture
def hub(source):
    with Hub(REPO, source) as server:
        yield server


@pytest.fixture(autouse=True)
def no_hub_settings(monkeypatch):
    for name in list(os.environ):
        if name.startswith("HF_"):
            monkeypatch.delenv(name)


def brought(hub, target, **more):
    return fetch.fetch(REPO, target, endpoint=hub.url, every_s=0.05, pause_s=0.01, **more)


def same(target, hub):
    return all((target / name).read_bytes() == data for name, data in hub.files.items())


def test_whole_model_and_nothing_the_second_time(hub, tmp_path):
    seen = []
    done = brought(hub, tmp_path / "t", progress=lambda *at: seen.append(at))
    total = sum(map(len, hub.files.values()))
    assert (done.commit, done.files, done.total_bytes, done.fetched_bytes) == (COMMIT, len(hub.files), total, total)
    assert same(tmp_path / "t", hub) and seen[-1] == (total, total)
    assert read_checkpoint(tmp_path / "t").tokenizer
    gets = len([1 for method, path, _ in hub.seen if method == "GET" and "/resolve/" in path])
    report = lint.examine(read_checkpoint(tmp_path / "t"), lint.hasher(lambda *at: None))
    assert report.revision == COMMIT and report.errors == ()
    again = brought(hub, tmp_path / "t")
    assert again.fetched_bytes == 0
    assert len([1 for method, path, _ in hub.seen if method == "GET" and "/resolve/" in path]) == gets


def test_a_cut_connection_goes_on_where_it_left_off(hub, tmp_path):
    hub.files[BIG] = random.Random(0).randbytes(25_000_000)
    hub.cut[BIG] = [11_000_000, 3_000_000]
    brought(hub, tmp_path / "t")
    assert same(tmp_path / "t", hub)
    starts = [int(span[6:].split("-")[0]) if span else 0 for span in hub.sent(BIG)]
    assert starts[0] == 0 and len(starts) == 3 and starts[1] == starts[2] >= 10_000_000, starts


def test_ctrl_c_ends_at_once_and_keeps_what_came(hub, tmp_path):
    hub.files[BIG] = random.Random(0).randbytes(60_000_000)
    hub.slow[BIG] = 0.15
    partial = tmp_path / "t" / f"{BIG}.partial"
    run = subprocess.Popen(
        [sys.executable, "-m", "entrypoint", "fetch", REPO, "--to", str(tmp_path / "t")],
        cwd=ROOT,
        env={**os.environ, "HF_ENDPOINT": hub.url},
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size) and time.monotonic() < until:
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=8)
    assert run.returncode == 130 and "Traceback" not in err, err
    assert 10_000_000 <= partial.stat().st_size < 60_000_000
    hub.slow.clear()
    brought(hub, tmp_path / "t")
    assert same(tmp_path / "t", hub)


@pytest.mark.slow
def test_a_run_that_was_killed_is_resumed_by_the_next(hub, tmp_path, monkeypatch):
    hub.files[BIG] = random.Random(0).randbytes(25_000_000)
    hub.cut[BIG] = [11_000_000, *[1000] * 1000]
    monkeypatch.setattr(fetch, "TRIES", 1)
    with pytest.raises(Refusal) as refused:
        brought(hub, tmp_path / "t")
    assert refused.value.code == Exit.CHECKPOINT and "a second run goes on" in refused.value.fix
    note = json.loads((tmp_path / "t" / fetch.NOTE).read_text())
    assert note["commit"] is None and set(note["files"]) == set(hub.files) - {BIG}
    hub.cut.clear()
    before = len(hub.sent(BIG))
    done = brought(hub, tmp_path / "t")
    assert same(tmp_path / "t", hub)
    assert [int(span[6:].split("-")[0]) >= 10_000_000 for span in hub.sent(BIG)[before:]] == [True]
    assert done.fetched_bytes < 16_000_000


def test_wrong_bytes_are_fetched_again_and_twice_wrong_is_refused(hub, tmp_path):
    hub.wrong[WEIGHTS] = 1
    brought(hub, tmp_path / "t")
    assert same(tmp_path / "t", hub) and len(hub.sent(WEIGHTS)) == 2
    hub.wrong[WEIGHTS] = 99
    with pytest.raises(Refusal, match=f"{WEIGHTS} came with another hash than the hub lists, twice") as refused:
        brought(hub, tmp_path / "u")
    assert refused.value.code == Exit.CHECKPOINT
    assert not (tmp_path / "u" / WEIGHTS).exists()
    assert WEIGHTS not in json.loads((tmp_path / "u" / fetch.NOTE).read_text())["files"]


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_file_that_changed_on_our_disk_is_fetched_again(hub, tmp_path, name):
    brought(hub, tmp_path / "t")
    data = bytearray((tmp_path / "t" / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "t" / name).write_bytes(bytes(data))
    assert brought(hub, tmp_path / "t").total_bytes and same(tmp_path / "t", hub)


def test_what_does_not_fit_is_refused_before_a_byte_is_written(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    with pytest.raises(Refusal, match="are still to be fetched") as refused:
        brought(hub, tmp_path / "t")
    assert refused.value.code == Exit.TABLE and not (tmp_path / "t").exists()


@pytest.mark.parametrize("below", [".", "a/b"])
def test_a_folder_that_may_not_be_written_is_refused_before_the_hub_is_asked(hub, below):
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        if user == 0:
            os.seteuid(65_534)  # root may write everywhere
        try:
            with pytest.raises(Refusal, match="may not be written by this user") as refused:
                brought(hub, Path(folder) / below)
        finally:
            os.seteuid(user)
            Path(folder).chmod(0o755)
        assert list(Path(folder).iterdir()) == []
    assert refused.value.code == Exit.TABLE and "./flashnext fetch --to FOLDER" in refused.value.fix
    assert hub.seen == []


def test_a_read_only_mount_is_refused_as_one(hub):
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    fixed = [Path(m[1]) for m in mounts if "ro" in m[3].split(",") and os.path.isdir(m[1])]
    if not fixed:
        pytest.skip("DID NOT RUN: nothing is mounted read-only here")
    with pytest.raises(
        Refusal, match=f"cannot fetch into {fixed[0]}/model: {fixed[0]} is mounted read-only"
    ) as refused:
        brought(hub, fixed[0] / "model")
    assert refused.value.code == Exit.TABLE and hub.seen == []


def test_without_to_it_goes_where_the_server_looks(tmp_path):
    assert fetch.default_target(tmp_path) == Path("model")
    (tmp_path / "model").mkdir()
    assert fetch.default_target(tmp_path) == tmp_path / "model"


def test_a_file_in_the_folders_place_is_refused(hub, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(Refusal, match="file is no folder"):
        brought(hub, tmp_path / "file")


def test_space_counts_what_is_missing_and_a_margin(tmp_path):
    fetch.check_space(tmp_path / "a" / "b", 10, free_bytes=10 + fetch.MARGIN_BYTES)
    with pytest.raises(Refusal, match=r"0\.00 GiB are still to be fetched"):
        fetch.check_space(tmp_path, 10, free_bytes=9 + fetch.MARGIN_BYTES)


def test_token_comes_from_a_file_and_stays_out_of_messages(source, tmp_path):
    secret = "hf_" + "x" * 30
    (tmp_path / "token").write_text(secret + "\n")
    with Hub(REPO, source, token=secret) as hub:
        with pytest.raises(Refusal, match="asks for consent or a token") as refused:
            brought(hub, tmp_path / "t", token="hf_wrong")
        assert "hf_wrong" not in refused.value.message + refused.value.fix
        brought(hub, tmp_path / "t", token=fetch.read_token(str(tmp_path / "token")))
        assert same(tmp_path / "t", hub)


@pytest.mark.parametrize("content", ["", "two words", "two\nlines", "\x00"])
def test_odd_token_files(tmp_path, content):
    (tmp_path / "token").write_text(content)
    with pytest.raises(Refusal, match="does not hold one token") as refused:
        fetch.read_token(str(tmp_path / "token"))
    assert refused.value.code == Exit.USAGE


def test_unknown_repository_revision_and_server(hub, tmp_path):
    with pytest.raises(Refusal, match="has no someone/else, or it is private"):
        fetch.fetch("someone/else", tmp_path / "t", endpoint=hub.url)
    with pytest.raises(Refusal, match="has no revision nowhere"):
        brought(hub, tmp_path / "t", revision="nowhere")
    with pytest.raises(Refusal, match="neither a folder here nor OWNER/NAME") as refused:
        fetch.fetch("not/a/repo", tmp_path / "t", endpoint=hub.url)
    assert refused.value.code == Exit.USAGE
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(Refusal, match="does not answer") as refused:
        fetch.fetch(REPO, tmp_path / "t", endpoint=url)
    assert refused.value.code == Exit.CHECKPOINT


def test_a_repository_without_weights(hub, tmp_path):
    del hub.files[WEIGHTS]
    with pytest.raises(Refusal, match="is no safetensors checkpoint"):
        brought(hub, tmp_path / "t")


@pytest.mark.parametrize("name", ["../escape", "/etc/x", "a\\..\\b", ""])
def test_a_listing_cannot_leave_the_folder(hub, tmp_path, name):
    hub.files[name] = b"x"
    with pytest.raises(Refusal, match="without a usable name"):
        brought(hub, tmp_path / "t")


def test_from_a_folder_and_on_from_half_a_copy(source, tmp_path):
    target = tmp_path / "t"
    target.mkdir()
    data = (source / WEIGHTS).read_bytes()
    (target / f"{WEIGHTS}.partial").write_bytes(data[:1000])
    done = fetch.fetch(str(source), target)
    assert done.commit is None and done.fetched_bytes == done.total_bytes - 1000
    assert (target / WEIGHTS).read_bytes() == data
    with pytest.raises(Refusal, match="has no revisions"):
        fetch.fetch(str(source), target, revision="main")
    with pytest.raises(Refusal, match="is the folder to fetch into"):
        fetch.fetch(str(source), source)


def test_deep_lint_knows_the_hubs_hash(hub, tmp_path):
    brought(hub, tmp_path / "t")
    data = bytearray((tmp_path / "t" / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (tmp_path / "t" / WEIGHTS).write_bytes(bytes(data))
    found = lint.examine(read_checkpoint(tmp_path / "t"), lint.hasher(lambda *at: None))
    assert [f.check for f in found.errors] == ["hash"]


def test_a_second_fetch_into_the_same_folder_waits_its_turn(hub, tmp_path):
    (tmp_path / "t").mkdir()
    with fetch._alone(tmp_path / "t"), pytest.raises(Refusal, match="another fetch into") as refused:
        brought(hub, tmp_path / "t")
    assert refused.value.code == Exit.TABLE


def test_digest_in_the_manner_of_git(tmp_path):
    # `git hash-object` of the six bytes "hello\n"
    (tmp_path / "f").write_bytes(b"hello\n")
    assert fetch.digest_of(tmp_path / "f", "git:x") == "git:ce013625030ba8dba906f756967f9e9ca394464a"


def test_the_command(hub, tmp_path):
    def run(*args, **env):
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHNEXT_", "HF_"))}
        return subprocess.run(
            [sys.executable, "-m", "entrypoint", "fetch", *args],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env=clean | {"HF_ENDPOINT": hub.url} | env,
        )

    done = run(REPO, "--to", str(tmp_path / "t"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["commit"] == COMMIT and same(tmp_path / "t", hub)
    bad = run("someone/else", "--to", str(tmp_path / "u"))
    assert bad.returncode == 4 and [line.split(":")[0] for line in bad.stderr.splitlines()] == ["ERROR", "Fix"]
