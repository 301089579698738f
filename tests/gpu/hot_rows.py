"""What a decoding row's attention costs by the share of its groups that the step before selected too: one QSA layer, one card.

    python3 tests/gpu/hot_rows.py [--out FILE]        with vllm and flashnext on PYTHONPATH

Microseconds a layer and step: STEPS steps with selections of their own, captured as one CUDA graph and replayed, so that neither
launches nor a repeated selection count. Context of 131,072 tokens, blocks of 12,160, 1 and 4 requests of one row each.

    card      the stock kernel, K/V on the card
    uva       the stock kernel, K/V in page-locked host memory: decoding without hot rows
    hot       hot rows (flashnext/hot_rows.py) where a share of the 512 groups stays from step to step; and the rate at which what is
              missing came, over what the same takes with nothing missing

Then the same with nothing kept for other numbers of programs that fetch. Outputs are held to the stock kernel's on the card, and the
number of groups fetched to the one that the selections ask for. Exit status: 0 right, 1 wrong.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

from host_memory import BLOCK, BLOCKS, DIM, HEADS, allocate, median_ms, replayed
from sections import TOLERANCE

CONTEXT, QUERY_HEADS, GROUPS, RATIO, STEPS = 131_072, 24, 512, 4, 8
SHARES = (0.0, 0.5, 0.75, 0.9, 1.0)
PROGRAMS = (8, 16, 64, 128)
GROUP_BYTES = RATIO * HEADS * 2 * DIM * 2


def selections(share: float, rows: int):
    """int32 [STEPS, rows, 2052]: each step keeps that share of the step before's groups, the first of the last's."""
    import torch

    kept = round(share * GROUPS)
    out = torch.full((STEPS, rows, GROUPS * RATIO + RATIO), GROUPS * RATIO + RATIO - 1, dtype=torch.int32)
    for row in range(rows):
        fresh = torch.randperm(CONTEXT // RATIO)
        always, rest = fresh[:kept], fresh[kept:]
        for n in range(STEPS):
            mine = rest[n * (GROUPS - kept) : (n + 1) * (GROUPS - kept)]
            groups = torch.cat([always, mine])[torch.randperm(GROUPS), None] * RATIO
            out[n, row, : GROUPS * RATIO] = (groups + torch.arange(RATIO)).flatten()
            out[n, row, GROUPS * RATIO : -1] = torch.arange(CONTEXT - RATIO + 1, CONTEXT)
    return out.cuda()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path)
    opt = parser.parse_args()

    import torch
    import vllm._custom_ops
    import vllm.models.qwen4_exp.nvidia.model  # noqa: F401  first: its modules import one another
    from flashnext import hot_rows
    from vllm.models.qwen4_exp.nvidia.ops.qsa import qsa_sparse_paged_attention
    from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor as view

    torch.manual_seed(0)
    cuda = {"device": "cuda"}
    kept: list = []
    on_card, memory = (allocate(way, kept) for way in ("card", "exact"))
    memory.copy_(on_card.normal_())
    shape = BLOCKS, HEADS, BLOCK, 2 * DIM
    pools = {"card": on_card.view(shape).transpose(1, 2), "uva": view(memory).view(shape).transpose(1, 2)}
    found, wrong = [], 0

    def measure(rows: int, share: float, programs: int) -> dict:
        nonlocal wrong
        picks = selections(share, rows)
        table = torch.stack([torch.randperm(BLOCKS, **cuda) for _ in range(rows)]).int()
        query = torch.randn(rows, QUERY_HEADS, DIM, dtype=torch.bfloat16, **cuda)
        gate = torch.randn(rows, QUERY_HEADS * DIM, dtype=torch.bfloat16, **cuda)
        owner = torch.arange(rows, dtype=torch.int32, **cuda)
        outs = {name: query.new_zeros(STEPS, *query.shape) for name in ("card", "uva", "hot")}

        def stock(name: str) -> None:
            keys, values = pools[name].split(DIM, -1)
            for pick, out in zip(picks, outs[name], strict=True):
                qsa_sparse_paged_attention(query, keys, values, pick, table, owner, False, out, output_gate=gate)

        hot_rows.PROGRAMS = programs
        hot = hot_rows.HotRows(
            layers=1, requests=rows, context=CONTEXT, kv_heads=HEADS, head_dim=DIM, groups=GROUPS, ratio=RATIO, **cuda
        )
        hot.begin_step(list(range(rows)), list(range(rows + 1)), [CONTEXT] * rows)

        def with_hot_rows() -> None:
            for pick, out in zip(picks, outs["hot"], strict=True):
                hot.attend(0, query, pools["uva"], table, pick, owner, gate, out)

        row = {"rows": rows, "share": share, "programs": programs}
        calls = {"card": lambda: stock("card"), "uva": lambda: stock("uva"), "hot": with_hot_rows}
        for name, call in calls.items():
            row[name] = round(median_ms(replayed(call)) * 1e3 / STEPS, 1)
        for name in ("uva", "hot"):
            far = float((outs[name] - outs["card"]).abs().max() / outs["card"].abs().max())
            wrong += not far <= TOLERANCE
            row[f"{name}_off"] = round(far, 5)
        row["fetched"] = hot._count.tolist()
        # A share of one keeps all but the first time; the tokens behind the last whole group are not counted.
        wrong += any(count != GROUPS - round(share * GROUPS) for count in row["fetched"])
        found.append(row)
        print(json.dumps(row), flush=True)
        return row

    default = hot_rows.PROGRAMS
    for rows in (1, 4):
        at = {share: measure(rows, share, default)["hot"] for share in SHARES}
        for share in SHARES[:-1]:
            nbytes = rows * round((1 - share) * GROUPS) * GROUP_BYTES
            rate = nbytes / max(0.1, at[share] - at[1.0]) / 1e3
            print(f"{rows} rows, {share} kept: {nbytes / 1e6:.2f} MB at {rate:.1f} GB/s", flush=True)
    for rows in (1, 4):
        for programs in PROGRAMS:
            measure(rows, 0.0, programs)
    if opt.out:
        opt.out.write_text(json.dumps(found, indent=1))
    print(f"{wrong} wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
