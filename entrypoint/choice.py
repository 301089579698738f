"""Decides which cards, partition, place of K/V, context, streams, chunk and blocks a box gets. A pure search over budgets.

The objective, in this order, every step bounded by the fullest card and by host RAM:
1. the longest context, up to the wish (or the model's own), of which one whole request fits;
2. as many streams as are wished, each with its first block and its states (a stream costs these before its first token);
3. as many whole requests of that context at once as there are streams, with a spare block each, so that none waits for ever;
4. the largest chunk of rules.yaml: a smaller one frees memory and slows prefill;
5. what is left of host RAM is page cache: the pool is not made larger than 3 asks for.
Among equals: K/V on the cards (no PCIe), stages of whole (linear x 3 + full) groups, more cards, the largest smallest rest of a card.

Candidates: every split in whole groups. Where none of them meets the whole wish, also the best split in single layers, found by
dynamic programming for each number of QSA layers of the fullest stage, because block size and groups follow from that number.
Cards are left out, the smallest first, where the others do more without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from . import budget
from .activation import Step
from .budget import KvLayout, bounds
from .card import Cards
from .machine import Gpu

LEAST_CONTEXT = 4096
_CONTEXT_STEP = 1024


def capture_sizes(streams: int) -> list[int]:
    """Graph sizes for every batch one stage can see: powers of two below `streams`, and `streams`."""
    sizes = {streams}
    n = 1
    while n < streams:
        sizes.add(n)
        n *= 2
    return sorted(sizes)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What may be chosen from. `contexts`: (least, most); `streams` and `chunks`: best first; `pools`: host pool or not, best first.

    `host_room_bytes` is the RAM for the pool, `arena_bytes` the wished arena, of which whole blocks are used.
    """

    contexts: tuple[int, int]
    streams: tuple[int, ...]
    chunks: tuple[int, ...]
    pools: tuple[bool, ...]
    host_room_bytes: int
    arena_bytes: int
    logits_limit_bytes: int
    partition: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A plan's numbers. `card_cap` and `host_cap` are the blocks that the cards and host RAM would hold at most."""

    gpus: tuple[Gpu, ...]
    partition: tuple[int, ...]
    host_pool: bool
    layout: KvLayout
    step: Step
    streams: int
    card_cap: int
    host_cap: int | None

    @property
    def context(self) -> int:
        return self.step.context

    @property
    def cap(self) -> int:
        return self.card_cap if self.host_cap is None else min(self.card_cap, self.host_cap)

    @property
    def limit(self) -> str:
        """What bounds the blocks, in words."""
        return "card" if self.cap == self.card_cap else "host RAM"

    @property
    def wanted(self) -> int:
        """Blocks of all streams at full context, the null block and a spare each."""
        return self.layout.needed(self.context, self.streams) + self.streams

    @property
    def blocks(self) -> int:
        return min(self.wanted, self.cap)

    @property
    def full_requests(self) -> int:
        """Whole requests that run at once."""
        return min(self.streams, (self.blocks - 1) // self.layout.per_request(self.context))


def least_blocks(layout: KvLayout, context: int, streams: int) -> int:
    """One whole request, a first block and the states of every other stream, the null block, and one spare."""
    return layout.needed(context, 1) + layout.per_request(1) * (streams - 1) + 1


def arena_bytes(block_tokens: int, host_row_bytes: int, wished_bytes: int) -> int:
    """Whole blocks of one layer's K/V, two at least (one is copied while the other is read); 0 without a host pool."""
    block = block_tokens * host_row_bytes
    return max(2, wished_bytes // block) * block if block else 0


@dataclass(frozen=True)
class Search:
    """The search over one row of cards, in the order of the stages."""

    cards: Cards
    gpus: tuple[Gpu, ...]
    asked: Asked

    def step(self, layout: KvLayout, chunk: int, context: int) -> Step:
        return Step(
            rows=chunk,
            context=context,
            logits_limit_bytes=self.asked.logits_limit_bytes,
            arena_bytes=arena_bytes(layout.block_size, layout.host_row_bytes, self.asked.arena_bytes),
        )

    @cached_property
    def _others(self) -> dict:
        return {}

    def _other_bytes(self, step: Step, streams: int, middle: bool) -> int:
        key = (step, streams, middle)
        if key not in self._others:
            lines = self.cards.other(step, len(capture_sizes(streams)), middle)
            self._others[key] = sum(line.bytes for line in lines)
        return self._others[key]

    def rooms(self, partition: Sequence[int], step: Step, streams: int) -> list[int]:
        """Bytes left for KV on each card; negative where the weights alone do not fit."""
        last = len(partition) - 1
        return [
            gpu.free_bytes - self.cards.weight_bytes(a, b) - self._other_bytes(step, streams, 0 < i < last)
            for i, (gpu, (a, b)) in enumerate(zip(self.gpus, bounds(partition), strict=True))
        ]

    def card_cap(self, partition: Sequence[int], layout: KvLayout, step: Step, streams: int) -> int:
        rooms = self.rooms(partition, step, streams)
        return min(room // page for room, page in zip(rooms, layout.stage_pages, strict=True))

    def _choice(self, partition: tuple[int, ...], layout: KvLayout, chunk: int, context: int, streams: int) -> Choice:
        step = self.step(layout, chunk, context)
        per_block = layout.host_bytes(1)
        return Choice(
            gpus=self.gpus,
            partition=partition,
            host_pool=bool(per_block),
            layout=layout,
            step=step,
            streams=streams,
            card_cap=self.card_cap(partition, layout, step, streams),
            host_cap=max(0, self.asked.host_room_bytes // per_block) if per_block else None,
        )

    def _longest(self, partition: tuple[int, ...], layout: KvLayout, chunk: int, streams: int) -> Choice | None:
        """The choice with the longest context that fits, or None."""

        def at(context: int) -> Choice | None:
            found = self._choice(partition, layout, chunk, context, streams)
            return found if least_blocks(layout, context, streams) <= found.cap else None

        shortest, longest = self.asked.contexts
        best = at(longest)
        if best is not None or shortest == longest:
            return best
        low, high = -(-shortest // _CONTEXT_STEP), (longest - 1) // _CONTEXT_STEP
        while low <= high:
            middle = (low + high) // 2
            found = at(middle * _CONTEXT_STEP)
            if found is None:
                high = middle - 1
            else:
                best, low = found, middle + 1
        return best

    def _of(self, partition: tuple[int, ...], host_pool: bool) -> Iterator[Choice]:
        """The choices of a partition that may be best."""
        layout = budget.kv_layout(self.cards.shapes, partition, host_pool)
        for chunk in self.asked.chunks:
            context = 0
            for streams in self.asked.streams:
                found = self._longest(partition, layout, chunk, streams)
                if found is not None and found.context > context:
                    context = found.context
                    yield found
                if context == self.asked.contexts[1]:
                    break
            if found is not None and self.objective(found)[:3] == self.whole_wish[:3]:
                break  # a smaller chunk cannot be better

    def objective(self, c: Choice) -> tuple[int, int, int, int]:
        return c.context, c.streams, c.full_requests, c.step.rows

    @property
    def whole_wish(self) -> tuple[int, int, int, int]:
        streams = self.asked.streams[0]
        return self.asked.contexts[1], streams, streams, self.asked.chunks[0]

    def rank(self, c: Choice) -> tuple:
        """What makes a choice better, most important first."""
        used = (c.blocks * page for page in c.layout.stage_pages)
        left = sorted(r - u for r, u in zip(self.rooms(c.partition, c.step, c.streams), used, strict=True))
        return (*self.objective(c), not c.host_pool, self.in_groups(c), len(c.gpus), left)

    def in_groups(self, c: Choice) -> bool:
        """Whether every stage is made of whole groups."""
        ends = set(accumulate(budget.groups(self.cards.shapes)))
        return all(stop in ends for _, stop in bounds(c.partition))

    def best(self) -> Choice | None:
        """The best choice, or None where nothing fits."""
        wished = self.asked.partition
        if sum(gpu.free_bytes for gpu in self.gpus) < self.cards.weight_bytes(0, self.cards.shapes.layers):
            return None  # most boxes that are too small end here
        whole = [wished] if wished else self._whole_groups()
        for pool in self.asked.pools:  # best first, so that the first which meets the whole wish ends the search
            made = [c for part in whole if (c := self._at_best(part, pool)) is not None]
            if made:
                return max(made, key=self.rank)
        parts = {pool: sorted({*whole, *(() if wished else self._single_layers(pool))}) for pool in self.asked.pools}
        found: list[Choice] = []
        context = 0
        for pool, some in parts.items():
            for part in some:
                if self._context_of(part, pool) >= context:
                    found += self._of(part, pool)
                    context = max((c.context for c in found), default=0)
        if not found:
            return None
        top = max(map(self.objective, found))
        return max((c for c in found if self.objective(c) == top), key=self.rank)

    def _at_best(self, partition: tuple[int, ...], host_pool: bool) -> Choice | None:
        """The choice that meets the whole wish on this partition, if it does."""
        layout = budget.kv_layout(self.cards.shapes, partition, host_pool)
        context, streams, _, chunk = self.whole_wish
        found = self._choice(partition, layout, chunk, context, streams)
        fits = least_blocks(layout, context, streams) <= found.cap
        return found if fits and self.objective(found) == self.whole_wish else None

    def _context_of(self, partition: tuple[int, ...], host_pool: bool) -> int:
        """The longest context that the partition holds with the fewest streams and the smallest chunk."""
        layout = budget.kv_layout(self.cards.shapes, partition, host_pool)
        found = self._longest(partition, layout, min(self.asked.chunks), min(self.asked.streams))
        return 0 if found is None else found.context

    def _whole_groups(self) -> list[tuple[int, ...]]:
        """Splits in whole groups, table layers on the first stage, that the cards hold with the shortest request."""
        first = max(self.cards.shapes.table_layer_ids, default=0)
        return [p for p in budget.partitions(self.cards.shapes, len(self.gpus)) if p[0] >= first and self._holds(p)]

    def _holds(self, partition: tuple[int, ...]) -> bool:
        stages = zip(self.gpus, bounds(partition), strict=True)
        if any(gpu.free_bytes < self.cards.weight_bytes(a, b) for gpu, (a, b) in stages):
            return False
        chunk, streams = min(self.asked.chunks), min(self.asked.streams)
        for pool in self.asked.pools:
            layout = budget.kv_layout(self.cards.shapes, partition, pool)
            step = self.step(layout, chunk, self.asked.contexts[0])
            if self.card_cap(partition, layout, step, streams) >= least_blocks(layout, step.context, streams):
                return True
        return False

    def _single_layers(self, host_pool: bool) -> Iterator[tuple[int, ...]]:
        """For each number of QSA layers of the fullest stage the split with most blocks, if there is one.

        reach[layer, full]: the best smallest number of blocks of the stages so far, which end at `layer`; `full` where one of them
        has that number of QSA layers.
        """
        s, n = self.cards.shapes, len(self.gpus)
        first = max(s.table_layer_ids, default=1)
        qsa = [s.count("full_attention", 0, at) for at in range(s.layers + 1)]
        linear = [s.count("linear_attention", 0, at) for at in range(s.layers + 1)]
        tables = [budget.tables(s, 0, at) for at in range(s.layers + 1)]
        streams, chunk = self.asked.streams[0], min(self.asked.chunks)
        for most in range(-(-qsa[-1] // n), qsa[-1] - n + 2):
            p = budget.pages(s, most, host_pool)
            row = budget.host_row_bytes(s) if host_pool else 0
            step = Step(
                rows=chunk,
                context=self.asked.contexts[1],
                logits_limit_bytes=self.asked.logits_limit_bytes,
                arena_bytes=arena_bytes(p.block, row, self.asked.arena_bytes),
            )
            reach: dict[tuple[int, bool], tuple[int, tuple[int, ...]]] = {(0, False): (1 << 62, ())}
            for i, gpu in enumerate(self.gpus):
                room = gpu.free_bytes - self._other_bytes(step, streams, 0 < i < n - 1)
                after: dict[tuple[int, bool], tuple[int, tuple[int, ...]]] = {}
                for (a, full), (blocks, parts) in reach.items():
                    stops = (
                        [s.layers] if i == n - 1 else range(a + 1 if i else max(1, first), s.layers - (n - 1 - i) + 1)
                    )
                    for b in stops:
                        here = qsa[b] - qsa[a]
                        if not here:
                            continue
                        rest = room - self.cards.weight_bytes(a, b)
                        if here > most or rest <= 0:
                            break
                        page = p.of(here, linear[b] - linear[a], tables[b] - tables[a])
                        value = min(blocks, rest // page)
                        key = (b, full or here == most)
                        if value > after.get(key, (0, ()))[0]:
                            after[key] = (value, (*parts, b - a))
                reach = after
            if (found := reach.get((s.layers, True))) is not None:
                yield found[1]


def choose(cards: Cards, gpus: Sequence[Gpu], asked: Asked) -> tuple[Choice | None, Search]:
    """The best choice over these cards and over what is left when the smallest are left out, and the search that found it.

    A wished partition fixes the number of cards. None where nothing fits; then the search is the one over all cards.
    """
    row = tuple(gpus)
    most = len(budget.groups(cards.shapes))
    searches = []
    while row:
        if len(row) <= most and (asked.partition is None or len(asked.partition) == len(row)):
            search = Search(cards, row, asked)
            searches.append((search.best(), search))
            found = searches[-1][0]
            if found is not None and search.objective(found) == search.whole_wish and search.in_groups(found):
                break
        smallest = min(range(len(row)), key=lambda at: (row[at].free_bytes, -at))
        row = row[:smallest] + row[smallest + 1 :]
    made = [(c, search) for c, search in searches if c is not None]
    if not made:
        return None, searches[0][1]
    return max(made, key=lambda pair: pair[1].rank(pair[0])[:-1])


def without(asked: Asked, **changes) -> Asked:
    """`asked` with some of its bounds replaced, to find out what would fit."""
    return replace(asked, **changes)
