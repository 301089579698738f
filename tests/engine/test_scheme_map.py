"""Patch 0008: a quantization_config that contradicts itself is refused with names, and a correct one never is.

One program on each tree builds vLLM's own model (four layers, 16 experts, `meta` device, deciding as on an 8.6 card)
under one quantization_config after another. The untouched tree builds most of them, with schemes that the checkpoint
does not have; which ones, the tests say too. The model has no table there, so that patch 0006 does not matter.
"""

import pytest

PROGRAM = r"""
import json, os, sys, time
from pathlib import Path
import engine_modules as em
import kv_specs

em.with_humming()

def group(bits, size, *targets, **more):
    return {"targets": list(targets), "input_activations": None, "output_activations": None,
            "format": "pack-quantized",
            "weights": {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, "group_size": size,
                        "strategy": "group" if size else "channel"}} | more

EXPERTS = r"re:.*\.mlp\.experts\.\d+\.(gate|up|down)_proj$"
GDN = r"re:.*\.linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$"
ATTENTION = r"re:.*\.self_attn\.(q|k|v|o)_proj$"
SHARED = r"re:.*\.mlp\.shared_expert\.(gate|up|down)_proj$"
INT4, INT6, INT8 = (4, 128), (6, 128), (8, 128)

def correct(*more, ignore=(), experts=(EXPERTS,), gdn=(GDN,), attention=(ATTENTION,), shared=(SHARED,)):
    groups = [group(*INT4, *experts), group(*INT6, *gdn, *attention, *shared),
              group(*INT8, r"re:.*input_mix_weight_down$", r"re:.*embed_tokens$", r"re:.*lm_head$"),
              group(8, 64, r"re:.*input_mix_weight_up$"), *more]
    return {"groups": groups, "ignore": list(ignore)}

def by_path(count):
    return [f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
            for layer in range(4) for expert in range(count) for part in ("gate", "up", "down")]

CASES = {
    "correct": correct(),
    "the untouched part": correct(ignore=[r"re:.*block_inject_weight$", r"re:.*\.mlp\.gate$", r"re:.*indexer\..*"]),
    "experts by path": correct(experts=by_path(16)),
    "same target, same scheme": correct(group(*INT4, EXPERTS)),
    "same target, format spelled out": correct(group(*INT4, EXPERTS, format=None)),
    "layers differ": {"groups": [group(*INT8, r"re:.*layers\.0\.mlp\.experts\..*_proj$"), group(*INT4, EXPERTS)],
                      "ignore": []},
    "all Linear": {"groups": [group(*INT4, "Linear")], "ignore": ["re:.*input_mix_weight_up$", "re:.*lm_head"]},
    "all Linear but the router": {"groups": [group(*INT8, "Linear")],
                                  "ignore": [r"re:.*\.mlp\.gate$", "re:.*input_mix_weight_up$", "re:.*inject.*"]},
    "the article's export": {"groups": [group(*INT4, "Linear"), group(*INT6, "Linear"), group(8, 64, "Linear"),
                                        group(*INT8, "Linear")], "ignore": ["re:.*input_mix_weight_up$"]},
    "target in two groups": correct(group(*INT8, EXPERTS)),
    "k_proj of its own": correct(group(*INT8, r"re:.*\.self_attn\.k_proj$"),
                                 attention=[r"re:.*\.self_attn\.(q|v|o)_proj$"]),
    "k_proj in two groups, first wins": correct(group(*INT8, r"re:.*\.self_attn\.k_proj$")),
    "up_proj of its own": correct(group(*INT8, r"re:.*\.shared_expert\.up_proj$"),
                                  shared=[r"re:.*\.mlp\.shared_expert\.(gate|down)_proj$"]),
    "in_proj_z forgotten": correct(gdn=[r"re:.*\.linear_attn\.(in_proj_qkv|out_proj)$"]),
    "in_proj_z forgotten, no dollar": correct(gdn=[r"re:.*\.linear_attn\.in_proj_qkv", r"re:.*\.linear_attn\.out_proj"]),
    "in_proj_z ignored": correct(ignore=["model.layers.2.linear_attn.in_proj_z"]),
    "in_proj_b alone": correct(group(*INT6, r"re:.*\.linear_attn\.in_proj_b$")),
    "whole qkv in another group": correct(group(*INT8, r"re:.*\.self_attn\..*")),
    "expert 5 down": correct(group(*INT8, r"re:.*layers\.1\.mlp\.experts\.5\.down_proj$"), experts=[
        r"re:.*\.mlp\.experts\.\d+\.(gate|up)_proj$", r"re:.*\.mlp\.experts\.(?!5\.)\d+\.down_proj$",
        r"re:.*layers\.[023]\.mlp\.experts\.5\.down_proj$"]),
    "expert 7 ignored": correct(ignore=[r"re:.*layers\.3\.mlp\.experts\.7\..*"]),
    "one expert's path missing": correct(experts=[p for p in by_path(16) if "2.mlp.experts.15.up" not in p]),
}
out = {}
for name, case in CASES.items():
    groups = {f"group_{n}": g for n, g in enumerate(case["groups"])}
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": case["ignore"],
                    "config_groups": groups}
    model = kv_specs.MODEL | {"num_hidden_layers": 4, "layer_types": kv_specs.MODEL["layer_types"][:4],
                              "num_experts": 16, "ple_layer_ids": [], "quantization_config": quantization}
    try:
        config = kv_specs.engine_config(Path(os.getcwd()) / "model", model=model, engram_config=None)
        modules = em.rows(kv_specs.build_model(config, stage=0))
        out[name] = {module.removeprefix("model.layers."): row["scheme"] for module, row in modules.items()}
    except Exception as error:
        out[name] = {"refused": type(error).__name__, "message": str(error)}
print(json.dumps(out))
"""

