"""Patch 0004: quantized embed_tokens and lm_head, and packed rows that the engine would misread.

Two programs, each run on both trees. The first builds vLLM's own embedding and head on the CPU platform, loads them from
rows packed by the compressed-tensors library (padded words) or as one bit stream (dense), and looks up and multiplies.
The kernels are not the engine's (a CPU has none): the lookup and the product dequantize what vLLM's loader put into the
parameters, in float64: lookups are equal, products agree to the order of a sum of 256 terms (1e-12).

The second builds the whole model, small, deciding as on an 8.6 card but with its parameters on the CPU, loads the whole
test checkpoint (tests/support/checkpoints.py) with the model's own loader, and compares every matrix, experts included, with
the checkpoint's value. A code times a BF16 scale is exact in float64, so equal means equal.
"""

import pytest

ROWS = r"""
import json
import torch
import engine_modules as em
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from checkpoints import pack_dense

VOCAB = 200  # not a multiple of 64: vLLM pads the table, and the padding must be zero


def module_of(kind, bits, group, hidden):
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, "group_size": group,
               "strategy": "group" if group else "channel"}
    quant = CompressedTensorsConfig.from_config({"format": "pack-quantized", "ignore": [], "config_groups": {
        "group_0": {"targets": [r"re:.*embed_tokens$", r"re:.*lm_head$"], "weights": weights,
                    "input_activations": None}}})
    cls = {"embed": VocabParallelEmbedding, "head": ParallelLMHead}[kind]
    name = {"embed": "model.embed_tokens", "head": "lm_head"}[kind]
    return cls(VOCAB, hidden, params_dtype=torch.bfloat16, quant_config=quant, prefix=name)


def case(kind, bits, group=128, hidden=256, pack=pack_to_int32):
    module = module_of(kind, bits, group, hidden)
    torch.manual_seed(bits)
    codes = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (VOCAB, hidden), dtype=torch.int8)
    scale = (torch.rand(VOCAB, hidden // group if group else 1) + 0.5).to(torch.bfloat16)
    exact = (codes.double().unflatten(1, (scale.shape[1], -1)) * scale.double().unsqueeze(-1)).flatten(1)
    checkpoint = {"weight_packed": pack(codes, bits), "weight_scale": scale,
                  "weight_shape": torch.tensor([VOCAB, hidden])}
    for name, tensor in checkpoint.items():
        param = getattr(module, name)
        param.weight_loader(param, tensor)
    loaded = em.weight_of(module)
    out = {"words": module.weight_packed.shape[1], "equal": bool(torch.equal(loaded[:VOCAB], exact)),
           "padding": loaded[VOCAB:].abs().max().item()}
    x = torch.randn(5, hidden).double()
    if kind == "embed":
        from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors_embedding as ct
        ct._dequant_gather_triton = lambda ids, packed, scale, length, bits: em.dequantized(
            packed, scale, bits, length, dense=False)[ids]
        ids = torch.tensor([[3, 199], [0, 3]])
        out["looked_up"] = bool(torch.equal(module(ids), exact[ids]))
    else:
        out["product"] = (module.quant_method.apply(module, x)[:, :VOCAB] - x @ exact.T).abs().max().item()
    return out


CASES = {
    "embed INT8": dict(kind="embed", bits=8), "embed INT4": dict(kind="embed", bits=4),
    "embed INT2": dict(kind="embed", bits=2), "embed INT8 per channel": dict(kind="embed", bits=8, group=None),
    "embed INT6 padded, 320": dict(kind="embed", bits=6, group=64, hidden=320),
    "embed INT6 dense, 320": dict(kind="embed", bits=6, group=64, hidden=320, pack=pack_dense),
    "embed INT6 padded, 2560": dict(kind="embed", bits=6, hidden=2560),
    "embed INT6 dense, 2560": dict(kind="embed", bits=6, hidden=2560, pack=pack_dense),
    "embed INT6, 256": dict(kind="embed", bits=6),
    "embed INT3, 256": dict(kind="embed", bits=3),
    "embed INT8 g96": dict(kind="embed", bits=8, group=96),
    "head INT8": dict(kind="head", bits=8), "head INT4": dict(kind="head", bits=4),
    "head INT6 dense": dict(kind="head", bits=6, pack=pack_dense),
    "head INT6 padded": dict(kind="head", bits=6),
    "head INT5 dense": dict(kind="head", bits=5, pack=pack_dense),
    "head INT1": dict(kind="head", bits=1),
    "head INT8, rows of INT4": dict(kind="head", bits=8, pack=lambda q, bits: pack_to_int32(q // 16, 4)),
    "embed INT8, rows of INT4": dict(kind="embed", bits=8, pack=lambda q, bits: pack_to_int32(q // 16, 4)),
}
out = {}
with em.cpu_platform():
    for name, arguments in CASES.items():
        try:
            out[name] = case(**arguments)
        except Exception as error:
            out[name] = {"refused": type(error).__name__, "message": str(error)}
print(json.dumps(out))
"""

