"""A bug report never says who or where a box is: planted secrets of every kind, whole files searched for them."""

from __future__ import annotations

import getpass
import json
import socket
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrypoint import report
from entrypoint.errors import Exit, Refusal
from entrypoint.report import Redactor, machine_facts, of_this_box, told_environment, write

PLANTED = {
    "hub token": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "api key": "sk-proj-0123456789abcdefABCDEF",
    "github token": "ghp_0123456789abcdefghijABCDEFGHIJ456789",
    "cloud key": "AKIAIOSFODNN7EXAMPLE",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJlMTIz",
    "gpu": "GPU-8f1a0001-1111-2222-3333-444455556666",
    "short gpu": "GPU-8f1a0001",
    "mig": "MIG-5c1d2e3f-aaaa-bbbb-cccc-0123456789ab",
    "uuid": "0f0e0d0c-1111-4222-8333-0123456789ab",
    "mac": "de:ad:be:ef:00:17",
    "mail": "alice.liddell@wonderland.example",
    "private address": "192.168.17.23",
    "public address": "203.0.113.77",
    "ipv6": "2001:db8:85a3::8a2e:370:7334",
    "link-local": "fe80::1ff:fe23:4567:890a",
    "home": "/home/alice/models/secret-project",
    "mac home": "/Users/alice/Documents/plan",
    "windows home": "/mnt/c/Users/Alice/model",
    "root home": "/" + "root/hidden/place",
    "stick": "/run/media/alice/hidden/model",
    "automounted server": "/net/wonderland/hidden",
    "password in an address": "https://alice:s3cr3tpw@mirror.example/simple",
    "server": "https://gitlab.wonderland.example:8443/x",
}


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("frame", ["{}", "the value is {} here", "X={},next", '"{}"', "({})", "a: {}\nb"])
def test_a_planted_text_is_gone_from_any_sentence(kind, frame):
    planted = PLANTED[kind]
    out = Redactor().text(frame.format(planted))
    assert planted not in out, out
    for part in ("alice", "Alice", "s3cr3tpw", "secret-project", "hidden", "8f1a0001", "wonderland", "Documents"):
        assert part not in out, out


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("Authorization: Bearer abcdef123456", "abcdef123456"),
        ("Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
        ("--api-key plain-and-short", "plain-and-short"),
        ("api_key=hunter22", "hunter22"),
        ("VLLM_API_KEY: 'hunter22'", "hunter22"),
        ("my_token=abcd", "abcd"),
        ("Serial Number : 0324918012345", "0324918012345"),
        ("serial: PF1ABCDE", "PF1ABCDE"),
    ],
)
def test_what_follows_a_telling_word_is_gone(text, gone):
    assert gone not in Redactor().text(text)


@pytest.mark.parametrize(
    "text",
    [
        "580.95.05",
        "kernel 6.8.0-85-generic",
        "5.15.167.4-microsoft-standard-WSL2",
        "NVIDIA GeForce RTX 3090, compute capability 8.6",
        "00000000:0B:00.0 and 0000:41:00.0",
        "127.0.0.1:8000 and 0.0.0.0 and ::1",
        "http://127.0.0.1:8000/v1/models, https://huggingface.co",
        "nvme (ext4 on nvme0n1, nvme1n1)",
        "/dev/mapper/vg-models at /data/models, /model, /var/lib/flashnext",
        "262,144 tokens, 4.07 full requests; 25,769,803,776 bytes",
        "the token budget, basic settings, secret: <secret-1>",
        "--kv-cache-memory-bytes 550000000 --max-num-seqs 4",
        "vLLM 0.30.0, CUDA 13.0, 12:30:45",
    ],
)
def test_what_helps_stays(text):
    assert Redactor(hosts=["localhost"], users=["root"]).text(text) == text


def test_the_same_text_is_the_same_placeholder():
    redact = Redactor()
    assert redact.text("GPU-aaaa1111 GPU-bbbb2222 GPU-aaaa1111") == "<gpu-1> <gpu-2> <gpu-1>"
    assert redact.text("10.1.2.3 to 10.1.2.4, 10.1.2.3") == "<address-1> to <address-2>, <address-1>"


def test_names_of_this_box_are_whole_words():
    redact = Redactor(secrets=["hunter22", "abc"], hosts=["wonder"], users=["al"], homes=["/srv/people/al"])
    assert redact.text("on wonder, WONDER.lan and wonderful") == "on <host-1>, <host-1>.lan and wonderful"
    assert (
        redact.text("al owns /data/al/x and al_model, total")
        == "<user-1> owns /data/<user-1>/x and <user-1>_model, total"
    )
    assert redact.text("/srv/people/al/models/x.bin is there; /srv/people/alan too") == (
        "<home-path-1> is there; /srv/people/alan too"
    )
    assert redact.text("xxhunter22yy abc") == "xx<secret-1>yy abc", (
        "a secret of three letters would tear holes everywhere"
    )


