"""Decides how a checkpoint whose small files are wrong is served all the same: from a folder of links with corrected copies.

The source is never written. `ready` gives the checkpoint to serve: the source itself where nothing needs mending, else a
folder of our own volume with a link to each of the source's files, and beside them the files that were corrected:
- config.json: config_groups rebuilt from what the weights really hold (lint.py reads it off the shapes). Targets are
  expressions over the end of a module's name, which the engine's renaming leaves alone.
- generation_config.json: the published sampling defaults where the export has none, and all EOS ids.

Rule order: lint; what no copy of a small file can mend is a Refusal (code 4); build under another name, prove that the
result has no finding left, rename. The folder's name is a hash of the source's path, sizes and times, so a second start
finds it and a changed source gets another. Errors of our own volume are Refusals of code 5.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import lint
from .architecture import QUANTIZABLE
from .checkpoint import Checkpoint
from .data import data
from .documents import read_json
from .errors import Exit, Refusal
from .model import published_sampling

VERSION = 1
"""Part of an overlay's identity: raise it when the repair itself changes."""

NOTE = "flashnext.json"
_LAYER = re.compile(r"layers\.([0-9]+)\.(.*)")


@dataclass(frozen=True)
class Scheme:
    """Of a config group: bits, inputs a scale (0: one scale a row), no zero points."""

    bits: int
    size: int
    symmetric: bool

    def weights(self) -> dict[str, Any]:
        """The `weights` object of a config group, as compressed-tensors spells it."""
        return {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "group" if self.size else "channel",
            "group_size": self.size or None,
            "dynamic": False,
            "actorder": None,
        }


# --- config_groups from the weights -----------------------------------------------------------------------------------


