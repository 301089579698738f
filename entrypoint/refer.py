"""Decides which other public project a box is told about when this kit cannot serve it. Data: `elsewhere.yaml`.

Rule: the first row whose needs the box meets (number and size of cards, compute capability, RAM). An unknown fact meets a need: a
name too many costs a look, a name too few costs the box.
"""

from __future__ import annotations

from .data import data
from .machine import Machine, least
from .units import GIB


def elsewhere(machine: Machine) -> str:
    """'; or NAME (address): how', or nothing where no row fits."""
    large = max(machine.gpus, key=lambda g: g.total_bytes or 0, default=None)
    if large is None:
        return ""
    ram = least(machine.cgroup_limit_bytes, machine.mem_total_bytes)
    for row in data("elsewhere"):
        major, _, minor = str(row["sm"]).partition(".")
        if (
            sum((g.total_bytes or 0) >= row["card_gib"] * GIB for g in machine.gpus) >= row["cards"]
            and (large.compute_capability is None or large.compute_capability >= (int(major), int(minor)))
            and (ram is None or ram >= row["ram_gib"] * GIB)
        ):
            return f"; or {row['name']} ({row['where']}): {row['how']}"
    return ""
