"""Patches 0004-0008: the scheme and the kernel that every module of the real model gets, against one table.

vLLM's own model class, 48 layers and 512 experts, on the `meta` device, deciding as on an 8.6 card (tests/support/
card86), with a quantization_config as a correct export writes it: the targets are those of flashnext.scheme_map's
docstring, the schemes those of the published checkpoint. Nothing is sampled: each module that has a quantization method
must match exactly one row of TABLE, and each row must match exactly as many modules as it says.

The untouched tree refuses the table's format, so there the same program also runs without table layers: then its
vocabulary tables and hyper-connections stay BF16.
"""

import collections
import json
import re

import pytest

PROGRAM = r"""
import json, os, sys
from pathlib import Path
import engine_modules as em
import kv_specs

em.with_humming()

def args(bits, group):
    return {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False,
            "strategy": "group" if group else "channel", "group_size": group}

def group(bits, size, *targets):
    return {"targets": list(targets), "weights": args(bits, size), "input_activations": None,
            "output_activations": None, "format": "pack-quantized"}

QUANTIZATION = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "kv_cache_scheme": None, "global_compression_ratio": None,
    "config_groups": {
        "group_0": group(4, 128, r"re:.*\.mlp\.experts\.\d+\.(gate|up|down)_proj$"),
        "group_1": group(6, 128, r"re:.*\.linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$",
                         r"re:.*\.self_attn\.(q|k|v|o)_proj$", r"re:.*\.mlp\.shared_expert\.(gate|up|down)_proj$"),
        "group_2": group(8, 128, r"re:.*hyper_connection(_mixer)?\.input_mix_weight_down$", r"re:.*embed_tokens$",
                         r"re:.*lm_head$"),
        "group_3": group(8, 64, r"re:.*hyper_connection(_mixer)?\.input_mix_weight_up$"),
    },
    "ignore": [r"re:.*block_inject_weight$", r"re:.*\.mlp\.gate$", r"re:.*\.shared_expert_gate$",
               r"re:.*indexer\..*", r"re:.*\.ple\..*", r"re:.*visual\..*", r"re:^mtp\..*", r"re:.*conv1d$"],
}

def built(**changes):
    model = kv_specs.MODEL | {"quantization_config": QUANTIZATION} | changes
    engram = {} if model["ple_layer_ids"] else {"engram_config": None}
    config = kv_specs.engine_config(Path(os.getcwd()) / "model", model=model, **engram)
    return em.rows(kv_specs.build_model(config, stage=0))

small = {"num_hidden_layers": 4, "layer_types": kv_specs.MODEL["layer_types"][:4], "num_experts": 16,
         "ngram_vocab_size_base": 2000}
out = {}
for name, changes in json.loads(sys.argv[1]).items():
    try:
        out[name] = built(**(small if changes.pop("small", False) else {}), **changes)
    except Exception as error:
        out[name] = {"refused": type(error).__name__, "message": str(error)}
print(json.dumps(out))
"""

MARLIN, HUMMING = "MarlinLinearKernel", "HummingLinearKernel"
EXPERTS = "CompressedTensorsWNA16MoEMethod"
LAYER = r"model\.layers\.\d+\."
HC = LAYER + r"(attn|mlp)_hyper_connection\."
DOWN_AND_INJECT = r"input_mix_weight_down_block_inject\."

# (module name, how many, scheme, kernel or method)
TABLE = [
    (r"model\.embed_tokens", 1, "INT8 g128", "NamedEmbeddingWNA16"),
    (r"lm_head", 1, "INT8 g128", MARLIN),
    (LAYER + r"linear_attn\.(in_proj_qkvz|out_proj)", 2 * 36, "INT6 g128", HUMMING),
    (LAYER + r"linear_attn\.(in_proj_ba|conv1d)", 2 * 36, "BF16", None),
    (LAYER + r"self_attn\.(qkv_proj|o_proj)", 2 * 12, "INT6 g128", HUMMING),
    (LAYER + r"self_attn\.indexer\.index_qk_proj", 12, "BF16", None),
    (LAYER + r"mlp\.experts\.routed_experts", 48, "INT4 g128", EXPERTS),
    (LAYER + r"mlp\.shared_expert\.(gate_up_proj|down_proj)", 2 * 48, "INT6 g128", HUMMING),
    (LAYER + r"mlp\.(gate|shared_expert_gate)", 2 * 48, "BF16", None),
    (HC + DOWN_AND_INJECT + r"input_mix_weight_down", 96, "INT8 g128", MARLIN),
    (HC + DOWN_AND_INJECT + r"block_inject_weight", 96, "BF16", None),
    (HC + r"input_mix_weight_up", 96, "INT8 g64", MARLIN),
    (r"model\.hyper_connection_mixer\.input_mix_weight_down", 1, "INT8 g128", MARLIN),
    (r"model\.hyper_connection_mixer\.input_mix_weight_up", 1, "INT8 g64", MARLIN),
    (r"model\.layers\.1\.ple\.ple_embedding\.ngram_embedding", 1, "BF16", None),
    (r"model\.layers\.1\.ple\.kv_proj", 1, "BF16", None),
]
# Rows of which the untouched tree makes something else, and the name of the fused linear that is there instead.
NOT_WITHOUT_THE_SERIES = {0, 1, 9, 10, 11, 12, 13}


@pytest.fixture(scope="module")
def patched(run_patched):
    cases = {"real": {}, "small": {"small": True}}
    return run_patched(PROGRAM, json.dumps(cases), card86=True).value


@pytest.fixture(scope="module")
def pristine(run_pristine):
    cases = {"small": {"small": True}, "no table": {"small": True, "ple_layer_ids": []}}
    return run_pristine(PROGRAM, json.dumps(cases), card86=True).value


def _rows_of(name: str) -> list[int]:
    return [n for n, row in enumerate(TABLE) if re.fullmatch(row[0], name)]


def test_every_module_of_the_real_model(patched):
    found = collections.Counter()
    for name, module in patched["real"].items():
        matching = _rows_of(name)
        assert len(matching) == 1, f"{name} matches {len(matching)} rows of the table"
        _, _, scheme, chosen = TABLE[matching[0]]
        assert module["scheme"] == scheme, (name, module)
        assert chosen in (None, module["kernel"], module["method"]), (name, module)
        if scheme == "BF16":
            assert module["method"].startswith(("Unquantized", "Qwen4ExpPLEUnquantized")), (name, module)
        found[matching[0]] += 1
    assert [found[n] for n in range(len(TABLE))] == [row[1] for row in TABLE]


def test_untouched_tree_refuses_the_format(pristine):
    assert pristine["small"]["refused"] == "NotImplementedError"
    assert "does not support quantization config CompressedTensorsConfig" in pristine["small"]["message"]


def test_untouched_tree_leaves_vocabulary_and_hyper_connections_in_bf16(pristine, patched):
    without, within = pristine["no table"], patched["small"]
    for name, module in within.items():
        (row,) = _rows_of(name)
        if row in NOT_WITHOUT_THE_SERIES:
            assert without.get(name, {"scheme": "BF16"})["scheme"] == "BF16", name
        elif ".ple." not in name:
            assert without[name] == module, name
    fused = [name for name in without if name.endswith("input_mix_weight_down_block_inject")]
    assert len(fused) == 8
    assert {without[name]["scheme"] for name in fused} == {"BF16"}
