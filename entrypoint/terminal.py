"""How the command line writes to a terminal or a pipe, and how long work shows where it stands.

Into a pipe there are no colours and no trailing blanks, and COLUMNS (160 where it is not set) is the width.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress
from rich.console import Console

from .units import format_gib

_PIPE_WIDTH = 160


def console(stderr: bool = False) -> Console:
    """A console for the terminal, or for a pipe: without colours, and as wide as COLUMNS says."""
    c = Console(stderr=stderr, highlight=False)
    if c.is_terminal:
        return c
    columns = os.environ.get("COLUMNS", "")
    width = max(40, int(columns)) if re.fullmatch(r"[0-9]{1,4}", columns) else _PIPE_WIDTH
    return Console(stderr=stderr, highlight=False, width=width, soft_wrap=True)


@contextmanager
def tidy(out: Console) -> Iterator[None]:
    """Into a pipe, what is printed inside loses the blanks that pad a table's last column."""
    if out.is_terminal:
        yield
        return
    with out.capture() as caught:
        yield
    out.file.write("".join(f"{line.rstrip()}\n" for line in caught.get().splitlines()))
    out.file.flush()


@contextmanager
def byte_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A call (bytes done, bytes in all) that shows rate and time left on stderr: a bar, or a line in 10 s where it is no
    terminal."""
    out = console(stderr=True)
    if out.is_terminal:
        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
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
