"""What a build or a transfer is doing, from the event streams of BuildKit and the engine.

`BuildLog` and `LayerSum` turn events into state and know nothing of terminals. `show_build` and `show_transfer` draw
that state on stderr: a live table on a terminal, whole lines elsewhere, nothing when asked. Results go to stdout, so a
pipe never sees a bar.

BuildKit's events (`--progress rawjson`, one object a line): `vertexes` are steps, sent again whenever they change;
`statuses` are transfers within a step; `logs` are base64 chunks of a step's output. What buildx itself has to say (a
parse error, the last ERROR) comes between them as plain text.
"""

from __future__ import annotations

import base64
import binascii
import collections
import contextlib
import dataclasses
import datetime
import enum
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator

import rich.console
import rich.live
import rich.progress
import rich.table
import rich.text

KEPT_LINES = 20  # of a failing step; the cause stands in the last ones


class Mode(str, enum.Enum):
    """How progress is shown on stderr."""

    AUTO = "auto"
    TTY = "tty"
    PLAIN = "plain"
    NONE = "none"

    def settle(self) -> Mode:
        """AUTO becomes TTY on a terminal that can move its cursor, else PLAIN."""
        if self is not Mode.AUTO:
            return self
        return Mode.TTY if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else Mode.PLAIN


def timestamp_s(text: str) -> float:
    """RFC 3339 UTC with any number of fraction digits -> unix seconds."""
    whole, _, fraction = text.rstrip("Z").partition(".")
    moment = datetime.datetime.strptime(whole, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=datetime.timezone.utc)
    return moment.timestamp() + float(f"0.{fraction or 0}")


@dataclasses.dataclass
class Step:
    """One BuildKit vertex: what it is called, when it ran (unix seconds), how it ended, its last output lines."""

    name: str
    started_s: float | None = None
    completed_s: float | None = None
    cached: bool = False
    error: str | None = None
    transferred_bytes: int = 0
    lines: collections.deque[str] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=KEPT_LINES))
    unfinished: dict[int, str] = dataclasses.field(default_factory=dict)
    last_error_line: str = ""

    @property
    def internal(self) -> bool:
        """BuildKit's own errands (loading the Dockerfile, metadata), of interest only when they fail."""
        return self.name.startswith("[internal]")

    @property
    def running(self) -> bool:
        return self.started_s is not None and self.completed_s is None

    def seconds(self, now_s: float | None = None) -> float:
        """How long it ran, until `now_s` if it still runs."""
        if self.started_s is None:
            return 0.0
        end_s = self.completed_s if self.completed_s is not None else now_s
        return max(0.0, (end_s or self.started_s) - self.started_s)

    def add_output(self, text: str, stream: int) -> None:
        """Take a piece of output; `stream` is 1 or 2, as file descriptors are numbered. Pieces end anywhere."""
        *whole, self.unfinished[stream] = (self.unfinished.get(stream, "") + text).split("\n")
        # a carriage return redraws a line (pip's bars): only what stands at the end counts
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in whole]
        self.lines.extend(lines)
        if stream == 2:
            self.last_error_line = next((x for x in reversed(lines) if x.strip()), self.last_error_line)

    def last_lines(self) -> list[str]:
        """Up to KEPT_LINES lines of output, oldest first."""
        rest = [text for text in self.unfinished.values() if text.strip()]
        return [*self.lines, *rest][-KEPT_LINES:]


class BuildLog:
    """The state of a build, fed line by line."""

    def __init__(self) -> None:
        self.steps: dict[str, Step] = {}
        self.warnings: list[str] = []
        self.plain: collections.deque[str] = collections.deque(maxlen=100)

    def feed(self, line: str) -> list[Step]:
        """Take one line of the stream; the steps it touched, each once."""
        line = line.rstrip("\n")
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            if line.strip():
                self.plain.append(line)
            return []
        touched: dict[str, Step] = {}
        for vertex in event.get("vertexes") or ():
            step = touched[vertex["digest"]] = self._step(vertex["digest"])
            step.name = vertex.get("name", step.name)
            step.cached = step.cached or bool(vertex.get("cached"))
            step.error = vertex.get("error") or step.error
            # the engine's own builder sends some steps twice: the later run replaces the earlier one
            step.started_s = timestamp_s(vertex["started"]) if vertex.get("started") else None
            step.completed_s = timestamp_s(vertex["completed"]) if vertex.get("completed") else None
        for status in event.get("statuses") or ():
            step = touched[status["vertex"]] = self._step(status["vertex"])
            step.transferred_bytes = max(step.transferred_bytes, int(status.get("current") or 0))
        for log in event.get("logs") or ():
            step = touched[log["vertex"]] = self._step(log["vertex"])
            with contextlib.suppress(binascii.Error):
                step.add_output(base64.b64decode(log["data"]).decode("utf-8", "replace"), log.get("stream", 1))
        for warning in event.get("warnings") or ():
            with contextlib.suppress(binascii.Error):
                self.warnings.append(base64.b64decode(warning.get("short") or "").decode("utf-8", "replace"))
        return list(touched.values())

    def _step(self, digest: str) -> Step:
        return self.steps.setdefault(digest, Step(name=digest))

    @property
    def visible(self) -> list[Step]:
        return [s for s in self.steps.values() if not s.internal]

    @property
    def failed(self) -> Step | None:
        """The step whose failure ended the build. Steps cancelled because of it carry an error too."""
        broken = [s for s in self.steps.values() if s.error]
        return next((s for s in broken if "context canceled" not in (s.error or "")), broken[0] if broken else None)

    @property
    def complaint(self) -> str:
        """buildx's own last word on a failure, without its prefixes; "" where it said none."""
        said = [line for line in self.plain if line.startswith("ERROR:")]
        text = said[-1] if said else (self.plain[-1] if self.plain else "")
        return re.sub(r"^(ERROR: |failed to build: |failed to solve: )*", "", text)


