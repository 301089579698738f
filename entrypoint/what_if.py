"""Decides what `plan --what-if` changes, and sets two plans side by side: boxes or wishes, of which one may be refused.

Rules
1. `KEY=VALUE`, several with commas between them; a comma that no `KEY=` follows belongs to the value (layer_partition=12,12,24).
2. KEY is a word of the simulated box (simulate, ram, cgroup, disk, wsl), a wish, or the argument of vllm that a wish becomes
   (max_num_seqs); `-` and `_` are one. Anything else is refused with the known keys.
3. Of two plans the rows that differ are shown, and always capacity and the bytes left on each rank. Of a rank that only one side
   has, its card and layers stand for its budget; beside a refusal, capacity and what is left stand for the whole plan.
4. A refusal by the plan (code 3) or of its table file (code 5) is a side like any other. A malformed wish is a mistake and ends the command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .errors import Exit, Refusal
from .plan import Plan
from .show import NARROW, plan_dict, row_name, speed_range
from .speed import Speed
from .terminal import tidy
from .units import GIB, format_gib
from .wishes import table

SCHEMA = 1
BOX_KEYS = ("simulate", "ram", "cgroup", "disk", "wsl")
# Arguments of vllm serve by the wish that decides them.
ARGUMENTS: Mapping[str, str] = {
    "max_num_seqs": "streams",
    "max_model_len": "context",
    "max_num_batched_tokens": "chunk",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "served_model_name": "model_name",
    "shutdown_timeout": "drain",
}


def keys() -> list[str]:
    """Every key, in the order in which they are told."""
    return [*BOX_KEYS, *(w.name for w in table()), *ARGUMENTS]


def parse(text: str) -> dict[str, str]:
    """Key of the box or wish -> raw value. Raises Refusal (code 2) for anything else, and for a key that is given twice."""
    out: dict[str, str] = {}
    for part in re.split(r",(?=\s*[A-Za-z][A-Za-z_-]*\s*=)", text):
        name, equals, value = part.partition("=")
        key = name.strip().lower().lstrip("-").replace("-", "_")
        key = ARGUMENTS.get(key, key)
        if not equals or not value.strip():
            raise Refusal(
                f"--what-if {text[:80]!r}: {part.strip()[:40]!r} is not KEY=VALUE",
                "write for example ram=64GiB, simulate=4x3090 or max_num_seqs=8,ram=64GiB",
                Exit.USAGE,
            )
        if key not in keys():
            raise Refusal(
                f"--what-if does not know {name.strip()[:40]!r}", f"name one of {', '.join(keys())}", Exit.USAGE
            )
        if key in out:
            raise Refusal(f"--what-if gives {key} twice", "keep one", Exit.USAGE)
        out[key] = value.strip()
    return out


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two: a plan with its speed (None where it is not known), or the refusal."""

    label: str
    plan: Plan | None = None
    speed: Speed | None = None
    refusal: Refusal | None = None

    def as_dict(self) -> dict[str, Any]:
        r = self.refusal
        return {
            "label": self.label,
            "plan": None if self.plan is None else plan_dict(self.plan, self.speed),
            "refusal": None if r is None else {"error": r.message, "fix": r.fix, "code": int(r.code)},
        }


@dataclass(frozen=True)
class Row:
    """One figure of both sides; None where a side has none. `unit`: bytes, or '' for what is printed as it is."""

    section: str
    what: str
    base: Any
    other: Any
    unit: str = ""


