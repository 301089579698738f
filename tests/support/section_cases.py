"""Cases for section prefill, made from a seed, and their answer by dense softmax attention in float64.

Runs inside the engine's interpreter (needs torch and the engine package, not vLLM). Tokens that no row selected hold NaN
in the pool, the buffers are filled with NaN before each call, and so is the output: what is read without being
written, or written nowhere, shows.
"""

import contextlib
import random
from dataclasses import dataclass, field

import torch
from flashnext.section_prefill import SectionPrefill, Span


@dataclass(frozen=True)
class Case:
    """One call. `spans` are (rows, context) of one request each; selections follow `pattern`:

    random     as many tokens as are visible or fit, in random order
    borders    the first and last tokens of every section, and those beside them
    sparse     four tokens in a row somewhere, the same for all rows: most sections are selected by nobody
    holes      random, with -1 among the columns that count, rows that select nothing, and tokens behind the count
    nothing    no row selects anything
    """

    spans: tuple[tuple[int, int], ...]
    pattern: str = "random"
    block_size: int = 16
    arena_blocks: int = 4
    kv_heads: int = 2
    group: int = 12
    head_dim: int = 32
    width: int = 40
    heads_first: bool = False
    lost_block: bool = False
    seed: int = 0


@dataclass
class Call:
    query: torch.Tensor
    pool: torch.Tensor
    block_table: torch.Tensor
    selection: torch.Tensor
    spans: list[Span]
    output_gate: torch.Tensor
    out: torch.Tensor
    chosen: list[list[int]] = field(default_factory=list)
    """For each row the tokens that it attends to."""

    def arguments(self):
        return self.query, self.pool, self.block_table, self.selection, self.spans, self.output_gate, self.out


