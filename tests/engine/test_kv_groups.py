"""Patch 0003: a stage plans KV tensors for its own layers only.

vLLM's own planner and allocator, fed with the specs that the real 48-layer model registers on each stage; the same
program runs on the pristine tree, where the allocation stops, and on the patched one.
"""

import json

import pytest

_PROGRAM = """
import json, os, sys
from pathlib import Path
import kv_specs
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

config = kv_specs.engine_config(Path(os.getcwd()) / "model")
answer = {}
for name, (partition, host_rows, max_model_len, kv_cache_bytes) in json.loads(sys.argv[1]).items():
    config.model_config.max_model_len = max_model_len
    os.environ["VLLM_PP_LAYER_PARTITION"] = partition
    kv_specs.set_stages(config, partition.count(",") + 1)
    specs = kv_specs.specs_of_stages(config)
    if host_rows:
        specs = [kv_specs.with_host_rows(stage) for stage in specs]
    rows = []
    for own, plan in zip(specs, kv_specs.kv_cache_configs(config, specs, kv_cache_bytes)):
        try:
            allocated, error = sorted(kv_specs.allocate(config, plan)), None
        except Exception as err:
            allocated, error = None, type(err).__name__
        rows.append({
            "own": sorted(own),
            "blocks": plan.num_blocks,
            "groups": [group.layer_names for group in plan.kv_cache_groups],
            "tensors": [[t.layers, t.size, t.offset, t.layer_stride, t.block_stride] for t in plan.kv_cache_tensors],
            "requests": get_max_concurrency_for_kv_cache_config(config, plan),
            "allocated": allocated,
            "error": error,
        })
    cache = config.cache_config
    answer[name] = {
        "block_size": cache.block_size, "mamba_page_bytes": cache.mamba_page_size_padded, "stages": rows,
    }
print(json.dumps(answer))
"""

# name: VLLM_PP_LAYER_PARTITION, K/V rows in host memory, max_model_len, KV cache bytes per stage
_CASES = {
    "3 even": ("16,16,16", False, 32_768, 720_000_000),
    "3 uneven": ("17,16,15", False, 32_768, 720_000_000),
    "3 large first": ("20,14,14", False, 32_768, 720_000_000),
    "2 even": ("24,24", False, 32_768, 720_000_000),
    "4 even": ("12,12,12,12", False, 32_768, 720_000_000),
    "3 even, K/V in host memory": ("16,16,16", True, 262_144, 720_000_000),
}


@pytest.fixture(scope="module")
def plans(run_pristine, run_patched):
    """{tree: {case: what it plans}}; one process per tree, for it takes most of its time to start."""
    return {
        tree: run(_PROGRAM, json.dumps(_CASES), card86=True).value
        for tree, run in (("pristine", run_pristine), ("patched", run_patched))
    }


@pytest.mark.parametrize("case", _CASES)
def test_without_the_patch_a_stage_stops_at_a_group_that_has_none_of_its_layers(plans, case):
    stages = plans["pristine"][case]["stages"]
    assert [stage["error"] for stage in stages] == [
        "StopIteration" if [] in stage["groups"] else None for stage in stages
    ]
    assert all(stage["error"] for stage in stages[1:])  # none but the first has the table's layer, a group of its own


@pytest.mark.parametrize("case", _CASES)
def test_with_the_patch_each_stage_allocates_exactly_its_own_layers(plans, case):
    for stage in plans["patched"][case]["stages"]:
        assert stage["error"] is None
        assert stage["allocated"] == stage["own"]


@pytest.mark.parametrize("case", _CASES)
def test_capacity_and_placement_of_the_tensors_that_stay_are_unchanged(plans, case):
    before, after = plans["pristine"][case], plans["patched"][case]
    assert (after["block_size"], after["mamba_page_bytes"]) == (before["block_size"], before["mamba_page_bytes"])
    for was, now in zip(before["stages"], after["stages"], strict=True):
        assert (now["blocks"], now["groups"], now["requests"]) == (was["blocks"], was["groups"], was["requests"])
        own = set(was["own"])
        assert now["tensors"] == [tensor for tensor in was["tensors"] if set(tensor[0]) <= own]


@pytest.mark.parametrize(
    ("case", "groups", "blocks"),
    [
        # 224 blocks and 39 groups are what the 3x3090 setup of the article logged with vLLM's own block size.
        ("3 even, K/V in host memory", 39, 224),
        ("3 even", 6, 54),
        ("3 uneven", 6, 44),
        ("2 even", 6, 36),
    ],
)
def test_the_specs_give_the_published_plan(plans, case, groups, blocks):
    plan = plans["patched"][case]
    assert (plan["block_size"], plan["mamba_page_bytes"]) == (1_568, 3_211_264)
    assert {(len(stage["groups"]), stage["blocks"]) for stage in plan["stages"]} == {(groups, blocks)}