def test_a_value_goes_by_its_key():
    redact = Redactor()
    given = {
        "MY_SECRET": "plain",
        "hf_token": "plain too",
        "db": {"password": "p"},
        "api_key_file": "/run/secrets/key",
        "settings": [{"name": "X_API_KEY", "value": "odd"}, {"name": "PORT", "value": "8000"}],
        "argv": ["serve", "--api-key", "odd words", "--port", "8000"],
        "tokens": 262144,
        "kv": [1.5, None, True],
    }
    out = redact.value(given)
    text = json.dumps(out)
    assert "plain" not in text and "odd" not in text
    assert out["db"] == {"password": "<secret-3>"}
    assert (out["api_key_file"], out["tokens"], out["kv"]) == ("/run/secrets/key", 262144, [1.5, None, True])
    assert out["settings"][1] == {"name": "PORT", "value": "8000"}
    assert out["argv"][:2] == ["serve", "--api-key"] and out["argv"][3:] == ["--port", "8000"]


def test_this_box_is_known_by_itself(monkeypatch):
    environ = {
        "HF_TOKEN": "not-of-a-known-shape-1",
        "MY_PASSWORD": "correct horse",
        "HOME": "/srv/homes/eve",
        "USER": "eve",
        "HOSTNAME": "pod-7f",
        "PWD": "/data",
        "HF_TOKEN_PATH": "/data/token",
    }
    redact = of_this_box(environ, ["the api key"])
    text = f"not-of-a-known-shape-1 correct horse the api key /srv/homes/eve/x eve pod-7f {socket.gethostname()} /data /data/token"
    out = redact.text(text)
    for gone in ("known-shape", "horse", "the api key", "eve", "pod-7f", socket.gethostname()):
        assert gone not in out, out
    assert out.endswith("/data /data/token")
    assert Path.home().as_posix() not in redact.text(f"{Path.home()}/x")
    if getpass.getuser() not in report._HARMLESS_USERS:
        assert getpass.getuser() not in redact.text(f"run by {getpass.getuser()}")


def test_only_telling_variables_are_copied():
    environ = {
        "FLASHNEXT_CONTEXT": "4096",
        "CUDA_VISIBLE_DEVICES": "0",
        "NCCL_P2P_DISABLE": "1",
        "AWS_REGION": "eu",
        "PATH": "/bin",
        "FLASHNEXTISH": "x",
    }
    assert told_environment(environ) == {
        "CUDA_VISIBLE_DEVICES": "0",
        "FLASHNEXT_CONTEXT": "4096",
        "NCCL_P2P_DISABLE": "1",
    }


def test_mounts_keep_their_kind_and_lose_their_server():
    facts = {
        "cgroup_path": "/sys/fs/cgroup/user.slice/user-1000.slice",
        "mounts": {
            "model": {"source": "nas.lan:/export/alice", "fs_type": "nfs4", "kind": "network"},
            "data": {"source": "/dev/nvme0n1p2", "fs_type": "ext4", "kind": "nvme"},
        },
    }
    out = machine_facts(facts)
    assert out["mounts"]["model"] == {"source": "<nfs4 source>", "fs_type": "nfs4", "kind": "network"}
    assert out["mounts"]["data"]["source"] == "/dev/nvme0n1p2"
    assert out["cgroup_path"] == "<cgroup>"


def test_a_file_is_made_new_and_private(tmp_path):
    file = tmp_path / "report.json"
    write(file, {"a": list(PLANTED.values())}, Redactor())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    text = file.read_text()
    assert json.loads(text)["a"] and not any(planted in text for planted in PLANTED.values())
    with pytest.raises(Refusal, match="is there already") as refusal:
        write(file, {"b": 1}, Redactor())
    assert refusal.value.code == Exit.USAGE and file.read_text() == text


def test_a_link_is_not_followed_and_a_missing_folder_is_refused(tmp_path):
    target = tmp_path / "elsewhere"
    (tmp_path / "link").symlink_to(target)
    for name in ("link", "no/such/folder"):
        with pytest.raises(Refusal) as refusal:
            write(tmp_path / name, {}, Redactor())
        assert refusal.value.code == Exit.USAGE
    assert not target.exists()


@given(st.text(max_size=60), st.sampled_from(sorted(PLANTED)))
def test_any_text_around_a_secret_is_redacted_without_an_error(text, kind):
    out = Redactor(users=["alice"]).text(f"{text} {PLANTED[kind]} {text}")
    assert PLANTED[kind] not in out


@pytest.mark.parametrize("part", ["a", "-", ":", "1.", "/home/", "a.", "--a", "x@", "0-", "a:", "token=", "GPU-"])
def test_a_long_text_takes_no_time_and_is_cut(part):
    begun = time.monotonic()
    out = Redactor(users=["alice"], homes=["/home/alice"]).text(part * 50_000 + "hf_AbCdEfGhIjKlMnOp")
    assert time.monotonic() - begun < 3
    assert "hf_AbC" not in out
