"""Rules of thumb (`rules.yaml`): numbers that were measured, not derived, with where."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def thumb() -> Mapping[str, Mapping[str, Any]]:
    """`rules.yaml`."""
    return yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text(encoding="utf-8"))


def rule(name: str) -> tuple[Any, str]:
    """A rule's value and where it was measured."""
    row = thumb()[name]
    return row["value"], row["source"]
