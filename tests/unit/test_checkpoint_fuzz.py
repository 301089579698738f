"""10,000 broken headers and configs: each ends in a report or in one clean refusal, in bounded time and memory.

Seeded, so that a case that fails is the same case again; its number and kind are in the message.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import struct
import time

import pytest

from entrypoint import bits, checkpoint_fix, lint
from entrypoint.checkpoint import read_checkpoint
from entrypoint.errors import Exit, Refusal
from tests.support import headers
from tests.support import published_form as form

HEADERS, MODELS = 6_000, 4_000
LONGEST_S = 5.0
MOST_BYTES = 600 << 20

ODD = (
    None,
    True,
    -1,
    0,
    1,
    3,
    1 << 31,
    1 << 63,
    10**400,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "128",
    "\x00",
    "re:(",
    "re:.*",
    "../..",
    [],
    {},
    [None],
    [-1, 2],
    ["a", 1],
    [[[]]],
    [1 << 62] * 3,
    {"a": {"b": []}},
)


@pytest.fixture(autouse=True)
def bounded_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MOST_BYTES, f"{grown:,} bytes more at the peak"


def places(value, path=()):
    """Paths of every value inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from places(part, (*path, key))


def mutated(value, rng, times=1):
    """A copy of a JSON value with some parts replaced, dropped or renamed."""
    out = json.loads(json.dumps(value))
    for _ in range(times):
        found = list(places(out))
        if not found:
            break
        *way, last = rng.choice(found)
        at = out
        for key in way:
            at = at[key]
        what = rng.random()
        if what < 0.7:
            at[last] = copy.deepcopy(rng.choice(ODD))  # one that went in twice would be changed in both places
        elif what < 0.85 or not isinstance(at, dict):
            del at[last]
        else:
            at[str(last) + rng.choice(("x", ".weight", "\n", "é"))] = at.pop(last)
    return out


def run(folder, label):
    """Everything that reads a checkpoint; returns how it ended."""
    begun = time.monotonic()
    try:
        found = read_checkpoint(folder)
        report = lint.examine(found)
        ended = "errors" if report.errors else "clean"
        assert all(f.message and f.fix and f.verdict in ("ERROR", "WARN") for f in report.findings)
        json.dumps(report.as_dict())
        if not report.errors:
            bits.count(bits.weights_of(found), found.text, "", bits.unread(found))
        elif all(f.repair for f in report.errors):
            checkpoint_fix.config_groups(found, lint.weights_of(found, lint.Findings()))
    except Refusal as refusal:
        assert refusal.code == Exit.CHECKPOINT and "\n" not in refusal.message and refusal.fix, label
        ended = "refused"
    except Exception as error:
        raise AssertionError(f"{label}: {type(error).__name__}: {error}") from error
    spent_s = time.monotonic() - begun
    assert spent_s < LONGEST_S, f"{label}: {spent_s:.1f} s"
    return ended


@pytest.mark.slow
def test_headers(tmp_path):
    rng = random.Random(7)
    folder = tmp_path / "m"
    tensors = {f"model.layers.{n}.w": ("BF16", (4, 8)) for n in range(6)}
    headers.write_checkpoint(folder, tensors, {"model_type": "qwen3"}, index=False)
    (folder / "tokenizer.json").write_text(json.dumps(form.tokenizer()))
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    entries, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    ended = {"refused": 0, "clean": 0, "errors": 0}
    for case in range(HEADERS):
        kind = rng.choice(("bytes", "length", "cut", "json", "deep", "noise", "twice"))
        if kind == "bytes":
            broken = bytearray(whole)
            for _ in range(rng.randint(1, 8)):
                broken[rng.randrange(8 + length)] = rng.randrange(256)
            content = bytes(broken)
        elif kind == "length":
            size = rng.choice(
                (0, 1, length - 1, length + 1, 1 << 20, 1 << 40, (1 << 63) - 1, (1 << 64) - 1, rng.getrandbits(64))
            )
            content = struct.pack("<Q", size) + whole[8:]
        elif kind == "cut":
            content = whole[: rng.randrange(len(whole))] + bytes(rng.choice((0, 0, 1, 1000)))
        elif kind == "deep":
            text = (rng.choice(("[", '{"a":')) * rng.randint(1, 100_000)).encode()
            content = struct.pack("<Q", len(text) + 1) + b"{" + text + data
        elif kind == "noise":
            content = rng.randbytes(rng.randint(0, 400))
        elif kind == "twice":
            text = json.dumps(entries)[:-1] + ', "model.layers.0.w": ' + json.dumps(rng.choice(ODD)) + "}"
            content = struct.pack("<Q", len(text)) + text.encode() + data
        else:
            text = json.dumps(mutated(entries, rng, rng.randint(1, 4))).encode()
            content = struct.pack("<Q", len(text)) + text + data
        path.write_bytes(content)
        ended[run(folder, f"header {case} ({kind})")] += 1
    assert ended["refused"] > 0.8 * HEADERS, ended


@pytest.mark.slow
def test_configs_and_tensors(tmp_path):
    rng = random.Random(11)
    folder = tmp_path / "m"

    def fewer(tensors, config):
        for name in [n for n in tensors if (".experts." in n and ".experts.0." not in n) or n.startswith("mtp.")]:
            del tensors[name]
        config["text_config"]["num_experts"] = 1
        for layer in range(4):
            tensors[f"model.language_model.layers.{layer}.mlp.gate.weight"] = ("BF16", (1, 2560))

    form.write(folder, fewer)
    assert run(folder, "before") == "clean"
    config = json.loads((folder / "config.json").read_text())
    small = {
        "config.json": config,
        "generation_config.json": form.generation(),
        "tokenizer.json": form.tokenizer(),
    }
    path = folder / "model.safetensors"
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entries = json.loads(file.read(length))
    tensors = {n: (e["dtype"], tuple(e["shape"])) for n, e in entries.items() if n != "__metadata__"}
    (folder / "model.safetensors.index.json").unlink()
    ended = {"refused": 0, "clean": 0, "errors": 0}
    for case in range(MODELS):
        kind = rng.choice(
            ("config.json", "config.json", "groups", "generation_config.json", "tokenizer.json", "tensors")
        )
        if kind == "tensors":
            changed = dict(tensors)
            for name in rng.sample(sorted(tensors), rng.randint(1, 5)):
                dtype, shape = changed.pop(name)
                if rng.random() < 0.8:
                    shape = tuple(rng.choice((n, n + 1, n * 2, n // 2, 0, 1)) for n in shape)
                    shape = shape if rng.random() < 0.8 else (*shape, rng.choice((1, 2)))
                    changed[name] = (rng.choice((dtype, "I32", "F32", "F8_E4M3", "BF16", "I64")), shape)
            headers.write_header_only(path, changed)
        elif kind == "groups":
            groups = mutated(config["quantization_config"], rng, rng.randint(1, 5))
            (folder / "config.json").write_text(json.dumps({**config, "quantization_config": groups}))
        else:
            (folder / kind).write_text(json.dumps(mutated(small[kind], rng, rng.randint(1, 4))))
        ended[run(folder, f"model {case} ({kind})")] += 1
        for name, content in small.items():
            (folder / name).write_text(json.dumps(content))
        if kind == "tensors":
            headers.write_header_only(path, tensors)
    assert min(ended.values()) > 0.02 * MODELS, ended
