"""Decides which boot phase the engine is in from its log, how long that phase may take, and what a failing log means.

Phases and fingerprints are data (`phases.yaml`, `fingerprints.yaml`). `State` is what the healthcheck, the launcher and a person
read: one JSON file, replaced atomically.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from .data import data
from .units import GIB

SCHEMA = 1
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PERCENT = re.compile(r"(?:Loading safetensors checkpoint shards|Capturing CUDA graphs[^:]*):\s+(\d{1,3})%")


def plain(line: str) -> str:
    """`line` without terminal colours."""
    return _ANSI.sub("", line)


@dataclass(frozen=True)
class Phase:
    """A row of `phases.yaml`."""

    phase: str
    label: str
    limit_s: float | None = None
    per_gib_s: float = 0.0
    enter: tuple[re.Pattern[str], ...] = ()

    def longest_s(self, weight_bytes: int, wished_s: float | None) -> float | None:
        """Seconds after which this phase counts as stuck; None for serving."""
        if self.limit_s is None:
            return None
        return wished_s if wished_s is not None else self.limit_s + self.per_gib_s * weight_bytes / GIB


@cache
def phases() -> tuple[Phase, ...]:
    rows = data("phases")
    return tuple(Phase(**{**r, "enter": tuple(re.compile(p) for p in r.get("enter", ()))}) for r in rows)


def phase_named(name: str) -> Phase:
    return next(p for p in phases() if p.phase == name)


class Follower:
    """Reads a log line by line and says where the boot is. Phases only go forward."""

    def __init__(self, start: str = "launching"):
        self._order = [p.phase for p in phases()]
        self.phase = start

    def feed(self, line: str) -> tuple[str | None, float | None]:
        """(new phase or None, progress 0..1 or None) after `line`."""
        line = plain(line)
        progress = None
        if found := _PERCENT.search(line):
            progress = min(100, int(found[1])) / 100
        here = self._order.index(self.phase)
        for at in range(len(self._order) - 1, here, -1):
            if any(p.search(line) for p in phases()[at].enter):
                self.phase = self._order[at]
                return self.phase, progress
        return None, progress


@dataclass(frozen=True)
class Fingerprint:
    """A row of `fingerprints.yaml`: a known failure, in the owner's words. `covers`: ids of more general rows."""

    id: str
    match: str
    error: str
    fix: str
    transient: bool = False
    covers: tuple[str, ...] = ()


@cache
def fingerprints() -> tuple[Fingerprint, ...]:
    rows = data("fingerprints")
    return tuple(Fingerprint(**{**r, "covers": tuple(r.get("covers", ()))}) for r in rows)


# A refusal of our own engine-side package, wherever it stands in a line (pydantic wraps those raised while the config is made).
# pydantic puts words of its own behind a ValueError that is raised while a config is made
_OWN_REFUSAL = re.compile(r"flashnext: (.+?)\.? Fix: (.+?)(?: \[type=\w+, .*)?$", re.MULTILINE)


def explain(lines: Iterable[str]) -> list[tuple[Fingerprint, str]]:
    """Known failures in a log with the line that gave them away, in the order of the table; each at most once.

    A refusal of the engine-side package comes first and in its own words.
    """
    text = [plain(line.rstrip("\r\n")) for line in lines]
    whole = "\n".join(text)
    out = []
    if found := _OWN_REFUSAL.search(whole):
        out.append((Fingerprint("engine-refusal", _OWN_REFUSAL.pattern, found[1], found[2].strip()), found[0]))
    covered: set[str] = set()
    for row in fingerprints():
        if row.id in covered:
            continue
        if found := re.search(row.match, whole, re.MULTILINE):
            start = whole.rfind("\n", 0, found.end()) + 1
            end = whole.find("\n", found.end())
            out.append((row, whole[start : end if end >= 0 else None].strip()))
            covered |= {*row.covers}
    return out


@dataclass
class State:
    """The content of state.json. Times are Unix seconds; `deadline_s` is when the phase counts as stuck.

    `repaired` says in words which small files of the checkpoint are served from a corrected copy; `startup` how the engine's own
    start-up report compares with the plan (startup.Verdict.as_dict), None until it serves.
    """

    phase: str
    label: str
    since_s: float
    started_s: float
    progress: float | None = None
    deadline_s: float | None = None
    pid: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    model: str | None = None
    exit_code: int | None = None
    reason: str | None = None
    repaired: list[str] = field(default_factory=list)
    startup: dict[str, Any] | None = None
    schema: int = SCHEMA


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by the JSON of `value`, all or nothing. Raises OSError."""
    fd, name = tempfile.mkstemp(prefix=path.name + ".", dir=path.parent)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as f:
            json.dump(value, f, ensure_ascii=False)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class StateFile:
    """state.json of one run, written by any thread. Writing never raises: a run must not die of a full tmpfs."""

    def __init__(self, folder: Path, host: str, port: int):
        self.path = folder / "state.json"
        self._lock = threading.Lock()
        now = time.time()
        self.state = State("planning", phase_named("planning").label, now, now, pid=os.getpid(), host=host, port=port)

    def update(self, phase: str | None = None, **changes: Any) -> None:
        """Enter `phase` (its clock starts anew) or change fields of the present one, then write the file."""
        with self._lock:
            if phase is not None and phase != self.state.phase:
                known = {p.phase: p.label for p in phases()}
                self.state.phase = phase
                self.state.label = known.get(phase, phase)
                self.state.since_s = time.time()
                self.state.progress = None
                self.state.deadline_s = None
            for key, value in changes.items():
                setattr(self.state, key, value)
            with contextlib.suppress(OSError):
                write_json(self.path, asdict(self.state))
