# SPDX-License-Identifier: Apache-2.0
"""Decide which K/V rows of a decoding request stay on the card from one step to the next, and attend over those.

With K/V in host memory each decoding token reads 2,051 rows of 2,048 B a layer over the link, whatever the context: 50.4 MB
a step of the published model. What a token selects, the one before it has mostly selected as well. So each layer keeps, for each
request, the groups of 4 tokens that the last step selected (512 groups of 8,192 B), and only the others are fetched. Rows of a whole
group never change once written, so what is kept is never stale while the request lives. Rule order, in each step and layer:

1. A request whose first tokens are in this step owns nothing yet (`begin_step`; the host knows it without asking the card).
2. A selected group that is kept stays where it is.
3. Every other selected group takes the place of one that this step did not select, and is fetched.
4. The tokens behind the last whole group are fetched again; they have a place of their own.
5. Upstream's attention kernel runs over the kept rows, with the selection translated to their places.

All of it is three launches of fixed shape with addresses that do not change, so it is captured in decode graphs. Places are found
with one map a layer and request (group -> place, 4 B each) and one list (place -> group): a kept group is one whose place says so.

Card memory (`buffer_bytes`): 4.2 MB of rows for each layer and request, 16 times that on a stage of 4 such layers for 4 requests, and
4 B for every group of the longest context.

Off unless additional_config.flashnext.host_kv.hot_rows is true. What it gains by the share of groups that two steps in a row select is
measured (docs/gpu.md, tests/gpu/hot_rows.py); the share of the published weights is not known. A whole engine with it was not held to
transformers on a card yet: python3 -m tests.gpu.run --site SITE --out OUT --only bf16-1-hot,mixed-2-hot
"""

import torch
import triton
import triton.language as tl

from flashnext.section_kernel import pool_rows

PROGRAMS = 32
"""Programs that fetch for one row; each moves 8 KiB at a time, so 256 KiB are in flight, five times what PCIe 4.0 x16 needs."""


