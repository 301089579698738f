"""How a plan is printed for a person: tables that fit the terminal, sizes in GiB, and the very line that would be run.

Below `NARROW` columns nothing is a wide table: settings and budget lines stand one below the other.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .plan import Line, Plan, Setting, Stage
from .speed import LABEL, Speed
from .terminal import tidy
from .units import GIB, format_gib

NARROW = 100


def _table(title: str, *columns: str, right: int = 0) -> Table:
    """A table without a frame; the first `right` columns are numbers."""
    t = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for at, c in enumerate(columns):
        t.add_column(c, overflow="fold", justify="right" if at < right else "left", no_wrap=at < right)
    return t


def plan_dict(plan: Plan, speed: Speed | None) -> dict[str, Any]:
    """What `plan --json` prints; docs/plan.md has the keys."""
    return {**plan.as_dict(), "speed": None if speed is None else speed.as_dict()}


def show(
    plan: Plan, out: Console, explain: bool = False, speed: Speed | None = None, no_speed: str | None = None
) -> None:
    """Print `plan`: stages, capacity, place of the table, host RAM, speed, settings and command; with `explain` every number's provenance and bytes.

    `no_speed` says why there is no `speed`; both None leaves the line out.
    """
    with tidy(out):
        out.print(Text(f"Plan for {plan.model_name} on {plan.device}; weights from {plan.origin}", style="bold"))
        if plan.stages:
            _budgets(plan, out) if explain else _stages(plan, out)
        _capacity(plan, out)
        if plan.table is not None:
            out.print(f"\nN-gram table: {plan.table.reason}.")
        if plan.host:
            _lines(out, "Host RAM", plan.host, explain)
        if speed is not None:
            _speed(speed, out, explain)
        elif no_speed is not None:
            out.print(f"\nSpeed: not estimated, {no_speed}.")
        for kind, title in (("env", "Environment"), ("arg", "Arguments of vllm serve")):
            _settings(out, title, [s for s in plan.settings if s.kind == kind], explain)
        if plan.notes:
            out.print()
        for note in plan.notes:
            out.print(f"Note: {note}.")
        out.print()
        out.print(Text("Command", style="bold"))
        for name, value in plan.env.items():
            out.print(Text(f"{name}={shlex.quote(value)} \\"), soft_wrap=True)
        out.print(Text("vllm " + " ".join(map(shlex.quote, plan.argv))), soft_wrap=True)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:,.2f}"


def row_name(what: str) -> str:
    """A budget line's name without the layers of one stage, so that stages share a row."""
    return re.sub(r",?( of)? layers [0-9]+-[0-9]+", "", what)


def _stages(plan: Plan, out: Console) -> None:
    """One row a budget line and one column a stage, in GiB; where that is too wide, one short table a stage."""
    names = _in_order([[row_name(line.what) for line in st.lines] for st in plan.stages])
    label = max(map(len, [*names, "free on the card"]))
    if out.width < label + 10 * len(plan.stages):
        for rank, st in enumerate(plan.stages):
            _lines(out, f"Rank {rank}: {_where(st)}, GiB", st.lines, False, st.available_bytes, "free on the card")
        return
    out.print()
    for rank, st in enumerate(plan.stages):
        out.print(f"Rank {rank}: {_where(st)}")
    t = Table(
        title="Budget in GiB", title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim"
    )
    t.add_column("")
    for rank in range(len(plan.stages)):
        t.add_column(f"rank {rank}", justify="right", no_wrap=True)
    for name in names:
        sums = [sum(line.bytes for line in st.lines if row_name(line.what) == name) for st in plan.stages]
        t.add_row(name, *(_gib(n) if n else "-" for n in sums))
    t.add_row("sum", *(_gib(st.used_bytes) for st in plan.stages))
    t.add_row("free on the card", *(_gib(st.available_bytes) for st in plan.stages))
    t.add_row("left", *(_gib(st.available_bytes - st.used_bytes) for st in plan.stages))
    out.print()
    out.print(t)


def _in_order(lists: Sequence[Sequence[str]]) -> list[str]:
    """Every name once; one that only some lists have stands after the name before it there."""
    out: list[str] = []
    for names in lists:
        at = 0
        for name in names:
            if name not in out:
                out.insert(at, name)
            at = out.index(name) + 1
    return out


def _where(st: Stage) -> str:
    return f"card {st.gpu} ({st.name}), layers {st.layers[0]}-{st.layers[1]}"


def _budgets(plan: Plan, out: Console) -> None:
    for rank, st in enumerate(plan.stages):
        _lines(out, f"Rank {rank}: {_where(st)}", st.lines, True, st.available_bytes, "free on the card")


