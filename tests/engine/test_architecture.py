"""The list of weights against the models themselves: transformers' of the published size, vLLM's draft head, vLLM's loader.

architecture.py is compared name by name and shape by shape, and so are the header-only fixtures that other tests stand on.
"""

from __future__ import annotations

import json

import pytest

from entrypoint import architecture, bits, lint
from entrypoint.checkpoint import read_checkpoint, read_text_config
from tests.support import headers

TRANSFORMERS = """
import json, sys, torch
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForConditionalGeneration
config = Qwen4ExpConfig(**json.loads(sys.argv[1]))
with torch.device("meta"):
    model = Qwen4ExpForConditionalGeneration(config)
print(json.dumps({name: list(tensor.shape) for name, tensor in model.state_dict().items()}))
"""

# vLLM on the patched tree. Its draft model, on no data, is given exactly the listed tensors; its model is given a real
# checkpoint with the experts of each layer in two 3-D tensors.
LOADED = """
import json, sys, tempfile
from pathlib import Path
import torch
import engine_modules as em
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.models.qwen4_exp.nvidia.mtp import Qwen4ExpMTP
from vllm.utils.torch_utils import set_default_torch_dtype

folder = Path(sys.argv[1])
config = EngineArgs(model=str(folder), skip_tokenizer_init=True, enforce_eager=True, engram_config={"cpu_offload": False},
                    speculative_config={"method": "mtp", "num_speculative_tokens": 1}).create_engine_config()
given = json.loads(Path(sys.argv[2]).read_text())
with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
    init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store", 0, "gloo")
    initialize_model_parallel(1, 1)
    with torch.device("meta"):
        draft = Qwen4ExpMTP(vllm_config=config)
    with torch.device("cpu"):
        model = initialize_model(config)

def filled(model, weights):
    loaded = {n.replace(".experts.w", ".experts.routed_experts.w") for n in model.load_weights(weights)}
    held = {name for name, _ in model.named_parameters()}
    buffers = {name for name, _ in model.named_buffers()}
    return {"missing": sorted(held - loaded), "unknown": sorted(loaded - held - buffers), "held": len(held)}

out = {"draft": filled(draft, ((n, torch.empty(s, dtype=torch.bfloat16, device="meta")) for n, s in given.items()))}

tensors = {}
for file in sorted(folder.glob("*.safetensors")):
    with safe_open(file, "pt") as shard:
        tensors |= {name: shard.get_tensor(name) for name in shard.keys()}
layers = sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name})
experts = {}
for at in layers:
    count = sum(name.startswith(f"{at}.experts.") for name in tensors) // 3
    of = lambda leaf: torch.stack([tensors.pop(f"{at}.experts.{n}.{leaf}.weight") for n in range(count)])
    experts[at] = torch.cat([of("gate_proj"), of("up_proj")], 1), of("down_proj")
    tensors[f"{at}.experts.gate_up_proj"], tensors[f"{at}.experts.down_proj"] = experts[at]
out["in one"] = filled(model, tensors.items())
out["equal"] = [
    all(torch.equal(got, want.double()) for pair, both in zip(em.experts_of(model.get_submodule(f"{at}.experts.routed_experts")),
        zip(*experts[at])) for got, want in zip(pair, both)) for at in layers]
out["shapes"] = {name: list(tensor.shape) for name, tensor in tensors.items()}
print(json.dumps(out))
"""


def tensors_of(parts) -> dict[str, list[int]]:
    """Name -> shape of the tensors of an unquantized checkpoint; what may be missing is left out."""
    out = {}
    for part in parts:
        if part.kind != "optional":
            end = "" if part.kind == "bare" else ".weight"
            out |= {name + end: list(part.shape) for name in part.names()}
    return out