@triton.jit
def place_kernel(
    selection_ptr,
    slots_ptr,
    owner_ptr,
    place_ptr,
    used_ptr,
    free_ptr,
    missing_ptr,
    count_ptr,
    translated_ptr,
    stride_selection,
    stride_translated,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    RATIO: tl.constexpr,
    MOST_GROUPS: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    total = tl.load(selection_ptr + row * stride_selection + COLUMNS)
    if (slot < 0) | (total <= 0):
        tl.store(count_ptr + row, -1)
        tl.store(translated_ptr + row * stride_translated + COLUMNS, 0)
        return
    lanes = tl.arange(0, GROUPS)
    chosen = tl.minimum(total // RATIO, GROUPS)
    there = lanes < chosen
    group = tl.load(selection_ptr + row * stride_selection + lanes * RATIO, mask=there, other=0) // RATIO
    place = tl.load(place_ptr + slot * MOST_GROUPS + group, mask=there, other=-1)
    owner = tl.load(owner_ptr + slot * GROUPS + place, mask=there & (place >= 0), other=-1)
    kept = there & (owner == group)
    missing = there & (owner != group)

    # Places that this step does not use, in order; there are at least as many as groups that miss one.
    own = row * GROUPS
    tl.store(used_ptr + own + lanes, tl.zeros((GROUPS,), tl.int32))
    tl.debug_barrier()
    tl.store(used_ptr + own + place, tl.full((GROUPS,), 1, tl.int32), mask=kept)
    tl.debug_barrier()
    is_free = tl.load(used_ptr + own + lanes) == 0
    tl.store(free_ptr + own + tl.cumsum(is_free.to(tl.int32), 0) - 1, lanes, mask=is_free)
    tl.debug_barrier()
    rank = tl.cumsum(missing.to(tl.int32), 0) - 1
    place = tl.where(kept, place, tl.load(free_ptr + own + rank, mask=missing, other=0))
    tl.store(owner_ptr + slot * GROUPS + place, group, mask=missing)
    tl.store(place_ptr + slot * MOST_GROUPS + group, place, mask=missing)
    tl.store(missing_ptr + 2 * (own + rank), group, mask=missing)
    tl.store(missing_ptr + 2 * (own + rank) + 1, place, mask=missing)
    tl.store(count_ptr + row, tl.sum(missing.to(tl.int32), 0))

    translated = translated_ptr + row * stride_translated
    for offset in tl.static_range(RATIO):
        tl.store(translated + lanes * RATIO + offset, place * RATIO + offset, mask=there)
    tail = tl.arange(0, RATIO)
    tl.store(translated + chosen * RATIO + tail, GROUPS * RATIO + tail, mask=tail < total - chosen * RATIO)
    tl.store(translated + COLUMNS, total)


@triton.jit
def fetch_kernel(
    pool_ptr,
    table_ptr,
    selection_ptr,
    slots_ptr,
    missing_ptr,
    count_ptr,
    rows_ptr,
    stride_block,
    stride_token,
    stride_head,
    stride_table,
    stride_selection,
    blocks,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    RATIO: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    row = tl.program_id(0)
    count = tl.load(count_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    total = tl.load(selection_ptr + row * stride_selection + COLUMNS)
    chosen = tl.minimum(total // RATIO, GROUPS)
    pieces = tl.arange(0, RATIO * HEADS_PADDED)
    offset, head = pieces // HEADS_PADDED, pieces % HEADS_PADDED
    lanes = tl.arange(0, WIDTH)
    row_table_ptr = table_ptr + row * stride_table
    # The last item is the tokens behind the last whole group. A row without a request has a count of -1: no item.
    for item in range(tl.program_id(1), count + 1, PROGRAMS):
        is_tail = item == count
        entry = missing_ptr + 2 * (row * GROUPS + item)
        group = tl.load(entry, mask=item < count, other=0)
        place = tl.load(entry + 1, mask=item < count, other=GROUPS)
        tail_start = tl.load(
            selection_ptr + row * stride_selection + chosen * RATIO, mask=is_tail & (total > chosen * RATIO), other=0
        )
        first = tl.where(is_tail, tail_start, group * RATIO)
        tokens = tl.where(is_tail, total - chosen * RATIO, RATIO)
        token = first + offset
        wanted = (offset < tokens) & (head < HEADS)
        values, wanted = pool_rows(
            pool_ptr, row_table_ptr, token, head, lanes, wanted, stride_block, stride_token, stride_head, blocks, PAGE
        )
        target = ((slot * HEADS + head) * ((GROUPS + 1) * RATIO) + place * RATIO + offset) * WIDTH
        tl.store(rows_ptr + target[:, None] + lanes[None, :], values, mask=wanted[:, None])


def buffer_bytes(
    *,
    layers: int,
    requests: int,
    context: int,
    kv_heads: int,
    head_dim: int,
    groups: int = 512,
    ratio: int = 4,
    element_bytes: int = 2,
) -> dict[str, int]:
    """Bytes of each buffer that a HotRows of these arguments holds; `context`: the longest, in tokens."""
    return {
        "rows": layers * requests * (groups + 1) * ratio * kv_heads * 2 * head_dim * element_bytes,
        "owner": layers * requests * groups * 4,
        "place": layers * requests * -(-context // ratio) * 4,
        "slots": requests * 4,
        "used": requests * groups * 4,
        "free": requests * groups * 4,
        "missing": requests * groups * 8,
        "count": requests * 4,
        "translated": requests * (groups * ratio + ratio) * 4,
    }


class HotRows:
    """Kept rows of all QSA layers of a device; layers are told by their number, from 0."""

    def __init__(
        self,
        *,
        layers: int,
        requests: int,
        context: int,
        kv_heads: int,
        head_dim: int,
        groups: int,
        ratio: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """groups: whole groups that a row selects at most, a power of two. ratio: tokens of a group. requests: most at once."""
        if groups & (groups - 1):
            raise ValueError(f"a selection of {groups} groups is no power of two")
        self.requests, self.groups, self.ratio, self.kv_heads = requests, groups, ratio, kv_heads
        self.head_dim, self.most_groups = head_dim, -(-context // ratio)

        def full(value: int, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        # Head before token, as upstream's caches are.
        shape = (layers, requests, kv_heads, (groups + 1) * ratio, 2 * head_dim)
        self._rows = torch.zeros(shape, dtype=dtype, device=device)
        self._owner = full(-1, layers, requests, groups)
        self._place = full(-1, layers, requests, self.most_groups)
        self._slots, self._slots_now = full(-1, requests, 1), [-1] * requests
        self._used, self._free = full(0, requests, groups), full(0, requests, groups)
        self._missing, self._count = full(0, requests, groups, 2), full(0, requests)
        self._translated = full(0, requests, groups * ratio + ratio)

    def begin_step(self, slots: list[int], starts: list[int], lengths: list[int] | None) -> None:
        """Tell which request each row of the batch belongs to, before the step's first attention.

        slots: for each row of the block table the request's own number, below `requests`, -1 for none. starts: first row of each
        request, and the end. lengths: tokens of each, this step's included; None: not known, so nothing is taken for kept.
        """
        new = [
            slot
            for n, slot in enumerate(slots)
            if slot >= 0 and (lengths is None or lengths[n] <= starts[n + 1] - starts[n])
        ]
        for slot in new:
            self._owner[:, slot].fill_(-1)
        padded = (slots + [-1] * self.requests)[: self.requests]
        if padded != self._slots_now:  # else the last step's, or this step's as another group of layers told it
            from vllm.utils.torch_utils import async_tensor_h2d

            async_tensor_h2d(padded, out=self._slots.view(-1))
            self._slots_now = padded

    def bring(self, layer: int, pool: torch.Tensor, table: torch.Tensor, selection: torch.Tensor) -> None:
        """Fetch what the rows select and is not there, and translate their selection.

        pool [blocks, page, kv_heads, 2 * head_dim], selection int32 [rows, groups * ratio + ratio]: groups first, then the tokens
        behind the last whole one, the count of columns at the end; table int32 [>= rows, W], row r is row r of the batch.
        """
        rows, width = selection.shape[0], self.groups * self.ratio + self.ratio
        if rows > self.requests or selection.shape[1] != width or pool.shape[1] % self.ratio:
            raise ValueError(
                f"{list(selection.shape)} selected of pages of {pool.shape[1]}, by {self.requests} requests"
            )
        place_kernel[(rows,)](
            selection,
            self._slots,
            self._owner[layer],
            self._place[layer],
            self._used,
            self._free,
            self._missing,
            self._count,
            self._translated,
            selection.stride(0),
            self._translated.stride(0),
            COLUMNS=width - 1,
            GROUPS=self.groups,
            RATIO=self.ratio,
            MOST_GROUPS=self.most_groups,
            num_warps=4,
        )
        fetch_kernel[(rows, PROGRAMS)](
            pool,
            table,
            selection,
            self._slots,
            self._missing,
            self._count,
            self._rows[layer],
            pool.stride(0),
            pool.stride(1),
            pool.stride(2),
            table.stride(0),
            selection.stride(0),
            pool.shape[0],
            COLUMNS=width - 1,
            GROUPS=self.groups,
            RATIO=self.ratio,
            PAGE=pool.shape[1],
            HEADS=self.kv_heads,
            HEADS_PADDED=triton.next_power_of_2(self.kv_heads),
            WIDTH=2 * self.head_dim,
            PROGRAMS=PROGRAMS,
            num_warps=4,
        )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        pool: torch.Tensor,
        table: torch.Tensor,
        selection: torch.Tensor,
        owner: torch.Tensor,
        gate: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Gated attention of decoding rows into `out` [rows, query heads, head_dim]; `owner` int32 [rows]: row of `table`."""
        from vllm.models.qwen4_exp.nvidia.ops import qsa as ops

        self.bring(layer, pool, table, selection)
        keys, values = self.kept(layer).split(self.head_dim, dim=-1)
        translated = self._translated[: len(query)]
        ops.qsa_sparse_paged_attention(
            query, keys, values, translated, self._slots, owner, False, out, output_gate=gate
        )

    def kept(self, layer: int) -> torch.Tensor:
        """[requests, places of tokens, kv_heads, 2 * head_dim]."""
        return self._rows[layer].transpose(1, 2)
