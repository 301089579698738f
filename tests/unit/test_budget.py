"""The arithmetic against the published figures (design/planner.md), to the byte."""

from __future__ import annotations

import pytest

from entrypoint import budget, plan


@pytest.fixture(scope="module")
def shapes():
    return plan.shapes(plan.published().text)


def test_state_page(shapes):
    assert budget.state_page_bytes(shapes) == 3_207_168


def test_row_bytes(shapes):
    assert budget.card_row_bytes(shapes) == 66
    assert budget.host_row_bytes(shapes) == 2_048


@pytest.mark.parametrize(
    "partition, host_pool, block, page",
    [
        ((16, 16, 16), True, 12_160, 3_210_240),
        ((16, 16, 16), False, 1_568, 4 * (2_048 + 64) * 1_568),
        ((48,), True, 4_064, 12 * 66 * 4_064),
        ((24, 24), True, 8_112, 6 * 66 * 8_112),
        ((12, 20, 16), True, 9_728, 5 * 66 * 9_728),
    ],
)
def test_block_and_page(shapes, partition, host_pool, block, page):
    layout = budget.kv_layout(shapes, partition, host_pool)
    assert (layout.block_size, layout.page_bytes) == (block, page)
    if host_pool:  # the rule itself: full, and the smallest multiple of 16 that is
        assert layout.page_bytes >= budget.state_page_bytes(shapes) > layout.page_bytes * (block - 16) // block


def test_capacity_of_the_published_box(shapes):
    layout = budget.kv_layout(shapes, (16, 16, 16), True)
    assert layout.blocks(550_000_000) == 171
    assert layout.blocks(470_000_000) == 146
    assert layout.per_request(262_144) == 22 + 14
    assert layout.needed(262_144, 4) == 145
    assert layout.host_layer_bytes(146) == 146 * 12_160 * 2_048
    assert layout.host_bytes(146) / 2**30 == pytest.approx(40.6, abs=0.05)


@pytest.mark.parametrize("n, rounded", [(0, 0), (1, 1), (2, 2), (3, 4), (4 << 30, 4 << 30), ((4 << 30) + 1, 8 << 30)])
def test_power_of_two(n, rounded):
    assert budget.power_of_two(n) == rounded


@pytest.mark.parametrize("stages, count", [(1, 1), (2, 11), (3, 55), (4, 165), (12, 1), (13, 0)])
def test_partitions_are_all_whole_groups(shapes, stages, count):
    found = list(budget.partitions(shapes, stages))
    assert len(found) == len(set(found)) == count
    assert all(sum(p) == 48 and len(p) == stages and all(n % 4 == 0 and n > 0 for n in p) for p in found)


def test_no_full_attention_is_an_error(shapes):
    from dataclasses import replace

    with pytest.raises(ValueError, match="full-attention"):
        budget.kv_layout(replace(shapes, layer_types=("linear_attention",) * 4), (4,), True)
