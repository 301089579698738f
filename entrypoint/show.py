"""How a plan is printed for a person: tables that fit a terminal, sizes in GiB, and the very line that would be run."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from .plan import Plan
from .units import format_gib


def console(stderr: bool = False) -> Console:
    """A console that never breaks words of a pipe's reader: no wrapping below 100 columns."""
    c = Console(stderr=stderr, highlight=False)
    return c if c.is_terminal else Console(stderr=stderr, highlight=False, width=160, soft_wrap=True)


@contextmanager
def byte_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A call (bytes done, bytes in all) that shows rate and time left on stderr: a bar, or a line in 10 s where it is no
    terminal."""
    out = console(stderr=True)
    if out.is_terminal:
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=out,
        )
        task = bar.add_task(what, total=None)
        with bar:
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    begun = last = time.monotonic()

    def line(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 10 and done:
            last = now
            rate = done / (now - begun)
            left_s = (total - done) / rate
            out.print(
                f"{what}: {format_gib(done)} of {format_gib(total)}, {rate / 1e6:,.0f} MB/s, {left_s:,.0f} s left"
            )

    yield line


def _table(title: str, *columns: str) -> Table:
    t = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for c in columns:
        t.add_column(c, overflow="fold")
    return t


def show(plan: Plan, out: Console, explain: bool = False) -> None:
    """Print `plan`: settings with their reasons, what they hold, and with `explain` the budget line by line."""
    out.print(Text(f"Plan for {plan.model_name} on {plan.device}; weights from {plan.origin}", style="bold"))
    for kind, title in (("env", "Environment"), ("arg", "Arguments of vllm serve")):
        t = _table(title, "name", "value", "from", "why")
        for s in plan.settings:
            if s.kind == kind:
                t.add_row(s.name, s.value or "", s.source, s.reason)
        out.print()
        out.print(t)
    if plan.capacity.get("blocks"):
        c = plan.capacity
        out.print()
        out.print(
            f"Holds {c['full_requests']} requests of {c['context']:,} tokens at once: {c['blocks']} blocks of {c['block_size']:,} tokens; "
            f"{format_gib(c['host_pool_bytes'])} of K/V in host RAM."
        )
    if explain:
        _budget(plan, out)
    for note in plan.notes:
        out.print(f"Note: {note}.")
    out.print()
    out.print(Text("Command", style="bold"))
    for name, value in plan.env.items():
        out.print(f"{name}={shlex.quote(value)} \\", soft_wrap=True)
    out.print("vllm " + " ".join(map(shlex.quote, plan.argv)), soft_wrap=True)


def _budget(plan: Plan, out: Console) -> None:
    for st in plan.stages:
        t = _table(f"Card {st.gpu}: {st.name}, layers {st.layers[0]}-{st.layers[1]}", "bytes", "GiB", "what", "from")
        for line in st.lines:
            t.add_row(f"{line.bytes:,}", format_gib(line.bytes), line.what, line.source)
        t.add_row(f"{st.used_bytes:,}", format_gib(st.used_bytes), "sum", "")
        t.add_row(
            f"{st.available_bytes - st.used_bytes:,}",
            format_gib(st.available_bytes - st.used_bytes),
            "left of what is free",
            "",
        )
        out.print()
        out.print(t)
    if plan.host:
        t = _table("Host RAM", "bytes", "GiB", "what", "from")
        for line in plan.host:
            t.add_row(f"{line.bytes:,}", format_gib(line.bytes), line.what, line.source)
        out.print()
        out.print(t)
