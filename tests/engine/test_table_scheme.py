"""Patch 0006: the N-gram table under a compressed-tensors checkpoint that does not, or does, name it.

One program on each tree builds vLLM's own Qwen4ExpNGramEmbedding on the CPU platform, loads the table from 128 shards
under the checkpoint's names, looks rows up, and compares them bit for bit with transformers' own module: both copy
BF16 rows, so there is nothing to tolerate.
"""

import pytest

PROGRAM = r"""
import json
import torch
import engine_modules as em
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

PREFIX = "model.layers.1.ple.ple_embedding"
SHARDS, DIM, LENGTHS = 128, 256, (5, 1, 9)
CONFIG = Qwen4ExpTextConfig(hidden_size=256, vocab_size=1024, ngram_size=3, heads_per_ngram=8, ple_embed_dim=DIM,
                            ngram_vocab_size_base=1000, make_ngram_vocab_size_divisible_by=128, eos_token_id=1000,
                            split_ngram_parts=SHARDS, ple_layer_ids=[2], seed=1234)
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "group", "group_size": 16}


def looked_up(targets, ignore):
    import vllm.models.qwen4_exp.nvidia.model
    from vllm.models.qwen4_exp.nvidia.ngram_embedding import Qwen4ExpNGramEmbedding
    quant = None if targets is None else CompressedTensorsConfig.from_config({
        "format": "pack-quantized", "ignore": ignore,
        "config_groups": {"group_0": {"targets": targets, "weights": INT8, "input_activations": None}}})
    torch.manual_seed(0)
    reference = Qwen4ExpTextNGramEmbedding(CONFIG, DIM, layer_idx=1).to(torch.bfloat16).requires_grad_(False)
    table = torch.randn(reference.ngram_embedding.weight.shape).to(torch.bfloat16)
    reference.ngram_embedding.weight.copy_(table)
    module = Qwen4ExpNGramEmbedding(CONFIG, DIM, 0, 64, data_parallel_rank=0, prefix=PREFIX, quant_config=quant,
                                    params_dtype=torch.bfloat16)
    rows = -(-table.shape[0] // SHARDS)
    shards = {f"ngram_embedding.shard_{n}.weight": table[n * rows : (n + 1) * rows] for n in range(SHARDS)}
    hashes = {name: value for name, value in reference.state_dict().items() if "ngram_embedding" not in name}
    loaded = module.load_weights((shards | hashes).items())

    ids = [torch.randint(0, 1001, (length,)) for length in LENGTHS]
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)])
    context = torch.full((len(LENGTHS), CONFIG.ngram_size - 1), CONFIG.eos_token_id)
    got = module(torch.empty(0), torch.cat(ids), starts, context)
    want = torch.cat([reference(one.unsqueeze(0), None).squeeze(0) for one in ids])
    return {"loaded": sorted(loaded), "rows": list(table.shape), "equal": bool(torch.equal(got, want)),
            "shape": list(got.shape), "method": type(module.ngram_embedding.quant_method).__name__}


OTHERS = [r"re:.*\.mlp\.experts\..*_proj$", r"re:.*embed_tokens$"]
CASES = {
    "none": (None, []),
    "others": (OTHERS, []),
    "class Linear": (["Linear"], ["lm_head"]),
    "ignored": ([r"re:.*"], [r"re:.*ngram_embedding.*"]),
    "embeddings, ignored": (["Embedding"], [r"re:.*ngram_embedding.*"]),
    "everything": ([r"re:.*"], []),
    "by path": ([PREFIX + ".ngram_embedding"], []),
    "one shard": ([*OTHERS, r"re:.*ngram_embedding\.shard_17$"], []),
    "embeddings": (["Embedding"], []),
}
out = {}
with em.cpu_platform():
    for name, (targets, ignore) in CASES.items():
        try:
            out[name] = looked_up(targets, ignore)
        except Exception as error:
            out[name] = {"refused": type(error).__name__, "message": str(error)}
print(json.dumps(out))
"""

GOOD = {
    "loaded": ["layer_multipliers", "ngram_embedding.weight", "ngram_heads_offsets", "ngram_heads_vocab_sizes"],
    "equal": True,
    "shape": [15, 256],
    "method": "Qwen4ExpPLEUnquantizedEmbeddingMethod",
}
READ_IN_BF16 = ["others", "class Linear", "ignored", "embeddings, ignored"]


@pytest.fixture(scope="module")
def patched(run_patched):
    return run_patched(PROGRAM).value


@pytest.fixture(scope="module")
def pristine(run_pristine):
    return run_pristine(PROGRAM).value


@pytest.mark.parametrize("case", ["none", *READ_IN_BF16])
def test_table_is_read_in_bf16(patched, case):
    assert {key: patched[case].get(key) for key in GOOD} == GOOD, patched[case]


@pytest.mark.parametrize(
    "case, target, named",
    [
        ("everything", "re:.*", "ngram_embedding: INT8 g16"),
        ("by path", "model.layers.1.ple.ple_embedding.ngram_embedding", "ngram_embedding: INT8 g16"),
        ("one shard", r"re:.*ngram_embedding\.shard_17$", "ngram_embedding.shard_17: INT8 g16"),
        ("embeddings", "Embedding", "ngram_embedding: INT8 g16"),
    ],
)
def test_group_that_names_the_table(patched, case, target, named):
    assert patched[case]["refused"] == "ValueError"
    message = patched[case]["message"]
    assert message.startswith(f"flashnext: target `{target}` of group_0 quantizes the N-gram table (model.layers.1.")
    assert named in message
    assert "Fix: " in message
    assert "\n" not in message


@pytest.mark.parametrize("case", READ_IN_BF16)
def test_untouched_tree_refuses_the_format(pristine, case):
    assert pristine[case]["refused"] == "NotImplementedError"
    assert pristine["none"]["equal"], "without a quantization config the table works there"