def _figures(side: Side) -> Iterator[tuple[str, str, Any, str]]:
    """(section, what, value, unit) of one side, in the order of the rows."""
    if side.refusal is not None:
        yield "refused", "error", side.refusal.message, ""
        yield "refused", "fix", side.refusal.fix, ""
    if side.plan is None:
        return
    for name, value in side.plan.capacity.items():
        shown = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        yield (
            "capacity",
            name.removesuffix("_bytes").replace("_", " "),
            shown,
            "bytes" if name.endswith("_bytes") else "",
        )
    for rank, st in enumerate(side.plan.stages):
        yield "left", f"rank {rank}", st.available_bytes - st.used_bytes, "bytes"
    for rank, st in enumerate(side.plan.stages):
        yield "stages", f"rank {rank} card", st.name, ""
        yield "stages", f"rank {rank} layers", f"{st.layers[0]}-{st.layers[1]}", ""
        yield "stages", f"rank {rank} free", st.available_bytes, "bytes"
        for line in st.lines:
            yield "budget", f"rank {rank} {row_name(line.what)}", line.bytes, "bytes"
    if side.plan.table is not None:
        yield "table", "rows", side.plan.table.words, ""
    for line in side.plan.host:
        yield "host RAM", line.what, line.bytes, "bytes"
    if side.speed is not None:
        s = side.speed
        yield "speed", "tokens/s, estimate", speed_range(s), ""
        yield "speed", "tokens/s at most", int(s.most_tokens_s), ""
    for s in side.plan.settings:
        yield "settings", s.name, s.value if s.value is not None else "set", ""
    for note in side.plan.notes:
        yield "notes", "note", note, ""


def rows(base: Side, other: Side) -> list[Row]:
    """Rule 3. A figure that only one side has differs."""
    sides: list[dict[tuple[str, str, int], tuple[Any, str]]] = []
    for side in (base, other):
        found: dict[tuple[str, str, int], tuple[Any, str]] = {}
        for section, what, value, unit in _figures(side):
            # Notes have no names: a note is its own key, so that one that both sides have is one row.
            at = 0
            key = (section, value if section == "notes" else what, at)
            while key in found:
                at += 1
                key = (*key[:2], at)
            found[key] = (value, unit)
        sides.append(found)
    order = ("refused", "capacity", "left", "speed", "stages", "budget", "table", "host RAM", "settings", "notes")
    every = sorted({**sides[0], **sides[1]}, key=lambda k: order.index(k[0]))
    shared = {f"rank {n} " for n in range(min(len(side.plan.stages) if side.plan else 0 for side in (base, other)))}
    whole = base.plan is not None and other.plan is not None
    out = []
    for key in every:
        if not whole and key[0] not in order[:4]:
            continue
        if key[0] == "budget" and not any(key[1].startswith(rank) for rank in shared):
            continue
        (a, unit), (b, other_unit) = sides[0].get(key, (None, "")), sides[1].get(key, (None, ""))
        if a != b or key[0] in ("refused", "capacity", "left"):
            out.append(Row(key[0], "note" if key[0] == "notes" else key[1], a, b, unit or other_unit))
    return out


def as_dict(base: Side, other: Side) -> dict[str, Any]:
    """What `plan --what-if ... --json` prints; docs/plan.md has the keys. Sizes are bytes."""
    return {
        "schema": SCHEMA,
        "base": base.as_dict(),
        "other": other.as_dict(),
        "rows": [vars(row) for row in rows(base, other)],
    }


def _cell(value: Any, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return f"{format_gib(value)} ({value:,})" if abs(value) >= GIB // 100 else f"{value:,} bytes"
    return f"{value:,}" if isinstance(value, int) else str(value)


def show(base: Side, other: Side, out: Console) -> None:
    """Print the rows: two columns, or one below the other where the terminal is narrow."""
    with tidy(out):
        found = rows(base, other)
        if out.width < NARROW:
            section = None
            out.print(Text(f"A: {base.label}\nB: {other.label}", style="bold"))
            for row in found:
                if row.section != section:
                    section = row.section
                    out.print(Text(f"\n{section}", style="bold"))
                if row.base == row.other:
                    out.print(Text(f"{row.what}: {_cell(row.base, row.unit)}, both"), soft_wrap=False)
                    continue
                out.print(Text(row.what), soft_wrap=False)
                for mark, value in (("A", row.base), ("B", row.other)):
                    out.print(Text(f"  {mark}: {_cell(value, row.unit)}"), soft_wrap=False)
            return
        t = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("", "", base.label, other.label):
            t.add_column(Text(name), overflow="fold")
        section = None
        for row in found:
            if section is not None and row.section != section:
                t.add_row()
            t.add_row(
                Text(row.section if row.section != section else "", style="dim"),
                Text(row.what),
                Text(_cell(row.base, row.unit)),
                Text(_cell(row.other, row.unit)),
            )
            section = row.section
        out.print(t)
