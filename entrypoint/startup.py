"""Decides whether the engine started as it was planned: figures of its own start-up report against those of the plan.

From: lines of its log and of /metrics, by the patterns and tolerances of `startup.yaml`. Order of the rules
1. a line of a worker belongs to the stage in its prefix (`Worker_PP1`); before the prefix says it, to the stage that the same process
   named itself; a process without either is the only stage.
2. a figure that was said twice counts as said last.
3. a figure is compared where both sides have it; what the engine never said is listed, not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from .boot import plain
from .data import data
from .plan import Plan, Stage
from .units import GIB, format_gib

Key = tuple[str, int | None]
"""(figure, rank), rank None for a figure of the whole engine."""


@dataclass(frozen=True)
class Pattern:
    """A row of `lines`."""

    match: re.Pattern[str]
    rank: bool


@dataclass(frozen=True, kw_only=True)
class Check:
    """A row of `checks`; `unit` None for a bare number and for bytes (figures without `blocks`, `tokens` are bytes)."""

    name: str
    what: str
    unit: str | None = None
    share: float = 0.0
    bytes: int = 0
    plan_lines: str | None = None
    why: str = ""

    def tolerated(self, planned: float) -> float:
        return max(self.share * abs(planned), self.bytes)


@cache
def patterns() -> tuple[Pattern, ...]:
    return tuple(Pattern(re.compile(row["match"]), row.get("rank", False)) for row in data("startup")["lines"])


@cache
def checks() -> tuple[Check, ...]:
    return tuple(Check(**row) for row in data("startup")["checks"])


class Report:
    """Figures that the engine has said so far, by (figure, rank). Sizes are bytes."""

    def __init__(self) -> None:
        self.figures: dict[Key, float] = {}
        self._process = re.compile(data("startup")["process"])
        self._stage = re.compile(data("startup")["stage"])
        self._rank_of: dict[str, int] = {}

    def feed(self, line: str) -> None:
        """Take in one line of the log or of /metrics."""
        line = plain(line)
        rank = self._rank(line)
        for pattern in patterns():
            if found := pattern.match.search(line):
                for name, text in found.groupdict().items():
                    value = float(text.replace(",", ""))
                    if name.endswith("_gib"):
                        name, value = name.removesuffix("_gib"), value * GIB
                    self.figures[name, rank if pattern.rank else None] = value

    def said(self, name: str, rank: int | None) -> float | None:
        """A figure, None where it was not said. `pool` is the sum over the stages that named theirs, `table` rows times bytes."""
        if name == "table":
            rows, row_bytes = (self.figures.get((figure, None)) for figure in ("table_rows", "table_row"))
            return rows * row_bytes if rows and row_bytes else None
        if name != "pool":
            return self.figures.get((name, rank))
        layers = {at: n for (figure, at), n in self.figures.items() if figure == "pool_layers"}
        return sum(n * self.figures["pool_layer", at] for at, n in layers.items()) if layers else None

    def _rank(self, line: str) -> int:
        found = self._process.search(line)
        if found is None:
            return 0
        named = found["pp"] or ((self._stage.search(line) or {"pp": None})["pp"])
        if named is not None:
            self._rank_of[found["pid"]] = int(named)
        return self._rank_of.get(found["pid"], 0)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One figure on both sides; `reported` None where the engine did not say it."""

    check: Check
    rank: int | None
    planned: float
    reported: float | None

    @property
    def agrees(self) -> bool:
        return self.reported is None or abs(self.reported - self.planned) <= self.check.tolerated(self.planned)

    def _say(self, value: float) -> str:
        if self.check.name in ("blocks", "block_size", "tokens", "context"):
            return f"{value:,.0f}" + (f" {self.check.unit}" if self.check.unit else "")
        return format_gib(round(value))

    @property
    def words(self) -> str:
        """The figure with both numbers."""
        where = "" if self.rank is None else f" of rank {self.rank}"
        if self.reported is None:
            return f"{self.check.what}{where} not said, {self._say(self.planned)} planned"
        return f"{self.check.what}{where} {self._say(self.reported)}, {self._say(self.planned)} planned"


@dataclass(frozen=True)
class Verdict:
    """All figures of a plan beside those of a start-up report."""

    figures: tuple[Compared, ...]

    @property
    def said(self) -> tuple[Compared, ...]:
        return tuple(c for c in self.figures if c.reported is not None)

    @property
    def deviations(self) -> tuple[Compared, ...]:
        return tuple(c for c in self.figures if not c.agrees)

    def lines(self) -> list[str]:
        """What is told: one line where everything agrees, else one WARN line for each figure that does not."""
        if not self.figures:
            return []
        if not self.said:
            return [
                f"WARN start-up could not be compared with the plan: none of its {len(self.figures)} figures was said"
            ]
        if not self.deviations:
            told = "; ".join(c.words for c in self.said)
            return [f"start-up agrees with the plan in {len(self.said)} of {len(self.figures)} figures: {told}"]
        out = []
        for c in self.deviations:
            more = (c.reported - c.planned) / c.planned if c.planned else 0.0
            limit = c.check.tolerated(c.planned)
            allowed = f"; {c._say(limit)} tolerated: {c.check.why}" if limit else ""
            out.append(f"WARN start-up differs from the plan: {c.words} ({more:+.1%}{allowed})")
        return out

    def as_dict(self) -> dict[str, Any]:
        """For state.json."""
        return {
            "agrees": bool(self.said) and not self.deviations,
            "compared": len(self.said),
            "deviations": [c.words for c in self.deviations],
            "not_said": [c.words for c in self.figures if c.reported is None],
        }


def compare(plan: Plan, report: Report) -> Verdict:
    """Every figure that the plan has, beside the engine's."""
    out = []
    for check in checks():
        for (name, rank), planned in _planned(plan, check).items():
            out.append(Compared(check=check, rank=rank, planned=planned, reported=report.said(name, rank)))
    return Verdict(tuple(out))


def compare_lines(plan: Plan, lines: Iterable[str]) -> Verdict:
    """`compare` with the report of these lines."""
    report = Report()
    for line in lines:
        report.feed(line)
    return compare(plan, report)


def _planned(plan: Plan, check: Check) -> dict[Key, float]:
    """The plan's value of a figure for the whole engine or for each rank; {} where the plan has none."""
    name, capacity = check.name, plan.capacity
    if name in ("context", "tokens", "blocks", "block_size"):
        return {(name, None): capacity[name]} if capacity.get(name) else {}
    if name == "pool":
        return {(name, None): capacity["host_pool_bytes"]} if capacity.get("host_pool_bytes") else {}
    if name == "table":
        return {(name, None): plan.table.table_bytes} if plan.table is not None and plan.table.on_disk else {}
    if name == "kv":
        if plan.device == "cpu":
            space = plan.env.get("VLLM_CPU_KVCACHE_SPACE")
            return {(name, 0): float(space) * GIB} if space else {}
        given = next((s.value for s in plan.settings if s.name == "--kv-cache-memory-bytes"), None)
        return {(name, rank): float(given) for rank in range(len(plan.stages))} if given else {}
    if name == "free":
        return {
            (name, rank): st.available_bytes - _lines(st, check.plan_lines or "$^")
            for rank, st in enumerate(plan.stages)
        }
    return {
        (name, rank): total for rank, st in enumerate(plan.stages) if (total := _lines(st, check.plan_lines or "$^"))
    }


def _lines(stage: Stage, what: str) -> int:
    return sum(line.bytes for line in stage.lines if re.search(what, line.what))
