"""The plan: the article's box, other boxes, refusals, and that it is a pure function."""

from __future__ import annotations

import json

import pytest

from entrypoint import plan as p
from entrypoint.errors import Exit, Refusal
from entrypoint.simulate import simulate
from entrypoint.wishes import gather


def make(cards="3x3090", ram="125GiB", environ=None, **box):
    return p.make_plan(simulate(cards, ram=ram, **box), p.published(), gather({}, environ or {}, None))


def refused(cards="3x3090", ram="125GiB", environ=None, **box) -> Refusal:
    with pytest.raises(Refusal) as e:
        make(cards, ram, environ, **box)
    assert "\n" not in e.value.message + e.value.fix
    return e.value


def flag(plan, name):
    return plan.argv[plan.argv.index(name) + 1]


def test_the_articles_box_is_the_articles_section_6():
    plan = make()
    assert plan.argv[:2] == ["serve", "/model"]
    for name, value in {
        "--pipeline-parallel-size": "3",
        "--tensor-parallel-size": "1",
        "--max-model-len": "262144",
        "--max-num-seqs": "4",
        "--max-num-batched-tokens": "512",
        "--gpu-memory-utilization": "0.97",
        "--kv-cache-memory-bytes": "550000000",
        "--reasoning-parser": "qwen3",
        "--tool-call-parser": "qwen3_coder",
    }.items():
        assert flag(plan, name) == value, name
    assert {
        "--no-enable-prefix-caching",
        "--language-model-only",
        "--async-scheduling",
        "--enable-auto-tool-choice",
    } <= set(plan.argv)
    assert json.loads(flag(plan, "--compilation-config")) == {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4],
    }
    assert json.loads(flag(plan, "--override-generation-config")) == {
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
    }
    assert plan.env["VLLM_PP_LAYER_PARTITION"] == "16,16,16"
    assert plan.env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert plan.env["VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"] == "0"
    assert plan.capacity["block_size"] == 12_160 and plan.capacity["blocks"] == 171
    # 62.5 GiB of RAM were in use on that box
    assert sum(line.bytes for line in plan.host[:2]) / 2**30 == pytest.approx(62.5, abs=0.2)


def test_no_flag_is_given_twice_and_every_setting_has_a_reason():
    plan = make()
    names = [s.name for s in plan.settings]
    assert len(names) == len(set(names))
    assert all(s.reason and s.source in p.SOURCES for s in plan.settings)


def test_the_same_facts_give_the_same_plan():
    assert make() == make()


def test_budget_lines_add_up_and_fit():
    plan = make()
    for stage in plan.stages:
        assert stage.used_bytes == sum(line.bytes for line in stage.lines) <= stage.available_bytes
    ram = simulate("3x3090", ram="125GiB").ram_available_bytes
    assert sum(line.bytes for line in plan.host) == ram


@pytest.mark.parametrize(
    "cards, partition",
    [
        ("3x3090", [16, 16, 16]),
        ("4x3090", [12, 12, 12, 12]),
        ("2x3090+1x4090", [16, 16, 16]),
        ("1xRTX PRO 6000", [48]),
        ("3x5090", [16, 16, 16]),
    ],
)
def test_boxes(cards, partition):
    plan = make(cards)
    assert plan.capacity["partition"] == partition
    assert plan.env["VLLM_PP_LAYER_PARTITION"] == ",".join(map(str, partition))
    assert plan.capacity["full_requests"] >= 1


def test_mixed_cards_get_uneven_stages():
    plan = make("1x3090+1xRTX PRO 6000")
    first, second = plan.capacity["partition"]
    assert first < second and first + second == 48


@pytest.mark.parametrize("cards", ["1x3090", "2x3090", "2x5090", "2x3090+1x5060 Ti"])
def test_a_box_that_is_too_small_is_told_what_would_do(cards):
    e = refused(cards)
    assert e.code == Exit.PLAN and "GiB" in e.message and "cards like" in e.fix


def test_little_ram_lowers_the_pool_then_the_context_then_refuses():
    assert make(ram="64GiB").capacity["blocks"] < 171
    assert make(ram="64GiB").capacity["context"] == 262_144
    low = make(ram="42GiB")  # one whole request comes before the other streams
    assert (low.capacity["context"], low.capacity["streams"]) == (262_144, 3)
    assert any("streams lowered" in n for n in low.notes)
    on_host = {"FLASHNEXT_HOST_KV": "on"}
    lower = make(ram="30GiB", environ=on_host)
    assert 4_096 <= lower.capacity["context"] < 262_144
    assert any("context lowered" in n for n in lower.notes)
    assert "GiB" in refused(ram="23GiB", environ=on_host).fix
    assert refused(ram="16GiB").code == Exit.PLAN


def test_cgroup_counts_like_ram():
    assert (
        make(ram="1TiB", cgroup="64GiB").capacity["host_pool_bytes"]
        < make(ram="1TiB").capacity["host_pool_bytes"]
        == 51_102_351_360
    )


def test_a_wished_context_is_not_lowered_silently():
    e = refused(ram="30GiB", environ={"FLASHNEXT_CONTEXT": "262144", "FLASHNEXT_HOST_KV": "on"})
    assert "missing" in e.message and "at most" in e.fix


