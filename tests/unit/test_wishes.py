"""Wishes: order of sources, every kind malformed, contradictions, unknown names."""

from __future__ import annotations

import pytest

from entrypoint import flags
from entrypoint.errors import Exit, Refusal
from entrypoint.wishes import gather, read_dotenv, table


def value(name, flags_=None, environ=None, dotenv=None):
    return gather(flags_ or {}, environ or {}, dotenv)[name]


def test_flag_beats_environment_beats_file_beats_default(tmp_path):
    env_file = tmp_path / ".env"
    env_file.write_text("FLASHNEXT_STREAMS=2\nFLASHNEXT_CHUNK=256\nFLASHNEXT_PORT=9000\n")
    environ = {"FLASHNEXT_STREAMS": "3", "FLASHNEXT_CHUNK": "128"}
    wishes = gather({"streams": "8"}, environ, env_file)
    assert (wishes["streams"].value, wishes["streams"].source) == (8, "flag --streams")
    assert (wishes["chunk"].value, wishes["chunk"].source) == (128, "environment FLASHNEXT_CHUNK")
    assert (wishes["port"].value, wishes["port"].source) == (9000, "file .env FLASHNEXT_PORT")
    assert (wishes["drain"].value, wishes["drain"].source) == (5, "default")


def test_empty_means_not_set():
    assert value("context", environ={"FLASHNEXT_CONTEXT": ""}).source == "default"


@pytest.mark.parametrize(
    "name, raw, expected",
    [
        ("kv_cache_memory", "550000000", 550_000_000),
        ("kv_cache_memory", "512MiB", 512 << 20),
        ("host_kv_max", "48G", 48 << 30),
        ("layer_partition", "16, 16,16", (16, 16, 16)),
        ("host_kv", "YES", "on"),
        ("host_kv", "0", "off"),
        ("boot_timeout", "90m", 5400.0),
        ("context", "262_144", 262144),
        ("device", "CPU", "cpu"),
    ],
)
def test_well_formed(name, raw, expected):
    assert value(name, {name: raw}).value == expected


@pytest.mark.parametrize(
    "name, raw",
    [
        ("context", "many"),
        ("context", "12.5"),
        ("context", "1000"),
        ("streams", "0"),
        ("streams", "65"),
        ("chunk", "-1"),
        ("kv_cache_memory", "lots"),
        ("kv_cache_memory", "0"),
        ("kv_cache_memory", "-5GiB"),
        ("layer_partition", "16;16;16"),
        ("layer_partition", "16,,16"),
        ("host_kv", "perhaps"),
        ("device", "tpu"),
        ("port", "70000"),
        ("port", "http"),
        ("drain", "soon"),
        ("boot_timeout", "5"),
        ("model", "a\0b"),
        ("model_name", "two\nlines"),
    ],
)
def test_malformed_names_the_variable_and_exits_with_2(name, raw):
    env = next(w.env for w in table() if w.name == name)
    with pytest.raises(Refusal) as e:
        gather({}, {env: raw}, None)
    assert e.value.code == Exit.USAGE
    assert env in e.value.message and "\n" not in e.value.message and e.value.fix


def test_article_names_are_wishes():
    environ = {
        "VLLM_PLE_MMAP_PATH": "/t.bin",
        "VLLM_QSA_KV_OFFLOAD": "1",
        "VLLM_QSA_KV_OFFLOAD_MAX_GIB": "56",
        "VLLM_QSA_KVO_ARENA": "100663296",
    }
    wishes = gather({}, environ, None)
    assert wishes.value("table") == "/t.bin"
    assert wishes.value("host_kv") == "on"
    assert wishes.value("host_kv_max") == 56 << 30
    assert wishes.value("arena") == 100_663_296


def test_alias_and_name_that_disagree_are_a_contradiction():
    with pytest.raises(Refusal, match="contradiction") as e:
        gather({}, {"FLASHNEXT_HOST_KV": "off", "VLLM_QSA_KV_OFFLOAD": "1"}, None)
    assert e.value.code == Exit.USAGE


def test_alias_and_name_that_agree_are_fine():
    assert gather({}, {"FLASHNEXT_HOST_KV": "on", "VLLM_QSA_KV_OFFLOAD": "1"}, None).value("host_kv") == "on"


def test_unknown_variable_is_refused_with_the_nearest_name():
    with pytest.raises(Refusal) as e:
        gather({}, {"FLASHNEXT_CONTEXTS": "1"}, None)
    assert "FLASHNEXT_CONTEXT?" in e.value.fix


def test_dotenv_as_compose_reads_it(tmp_path):
    f = tmp_path / ".env"
    f.write_text("# c\n\nexport A=1\nB='two words' # c\nC=\"x#y\"\nD=v # tail\nE=\n")
    assert read_dotenv(f) == {"A": "1", "B": "two words", "C": "x#y", "D": "v", "E": ""}


@pytest.mark.parametrize("content", [b"just words\n", b"\xff\xfe=1\n"])
def test_dotenv_that_is_none_is_refused(tmp_path, content):
    f = tmp_path / ".env"
    f.write_bytes(content)
    with pytest.raises(Refusal) as e:
        gather({}, {}, f)
    assert e.value.code == Exit.USAGE


@pytest.mark.parametrize(
    "args, env_file",
    [([], ".env"), (["--env-file", "box.env"], "box.env"), (["--context=1", "--env-file=box.env"], "box.env")],
)
def test_the_file_of_wishes_is_named_beside_them(args, env_file):
    given = flags.read(args)
    assert str(given.env_file) == env_file
    assert given.wishes == ({"context": "1"} if "--context=1" in args else {})


@pytest.mark.parametrize(
    "args, fix",
    [
        (["--contxt", "1"], "--context"),
        (["--context"], "VALUE"),
        (["--context=1", "--context=2"], "one"),
        (["--env-file"], "VALUE"),
        (["--env-file", "a", "--env-file", "b"], "one"),
        (["stray"], "--help"),
    ],
)
def test_flags_that_are_not_understood(args, fix):
    with pytest.raises(Refusal) as e:
        flags.read(args)
    assert e.value.code == Exit.USAGE and fix in e.value.fix


def test_every_wish_is_in_the_help():
    text = flags.help_text()
    assert all(w.flag in text and w.env in text for w in table())