def _schemes(stored: Sequence[lint.Stored], config: Mapping[str, Any]) -> dict[str, Scheme]:
    """Scheme of each quantized part by its name.

    One scale a row can be a group as long as the row or none at all: it is the former where that size occurs in the
    config or in longer rows of as many bits, so that all shards of an expert come into one group.
    """
    groups = config.get("config_groups")
    said = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    pairs = [(args.get("num_bits"), args.get("group_size")) for args in said if isinstance(args, dict)]
    sizes = {pair for pair in pairs if all(type(n) is int for n in pair)}
    sizes |= {(i.form.bits, i.part.shape[-1] // i.form.groups) for i in stored if i.form.groups > 1}
    out = {}
    for item in stored:
        if item.form.bits is None or item.part.kind not in QUANTIZABLE:
            continue
        size = item.part.shape[-1] // item.form.groups
        grouped = item.form.groups > 1 or (item.form.bits, size) in sizes
        out[item.part.name] = Scheme(item.form.bits, size if grouped else 0, item.form.symmetric)
    return out


def _targets(names: Sequence[str], others: Sequence[str], prefix: str) -> list[str]:
    """Expressions that match all of `names` and none of `others`: by the name's end where that tells them apart, else
    with the layers' numbers."""

    def split(name: str) -> tuple[str, str]:
        """(layer or '', what follows)."""
        found = _LAYER.fullmatch(name.removeprefix(prefix))
        return (found[1], found[2]) if found else ("", name.removeprefix(prefix))

    elsewhere = {split(name)[1] for name in others}
    layers: dict[str, list[str]] = {}
    for name in names:
        layer, end = split(name)
        layers.setdefault(end, []).append(layer)
    # Siblings with the same layers share an expression: (q_proj|k_proj|v_proj).
    together: dict[tuple[str, str], list[str]] = {}
    for end, where in layers.items():
        parent, _, leaf = end.rpartition(".")
        which = "" if end not in elsewhere or where == [""] else "|".join(where)
        together.setdefault((parent, which), []).append(leaf)
    out = []
    for (parent, which), leaves in together.items():
        leaf = leaves[0] if len(leaves) == 1 else "(" + "|".join(leaves) + ")"
        path = re.escape(parent).replace(r"\*", r"\d+") + r"\." if parent else ""
        start = rf"re:.*\.layers\.({which})\." if which else r"re:.*\." if parent else "re:.*"
        out.append(f"{start}{path}{leaf}$")
    return out


def config_groups(checkpoint: Checkpoint, stored: Sequence[lint.Stored]) -> dict[str, Any]:
    """A quantization_config that describes the weights as they are; everything else of the given one is kept."""
    config = dict(checkpoint.quantization or {})
    prefix = lint.prefix_of(checkpoint.tensors)
    schemes = _schemes(stored, config)
    plain = [i.part.name for i in stored if i.form.bits is None and i.part.kind in QUANTIZABLE]
    groups = {}
    for number, scheme in enumerate(dict.fromkeys(schemes.values())):
        names = [name for name, of in schemes.items() if of == scheme]
        others = plain + [name for name, of in schemes.items() if of != scheme]
        groups[f"group_{number}"] = {
            "targets": _targets(names, others, prefix),
            "weights": scheme.weights(),
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
    ignore = config.get("ignore")
    words = [word for word in ignore if isinstance(word, str)] if isinstance(ignore, list) else []
    kept = [word for word in words if not _hits(word, schemes, checkpoint)]
    own = [r"re:.*visual\..*"]
    if not any(name.startswith("mtp.") and name.endswith(".weight_packed") for name in checkpoint.tensors):
        own.append(r"re:^mtp\..*")
    return config | {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": kept + [word for word in own if word not in kept],
    }


def _hits(word: str, names: Mapping[str, Scheme], checkpoint: Checkpoint) -> bool:
    """Whether an entry of `ignore` would leave a quantized weight unread (or cannot be read itself)."""
    if not word.startswith("re:"):
        return re.sub(r"\.experts\.[0-9]+\.", ".experts.*.", word) in names
    try:
        pattern = re.compile(word[3:])
    except (re.error, RecursionError, OverflowError):
        return True
    renamed = lint.Groups({}, checkpoint.multimodal, lint.Findings()).renamed
    return any(pattern.match(renamed(name).replace(".experts.*.", ".experts.0.")) for name in names)


# --- generation_config.json ---------------------------------------------------------------------------------------------


def generation(checkpoint: Checkpoint) -> dict[str, Any]:
    """generation_config.json with the published sampling defaults where a value is missing, and every EOS id."""
    out = dict(checkpoint.generation or {})
    for key, value in {**data("published")["generation"], **published_sampling()}.items():
        if not isinstance(out.get(key), (int, float)):
            out[key] = value
    eos = out.get("eos_token_id")
    have = [i for i in (eos if isinstance(eos, list) else [eos]) if type(i) is int]
    out["eos_token_id"] = have + [i for i in lint.eos_ids(checkpoint) if i not in have]
    return out


# --- the folder -------------------------------------------------------------------------------------------------------


def identity(source: Path) -> str:
    """16 hex digits for a source as it stands: path, and name, size and time of each file."""
    digest = hashlib.sha256(f"{VERSION}\0{source.absolute()}\0".encode())
    for path in sorted(source.iterdir()):
        if path.is_file():
            found = path.stat()
            digest.update(f"{path.name}\0{found.st_size}\0{found.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _whole(folder: Path, source: Path, files: Mapping[str, Any]) -> bool:
    """Whether `folder` is the finished overlay of these corrections, with no link to nowhere."""
    try:
        note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        return (
            note["source"] == str(source.absolute())
            and all(json.loads((folder / name).read_text(encoding="utf-8")) == files[name] for name in files)
            and all((folder / path.name).exists() for path in source.iterdir() if path.is_file())
        )
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _write(folder: Path, name: str, content: Any) -> None:
    with (folder / name).open("w", encoding="utf-8") as file:
        json.dump(content, file, ensure_ascii=False, indent=1)
        file.flush()
        os.fsync(file.fileno())


def overlay(source: Path, root: Path, files: Mapping[str, Any], repaired: Sequence[str]) -> Path:
    """The folder below `root` with links to `source`'s files and `files` (name -> JSON) in place of theirs.

    All or nothing, and the same folder for the same source. Raises Refusal (code 5) where it cannot be written.
    """
    final = root / identity(source)
    if _whole(final, source, files):
        return final
    made = root / f".{final.name}.{uuid.uuid4().hex}.partial"
    try:
        made.mkdir(parents=True)
        for path in source.iterdir():
            if path.is_file() and path.name not in files and path.name != NOTE:
                (made / path.name).symlink_to(path.absolute())
        for name, content in files.items():
            _write(made, name, content)
        _write(made, NOTE, {"source": str(source.absolute()), "repaired": list(repaired)})
        if final.exists():
            os.rename(final, made.with_suffix(".old"))
        os.rename(made, final)
    except OSError as error:
        raise Refusal(
            f"the corrected copy of the checkpoint's small files cannot be written to {root}: {error.strerror}",
            "give write access and some MB of space there (FLASHNEXT_DATA), on a file system with links",
            Exit.TABLE,
        ) from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
        shutil.rmtree(made.with_suffix(".old"), ignore_errors=True)
    return final


def ready(checkpoint: Checkpoint, root: Path) -> tuple[Checkpoint, tuple[str, ...]]:
    """(the checkpoint to serve, what was repaired in words). Raises Refusal (code 4, 5)."""
    report = lint.examine(checkpoint)
    beyond = [f for f in report.errors if f.repair is None]
    if beyond:
        lint.refuse(replace(report, findings=tuple(beyond)))
    kinds = {f.repair for f in report.findings if f.repair}
    if not kinds:
        return checkpoint, ()
    source = Path(checkpoint.path)
    files: dict[str, Any] = {}
    mended = checkpoint
    words = []
    if "config" in kinds:
        quantization = config_groups(checkpoint, lint.weights_of(checkpoint, lint.Findings()))
        config = read_json(source / "config.json", "config.json")
        inner = config.get("text_config")
        nested = isinstance(inner, dict) and "quantization_config" in inner
        if nested:
            config["text_config"] = {**inner, "quantization_config": quantization}
        if not nested or config.get("quantization_config"):
            config["quantization_config"] = quantization
        files["config.json"] = config
        mended = replace(mended, quantization=quantization)
        words.append(
            f"config.json: {len(quantization['config_groups'])} config groups rebuilt from the weights' shapes"
        )
    if "generation" in kinds:
        content = generation(checkpoint)
        before = checkpoint.generation or {}
        changed = sorted(key for key, value in content.items() if before.get(key) != value)
        files["generation_config.json"] = content
        mended = replace(mended, generation=content)
        words.append(f"generation_config.json: {', '.join(changed)} restored")
    # Proof before use: the same checks, on what will be served.
    left = lint.examine(mended)
    if left.errors or any(f.repair for f in left.findings):
        worst = next(f for f in (*left.errors, *left.findings) if f.verdict == "ERROR" or f.repair)
        raise Refusal(
            f"checkpoint: {worst.check}: {worst.message} (a corrected copy does not mend it)",
            "export again, with config groups whose targets name the modules",
            Exit.CHECKPOINT,
        )
    return replace(mended, path=str(overlay(source, root, files, words))), tuple(words)
