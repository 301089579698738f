"""Decides nothing: counts. Where a checkpoint's parameters and bytes are, which of them one decoded token reads, and how fast
a card can therefore be at most. From the headers alone, by the rules below; docs/bits.md has them with an example.

- Weights: elements of the matrices that the model has (not of the packed words). Bytes: packed words, scales, zero points.
- Resident: all that lies on the cards, so not the n-gram table, the vision tower or the draft head.
- Touched by one decoded token: of the routed experts num_experts_per_tok of num_experts; of the embedding one row; of the
  table one row a head; everything else once.
- Roofline of a card: its bandwidth over the bytes touched. A pipeline reads one stage after another, so several cards of a
  kind have the roofline of one for a single stream.

Figures of another checkpoint, or another allocation, are never printed for the one that was read: `what_if` computes a
new list of weights and counts that.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table

from . import lint
from .architecture import QUANTIZABLE, Part, is_target, parts
from .checkpoint import CATEGORIES, DTYPE_BITS, Checkpoint, TextConfig, category_of, read_text_config
from .data import data
from .errors import Exit, Refusal
from .simulate import boards
from .units import GIB, format_gib

VOCABULARY = ("embed", "head")
_SCALE_BITS = 16


@dataclass(frozen=True, kw_only=True)
class Row:
    """One category. `touched_bytes`: read for one decoded token."""

    category: str
    weights: int
    bytes: int
    touched_bytes: int
    resident: bool

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.weights if self.weights else 0.0


@dataclass(frozen=True, kw_only=True)
class Account:
    """The rows in the order of checkpoint.CATEGORIES, and what they were counted from, in words."""

    origin: str
    rows: tuple[Row, ...]

    def _sum(self, field: str, rows: Iterable[Row]) -> int:
        return sum(getattr(row, field) for row in rows)

    @property
    def resident_weights(self) -> int:
        return self._sum("weights", (r for r in self.rows if r.resident))

    @property
    def resident_bytes(self) -> int:
        return self._sum("bytes", (r for r in self.rows if r.resident))

    @property
    def body_bits_per_weight(self) -> float:
        """Of all that is resident but the vocabulary matrices."""
        body = [r for r in self.rows if r.resident and r.category not in VOCABULARY]
        weights = self._sum("weights", body)
        return 8 * self._sum("bytes", body) / weights if weights else 0.0

    @property
    def touched_bytes(self) -> int:
        """Bytes that one decoded token reads on the cards."""
        return self._sum("touched_bytes", (r for r in self.rows if r.resident))

    def row(self, category: str) -> Row | None:
        return next((r for r in self.rows if r.category == category), None)

    def roofline(self) -> list[tuple[str, float, float]]:
        """(card, bandwidth in B/s, tokens a second at most) for each card of the catalogue."""
        return [(b.name, b.bandwidth_bytes_s, b.bandwidth_bytes_s / self.touched_bytes) for b in boards()]

    def as_dict(self) -> dict[str, Any]:
        return {
            "origin": self.origin,
            "rows": [{**vars(r), "bits_per_weight": r.bits_per_weight} for r in self.rows],
            "resident_weights": self.resident_weights,
            "resident_bytes": self.resident_bytes,
            "body_bits_per_weight": self.body_bits_per_weight,
            "touched_bytes": self.touched_bytes,
            "roofline": [{"card": n, "bandwidth_bytes_s": b, "tokens_s": t} for n, b, t in self.roofline()],
        }


def weight_bytes(shape: Sequence[int], form: lint.Form) -> int:
    """Bytes of one weight in a form: elements of its dtype, or 32-bit words a row and 16-bit scales (zero points packed)."""
    elements = 1
    for size in shape:
        elements *= size
    if form.bits is None:
        return elements * DTYPE_BITS[form.dtype] // 8
    rows, inputs = shape
    words = -(-inputs // (32 // form.bits)) if form.padded else -(-inputs * form.bits // 32)
    points = 0 if form.symmetric else -(-rows * form.bits // 32) * 4 * form.groups
    return rows * words * 4 + rows * form.groups * _SCALE_BITS // 8 + points


def _category(part: Part) -> str:
    return category_of(part.name if part.kind == "bare" else f"{part.name}.weight")


def count(
    stored: Sequence[lint.Stored], text: TextConfig, origin: str, more: dict[str, tuple[int, int]] | None = None
) -> Account:
    """The account of these weights; `more`: (weights, bytes) of categories that no token of text touches."""
    totals: dict[str, list[int]] = {}
    for item in stored:
        if item.part.kind == "optional":
            continue
        category, n = _category(item.part), len(item.names)
        bytes_ = weight_bytes(item.part.shape, item.form) * n
        at = totals.setdefault(category, [0, 0, 0])
        at[0] += item.part.elements // item.part.count * n
        at[1] += bytes_
        if category == "experts":
            at[2] += bytes_ * text.need("num_experts_per_tok") // text.need("num_experts")
        elif category == "embed":
            at[2] += bytes_ // item.part.shape[0]
        elif category == "table":
            row_bytes = item.part.shape[1] * DTYPE_BITS[item.form.dtype] // 8
            at[2] = row_bytes * (text.need("ngram_size") - 1) * text.need("heads_per_ngram")
        else:
            at[2] += bytes_
    for category, (weights, bytes_) in (more or {}).items():
        totals[category] = [weights, bytes_, 0]
    order = [*(category for category, _ in CATEGORIES), "other"]
    return Account(
        origin=origin,
        rows=tuple(
            Row(
                category=category,
                weights=totals[category][0],
                bytes=totals[category][1],
                touched_bytes=totals[category][2],
                resident=category not in ("table", "vision", "mtp"),
            )
            for category in sorted(totals, key=order.index)
        ),
    )


def weights_of(checkpoint: Checkpoint) -> list[lint.Stored]:
    """The weights of a checkpoint's headers. Raises Refusal (code 4) where they are not whole."""
    if not is_target(checkpoint.model_type, checkpoint.architectures):
        raise Refusal(
            f"{checkpoint.path} is not a qwen4_exp model, whose weights this command knows",
            "point FLASHNEXT_MODEL at a Qwen3.8-Flash-Next checkpoint, or look at --demo",
            Exit.CHECKPOINT,
        )
    found = lint.Findings()
    stored = lint.weights_of(checkpoint, found)
    lint.refuse(lint.Report(path=checkpoint.path, findings=found.all()))
    return stored


