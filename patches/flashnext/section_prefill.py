# SPDX-License-Identifier: Apache-2.0
"""Decide in which sections the K/V of a prefill chunk come from host memory, and run sparse attention over them.

A row of a prefill chunk attends to about 2,051 tokens of its own choice. Read one by one from host memory, 512 rows ask
the link for 512 x 2,051 x 2,048 B = 2.15 GB a layer. So the loops are swapped: the context is taken in sections, each
is copied to the card once and serves all rows, and the softmax of every row is carried on from section to section.
This decides, from the context of each request (an upper bound, known on the CPU) and the arena: the sections, which half
of the arena each goes to, and the order of the steps. The steps themselves are `flashnext.section_kernel` (CUDA) or
`flashnext.section_reference` (elsewhere). Rule order, for each span of rows of one request:

1. Sections are of equal length: a sixteenth of the context, at least 4,096 tokens, at most half of the arena.
2. On a side stream: flag each granule of 4 tokens (the indexer selects tokens by four) that any row selected; then copy,
   section by section, the flagged granules and no others. A section that nobody selected costs the link nothing.
3. On the caller's stream, while the first section is under way: sort each row's tokens, once.
4. Section n is attended to while section n + 1 is copied to the other half. A row with no token in a section returns at
   once; a row with its last token there normalises, applies the gate and is written.
5. Spans follow one another in the same pipeline.
6. Ahead of the next layer (`fetch_ahead`, called when this layer's attention is enqueued): what the step will read of that layer's
   first span and was there before the step goes to both halves, whoever will select it, while other layers compute. Its
   sections are as large as the halves allow then, and only the rest of the context is fetched as in 2.

Nothing waits for the device, and all launches are known beforehand; what was selected is decided on the device.

What it costs, T rows, S columns, C tokens of context, 2 K/V heads of 256, n = number of sections (bf16: 2,048 B a token):
- Link: (granules that any row selected) x 8,192 B, each once; at most C x 2,048 B (512 MiB at C = 262,144, design article
  5.1), and at most T x (S + 3 x 4) x 2,048 B, so a short chunk behind a long context is not charged for the context.
- Card memory, K/V: T x S x 2,048 B = 2.15 GB at T = 512, as the stock kernel reads from a pool on the card. Sorted rows
  walk the context at the same time, so what neighbours share is likely to be in L2.
- State: (fp32 accumulator, maximum, norm) T x 24 x (256 + 2) x 4 B = 12.7 MB, read and written by at most n - 1 sections.
  At n = 16: 0.38 GB, 0.41 ms of 936 GB/s, beside a copy of 268 MB at C = 131,072, 10.7 ms of 25 GB/s.
- Fetched ahead: at most the arena, 100 MB at four blocks of 12,160 tokens, selected or not, in time in which the link would
  have nothing to do: three linear-attention layers and four of experts lie between two layers of full attention.
- Not overlapped otherwise: the copy of the first section and the attention to the last. That is why sections are smaller than the
  arena allows: with n sections about 1/n of the copy is left standing alone. It is why they are not much smaller: each
  costs the CPU two launches and two events, and each program its query (8 KiB) and the count of its columns.
- Sort: T x S int32 keys, one torch.sort for 128 rows; up to 4,096 columns PyTorch sorts a row in one thread block (radix
  sort in shared memory, ATen/native/cuda/Sort.h). A sort of 4,096 inside a Triton kernel did not compile within 200 s.
Rates are those of the article (PCIe 4.0 x16, RTX 3090); times are arithmetic, not measurements.

Memory (`buffer_bytes`): everything is allocated once; none of it depends on C or n. At the model's sizes, T = 512 and
S = 2,051: the arena, 12.7 MB of state, 4.2 MB of sorted tokens, 3.2 MB to sort in, 64 KiB of flags. A call
allocates nothing, but for one row of positions that torch.sort makes for its own use (16 KiB).
"""

import contextlib
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

