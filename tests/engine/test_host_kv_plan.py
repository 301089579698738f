"""Patches 0011 and 0012: what vLLM plans with K/V in host memory, and what is refused when the config is made.

vLLM's own planner, block size rule and config classes decide, on the specs that the real 48-layer model registers on each stage.
"""

import json
import re

import pytest

_PROGRAM = r"""
import json, os, sys
from pathlib import Path
import kv_specs
from flashnext import block_size, host_kv
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_cache_interface import FullAttentionSpec

HOST = {"max_bytes": 1 << 40, "arena_bytes": 4 * 12_160 * 2_048}
here = Path(os.getcwd())
configs = {
    host: kv_specs.engine_config(here / "model", additional_config={"flashnext": {"host_kv": HOST}} if host else {})
    for host in (True, False)
}
answer = {"plans": {}, "refused": {}}
for name, (partition, host, kv_cache_bytes) in json.loads(sys.argv[1]).items():
    config = configs[host]
    os.environ["VLLM_PP_LAYER_PARTITION"] = partition
    kv_specs.set_stages(config, partition.count(",") + 1)
    specs = kv_specs.specs_of_stages(config)
    layers = config.compilation_config.static_forward_context  # of the last stage
    attention = next(layer for name, layer in layers.items() if name.endswith(".attn"))
    index = next(layer for name, layer in layers.items() if name.endswith("raw_key_cache"))
    plans = kv_specs.kv_cache_configs(config, specs, kv_cache_bytes)
    for plan in plans:
        kv_specs.allocate(config, plan)
    answer["plans"][name] = {
        "block_size": config.cache_config.block_size,
        "page_bytes": config.cache_config.mamba_page_size_padded,
        "blocks": [plan.num_blocks for plan in plans],
        "requests": min(get_max_concurrency_for_kv_cache_config(config, plan) for plan in plans),
        "token_bytes": sorted({spec.page_size_bytes / spec.block_size for stage in specs for spec in stage.values()
                               if type(spec) is FullAttentionSpec}),
        "backends": [attention.get_attn_backend().__name__, index.get_attn_backend().__name__],
        "computed": block_size.computed(config),
        "host_kv": attention.host_kv is not None,
        "sections": attention.host_kv and attention.host_kv.sections.arena_bytes,
        "shared": len({id(layer.host_kv) for name, layer in layers.items() if name.endswith(".attn")}),
        "names": attention.host_kv and [attention.host_kv.names, [n for n in layers if n.endswith(".attn")]],
    }

# Everything else that asks the backends is answered as upstream answers.
probe = FullAttentionSpec(block_size=1, num_kv_heads=2, head_size=256, dtype=attention.kv_cache_torch_dtype)
kv_specs.set_stages(configs[True], 3)
os.environ["VLLM_PP_LAYER_PARTITION"] = "16,16,16"
from vllm.models.qwen4_exp.common.qsa_cache import QSAStateBackend
backend = host_kv.state_backend(configs[True], QSAStateBackend)
whole = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=256, dtype=probe.dtype)
answer["probe"] = [QSAStateBackend.customize_spec(probe) == probe, backend.customize_spec(probe).page_size_bytes,
                   backend.customize_spec(whole) == whole, backend.get_name() == QSAStateBackend.get_name()]

del os.environ["VLLM_PP_LAYER_PARTITION"]
for name, (setting, partition, more) in json.loads(sys.argv[2]).items():
    if partition:
        os.environ["VLLM_PP_LAYER_PARTITION"] = partition
        more = more | {"pipeline_parallel_size": partition.count(",") + 1}
    if "speculative_config" in more:  # its own check wants the draft head; this one comes before
        more["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 2}
    try:
        kv_specs.engine_config(here / "model", stages=more.get("pipeline_parallel_size", 1),
                               additional_config={"flashnext": {"host_kv": HOST if setting is None else setting}}, **more)
        answer["refused"][name] = None
    except Exception as error:
        answer["refused"][name] = str(error)
    os.environ.pop("VLLM_PP_LAYER_PARTITION", None)
print(json.dumps(answer))
"""

# name: VLLM_PP_LAYER_PARTITION, K/V in host memory, KV cache bytes per stage
_PLANS = {
    "550 MB": ("16,16,16", True, 550_000_000),
    "470 MB": ("16,16,16", True, 470_000_000),
    "5, 3 and 4 QSA layers": ("20,12,16", True, 550_000_000),
    "3, 5 and 4, groups cut": ("13,19,16", True, 550_000_000),
    "6 and 6": ("24,24", True, 550_000_000),
    "12": ("48", True, 550_000_000),
    "on the card": ("16,16,16", False, 6_000_000_000),
}

