"""Decides how this box stands, point by point: each check gives PASS, WARN or FAIL and one fix. Reads; changes nothing.

The checks use the same facts and rules as the plan, so that `doctor` never praises what `serve` refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from . import facts, plan, rules
from .errors import Exit, Refusal
from .machine import UNLIMITED, Machine
from .units import format_gib
from .wishes import Wishes

_STYLE = {"PASS": "green", "WARN": "yellow", "FAIL": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One point. `code` is the exit code that a FAIL stands for."""

    point: str
    verdict: str
    detail: str
    fix: str = ""
    code: int = int(Exit.OK)


def _tried(point: str, check: Callable[[], str]) -> Finding:
    """PASS with the check's words, or FAIL with the refusal's."""
    try:
        return Finding(point, "PASS", check())
    except Refusal as e:
        return Finding(point, "FAIL", e.message, e.fix, int(e.code))


def _cards(machine: Machine) -> str:
    if not machine.gpus:
        raise Refusal(
            machine.gpu_error or "the driver lists no card",
            machine.gpu_fix or "install the driver, or run the demo",
            Exit.PLAN,
        )
    return ", ".join(f"{g.name} ({format_gib(g.free_bytes)} free)" for g in machine.gpus)


def _memlock(machine: Machine) -> Finding:
    limit = machine.memlock_bytes
    if limit is None or limit == UNLIMITED or machine.ipc_lock:
        return Finding("memlock", "PASS", "no limit" if limit is not None else "unknown")
    return Finding(
        "memlock",
        "WARN",
        f"{format_gib(limit)} may be locked",
        "compose.yaml lifts it (ulimits: memlock); outside Docker: ulimit -l unlimited",
    )


def _disk(machine: Machine) -> Finding:
    mount = machine.mounts.get("model")
    if mount is None:
        return Finding("disk of the checkpoint", "WARN", "cannot be told", "put the checkpoint on a local NVMe drive")
    words = f"{mount.kind} ({mount.fs_type})"
    if mount.kind in {"hdd", "network"}:
        return Finding(
            "disk of the checkpoint", "WARN", words, "move it to a local NVMe drive: the table is read at random"
        )
    return Finding("disk of the checkpoint", "PASS", words)


def examine(wishes: Wishes) -> list[Finding]:
    """All findings, in the order in which they are best mended. Never raises for what a box can be."""
    machine = facts.machine(wishes)
    out = []
    if wishes.value("device") != "cpu":
        out += [
            _tried("cards", lambda: _cards(machine)),
            _tried(
                "driver and memory",
                lambda: (rules.check_machine(machine, plan.thumb()), machine.driver_version or "unknown")[1],
            ),
            _memlock(machine),
            _disk(machine),
        ]
    out.append(Finding("RAM", "PASS", f"{format_gib(machine.ram_available_bytes)} available"))
    out.append(
        _tried(
            "API key and port",
            lambda: (rules.check_exposure(wishes, facts.read_api_key(wishes) is not None), wishes.value("bind"))[1],
        )
    )
    out.append(_tried("checkpoint", lambda: f"{len(facts.checkpoint(wishes).tensors)} tensors, every header whole"))
    out.append(_tried("plan", lambda: f"{facts.everything(wishes)[2].capacity.get('context')} tokens"))
    return out


def show(findings: list[Finding], out: Console) -> None:
    """Print the findings as a table, the fixes under their points."""
    t = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "point", "found", "fix"):
        t.add_column(column, overflow="fold")
    for f in findings:
        t.add_row(f"[{_STYLE[f.verdict]}]{f.verdict}[/]", f.point, f.detail, f.fix)
    out.print(t)
