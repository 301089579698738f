"""Estimates how fast one stream decodes on a planned box. Pure: from the plan's stages, the box's cards and the bytes of a token.

Order of the rules
1. bytes of a token (`token_bytes`): all resident weights once, but of the routed experts num_experts_per_tok of num_experts, and of the
   embedding one row; the table, the vision tower and the draft head are not read on the cards.
2. at most: a stage takes its bytes over its card's bandwidth, or its K/V rows over its PCIe link where that takes longer (the two can
   overlap); stages run one after another for one stream, so their times add up.
3. the range: boxes that were measured (speed.yaml) spent time beside reading weights. One end takes that time as fixed per token,
   the other as growing with the reading; a box that was not measured may lie outside both. It is never a promise.

None where a card's bandwidth or the bytes of a token are not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .budget import BF16_BYTES
from .checkpoint import Checkpoint, TextConfig
from .data import data
from .machine import Gpu, Machine
from .plan import Plan, Stage
from .simulate import find_board

LABEL = "an estimate, not a promise"
_NOT_ON_CARDS = frozenset({"table", "vision", "mtp"})


def measured() -> Mapping[str, Any]:
    """`speed.yaml`."""
    return data("speed")


@dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """Bytes that one decoded token reads on the cards: of each layer, before the first one and after the last."""

    layers: tuple[int, ...]
    before: int
    after: int
    source: str

    @property
    def total(self) -> int:
        return self.before + sum(self.layers) + self.after

    def of(self, stage: Stage, last_layer: int) -> int:
        first, last = stage.layers
        outside = (self.before if first == 0 else 0) + (self.after if last == last_layer else 0)
        return sum(self.layers[first : last + 1]) + outside


def token_bytes(checkpoint: Checkpoint) -> TokenBytes | None:
    """The bytes of a token of a checkpoint, from its headers; None where they were not read or config.json lacks a number."""
    text = checkpoint.text
    if not checkpoint.has_weights or not (text.num_experts and text.num_experts_per_tok and text.vocab_size):
        return None
    weights = checkpoint.weights

    def read(part: Mapping[str, int]) -> int:
        all_bytes = sum(n for category, n in part.items() if category not in {*_NOT_ON_CARDS, "experts", "embed"})
        return all_bytes + part.get("experts", 0) * text.num_experts_per_tok // text.num_experts

    embed = weights.outside.get("embed", 0)
    return TokenBytes(
        layers=tuple(read(layer) for layer in weights.layers),
        before=embed // text.vocab_size,
        after=read(weights.outside)
        + (embed if not weights.outside.get("head") else 0),  # a tied head reads the embedding
        source="the checkpoint's headers",
    )


def published_token_bytes(text: TextConfig, head_bytes: int) -> TokenBytes:
    """The article's count for the published checkpoint, spread over the layers."""
    row = measured()["published_token_bytes"]
    layers = text.need("num_hidden_layers")
    each, rest = divmod(row["value"] - head_bytes, layers)
    return TokenBytes(layers=(each + rest, *[each] * (layers - 1)), before=0, after=head_bytes, source=row["source"])


def pcie_rows(text: TextConfig) -> int | None:
    """K/V rows that one QSA layer reads per token from the host pool: the budget, and the tokens of the last, unpooled group."""
    if text.indexer_budget is None or text.indexer_compress_ratio is None:
        return None
    return text.indexer_budget + text.indexer_compress_ratio - 1


def link_bytes_s(gpu: Gpu) -> float | None:
    """What copies over a card's PCIe link reach; None where the driver does not tell."""
    return gpu.pcie_bytes_s and gpu.pcie_bytes_s * measured()["link_share"]


