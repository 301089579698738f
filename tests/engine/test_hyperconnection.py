"""Patch 0005: the hyper-connection with down and injection in two schemes, against transformers' own in float64.

One program does all cases on one tree. It makes a random hyper-connection, quantizes it by round-to-nearest through the
compressed-tensors library, and loads it under the checkpoint's names with vLLM's own mapping and loader into vLLM's own
GatedResidual on the CPU platform. Only two things are not the engine's, because a CPU has none: the INT8 kernel and the
Triton kernels between the products (tests/support/engine_modules.py). The reference is transformers' module with the
dequantized weights. The norm is float32 on both sides, by the same formula in the same order; everything after it is
float64, where sums of 1024 terms of a few units in another order differ by some 1e-13. 1e-11 is above that and far below
what a wrong row, group or shard gives (each case also checks that a shift of one row moves results by more than 0.01).
"""

import pytest

PROGRAM = """
import json, sys, inspect
import torch
import engine_modules as em
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedResidual

HIDDEN, STREAMS, RANK, TOKENS = 256, 4, 320, 7
DOWN, INJECT, UP = "input_mix_weight_down", "block_inject_weight", "input_mix_weight_up"


def scheme(bits, group):
    return {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False,
            "strategy": "group" if group else "channel", "group_size": group}


def rounded(weight, args):
    group = args.group_size or weight.shape[1]
    if weight.shape[1] % group:  # a refused case: the engine must say so before it sees tensors
        return {"weight": weight}, weight.double()
    grouped = weight.unflatten(1, (-1, group))
    scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    scale = scale.to(torch.bfloat16)
    q = quantize(x=weight, scale=scale.float(), zero_point=None, args=args, dtype=torch.int8)
    exact = (q.double().unflatten(1, (-1, group)) * scale.double().unsqueeze(-1)).flatten(1)
    return {"weight_packed": pack_to_int32(q, args.num_bits), "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape)}, exact


def case(name, schemes, use_combine=True, ignore=()):
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.models.utils import AutoWeightsLoader
    from vllm.models.qwen4_exp.nvidia import hyperconnection, model
    em.torch_hyper_connection_ops(hyperconnection)

    path = "layers.0.attn_hyper_connection" if use_combine else "hyper_connection_mixer"
    groups = {f"group_{n}": {"targets": [rf"re:.*hyper_connection(_mixer)?\\.{part}$"], "weights": scheme(*s),
                             "input_activations": None, "format": "pack-quantized"}
              for n, (part, s) in enumerate(schemes.items())}
    quant = CompressedTensorsConfig.from_config({"config_groups": groups, "format": "pack-quantized",
                                                 "ignore": list(ignore)})
    quant.packed_modules_mapping = model.Qwen4ExpForCausalLM.packed_modules_mapping

    torch.manual_seed(len(name))
    reference = Qwen4ExpTextGatedResidual(
        Qwen4ExpTextConfig(hidden_size=HIDDEN, hc_count=STREAMS, hc_lowrank=RANK, rms_norm_eps=1e-6), use_combine
    ).double().requires_grad_(False)
    checkpoint = {}
    for part, tensor in reference.named_parameters():
        module = part.removesuffix(".weight")
        data = (torch.randn(tensor.shape) * (0.5 if module == "hc_norm" else 2.0 * tensor.shape[-1] ** -0.5))
        data = data.to(torch.bfloat16).float()
        if module in schemes:
            stored, exact = rounded(data, QuantizationArgs.model_validate(scheme(*schemes[module])))
            checkpoint |= {f"{path}.{module}.{key}": value for key, value in stored.items()}
        else:
            checkpoint[f"{path}.{part}"], exact = data.to(torch.bfloat16), data.double()
        tensor.copy_(exact)

    config = hyperconnection.HyperConnectionConfig(
        hc_count=STREAMS, hidden_size=HIDDEN, params_dtype=torch.bfloat16, hc_lowrank=RANK, rms_norm_eps=1e-6,
        hc_per_branch_norm=True)
    accepts = "quant_config" in inspect.signature(hyperconnection.GatedResidual).parameters
    residual = hyperconnection.GatedResidual(
        config, use_combine=use_combine, prefix=f"model.{path}", **({"quant_config": quant} if accepts else {}))
    whole = torch.nn.Module()
    parent = whole
    for step in path.split(".")[:-1]:
        child = torch.nn.Module()
        parent.add_module(step, child)
        parent = child
    parent.add_module(path.split(".")[-1], residual)
    loaded = AutoWeightsLoader(whole).load_weights(checkpoint.items(), mapper=model.Qwen4ExpModel.hf_to_vllm_mapper)
    held = {n for n, _ in whole.named_parameters()}
    for module in residual.modules():
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)
        if isinstance(getattr(module, "weight", None), torch.nn.Parameter):
            module.weight = torch.nn.Parameter(module.weight.double(), requires_grad=False)
            # The CPU platform's shortcut for BF16 would keep a packed copy of its own.
            module.cpu_linear = torch.nn.functional.linear

    torch.manual_seed(1)
    x = torch.randn(TOKENS, STREAMS * HIDDEN).double()
    block, logits = torch.randn(TOKENS, HIDDEN).double(), torch.randn(TOKENS, STREAMS).double()
    def difference(hidden, got, injection):
        want = reference(hidden)
        want = want if use_combine else (want, None, None)
        errors = [(got - want[0]).abs().max().item()]
        if use_combine:
            output = torch.randn(TOKENS, HIDDEN).double()
            combined = residual.combine(hidden, output, injection)
            expected = hidden + (output.unsqueeze(-2) * want[2].unsqueeze(-1)).flatten(-2)
            errors.append((combined - expected).abs().max().item())
        return max(errors)
    _, mixed, injection = residual.mix(x)
    errors = {"mix": difference(x, mixed, injection)}
    hidden, mixed, injection = residual.combine_and_mix(x, block, logits)
    errors["combine"] = (hidden - residual.combine(x, block, logits)).abs().max().item()
    errors["combine_and_mix"] = difference(hidden, mixed, injection)
    reference.input_mix_weight_down.weight.copy_(reference.input_mix_weight_down.weight.roll(1, 0))
    errors["shifted"] = difference(hidden, mixed, injection)
    modules = {n: [r["class"], r["scheme"]] for n, r in em.rows(residual).items()}
    return {"errors": errors, "not_loaded": sorted(held - loaded), "modules": modules,
            "strides": None if injection is None else [injection.stride(-1), mixed.stride(-1)]}


CASES = {
    "article": dict(schemes={DOWN: (8, 128), UP: (8, 64)}),
    "article, ignored by name": dict(schemes={DOWN: (8, 128), UP: (8, 64)},
                                     ignore=["model.layers.0.attn_hyper_connection.block_inject_weight"]),
    "up in groups of 32": dict(schemes={DOWN: (8, 128), UP: (8, 32)}),
    "up per channel": dict(schemes={DOWN: (8, 128), UP: (8, None)}),
    "up only": dict(schemes={UP: (8, 64)}),
    "all INT8": dict(schemes={DOWN: (8, 128), INJECT: (8, 128), UP: (8, 64)}),
    "injection in other groups": dict(schemes={DOWN: (8, 128), INJECT: (8, 64), UP: (8, 64)}),
    "injection only": dict(schemes={INJECT: (8, 128)}),
    "INT4": dict(schemes={DOWN: (4, 128), UP: (4, 64)}),
    "nothing": dict(schemes={}),
    "final mixer": dict(schemes={DOWN: (8, 128), UP: (8, 64)}, use_combine=False),
    "final mixer, nothing": dict(schemes={}, use_combine=False),
    "up in groups of 128": dict(schemes={DOWN: (8, 128), UP: (8, 128)}),
    "down in groups of 96": dict(schemes={DOWN: (8, 96)}),
}
out = {}
with em.cpu_platform():
    for name, arguments in CASES.items():
        try:
            out[name] = case(name, **arguments)
        except Exception as error:
            out[name] = {"refused": type(error).__name__, "message": str(error)}
print(json.dumps(out))
"""

