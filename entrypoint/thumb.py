"""Rules of thumb (`rules.yaml`): numbers that were measured, not derived, with where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .data import data


def thumb() -> Mapping[str, Mapping[str, Any]]:
    """`rules.yaml`."""
    return data("rules")


def rule(name: str) -> tuple[Any, str]:
    """A rule's value and where it was measured."""
    row = thumb()[name]
    return row["value"], row["source"]
