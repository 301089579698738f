"""Decides how a box or wish that no choice fits is refused: which bound is in the way, by how much, and what would fit.

Rule order: cards that do not hold the model whatever is wished: the fewest cards like the largest one that would. Else each wish is let
go alone, in the order of the messages below; the first whose absence gives a plan is the one that is named, with the largest value
that fits. Then all wishes together. Then host RAM, by giving the box as much as it needs. A box that is too small hears of a
project that serves it (`refer`).
"""

from __future__ import annotations

from dataclasses import replace

from . import budget, choice
from .choice import LEAST_CONTEXT, Asked, Choice, Search, least_blocks, without
from .errors import Exit, Refusal
from .machine import Gpu, Machine
from .refer import elsewhere
from .units import format_gib

_MUCH_RAM_BYTES = 1 << 50


def why(search: Search, machine: Machine, asked: Asked) -> Refusal:
    """The refusal for a search that found nothing."""
    least = without(
        asked, chunks=(16,), streams=(1,), contexts=(min(LEAST_CONTEXT, asked.contexts[0]),) * 2, partition=None
    )
    if _tried(search, without(least, host_room_bytes=_MUCH_RAM_BYTES)) is None:
        return _cards(search, machine)
    found = _chunk(search, asked) or _context(search, asked) or _streams(search, asked) or _partition(search, asked)
    return found or _together(search, asked) or _ram(search, machine, asked) or _cards(search, machine)


def _tried(search: Search, asked: Asked) -> Choice | None:
    return choice.choose(search.cards, search.gpus, asked)[0]


def _largest(search: Search, asked: Asked, name: str, values: list) -> Choice | None:
    """The choice with the largest of the ascending `values` for a field of Asked, beside the whole context where that is possible.

    None where not even the first fits.
    """
    longest = asked.contexts[1]
    if asked.contexts[0] < longest:
        found = _largest(search, without(asked, contexts=(longest, longest)), name, values)
        if found is not None:
            return found
    best, low, high = None, 0, len(values) - 1
    while low <= high:
        middle = (low + high) // 2
        found = _tried(search, without(asked, **{name: values[middle]}))
        if found is None:
            high = middle - 1
        else:
            best, low = found, middle + 1
    return best


def _chunk(search: Search, asked: Asked) -> Refusal | None:
    """C6: a step's rows are bounded by the fullest card's rest."""
    (wished, *more) = asked.chunks
    fits = None if more else _largest(search, asked, "chunks", [(n,) for n in range(16, wished, 16)])
    if fits is None:
        return None
    layout, cards = fits.layout, search.cards
    here, there = (
        sum(line.bytes for line in cards.other(search.step(layout, n, fits.context), 1, False))
        for n in (wished, fits.step.rows)
    )
    return Refusal(
        f"a chunk of {wished} tokens needs {format_gib(here - there)} more on every card than one of {fits.step.rows}, which is the "
        f"largest that fits beside {fits.context} tokens of context",
        f"ask for a chunk of at most {fits.step.rows}",
        Exit.PLAN,
    )


def _context(search: Search, asked: Asked) -> Refusal | None:
    least, most = asked.contexts
    if least != most or most <= LEAST_CONTEXT:
        return None
    fits = _tried(search, without(asked, contexts=(LEAST_CONTEXT, most)))
    if fits is None:
        return None
    # as the same cards would stand with the whole context
    step = search.step(fits.layout, fits.step.rows, most)
    cap = replace(search, gpus=fits.gpus).card_cap(fits.partition, fits.layout, step, fits.streams)
    limit = "card"
    if fits.host_cap is not None and fits.host_cap < cap:
        cap, limit = fits.host_cap, "host RAM"
    need = least_blocks(fits.layout, most, fits.streams)
    each = fits.layout.page_bytes if limit == "card" else fits.layout.host_bytes(1)
    return Refusal(
        f"a request of {most} tokens needs {need} blocks and the {limit} holds {max(0, cap)}: "
        f"{format_gib((need - cap) * each)} are missing",
        f"ask for a context of at most {fits.context}",
        Exit.PLAN,
    )


def _streams(search: Search, asked: Asked) -> Refusal | None:
    """C11: a stream costs its states before its first token."""
    (wished, *more) = asked.streams
    fits = None if more else _largest(search, asked, "streams", [(n,) for n in range(1, wished)])
    if fits is None:
        return None
    each = fits.layout.per_request(1)
    return Refusal(
        f"{wished} streams take {wished * each} blocks for their states before the first token, and the {fits.limit} holds "
        f"{fits.cap} with a context of {fits.context}",
        f"ask for at most {fits.streams} streams",
        Exit.PLAN,
    )


