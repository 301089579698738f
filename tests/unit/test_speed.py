"""The speed estimate: the article's figures, the measured boxes' own rates, and None where something is not known."""

from __future__ import annotations

import dataclasses

import pytest

from entrypoint import bits, plan, speed
from entrypoint.checkpoint import read_checkpoint
from entrypoint.simulate import simulate
from entrypoint.wishes import gather
from tests.support import published_form


def made(cards: str, flags: dict | None = None, ram: str = "125GiB"):
    box = simulate(cards, ram=ram)
    model = plan.published()
    reads = speed.published_token_bytes(model.text, model.head_bytes)
    return box, plan.make_plan(box, model, gather(flags or {}, {}, None)), model.text, reads


def estimate(cards: str, flags: dict | None = None):
    box, planned, text, reads = made(cards, flags)
    return speed.estimate(planned, box, text, reads)


def test_the_article_s_figures():
    assert round(speed.most(5.83e9, 936e9), 1) == 160.5
    found = estimate("3x3090")
    assert found.token_bytes == 5_830_000_000 and int(found.most_tokens_s) == 160
    assert found.low_tokens_s < 80.0 <= found.high_tokens_s + 0.1 and found.low_tokens_s > 70
    # 2,051 rows of 2,048 B in 12 layers; "about 1/6 of PCIe bandwidth" at 80 tok/s
    assert found.link_bytes == 2_051 * 2_048 * 12 == 50_405_376
    assert found.link_busy == pytest.approx(1 / 6, abs=0.02)


@pytest.mark.parametrize("box", speed.measured()["boxes"], ids=lambda b: b["name"])
def test_a_measured_box_lies_in_its_own_range(box):
    low, high = speed.spread(box["token_bytes"] / box["bandwidth_bytes_s"])
    assert low <= box["tokens_s"] * 1.0001 and box["tokens_s"] <= high * 1.0001


def test_more_bandwidth_is_never_slower_and_the_most_is_never_reached():
    last = (float("inf"), float("inf"))
    for least_ms in [n / 4 for n in range(1, 160)]:
        low, high = speed.spread(least_ms / 1000)
        assert low <= high < 1000 / least_ms and low <= last[0] and high <= last[1]
        last = (low, high)


def test_stages_add_up_and_each_is_read_at_its_own_card_s_rate():
    found = estimate("2x3090+1x4090")
    assert [s.bandwidth_bytes_s for s in found.stages] == [936e9, 936e9, 1008e9]
    assert 1 / found.most_tokens_s == pytest.approx(sum(s.token_bytes / s.bandwidth_bytes_s for s in found.stages))
    assert sum(s.token_bytes for s in found.stages) == 5_830_000_000
    same = estimate("4x3090")
    assert same.most_tokens_s == pytest.approx(estimate("3x3090").most_tokens_s), "more stages read the same bytes"


def test_a_narrow_link_bounds_the_estimate():
    box, planned, text, reads = made("3x3090")
    narrow = dataclasses.replace(
        box, gpus=tuple(dataclasses.replace(g, pcie_gen_max=3, pcie_width_now=1) for g in box.gpus)
    )
    found = speed.estimate(planned, narrow, text, reads)
    assert found.most_tokens_s == pytest.approx(0.8 * 8e9 * 128 / 130 / 8 / 50_405_376)
    assert found.link_busy > 0.8
    unknown = dataclasses.replace(box, gpus=tuple(dataclasses.replace(g, pcie_gen_max=None) for g in box.gpus))
    found = speed.estimate(planned, unknown, text, reads)
    assert found.link_busy is None and int(found.most_tokens_s) == 160


def test_unknown_is_none():
    box, planned, text, reads = made("3x24GiB@8.6")
    assert speed.estimate(planned, box, text, reads) is None
    assert "24GiB@8.6" in speed.unknown(planned, box, text, reads)
    box, planned, text, reads = made("3x3090")
    assert speed.unknown(planned, box, text, reads) is None and speed.estimate(planned, box, text, None) is None
    assert speed.estimate(planned, box, dataclasses.replace(text, indexer_budget=None), reads) is None
    assert speed.estimate(dataclasses.replace(planned, stages=()), box, text, reads) is None


def test_bytes_of_a_token_from_headers_agree_with_the_account(tmp_path):
    found = read_checkpoint(published_form.write(tmp_path))
    reads = speed.token_bytes(found)
    account = bits.count(bits.weights_of(found), found.text, "x")
    # the account leaves out the small integers that say how a matrix was packed (24 B a weight)
    assert account.touched_bytes <= reads.total <= account.touched_bytes * 1.001 + 24 * 200
    assert reads.before == account.row("embed").touched_bytes
    assert len(reads.layers) == found.text.num_hidden_layers
    assert speed.token_bytes(dataclasses.replace(found, tensors=type(found.tensors)())) is None
