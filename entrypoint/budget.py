"""The arithmetic of the KV pool: pages, groups, blocks, partitions. No decision is taken here.

Formulas and their source: vLLM 0.30.0's KV planner for hybrid models (`v1/core/kv_cache_utils.py`) and the model's shapes in
config.json. With the host pool on, one QSA row keeps a 2 B slot and a 64 B pooled key on the card (indexer head 128 x bf16 over
4 tokens), and 2,048 B of K/V in host RAM (2 heads x 256 x K and V x bf16). `tests/engine/test_kv_oracle.py` holds every formula
against vLLM's own planner.

How vLLM groups this model's caches: all layers of one kind share a bucket (recurrent states; the table's convolution; rings of raw
index keys; K/V with pooled keys). The K/V bucket mixes two page sizes, so it stays whole and sets how many layers a group
holds; the states are spread over so many groups that a block of the whole model's K/V holds a group. A block of the pool costs each
stage what its widest group needs there. A request holds one block of each state group whatever its length.

All sizes are bytes (int). `stage` means a pipeline rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise

BF16_BYTES = 2
FP32_BYTES = 4
SLOT_BYTES = 2  # per token and QSA layer: the placeholder that keeps the block table alive on the card
BLOCK_MULTIPLE = 16  # vLLM's attention backends take block sizes that are multiples of 16


@dataclass(frozen=True)
class Line:
    """One line of a budget, in bytes, with where the number comes from."""

    what: str
    bytes: int
    source: str


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """What the arithmetic needs of config.json's text config. Counts, not bytes, unless named so."""

    layer_types: tuple[str, ...]  # 'linear_attention' or 'full_attention', one per decoder layer
    max_position: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel: int
    ssm_bytes: int  # of one state element (mamba_ssm_dtype)
    indexer_head_dim: int
    indexer_compress_ratio: int
    indexer_budget: int
    hidden: int
    hc_count: int  # residual streams
    attention_heads: int
    experts: int
    experts_per_token: int
    moe_inner: int
    table_layer_ids: tuple[int, ...]  # 1-based, as config.json has them

    @property
    def layers(self) -> int:
        return len(self.layer_types)

    def count(self, kind: str, start: int, stop: int) -> int:
        """Layers of `kind` in [start, stop)."""
        return sum(t == kind for t in self.layer_types[start:stop])


def bounds(partition: Sequence[int]) -> list[tuple[int, int]]:
    """[start, stop) of each stage."""
    out, start = [], 0
    for n in partition:
        out.append((start, start + n))
        start += n
    return out


def state_page_bytes(s: Shapes) -> int:
    """One request's state of one linear-attention layer: convolution window plus recurrent state.

    conv: (2 x key heads x key dim + value heads x value dim) x (kernel - 1) in bf16; ssm: value heads x key dim x value dim.
    3,207,168 for the published model.
    """
    conv_width = 2 * s.linear_num_key_heads * s.linear_key_head_dim + s.linear_num_value_heads * s.linear_value_head_dim
    conv = conv_width * (s.linear_conv_kernel - 1) * BF16_BYTES
    ssm = s.linear_num_value_heads * s.linear_key_head_dim * s.linear_value_head_dim * s.ssm_bytes
    return conv + ssm


def card_row_bytes(s: Shapes) -> int:
    """Bytes per token and QSA layer that stay on the card: slot plus the token's share of a pooled key (66)."""
    return SLOT_BYTES + s.indexer_head_dim * BF16_BYTES // s.indexer_compress_ratio


def host_row_bytes(s: Shapes) -> int:
    """Bytes per token and QSA layer in host RAM: K and V of all kv heads in bf16 (2,048)."""
    return s.num_key_value_heads * s.head_dim * 2 * BF16_BYTES


@dataclass(frozen=True, kw_only=True)
class KvLayout:
    """The block pool of one partition. `block_size` in tokens; `stage_pages` is what one block takes on each stage's card.

    `states_per_request` counts the blocks that a request holds whatever its length: one of each group of linear layers, one for the
    table's convolution and one for the rings of raw index keys.
    """

    block_size: int
    stage_pages: tuple[int, ...]
    states_per_request: int
    qsa_layers: int  # in the whole model
    host_row_bytes: int

    @property
    def page_bytes(self) -> int:
        """A block on the stage where it takes most: `--kv-cache-memory-bytes` is one value for all, so this one decides."""
        return max(self.stage_pages)

    @property
    def groups(self) -> int:
        """KV groups as vLLM counts them: states, rings, K/V with pooled keys."""
        return self.states_per_request + 1

    def blocks(self, kv_bytes: int) -> int:
        return kv_bytes // self.page_bytes

    def per_request(self, context: int) -> int:
        """Blocks of one request of `context` tokens."""
        return cdiv(context, self.block_size) + self.states_per_request

    def needed(self, context: int, requests: int) -> int:
        """Blocks for `requests` full requests and the null block that vLLM keeps for itself."""
        return self.per_request(context) * requests + 1

    def concurrency(self, blocks: int, context: int) -> float:
        """Full requests as vLLM's start-up line counts them (null block included)."""
        return blocks / self.per_request(context)

    def tokens(self, blocks: int, context: int) -> int:
        """Tokens as vLLM's start-up line counts them."""
        return int(self.concurrency(blocks, context) * context)

    def host_layer_bytes(self, blocks: int) -> int:
        """Host RAM of one QSA layer: every block id has rows there."""
        return blocks * self.block_size * self.host_row_bytes

    def host_bytes(self, blocks: int) -> int:
        return self.host_layer_bytes(blocks) * self.qsa_layers