class LayerSum:
    """Bytes of a push or pull, summed over its layers."""

    def __init__(self) -> None:
        self.layers: dict[str, tuple[int, int]] = {}
        self.words: dict[str, str] = {}

    def feed(self, event: dict) -> None:
        """Take one event of the engine's stream."""
        layer, status = event.get("id"), event.get("status", "")
        if not layer or "progressDetail" not in event:
            return
        detail = event["progressDetail"] or {}
        self.words[layer] = status
        done, total = self.layers.get(layer, (0, 0))
        if status in ("Downloading", "Pushing") and detail.get("current") is not None:
            # the compressed size is not known beforehand: a push may end above its total
            done = int(detail["current"])
            total = max(int(detail.get("total") or 0), total, done)
        elif status in ("Download complete", "Pull complete", "Pushed", "Verifying Checksum"):
            done = total
        self.layers[layer] = (done, total)

    @property
    def done_bytes(self) -> int:
        return sum(done for done, _ in self.layers.values())

    @property
    def total_bytes(self) -> int:
        return sum(total for _, total in self.layers.values())

    def summary(self) -> str:
        """ "extracting 2, pull complete 7": how many layers are where."""
        return ", ".join(f"{word.lower()} {n}" for word, n in sorted(collections.Counter(self.words.values()).items()))


def human_bytes(count: int) -> str:
    """Decimal units, as registries and `docker images` print them."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _short(text: str, width: int) -> str:
    # a RUN's mounts come before what it does, and push it off the line
    text = " ".join(re.sub(r"--(mount|network|security)=\S+", "", text).split())
    return text if len(text) <= width else text[: width - 1] + "…"


@contextlib.contextmanager
def show_build(log: BuildLog, mode: Mode) -> Iterator[Callable[[list[Step]], None]]:
    """Draw `log` while the body runs. The body calls what it is given with the steps each line touched."""
    mode = mode.settle()
    began_s = time.time()
    if mode is Mode.TTY:
        console = rich.console.Console(stderr=True, highlight=False, force_terminal=True)
        with rich.live.Live(
            get_renderable=lambda: _build_table(log, began_s, console.width),
            console=console,
            refresh_per_second=4,
            transient=True,
        ):
            yield lambda steps: None
        return
    said: set[tuple[int, str]] = set()

    def line(steps: list[Step]) -> None:
        for step in steps:
            word = _ending(step)
            if mode is Mode.NONE or (step.internal and not step.error) or (id(step), word) in said or not word:
                continue
            said.add((id(step), word))
            took = f" {step.seconds():.1f} s" if step.completed_s and not step.cached and not step.error else ""
            print(
                f"[{time.time() - began_s:6.1f} s] {word:7}{took:8} {_short(step.name, 100)}",
                file=sys.stderr,
                flush=True,
            )

    yield line


def _ending(step: Step) -> str:
    if step.error:
        return "FAILED"
    if step.completed_s is not None:
        return "cached" if step.cached else "done"
    # steps that end at once would only double the lines
    return "start" if step.running and step.name.startswith("[") and "FROM" not in step.name else ""


def _build_table(log: BuildLog, began_s: float, width: int) -> rich.table.Table:
    now_s = time.time()
    steps = log.visible
    done = sum(s.completed_s is not None for s in steps)
    table = rich.table.Table.grid(padding=(0, 1))
    table.add_row(rich.text.Text(f"building {done}/{len(steps)} steps", "bold"), f"{now_s - began_s:.0f} s")
    for step in steps:
        if step.error:
            table.add_row(rich.text.Text("✗ " + _short(step.name, width - 14), "red"), f"{step.seconds():.1f} s")
        elif step.running:
            size = f" {human_bytes(step.transferred_bytes)}" if step.transferred_bytes > 1_000_000 else ""
            table.add_row(
                rich.text.Text("• " + _short(step.name, width - 28) + size, "cyan"), f"{step.seconds(now_s):.1f} s"
            )
            tail = step.last_lines()[-1:]
            if tail:
                table.add_row(rich.text.Text("  " + _short(tail[0], width - 14), "dim"), "")
    return table


@contextlib.contextmanager
def show_transfer(label: str, mode: Mode) -> Iterator[Callable[[int, int | None, str], None]]:
    """Draw a transfer while the body runs; it calls what it is given with (done_bytes, total_bytes or None, note)."""
    mode = mode.settle()
    if mode is Mode.TTY:
        columns = (
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.DownloadColumn(),
            rich.progress.TransferSpeedColumn(),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TextColumn("[dim]{task.fields[note]}"),
        )
        console = rich.console.Console(stderr=True, force_terminal=True)
        with rich.progress.Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(label, total=None, note="")
            yield lambda done, total, note="": bar.update(task, completed=done, total=total or None, note=note)
        return
    began_s = last_s = time.monotonic()

    def line(done: int, total: int | None, note: str = "") -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if mode is Mode.NONE or now_s - last_s < 5:
            return
        last_s = now_s
        of = f" of {human_bytes(total)}" if total else ""
        print(
            f"[{now_s - began_s:6.1f} s] {label}: {human_bytes(done)}{of} {note}".rstrip(), file=sys.stderr, flush=True
        )

    if mode is Mode.PLAIN:
        print(f"[   0.0 s] {label}", file=sys.stderr, flush=True)
    yield line
