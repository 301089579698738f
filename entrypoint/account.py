"""Decides whether a plan has to count the weights anew. The headers of a quarter of a million tensors take half a second or more.

From the identity of the files (name, size, inode, device, times of last write and last change), and the code that counts. Rules:
1. a note of the same files, counted by the same code: its bytes by layer and category; only the small files are read.
2. anything else, or no note: the headers are read, and a note is left where one can be written.
Only for planning. Whatever starts an engine, and `flashnext checkpoint`, reads every header each time.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import checkpoint as reader
from .boot import write_json
from .checkpoint import Checkpoint, Weights, read_checkpoint


def notes_folder() -> Path | None:
    """Where notes lie: XDG_CACHE_HOME or ~/.cache; None where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "flashnext" / "weights"
    except RuntimeError:
        return None


def counted(path: str | Path, notes: Path | None) -> Checkpoint:
    """The checkpoint in the folder `path` with its weights counted, its tensors only if they had to be read.

    Raises Refusal (code 4) as `read_checkpoint` does.
    """
    folder = Path(os.path.expanduser(path))
    key = _key(folder)
    note = None if notes is None or key is None else notes / f"{_hash(str(folder.resolve()))[:32]}.json"
    if note is not None and (weights := _noted(note, key)) is not None:
        return read_checkpoint(path, headers=False, counted=weights)
    found = read_checkpoint(path)
    if note is not None and found.tensors:
        content = {
            "key": key,
            "layers": [dict(layer) for layer in found.weights.layers],
            "outside": dict(found.weights.outside),
        }
        with suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            write_json(note, content)
    return found


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _key(folder: Path) -> str | None:
    """What the count depends on; None where the folder cannot be looked at, which the reader then says better."""
    rows: list[Any] = []
    try:
        rows.append(hashlib.sha256(Path(reader.__file__).read_bytes()).hexdigest())
        for entry in sorted(folder.iterdir()):
            if entry.name.endswith((".safetensors", ".json")):
                s = entry.stat()
                rows.append((entry.name, s.st_size, s.st_ino, s.st_dev, s.st_mtime_ns, s.st_ctime_ns))
    except OSError:
        return None
    return _hash(json.dumps(rows))


def _noted(note: Path, key: str) -> Weights | None:
    try:
        content = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("key") != key:
        return None
    layers, outside = content.get("layers"), content.get("outside")
    if not isinstance(layers, list) or not layers or not all(map(_is_count, [*layers, outside])):
        return None
    return Weights(layers=tuple(layers), outside=outside)


def _is_count(part: Any) -> bool:
    return isinstance(part, dict) and all(type(n) is int and n >= 0 for n in part.values())
