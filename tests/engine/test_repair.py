"""The repaired config, read by vLLM: every module gets its true scheme, where the export's own config gives it another.

The checkpoint is the maker's `broken-target`: the tensors of `mixed`, and four config groups that all say ["Linear"], as
the AutoRound export of the article did. The truth is taken from the checkpoint maker, never from the code under test.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from entrypoint import checkpoint_fix, lint
from entrypoint.checkpoint import read_checkpoint

README = Path(__file__).resolve().parents[2] / "README.md"

MAKE = """
import pathlib, sys
import checkpoints
checkpoints.write(sys.argv[1], pathlib.Path(sys.argv[2]), wrapper=bool(sys.argv[3]))
print(checkpoints.digest(pathlib.Path(sys.argv[2])))
"""

# vLLM's CompressedTensorsConfig alone, on the tree as its wheel brought it: one module after another, by its own lookup.
RESOLVED = """
import json, pathlib, sys, torch
import checkpoints
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.utils import find_matched_target, should_ignore_layer
from vllm.models.qwen4_exp.nvidia.model import Qwen4ExpForCausalLM, Qwen4ExpForConditionalGeneration

folder, wrapper = pathlib.Path(sys.argv[1]), bool(sys.argv[2])
cls = Qwen4ExpForConditionalGeneration if wrapper else Qwen4ExpForCausalLM
quant = CompressedTensorsConfig.from_config(json.loads((folder / "config.json").read_text())["quantization_config"])
quant.apply_vllm_mapper(cls.hf_to_vllm_mapper)
quant._add_fused_moe_to_target_scheme_map()

class ColumnParallelLinear(torch.nn.Module): pass
class RoutedExperts(torch.nn.Module): pass
class VocabParallelEmbedding(torch.nn.Module): pass
class ParallelLMHead(torch.nn.Module): pass

by_role = checkpoints.schemes("mixed")
prefix = "model.language_model." if wrapper else "model."
counts, wrong = {}, []
for tensor in checkpoints.tensors(checkpoints.TINY, prefix):
    name = tensor.name.removesuffix(".weight")
    if len(tensor.shape) != 2 or ".ngram_embedding." in name or name.endswith((".mlp.gate", ".shared_expert_gate")):
        continue  # the table and the routers are built without a quantization config
    kind = (RoutedExperts if ".experts." in name else VocabParallelEmbedding if "embed_tokens" in name
            else ParallelLMHead if name == "lm_head" else ColumnParallelLinear)
    (vllm_name,) = cls.hf_to_vllm_mapper.apply_list([name])
    true = checkpoints.scheme_of(tensor, by_role)
    found = None
    if not should_ignore_layer(vllm_name, quant.ignore):
        target = find_matched_target(vllm_name, kind(), quant.target_scheme_map)
        found = None if target is None else quant.target_scheme_map[target]["weights"]
    seen = None if found is None else (found.num_bits, found.group_size)
    counts[kind.__name__] = counts.get(kind.__name__, 0) + 1
    if seen != (None if true is None else (true.bits, true.group)):
        wrong.append([vllm_name, seen, true and [true.bits, true.group]])
print(json.dumps({"counts": counts, "wrong": wrong}))
"""

# The whole model of the patched tree on the CPU, filled by vLLM's loader: what it holds against what was packed.
LOADED = """
import json, os, sys
from pathlib import Path
import torch
import checkpoints, engine_modules as em, kv_specs
from safetensors import safe_open

em.with_humming()
folder = Path(sys.argv[1])
text = json.loads((folder / "config.json").read_text())
try:
    config = kv_specs.engine_config(Path(os.getcwd()) / folder.name, model=text, max_model_len=4096)
    model = em.build_on_cpu(config)
except ValueError as error:
    print(json.dumps({"refused": str(error)}))
    sys.exit()

def stored():
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            yield from ((name, shard.get_tensor(name)) for name in shard.keys())

