"""The arithmetic of a plan: pages, blocks, bytes per stage, bytes of host RAM. No decision is taken here.

Formulas and their source: vLLM 0.30.0's KV planner for hybrid models (`v1/core/kv_cache_utils.py`) and the model's shapes in
config.json. With the host pool on, one QSA row keeps a 2 B slot and a 64 B pooled key on the card (indexer head 128 x bf16 over
4 tokens), and 2,048 B of K/V in host RAM (2 heads x 256 x K and V x bf16).

All sizes are bytes (int). `stage` means a pipeline rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

BF16_BYTES = 2
FP32_BYTES = 4
SLOT_BYTES = 2  # per token and QSA layer: the placeholder that keeps the block table alive on the card
BLOCK_MULTIPLE = 16  # vLLM's attention backends take block sizes that are multiples of 16


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
    """The block pool of one partition. `block_size` in tokens; `page_bytes` is what one block takes on the card.

    `states_per_request` counts the blocks that a request holds whatever its length: one per linear layer of the fullest stage,
    one for the ring of raw index keys, one for the table layer's short convolution.
    """

    block_size: int
    page_bytes: int
    states_per_request: int
    qsa_layers: int  # in the whole model
    host_row_bytes: int

    def blocks(self, kv_bytes: int) -> int:
        return kv_bytes // self.page_bytes

    def per_request(self, context: int) -> int:
        """Blocks of one request of `context` tokens."""
        return cdiv(context, self.block_size) + self.states_per_request

    def needed(self, context: int, requests: int) -> int:
        """Blocks for `requests` full requests and the null block that vLLM keeps for itself."""
        return self.per_request(context) * requests + 1

    def host_layer_bytes(self, blocks: int) -> int:
        """Host RAM of one QSA layer: every block id has rows there."""
        return blocks * self.block_size * self.host_row_bytes

    def host_bytes(self, blocks: int) -> int:
        return self.host_layer_bytes(blocks) * self.qsa_layers


def kv_layout(s: Shapes, partition: Sequence[int], host_pool: bool) -> KvLayout:
    """Block size and page for a partition.

    With the host pool the block is the smallest multiple of 16 tokens whose card rows, on the stage with most QSA layers, fill a
    state page, so that neither kind of page wastes the other's: 12,160 tokens and 3,210,240 B for 16,16,16. Without it, vLLM
    compares one layer's K/V alone with the state page (1,568 tokens) and the group's page is K/V and pooled keys of all its layers.
    Raises ValueError where no stage has a QSA layer.
    """
    qsa = max(s.count("full_attention", a, b) for a, b in bounds(partition))
    if qsa == 0:
        raise ValueError("no stage has a full-attention layer")
    compared = qsa * card_row_bytes(s) if host_pool else host_row_bytes(s)
    block = cdiv(cdiv(state_page_bytes(s), compared), BLOCK_MULTIPLE) * BLOCK_MULTIPLE
    on_card = card_row_bytes(s) if host_pool else host_row_bytes(s) + card_row_bytes(s) - SLOT_BYTES
    linear = max(s.count("linear_attention", a, b) for a, b in bounds(partition))
    return KvLayout(
        block_size=block,
        page_bytes=qsa * on_card * block,
        states_per_request=linear + 1 + (1 if s.table_layer_ids else 0),
        qsa_layers=s.count("full_attention", 0, s.layers),
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