def _lines(
    out: Console, title: str, lines: Sequence[Line], explain: bool, available: int | None = None, name: str = ""
) -> None:
    """Budget lines in bytes that add up and their source (`explain`), or in GiB; then the sum and what is left of `available`."""
    rows = [(line.bytes, line.what, line.source) for line in lines]
    total = sum(line.bytes for line in lines)
    rows.append((total, "sum", ""))
    if available is not None:
        rows += [(available, name, ""), (available - total, "left of what is free", "")]
    out.print()
    if not explain:
        t = _table(title, "GiB", "what", right=1)
        for size, what, _ in rows:
            t.add_row(_gib(size), what)
    elif out.width < NARROW:
        t = _table(title, "bytes", "what, from", right=1)
        for size, what, source in rows:
            t.add_row(f"{size:,}", what + (f" ({source})" if source else ""))
    else:
        t = _table(title, "bytes", "GiB", "what", "from", right=2)
        for size, what, source in rows:
            t.add_row(f"{size:,}", _gib(size), what, source)
    out.print(t)


def _capacity(plan: Plan, out: Console) -> None:
    c = plan.capacity
    out.print()
    if not c.get("blocks"):
        out.print(f"Runs {c['streams']} requests at a time, each of {c['context']:,} tokens at most.")
        return
    pool = c.get("host_pool_bytes")
    out.print(
        f"Holds {c['full_requests']} requests of {c['context']:,} tokens at once: {c['blocks']} blocks of "
        f"{c['block_size']:,} tokens; " + (f"{format_gib(pool)} of K/V in host RAM." if pool else "K/V on the cards.")
    )
    if c.get("whole_requests_at_once") is not None:
        out.print(
            f"{c['whole_requests_at_once']} of {c['streams']} streams run at once at full length, {c['short_requests_at_once']} "
            f"where they are short. vLLM's own report will say {c['tokens']:,} tokens, {c['concurrency']:.2f}x."
        )


def speed_range(speed: Speed) -> str:
    """'75 to 80': the estimate in steps of 5, the low end rounded down, because it is no better known than that."""
    step = 5 if speed.low_tokens_s >= 20 else 1
    low, high = int(speed.low_tokens_s / step) * step, round(speed.high_tokens_s / step) * step
    return f"{low} to {high}" if high > low else f"{low}"


def _speed(speed: Speed, out: Console, explain: bool) -> None:
    out.print()
    out.print(
        f"Speed: about {speed_range(speed)} tokens/s for one stream ({LABEL}); the cards' bandwidth "
        f"allows {int(speed.most_tokens_s)} at most, {speed.token_bytes / 1e9:.2f} GB are read per token."
    )
    if speed.link_bytes:
        busy = "of an unknown link" if speed.link_busy is None else f"links busy {speed.link_busy:.0%} of the time"
        out.print(f"PCIe: {speed.link_bytes / 1e6:.1f} MB of K/V per token, {busy}.")
    if not explain:
        return
    t = _table("Time of a token by stage", "GB", "GB/s", "ms", "PCIe MB", "PCIe GB/s", "ms", "card", right=6)
    for s in speed.stages:
        link = "?" if s.link_bytes_s is None else f"{s.link_bytes_s / 1e9:.1f}"
        t.add_row(
            f"{s.token_bytes / 1e9:.3f}",
            f"{s.bandwidth_bytes_s / 1e9:,.0f}",
            f"{s.memory_s * 1e3:.2f}",
            f"{s.link_bytes / 1e6:.1f}",
            link,
            f"{s.link_s * 1e3:.2f}" if s.link_bytes_s else "?",
            f"{s.gpu} {s.name}",
        )
    out.print()
    out.print(t)
    out.print(
        f"Bytes of a token: {speed.source}. The range comes from what measured boxes took beside reading weights:"
    )
    for box in speed.as_dict()["measured"]:
        out.print(f"  {box['name']}: {box['tokens_s']:g} tokens/s ({box['source']})")


def _settings(out: Console, title: str, settings: Sequence[Setting], explain: bool) -> None:
    if not settings:
        return
    out.print()
    if out.width < NARROW:
        out.print(Text(title, style="bold"))
        for s in settings:
            out.print(Text(f"{s.name} {s.value or ''}".rstrip() + f"  [{s.source}]"), soft_wrap=False)
            if explain:
                out.print(Padding(Text(s.reason), (0, 0, 0, 4)), soft_wrap=False)
        return
    t = _table(title, "name", "value", "from", *(["why"] if explain else []))
    for s in settings:
        t.add_row(s.name, Text(s.value or ""), s.source, *([Text(s.reason)] if explain else []))
    out.print(t)