MERGED, REPLICATED, SPLIT = "MergedColumnParallelLinear", "ReplicatedLinear", "SplitDownInject"
FUSED = "input_mix_weight_down_block_inject"
DOWN, INJECT, UP = "input_mix_weight_down", "block_inject_weight", "input_mix_weight_up"


@pytest.fixture(scope="module")
def patched(run_patched):
    return run_patched(PROGRAM).value


@pytest.fixture(scope="module")
def pristine(run_pristine):
    return run_pristine(PROGRAM).value


def split(down: str, inject: str, up: str) -> dict:
    return {f"{FUSED}.{DOWN}": [REPLICATED, down], f"{FUSED}.{INJECT}": [REPLICATED, inject], UP: [REPLICATED, up]}


def fused(both: str, up: str) -> dict:
    return {FUSED: [MERGED, both], UP: [REPLICATED, up]}


def final(down: str, up: str) -> dict:
    return {DOWN: [REPLICATED, down], UP: [REPLICATED, up]}


EXPECTED = {
    "article": split("INT8 g128", "BF16", "INT8 g64"),
    "article, ignored by name": split("INT8 g128", "BF16", "INT8 g64"),
    "up in groups of 32": split("INT8 g128", "BF16", "INT8 g32"),
    "up per channel": split("INT8 g128", "BF16", "INT8 per channel"),
    "up only": fused("BF16", "INT8 g64"),
    "all INT8": fused("INT8 g128", "INT8 g64"),
    "injection in other groups": split("INT8 g128", "INT8 g64", "INT8 g64"),
    "injection only": split("BF16", "INT8 g128", "BF16"),
    "INT4": split("INT4 g128", "BF16", "INT4 g64"),
    "nothing": fused("BF16", "BF16"),
    "final mixer": final("INT8 g128", "INT8 g64"),
    "final mixer, nothing": final("BF16", "BF16"),
}
TOLERANCE = 1e-11


