"""What a built vLLM model says of its own modules, and what a packed INT weight stands for, in plain PyTorch.

For tests that build vLLM's own classes in a process of their own (the `run_*` fixtures of tests/engine). Nothing here
computes as the engine does: `rows` reads decisions off modules, `dequantized` turns the parameters that vLLM's loader
filled back into a matrix, and `TorchKernel` is a linear kernel for the CPU platform, where vLLM has none for INT8 and
INT6, so that modules built, loaded and called the real way give numbers.
"""

import contextlib
import types

import torch


def with_humming() -> None:
    """vLLM offers its Humming kernels (the only ones for INT6) if the package is there, as in the image for GPUs."""
    from vllm.model_executor.kernels.linear.mixed_precision import humming

    humming.has_humming = lambda: True


def rows(model: torch.nn.Module) -> dict[str, dict]:
    """{module name: {"class", "method", "kernel", "scheme"}} of every module that has a quantization method.

    `scheme` is like "INT8 g128", "INT8 per channel" or "BF16"; `kernel` is None where nothing was chosen yet.
    """
    found = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None:
            continue
        scheme = getattr(module, "scheme", None) or method
        bits, group = getattr(scheme, "num_bits", None), getattr(scheme, "group_size", None)
        found[name] = {
            "class": type(module).__name__,
            "method": type(method).__name__,
            "kernel": type(scheme.kernel).__name__ if hasattr(scheme, "kernel") else None,
            "scheme": "BF16" if bits is None else f"INT{bits} " + (f"g{group}" if (group or -1) > 0 else "per channel"),
        }
    return found


def unpack(packed: torch.Tensor, bits: int, length: int, dense: bool) -> torch.Tensor:
    """int32 [rows, words] -> int64 [rows, length], signed; `dense` is one bit stream a row, else whole words."""
    words = torch.nn.functional.pad(packed.to(torch.int64) & 0xFFFFFFFF, (0, 1))
    at = torch.arange(length)
    bit = at * bits if dense else at // (32 // bits) * 32 + at % (32 // bits) * bits
    both = words[:, bit // 32] | (words[:, bit // 32 + 1] << 32)
    return ((both >> (bit % 32)) & ((1 << bits) - 1)) - (1 << (bits - 1))


def dequantized(
    packed: torch.Tensor, scale: torch.Tensor, bits: int, length: int, *, dense: bool = True
) -> torch.Tensor:
    """float64 [rows, length] from int32 [rows, words] and scales [rows, groups]."""
    values = unpack(packed, bits, length, dense).double().unflatten(1, (scale.shape[1], -1))
    return (values * scale.double().unsqueeze(-1)).flatten(1)


def weight_of(module: torch.nn.Module) -> torch.Tensor:
    """float64 [rows, length] of a linear or embedding as vLLM loaded it, before any kernel repacks it."""
    if hasattr(module, "weight"):
        return module.weight.double()
    scheme = getattr(module, "scheme", None)
    bits = (scheme or module.quant_method).num_bits
    length = module.input_size_per_partition if scheme else module.hidden_size
    return dequantized(module.weight_packed, module.weight_scale, bits, length, dense=scheme is not None)


def experts_of(module: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each expert of a RoutedExperts that vLLM loaded, float64 gate and up below each other, and down."""
    if hasattr(module, "w13_weight"):
        return list(zip(module.w13_weight.double(), module.w2_weight.double(), strict=True))
    bits = module.quant_method.num_bits
    return [
        tuple(
            # Upstream keeps these transposed: [words, rows] and [groups, rows].
            dequantized(packed[expert].T, scale[expert].T, bits, packed.shape[1] * 32 // bits)
            for packed, scale in (
                (module.w13_weight_packed, module.w13_weight_scale),
                (module.w2_weight_packed, module.w2_weight_scale),
            )
        )
        for expert in range(module.w13_weight_packed.shape[0])
    ]


def torch_kernel():
    """A linear kernel class for the CPU platform that dequantizes the loaded parameters and multiplies."""
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel

    class TorchKernel(MPLinearKernel):
        @classmethod
        def get_min_capability(cls) -> int:
            return -1

        @classmethod
        def can_implement(cls, config) -> tuple[bool, str | None]:
            return not config.zero_points, "asymmetric"

        def process_weights_after_loading(self, layer) -> None:
            pass

        def apply_weights(self, layer, x, bias=None):
            assert bias is None
            return x @ weight_of(layer).to(x.dtype).T

    return TorchKernel


@contextlib.contextmanager
def cpu_platform():
    """vLLM's CPU platform with one process in all its groups, TorchKernel first among its linear kernels."""
    import tempfile

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS
    from vllm.platforms import current_platform

    assert current_platform.is_cpu(), current_platform
    _POSSIBLE_KERNELS[current_platform._enum].insert(0, torch_kernel())
    config = VllmConfig()
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store", 0, backend="gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        yield config


def torch_hyper_connection_ops(module: types.ModuleType) -> None:
    """Put PyTorch in the place of the Triton kernels that vLLM's nvidia/hyperconnection.py calls.

    The formulas are those of vLLM's common/hyperconnection.py. The norm computes in float32, as it and transformers do;
    the rest keeps the dtype it is given, so that float64 stays float64.
    """

    def streams(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.unflatten(-1, (count, -1))

    def grouped_gemma_rmsnorm(x, weight, eps, groups):
        wide = streams(x.float(), groups)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (normed.flatten(-2) * (1.0 + weight.float())).to(x.dtype)

    def hc_combine(residual, block_output, injection, count):
        gain = 1.0 if injection is None else 2.0 * torch.sigmoid(injection / count).unsqueeze(-1)
        return (streams(residual, count) + block_output.unsqueeze(-2) * gain).flatten(-2)

    def hc_combine_norm(residual, block_output, injection, weight, eps, count):
        combined = hc_combine(residual, block_output, injection, count)
        return combined, grouped_gemma_rmsnorm(combined, weight, eps, count)

    module.grouped_gemma_rmsnorm = grouped_gemma_rmsnorm
    module.hc_silu = lambda x, count: torch.nn.functional.silu(x / count)
    module.hc_gate_mix = lambda x, gate, count: (streams(torch.sigmoid(gate) * x, count)).mean(-2)
    module.hc_combine = hc_combine
    module.hc_combine_norm = hc_combine_norm


def build_on_cpu(config) -> torch.nn.Module:
    """vLLM's model class with real parameters on the CPU, on whatever platform vLLM believes in, one stage."""
    import kv_specs
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with (
        set_current_vllm_config(config),
        kv_specs._as_stage(0, 1),
        set_default_torch_dtype(torch.bfloat16),
        torch.device("cpu"),
    ):
        return initialize_model(config)