def select(case: Case, chance: random.Random, position: int, half: int) -> list[int]:
    visible, most = position + 1, min(position + 1, case.width)
    if case.pattern == "nothing":
        return []
    if case.pattern == "borders":
        edges = [at + d for at in range(0, visible + half, half) for d in (-2, -1, 0, 1)]
        picked = [token for token in edges if 0 <= token < visible]
        return chance.sample(picked, min(len(picked), most))
    if case.pattern == "sparse":
        first = max(0, visible * 2 // 3 - 4)
        return list(range(first, min(first + 4, visible)))[:most]
    picked = chance.sample(range(visible), most)
    if case.pattern == "holes":
        if chance.random() < 0.25:
            return []
        picked = [-1 if chance.random() < 0.3 else token for token in picked]
    return picked


def make(case: Case, dtype: torch.dtype) -> Call:
    """The arguments of the case's call; the last 3 rows of the batch belong to no span."""
    chance, noise = random.Random(case.seed), torch.Generator().manual_seed(case.seed)
    total = sum(rows for rows, _ in case.spans) + 3
    heads, page = case.kv_heads * case.group, case.block_size

    def normal(*shape):
        return torch.randn(shape, generator=noise).to(dtype)

    table_width = max(-(-context // page) for _, context in case.spans) + 1
    needed = [-(-context // page) for _, context in case.spans]
    blocks = sum(needed) + 2
    order = chance.sample(range(blocks), blocks)
    table = torch.full((len(needed), table_width), 0, dtype=torch.int32)
    at = 0
    for request, count in enumerate(needed):
        table[request, :count] = torch.tensor(order[at : at + count], dtype=torch.int32)
        at += count
    shape = (
        (blocks, case.kv_heads, page, 2 * case.head_dim)
        if case.heads_first
        else (blocks, page, case.kv_heads, 2 * case.head_dim)
    )
    pool = normal(*shape)
    pool = pool.transpose(1, 2) if case.heads_first else pool
    if case.lost_block:
        table[0, 0], table[-1, needed[-1] - 1] = -1, blocks
    width = case.width
    selection = torch.full((total, width + 1), -1, dtype=torch.int32)
    selection[:, -1] = 0
    spans, chosen, used, row = [], [[] for _ in range(total)], torch.zeros(blocks, page, dtype=torch.bool), 0
    for request, (rows, context) in enumerate(case.spans):
        spans.append(Span(request, row, row + rows, context))
        for n in range(rows):
            picked = select(case, chance, context - rows + n, case.arena_blocks * page // 2)
            selection[row, : len(picked)] = torch.tensor(picked, dtype=torch.int32)
            selection[row, -1] = len(picked)
            if case.pattern == "holes" and len(picked) < width:
                selection[row, len(picked)] = context - 1  # behind the count: not selected
            there = [t for t in picked if t >= 0 and 0 <= int(table[request, t // page]) < blocks]
            chosen[row] = there
            for token in there:
                used[int(table[request, token // page]), token % page] = True
            row += 1
    pool.masked_fill_(~used[:, :, None, None], float("nan"))
    # Strided as the model's are: a view of a wider projection.
    query = normal(total, 2 * heads, case.head_dim)[:, :heads]
    out = torch.full((total, heads, case.head_dim), float("nan"), dtype=dtype)
    return Call(query, pool, table, selection, spans, normal(total, heads * case.head_dim), out, chosen)


def unwrite(call: Call) -> None:
    """The pool as it is before the rows of this call have written their K/V."""
    page = call.pool.shape[1]
    for span in call.spans:
        for token in range(span.context - (span.stop - span.start), span.context):
            block = int(call.block_table[span.request, token // page])
            if 0 <= block < len(call.pool):
                call.pool[block, token % page] = float("nan")


def answer(case: Case, call: Call) -> torch.Tensor:
    """float64 [T, heads, head_dim]; NaN in rows of no span."""
    result = torch.full(call.query.shape, float("nan"), dtype=torch.float64)
    query, gate = call.query.double(), torch.sigmoid(call.output_gate.double()).view(result.shape)
    for span in call.spans:
        for row in range(span.start, span.stop):
            tokens = torch.tensor(call.chosen[row], dtype=torch.long)
            if not len(tokens):
                result[row] = 0
                continue
            blocks = call.block_table[span.request].long()[tokens // case.block_size]
            kv = call.pool[blocks, tokens % case.block_size].double().repeat_interleave(case.group, 1)
            keys, values = kv.split(case.head_dim, -1)
            weights = torch.softmax(torch.einsum("hd,nhd->hn", query[row], keys) * case.head_dim**-0.5, -1)
            result[row] = torch.einsum("hn,nhd->hd", weights, values) * gate[row]
    return result


def section_prefill(case: Case, dtype: torch.dtype, steps=None, device="cpu", arena_bytes: int | None = None):
    block_bytes = case.block_size * case.kv_heads * 2 * case.head_dim * dtype.itemsize
    made = SectionPrefill(
        arena_bytes=arena_bytes or case.arena_blocks * block_bytes + 5,  # the rest of a block is not used
        block_size=case.block_size,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        query_heads=case.kv_heads * case.group,
        max_rows=max(1, sum(rows for rows, _ in case.spans) + 3),
        selection_width=case.width,
        device=device,
        dtype=dtype,
        steps=steps,
    )
    for tensor in [*made._halves, *made._state]:
        tensor.fill_(float("nan"))
    return made


def worst(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference in units of the wanted values' scale; infinite where one is NaN and the other is not."""
    there = ~wanted.isnan()
    if not torch.equal(there, ~got.isnan()):
        return float("inf")
    if not there.any():
        return 0.0
    return float((got.double() - wanted)[there].abs().max())


def mutants(seed: int, count: int) -> dict[str, Case]:
    """So many random cases."""
    chance, cases = random.Random(seed), {}
    for n in range(count):
        spans = []
        for _ in range(chance.choice([1, 1, 1, 2, 3])):
            rows = chance.choice([0, 1, 2, 3, 5, 8, 13])
            spans.append((rows, max(rows, chance.choice([1, 2, 15, 16, 17, 31, 32, 33, 47, 64, 65, 96, 130, 200]))))
        case = Case(
            tuple(spans),
            pattern=chance.choice(["random", "random", "borders", "sparse", "holes", "nothing"]),
            block_size=chance.choice([16, 16, 32]),
            arena_blocks=chance.choice([2, 3, 4, 7]),
            kv_heads=chance.choice([1, 2, 2]),
            group=chance.choice([1, 4, 12, 12]),
            head_dim=chance.choice([16, 32]),
            width=chance.choice([5, 40, 67, 131]),
            heads_first=chance.random() < 0.5,
            lost_block=chance.random() < 0.15,
            seed=seed * 1000 + n,
        )
        cases[f"{n}: {case}"] = case
    return cases


class SimulatedStreams:
    """Two streams and their events on a CPU: work is queued, then run in any order that the events allow.

    `wrap(steps)` queues the steps on the lane that is current; `run(chance)` takes the next piece of work of a random lane,
    or, with `first` given, of that lane whenever it can go on. CUDA's rule for events: waiting is for the latest
    record enqueued before the wait, and for nothing if there was none.
    """

    MAIN, SIDE = 0, 1

    def __init__(self):
        self._queues, self._lane = ([], []), self.MAIN
        self._latest, self._count = {}, 0

    # What SectionPrefill calls.
    def begin(self):
        self._record("begun", self.MAIN)
        self._wait("begun", self.SIDE)

    @contextlib.contextmanager
    def side(self):
        self._lane = self.SIDE
        yield
        self._lane = self.MAIN

    def copied(self, half):
        self._record(("copied", half), self.SIDE)

    def await_copy(self, half):
        self._wait(("copied", half), self.MAIN)

    def attended(self, half):
        self._record(("attended", half), self.MAIN)

    def await_half(self, half):
        self._wait(("attended", half), self.SIDE)

    def _record(self, event, lane):
        self._count += 1
        self._latest[event] = self._count
        self._queues[lane].append(("record", self._count))

    def _wait(self, event, lane):
        if event in self._latest:
            self._queues[lane].append(("wait", self._latest[event]))

    def enqueue(self, work):
        """On the caller's stream."""
        self._queues[self.MAIN].append(("work", work))

    def wrap(self, steps):
        streams = self

        class Queued:
            sort_rows = steps.sort_rows

            def __getattr__(self, name):
                step = getattr(steps, name)
                return lambda *a, **k: streams._queues[streams._lane].append(("work", lambda: step(*a, **k)))

        return Queued()

    def run(self, chance: random.Random, first: int | None = None) -> None:
        seen, at = set(), [0, 0]
        while any(n < len(queue) for n, queue in zip(at, self._queues, strict=True)):
            lanes = [self.MAIN, self.SIDE]
            chance.shuffle(lanes)
            if first is not None:
                lanes.sort(key=lambda lane: lane != first)
            for lane in lanes:
                if at[lane] == len(self._queues[lane]):
                    continue
                kind, what = self._queues[lane][at[lane]]
                if kind == "wait" and what not in seen:
                    continue
                at[lane] += 1
                if kind == "work":
                    what()
                elif kind == "record":
                    seen.add(what)
                break
            else:
                raise AssertionError("each stream waits for the other")
        for queue in self._queues:
            queue.clear()
