"""Reads a box from a file: what `--simulate @box.yaml` plans for, and what a report of `doctor` can be planned again from.

Rule order
1. YAML or JSON, one mapping. A report's facts are under `machine`; those are taken and the rest is left.
2. Short words first: `cards` ('3x3090', or a list of such texts and of mappings with `card`, `count` and any field of a Gpu),
   then `ram`, `cgroup`, `disk`, `wsl` as the options of the same name.
3. Every other key is a field of Machine by its own name, and overrides. Sizes may be text ('24GiB'), versions too ('8.6').
4. `ram_available_bytes`, where it is not given, follows from what is. An unknown key or a value of another kind is refused
   by name: a slip would otherwise be a box that is not there.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from . import simulate
from .errors import Exit, Refusal
from .machine import Gpu, Machine, Mount, NumaNode, least
from .units import parse_size

_LARGEST_FILE_BYTES = 4 << 20
_SHORT = ("ram", "cgroup", "disk", "wsl")
_FIX = (
    "keys are the fields that `flashnext doctor --report FILE` writes under `machine`, or cards, ram, cgroup, disk, wsl"
)


def _refusal(name: str, what: str, fix: str = _FIX) -> Refusal:
    return Refusal(f"--simulate: {name}: {what}", fix, Exit.USAGE)


def read(path: Path) -> Machine:
    """The box in `path`. Raises Refusal (code 2) for a file that cannot be read or does not describe one."""
    name = str(path)[:80]
    try:
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            raise _refusal(name, "is too large to be a box", "name a file that describes one")
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise _refusal(name, f"cannot be read: {e.strerror}", "name a readable file") from None
    except UnicodeDecodeError:
        raise _refusal(name, "is not text", "name a YAML or JSON file") from None
    try:
        document = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError):
        raise _refusal(name, "is neither JSON nor YAML", "name a YAML or JSON file") from None
    if isinstance(document, dict) and isinstance(document.get("machine"), dict):
        document = document["machine"]
    if not isinstance(document, dict):
        raise _refusal(name, "does not hold one mapping")
    return from_dict(document, name)


def from_dict(document: Mapping[str, Any], name: str = "box") -> Machine:
    """The Machine that `document` describes; `name` is for messages. Raises Refusal (code 2)."""
    given = dict(document)
    words = {word: given.pop(word) for word in _SHORT if word in given}
    gpus = _gpus(given.pop("cards", None), name)
    if (listed := given.pop("gpus", None)) is not None:
        gpus = _gpus(listed, name)
    if words.get("wsl") not in (None, True, False):
        raise _refusal(name, "wsl is neither true nor false")
    for word in ("ram", "cgroup", "disk"):
        if words.get(word) is not None and (isinstance(words[word], bool) or not isinstance(words[word], (str, int))):
            raise _refusal(name, f"{word} is {_kind(words[word])}, not a text or a number")
    box = Machine(gpus=gpus, cuda_order="PCI_BUS_ID", simulated=name)
    box = simulate.host(box, **{**words, "wsl": bool(words.get("wsl"))})
    given.pop("simulated", None)
    fields = _fields(Machine, given, name)
    box = dataclasses.replace(box, **fields)
    if "ram_available_bytes" not in fields:
        limit, used = box.cgroup_limit_bytes, box.cgroup_used_bytes or 0
        box = dataclasses.replace(
            box, ram_available_bytes=least(box.mem_available_bytes, None if limit is None else max(0, limit - used))
        )
    return box


def _gpus(listed: Any, name: str) -> tuple[Gpu, ...]:
    if listed is None:
        return ()
    out: list[Gpu] = []
    for entry in listed if isinstance(listed, list) else [listed]:
        if isinstance(entry, (str, int)) and not isinstance(entry, bool):
            out += simulate.cards_of(str(entry))
            continue
        if not isinstance(entry, dict):
            raise _refusal(name, f"a card is {_kind(entry)}, not a text or a mapping")
        given = dict(entry)
        base, count = given.pop("card", None), given.pop("count", 1)
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 64:
            raise _refusal(name, "the count of a card is not a number from 1 to 64")
        cards = simulate.cards_of(str(base)) if base is not None else [Gpu(index=0, name="unknown card")]
        if len(cards) > 1:
            raise _refusal(name, "`card` names one card", "write how many under `count`")
        fields = _fields(Gpu, given, name)
        if "total_bytes" in fields and "free_bytes" not in fields:
            fields["free_bytes"] = max(0, fields["total_bytes"] - (fields.get("reserved_bytes") or 0))
        for _ in range(count):
            out.append(dataclasses.replace(cards[0], **{"nvml_index": len(out), **fields, "index": len(out)}))
    if len(out) > 64:
        raise _refusal(name, f"has {len(out)} cards; 64 at most")
    return tuple(dataclasses.replace(gpu, index=n) for n, gpu in enumerate(out))


def _fields(cls: type, given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`given` as arguments of the dataclass `cls`."""
    hints = typing.get_type_hints(cls)
    out = {}
    for key, value in given.items():
        if not isinstance(key, str) or key not in hints:
            raise _refusal(name, f"{str(key)[:40]!r} is no fact of a {cls.__name__.lower()}")
        out[key] = _value(key, value, hints[key], name)
    missing = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in out
    ]
    if missing and cls not in (Gpu,):  # a card's name and number are filled in
        raise _refusal(name, f"a {cls.__name__.lower()} lacks {', '.join(missing)}")
    return out


def _value(key: str, value: Any, hint: Any, name: str) -> Any:
    allowed = typing.get_args(hint) or (hint,)
    if value is None:
        if type(None) in allowed:
            return None
        raise _refusal(name, f"{key} is empty")
    if key == "mounts":
        if not isinstance(value, dict) or not all(isinstance(mount, dict) for mount in value.values()):
            raise _refusal(name, "mounts is not a mapping of a role to a mount")
        return {str(role): Mount(**_fields(Mount, mount, name)) for role, mount in value.items()}
    if key == "numa":
        if not isinstance(value, list) or not all(isinstance(node, dict) for node in value):
            raise _refusal(name, "numa is not a list of nodes")
        return tuple(NumaNode(**_fields(NumaNode, node, name)) for node in value)
    if key in ("compute_capability", "driver_cuda_version"):
        parts = str(value).split(".") if isinstance(value, (str, float)) else value
        if isinstance(parts, list) and len(parts) == 2 and all(str(part).isdecimal() for part in parts):
            return tuple(int(part) for part in parts)
        raise _refusal(name, f"{key} is not a version such as 8.6")
    if key in ("mig_ids", "disks", "p2p"):
        if not isinstance(value, list):
            raise _refusal(name, f"{key} is {_kind(value)}, not a list")
        return tuple(tuple(row) if isinstance(row, list) else row for row in value)
    if key.endswith("_bytes") and isinstance(value, (str, int)) and not isinstance(value, bool):
        # UNLIMITED is larger than any size that a person may write.
        return value if isinstance(value, int) and value >= 0 else parse_size(value, f"{name}: {key}")
    for kind in (bool, int, float, str):
        if kind in allowed and (type(value) is kind or (kind is float and type(value) is int)):
            return value
    raise _refusal(name, f"{key} is {_kind(value)}")


def _kind(value: Any) -> str:
    return f"a {type(value).__name__} ({str(value)[:30]!r})"