def _layers_per_group(counts: Sequence[int], least: int) -> int:
    """Layers of a group: of the sizes from `least` on the one that pads the buckets least; the larger of two equal ones."""
    return min(range(least, max(least, *counts) + 1), key=lambda size: (sum(-n % size for n in counts), -size))


@dataclass(frozen=True, kw_only=True)
class Pages:
    """What follows from the block size alone, which follows from the stage with most QSA layers. Bytes, tokens (`block`) and counts."""

    block: int
    row_bytes: int  # of one QSA layer and token on its card
    state_bytes: int  # of one recurrent state, padded to a page
    ring_bytes: int
    state_groups: int  # of linear layers
    table_groups: int

    def of(self, qsa_layers: int, linear_layers: int, table_layers: int) -> int:
        """Bytes that a block takes on a stage with so many layers of each kind."""
        return max(
            qsa_layers * self.row_bytes * self.block,
            cdiv(linear_layers, max(1, self.state_groups)) * self.state_bytes,
            cdiv(table_layers, max(1, self.table_groups)) * self.state_bytes,
            qsa_layers * self.ring_bytes,
        )


def tables(s: Shapes, start: int, stop: int) -> int:
    """Table layers of [start, stop)."""
    return sum(start < layer <= stop for layer in s.table_layer_ids)


@cache
def pages(s: Shapes, most_qsa: int, host_pool: bool, block_size: int | None = None) -> Pages:
    """Block and pages where the stage with most QSA layers has `most_qsa`.

    The block is the smallest multiple of 16 whose rows fill a state page, so that neither page wastes the other's: with the host
    pool the card rows of those layers (12,160 tokens for 4 of them), without it one layer's K/V, as vLLM has it (1,568).
    """
    compared = most_qsa * card_row_bytes(s) if host_pool else host_row_bytes(s)
    block = block_size or cdiv(cdiv(state_page_bytes(s), compared), BLOCK_MULTIPLE) * BLOCK_MULTIPLE
    row = card_row_bytes(s) + (0 if host_pool else host_row_bytes(s) - SLOT_BYTES)
    state = max(state_page_bytes(s), compared * block)  # vLLM pads a state to the rows that it was compared with
    # Grouping looks at the whole model; only the bytes of a block are each stage's own.
    qsa, linear = (s.count(kind, 0, s.layers) for kind in ("full_attention", "linear_attention"))
    with_table = tables(s, 0, s.layers)
    size = _layers_per_group([n for n in (linear, with_table, qsa) if n] + [qsa], qsa)
    held = max(qsa * row * block, state) // state
    return Pages(
        block=block,
        row_bytes=row,
        state_bytes=state,
        ring_bytes=s.indexer_compress_ratio * s.indexer_head_dim * BF16_BYTES,
        state_groups=max(cdiv(linear, size), cdiv(linear, held)),
        table_groups=max(cdiv(with_table, size), cdiv(with_table, held)),
    )


@cache
def kv_layout(s: Shapes, partition: tuple[int, ...], host_pool: bool, block_size: int | None = None) -> KvLayout:
    """Groups, pages and blocks of a partition as vLLM plans them; a `block_size` of one's own is for comparison only.

    Raises ValueError where no stage has a QSA layer.
    """
    stages = bounds(partition)
    qsa = [s.count("full_attention", a, b) for a, b in stages]
    if not any(qsa):
        raise ValueError("no stage has a full-attention layer")
    p = pages(s, max(qsa), host_pool, block_size)
    return KvLayout(
        block_size=p.block,
        stage_pages=tuple(
            p.of(q, s.count("linear_attention", a, b), tables(s, a, b)) for q, (a, b) in zip(qsa, stages, strict=True)
        ),
        states_per_request=p.state_groups + p.table_groups + 1,
        qsa_layers=sum(qsa),
        host_row_bytes=host_row_bytes(s) if host_pool else 0,
    )


def power_of_two(n: int) -> int:
    """The next power of two at or above n: what PyTorch's pinned allocator takes for n bytes."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def groups(s: Shapes) -> tuple[int, ...]:
    """Layers of each (linear x n + full) group in order; layers after the last full one belong to the last group."""
    ends = [i + 1 for i, kind in enumerate(s.layer_types) if kind == "full_attention"] or [s.layers]
    ends[-1] = s.layers
    return tuple(end - start for start, end in zip([0, *ends[:-1]], ends, strict=True))


def partitions(s: Shapes, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to give `stages` stages at least one whole group each, as layers per stage, for n groups C(n-1, stages-1)."""
    sizes = groups(s)
    for cuts in combinations(range(1, len(sizes)), stages - 1):
        edges = [0, *cuts, len(sizes)]
        yield tuple(sum(sizes[a:b]) for a, b in pairwise(edges))