@dataclass(frozen=True, kw_only=True)
class StageSpeed:
    """One stage's part of a token. `link_bytes` come from host RAM; `link_bytes_s` is None where the link is not known."""

    gpu: int
    name: str
    token_bytes: int
    bandwidth_bytes_s: float
    link_bytes: int
    link_bytes_s: float | None

    @property
    def memory_s(self) -> float:
        return self.token_bytes / self.bandwidth_bytes_s

    @property
    def link_s(self) -> float:
        return self.link_bytes / self.link_bytes_s if self.link_bytes_s else 0.0

    @property
    def least_s(self) -> float:
        return max(self.memory_s, self.link_s)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One stream's tokens a second: `low` to `high` as an estimate, `most` as what the memory of the cards allows."""

    stages: tuple[StageSpeed, ...]
    low_tokens_s: float
    high_tokens_s: float
    source: str

    @property
    def token_bytes(self) -> int:
        return sum(s.token_bytes for s in self.stages)

    @property
    def link_bytes(self) -> int:
        return sum(s.link_bytes for s in self.stages)

    @property
    def most_tokens_s(self) -> float:
        return 1 / sum(s.least_s for s in self.stages)

    @property
    def link_busy(self) -> float | None:
        """Share of a token's time at `high` in which some PCIe link carries K/V; None where a link is not known."""
        if any(s.link_bytes and s.link_bytes_s is None for s in self.stages):
            return None
        return min(1.0, self.high_tokens_s * sum(s.link_s for s in self.stages))

    def as_dict(self) -> dict[str, Any]:
        """For `--json`; docs/plan.md has the keys."""
        return {
            "label": LABEL,
            "low_tokens_s": round(self.low_tokens_s, 1),
            "high_tokens_s": round(self.high_tokens_s, 1),
            "most_tokens_s": round(self.most_tokens_s, 1),
            "token_bytes": self.token_bytes,
            "link_bytes": self.link_bytes,
            "link_busy": None if self.link_busy is None else round(self.link_busy, 3),
            "source": self.source,
            "stages": [vars(s) for s in self.stages],
            "measured": [{k: box[k] for k in ("name", "tokens_s", "source")} for box in measured()["boxes"]],
        }


def most(read_bytes: float, bandwidth_bytes_s: float) -> float:
    """Tokens a second that a bandwidth allows: 160 for 5.83 GB at 936 GB/s (article 5.6)."""
    return bandwidth_bytes_s / read_bytes


def spread(least_s: float) -> tuple[float, float]:
    """(low, high) tokens a second for a token whose weights take `least_s` to read, by the measured boxes in both readings.

    Fixed: each box's time beside reading, added to ours. Growing: the share of the bandwidth that the boxes reached, straight between
    them by the time they read, and that of the nearest one beyond them.
    """
    boxes = sorted((box["token_bytes"] / box["bandwidth_bytes_s"], 1 / box["tokens_s"]) for box in measured()["boxes"])
    guesses = [least_s + took_s - read_s for read_s, took_s in boxes]
    within = min(max(least_s, boxes[0][0]), boxes[-1][0])
    for (read_s, took_s), (next_s, next_took_s) in pairwise(boxes):
        if read_s <= within <= next_s:
            part = (within - read_s) / (next_s - read_s)
            guesses.append(least_s / ((1 - part) * read_s / took_s + part * next_s / next_took_s))
    return 1 / max(guesses), 1 / min(guesses)


def unknown(plan: Plan, machine: Machine, text: TextConfig, reads: TokenBytes | None) -> str | None:
    """What is missing for an estimate, in words; None where nothing is."""
    if not plan.stages:
        return "the demo on the CPU has none"
    if reads is None:
        return "the bytes that a token reads are not known"
    if plan.capacity.get("host_pool_bytes") and None in (pcie_rows(text), text.num_key_value_heads, text.head_dim):
        return "config.json does not say how many K/V rows a token reads"
    cards = {g.index: g for g in machine.gpus}
    for stage in plan.stages:
        if stage.gpu not in cards or find_board(stage.name, cards[stage.gpu].total_bytes) is None:
            return f"the memory bandwidth of {stage.name} is not known (boards.yaml)"
    return None


def estimate(plan: Plan, machine: Machine, text: TextConfig, reads: TokenBytes | None) -> Speed | None:
    """One stream's speed under `plan`; None where something is `unknown`."""
    if unknown(plan, machine, text, reads) is not None:
        return None
    cards = {g.index: g for g in machine.gpus}
    host_pool = bool(plan.capacity.get("host_pool_bytes"))
    attention = set(text.attention_layers or ())
    row_bytes = pcie_rows(text) * text.num_key_value_heads * text.head_dim * 2 * BF16_BYTES if host_pool else 0
    last_layer = max(stage.layers[1] for stage in plan.stages)
    stages = []
    for stage in plan.stages:
        card = cards[stage.gpu]
        stages.append(
            StageSpeed(
                gpu=stage.gpu,
                name=stage.name,
                token_bytes=reads.of(stage, last_layer),
                bandwidth_bytes_s=find_board(stage.name, card.total_bytes).bandwidth_bytes_s,
                link_bytes=row_bytes * sum(n in attention for n in range(stage.layers[0], stage.layers[1] + 1)),
                link_bytes_s=link_bytes_s(card),
            )
        )
    low, high = spread(sum(s.least_s for s in stages))
    return Speed(stages=tuple(stages), low_tokens_s=low, high_tokens_s=high, source=reads.source)
