"""A CUDA platform of compute capability 8.6 with 24 GiB that is not there: vLLM decides as on an RTX 3090, on a CPU.

Put this folder on PYTHONPATH and vLLM's own plugin search finds `plugin()` (card86-1.0.dist-info), also in the
subprocess that inspects model classes; vllm-0.30.0.dist-info beside it keeps the code that asks for the version of
"vllm" from taking the CPU build for one (which switches Triton off). Decisions, configurations and modules on the
`meta` device are real; nothing can be computed. For tests that read what vLLM would do: block sizes, KV plans, argv.
"""

import sys
import types

CAPABILITY = (8, 6)
TOTAL_BYTES = 24 * 2**30


# What the CUDA kernels say of themselves when asked for capability 86: FP8 and grouped CUTLASS GEMMs start at 89 or 90.
_KERNEL_ANSWERS = {
    "cutlass_scaled_mm_supports_fp8": False,
    "cutlass_scaled_mm_supports_block_fp8": False,
    "cutlass_scaled_mm_supports_fp4": False,
    "cutlass_group_gemm_supported": False,
}
# CUDA extensions that the CPU wheel lacks; they are imported for what they register, or to see that they are there.
_EXTENSIONS = ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C")
_libraries = []  # torch drops a definition when its Library object goes


class _Inert:
    """Takes the place of a CUDA stream or event, which layers make when they are built and use when they run."""

    def __init__(self, *args, **kwargs) -> None:
        pass


def plugin() -> str:
    if not _libraries:
        import torch

        for name in _EXTENSIONS:
            sys.modules.setdefault(name, types.ModuleType(name))
        from vllm.platforms.cpu import CpuPlatform

        # The CPU build's own operators: some have names that layers look up when they are made.
        CpuPlatform.import_kernels()
        library = torch.library.Library("_C", "FRAGMENT")
        for name, answer in _KERNEL_ANSWERS.items():
            library.define(f"{name}(int capability) -> bool")
            library.impl(name, lambda capability, answer=answer: answer, "CompositeExplicitAutograd")
        _libraries.append(library)
        torch.cuda.Stream = torch.cuda.Event = _Inert
    return "card86.Card86"


def __getattr__(name: str):
    if name != "Card86":
        raise AttributeError(name)

    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Card86(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*CAPABILITY)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA GeForce RTX 3090"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return TOTAL_BYTES

        @classmethod
        def current_device(cls) -> str:
            return "meta"  # handed on as `device=` by layers that make a buffer of their own

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 82

        @classmethod
        def is_integrated_gpu(cls, device_id: int = 0) -> bool:
            return False

        @classmethod
        def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
            return False

        @classmethod
        def is_arch_support_pdl(cls) -> bool:
            return False

        @classmethod
        def log_warnings(cls) -> None:
            pass

    globals()["Card86"] = Card86
    return Card86
