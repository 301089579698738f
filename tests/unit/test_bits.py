"""The account: what follows from the shapes alone is the article's to the digit; what depends on the allocation is counted."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from entrypoint import bits
from entrypoint.checkpoint import read_checkpoint
from entrypoint.errors import Exit, Refusal
from entrypoint.units import GIB
from tests.support import published_form as form

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def demo():
    return bits.demo()


def counted(demo, *wishes):
    stored, text = demo
    for wish in wishes:
        stored = bits.what_if(stored, wish)
    return bits.count(stored, text, "a test")


def test_what_follows_from_the_shapes_alone(demo):
    account = counted(demo)
    experts, table = account.row("experts"), account.row("table")
    assert experts.weights == 48 * 512 * 3 * 640 * 2560 == 120_795_955_200
    # The article says 125.75 B; the weights that transformers' model has are 6 M fewer.
    assert account.resident_weights == 125_743_653_760
    assert table.weights == 320_001_536 * 160 and table.bytes == 102_400_491_520
    assert f"{table.bytes / GIB:.2f}" == "95.37"
    assert table.touched_bytes == 16 * 320
    assert experts.bytes * 8 / experts.weights == 4.125
    assert f"{experts.touched_bytes / 1e9:.2f}" == "1.22"


def test_hyper_connection_in_bf16(demo):
    stored, unquantized = counted(demo), counted(demo, "hyper_connection=bf16")
    row = unquantized.row("hyper_connection")
    assert f"{row.bytes / GIB:.3f}" == "1.193"
    assert f"{(unquantized.touched_bytes - stored.touched_bytes) / 1e9:.2f}" == "0.62"
    assert f"{row.touched_bytes / unquantized.touched_bytes:.0%}" == "23%"


def test_experts_in_groups_of_64(demo):
    before, after = counted(demo).row("experts"), counted(demo, "experts=g64").row("experts")
    assert after.bits_per_weight - before.bits_per_weight == 0.125
    assert f"{(after.bytes - before.bytes) / GIB:.2f}" == "1.76"


def test_experts_in_8_bits_are_what_the_article_says_no_box_holds(demo):
    assert f"{counted(demo, 'experts=int8').row('experts').bytes / GIB:.0f}" == "114"


def test_roofline_is_bandwidth_over_bytes(demo):
    account = counted(demo)
    rate = {name: tokens for name, _, tokens in account.roofline()}["NVIDIA GeForce RTX 3090"]
    assert rate == pytest.approx(936e9 / account.touched_bytes)
    assert account.touched_bytes == sum(r.touched_bytes for r in account.rows if r.category != "table")


def test_headers_are_counted_to_the_byte(tmp_path):
    found = read_checkpoint(form.write(tmp_path / "m"))
    account = bits.count(bits.weights_of(found), found.text, "", bits.unread(found))
    by_category = found.weights.by_category
    for row in account.rows:
        # A checkpoint also holds the shape of each packed weight: 16 bytes that stay on the disk.
        shapes = sum(n.endswith(".weight_shape") and bits.category_of(n) == row.category for n in found.tensors)
        extra = 0 if row.category in ("mtp", "vision") else 16 * shapes
        assert row.bytes + extra == by_category[row.category], row.category
    assert {r.category for r in account.rows} == set(by_category)
    for category in ("mtp", "vision"):
        # A packed word holds 8 values of the experts, 4 of anything else; scales and shapes are no weights.
        weights = 0
        for name, tensor in found.tensors.items():
            if bits.category_of(name) == category and not name.endswith(("weight_scale", "weight_shape")):
                values = 1 if not name.endswith("weight_packed") else 8 if ".experts." in name else 4
                weights += math.prod(tensor.shape) * values
        assert account.row(category).weights == weights > 1e8 and account.row(category).touched_bytes == 0


def test_weights_of_a_draft_head_that_is_not_understood_are_not_guessed(tmp_path):
    change = lambda tensors, config: tensors.update({"mtp.fc.weight": ("BF16", (2560, 5120))})  # noqa: E731
    found = read_checkpoint(form.write(tmp_path / "m", change))
    assert bits.unread(found)["mtp"][0] == 0 and bits.unread(found)["mtp"][1] > 1e8


def test_a_checkpoint_that_is_not_whole_is_not_counted(tmp_path):
    folder = form.write(
        tmp_path / "m", lambda tensors, config: tensors.pop("model.language_model.layers.0.mlp.gate.weight")
    )
    with pytest.raises(Refusal, match="weights are missing") as refused:
        bits.weights_of(read_checkpoint(folder))
    assert refused.value.code == Exit.CHECKPOINT


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ("experts", "is not CATEGORY=FORM"),
        ("experts=", "is not CATEGORY=FORM"),
        ("experts=int7", "is not CATEGORY=FORM"),
        ("experts=bf16-g64", "is not CATEGORY=FORM"),
        ("table=int4", "is no category"),
        ("nothing=int4", "is no category"),
        ("experts=g96", "groups of 96 do not divide"),
        ("experts=g0", "groups of 0 do not divide"),
        ("indexer=g64", "is not packed"),
    ],
)
def test_odd_wishes_are_refused(demo, wish, message):
    with pytest.raises(Refusal, match=message) as refused:
        bits.what_if(demo[0], wish)
    assert refused.value.code == Exit.USAGE


def test_figure_is_svg_whose_bars_are_as_wide_as_the_bytes(demo):
    account = counted(demo)
    tree = ET.fromstring(bits.svg(account))
    bars = [
        (r[0].text.split(":")[0], float(r.get("width")), float(r.get("y")))
        for r in tree.iter("{http://www.w3.org/2000/svg}rect")
        if len(r)
    ]
    width = 740
    for row in (r for r in account.rows if r.resident):
        wide = [w for name, w, y in bars if name == row.category]
        assert wide == [
            pytest.approx(width * row.bytes / account.resident_bytes, abs=0.01),
            pytest.approx(width * row.touched_bytes / account.touched_bytes, abs=0.01),
        ]


@pytest.mark.parametrize("wish", ["hyper_connection=bf16", "experts=int2"])
def test_words_of_the_figure_are_whole_and_inside_it(demo, wish):
    stored, text = demo
    account = bits.count(bits.what_if(stored, wish), text, f"{bits.DEMO_ALLOCATION} " * 3)
    tree = ET.fromstring(bits.svg(account))
    space = "{http://www.w3.org/2000/svg}"
    texts = [t for t in tree.iter(f"{space}text")]
    assert " ".join(t.text for t in texts if t.get("font-size") == "12").split() == account.origin.split()
    assert all(float(t.get("y")) < int(tree.get("height")) - 4 for t in texts)
    # On a segment only where it is wide enough; each name else in the legend.
    segments = [(float(r.get("x")), float(r.get("width"))) for r in tree.iter(f"{space}rect") if len(r)]
    for label in (t for t in texts if t.get("text-anchor") == "middle"):
        assert any(abs(x + w / 2 - float(label.get("x"))) < 0.02 and 6 * len(label.text) < w for x, w in segments)
    legend = {t.text.split(":")[0] for t in texts}
    assert {r.category for r in account.rows if r.resident} <= legend


def test_the_command(tmp_path):
    def run(*args):
        return subprocess.run(
            [sys.executable, "-m", "entrypoint", "bits", *args], cwd=ROOT, capture_output=True, text=True
        )

    text = run("--demo", "--what-if", "experts=g64", "--figure", str(tmp_path / "f.svg"))
    assert text.returncode == 0, text.stderr
    assert "experts INT4 g128; linear attention" in text.stdout and "+1.76 GiB on the cards" in text.stdout
    assert ET.parse(tmp_path / "f.svg")
    found = json.loads(run("--demo", "--json").stdout)
    assert found["resident_weights"] == 125_743_653_760
    odd = run("--demo", "--what-if", "table=int4")
    assert odd.returncode == 2 and [line.split(":")[0] for line in odd.stderr.splitlines()] == ["ERROR", "Fix"]