CORRECT = ["correct", "the untouched part", "experts by path", "same target, same scheme"]
CORRECT += ["same target, format spelled out"]
QKV, EXPERTS = "3.self_attn.qkv_proj", "0.mlp.experts.routed_experts"


@pytest.fixture(scope="module")
def patched(run_patched):
    return run_patched(PROGRAM, card86=True).value


@pytest.fixture(scope="module")
def pristine(run_pristine):
    return run_pristine(PROGRAM, card86=True).value


@pytest.mark.parametrize("case", CORRECT)
def test_correct_export_builds_alike(patched, case):
    assert patched[case] == patched["correct"]
    assert patched[case][EXPERTS] == "INT4 g128"
    assert patched[case][QKV] == "INT6 g128"


def test_layers_may_differ(patched):
    schemes = [patched["layers differ"][f"{layer}.mlp.experts.routed_experts"] for layer in range(4)]
    assert schemes == ["INT8 g128"] + ["INT4 g128"] * 3


@pytest.mark.parametrize("case, scheme", [("all Linear", "INT4 g128"), ("all Linear but the router", "INT8 g128")])
def test_one_group_for_every_linear_builds(patched, case, scheme):
    assert patched[case][EXPERTS] == patched[case][QKV] == scheme


@pytest.mark.parametrize(
    "case, message",
    [
        (
            "the article's export",
            "quantization_config is ambiguous: group_0 (INT4 g128) and group_1 (INT6 g128) both target `Linear`, "
            "and only the last would count",
        ),
        (
            "target in two groups",
            "quantization_config is ambiguous: group_0 (INT4 g128) and group_4 (INT8 g128) both target "
            r"`re:.*\.mlp\.experts\.\d+\.(gate|up|down)_proj$`",
        ),
        (
            "k_proj of its own",
            "model.layers.3.self_attn.qkv_proj is one layer in vLLM, but its parts do not have one scheme: "
            "q_proj is INT6 g128 (group_1), k_proj is INT8 g128 (group_4), v_proj is INT6 g128 (group_1)",
        ),
        (
            "up_proj of its own",
            "model.layers.0.mlp.shared_expert.gate_up_proj is one layer in vLLM, but its parts do not have one scheme: "
            "gate_proj is INT6 g128 (group_1), up_proj is INT8 g128 (group_4)",
        ),
        (
            "in_proj_z forgotten",
            "model.layers.0.linear_attn.in_proj_qkvz is one layer in vLLM, but its parts do not have one scheme: "
            "in_proj_qkv is INT6 g128 (group_1), in_proj_z is not quantized",
        ),
        (
            "in_proj_z forgotten, no dollar",
            "model.layers.0.linear_attn.in_proj_qkvz is one layer in vLLM, but its parts do not have one scheme: "
            "in_proj_qkv is INT6 g128 (group_1), in_proj_z is not quantized",
        ),
        (
            "in_proj_z ignored",
            "model.layers.2.linear_attn.in_proj_qkvz is one layer in vLLM, but its parts do not have one scheme: "
            "in_proj_qkv is INT6 g128 (group_1), in_proj_z is not quantized",
        ),
        (
            "in_proj_b alone",
            "model.layers.0.linear_attn.in_proj_ba is one layer in vLLM, but its parts do not have one scheme: "
            "in_proj_b is INT6 g128 (group_4), in_proj_a is not quantized",
        ),
        (
            "whole qkv in another group",
            r"vLLM would read model.layers.3.self_attn.qkv_proj as INT8 g128, since target `re:.*\.self_attn\..*` "
            "matches its name, but q_proj is INT6 g128 (group_1), k_proj is INT6 g128 (group_1), v_proj is INT6 g128",
        ),
        (
            "expert 5 down",
            "the experts of model.layers.1.mlp.experts are one layer in vLLM, but do not have one scheme: "
            "0.gate_proj is INT4 g128 (group_0), 5.down_proj is INT8 g128 (group_4)",
        ),
        (
            "expert 7 ignored",
            "the experts of model.layers.3.mlp.experts are one layer in vLLM, but do not have one scheme: "
            "0.gate_proj is INT4 g128 (group_0), 7.gate_proj is not quantized",
        ),
        (
            "one expert's path missing",
            "the experts of model.layers.2.mlp.experts are one layer in vLLM, but do not have one scheme: "
            "0.gate_proj is INT4 g128 (group_0), 15.up_proj is not quantized",
        ),
    ],
)
def test_contradiction_is_refused(patched, case, message):
    # What is raised while the configuration is made reaches the user inside pydantic's report, on a line of its own.
    lines = [line for line in patched[case].get("message", "").splitlines() if f"flashnext: {message}" in line]
    assert len(lines) == 1, patched[case]
    assert ". Fix: " in lines[0]


