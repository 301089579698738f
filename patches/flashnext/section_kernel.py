# SPDX-License-Identifier: Apache-2.0
"""The four steps of section prefill as Triton kernels, and how each is cut into programs.

`flashnext.section_prefill` decides which sections there are and in which order the steps run. Here:

mark    a flag for each granule of the context that any row selected.
copy    the flagged granules of one section, from the pool (host memory, read through the link) to half an arena. The link
        is the bound, so: whole K|V rows of one head (1 KiB) as 16-byte loads, `copy_tokens` tokens in flight in each of
        `copy_programs` programs. 16 programs x 16 tokens x 2 KiB = 512 KiB in flight; a link of 25 GB/s that answers in 2 us
        needs 50 KB. A fixed small grid, so that the copy takes few places from the attention that runs beside it. Not
        the copy engine: it takes addresses from the CPU, which knows neither the block table nor what was selected. Not
        index_select: it moves whole blocks. The same kind of load by single rows already reached the link's rate
        (2.15 GB in 42.1 ms, stock kernel over pinned memory, on the measuring machine of this project).
order   each row's valid tokens in ascending order, invalid ones behind them as LAST.
attend  one program for each (row, K/V head) walks the row's own columns of this section.

Where a row's columns of a section begin and end is counted in two dependent reads, not in eleven of a binary search: how
many of every 64th column lie below the border, then how many of the 64 columns behind the last of those.

Attention state. A row has no state before its first selected token and needs none after its last, so `begin == 0` starts
it, `end == total` finishes it, and only rows with columns in two or more sections ever write it to memory.

Arithmetic of one attend program: BLOCK_M = 16 query heads (a group of 12, padded to what the tensor cores take), BLOCK_N
tokens at a time, their K and V rows gathered. Softmax in powers of two, fp32; probabilities are rounded to the K/V type
before the second product, as the stock kernel does. The tuning's reasons are in `Tuning`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LAST = tl.constexpr(2**31 - 1)
"""Sorts behind every token index; marks a column that holds none."""
_STEP = tl.constexpr(64)


@triton.jit
def _valid_tokens(
    selection_ptr, table_ptr, row, columns, stride_selection, context, blocks, COLUMNS: tl.constexpr, PAGE: tl.constexpr
):
    """(token indices, which of them are there): within the row's count, the context, and a block of the pool."""
    start = row.to(tl.int64) * stride_selection
    count = tl.minimum(tl.load(selection_ptr + start + COLUMNS), COLUMNS)
    token = tl.load(selection_ptr + start + columns, mask=columns < count, other=-1)
    valid = (token >= 0) & (token < context)
    block = tl.load(table_ptr + token // PAGE, mask=valid, other=-1)
    return token, valid & (block >= 0) & (block < blocks)


@triton.jit(do_not_specialize=["request", "first_row", "context", "granule"])
def mark_kernel(
    selection_ptr,
    table_ptr,
    flags_ptr,
    stride_selection,
    stride_table,
    request,
    first_row,
    context,
    blocks,
    granule,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    table_ptr += request.to(tl.int64) * stride_table
    row = first_row + tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token, valid = _valid_tokens(
        selection_ptr, table_ptr, row, columns, stride_selection, context, blocks, COLUMNS, PAGE
    )
    tl.store(flags_ptr + token // granule, tl.full((BLOCK,), 1, tl.int8), mask=valid)


@triton.jit(do_not_specialize=["request", "first_row", "context"])
def keys_kernel(
    selection_ptr,
    table_ptr,
    keys_ptr,
    stride_selection,
    stride_table,
    request,
    first_row,
    context,
    blocks,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    table_ptr += request.to(tl.int64) * stride_table
    place = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token, valid = _valid_tokens(
        selection_ptr, table_ptr, first_row + place, columns, stride_selection, context, blocks, COLUMNS, PAGE
    )
    tl.store(keys_ptr + place.to(tl.int64) * COLUMNS + columns, tl.where(valid, token, LAST), mask=columns < COLUMNS)


@triton.jit
def pool_rows(
    pool_ptr,
    table_ptr,
    token,
    head,
    lanes,
    wanted,
    stride_block,
    stride_token,
    stride_head,
    blocks,
    PAGE: tl.constexpr,
):
    """(K|V rows of the tokens and heads that are wanted, which of them are in a block of the pool)."""
    block = tl.load(table_ptr + token // PAGE, mask=wanted, other=-1)
    wanted = wanted & (block >= 0) & (block < blocks)
    source = block.to(tl.int64) * stride_block + (token % PAGE).to(tl.int64) * stride_token + head * stride_head
    return tl.load(pool_ptr + source[:, None] + lanes[None, :], mask=wanted[:, None], other=0.0), wanted


@triton.jit(do_not_specialize=["request", "start", "stop", "granule"])
def copy_kernel(
    pool_ptr,
    table_ptr,
    flags_ptr,
    half_ptr,
    stride_block,
    stride_token,
    stride_head,
    stride_table,
    request,
    start,
    stop,
    blocks,
    granule,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    table_ptr += request.to(tl.int64) * stride_table
    pieces = tl.arange(0, TOKENS * HEADS_PADDED)
    head = pieces % HEADS_PADDED
    lanes = tl.arange(0, WIDTH)
    for tile in range(tl.program_id(0), tl.cdiv(stop - start, TOKENS), PROGRAMS):
        local = tile * TOKENS + pieces // HEADS_PADDED
        token = start + local
        there = (token < stop) & (head < HEADS)
        wanted = tl.load(flags_ptr + token // granule, mask=there, other=0) != 0
        if tl.max(wanted.to(tl.int32), axis=0) > 0:
            # A granule across the end of a block may reach into one that is not there.
            rows, wanted = pool_rows(
                pool_ptr, table_ptr, token, head, lanes, wanted, stride_block, stride_token, stride_head, blocks, PAGE
            )
            target = (local.to(tl.int64) * HEADS + head) * WIDTH
            tl.store(half_ptr + target[:, None] + lanes[None, :], rows, mask=wanted[:, None])


@triton.jit
def _columns_below(row_ptr, pivots, border, COLUMNS: tl.constexpr):
    """How many of the sorted row's columns are below `border`; `pivots` are its columns 0, 64, 128, ..."""
    base = tl.maximum(tl.sum((pivots < border).to(tl.int32), axis=0) - 1, 0) * _STEP
    near = base + tl.arange(0, _STEP)
    values = tl.load(row_ptr + near, mask=near < COLUMNS, other=LAST)
    return base + tl.sum((values < border).to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["first_row", "start", "stop"])
def attend_kernel(
    query_ptr,
    half_ptr,
    tokens_ptr,
    accumulator_ptr,
    maximum_ptr,
    normalizer_ptr,
    gate_ptr,
    out_ptr,
    stride_query_row,
    stride_query_head,
    stride_gate_row,
    stride_out_row,
    stride_out_head,
    first_row,
    start,
    stop,
    COLUMNS: tl.constexpr,
    PIVOTS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = (first_row + tl.program_id(0)).to(tl.int64)
    kv_head = tl.program_id(1)
    row_ptr = tokens_ptr + row * COLUMNS
    pivot_columns = tl.arange(0, PIVOTS) * _STEP
    pivots = tl.load(row_ptr + pivot_columns, mask=pivot_columns < COLUMNS, other=LAST)
    begin = _columns_below(row_ptr, pivots, start, COLUMNS)
    end = _columns_below(row_ptr, pivots, stop, COLUMNS)
    total = _columns_below(row_ptr, pivots, LAST, COLUMNS)
    # A row that selected nothing at all is written, as 0, in the first section.
    if (begin == end) & ((total > 0) | (start > 0)):
        return

    heads = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM)
    in_group = heads < GROUP
    group_heads = kv_head * GROUP + heads
    query = tl.load(
        query_ptr + row * stride_query_row + group_heads[:, None] * stride_query_head + dims[None, :],
        mask=in_group[:, None],
        other=0.0,
    )
    state = row * (HEADS * GROUP) + group_heads
    resumed = in_group & (begin > 0)
    maximum = tl.load(maximum_ptr + state, mask=resumed, other=-1.0e20)
    normalizer = tl.load(normalizer_ptr + state, mask=resumed, other=0.0)
    accumulator = tl.load(accumulator_ptr + state[:, None] * DIM + dims[None, :], mask=resumed[:, None], other=0.0)
    scale: tl.constexpr = DIM**-0.5 * 1.4426950408889634

    for column in range(begin, end, BLOCK_N):
        columns = column + tl.arange(0, BLOCK_N)
        live = columns < end
        token = tl.load(row_ptr + columns, mask=live, other=0)
        place = ((token - start).to(tl.int64) * HEADS + kv_head) * (2 * DIM)
        keys = tl.load(half_ptr + place[None, :] + dims[:, None], mask=live[None, :], other=0.0)
        values = tl.load(half_ptr + place[:, None] + DIM + dims[None, :], mask=live[:, None], other=0.0)
        scores = tl.where(live[None, :], tl.dot(query, keys) * scale, -1.0e20)
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        shrink = tl.math.exp2(maximum - higher)
        weights = tl.where(live[None, :], tl.math.exp2(scores - higher[:, None]), 0.0)
        accumulator = tl.dot(weights.to(values.dtype), values, acc=accumulator * shrink[:, None])
        normalizer = normalizer * shrink + tl.sum(weights, axis=1)
        maximum = higher

    if end < total:
        tl.store(maximum_ptr + state, maximum, mask=in_group)
        tl.store(normalizer_ptr + state, normalizer, mask=in_group)
        tl.store(accumulator_ptr + state[:, None] * DIM + dims[None, :], accumulator, mask=in_group[:, None])
    else:
        result = tl.where(normalizer[:, None] > 0, accumulator / tl.maximum(normalizer[:, None], 1.0e-20), 0.0)
        # Rounded before the gate: the output of attention is a tensor of this type wherever the gate is not fused.
        result = result.to(out_ptr.dtype.element_ty).to(tl.float32)
        gate = tl.load(
            gate_ptr + row * stride_gate_row + group_heads[:, None] * DIM + dims[None, :],
            mask=in_group[:, None],
            other=0.0,
        )
        tl.store(
            out_ptr + row * stride_out_row + group_heads[:, None] * stride_out_head + dims[None, :],
            result * tl.sigmoid(gate.to(tl.float32)),
            mask=in_group[:, None],
        )


@dataclass(frozen=True)
class Tuning:
    """How the kernels are cut up, for sm_86: 100 KiB of shared memory, 65,536 registers, 48 warps and 16 blocks an SM.

    block_n, attend_warps, attend_stages: compiled for sm_86 (tests/engine/test_kernels_sm86.py prints the table) 32 x 4 x 2
    takes 94 registers without a spill and 41,984 B, so two blocks an SM with 64 KiB of gathers in flight, ten times what
    936 GB/s at 600 ns need of each of 82 SMs. With four warps each has one 8-column slice of the scores; at 16 tokens
    half of them would repeat the other half's. One warp spills at every width, and 64 tokens leave room for one block.
    copy_*: see the top of this file. sort_rows: rows sorted at a time; torch.sort also writes int64 positions that nobody
    wants, and this bounds them (2.1 MB at 2,051 columns). 128 rows are 128 thread blocks, enough for a card of 82 SMs.
    """

    block_n: int = 32
    attend_warps: int = 4
    attend_stages: int = 2
    copy_tokens: int = 16
    copy_programs: int = 16
    copy_warps: int = 8
    list_columns: int = 1024
    list_warps: int = 4
    sort_rows: int = 128


class TritonSteps:
    """The steps on the device of their tensors, on its current stream. No call waits for the device."""

    def __init__(self, tuning: Tuning):
        self.tuning = tuning
        self.sort_rows = tuning.sort_rows

    def mark(self, selection, table, pool, flags, *, request: int, rows: range, context: int, granule: int) -> None:
        width, tuning = selection.shape[1] - 1, self.tuning
        flags[: triton.cdiv(context, granule)].zero_()
        mark_kernel[(len(rows), triton.cdiv(width, tuning.list_columns))](
            selection,
            table,
            flags,
            selection.stride(0),
            table.stride(0),
            request,
            rows.start,
            context,
            pool.shape[0],
            granule,
            COLUMNS=width,
            PAGE=pool.shape[1],
            BLOCK=tuning.list_columns,
            num_warps=tuning.list_warps,
        )

    def mark_all(self, flags, *, context: int, granule: int) -> None:
        flags[: triton.cdiv(context, granule)].fill_(1)

    def order(
        self, selection, table, pool, keys, positions, tokens, *, request: int, rows: range, context: int
    ) -> None:
        width, tuning = selection.shape[1] - 1, self.tuning
        keys_kernel[(len(rows), triton.cdiv(width, tuning.list_columns))](
            selection,
            table,
            keys,
            selection.stride(0),
            table.stride(0),
            request,
            rows.start,
            context,
            pool.shape[0],
            COLUMNS=width,
            PAGE=pool.shape[1],
            BLOCK=tuning.list_columns,
            num_warps=tuning.list_warps,
        )
        torch.sort(keys, dim=1, out=(tokens, positions))

    def copy(self, pool, table, flags, half, *, request: int, start: int, stop: int, granule: int) -> None:
        tuning = self.tuning
        blocks, page, heads, width = pool.shape
        copy_kernel[(tuning.copy_programs,)](
            pool,
            table,
            flags,
            half,
            pool.stride(0),
            pool.stride(1),
            pool.stride(2),
            table.stride(0),
            request,
            start,
            stop,
            blocks,
            granule,
            PAGE=page,
            HEADS=heads,
            HEADS_PADDED=triton.next_power_of_2(heads),
            WIDTH=width,
            TOKENS=tuning.copy_tokens,
            PROGRAMS=tuning.copy_programs,
            num_warps=tuning.copy_warps,
            num_stages=1,
        )

    def attend(self, query, half, tokens, state, gate, out, *, rows: range, start: int, stop: int) -> None:
        tuning = self.tuning
        heads, dim = half.shape[1], query.shape[2]
        group, width = query.shape[1] // heads, tokens.shape[1]
        attend_kernel[(len(rows), heads)](
            query,
            half,
            tokens,
            state.accumulator,
            state.maximum,
            state.normalizer,
            gate,
            out,
            query.stride(0),
            query.stride(1),
            gate.stride(0),
            out.stride(0),
            out.stride(1),
            rows.start,
            start,
            stop,
            COLUMNS=width,
            PIVOTS=triton.next_power_of_2(triton.cdiv(width, _STEP.value)),
            HEADS=heads,
            GROUP=group,
            DIM=dim,
            BLOCK_M=max(16, triton.next_power_of_2(group)),
            BLOCK_N=tuning.block_n,
            num_warps=tuning.attend_warps,
            num_stages=tuning.attend_stages,
        )
