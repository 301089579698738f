"""Decides what a JSON document of a checkpoint says, and in which words one that is none is refused (code 4).

Rules
1. A regular file of a size that such a file can have, neither a git-lfs pointer nor empty nor zeros.
2. `quick` decodes what a type asks for and skips the rest (msgspec: a third of the time of `json`, or less). What it does
   not take (None) says nothing yet.
3. `parse` (`json`) then decides, and finds the words for what is wrong. Whatever `quick` takes, it would take too; but for a
   skipped number of more than 4,300 digits, which is JSON and over Python's own limit.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .errors import Exit, Refusal

_LARGEST_JSON_BYTES = 200_000_000
_LFS_MARK = b"version https://git-lfs"
_DOWNLOAD_AGAIN = "download that file again and compare its size with the one the hub lists"

T = TypeVar("T")


def bad(file: str, what: str, fix: str = _DOWNLOAD_AGAIN) -> Refusal:
    """The Refusal of one file of a checkpoint."""
    return Refusal(f"checkpoint file {file}: {what}", fix, Exit.CHECKPOINT)


def size_of(path: Path, name: str) -> int:
    """Bytes of a regular file; a Refusal for anything else."""
    try:
        found = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            target = os.readlink(path)
            raise bad(name, f"is a link to {target}, which is not here", "mount the link's target too") from None
        raise bad(name, "is missing", "download it; all files of the repository belong into one folder") from None
    except OSError as error:
        fix = "give this user read access to the folder"
        raise bad(name, f"cannot be looked at ({error.strerror})", fix) from None
    if not stat.S_ISREG(found.st_mode):
        raise bad(name, "is not a regular file", "put the file itself there")
    return found.st_size


def start_of(path: Path, name: str, count: int) -> bytes:
    """The first `count` bytes of a file. Raises Refusal."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise bad(name, f"cannot be read ({error.strerror})", "give this user read access to it") from None


def refuse_pointer(start: bytes, name: str) -> None:
    """Raise a Refusal where a file's first bytes are those of a git-lfs pointer."""
    if start.startswith(_LFS_MARK):
        size = re.search(rb"\nsize ([0-9]{1,18})", start)
        instead = f" instead of its {int(size.group(1)):,} bytes" if size else ""
        fix = "run `git lfs pull` in the folder, or download the file itself"
        raise bad(name, f"is a git-lfs pointer{instead}", fix)


def read_text(path: Path, name: str) -> bytes:
    """The bytes of a document. Raises Refusal."""
    size_bytes = size_of(path, name)
    if size_bytes > _LARGEST_JSON_BYTES:
        raise bad(name, f"has {size_bytes:,} bytes, far more than such a file can have")
    text = start_of(path, name, size_bytes)
    refuse_pointer(text, name)
    if not text.strip(b"\0 \r\n\t"):
        raise bad(name, "is empty" if not text.strip() else "is filled with zeros")
    return text


def quick(decoder: msgspec.json.Decoder[T], text: bytes) -> T | None:
    """What `decoder` asks of a document that is JSON and has it in the types asked for; None says nothing about it."""
    try:
        # msgspec takes strings that it skips for UTF-8.
        return decoder.decode(text if text.isascii() else text.decode("utf-8"))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def parse(text: bytes, name: str, what: str = "it") -> Any:
    """JSON of `text`, a Refusal for anything that is not (NaN, over-deep nesting and non-UTF-8 included)."""

    def refuse_constant(constant: str):
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text.decode("utf-8"), parse_constant=refuse_constant)
    except RecursionError:
        raise bad(name, f"{what} is nested too deeply to be one") from None
    except ValueError as error:
        raise bad(name, f"{what} is not valid JSON ({str(error)[:100]})") from None


def parse_object(text: bytes, name: str) -> dict[str, Any]:
    """The object that a document holds. Raises Refusal."""
    content = parse(text, name)
    if not isinstance(content, dict):
        raise bad(name, "is not a JSON object")
    return content


def read_json(path: Path, name: str) -> dict[str, Any]:
    """A small JSON file that holds an object. Raises Refusal."""
    return parse_object(read_text(path, name), name)
