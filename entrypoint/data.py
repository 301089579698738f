"""The YAML files that lie beside the code: read once, by libyaml where PyYAML was built with it (a tenth of the time)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def data(name: str) -> Any:
    """Content of `name`.yaml. Shared by all callers: not to be changed."""
    return yaml.load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"), Loader=_LOADER)