def _partition(search: Search, asked: Asked) -> Refusal | None:
    fits = _tried(search, without(asked, partition=None)) if asked.partition else None
    if fits is None:
        return None
    text = ",".join(map(str, asked.partition))
    rooms = search.rooms(asked.partition, replace(fits.step, context=asked.contexts[0]), asked.streams[-1])
    worst = min(range(len(rooms)), key=rooms.__getitem__)
    return Refusal(
        f"the partition {text} "
        + (f"leaves only {format_gib(rooms[worst])}" if rooms[worst] >= 0 else f"is {format_gib(-rooms[worst])} short")
        + f" on card {search.gpus[worst].index} (stage {worst}) before any K/V",
        f"leave it out: {','.join(map(str, fits.partition))} fits",
        Exit.PLAN,
    )


def _together(search: Search, asked: Asked) -> Refusal | None:
    """Several wishes of which none can be kept beside the others: what the box holds without them."""
    least, most = asked.contexts
    free = without(
        asked,
        partition=None,
        chunks=tuple(search.cards.thumb["chunks"]["value"]),
        streams=tuple(range(min(4, asked.streams[0]), 0, -1)),
        contexts=(min(least, LEAST_CONTEXT), most),
    )
    fits = _tried(search, free)
    if fits is None:
        return None
    wishes = [f"a context of {most}"] if least == most else []
    wishes += [f"{asked.streams[0]} streams"] if len(asked.streams) == 1 else []
    wishes += [f"a chunk of {asked.chunks[0]}"] if len(asked.chunks) == 1 else []
    wishes += [f"the partition {','.join(map(str, asked.partition))}"] if asked.partition else []
    return Refusal(
        f"this box does not hold these wishes together: {', '.join(wishes)}",
        f"drop all but one; without them it holds {fits.context} tokens, {fits.streams} streams and chunks of {fits.step.rows} on "
        f"{','.join(map(str, fits.partition))}",
        Exit.PLAN,
    )


def _ram(search: Search, machine: Machine, asked: Asked) -> Refusal | None:
    """C14: how much is missing, not only that something is."""
    fits = _tried(search, without(asked, host_room_bytes=_MUCH_RAM_BYTES))
    if fits is None:
        return None
    tokens = asked.contexts[0]
    need = fits.layout.host_bytes(least_blocks(fits.layout, tokens, asked.streams[-1]))
    short = need - asked.host_room_bytes
    return Refusal(
        f"{format_gib(machine.ram_available_bytes)} of RAM leave {format_gib(max(0, asked.host_room_bytes))} for K/V, and even "
        f"{tokens} tokens need {format_gib(need)}",
        f"free {format_gib(short)}, or raise the container's limit by it{elsewhere(machine)}",
        Exit.PLAN,
    )


def _cards(search: Search, machine: Machine) -> Refusal:
    """The weights do not fit: the split that comes nearest, and how many such cards would do."""
    gpus, shapes = search.gpus, search.cards.shapes
    asked = search.asked
    groups = len(budget.groups(shapes))
    row = tuple(sorted(sorted(gpus, key=lambda g: -g.free_bytes)[:groups], key=lambda g: g.index))
    some = replace(search, gpus=row)
    parts = [asked.partition] if asked.partition else list(budget.partitions(shapes, len(row)))
    first = max(shapes.table_layer_ids, default=0)

    def rooms(part: tuple[int, ...]) -> list[int]:
        layout = budget.kv_layout(shapes, part, asked.pools[0])
        return some.rooms(part, some.step(layout, min(asked.chunks), asked.contexts[0]), min(asked.streams))

    part = max((p for p in parts if p[0] >= first), key=lambda p: sorted(rooms(p)))
    left = rooms(part)
    worst = min(range(len(left)), key=left.__getitem__)
    gpu, (a, b) = row[worst], budget.bounds(part)[worst]
    need = gpu.free_bytes - left[worst]
    fix = f"{_enough(search)}{elsewhere(machine)}"
    if left[worst] > 0:
        return Refusal(
            f"card {gpu.index} ({gpu.name}) keeps {format_gib(left[worst])} for K/V beside layers {a}-{b - 1}, too little for a request of "
            f"{asked.contexts[0]} tokens",
            fix,
            Exit.PLAN,
        )
    return Refusal(
        f"card {gpu.index} ({gpu.name}) has {format_gib(gpu.free_bytes)} free, and layers {a}-{b - 1} need {format_gib(need)} before any K/V",
        fix,
        Exit.PLAN,
    )


def _enough(search: Search) -> str:
    """The fewest cards like the largest of these that would hold the model with one request, in words."""
    largest: Gpu = max(search.gpus, key=lambda g: g.free_bytes)
    asked = without(
        search.asked,
        partition=None,
        contexts=(LEAST_CONTEXT, LEAST_CONTEXT),
        streams=(1,),
        chunks=search.asked.chunks[-1:],
        host_room_bytes=_MUCH_RAM_BYTES,
    )
    for n in range(1, len(budget.groups(search.cards.shapes)) + 1):
        if Search(search.cards, (largest,) * n, asked).best() is not None:
            return f"{n} cards like {largest.name} hold it" if n > 1 else f"1 {largest.name} holds it"
    return f"no number of cards like {largest.name} holds it: 3 cards of 24 GB do"