@pytest.mark.parametrize(
    "environ, words",
    [
        ({"FLASHNEXT_CONTEXT": "300000"}, "262144"),
        ({"FLASHNEXT_KV_CACHE_MEMORY": "100000000"}, "at least"),
        ({"FLASHNEXT_KV_CACHE_MEMORY": "5GiB"}, "at most"),
        ({"FLASHNEXT_LAYER_PARTITION": "24,24"}, "3 cards"),
        ({"FLASHNEXT_LAYER_PARTITION": "16,16,17"}, "48"),
        ({"FLASHNEXT_LAYER_PARTITION": "1,31,16"}, "at least 2"),
        ({"FLASHNEXT_LAYER_PARTITION": "3,29,16"}, "multiples of 4"),
        ({"FLASHNEXT_DEVICE": "cpu"}, "CUDA"),
        ({"FLASHNEXT_TABLE": "pinned"}, "are missing"),
    ],
)
def test_wishes_that_cannot_work(environ, words):
    e = refused(environ=environ)
    assert e.code == Exit.PLAN and words in e.message + e.fix


def test_contradiction():
    assert refused(environ={"FLASHNEXT_HOST_KV": "off", "FLASHNEXT_HOST_KV_MAX": "8GiB"}).code == Exit.USAGE


def test_kv_memory_edges():
    per_block = 3_210_240
    least = 36 + 3 * 15 + 2  # one full request, a first block and the states for three more, the null block, a spare
    assert make(environ={"FLASHNEXT_KV_CACHE_MEMORY": str(least * per_block)}).capacity["blocks"] == least
    assert f"{least * per_block}" in refused(environ={"FLASHNEXT_KV_CACHE_MEMORY": str(least * per_block - 1)}).fix


def test_wsl_keeps_kv_on_the_cards_or_refuses():
    assert refused(wsl=True, environ={"FLASHNEXT_HOST_KV": "on"}).code == Exit.PLAN
    plan = make(wsl=True)
    assert plan.capacity["host_pool_bytes"] == 0 and plan.capacity["context"] < 262_144
    assert "host_kv" not in json.loads(flag(plan, "--additional-config"))["flashnext"]


@pytest.mark.parametrize(
    "streams, sizes", [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_capture_sizes_cover_every_batch(streams, sizes):
    assert p.capture_sizes(streams) == sizes


def test_old_driver_and_old_card_are_refused():
    from dataclasses import replace

    box = simulate("3x3090", ram="125GiB")
    with pytest.raises(Refusal, match=r"535\.1"):
        p.make_plan(replace(box, driver_version="535.1"), p.published(), gather({}, {}, None))
    with pytest.raises(Refusal, match=r"7\.5"):
        make("4xTITAN RTX")


def test_mig_and_small_shm_are_refused():
    from dataclasses import replace

    box = simulate("3x3090", ram="125GiB")
    sliced = replace(box, gpus=(replace(box.gpus[0], mig=True), *box.gpus[1:]))
    with pytest.raises(Refusal, match="MIG"):
        p.make_plan(sliced, p.published(), gather({}, {}, None))
    with pytest.raises(Refusal, match="/dev/shm"):
        p.make_plan(replace(box, shm_total_bytes=64 << 20), p.published(), gather({}, {}, None))


def test_a_limit_on_locked_memory_below_the_pool_is_refused():
    """C17: 8 MiB are what a service inherits; the capability overrides the limit, and K/V on the cards lock nothing."""
    from dataclasses import replace

    box = replace(simulate("3x3090", ram="125GiB"), memlock_bytes=8 << 20)
    with pytest.raises(Refusal, match=r"0\.01 GiB of memory may be locked .* the K/V pool takes 47\.59 GiB") as e:
        p.make_plan(box, p.published(), gather({}, {}, None))
    assert "memlock" in e.value.fix
    for other in (
        replace(box, memlock_bytes=51_102_351_360),
        replace(box, ipc_lock=True),
        replace(simulate("4x3090", ram="125GiB"), memlock_bytes=8 << 20),
    ):
        assert p.make_plan(other, p.published(), gather({}, {}, None)).capacity["whole_requests_at_once"] == 4


def test_no_expandable_segments_cost_their_fragmentation():
    on, off = make(), make(environ={"FLASHNEXT_EXPANDABLE_SEGMENTS": "off"})
    assert [b.used_bytes - a.used_bytes for a, b in zip(on.stages, off.stages, strict=True)] == [100 << 20] * 3


def test_what_vllm_prints_and_what_can_run():
    c = make().capacity
    assert (c["tokens"], c["concurrency"], c["groups"]) == (1_245_184, 4.75, 15)
    assert (c["whole_requests_at_once"], c["short_requests_at_once"], c["full_requests"]) == (4, 4, 4.72)
    assert c["host_pool_rounded_bytes"] == 48 << 30


def test_cards_in_use_lower_the_utilization():
    from dataclasses import replace

    box = simulate("4x3090", ram="125GiB")
    used = replace(box, gpus=tuple(replace(g, free_bytes=g.free_bytes - (2 << 30)) for g in box.gpus))
    plan = p.make_plan(used, p.published(), gather({}, {}, None))
    assert float(flag(plan, "--gpu-memory-utilization")) < 0.91


def test_no_card_gives_the_drivers_reason():
    from dataclasses import replace

    box = replace(simulate("3x3090", ram="125GiB"), gpus=(), gpu_error="Unknown Error", gpu_fix="restart the container")
    with pytest.raises(Refusal, match="Unknown Error") as e:
        p.make_plan(box, p.published(), gather({}, {}, None))
    assert e.value.fix == "restart the container"


def test_sampling_is_put_back_only_where_it_is_missing():
    from dataclasses import replace

    box, wishes = simulate("3x3090", ram="125GiB"), gather({}, {}, None)
    whole = replace(p.published(), sampling={"temperature": 0.6, "top_p": 0.9, "top_k": 10, "min_p": 0.1})
    assert "--override-generation-config" not in p.make_plan(box, whole, wishes).argv
    part = replace(p.published(), sampling={"temperature": 0.6})
    assert json.loads(flag(p.make_plan(box, part, wishes), "--override-generation-config")) == {
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
    }
