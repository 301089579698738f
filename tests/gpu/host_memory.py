"""How fast the card reads host memory by the way it was page-locked: one QSA layer, 24 blocks of 12,160 tokens, one card.

    python3 tests/gpu/host_memory.py        with vllm and flashnext on PYTHONPATH

Milliseconds, medians, a line for each way: the stock attention kernel for 1 and 4 decoding rows at 262,144 tokens, launched from
Python (`launched`: never less than a launch takes, 0.2 ms where this ran) and replayed as a CUDA graph (`replayed`: the card's own
time); then section prefill's copy of all of 131,072 tokens and its rate.

    card            memory of the card, for comparison
    exact           what flashnext.host_pool does: anonymous memory in huge pages, registered
    cudaHostAlloc   the driver's own allocation, of exactly that size
    pinned          PyTorch's pinned allocator, rounded up to a power of two
    registered      ordinary pages, registered

What it gave: docs/gpu.md.
"""

from __future__ import annotations

import ctypes
import statistics

BLOCK, BLOCKS, HEADS, DIM, CONTEXT, COPIED = 12_160, 24, 2, 256, 262_144, 131_072
ELEMENTS = BLOCKS * HEADS * BLOCK * 2 * DIM


def allocate(way: str, kept: list):
    """bf16 [ELEMENTS], page-locked (or on the card); what must outlive it goes to `kept`."""
    import torch
    from flashnext import host_pool

    nbytes = 2 * ELEMENTS
    if way == "card":
        return torch.empty(ELEMENTS, dtype=torch.bfloat16, device="cuda")
    if way == "exact":
        kept.append(host_pool.ExactBuffer(nbytes, host_pool.Cuda()))
        return kept[-1].tensor().view(torch.bfloat16)
    if way == "cudaHostAlloc":
        from vllm.utils.system_utils import find_loaded_library

        address = ctypes.c_void_p()
        runtime = ctypes.CDLL(find_loaded_library("libcudart"))
        status = runtime.cudaHostAlloc(ctypes.byref(address), ctypes.c_size_t(nbytes), ctypes.c_uint(3))
        if status:
            raise RuntimeError(f"cudaHostAlloc: {status}")
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address.value), dtype=torch.bfloat16)
    if way == "pinned":
        return torch.empty(ELEMENTS, dtype=torch.bfloat16, pin_memory=True)
    memory = torch.empty(ELEMENTS, dtype=torch.bfloat16)
    kept.append(memory)  # unmapped while registered it would fail the next allocation at its address
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, 3)
    if int(status):
        raise RuntimeError(f"cudaHostRegister: {status}")
    return memory


def median_ms(call, repeats: int = 40) -> float:
    import torch

    times = []
    for n in range(repeats + 4):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if n >= 4:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def replayed(call):
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def main() -> None:
    import torch
    import vllm._custom_ops
    import vllm.models.qwen4_exp.nvidia.model  # noqa: F401  first: its modules import one another
    from flashnext.section_kernel import TritonSteps, Tuning
    from flashnext.section_prefill import FLAGS
    from vllm.models.qwen4_exp.nvidia.ops.qsa import qsa_sparse_paged_attention
    from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor as view

    cuda, kept = {"device": "cuda"}, []
    table = torch.arange(BLOCKS - 1, -1, -1, dtype=torch.int32, **cuda)[None, :].contiguous()
    flags = torch.ones(FLAGS, dtype=torch.int8, **cuda)
    half = torch.empty(8192, HEADS, 2 * DIM, dtype=torch.bfloat16, **cuda)
    steps = TritonSteps(Tuning())
    for way in ("card", "exact", "cudaHostAlloc", "pinned", "registered"):
        memory = allocate(way, kept)
        memory.zero_()
        cache = (memory if way == "card" else view(memory)).view(BLOCKS, HEADS, BLOCK, 2 * DIM).transpose(1, 2)
        keys, values = cache.split(DIM, -1)
        line = f"{way:14}"
        for rows in (1, 4):
            query = torch.randn(rows, 24, DIM, dtype=torch.bfloat16, **cuda)
            selection = torch.full((rows, 2052), 2051, dtype=torch.int32, **cuda)
            for row in range(rows):
                group = torch.randperm(CONTEXT // 4, **cuda)[:512, None] * 4
                selection[row, :2048] = (group + torch.arange(4, **cuda)).flatten()
                selection[row, 2048:2051] = torch.arange(CONTEXT - 3, CONTEXT, **cuda)
            owner = torch.zeros(rows, dtype=torch.int32, **cuda)
            gate, out = torch.randn(rows, 24 * DIM, dtype=torch.bfloat16, **cuda), torch.empty_like(query)

            def attend(query=query, selection=selection, owner=owner, gate=gate, out=out, keys=keys, values=values):
                qsa_sparse_paged_attention(query, keys, values, selection, table, owner, False, out, output_gate=gate)

            launched_ms, replayed_ms = median_ms(attend), median_ms(replayed(attend))
            line += f"  {rows} rows: launched {launched_ms:.3f} ms, replayed {replayed_ms:.3f} ms"

        def copies(cache=cache):
            for start in range(0, COPIED, len(half)):
                more = {"request": 0, "start": start, "stop": start + len(half), "granule": 4}
                steps.copy(cache, table, flags, half, **more)

        ms = median_ms(copies, 8)
        print(f"{line}  copy {ms:.2f} ms, {COPIED * 4 * HEADS * DIM / ms / 1e6:.1f} GB/s", flush=True)


if __name__ == "__main__":
    main()