_KNOWN = 'Fix: {"max_bytes": BYTES, "arena_bytes": BYTES}'
_OFF = ", or leave additional_config.flashnext.host_kv out"
_WITH = "flashnext: K/V in host memory does not work with "
# name: setting (None: a right one), partition, engine arguments, and what the refusal says (None: none)
_REFUSALS = {
    "nothing wrong": (None, "16,16,16", {}, None),
    "unknown key": ({"max_bytes": 1, "arena": 1}, None, {}, f"host_kv has 'arena', which is not known. {_KNOWN}"),
    "missing key": ({"max_bytes": 1}, None, {}, f"host_kv.arena_bytes is None, no number of bytes. {_KNOWN}"),
    "text": ({"max_bytes": "4G", "arena_bytes": 1}, None, {}, "host_kv.max_bytes is '4G', no number of bytes."),
    "truth": ({"max_bytes": True, "arena_bytes": 1}, None, {}, "host_kv.max_bytes is True, no number of bytes."),
    "kept rows": ({"max_bytes": 1, "arena_bytes": 1, "hot_rows": 1}, None, {}, "host_kv.hot_rows is 1. Fix: true or false"),
    "zero": ({"max_bytes": 1, "arena_bytes": 0}, None, {}, "host_kv.arena_bytes is 0, no number of bytes."),
    "no dictionary": ([1], None, {}, f"host_kv is [1]. {_KNOWN}"),
    "tensor parallelism": (
        None, None, {"tensor_parallel_size": 2}, f"{_WITH}tensor parallelism. Fix: --tensor-parallel-size 1{_OFF}"
    ),
    "speculation": (None, None, {"speculative_config": {}}, f"{_WITH}speculative decoding. Fix: no --speculative-config{_OFF}"),
    "prefix caching": (
        None, None, {"enable_prefix_caching": True}, f"{_WITH}prefix caching. Fix: --no-enable-prefix-caching{_OFF}"
    ),
    "decode context parallelism": (
        None, None, {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, f"{_WITH}tensor parallelism."
    ),
    "prefill context parallelism": (None, None, {"prefill_context_parallel_size": 2}, f"{_WITH}context parallelism."),
    "FP8": (None, None, {"kv_cache_dtype": "fp8"}, f"{_WITH}fp8 K/V. Fix: --kv-cache-dtype auto{_OFF}"),
    "connector": (
        None, None, {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, f"{_WITH}KV connectors."
    ),
    "offloading": (None, None, {"kv_offloading_size": 1.0}, f"{_WITH}KV connectors."),
    "block size": (
        None, "16,16,16", {"block_size": 12_144},
        "flashnext: K/V in host memory needs blocks of 12160 tokens here, and the block size given is 12144. Fix: no --block-size",
    ),
    "right block size": (None, "16,16,16", {"block_size": 12_160}, None),
    "right for other stages": (None, "24,24", {"block_size": 12_160}, "needs blocks of 8112 tokens here"),
    "stage without a QSA layer": (
        None, "45,2,1", {}, "needs a full-attention layer on each stage, and stage 2 of 3 has none. Fix: another"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def seen(run_patched):
    cases = {name: case[:3] for name, case in _REFUSALS.items()}
    return run_patched(_PROGRAM, json.dumps(_PLANS), json.dumps(cases), card86=True).value


def test_a_million_tokens_fit_into_550_mb(seen):
    plan = seen["plans"]["550 MB"]
    assert (plan["block_size"], plan["page_bytes"], plan["blocks"]) == (12_160, 3_210_240, [171] * 3)
    assert round(plan["requests"] * 262_144) == 1_245_184
    assert plan["token_bytes"] == [2]


def test_four_full_requests_fit_into_470_mb(seen):
    plan = seen["plans"]["470 MB"]
    assert (plan["blocks"], int(plan["requests"])) == ([146] * 3, 4)
    layer = 146 * plan["block_size"] * 2_048
    assert (layer, round(layer / 2**30, 2), round(12 * layer / 2**30, 1)) == (3_635_937_280, 3.39, 40.6)


@pytest.mark.parametrize(
    ("case", "block_size", "page_bytes"),
    [
        ("5, 3 and 4 QSA layers", 9_728, 5 * 66 * 9_728),
        ("3, 5 and 4, groups cut", 9_728, 5 * 66 * 9_728),
        ("6 and 6", 8_112, 6 * 66 * 8_112),
        ("12", 4_064, 12 * 66 * 4_064),
    ],
)
def test_the_stage_with_most_qsa_layers_decides(seen, case, block_size, page_bytes):
    plan = seen["plans"][case]
    assert (plan["block_size"], plan["page_bytes"]) == (block_size, page_bytes)
    assert plan["blocks"] == [550_000_000 // page_bytes] * len(plan["blocks"])


@pytest.mark.parametrize("case", [case for case, (_, host, _) in _PLANS.items() if host])
def test_one_object_for_the_layers_of_a_stage_and_its_own_figure_is_vllms(seen, case):
    plan = seen["plans"][case]
    assert plan["computed"] == plan["block_size"]
    assert plan["backends"] == ["HostRowsBackend", "HostRowsStateBackend"]
    assert plan["shared"] == 1 and plan["names"][0] == plan["names"][1]
    block_bytes = plan["block_size"] * 2_048
    assert plan["sections"] == 4 * 12_160 * 2_048 // block_bytes * block_bytes


def test_without_the_setting_everything_is_upstreams(seen):
    plan = seen["plans"]["on the card"]
    assert (plan["block_size"], plan["page_bytes"], plan["token_bytes"]) == (1_568, 3_211_264, [2_048])
    assert plan["backends"] == ["Qwen4ExpQSAFlashAttentionBackend", "QSAStateBackend"]
    assert not plan["host_kv"]


def test_only_the_probe_of_one_token_is_answered_differently(seen):
    assert seen["probe"] == [True, 4 * 66, True, True]


@pytest.mark.parametrize("case", _REFUSALS)
def test_refusals(seen, case):
    said, wanted = seen["refused"][case], _REFUSALS[case][3]
    if wanted is None:
        assert said is None
        return
    assert wanted in said
    # One line, nothing of pydantic's around it, in the shape that entrypoint/boot.py shows to the user.
    assert re.fullmatch(r"flashnext: (.+?)\.? Fix: ([^\n]+)", said), said