@pytest.mark.parametrize("case", EXPECTED)
def test_layout_and_numbers(patched, case):
    result = patched[case]
    assert "refused" not in result, result
    assert result["modules"] == EXPECTED[case]
    assert result["not_loaded"] == []
    errors = result["errors"]
    assert max(errors["mix"], errors["combine"], errors["combine_and_mix"]) < TOLERANCE, errors
    assert errors["shifted"] > 0.01, "the comparison does not see a wrong row"
    assert result["strides"] in (None, [1, 1]), "the Triton kernels after the products need unit inner strides"


@pytest.mark.parametrize("case", ["nothing", "final mixer, nothing"])
def test_unquantized_is_as_before(patched, pristine, case):
    assert pristine[case] == patched[case]


@pytest.mark.parametrize("case", sorted(set(EXPECTED) - {"nothing", "final mixer, nothing"}))
def test_fails_without_the_patch(pristine, case):
    # Either no parameter takes the packed tensors, or the fused linear's own loader meets tensors it cannot place.
    message = pristine[case]["message"]
    assert "no module or parameter named" in message or "MergedColumnParallelLinear" in message, pristine[case]


def test_group_that_does_not_divide_the_low_rank(patched):
    assert patched["up in groups of 128"] == {
        "refused": "ValueError",
        "message": "flashnext: model.layers.0.attn_hyper_connection.input_mix_weight_up is INT8 g128, but its rows of 320 "
        "values are 2.5 groups of 128. Fix: quantize it per channel, or with a group size that divides 320 (the kernels "
        "take 32, 64)",
    }


def test_group_that_does_not_divide_the_residual(patched):
    message = patched["down in groups of 96"]["message"]
    assert "attn_hyper_connection.input_mix_weight_down is INT8 g96, but its rows of 1024 values" in message
    assert message.count("\n") == 0