LEAST_SECTION = 4096
"""Tokens: 8.4 MB, 0.34 ms of 25 GB/s, well above what the CPU needs to launch a section."""
PARTS = 16
"""Sections that a long context is cut into, where half of the arena holds one."""
GRANULE = 4
"""Tokens copied or left out together; the indexer's compression ratio."""
AHEAD_MARGIN = 64
"""Tokens before a span's rows that are not fetched ahead, so that a context that is named a few tokens too long does no harm."""
FLAGS = 1 << 16
"""Flags there are. A context of more granules than this has larger granules."""


class Span(NamedTuple):
    """Rows [start, stop) of the query belong to request `request` of the batch, whose K/V hold at most `context` tokens,
    these rows included. A token at or behind `context` is not attended to. Spans of one call share no row."""

    request: int
    start: int
    stop: int
    context: int


class State(NamedTuple):
    """One running softmax for each row and query head, fp32: [rows, heads, dim], [rows, heads], [rows, heads]."""

    accumulator: torch.Tensor
    maximum: torch.Tensor
    normalizer: torch.Tensor


class Step(NamedTuple):
    """Section [start, stop) of the context of `span`; `granule` tokens share a flag; `first` of the span's sections; `early`: may be
    fetched before the rows have selected anything."""

    span: Span
    start: int
    stop: int
    granule: int
    first: bool
    early: bool


class Ahead(NamedTuple):
    """What was fetched ahead, and for which call: its steps, and by what the call is known."""

    steps: list[Step]
    step: object
    pool_address: int
    spans: list[Span]


