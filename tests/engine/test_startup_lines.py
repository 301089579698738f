"""The start-up figures that `serve` compares with the plan, against what this vLLM can print: read from its source, not imported."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROWS = yaml.safe_load((ROOT / "entrypoint" / "startup.yaml").read_text(encoding="utf-8"))["lines"]
OURS = "the engine-side package, "


def texts(source: str) -> list[str]:
    """Every text of a module, with 1 in the place of what is filled in."""
    out = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            out.append("".join(part.value if isinstance(part, ast.Constant) else "1" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            out.append(re.sub(r"%[-+.0-9]*[a-zA-Z]", "1", node.value))
    return out


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["match"][:40])
def test_the_line_is_one_that_this_engine_prints(pristine_tree, row):
    engine = pristine_tree / "vllm"
    path = ROOT / row["from"].removeprefix(OURS) if row["from"].startswith(OURS) else engine / row["from"]
    found = texts(path.read_text(encoding="utf-8"))
    metric = re.fullmatch(r"(vllm:\w+)\\\{\[\^\}\]\*\\b(\w+)=.*", row["match"])
    if metric:  # a gauge whose labels are the fields of CacheConfig
        fields = ast.parse((engine / "config" / "cache.py").read_text(encoding="utf-8"))
        names = {
            n.target.id for n in ast.walk(fields) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
        }
        assert metric[1] in found and metric[2] in names
        return
    assert any(re.search(row["match"], text) for text in found), path
