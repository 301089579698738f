"""The plan's KV arithmetic against vLLM 0.30.0's own planner: groups, pages, blocks, concurrency, tokens, over a grid.

The planner (`get_kv_cache_configs`) gets the specs that the real 48-layer model registers, built once and dealt out to the stages of
each partition; that this is what each stage registers itself is shown for one pipeline. With K/V in host memory the specs are as
the engine package makes them: rows of 2 bytes, blocks of the plan's size, states padded to a page.
"""

from __future__ import annotations

import json
import random

import pytest

from entrypoint import budget, model

_PROGRAM = r"""
import json, os, re, sys
from dataclasses import replace
from pathlib import Path
import kv_specs
from vllm.v1.core import kv_cache_utils as planner

def stages_of(specs, partition):
    out, start = [], 0
    for n in partition:
        out.append({name: spec for name, spec in specs.items() if start <= int(re.search(r"layers\.(\d+)\.", name)[1]) < start + n})
        start += n
    return out

def changed(specs, block, state_bytes, context):
    out = {}
    for name, spec in specs.items():
        if type(spec).__name__ == "MambaSpec":
            out[name] = replace(spec, page_size_padded=state_bytes, block_size=context)
        else:
            out[name] = replace(spec, block_size=block) if spec.block_size == stock_block else spec
    return out

def plan(partition, host, block, state_bytes, kv_bytes, context):
    config.model_config.max_model_len = context
    specs = stages_of(changed(host_rows if host else stock, block, state_bytes, context), partition)
    try:
        plans = kv_specs.kv_cache_configs(config, specs, kv_bytes)
    except ValueError as error:
        assert "To serve at least one request" in str(error), error
        return None
    tokens, requests = planner.get_kv_cache_capacity(config, plans[0])
    return {
        "groups": len(plans[0].kv_cache_groups), "blocks": plans[0].num_blocks, "requests": requests, "tokens": tokens,
        "pages": [planner._get_kv_cache_bytes_per_block(p.kv_cache_groups) for p in plans],
    }

os.environ["VLLM_PP_LAYER_PARTITION"] = "48"
config = kv_specs.engine_config(Path(os.getcwd()) / "model")
stock = kv_specs.specs_of_stages(config)[0]
stock_block, stock_state = config.cache_config.block_size, config.cache_config.mamba_page_size_padded
host_rows = kv_specs.with_host_rows(stock)
answer = {"block": stock_block, "state": stock_state, "plans": [plan(*case) for case in json.loads(sys.argv[1])]}
config.model_config.max_model_len = 262144
os.environ["VLLM_PP_LAYER_PARTITION"] = "17,16,15"
kv_specs.set_stages(config, 3)
answer["dealt"] = kv_specs.specs_of_stages(config) == stages_of(stock, [17, 16, 15])
print(json.dumps(answer))
"""

_PARTITIONS = (
    (48,), (24, 24), (20, 28), (4, 44), (16, 16, 16), (17, 16, 15), (20, 14, 14), (8, 20, 20), (12, 20, 16), (12, 12, 12, 12),
    (9, 13, 13, 13), (8, 8, 16, 16), (9, 10, 10, 10, 9), (8, 8, 12, 12, 8), (8, 8, 8, 8, 8, 8), (4, 4, 8, 8, 12, 12),
    (4, 8, 8, 8, 8, 8, 4), (8, 8, 8, 8, 4, 4, 4, 4),
)  # fmt: skip
_KV_BYTES = (150_000_000, 400_000_000, 470_000_000, 550_000_000, 2_000_000_000, 9_000_000_000)
_CONTEXTS = (8_192, 65_536, 262_144, 1_048_576)

# block, KV bytes, context -> blocks, tokens: design/planner.md, article 5.2 and 5.4; 16,16,16 with host rows
_PUBLISHED = [
    (12_144, 550_000_000, 262_144, 171, 1_067_300),
    (12_144, 400_000_000, 1_048_576, 124, 1_215_172),
    (12_144, 560_000_000, 262_144, 174, None),
    (12_160, 550_000_000, 262_144, 171, 1_245_184),
    (12_160, 470_000_000, 262_144, 146, None),
    (1_568, 720_000_000, 262_144, 224, None),
]


@pytest.fixture(scope="module")
def shapes():
    return model.shapes(model.published().text)


def _case(shapes, partition, host, block, kv_bytes, context):
    most = max(shapes.count("full_attention", a, b) for a, b in budget.bounds(partition))
    pages = budget.pages(shapes, most, host, block)
    # A stock block under host rows keeps the padding that vLLM itself gave the states.
    state = budget.pages(shapes, most, False).state_bytes if block == 1_568 else pages.state_bytes
    return [list(partition), host, pages.block, state, kv_bytes, context]


@pytest.fixture(scope="module")
def oracle(shapes, run_pristine):
    """(grid cases, vLLM's answers to them, its answers to the published rows, the rest of what it said); one process for all."""
    draw = random.Random(6)
    cases = []
    for partition in _PARTITIONS:
        for host in (False, True):
            pairs = [(kv, context) for kv in _KV_BYTES for context in _CONTEXTS]
            for kv, context in [(9_000_000_000, 262_144), *draw.sample(pairs, 3)]:
                cases.append((partition, host, None, kv, context))
    published = [((16, 16, 16), True, block, kv, context) for block, kv, context, _, _ in _PUBLISHED]
    asked = [_case(shapes, *case) for case in [*cases, *published]]
    said = run_pristine(_PROGRAM, json.dumps(asked), card86=True).value
    return cases, said["plans"][: len(cases)], said["plans"][len(cases) :], said


def test_block_and_state_page_are_vllm_s_own(shapes, oracle):
    pages = budget.pages(shapes, 4, False)
    assert (pages.block, pages.state_bytes) == (oracle[3]["block"], oracle[3]["state"]) == (1_568, 3_211_264)
    assert oracle[3]["dealt"] is True


def test_the_grid_agrees(shapes, oracle):
    cases, said, _, _ = oracle
    held = 0
    for (partition, host, block, kv, context), theirs in zip(cases, said, strict=True):
        layout = budget.kv_layout(shapes, partition, host, block)
        blocks = layout.blocks(kv)
        # vLLM refuses a pool that does not hold one whole request beside its null block, stage by stage.
        fits = all(kv - page >= layout.per_request(context) * page for page in layout.stage_pages)
        ours = {
            "groups": layout.groups,
            "blocks": blocks,
            "requests": layout.concurrency(blocks, context),
            "tokens": layout.tokens(blocks, context),
            "pages": list(layout.stage_pages),
        }
        assert theirs == (ours if fits else None), (partition, host, kv, context)
        held += fits
    assert held > 70 and len(cases) - held > 20  # both answers are in the grid


def test_the_published_figures(shapes, oracle):
    for (block, kv, context, blocks, tokens), theirs in zip(_PUBLISHED, oracle[2], strict=True):
        assert theirs["blocks"] == blocks and tokens in (None, theirs["tokens"]), (block, kv)
        if block != 1_568:
            layout = budget.kv_layout(shapes, (16, 16, 16), True, block)
            assert (layout.blocks(kv), layout.tokens(blocks, context)) == (theirs["blocks"], theirs["tokens"])
    assert oracle[2][0]["requests"] == pytest.approx(4.07, abs=0.005)
    assert int(oracle[2][4]["requests"]) == 4
    assert oracle[2][5]["groups"] == 39