loaded = model.load_weights(stored())
true = {name.removesuffix(".weight"): meaning for name, _, meaning in checkpoints.weights("mixed", 0, "model.")}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
         "gate_up_proj": ("gate_proj", "up_proj"), "in_proj_ba": ("in_proj_b", "in_proj_a")}
compared, unequal = {}, []
for name, row in em.rows(model).items():
    module, (parent, _, leaf) = model.get_submodule(name), name.rpartition(".")
    if name.endswith(".routed_experts"):
        at = parent
        pairs = []
        for n, (gate_up, down) in enumerate(em.experts_of(module)):
            pairs.append((gate_up, torch.cat([true[f"{at}.{n}.gate_proj"], true[f"{at}.{n}.up_proj"]])))
            pairs.append((down, true[f"{at}.{n}.down_proj"]))
    elif row["scheme"] == "BF16":
        continue
    else:
        names = [f"{parent}.{shard}".lstrip(".") for shard in FUSED.get(leaf, (leaf,))]
        names = [n.replace("input_mix_weight_down_block_inject.", "") for n in names]
        want = torch.cat([true[n] for n in names])
        pairs = [(em.weight_of(module)[: want.shape[0]], want)]
    compared[row["scheme"]] = compared.get(row["scheme"], 0) + len(pairs)
    unequal += [name for got, want in pairs if not torch.equal(got, want.double())]
print(json.dumps({"compared": compared, "unequal": unequal}))
"""


# vLLM's own defaults of a checkpoint, and what becomes of two requests: the README's for an answer without thinking, and
# one that says nothing.
SAMPLED = """
import json, sys
from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.hf import resolve_chat_template_kwargs
from transformers import AutoTokenizer

TEMPLATE = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ messages[0].content }}"
out = []
for folder in sys.argv[2:]:
    model = ModelConfig(model=folder, skip_tokenizer_init=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    defaults, requests = model.get_diff_sampling_param(), []
    for body in ({}, json.loads(sys.argv[1])):
        request = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **body})
        params = request.to_sampling_params(100, defaults)
        params.update_from_generation_config(model.try_get_generation_config(), tokenizer.eos_token_id)
        template = request.build_chat_params(TEMPLATE, "string")
        given = resolve_chat_template_kwargs(tokenizer, TEMPLATE, template.chat_template_kwargs)
        prompt = tokenizer.apply_chat_template(request.messages, chat_template=TEMPLATE, tokenize=False, **given)
        names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty")
        requests.append({n: getattr(params, n) for n in names} | {"stop": sorted(params.all_stop_token_ids), "prompt": prompt})
    out.append({"defaults": defaults, "requests": requests})
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def broken(run_pristine, tmp_path_factory):
    """(folder, its digest) of the export with the wrong config, by whether it has the multimodal wrapper."""
    made = {}
    for wrapper in (False, True):
        folder = tmp_path_factory.mktemp("broken") / "model"
        out = run_pristine(MAKE, "broken-target", str(folder), "1" * wrapper)
        made[wrapper] = folder, out.stdout.split()[-1]
    return made


@pytest.fixture(scope="module")
def repaired(broken, tmp_path_factory):
    out = {}
    for wrapper, (folder, _) in broken.items():
        served, words = checkpoint_fix.ready(read_checkpoint(folder), tmp_path_factory.mktemp("overlay"))
        assert words[0] == "config.json: 4 config groups rebuilt from the weights' shapes"
        out[wrapper] = Path(served.path)
    return out


@pytest.mark.parametrize("wrapper", [False, True])
def test_vllms_own_lookup_is_wrong_before_and_right_after(run_pristine, broken, repaired, wrapper):
    before = run_pristine(RESOLVED, str(broken[wrapper][0]), "1" * wrapper, card86=True).value
    after = run_pristine(RESOLVED, str(repaired[wrapper]), "1" * wrapper, card86=True).value
    assert before["counts"] == after["counts"]
    # 8 layers of 16 experts with three matrices each: every one of them is taken for another scheme.
    assert sum(".experts." in name for name, _, _ in before["wrong"]) == before["counts"]["RoutedExperts"] == 8 * 16 * 3
    assert {tuple(seen) for name, seen, _ in before["wrong"] if ".experts." in name} == {(8, 128)}
    assert after["wrong"] == []