@pytest.mark.parametrize(
    "case, module, wrong",
    [
        ("the article's export", EXPERTS, "INT8 g128"),  # INT4 in the checkpoint
        ("target in two groups", EXPERTS, "INT8 g128"),
        ("k_proj of its own", QKV, "INT6 g128"),  # INT8 for a third of its shards
        ("whole qkv in another group", QKV, "INT8 g128"),  # INT6 in the checkpoint
        ("up_proj of its own", "0.mlp.shared_expert.gate_up_proj", "INT6 g128"),
        ("in_proj_z forgotten", "0.linear_attn.in_proj_qkvz", "BF16"),
        ("in_proj_z forgotten, no dollar", "0.linear_attn.in_proj_qkvz", "INT6 g128"),
        ("in_proj_b alone", "0.linear_attn.in_proj_ba", "BF16"),
        ("expert 5 down", "1.mlp.experts.routed_experts", "INT4 g128"),
        ("expert 7 ignored", "3.mlp.experts.routed_experts", "INT4 g128"),
        ("one expert's path missing", "2.mlp.experts.routed_experts", "INT4 g128"),
    ],
)
def test_untouched_tree_picks_one_without_a_word(pristine, case, module, wrong):
    assert pristine[case].get(module) == wrong, pristine[case]


def test_untouched_tree_refuses_a_partly_ignored_layer_without_its_parts(pristine):
    assert "Found different quantization schemes" in pristine["in_proj_z ignored"]["message"]
    assert "in_proj_z" not in pristine["in_proj_z ignored"]["message"]


# --- the lookup itself, against vLLM's own on names that are not fused

LOOKUP = r"""
import itertools, json, random, time
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.utils import find_matched_target, should_ignore_layer
from flashnext.scheme_map import resolver

def config(targets, ignore):
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "channel"}
    groups = {f"group_{n}": {"targets": [t], "weights": weights, "input_activations": None}
              for n, t in enumerate(targets)}
    return CompressedTensorsConfig.from_config({"config_groups": groups, "ignore": ignore, "format": "pack-quantized"})

names = [f"model.layers.{l}.{m}" for l in (0, 1, 11) for m in
         ("mlp.experts.0.gate_proj", "mlp.experts.10.up_proj", "mlp.gate", "self_attn.o_proj", "x.in_proj_qkv")]
names += ["lm_head", "model.embed_tokens", "ReplicatedLinear"]
pool = names + ["Linear", "replicated", "Embedding", "re:.*", "re:.*experts.*", r"re:.*\.1\d*\..*", "re:model",
                r"re:.*o_proj$", "re:Repl.*", "re:^lm_head$", r"re:.*layers\.1\.", "o_proj", "proj"]
draw = random.Random(0)
layer = object.__new__(ReplicatedLinear)
checked = different = 0
for _ in range(400):
    quant = config(draw.sample(pool, draw.randrange(1, 6)), draw.sample(pool, draw.randrange(0, 3)))
    lookup = resolver(quant)
    for name in names:
        upstream = find_matched_target(name, layer, quant.target_scheme_map.keys())
        checked += 1
        different += lookup.target(name, "ReplicatedLinear") != upstream
        different += lookup.is_ignored(name) != should_ignore_layer(name, quant.ignore)

paths = [f"model.layers.{l}.mlp.experts.{e}.{p}_proj" for l, e, p in
         itertools.product(range(48), range(512), ("gate", "up", "down"))]
quant = config(paths, [])
started = time.process_time()
lookup = resolver(quant)
hits = sum(lookup.scheme(path, "RoutedExperts") is not None for path in paths)
replaced = config(["re:.*"], [])
stale = resolver(replaced)
replaced.ignore = ["lm_head"]
print(json.dumps({"checked": checked, "different": different, "hits": hits, "cpu_s": time.process_time() - started,
                  "renewed": resolver(replaced).is_ignored("lm_head") and not stale.is_ignored("lm_head")}))
"""


def test_lookup_agrees_with_vllm_and_takes_every_expert_by_name(run_patched):
    result = run_patched(LOOKUP).value
    assert (result["checked"], result["different"]) == (400 * 18, 0)
    assert result["hits"] == 48 * 512 * 3
    assert result["cpu_s"] < 20, "one scan of 73,728 targets for each of as many names would take hours"
    assert result["renewed"]


def test_untouched_tree_has_no_lookup(run_pristine):
    failed = run_pristine(LOOKUP, check=False)
    assert failed.returncode != 0
    assert "No module named 'flashnext'" in failed.stderr