def as_in_memory(tensors: dict[str, list[int]]) -> dict[str, list[int]]:
    """The same as transformers holds them: experts of a layer in one tensor, the table in one."""
    out: dict[str, list[int]] = {}
    for name, shape in tensors.items():
        if ".experts." in name:
            at, _, end = name.partition(".experts.")
            leaf = end.split(".")[1]
            key = f"{at}.experts." + ("down_proj" if leaf == "down_proj" else "gate_up_proj")
            count = out.get(key, [0])[0]
            out[key] = [count + (leaf != "up_proj"), shape[0] if leaf == "down_proj" else 2 * shape[0], shape[1]]
        elif ".ngram_embedding.shard_" in name:
            key = name.partition(".shard_")[0] + ".weight"
            out[key] = [out.get(key, [0])[0] + shape[0], shape[1]]
        else:
            out[name] = shape
    return out


@pytest.fixture(scope="module")
def real(run_pristine):
    config = {k: v for k, v in headers.flashnext_config().items() if k in ("text_config", "vision_config")}
    config["text_config"] |= {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    }
    return run_pristine(TRANSFORMERS, json.dumps(config)).value


def test_text_and_vision_are_those_of_transformers_in_the_published_size(real):
    config = headers.flashnext_config()
    text = read_text_config(config)
    listed = [*architecture.parts(text, "model.language_model."), *architecture.vision_parts(config["vision_config"])]
    optional = {part.name: list(part.shape) for part in listed if part.kind == "optional"}
    mine = as_in_memory(tensors_of(listed))
    # Optional ones are transformers' buffers, and a projection that an export may hold and no model has.
    assert {k: v for k, v in real.items() if k not in optional} == mine
    assert {k: real[k] for k in optional if k in real} == {k: v for k, v in optional.items() if ".ple_embedding." in k}
    # `flashnext bits --demo` counts the same shapes.
    stored, published = bits.demo()
    assert [item.part for item in stored] == list(architecture.parts(published, "model.language_model."))
    assert as_in_memory(tensors_of(item.part for item in stored)) == {
        k: v for k, v in mine.items() if not k.startswith("model.visual.")
    }


def test_header_only_fixtures_hold_the_same_tensors(real):
    text = read_text_config(headers.flashnext_config())
    shapes: dict[str, list[int]] = {}
    for name, (_, shape) in headers.flashnext_tensors().items():
        stem, _, end = name.rpartition(".")
        if end == "weight_packed":
            per_word = 8 if ".mlp.experts." in name else 4
            shapes[f"{stem}.weight"] = [shape[0], shape[1] * per_word]
        elif end not in ("weight_scale", "weight_shape"):
            shapes[name] = list(shape)
    draft = {name: shapes.pop(name) for name in list(shapes) if name.startswith("mtp.")}
    assert as_in_memory(shapes) == {k: v for k, v in real.items() if not k.endswith(_BUFFERS)}
    assert draft == tensors_of(architecture.draft_parts(text))


_BUFFERS = (".layer_multipliers", ".ngram_heads_vocab_sizes", ".ngram_heads_offsets")


def test_vllm_takes_the_listed_draft_head_and_experts_in_one_tensor(run_pristine, run_patched, tmp_path):
    folder = tmp_path / "m"
    make = "import checkpoints, pathlib, sys; checkpoints.write('bf16', pathlib.Path(sys.argv[1]), wrapper=False)"
    run_pristine(make, str(folder))
    config = json.loads((folder / "config.json").read_text())
    config["mtp_num_hidden_layers"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    text = read_text_config(config)
    given = tensors_of(architecture.draft_parts(text)) | {
        "model.embed_tokens.weight": [text.vocab_size, text.hidden_size],
        "lm_head.weight": [text.vocab_size, text.hidden_size],
    }
    (tmp_path / "given.json").write_text(json.dumps(given))
    found = run_patched(LOADED, str(folder), str(tmp_path / "given.json"), card86=True).value
    for model, least in (("draft", 40), ("in one", 150)):
        assert found[model]["missing"] == [] and found[model]["unknown"] == [], found[model]
        assert found[model]["held"] > least
    assert found["equal"] == [True] * text.num_hidden_layers
    # What the engine took is what the lint takes for whole.
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    specs = {name: ("BF16", tuple(shape)) for name, shape in found["shapes"].items()}
    headers.write_header_only(folder / "model.safetensors", specs)
    errors = lint.examine(read_checkpoint(folder)).errors
    assert [f.message for f in errors if f.check not in ("tokenizer", "config groups")] == []