def test_the_tensors_are_the_same_and_the_source_is_untouched(run_pristine, broken, repaired):
    code = "import checkpoints, pathlib, sys; print(checkpoints.digest(pathlib.Path(sys.argv[1])))"
    for wrapper, (folder, digest) in broken.items():
        assert run_pristine(code, str(repaired[wrapper])).stdout.split()[-1] == digest
        groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
        assert {tuple(group["targets"]) for group in groups.values()} == {("Linear",)}


def test_patched_engine_refuses_the_export_and_loads_the_repaired_one_value_for_value(run_patched, broken, repaired):
    refused = run_patched(LOADED, str(broken[False][0]), card86=True).value
    assert "quantization_config is ambiguous" in refused["refused"]
    found = run_patched(LOADED, str(repaired[False]), card86=True).value
    assert found["unequal"] == []
    # Experts 8 x 16 x (gate and up, down); INT6: 6 x (qkvz, out) + 2 x (qkv, o) + 8 x (gate and up, down);
    # INT8 g128: 17 mixers, embeddings, head; INT8 g64: 17 mixers.
    assert found["compared"] == {"INT4 g128": 256, "INT6 g128": 32, "INT8 g128": 19, "INT8 g64": 17}


def test_vllm_samples_by_the_restored_defaults_and_by_the_readmes_request(run_pristine, broken, tmp_path):
    folder = tmp_path / "export"
    folder.mkdir()
    for path in broken[False][0].iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text('{"transformers_version": "5.0"}')  # article 5.7: all that is left
    served, words = checkpoint_fix.ready(read_checkpoint(folder), tmp_path / "overlay")
    assert words[1].startswith("generation_config.json: ")
    (written,) = re.findall(r"send per request\s+`([^`]+)`", README.read_text(encoding="utf-8"))
    lost, restored = run_pristine(SAMPLED, f"{{{written}}}", str(folder), served.path).value
    assert lost["defaults"] == {}
    thinking = {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0}
    assert restored["defaults"] == thinking
    added = {t["content"]: t["id"] for t in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]}
    # The tokenizer's own end of a turn, and what the restored file names.
    ends = {added["<|im_end|>"], *lint.eos_ids(read_checkpoint(folder))}
    common = {"stop": sorted(ends), "presence_penalty": 0.0, "prompt": "x"}
    without = {"temperature": 0.7, "top_p": 0.8, "presence_penalty": 1.5, "prompt": "<think></think>x"}
    assert restored["requests"] == [thinking | common, thinking | common | without]


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("mixed", []),
        ("int8-dense", []),
        ("bf16", []),
        ("table-elsewhere", []),
        ("fused-disagree", ["merged shards disagree, q_proj INT6 g128, k_proj INT8 g128, v_proj INT6 g128"]),
        ("int6-embed", ["6-bit embeddings that do not fill whole words"]),
        ("int6-padded", ["6-bit rows in whole words"]),
    ],
)
def test_lint_says_of_each_variant_what_the_engine_would(run_pristine, tmp_path, variant, expected):
    run_pristine(MAKE, variant, str(tmp_path / "m"), "")
    errors = [f.message for f in lint.examine(read_checkpoint(tmp_path / "m")).errors]
    assert len(errors) == len(expected), errors
    for message, start in zip(errors, expected, strict=True):
        assert message.startswith(start)


def test_deep_lint_of_a_real_checkpoint_is_clean(run_pristine, tmp_path):
    run_pristine(MAKE, "mixed", str(tmp_path / "m"), "1")
    report = lint.examine(read_checkpoint(tmp_path / "m"), lint.hasher(lambda done, total: None))
    assert report.errors == () and len(report.hashes) >= 3
