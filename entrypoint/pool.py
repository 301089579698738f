"""Decides the KV pool of a choice and says what it holds: blocks and bytes, each stage's budget, and what a reader should know.

Rule order for the blocks: a wished size where it fits; the measured size on the partition that it was measured on; else what the streams
need, as far as cards and host RAM hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import budget, choice, host_ram
from .budget import Line, bounds
from .card import Cards
from .choice import Asked, Choice, capture_sizes
from .errors import Exit, Refusal
from .machine import Machine
from .thumb import rule, thumb
from .units import format_gib
from .wishes import Wishes


@dataclass(frozen=True)
class Stage:
    """A pipeline rank: its card, its layers [first, last] and its budget; `lines` add up to `used_bytes`."""

    gpu: int
    name: str
    layers: tuple[int, int]
    available_bytes: int
    lines: tuple[Line, ...]

    @property
    def used_bytes(self) -> int:
        return sum(line.bytes for line in self.lines)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The pool: `bytes` is the flag's value, of which `blocks` whole blocks are used."""

    blocks: int
    bytes: int
    host_bytes: int
    source: str
    reason: str


def with_pool(
    cards: Cards, machine: Machine, wishes: Wishes, asked: Asked, c: Choice, search: choice.Search
) -> tuple[Choice, Pool]:
    """The pool of a choice. A wished size that suits host K/V only, or K/V on the cards only, decides where both do the same."""
    try:
        return c, _kv(wishes, c)
    except Refusal:
        others = tuple(pool for pool in asked.pools if pool != c.host_pool)
        other, other_search = (
            choice.choose(cards, machine.gpus, choice.without(asked, pools=others)) if others else (None, None)
        )
        if other is None or other_search.objective(other) < search.objective(c):
            raise
        return other, _kv(wishes, other)


def _kv(wishes: Wishes, c: Choice) -> Pool:
    """Blocks: the wish where it fits; the measured rule on its partition; else what the streams need and the memory holds."""
    layout, least = c.layout, choice.least_blocks(c.layout, c.context, c.streams)
    wished = wishes.value("kv_cache_memory")
    measured, where = rule("kv_cache_memory_bytes")
    if wished is not None:
        blocks, size, source, reason = layout.blocks(wished), wished, "wished", wishes["kv_cache_memory"].source
        if blocks < least:
            raise Refusal(
                f"a KV memory of {wished} bytes gives {blocks} blocks, and {c.context} tokens with {c.streams} streams need {least}",
                f"ask for at least {least * layout.page_bytes} bytes, or a shorter context",
                Exit.PLAN,
            )
        if blocks > c.cap:
            raise Refusal(
                f"a KV memory of {wished} bytes needs {format_gib(blocks * layout.page_bytes)} on every card and {format_gib(layout.host_bytes(blocks))} of host RAM; "
                f"the {c.limit} holds {c.cap} of {blocks} blocks",
                f"ask for at most {(c.cap + 1) * layout.page_bytes - 1} bytes",
                Exit.PLAN,
            )
    elif (
        c.host_pool
        and list(c.partition) == thumb()["kv_cache_memory_bytes"]["partition"]
        and c.wanted <= layout.blocks(measured) <= c.cap
    ):
        blocks, size, source, reason = layout.blocks(measured), measured, "rule", where
    else:
        blocks, size, source = c.blocks, c.blocks * layout.page_bytes, "derived"
        bound = (
            f"{c.streams} full requests and a spare block each"
            if blocks == c.wanted
            else f"as many as the {c.limit} holds"
        )
        reason = f"{blocks} blocks of {layout.page_bytes} bytes: {bound}"
    host = layout.host_bytes(blocks) if c.host_pool else 0
    return Pool(blocks=blocks, bytes=size, host_bytes=host, source=source, reason=reason)


def stage(cards: Cards, c: Choice, blocks: int, at: int) -> Stage:
    """A stage's budget: the card's lines, then the pool's blocks by what they hold."""
    (a, b), page, gpu = bounds(c.partition)[at], c.layout.stage_pages[at], c.gpus[at]
    whole = min(c.streams, (blocks - 1) // c.layout.per_request(c.context))
    states = max(1, whole) * c.layout.states_per_request
    lines = (
        *cards.lines(c.partition, at, c.step, len(capture_sizes(c.streams))),
        Line(f"KV state of {max(1, whole)} whole requests", states * page, f"derived: {states} blocks of {page} bytes"),
        Line(
            "QSA rows, first blocks of further requests, spare and null block",
            (blocks - states) * page,
            f"derived: {blocks - states} blocks of {page} bytes",
        ),
    )
    return Stage(gpu.index, gpu.name, (a, b - 1), gpu.free_bytes, lines)


def notes(machine: Machine, s: budget.Shapes, wishes: Wishes, c: Choice, kv: Pool) -> list[str]:
    """What a reader should know of the choice beside its numbers."""
    out = []
    if len(c.gpus) < len(machine.gpus):
        idle = len(machine.gpus) - len(c.gpus)
        groups = len(budget.groups(s))
        why = (
            f"the model has {groups} groups of layers"
            if len(machine.gpus) > groups
            else "the others hold more without it"
        )
        out.append(f"{idle} of {len(machine.gpus)} cards stay idle: {why}")
    if c.context < s.max_position and not wishes["context"].wished:
        need = choice.least_blocks(c.layout, s.max_position, c.streams)
        each = c.layout.page_bytes if c.limit == "card" else c.layout.host_bytes(1)
        out.append(
            f"context lowered from {s.max_position} to {c.context}: the {c.limit} holds {c.cap} blocks, the whole needs {need}, "
            f"{format_gib(max(0, need - c.cap) * each)} more"
        )
    if c.streams < wishes.value("streams"):
        out.append(f"streams lowered from {wishes.value('streams')} to {c.streams}: the {c.limit} holds {c.cap} blocks")
    if not wishes["chunk"].wished and c.step.rows < rule("chunks")[0][0]:
        out.append(
            f"steps of {c.step.rows} tokens leave room for the rest: prefill is slower than with {rule('chunks')[0][0]}"
        )
    whole = min(c.streams, (kv.blocks - 1) // c.layout.per_request(c.context))
    if whole < c.streams:
        out.append(
            f"{whole} of {c.streams} streams run at once where all are {c.context} tokens long; the others wait for blocks"
        )
    if c.host_pool:
        out.append(host_ram.note(c.layout, kv.blocks))
    elif wishes.value("host_kv") == "auto" and not machine.wsl:
        out.append(
            f"K/V stay on the cards, which hold them: {format_gib(kv.blocks * c.layout.page_bytes)} on the fullest"
        )
    return out