def section_tokens(context: int, half_tokens: int) -> int:
    """Tokens of a section for a context of so many tokens, where half of the arena holds `half_tokens`."""
    return min(half_tokens, max(LEAST_SECTION, -(-context // PARTS)))


def granule_tokens(context: int) -> int:
    """Tokens that share a flag: GRANULE, doubled until FLAGS of them cover the context."""
    granule = GRANULE
    while granule * FLAGS < context:
        granule *= 2
    return granule


def plan_steps(spans: Sequence[Span], half_tokens: int, table_tokens: int, ahead: bool = False) -> list[Step]:
    """Every section of every span, in order.

    `table_tokens` is what a row of the block table can name. A span with rows has at least one section, so that rows that
    selected nothing are written too. With `ahead` the first span's context without its own rows and AHEAD_MARGIN tokens before
    them, or as much of it as the arena holds, is the first two sections, which are early: earlier steps wrote their K/V.
    """
    result: list[Step] = []
    for span in spans:
        if span.start == span.stop:
            continue
        context = min(span.context, table_tokens)
        length, granule = section_tokens(context, half_tokens), granule_tokens(context)
        early = [0]
        if ahead and not result:
            before = max(0, min(span.context - (span.stop - span.start) - AHEAD_MARGIN, context))
            large = min(half_tokens, -(-before // 2))
            early = sorted({0, large, min(2 * large, before)})
        borders = [*early, *range(early[-1] + length, context, length)]
        if borders[-1] < context or len(borders) == 1:
            borders.append(context)
        span = span._replace(context=context)
        for start, stop in itertools.pairwise(borders):
            result.append(Step(span, start, stop, granule, start == 0, start < early[-1]))
    return result


def buffer_bytes(
    *,
    arena_bytes: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    query_heads: int,
    max_rows: int,
    selection_width: int,
    sort_rows: int = 128,
    element_bytes: int = 2,
) -> dict[str, int]:
    """Bytes of each buffer that a SectionPrefill of these arguments holds for as long as it lives.

    Raises ValueError if `arena_bytes` holds fewer than two blocks.
    """
    block_bytes = block_size * kv_heads * 2 * head_dim * element_bytes
    blocks = arena_bytes // block_bytes
    if blocks < 2:
        raise ValueError(
            f"the arena of {arena_bytes} bytes holds {blocks} K/V blocks of {block_bytes} bytes, but section prefill needs two: "
            f"at least {2 * block_bytes} bytes"
        )
    sort_rows = min(sort_rows, max_rows)
    return {
        "arena": blocks * block_bytes,
        "accumulator": max_rows * query_heads * head_dim * 4,
        "maximum": max_rows * query_heads * 4,
        "normalizer": max_rows * query_heads * 4,
        "tokens": max_rows * selection_width * 4,
        "keys": sort_rows * selection_width * 4,
        "positions": sort_rows * selection_width * 8,
        "flags": FLAGS,
    }


class SectionPrefill:
    """Attention of prefill rows over K/V in host memory. One for all layers of a device; one call at a time.

    arena_bytes       working memory for K/V, rounded down to whole blocks, two at least, else ValueError
    selection_width   columns of a selection without the trailing count
    max_rows          most rows of a call
    dtype             of query, pool, gate and output
    steps             what runs the steps; by default the Triton kernels on CUDA and plain PyTorch elsewhere
    """

    def __init__(
        self,
        *,
        arena_bytes: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        query_heads: int,
        max_rows: int,
        selection_width: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        steps=None,
    ):
        if query_heads % kv_heads:
            raise ValueError(f"{query_heads} query heads cannot share {kv_heads} K/V heads")
        if head_dim < 16 or head_dim & (head_dim - 1):
            raise ValueError(f"a head of {head_dim} is no power of two from 16")
        self.device = torch.device(device)
        if steps is None:
            steps = _steps_for(self.device)
        self._steps = steps
        sizes = buffer_bytes(
            arena_bytes=arena_bytes,
            block_size=block_size,
            kv_heads=kv_heads,
            head_dim=head_dim,
            query_heads=query_heads,
            max_rows=max_rows,
            selection_width=selection_width,
            sort_rows=steps.sort_rows,
            element_bytes=dtype.itemsize,
        )
        self.block_size, self.kv_heads, self.head_dim = block_size, kv_heads, head_dim
        self.query_heads, self.max_rows, self.selection_width = query_heads, max_rows, selection_width
        self.dtype, self.arena_bytes, self.fixed_bytes = dtype, sizes["arena"], sum(sizes.values())
        token_bytes = kv_heads * 2 * head_dim * dtype.itemsize
        self.half_tokens = sizes["arena"] // token_bytes // 2

        def empty(kind: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=kind, device=self.device)

        arena = empty(dtype, sizes["arena"] // token_bytes, kv_heads, 2 * head_dim)
        self._halves = (arena[: self.half_tokens], arena[self.half_tokens : 2 * self.half_tokens])
        self._state = State(
            empty(torch.float32, max_rows, query_heads, head_dim),
            empty(torch.float32, max_rows, query_heads),
            empty(torch.float32, max_rows, query_heads),
        )
        self._tokens = empty(torch.int32, max_rows, selection_width)
        sort_rows = min(steps.sort_rows, max_rows)
        self._keys = empty(torch.int32, sort_rows, selection_width)
        self._positions = empty(torch.int64, sort_rows, selection_width)
        self._flags = empty(torch.int8, FLAGS)
        self._ahead: Ahead | None = None
        self._lanes = _Lanes(self.device) if self.device.type == "cuda" else _OneLane()

    def __call__(
        self,
        query: torch.Tensor,
        pool: torch.Tensor,
        block_table: torch.Tensor,
        selection: torch.Tensor,
        spans: Sequence[Span],
        output_gate: torch.Tensor,
        out: torch.Tensor,
        step: object = None,
    ) -> None:
        """Write the gated attention of the rows of all spans to `out`; other rows of `out` stay as they are.

        query         [T, query_heads, head_dim]
        pool          [blocks, block_size, kv_heads, 2 * head_dim], K then V, last stride 1: host memory as the device sees it,
                      or memory of the device
        block_table   int32 [R, W]: row r names the blocks of request r; an entry outside the pool is no block
        selection     int32 [T, selection_width + 1]: token indices within the request, -1 for none; last column: how many of
                      the columns count
        output_gate   [T, query_heads * head_dim], before the sigmoid
        out           [T, query_heads, head_dim]
        step          if what `fetch_ahead` was last called with, for this pool and these spans: its sections are there

        Ordered behind all earlier work of the current stream, and later work of that stream behind it. Raises ValueError
        for shapes, strides and spans that do not fit; what the tensors hold is not looked at on the CPU.
        """
        self._check(query, pool, block_table, selection, spans, output_gate, out)
        todo = self._fetched(step, pool, spans) or self._plan(spans, block_table)
        self._ahead = None
        if not todo:
            return
        lanes = self._lanes
        lanes.begin()
        self._fetch(0, todo[0], pool, block_table, selection)
        for span in dict.fromkeys(step.span for step in todo):
            self._order(span, pool, block_table, selection)
        for n, step in enumerate(todo):
            if n + 1 < len(todo):
                self._fetch(n + 1, todo[n + 1], pool, block_table, selection)
            lanes.await_copy(n % 2)
            self._steps.attend(
                query,
                self._halves[n % 2],
                self._tokens,
                self._state,
                output_gate,
                out,
                rows=range(step.span.start, step.span.stop),
                start=step.start,
                stop=step.stop,
            )
            lanes.attended(n % 2)

    def fetch_ahead(self, pool: torch.Tensor, block_table: torch.Tensor, spans: Sequence[Span], step: object) -> None:
        """Begin to copy what a later call with the same pool, spans and `step` (any object, told by identity) can have early.

        To be called behind the last call, with no other between it and the later one. The spans' contexts must be right to within
        AHEAD_MARGIN, and what is in the pool before the rows of this step must not change until the later call. Ordered behind all
        earlier work of the current stream; nothing waits for it but that call.
        """
        todo = self._plan(spans, block_table, ahead=True)
        early = [section for section in todo if section.early]
        if not early:
            return
        lanes, first = self._lanes, early[0]
        lanes.begin()
        with lanes.side():
            self._steps.mark_all(self._flags, context=first.span.context, granule=first.granule)
            for n, section in enumerate(early):
                self._copy(n, section, pool, block_table)
        self._ahead = Ahead(todo, step, pool.data_ptr(), list(spans))

    def _fetched(self, step: object, pool: torch.Tensor, spans: Sequence[Span]) -> list[Step] | None:
        """The steps whose early sections are in the arena, if they are this call's."""
        ahead = self._ahead
        if step is None or ahead is None or ahead.step is not step:
            return None
        return ahead.steps if (ahead.pool_address, ahead.spans) == (pool.data_ptr(), list(spans)) else None

    def _plan(self, spans: Sequence[Span], block_table: torch.Tensor, ahead: bool = False) -> list[Step]:
        return plan_steps(spans, self.half_tokens, block_table.shape[1] * self.block_size, ahead)

    def _fetch(self, n: int, step: Step, pool, block_table, selection) -> None:
        """Enqueue the copy of section n, behind the attention to section n - 2, which used the same half. An early section has been
        copied already."""
        span = step.span
        with self._lanes.side():
            if step.first:
                self._steps.mark(
                    selection,
                    block_table,
                    pool,
                    self._flags,
                    request=span.request,
                    rows=range(span.start, span.stop),
                    context=span.context,
                    granule=step.granule,
                )
            if step.early:
                return
            if n >= 2:
                self._lanes.await_half(n % 2)
            self._copy(n, step, pool, block_table)

    def _copy(self, n: int, step: Step, pool, block_table) -> None:
        self._steps.copy(
            pool,
            block_table,
            self._flags,
            self._halves[n % 2],
            request=step.span.request,
            start=step.start,
            stop=step.stop,
            granule=step.granule,
        )
        self._lanes.copied(n % 2)

    def _order(self, span: Span, pool, block_table, selection) -> None:
        for first in range(span.start, span.stop, len(self._keys)):
            rows = range(first, min(first + len(self._keys), span.stop))
            self._steps.order(
                selection,
                block_table,
                pool,
                self._keys[: len(rows)],
                self._positions[: len(rows)],
                self._tokens[rows.start : rows.stop],
                request=span.request,
                rows=rows,
                context=span.context,
            )

    def warm_up(self, pool: torch.Tensor, block_table: torch.Tensor) -> None:
        """Compile the kernels for such a pool and table (see `__call__`) before the first request needs them: one row that
        selects nothing, so nothing of the pool is read."""
        query = torch.zeros(1, self.query_heads, self.head_dim, dtype=self.dtype, device=self.device)
        selection = torch.zeros(1, self.selection_width + 1, dtype=torch.int32, device=self.device)
        self(query, pool, block_table, selection, [Span(0, 0, 1, 1)], query.flatten(1), torch.empty_like(query))

    def _check(self, query, pool, block_table, selection, spans, output_gate, out) -> None:
        rows = query.shape[0]
        wanted = {
            "query": (query, (rows, self.query_heads, self.head_dim), self.dtype),
            "pool": (pool, (*pool.shape[:1], self.block_size, self.kv_heads, 2 * self.head_dim), self.dtype),
            "block_table": (block_table, block_table.shape, torch.int32),
            "selection": (selection, (rows, self.selection_width + 1), torch.int32),
            "output_gate": (output_gate, (rows, self.query_heads * self.head_dim), self.dtype),
            "out": (out, (rows, self.query_heads, self.head_dim), self.dtype),
        }
        for name, (tensor, shape, dtype) in wanted.items():
            if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype or tensor.stride(-1) != 1:
                raise ValueError(
                    f"section prefill: {name} must be {dtype} {list(shape)} with a last stride of 1, "
                    f"not {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
                )
        if block_table.ndim != 2:
            raise ValueError(f"section prefill: block_table must have two dimensions, not {block_table.ndim}")
        if rows > self.max_rows:
            raise ValueError(f"section prefill: {rows} rows, but its buffers are for {self.max_rows}")
        for span in spans:
            if not (
                0 <= span.request < block_table.shape[0] and 0 <= span.start <= span.stop <= rows and span.context >= 0
            ):
                raise ValueError(f"section prefill: {span} does not fit {rows} rows of {block_table.shape[0]} requests")


class _Lanes:
    """The caller's stream and a side stream for copies, tied by one pair of events for each half of the arena.

    The side stream has the higher priority: its few programs then take the next free places of the card, where they would
    else wait until the attention launched before them has no program left to start.
    """

    def __init__(self, device: torch.device):
        self._side = torch.cuda.Stream(device, priority=-1)
        self._begun = torch.cuda.Event()
        self._copied = (torch.cuda.Event(), torch.cuda.Event())
        self._attended = (torch.cuda.Event(), torch.cuda.Event())

    def begin(self) -> None:
        """The side stream starts behind what the caller's stream holds: this chunk's K/V, and the last call's attention."""
        self._main = torch.cuda.current_stream(self._side.device)
        self._begun.record(self._main)
        self._side.wait_event(self._begun)

    def side(self):
        return torch.cuda.stream(self._side)

    def copied(self, half: int) -> None:
        self._copied[half].record(self._side)

    def await_copy(self, half: int) -> None:
        self._main.wait_event(self._copied[half])

    def attended(self, half: int) -> None:
        self._attended[half].record(self._main)

    def await_half(self, half: int) -> None:
        self._side.wait_event(self._attended[half])


class _OneLane:
    """Everything in order, where there are no streams."""

    def begin(self) -> None:
        pass

    def side(self):
        return contextlib.nullcontext()

    def copied(self, half: int) -> None:
        pass

    await_copy = attended = await_half = copied


def _steps_for(device: torch.device):
    if device.type == "cuda":
        from flashnext.section_kernel import TritonSteps, Tuning

        return TritonSteps(Tuning())
    from flashnext.section_reference import TorchSteps

    return TorchSteps()
