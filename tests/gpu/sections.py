"""Measure section prefill on one card, kernel by kernel, against the stock kernel over K/V on the card and over UVA.

    python3 tests/gpu/sections.py --site SITE [--out FILE] [--budget SECONDS] [--quick]

`--quick` ran on an H200 (docs/gpu.md); the contexts above 32,768 and the sweeps have not. `--rehearse` is the same program on a CPU,
tiny, with the steps in plain PyTorch, without the stock kernel and without streams: it measures nothing.

SITE holds the patched vllm/ and flashnext/. One QSA layer of the model, 512 rows at the end of contexts of 4,000, 32,768,
131,072 and 248,000 tokens; random K/V. Selections: `spread`, each row chooses by itself, which is the most that the link can be
asked for; `shared`, rows mostly agree; `short`, 20 rows that choose by themselves. For each, in milliseconds, medians:

    card       stock kernel, K/V on the card: the bar
    uva        stock kernel, K/V in page-locked host memory, one row after another
    sections   section prefill, K/V in page-locked host memory
    on card    section prefill, K/V on the card: all of it but the link
    copy       the copies of all sections alone, and the bytes that the flags let through
    order      the sort alone
    expected   from the numbers above: max(copy, on card) + (copy + on card) / sections

The last tokens' K/V are written by a kernel over the link, right before. Checked: every output against dense float64
softmax on some rows, and against the stock kernel on all; and that a call raises the peak of allocated memory by no more
than torch.sort's 16 KiB. Then the link's rate by the copy engine, and sweeps at 131,072 tokens over the number of sections,
the copy's programs and the attention's cut. Exit status: 0 right, 1 wrong, 3 right but something was left out for lack of
time. --out gets everything as JSON, rewritten after each line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time

PLAIN_CHECK_ROWS = 24
SORT_BYTES = 64 << 10
"""torch.sort makes one row of positions for its own use: 2,051 of 8 bytes."""
TOLERANCE = 0.01
"""Of the largest output: bf16 rounds the probabilities, the output, and the gated output, by 2^-9 each at most."""


@dataclasses.dataclass(frozen=True)
class Shape:
    contexts: tuple[int, ...] = (4000, 32_768, 131_072, 248_000)
    sweep_context: int = 131_072
    block: int = 12_160
    arena_blocks: int = 4
    kv_heads: int = 2
    heads: int = 24
    dim: int = 256
    groups: int = 512
    rows: int = 512
    short_rows: int = 20

    @property
    def width(self) -> int:
        return self.groups * 4 + 3

    @property
    def token_bytes(self) -> int:
        return self.kv_heads * 2 * self.dim * 2


TINY = Shape((40, 130), 130, 16, 4, 2, 24, 16, 8, 9, 3)


class Bench:
    def __init__(self, shape: Shape, device: str, out: pathlib.Path | None, budget_s: float):
        import torch

        self.torch, self.shape, self.device, self.out = torch, shape, torch.device(device), out
        self.on_card = self.device.type == "cuda"
        self.until = time.monotonic() + budget_s
        self.results: dict = {"rows": [], "sweeps": {}, "left_out": [], "faults": []}
        self.noise = torch.Generator(self.device).manual_seed(0)
        blocks = -(-max(shape.contexts) // shape.block) + 1
        size = (blocks, shape.kv_heads, shape.block, 2 * shape.dim)  # the engine's own layout: head before token
        self.pool = torch.randn(size, generator=self.noise, device=self.device).bfloat16().transpose(1, 2)
        self.host = self.pool
        if self.on_card:
            import vllm._custom_ops  # noqa: F401  registers the view
            from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

            self._pinned = torch.empty(size, dtype=torch.bfloat16, pin_memory=True)
            self._pinned.copy_(self.pool.transpose(1, 2))
            self.host = get_accelerator_view_from_cpu_tensor(self._pinned).transpose(1, 2)
        self.table = torch.arange(blocks - 1, -1, -1, dtype=torch.int32, device=self.device)[None, :].contiguous()

    def prefill(self, **tuning):
        from flashnext.section_prefill import SectionPrefill

        shape, steps = self.shape, None
        if self.on_card:
            from flashnext.section_kernel import TritonSteps, Tuning

            steps = TritonSteps(Tuning(**tuning))
        return SectionPrefill(
            arena_bytes=shape.arena_blocks * shape.block * shape.token_bytes,
            block_size=shape.block,
            kv_heads=shape.kv_heads,
            head_dim=shape.dim,
            query_heads=shape.heads,
            max_rows=shape.rows,
            selection_width=shape.width,
            device=self.device,
            steps=steps,
        )

    def selection(self, context: int, rows: int, shared: bool):
        """int32 [rows, width + 1] in the indexer's form: groups of 4, best first, then the tokens of the open group."""
        torch, shape = self.torch, self.shape
        ends = torch.arange(context - rows + 1, context + 1, device=self.device)
        visible = ends // 4
        total = max(1, context // 4)
        score = torch.rand(rows, total, generator=self.noise, device=self.device)
        if shared:
            score = 0.2 * score + torch.rand(1, total, generator=self.noise, device=self.device)
        score.masked_fill_(torch.arange(total, device=self.device) >= visible[:, None], -1.0)
        group = score.topk(min(shape.groups, total), dim=1).indices
        taken = visible.clamp(max=shape.groups)[:, None] * 4
        column = torch.arange(shape.width, device=self.device)[None, :]
        chosen = group.gather(1, (column // 4).clamp(max=group.shape[1] - 1).expand(rows, -1)) * 4 + column % 4
        open_group = (visible * 4)[:, None] + column - taken
        token = torch.where(column < taken, chosen, torch.where(open_group < ends[:, None], open_group, -1))
        count = taken + (ends % 4)[:, None]
        return torch.cat([token, count], 1).to(torch.int32).contiguous()

    def median_ms(self, call, repeats: int) -> float:
        torch = self.torch
        call()
        times = []
        for _ in range(repeats):
            if self.on_card:
                begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
                torch.cuda.synchronize()
                begin.record()
                call()
                end.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end))
            else:
                begin = time.perf_counter()
                call()
                times.append((time.perf_counter() - begin) * 1e3)
        return round(statistics.median(times), 3)

    def stock(self, query, pool, selection, gate, out):
        from vllm.models.qwen4_exp.nvidia.ops.qsa import qsa_sparse_paged_attention

        owner = self.torch.zeros(len(query), dtype=self.torch.int32, device=self.device)
        keys, values = pool.split(self.shape.dim, -1)
        return lambda: qsa_sparse_paged_attention(
            query, keys, values, selection, self.table, owner, True, out, output_gate=gate
        )

    def dense(self, query, selection, gate, rows):
        torch, shape = self.torch, self.shape
        wanted = []
        for row in rows:
            token = selection[row, : int(selection[row, -1])].long()
            kv = self.pool[self.table[0].long()[token // shape.block], token % shape.block].double()
            keys, values = kv.repeat_interleave(shape.heads // shape.kv_heads, 1).split(shape.dim, -1)
            score = torch.einsum("hd,nhd->hn", query[row].double(), keys) * shape.dim**-0.5
            attended = torch.einsum("hn,nhd->hd", score.softmax(-1), values)
            wanted.append(attended * gate[row].double().sigmoid().view(attended.shape))
        return torch.stack(wanted)

    def fault(self, words: str) -> None:
        self.results["faults"].append(words)
        print("FAULT", words, flush=True)

    def save(self) -> None:
        if self.out:
            self.out.write_text(json.dumps(self.results, indent=1))

    def late(self, what: str) -> bool:
        if time.monotonic() < self.until:
            return False
        self.results["left_out"].append(what)
        return True

    def inputs(self, context: int, rows: int, shared: bool):
        torch, shape = self.torch, self.shape
        # Scores spread by 3, so that a row hangs on few of its tokens: one that is wrong or left out shows.
        query = 3 * torch.randn(rows, shape.heads, shape.dim, generator=self.noise, device=self.device)
        query = query.bfloat16()
        gate = torch.randn(rows, shape.heads * shape.dim, generator=self.noise, device=self.device).bfloat16()
        return query, gate, self.selection(context, rows, shared)

    def write_chunk(self, context: int, rows: int) -> None:
        """New K/V for the last `rows` tokens, by a kernel on the current stream and over the link, as the engine writes them."""
        token = self.torch.arange(context - rows, context, device=self.device)
        block, offset = self.table[0].long()[token // self.shape.block], token % self.shape.block
        size = (rows, self.shape.kv_heads, 2 * self.shape.dim)
        fresh = self.torch.randn(size, generator=self.noise, device=self.device).bfloat16()
        for pool in (self.pool, self.host):
            pool[block, offset] = fresh

    def one(self, context: int, kind: str, repeats: int) -> None:
        from flashnext.section_prefill import Span, plan_steps

        torch, shape = self.torch, self.shape
        rows = min(context, shape.short_rows if kind == "short" else shape.rows)
        query, gate, selection = self.inputs(context, rows, kind == "shared")
        prefill, spans = self.prefill(), [Span(0, 0, rows, context)]
        self.write_chunk(context, rows)
        mine, over_card, theirs = (torch.empty_like(query) for _ in range(3))

        def sections(pool, out):
            return lambda: prefill(query, pool, self.table, selection, spans, gate, out)

        row: dict = {"context": context, "selection": kind, "rows": rows}
        row["sections"] = self.median_ms(sections(self.host, mine), repeats)
        if self.on_card:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            sections(self.host, mine)()
            torch.cuda.synchronize()
            row["peak_rise_bytes"] = torch.cuda.max_memory_allocated() - before
            if row["peak_rise_bytes"] > SORT_BYTES:
                self.fault(f"{context} {kind}: a call raises the peak by {row['peak_rise_bytes']} bytes")
        row["on card"] = self.median_ms(sections(self.pool, over_card), repeats)
        steps, flags = prefill._steps, prefill._flags
        plan = plan_steps(spans, prefill.half_tokens, self.table.shape[1] * shape.block)
        common = {"request": 0, "granule": plan[0].granule}
        steps.mark(selection, self.table, self.host, flags, rows=range(rows), context=context, **common)
        marked = flags[: -(-context // common["granule"])]
        row["bytes"] = int(marked.sum()) * common["granule"] * shape.token_bytes

        def copies():
            for n, step in enumerate(plan):
                half = prefill._halves[n % 2]
                steps.copy(self.host, self.table, flags, half, start=step.start, stop=step.stop, **common)

        row["copy"] = self.median_ms(copies, repeats)
        row["order"] = self.median_ms(lambda: prefill._order(plan[0].span, self.host, self.table, selection), repeats)
        row["n"] = len(plan)
        row["expected"] = round(max(row["copy"], row["on card"]) + (row["copy"] + row["on card"]) / len(plan), 3)
        checked = list(range(0, rows, max(1, rows // PLAIN_CHECK_ROWS)))
        wanted = self.dense(query, selection, gate, checked)
        scale = float(wanted.abs().max())
        outputs = {"sections": mine, "on card": over_card}
        if self.on_card:
            row["card"] = self.median_ms(self.stock(query, self.pool, selection, gate, theirs), repeats)
            row["uva"] = self.median_ms(self.stock(query, self.host, selection, gate, theirs), 3)
            outputs["stock"] = theirs
            row["from_stock"] = float((mine.float() - theirs.float()).abs().max()) / scale
            if not row["from_stock"] < TOLERANCE:
                self.fault(f"{context} {kind}: {row['from_stock']} from the stock kernel")
        for name, got in outputs.items():
            worst = float((got[checked].double() - wanted).abs().max()) / scale
            row[f"error {name}"] = worst
            if not worst < TOLERANCE:
                self.fault(f"{context} {kind} {name}: {worst} from float64")
        self.results["rows"].append(row)
        print(json.dumps(row), flush=True)
        self.save()

    def link(self) -> None:
        """The copy engine's rate from page-locked memory, for comparison with `copy`."""
        if not self.on_card:
            return
        target = self.torch.empty_like(self._pinned, device=self.device)
        ms = self.median_ms(lambda: target.copy_(self._pinned, non_blocking=True), 5)
        self.results["link_gb_s"] = round(self._pinned.nbytes / ms / 1e6, 1)
        print("copy engine", self.results["link_gb_s"], "GB/s", flush=True)

    def sweep(self, name: str, values: list, prepare) -> None:
        """Median ms of section prefill from host memory and from the card for each value, at the sweep's context."""
        from flashnext.section_prefill import Span

        rows, context = self.shape.rows, self.shape.sweep_context
        query, gate, selection = self.inputs(context, rows, False)
        out = self.torch.empty_like(query)
        found = self.results["sweeps"].setdefault(name, [])
        spans = [Span(0, 0, rows, context)]
        for value in values:
            if self.late(f"{name} {value}"):
                continue
            prefill = prepare(value)
            host, card = (
                self.median_ms(
                    lambda pool=pool, prefill=prefill: prefill(query, pool, self.table, selection, spans, gate, out),
                    5,
                )
                for pool in (self.host, self.pool)
            )
            found.append({"value": value, "host": host, "card": card})
            print(name, json.dumps(found[-1]), flush=True)
            self.save()

    def sweeps(self) -> None:
        from flashnext import section_prefill

        kept = section_prefill.PARTS
        try:
            for_parts = self.prefill()

            def parts(value):
                section_prefill.PARTS = value
                return for_parts

            self.sweep("parts", [4, 8, 16, 32], parts)
        finally:
            section_prefill.PARTS = kept
        if not self.on_card:
            return  # what follows is the Triton kernels'
        self.sweep("copy_programs", [4, 8, 16, 32, 64], lambda n: self.prefill(copy_programs=n))
        cuts = [(32, 4, 2), (32, 8, 2), (16, 4, 2), (16, 8, 2), (32, 2, 2), (32, 4, 1), (64, 4, 2), (64, 8, 2)]
        names = ("block_n", "attend_warps", "attend_stages")
        self.sweep("attend", cuts, lambda cut: self.prefill(**dict(zip(names, cut, strict=True))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--budget", type=float, default=480)
    parser.add_argument("--quick", action="store_true", help="the two shorter contexts, no sweeps")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, tiny")
    opt = parser.parse_args()
    sys.path.insert(0, str(opt.site.resolve()))
    shape = TINY if opt.rehearse else Shape()
    if not opt.rehearse:
        import vllm.models.qwen4_exp.nvidia.model  # noqa: F401  before its ops: they import each other
    bench = Bench(shape, "cpu" if opt.rehearse else "cuda", opt.out, opt.budget)
    bench.link()
    for context in shape.contexts[:2] if opt.quick else shape.contexts:
        for kind in ("spread", "shared", "short"):
            if not bench.late(f"{context} {kind}"):
                bench.one(context, kind, 10)
    if not opt.quick:
        bench.sweeps()
    bench.save()
    print("faults:", bench.results["faults"], "left out:", bench.results["left_out"])
    return 1 if bench.results["faults"] else 3 if bench.results["left_out"] else 0


if __name__ == "__main__":
    sys.exit(main())
