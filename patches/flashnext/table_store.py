# SPDX-License-Identifier: Apache-2.0
"""Decide where each row of the N-gram table lies on disk, and refuse files that are not whole, before any is read.

The table has `rows` rows of `columns` values. Two backings, one result (`Table`: row -> part -> file and byte):

- in place: the `ngram_embedding.shard_K.weight` tensors of the checkpoint, K from 0. Upstream cuts the table into parts of
  ceil(rows / parts) rows, the last ones shorter or empty (load_weights of its Qwen4ExpNGramEmbedding), so row r is row
  r % part_rows of part r // part_rows.
- flat: one file of rows * columns * itemsize bytes, made by `flashnext prepare`, with a marker FILE.json beside it that is
  written last. One part.

Rule order. Checkpoint: the index (else every *.safetensors) says which files; each header is held against its file's exact
size; the parts must be 0..n-1, of the asked dtype and the shapes that the rule above gives. Flat: no marker, refused; a
marker of another table, refused; a size that is off by a byte, refused; a hole (reserved and never written), refused; and
the file's identity must be the marker's, and the checkpoint's if there is one.

The identity of a table is a sha256 over its dtype, its shape and SAMPLES rows spread evenly over it, so it does not
depend on how a checkpoint is cut into files. entrypoint/table.py computes the same; a test holds the two together.
Standard library only. Format: https://github.com/huggingface/safetensors#format.
"""

import errno
import hashlib
import json
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1}
SAMPLES = 256
MARKER_FORMAT = 1
LARGEST_HEADER_BYTES = 100_000_000
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(?P<layer>.*\blayers\.\d+\.)ple\.ple_embedding\.ngram_embedding\.shard_(?P<part>\d+)\.weight")


class TableError(ValueError):
    """The table cannot be used; one line: what is wrong, then `Fix: ` and what to do."""

    def __init__(self, what: str, fix: str):
        super().__init__(f"flashnext: {what}. Fix: {fix}")


_DOWNLOAD = "download this file again; an interrupted download resumes"
_PREPARE = "run `flashnext prepare` for the table again, or unset FLASHNEXT_TABLE to read it in the checkpoint"


@dataclass(frozen=True)
class Part:
    """`rows` rows that follow one another in `file` from byte `start`."""

    file: str
    start: int
    rows: int


