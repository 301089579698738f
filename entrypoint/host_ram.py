"""What host RAM holds, line by line, and how many KV blocks fit into it. No decision here.

Rule order: the K/V pool, the engine's processes, a table that is page-locked (upstream's way, only where it is asked for), and what is left.
A table on disk takes nothing of its own: what is left is its page cache, which the kernel gives back when anyone needs it. The plan counts
with min(MemAvailable, what the cgroup allows), and keeps `page_cache_bytes` of it for the table's hot rows.

Two rules for the pool: memory of its exact size, registered with CUDA (what this kit's engine package does), and PyTorch's pinned
allocator, which takes the next power of two for each layer. The plan uses the first and says what the second would have taken.
"""

from __future__ import annotations

from .budget import KvLayout, Line, power_of_two


def room_bytes(ram_bytes: int, engine_bytes: int, page_cache_bytes: int) -> int:
    """RAM for the pool; negative where the engine alone does not fit."""
    return ram_bytes - engine_bytes - page_cache_bytes


def rounded_bytes(layout: KvLayout, blocks: int) -> int:
    """The pool where each layer is rounded up to a power of two."""
    return power_of_two(layout.host_layer_bytes(blocks)) * layout.qsa_layers


def most_blocks_rounded(layout: KvLayout, blocks: int) -> int:
    """The most blocks whose rounded pool is not larger than that of `blocks`: what the same bytes would hold."""
    layer = power_of_two(layout.host_layer_bytes(blocks))
    return layer // layout.host_layer_bytes(1) if layout.host_row_bytes else blocks


def lines(
    layout: KvLayout, blocks: int, ram_bytes: int, engine: tuple[int, str], table: tuple[int, str] = (0, "")
) -> tuple[Line, ...]:
    """The lines, which add up to `ram_bytes`. `table`: bytes that are page-locked for it, and from where that is known."""
    out = [Line("engine processes", *engine)]
    if layout.host_row_bytes:
        pool = f"K/V of {layout.qsa_layers} layers, page-locked exactly"
        out.insert(0, Line(pool, layout.host_bytes(blocks), f"derived: {blocks} blocks of {layout.block_size} rows"))
    if table[0]:
        out.append(Line("n-gram table, page-locked", *table))
    left = ram_bytes - sum(line.bytes for line in out)
    return (*out, Line("left as page cache" + ("" if table[0] else " for the table"), left, "measured"))


def note(layout: KvLayout, blocks: int) -> str:
    """The other rule's price in words, with the edge where it would jump (article 5.4)."""
    exact, rounded = layout.host_bytes(blocks), rounded_bytes(layout, blocks)
    edge = most_blocks_rounded(layout, blocks)
    return (
        f"host K/V is page-locked at its exact size, {exact} bytes; an allocator that rounds each layer to a power of two would take "
        f"{rounded} bytes for it, and twice that above {(edge + 1) * layout.page_bytes - 1} bytes of KV memory per card"
    )