def unread(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """(weights, bytes) of the vision tower and the draft head: in the checkpoint, but not loaded for text.

    Weights are 0, which is printed as unknown, where the architecture does not explain every tensor of them.
    """
    out: dict[str, tuple[int, int]] = {}
    for name, nbytes in checkpoint.tensors.sizes():
        # Nine names of ten are experts of the text model, for which the patterns need not be tried.
        if name.startswith(("mtp.", "model.mtp.")) or "visual." in name:
            category = category_of(name)
            if category in ("mtp", "vision"):
                out[category] = 0, out.get(category, (0, 0))[1] + nbytes
    for item in lint.unloaded(checkpoint):
        category = _category(item.part)
        weights, bytes_ = out[category]
        out[category] = weights + item.part.elements // item.part.count * len(item.names), bytes_
    return out


# --- the demo ---------------------------------------------------------------------------------------------------------

DEMO_ALLOCATION = (
    "experts INT4 g128; linear attention, attention and shared experts INT6 g128; hyper-connection INT8 (down g128, up g64); "
    "embeddings and head INT8 g128; everything else BF16"
)


def demo() -> tuple[list[lint.Stored], TextConfig]:
    """The published model's shapes in DEMO_ALLOCATION, without a file."""
    doc = dict(data("published")["text_config"])
    doc["layer_types"] = doc["layer_types"]["repeat"] * doc["layer_types"]["times"]
    text = read_text_config(doc, "published.yaml")
    return [
        lint.Stored(part=part, form=_demo_form(part), names=tuple(part.names()))
        for part in parts(text, "model.language_model.")
    ], text


def _demo_form(part: Part) -> lint.Form:
    leaf = part.name.rpartition(".")[2]
    plain = part.kind not in QUANTIZABLE or leaf in ("in_proj_a", "in_proj_b", "block_inject_weight", "index_qk_proj")
    if plain or ".ple." in part.name:
        return lint.Form(None, 0, None, "F32" if leaf in ("A_log", "dt_bias") else "BF16")
    bits = {"experts": 4, "embed": 8, "head": 8}.get(part.kind, 8 if "hyper_connection" in part.name else 6)
    size = 64 if leaf == "input_mix_weight_up" else 128
    return lint.Form(bits, part.shape[1] // size, None if 32 % bits == 0 else False, "I32")


# --- what if ----------------------------------------------------------------------------------------------------------

_SPEC = re.compile(r"(?:(bf16|int[234568])?)(?:-?(g[0-9]{1,5}|channel))?")


def what_if(stored: Sequence[lint.Stored], wish: str) -> list[lint.Stored]:
    """The weights with one category stored otherwise: `hyper_connection=bf16`, `experts=g64`, `attention=int8-g64`.

    It is applied to the category's packed matrices, or to all that may be packed where none is. Raises Refusal (code 2).
    """
    category, _, spec = wish.partition("=")
    found = _SPEC.fullmatch(spec.strip().lower())
    if not found or not any(found.groups()) or (found[1] == "bf16" and found[2]):
        raise Refusal(
            f"--what-if {wish[:60]!r} is not CATEGORY=FORM",
            "write for example hyper_connection=bf16, experts=g64 or attention=int8-g64",
            Exit.USAGE,
        )
    category = category.strip()
    mine = [i for i in stored if i.part.kind in QUANTIZABLE and _category(i.part) == category]
    if not mine:
        names = sorted({_category(i.part) for i in stored if i.part.kind in QUANTIZABLE})
        raise Refusal(
            f"--what-if: {category[:40]!r} is no category with matrices that can be stored otherwise",
            f"name one of {', '.join(names)}",
            Exit.USAGE,
        )
    packed = [i for i in mine if i.form.bits is not None] or mine
    changed = {i.part.name for i in packed}
    return [_changed(i, found[1], found[2]) if i.part.name in changed else i for i in stored]


def _changed(item: lint.Stored, kind: str | None, size: str | None) -> lint.Stored:
    if kind == "bf16":
        return replace(item, form=lint.Form(None, 0, None, "BF16"))
    inputs = item.part.shape[1]
    bits = int(kind[3:]) if kind else item.form.bits
    if bits is None:
        raise Refusal(f"--what-if: {item.part.name} is not packed", "name bits too, such as int8-g64", Exit.USAGE)
    if size is None:
        groups = item.form.groups or 1
    else:
        each = inputs if size == "channel" else int(size[1:])
        if not each or inputs % each:
            raise Refusal(
                f"--what-if: groups of {each} do not divide the {inputs} inputs of {item.part.name}",
                "name a group size that divides them, or channel",
                Exit.USAGE,
            )
        groups = inputs // each
    return replace(item, form=lint.Form(bits, groups, None if 32 % bits == 0 else False, "I32"))


# --- output -----------------------------------------------------------------------------------------------------------


def _table(title: str, *columns: str) -> Table:
    t = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for at, column in enumerate(columns):
        t.add_column(column, justify="left" if at == 0 else "right")
    return t


def show(account: Account, out: Console, before: Account | None = None) -> None:
    """Print the account; with `before`, what changed against it."""
    out.print(f"Counted from {account.origin}")
    t = _table("", "category", "weights", "GiB", "bits/weight", "on cards", "MB per token", "of a token")
    for r in account.rows:
        share = r.touched_bytes / account.touched_bytes if r.resident and account.touched_bytes else 0
        t.add_row(
            r.category,
            f"{r.weights / 1e9:,.3f} B" if r.weights else "-",
            f"{r.bytes / GIB:,.3f}",
            f"{r.bits_per_weight:.3f}" if r.weights else "-",
            f"{r.bytes / account.resident_bytes:.2%}" if r.resident else "-",
            f"{r.touched_bytes / 1e6:,.3f}",
            f"{share:.1%}" if r.resident else "-",
        )
    out.print(t)
    out.print(
        f"On the cards: {account.resident_weights / 1e9:.2f} B weights, {format_gib(account.resident_bytes)}; body "
        f"{account.body_bits_per_weight:.3f} bits/weight (all but embeddings and head); "
        f"{account.touched_bytes / 1e9:.2f} GB read per decoded token"
    )
    if before is not None:
        more = account.resident_bytes - before.resident_bytes
        touched = account.touched_bytes - before.touched_bytes
        out.print(
            f"Against what is stored: {more / GIB:+.2f} GiB on the cards, {touched / 1e9:+.2f} GB per token, "
            f"{8 * more / account.resident_weights:+.3f} bits/weight over all on the cards"
        )
        for r in account.rows:
            was = before.row(r.category)
            if was is not None and was.bytes != r.bytes:
                delta = r.bits_per_weight - was.bits_per_weight
                out.print(f"  {r.category}: {delta:+.3f} bits/weight, {(r.bytes - was.bytes) / GIB:+.3f} GiB")
    t = _table("Tokens a second at most, one stream", "card", "GB/s", "tok/s")
    for name, bandwidth, rate in account.roofline():
        t.add_row(name, f"{bandwidth / 1e9:,.0f}", f"{rate:,.0f}")
    out.print()
    out.print(t)


# (fill, text on it). Told apart by people who do not see red or green, and by their grey.
_COLOURS = (
    ("#004488", "white"),
    ("#ddaa33", "black"),
    ("#bb5566", "white"),
    ("#88ccee", "black"),
    ("#117733", "white"),
    ("#ccddaa", "black"),
    ("#882255", "white"),
    ("#bbbbbb", "black"),
    ("#555555", "white"),
    ("#ee8866", "black"),
    ("#222255", "white"),
)
_CHARACTER_PX = 6.5  # of 11 px sans-serif, on the wide side


def svg(account: Account) -> str:
    """A figure of two bars, bytes on the cards and bytes read per token, each cut by category, the largest first.

    Written by hand: two stacked bars are forty lines, a plotting library is a hundred megabytes in the image. It has its own
    white ground, so that it reads the same on a dark page.
    """
    width, left, bar, line = 900, 150, 46, 18
    rows = sorted((r for r in account.rows if r.resident), key=lambda r: -max(r.bytes, r.touched_bytes))
    colour = {r.category: _COLOURS[at % len(_COLOURS)] for at, r in enumerate(rows)}
    title = textwrap.wrap(account.origin, 125, break_on_hyphens=False)
    top = 14 + line * len(title)
    height = top + 2 * (bar + 20) + 20 * -(-len(rows) // 3) + 14
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" fill="black">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *(f'<text x="10" y="{20 + line * at}" font-size="12">{escape(t)}</text>' for at, t in enumerate(title)),
    ]
    bars = (
        ("bytes", f"on the cards: {format_gib(account.resident_bytes)}", account.resident_bytes),
        ("touched_bytes", f"read a token: {account.touched_bytes / 1e9:.2f} GB", account.touched_bytes),
    )
    for at, (field, label, total) in enumerate(bars):
        y, x = top + at * (bar + 20), float(left)
        out.append(f'<text x="10" y="{y + bar // 2 + 4}">{label}</text>')
        for r in rows:
            size = getattr(r, field)
            share = size / total if total else 0
            w = (width - left - 10) * share
            fill, ink = colour[r.category]
            out.append(
                f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="{bar}" fill="{fill}" stroke="white" stroke-width="0.5">'
                f"<title>{r.category}: {size:,} bytes</title></rect>"
            )
            words = r.category.replace("_", " ")
            if len(words) * _CHARACTER_PX < w:
                for up, text in ((-3, words), (12, f"{share:.0%}")):
                    middle = f'x="{x + w / 2:.2f}" y="{y + bar // 2 + up}" text-anchor="middle"'
                    out.append(f'<text {middle} fill="{ink}">{text}</text>')
            x += w
    for at, r in enumerate(rows):
        x, y = 10 + at % 3 * 297, top + 2 * (bar + 20) + 20 * (at // 3)
        text = f"{r.category}: {r.bytes / GIB:.2f} GiB, {r.touched_bytes / 1e6:,.1f} MB a token"
        out.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour[r.category][0]}"/>')
        out.append(f'<text x="{x + 18}" y="{y + 10}">{text}</text>')
    return "\n".join([*out, "</svg>", ""])
