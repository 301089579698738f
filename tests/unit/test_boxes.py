"""Every box of boxes.yaml gets the plan or the refusal that was reviewed there, and each plan stays inside its budgets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from entrypoint import plan as p
from entrypoint.errors import Exit, Refusal
from entrypoint.simulate import simulate
from entrypoint.wishes import gather

BOXES = yaml.safe_load(Path(__file__).with_name("boxes.yaml").read_text(encoding="utf-8"))
_BOX = ("ram", "cgroup", "disk", "wsl")


def _name(row: dict) -> str:
    return " ".join(str(v) for k, v in row.items() if k not in ("plan", "refused", "fix"))


def make(row: dict) -> p.Plan:
    wishes = gather({}, {f"FLASHNEXT_{k}": v for k, v in row.get("wish", {}).items()}, None)
    return p.make_plan(simulate(row["cards"], **{k: row[k] for k in _BOX if k in row}), p.published(), wishes)


def of(plan: p.Plan, cards: int) -> dict:
    """A plan in the words of boxes.yaml."""
    c = plan.capacity
    return {
        "partition": c["partition"],
        "context": c["context"],
        "streams": c["streams"],
        "whole": c["whole_requests_at_once"],
        "chunk": int(plan.argv[plan.argv.index("--max-num-batched-tokens") + 1]),
        "kv": "host" if c["host_pool_bytes"] else "cards",
        "idle": cards - len(plan.stages),
        "table": plan.table.backing,
    }


def test_there_are_enough_boxes_and_no_two_alike():
    names = [_name(row) for row in BOXES]
    assert len(names) >= 40 and len(set(names)) == len(names)


@pytest.mark.parametrize("row", [r for r in BOXES if "plan" in r], ids=_name)
def test_plan(row):
    plan, box = make(row), simulate(row["cards"], **{k: row[k] for k in _BOX if k in row})
    expected = dict(row["plan"])
    words = expected.pop("note", None)
    got = of(plan, len(box.gpus))
    assert {k: got[k] for k in expected} == expected
    assert words is None or any(words in note for note in plan.notes), plan.notes
    for stage in plan.stages:
        assert stage.used_bytes <= stage.available_bytes
    assert sum(line.bytes for line in plan.host) == box.ram_available_bytes
    assert all(line.bytes >= 0 for line in plan.host)
    if got["idle"]:
        assert plan.env["CUDA_VISIBLE_DEVICES"] == ",".join(str(stage.gpu) for stage in plan.stages)


@pytest.mark.parametrize("row", [r for r in BOXES if "refused" in r], ids=_name)
def test_refusal(row):
    with pytest.raises(Refusal) as e:
        make(row)
    assert row["refused"] in e.value.message and row["fix"] in e.value.fix
    assert e.value.code == Exit.PLAN and "\n" not in e.value.message + e.value.fix
    assert re.search(r"\d", e.value.message) or "four times" in row["refused"] or "this way of" in row["refused"]
