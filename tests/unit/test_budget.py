"""The arithmetic against the published figures (design/planner.md), to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrypoint import activation, budget, host_ram, model, plan
from entrypoint.activation import Step
from entrypoint.card import Cards

MIB, GIB = 2**20, 2**30


@pytest.fixture(scope="module")
def shapes():
    return model.shapes(model.published().text)


# --- KV pool ----------------------------------------------------------------------------------------------------------


def test_state_page(shapes):
    assert budget.state_page_bytes(shapes) == 3_207_168


def test_row_bytes(shapes):
    assert budget.card_row_bytes(shapes) == 66
    assert budget.host_row_bytes(shapes) == 2_048


@pytest.mark.parametrize(
    "partition, host_pool, block, pages, states",
    [
        ((16, 16, 16), True, 12_160, [3_210_240] * 3, 14),
        ((16, 16, 16), False, 1_568, [5 * 3_211_264 - 2_809_856] * 3, 5),
        ((48,), True, 4_064, [12 * 66 * 4_064], 38),
        ((24, 24), True, 8_112, [6 * 66 * 8_112] * 2, 20),
        ((12, 20, 16), True, 9_728, [5 * 66 * 9_728] * 3, 20),
        # 13 linear layers of the first stage share 3 groups: five states side by side widen its block
        ((17, 16, 15), False, 1_568, [5 * 3_211_264, 13_246_464, 13_246_464], 5),
    ],
)
def test_block_pages_and_states(shapes, partition, host_pool, block, pages, states):
    layout = budget.kv_layout(shapes, partition, host_pool)
    assert (layout.block_size, list(layout.stage_pages), layout.states_per_request) == (block, pages, states)
    assert layout.page_bytes == max(pages)
    if host_pool:  # the rule itself: full, and the smallest multiple of 16 that is
        assert layout.page_bytes >= budget.state_page_bytes(shapes) > layout.page_bytes * (block - 16) // block


def test_capacity_of_the_published_box(shapes):
    layout = budget.kv_layout(shapes, (16, 16, 16), True)
    assert (layout.blocks(550_000_000), layout.tokens(171, 262_144)) == (171, 1_245_184)
    assert layout.blocks(470_000_000) == 146
    assert layout.per_request(262_144) == 22 + 14
    assert layout.needed(262_144, 4) == 145
    assert layout.host_layer_bytes(146) == 146 * 12_160 * 2_048
    assert layout.host_bytes(146) / GIB == pytest.approx(40.6, abs=0.05)
    assert layout.groups == 15


def test_the_article_s_block_wastes_states(shapes):
    layout = budget.kv_layout(shapes, (16, 16, 16), True, 12_144)
    assert layout.page_bytes == 3_207_168 and layout.groups == 21
    assert (layout.blocks(550_000_000), layout.tokens(171, 262_144)) == (171, 1_067_300)
    assert (layout.blocks(400_000_000), layout.tokens(124, 1_048_576)) == (124, 1_215_172)
    # the smallest pool that holds one full request, beside which vLLM wants its null block
    assert layout.per_request(262_144) * layout.page_bytes == 134_701_056


@pytest.mark.parametrize("stages, count", [(1, 1), (2, 11), (3, 55), (4, 165), (12, 1), (13, 0)])
def test_partitions_are_all_whole_groups(shapes, stages, count):
    found = list(budget.partitions(shapes, stages))
    assert len(found) == len(set(found)) == count
    assert all(sum(p) == 48 and len(p) == stages and all(n % 4 == 0 and n > 0 for n in p) for p in found)


def test_no_full_attention_is_an_error(shapes):
    with pytest.raises(ValueError, match="full-attention"):
        budget.kv_layout(replace(shapes, layer_types=("linear_attention",) * 4), (4,), True)


# --- host RAM ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, rounded", [(0, 0), (1, 1), (2, 2), (3, 4), (4 << 30, 4 << 30), ((4 << 30) + 1, 8 << 30)])
def test_power_of_two(n, rounded):
    assert budget.power_of_two(n) == rounded


@pytest.mark.parametrize(
    "most_bytes, pool_gib", [(141_115_391, 12), (279_023_615, 24), (554_840_063, 48), (1_109_680_127, 96)]
)
def test_the_edges_of_the_power_of_two_rule(shapes, most_bytes, pool_gib):
    """One byte of KV memory per card more doubles the pool (article 5.4, block 12,144)."""
    layout = budget.kv_layout(shapes, (16, 16, 16), True, 12_144)
    below, above = layout.blocks(most_bytes), layout.blocks(most_bytes + 1)
    assert above == below + 1
    assert host_ram.rounded_bytes(layout, below) == pool_gib * GIB
    assert host_ram.rounded_bytes(layout, above) == 2 * pool_gib * GIB
    assert host_ram.most_blocks_rounded(layout, below) == below
    # the exact rule has no edge there
    assert host_ram.rounded_bytes(layout, below) - layout.host_bytes(below) < layout.host_bytes(1)
    assert layout.host_bytes(above) - layout.host_bytes(below) == layout.host_bytes(1) == 12 * 12_144 * 2_048


def test_ten_megabytes_more_kv_memory(shapes):
    """C1: 550 and 560 MB of the article."""
    layout = budget.kv_layout(shapes, (16, 16, 16), True, 12_144)
    pools = [layout.blocks(n) for n in (550_000_000, 560_000_000)]
    assert [host_ram.rounded_bytes(layout, n) // GIB for n in pools] == [48, 96]
    assert [round(layout.host_layer_bytes(n) / GIB, 2) for n in pools] == [3.96, 4.03]


def test_host_lines_add_up_to_the_ram(shapes):
    layout = budget.kv_layout(shapes, (16, 16, 16), True)
    lines = host_ram.lines(layout, 171, 125 * GIB, (15 * GIB, "x"))
    assert sum(line.bytes for line in lines) == 125 * GIB
    assert [line.bytes for line in lines[:2]] == [171 * 12_160 * 2_048 * 12, 15 * GIB]
    assert "51539607552 bytes" in host_ram.note(layout, 171) and "555371519" in host_ram.note(layout, 171)
    assert layout.blocks(555_371_519) == 172 and layout.blocks(555_371_520) == 173
    assert host_ram.rounded_bytes(layout, 173) == 2 * host_ram.rounded_bytes(layout, 172)


# --- the peak of a step -----------------------------------------------------------------------------------------------

ARTICLE = Step(rows=512, context=262_144, logits_limit_bytes=512 * MIB, arena_bytes=100_663_296)


def fixed() -> int:
    return plan.thumb()["activation_fixed_bytes"]["value"]


def test_the_article_s_peak(shapes):
    assert activation.peak_bytes(shapes, ARTICLE, fixed()) == 569_083_166 == int(0.53 * GIB)
    lines = activation.lines(shapes, ARTICLE, fixed())
    # vLLM's profile run skips attention: 0.27 GiB predicted
    assert (lines["rows of a step"] + fixed()) / GIB == pytest.approx(0.27, rel=0.07)
    # 1,568 rows took 470 MiB more
    more = activation.peak_bytes(shapes, replace(ARTICLE, rows=1_568), 0) - activation.peak_bytes(shapes, ARTICLE, 0)
    assert 470 * MIB < more < 1.15 * 470 * MIB


def test_indexer_logits_are_bounded(shapes):
    assert activation.logits_bytes(shapes, ARTICLE) == 512 * 65_536 * 4 == 128 * MIB
    assert activation.logits_bytes(shapes, replace(ARTICLE, logits_limit_bytes=64 * MIB)) == 64 * MIB
    assert activation.logits_bytes(shapes, replace(ARTICLE, logits_limit_bytes=1)) == 65_536 * 4  # one row at least
    assert activation.logits_bytes(shapes, replace(ARTICLE, rows=4, context=4_001)) == 4 * 1_001 * 4


def test_section_state_does_not_depend_on_the_arena(shapes):
    """Article 5.3: one running softmax, 12.6 MB at 512 rows; K/V on the cards need neither."""
    lines = activation.lines(shapes, ARTICLE, 0)
    assert lines["section state"] == 512 * 24 * (256 + 2) * 4 == 12_681_216
    assert activation.lines(shapes, replace(ARTICLE, arena_bytes=1), 0)["section state"] == lines["section state"]
    assert "section state" not in activation.lines(shapes, replace(ARTICLE, arena_bytes=0), 0)


@pytest.mark.parametrize("field", ["rows", "context", "arena_bytes", "logits_limit_bytes"])
def test_the_peak_never_falls(shapes, field):
    step = replace(ARTICLE, logits_limit_bytes=32 * MIB)
    larger = [replace(step, **{field: getattr(step, field) * n // 4}) for n in range(1, 12)]
    peaks = [activation.peak_bytes(shapes, s, 0) for s in larger]
    assert peaks == sorted(peaks)


# --- a card -----------------------------------------------------------------------------------------------------------


def test_a_stage_s_lines_are_its_weights_and_the_rest(shapes):
    cards = Cards(shapes=shapes, model=model.published(), thumb=plan.thumb())
    for partition in ((16, 16, 16), (17, 16, 15), (48,)):
        for at, (a, b) in enumerate(budget.bounds(partition)):
            lines = cards.lines(partition, at, ARTICLE, 3)
            middle = 0 < at < len(partition) - 1
            other = cards.other(ARTICLE, 3, middle)
            assert sum(line.bytes for line in lines) == cards.weight_bytes(a, b) + sum(line.bytes for line in other)
            what = [line.what for line in lines]
            assert ("embedding" in what, "output head" in what) == (at == 0, at == len(partition) - 1)
            assert any(w.startswith("table layer") for w in what) == (a <= 1 < b)
            assert any(w.startswith("middle stage") for w in what) == middle


def test_fragmentation_counts_only_without_expandable_segments(shapes):
    on = Cards(shapes=shapes, model=model.published(), thumb=plan.thumb())
    off = replace(on, expandable=False)
    sums = [sum(line.bytes for line in cards.other(ARTICLE, 3, False)) for cards in (on, off)]
    assert sums[1] - sums[0] == 100 * MIB


def test_graphs_of_three_sizes_are_the_article_s(shapes):
    cards = Cards(shapes=shapes, model=model.published(), thumb=plan.thumb())
    (graphs,) = [line for line in cards.other(ARTICLE, 3, False) if line.what.startswith("CUDA graphs")]
    assert round(graphs.bytes / GIB, 2) == 0.06