WHOLE = r"""
import json, os, sys
from pathlib import Path
import torch
import checkpoints
import engine_modules as em
import kv_specs

em.with_humming()
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
          "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a"),
          "kv_proj": ("key_proj", "value_proj"),
          "input_mix_weight_down_block_inject": ("input_mix_weight_down", "block_inject_weight")}


def expected(name, values):
    # `name` is vLLM's: a fused layer is its shards below each other, a split one has a step more in its name.
    parent, _, last = name.rpartition(".")
    parent = parent.removesuffix(".input_mix_weight_down_block_inject")
    parts = [values.get(f"{parent}.{part}.weight" if parent else f"{part}.weight") for part in PACKED.get(last, (last,))]
    return None if any(part is None for part in parts) else torch.cat(parts)


def expert_expected(name, number, values):
    part = {p: values[f"{name.removesuffix('.routed_experts')}.{number}.{p}_proj.weight"] for p in ("gate", "up", "down")}
    return torch.cat([part["gate"], part["up"]]), part["down"]


def checkpoint(variant):
    # (config.json, what the files hold, the float32 values that this stands for)
    of_config = "mixed" if variant == "vocab-only" else variant
    shape = checkpoints.shape_of(of_config)
    text = checkpoints.text_config(shape)
    quantization = checkpoints.quantization_config(shape, of_config)
    rows = list(checkpoints.weights("bf16" if variant == "vocab-only" else variant, 0, "model."))
    if variant == "vocab-only":  # nothing but the vocabulary quantized, and no table: this patch by itself
        (group,) = (g for g in quantization["config_groups"].values() if "re:.*lm_head$" in g["targets"])
        quantization["config_groups"] = {"group_0": group | {"targets": ["re:.*embed_tokens$", "re:.*lm_head$"]}}
        text["ple_layer_ids"] = []
        quantized = {row[0]: row for row in checkpoints.weights("mixed", 0, "model.") if row[0] in VOCABULARY}
        rows = [quantized.get(row[0], row) for row in rows if ".ple." not in row[0]]
    stored = {name: tensor for _, tensors, _ in rows for name, tensor in tensors.items()}
    return text | ({"quantization_config": quantization} if quantization else {}), stored, {r[0]: r[2] for r in rows}


def load(variant):
    text, stored, values = checkpoint(variant)
    engram = {} if text["ple_layer_ids"] else {"engram_config": None}
    config = kv_specs.engine_config(Path(os.getcwd()) / variant, model=text, max_model_len=4096, **engram)
    model = em.build_on_cpu(config)
    loaded = model.load_weights(stored.items())
    compared, unequal = 0, []
    for name, row in em.rows(model).items():
        module = model.get_submodule(name)
        if name.endswith(".routed_experts"):
            pairs = [(got, expert_expected(name, n, values)) for n, got in enumerate(em.experts_of(module))]
            pairs = [(got, want) for both in pairs for got, want in zip(*both)]
        else:
            want = expected(name, values)
            pairs = [] if want is None else [(em.weight_of(module)[: want.shape[0]], want.reshape(want.shape[0], -1))]
        compared += len(pairs)
        unequal += [name for got, want in pairs if not torch.equal(got.reshape(want.shape), want.double())]
    # Of experts the loader reports other names than the parameters have; their values are all compared above.
    missing = {n for n, _ in model.named_parameters() if ".routed_experts." not in n} - loaded
    return {"compared": compared, "unequal": unequal, "missing": sorted(missing),
            "embed": type(model.model.embed_tokens.quant_method).__name__,
            "head": type(model.lm_head.quant_method).__name__}


out = {}
for variant in sys.argv[1:]:
    try:
        out[variant] = load(variant)
    except Exception as error:
        out[variant] = {"refused": type(error).__name__, "message": str(error)}
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def rows(run_patched):
    return run_patched(ROWS).value


@pytest.fixture(scope="module")
def rows_pristine(run_pristine):
    return run_pristine(ROWS).value


REFUSED_CHECKPOINTS = ("broken-target", "fused-disagree", "int6-embed", "int6-padded")


@pytest.fixture(scope="module")
def whole(run_patched):
    return run_patched(WHOLE, "mixed", "int8-dense", "bf16", "vocab-only", *REFUSED_CHECKPOINTS, card86=True).value


@pytest.fixture(scope="module")
def whole_pristine(run_pristine):
    return run_pristine(WHOLE, "mixed", "bf16", "vocab-only", card86=True).value


@pytest.mark.parametrize(
    "case, words",
    [
        ("embed INT8", 64),
        ("embed INT4", 32),
        ("embed INT2", 16),
        ("embed INT8 per channel", 64),
        ("embed INT6 padded, 320", 64),
        ("embed INT6 padded, 2560", 512),
    ],
)
def test_embedding_is_looked_up_exactly(rows, case, words):
    assert rows[case] == {"words": words, "equal": True, "padding": 0.0, "looked_up": True}


@pytest.mark.parametrize(
    "case, words", [("head INT8", 64), ("head INT4", 32), ("head INT5 dense", 40), ("head INT6 dense", 48)]
)
def test_head_multiplies_exactly(rows, case, words):
    assert rows[case].pop("product") < 1e-12
    assert rows[case] == {"words": words, "equal": True, "padding": 0.0}


REFUSED = {
    "embed INT6 dense, 2560": "model.embed_tokens: a row of 2560 6-bit values is 480 words in the checkpoint (a dense "
    "bit stream), and vLLM reads 512 (padded words). Fix: quantize model.embed_tokens to 8 bits, or leave it in BF16",
    "embed INT6 dense, 320": "model.embed_tokens: a row of 320 6-bit values is 60 words",
    "embed INT6, 256": "model.embed_tokens is quantized to 6 bits; its rows of 256 values do not fill 32-bit words of 5",
    "embed INT3, 256": "model.embed_tokens is quantized to 3 bits; its rows of 256 values do not fill 32-bit words of 10",
    "embed INT8 g96": "model.embed_tokens: group size 96 does not divide its rows of 256 values",
    "head INT6 padded": "lm_head: a row of 256 6-bit values is 52 words in the checkpoint (padded words), and vLLM reads "
    "48 (a dense bit stream). Fix: pack these rows as one bit stream, or quantize them to 8 bits",
    "head INT1": "lm_head has a scheme that vLLM has no linear layer for (INT1)",
    "head INT8, rows of INT4": "lm_head: a row of 256 8-bit values is 32 words in the checkpoint (4 bits each), and vLLM "
    "reads 64 (8 bits each). Fix: let quantization_config in config.json give lm_head the scheme that its tensors were",
    "embed INT8, rows of INT4": "model.embed_tokens: a row of 256 8-bit values is 32 words",
}


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_would_be_misread(rows, case):
    assert rows[case].get("message", "").startswith(f"flashnext: {REFUSED[case]}"), rows[case]
    assert "Fix: " in rows[case]["message"]
    assert "\n" not in rows[case]["message"]


@pytest.mark.parametrize("case", REFUSED)
def test_untouched_tree_names_nothing(rows_pristine, case):
    message = rows_pristine[case].get("message", "")
    assert "embed_tokens" not in message
    assert "lm_head" not in message


def test_untouched_tree_reads_rows_that_do_not_fill_their_words(rows_pristine):
    # 256 6-bit values are 52 padded words; upstream makes room for 51 and finds out when it copies, without a name.
    assert "size of tensor a (51) must match" in rows_pristine["embed INT6, 256"]["message"]


@pytest.mark.parametrize("variant, compared", [("mixed", 371), ("int8-dense", 371), ("bf16", 355), ("vocab-only", 354)])
def test_whole_checkpoint_loads(whole, variant, compared):
    result = whole[variant]
    assert "refused" not in result, result
    assert (result["compared"], result["unequal"], result["missing"]) == (compared, [], [])
    quantized = variant != "bf16"
    assert result["embed"] == ("NamedEmbeddingWNA16" if quantized else "UnquantizedEmbeddingMethod")
    assert result["head"] == ("CompressedTensorsLinearMethod" if quantized else "UnquantizedEmbeddingMethod")


@pytest.mark.parametrize(
    "variant, named",
    [
        ("broken-target", "group_0 (INT4 g128) and group_1 (INT6 g128) both target `Linear`"),
        ("fused-disagree", "qkv_proj is one layer in vLLM, but its parts do not have one scheme: q_proj is INT6 g128"),
        ("int6-embed", "model.embed_tokens is quantized to 6 bits"),
        ("int6-padded", "model.layers.0.linear_attn.in_proj_qkvz: a row of 256 6-bit values is 52 words"),
    ],
)
def test_broken_checkpoint_is_refused_by_name(whole, variant, named):
    assert named in whole[variant].get("message", ""), whole[variant]


def test_untouched_tree(whole_pristine, whole):
    assert whole_pristine["bf16"] == whole["bf16"]
    assert "no module or parameter named 'embed_tokens.weight_packed'" in whole_pristine["vocab-only"]["message"]
    assert whole_pristine["mixed"]["refused"] == "NotImplementedError", "the table's format comes first there"