class Table:
    """Open files and the place of every row. `close()` gives the descriptors back; reads are positional, so threads
    may share it."""

    def __init__(self, parts: list[Part], rows: int, columns: int, dtype: str):
        self.parts, self.rows, self.columns, self.dtype = parts, rows, columns, dtype
        self.row_bytes = columns * ITEM_BYTES[dtype]
        self.part_rows = max(parts[0].rows, 1)
        self._files: dict[str, int] = {}
        try:
            for part in parts:
                if part.file not in self._files:
                    descriptor = os.open(part.file, os.O_RDONLY | os.O_CLOEXEC)
                    self._files[part.file] = descriptor
                    # Rows are drawn at random: reading ahead of one would read up to 8 MiB for 320 bytes.
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        except OSError as error:
            self.close()
            raise TableError(f"cannot open {part.file}: {error.strerror}", "make it readable for this user") from None
        self.descriptors = [self._files[part.file] for part in parts]
        self.starts = [part.start for part in parts]

    def place(self, row: int) -> tuple[str, int, int]:
        """(file, descriptor, byte) of a row. Raises IndexError."""
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of a table of {self.rows}")
        part, within = divmod(row, self.part_rows)
        return self.parts[part].file, self.descriptors[part], self.starts[part] + within * self.row_bytes

    def read_row(self, row: int) -> bytes:
        """The bytes of a row. Raises OSError with the file's name: what the disk says, or EIO if the file has shrunk."""
        file, descriptor, at = self.place(row)
        try:
            data = os.pread(descriptor, self.row_bytes, at)
        except OSError as error:
            raise OSError(error.errno, f"reading row {row} of the table: {error.strerror}", file) from None
        if len(data) != self.row_bytes:
            raise OSError(errno.EIO, f"row {row} of the table is cut off at byte {at + len(data)}", file)
        return data

    def identity(self) -> str:
        """See the module's docstring. Reads SAMPLES rows."""
        total = hashlib.sha256(f"{self.dtype} {self.rows} {self.columns}\n".encode())
        for n in range(SAMPLES):
            total.update(self.read_row(n * (self.rows - 1) // (SAMPLES - 1)))
        return total.hexdigest()

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


def read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """{tensor: (dtype, shape, first byte in the file)} of one safetensors file whose size is exactly what the header
    says. Raises TableError."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 0 < length <= min(LARGEST_HEADER_BYTES, size - 8):
                raise TableError(f"{file} has no safetensors header ({size} bytes)", _DOWNLOAD)
            header = json.loads(stream.read(length))
        found, end = {}, 8 + length
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            found[name] = (entry["dtype"], tuple(entry["shape"]), 8 + length + first)
            end = max(end, 8 + length + last)
    except OSError as error:
        raise TableError(f"cannot read {file}: {error.strerror}", "put the whole checkpoint there") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, TableError):
            raise
        raise TableError(f"the header of {file} is not safetensors", _DOWNLOAD) from None
    if end != size:
        raise TableError(f"{file} has {size} bytes, and its header says {end}", _DOWNLOAD)
    return found


def files_of_checkpoint(folder: Path, layer: str) -> list[Path]:
    """The files that may hold parts of the table, in name order."""
    index = folder / INDEX
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].items())
    except FileNotFoundError:
        return sorted(folder.glob("*.safetensors"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise TableError(f"{index} cannot be read", _DOWNLOAD) from None
    return sorted({folder / file for name, file in names if _part_of(name, layer) is not None})


def _part_of(name: str, layer: str) -> int | None:
    """K if `name` is part K of the table of decoder layer `layer` ("layers.1."); drafts have layers of their own."""
    found = _SHARD.fullmatch(name)
    if found is None or name.startswith("mtp.") or not f".{found['layer']}".endswith(f".{layer}"):
        return None
    return int(found["part"])


def open_checkpoint(folder: str | Path, layer: str, rows: int, columns: int, dtype: str = "BF16") -> Table:
    """The table of decoder layer `layer` ("layers.1.", counted from 0), in place. Raises TableError."""
    folder = Path(folder)
    if not folder.is_dir():
        raise TableError(f"{folder} is no folder, and the table is read in place", "give the checkpoint's own folder")
    parts: dict[int, tuple[Part, str, tuple[int, ...]]] = {}
    for file in files_of_checkpoint(folder, layer):
        for name, (found_dtype, shape, start) in read_header(file).items():
            number = _part_of(name, layer)
            if number is None:
                continue
            if number in parts:
                raise TableError(
                    f"part {number} of the table is in {parts[number][0].file} and in {file}", "remove the stray one"
                )
            parts[number] = Part(str(file), start, shape[0] if shape else 0), found_dtype, shape
    missing = [number for number in range(max(parts, default=0) + 1) if number not in parts]
    if missing:
        raise TableError(f"part {missing[0]} of the table is not in {folder}", "download the whole checkpoint")
    part_rows = -(-rows // len(parts))
    for number in range(len(parts)):
        part, found_dtype, shape = parts[number]
        want = (max(0, min(part_rows, rows - number * part_rows)), columns)
        if (found_dtype, shape) != (dtype, want):
            raise TableError(
                f"part {number} of the table in {part.file} is {found_dtype} {list(shape)}, and {dtype} {list(want)} is "
                f"what a table of {rows} rows in {len(parts)} parts has",
                "use the checkpoint that belongs to this config.json",
            )
    return Table([parts[number][0] for number in range(len(parts))], rows, columns, dtype)


def marker_of(file: str | Path) -> Path:
    return Path(f"{file}.json")


def open_flat(
    file: str | Path, rows: int, columns: int, dtype: str = "BF16", source_identity: str | None = None
) -> Table:
    """A prepared table file. `source_identity`: the identity of the checkpoint's own table, None where there is no
    checkpoint to ask. Raises TableError."""
    file, marker = Path(file), marker_of(file)
    want = rows * columns * ITEM_BYTES[dtype]
    try:
        size = file.stat().st_size
    except OSError as error:
        raise TableError(f"there is no table at {file}: {error.strerror}", _PREPARE) from None
    try:
        told = json.loads(marker.read_bytes())
    except (OSError, ValueError):
        raise TableError(f"{file} has no marker {marker.name}, so it was never finished", _PREPARE) from None
    got = {key: told.get(key) for key in ("format", "dtype", "rows", "columns")} if isinstance(told, dict) else {}
    asked = {"format": MARKER_FORMAT, "dtype": dtype, "rows": rows, "columns": columns}
    if got != asked:
        raise TableError(f"{marker} is of another table ({got}, and this model has {asked})", _PREPARE)
    if size != want:
        raise TableError(f"{file} has {size} bytes, and a table of {rows} rows has {want}", _PREPARE)
    table = Table([Part(str(file), 0, rows)], rows, columns, dtype)
    try:
        hole = os.lseek(table.descriptors[0], 0, os.SEEK_HOLE)
        if hole < size:
            raise TableError(f"{file} was never written at byte {hole}", _PREPARE)
        identity = table.identity()
        if identity != told.get("identity"):
            raise TableError(f"the rows in {file} are not those that its marker was made for", _PREPARE)
        if source_identity not in (None, identity):
            raise TableError(f"{file} was made from another checkpoint", _PREPARE)
    except OSError as error:
        table.close()
        raise TableError(f"cannot read {file}: {error.strerror}", "check the disk (dmesg tells)") from None
    except TableError:
        table.close()
        raise
    return table
