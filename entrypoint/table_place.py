"""Decides where the rows of the n-gram table come from while the engine runs, and says why in one line.

From the wish FLASHNEXT_TABLE, the disks of the checkpoint and of our own folder (`machine.mounts`), and what lies where the prepared
file would be (`Prepared`, read by table.look). Rule order
1. a wish: `checkpoint` reads in place; `prepared` (the file in our folder) or a path reads that file, which is made where it is not
   whole and its disk has the room; `pinned` is upstream's page-locked host memory.
2. a finished file of this checkpoint in our folder is used, unless its disk is slow and the checkpoint's is not.
3. in place, without a second copy, where nothing is known against the checkpoint's disk.
4. a file in our folder, to be made, where the checkpoint's disk is slow for random reads, and ours is a local SSD or NVMe drive with
   room for the table and `data_spare_bytes` (rules.yaml).
5. in place all the same; the line says what is slow and why there is no file.

On disk the table takes no RAM of the plan's: what is left is its page cache. Page-locked it takes what PyTorch's allocator reserves,
the next power of two (c10/core/AllocatorConfig.h of 2.13: pinned_max_round_threshold has no limit by default), which is checked
beside the engine and the K/V of the plan (`check_ram`). A hard disk is refused where RAM does not hold the table either (`check_disk`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .budget import power_of_two
from .errors import Exit, Refusal
from .machine import Mount
from .thumb import rule
from .units import GIB, format_gib
from .wishes import Wishes

WORDS = ("auto", "checkpoint", "prepared", "pinned")
FILE = "table/rows"
"""The prepared file, in our own folder."""

_SLOW = {
    "hdd": "a spinning disk: about 100 random reads a second",
    "network": "reached over a network or from inside a virtual machine: every row is a message",
    "overlay": "inside the container's own layers",
}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What lies at `file`: `whole` is the whole table of this checkpoint; `trouble` says why a file that is there cannot be used;
    `reserved_bytes` are already on the disk for one that is being made."""

    file: str
    whole: bool = False
    trouble: str | None = None
    reserved_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Place:
    """`backing` is `checkpoint` (in place), `file` (a prepared one, at `file`; `make`: before the engine starts) or `pinned`.

    `disk` is the role of the mount that is read (None: no disk); `pinned_bytes` is the RAM that is page-locked for it.
    """

    backing: str
    source: str
    reason: str
    table_bytes: int
    file: str | None = None
    make: bool = False
    disk: str | None = None
    pinned_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def setting(self) -> dict[str, str] | None:
        """`table` of the engine-side package's settings; None leaves the table to upstream."""
        return {"checkpoint": {"backing": "checkpoint"}, "file": {"path": self.file}}.get(self.backing)

    @property
    def on_disk(self) -> bool:
        return self.setting is not None

    @property
    def words(self) -> str:
        return {
            "checkpoint": "in place, in the checkpoint's own shards",
            "file": f"from the prepared file {self.file}" + (", to be made" if self.make else ""),
            "pinned": "page-locked in host RAM",
        }[self.backing]

    def as_dict(self) -> dict[str, Any]:
        keys = ("backing", "file", "make", "table_bytes", "pinned_bytes", "source", "reason")
        return {key: getattr(self, key) for key in keys}


def file_of(wishes: Wishes) -> str | None:
    """Where the prepared file is or would be; None where the wish is for another place."""
    wish = wishes.value("table")
    if wish in ("checkpoint", "pinned"):
        return None
    return str(Path(wishes.value("data"), FILE)) if wish in WORDS else wish


def paths(wishes: Wishes) -> dict[str, str]:
    """The paths whose disks the plan looks at, by role."""
    out = {"model": wishes.value("model"), "data": wishes.value("data")}
    if wishes.value("table") not in WORDS:
        out["table"] = wishes.value("table")
    return out


def why_slow(mount: Mount) -> str | None:
    """Why random reads of 320 B are slow there, in words; None where nothing is known against it."""
    if mount.kind in _SLOW:
        return _SLOW[mount.kind]
    if mount.usb:
        return "on USB"
    if mount.compressed:
        return "compressed: a row of 320 B unpacks up to 128 KiB"
    if mount.fs_type == "zfs":
        return "a row of 320 B reads a whole record, 128 KiB by default"
    return None


def disk_words(mount: Mount | None) -> str:
    """'nvme (ext4 on nvme0n1, nvme1n1)': kind, file system and the disks under it."""
    if mount is None:
        return "of unknown kind"
    below = f" on {', '.join(mount.disks)}" if mount.disks else ""
    return f"{mount.kind} ({mount.fs_type}{below})"


def needed_bytes(table_bytes: int) -> int:
    """What a disk must have free for a file of the table."""
    return table_bytes + rule("data_spare_bytes")[0]


def choose(
    mounts: Mapping[str, Mount], table_bytes: int, wishes: Wishes, prepared: Prepared | None = None, wsl: bool = False
) -> Place | None:
    """The place of a table of `table_bytes`; None where the model has none. `prepared` None: not looked at.

    Raises Refusal: code 3 for a wish that cannot work on this box, code 5 for a file that is not this table.
    """
    asked = wishes["table"]
    if not table_bytes:
        if asked.value != "auto":
            raise Refusal(f"{asked.source} is set, and this model has no n-gram table", "leave it out", Exit.PLAN)
        return None
    if asked.value == "auto":
        return _auto(mounts, table_bytes, prepared or Prepared(file=file_of(wishes)))
    if asked.value == "checkpoint":
        reason = f"in place, as {asked.source} asks; the disk is {disk_words(mounts.get('model'))}"
        return Place(backing="checkpoint", source="wished", reason=reason, table_bytes=table_bytes, disk="model")
    if asked.value == "pinned":
        return _pinned(table_bytes, asked.source, wsl)
    return _wished_file(mounts, table_bytes, wishes, prepared or Prepared(file=file_of(wishes)))


def _auto(mounts: Mapping[str, Mount], table_bytes: int, prepared: Prepared) -> Place:
    model, data = mounts.get("model"), mounts.get("data")
    model_slow, data_slow = (why_slow(mount) if mount else None for mount in (model, data))
    in_place: dict[str, Any] = {
        "backing": "checkpoint",
        "source": "measured" if model else "derived",
        "table_bytes": table_bytes,
        "disk": "model",
    }
    if prepared.whole and not (data_slow and not model_slow):
        reason = "which is there and is the whole table of this checkpoint"
        return _from_file(prepared, table_bytes, "measured", reason, "data")
    if model_slow is None:
        notes = (_unused(prepared),) if prepared.trouble else ()
        reason = f"in place: nothing is known against the checkpoint's disk, {disk_words(model)}, and a file would be a second copy of {format_gib(table_bytes)}"
        return Place(reason=reason, notes=notes, **in_place)
    why_not = _why_no_file(data, table_bytes, prepared)
    if why_not is None:
        reason = (
            f"which prepare and serve make ({format_gib(table_bytes)}): the checkpoint's disk, {disk_words(model)}, is slow for random reads "
            f"({model_slow}), and ours is {disk_words(data)} with {format_gib(data.free_bytes, 1)} free"
        )
        return _from_file(prepared, table_bytes, "measured", reason, "data", make=True)
    return Place(
        reason=f"in place, although the checkpoint's disk, {disk_words(model)}, is slow for random reads ({model_slow}): {why_not}",
        **in_place,
    )


def _from_file(prepared: Prepared, table_bytes: int, source: str, why: str, disk: str, make: bool = False) -> Place:
    return Place(
        backing="file",
        source=source,
        reason=f"from {prepared.file}, {why}",
        table_bytes=table_bytes,
        file=prepared.file,
        make=make,
        disk=disk,
    )


def _unused(prepared: Prepared) -> str:
    return f"{prepared.file} is not used: {prepared.trouble}"


def _why_no_file(data: Mount | None, table_bytes: int, prepared: Prepared) -> str | None:
    """Why no file is made in our folder; None where it is."""
    if data is None or data.kind not in ("nvme", "ssd") or why_slow(data) is not None:
        return f"our own folder's disk, {disk_words(data)}, is not known to be better"
    if data.read_only:
        return "our own folder cannot be written"
    if prepared.trouble:
        return _unused(prepared)
    if data.free_bytes is None:
        return "how much our own folder's disk has free is not known"
    if data.free_bytes + prepared.reserved_bytes < needed_bytes(table_bytes):
        return (
            f"a file takes {format_gib(needed_bytes(table_bytes))} with what caches need, and our own folder's disk has "
            f"{format_gib(data.free_bytes + prepared.reserved_bytes)} free for it"
        )
    return None


def _wished_file(mounts: Mapping[str, Mount], table_bytes: int, wishes: Wishes, prepared: Prepared) -> Place:
    asked, role = wishes["table"], "data" if wishes.value("table") in WORDS else "table"
    mount = mounts.get(role)
    if prepared.trouble:
        raise Refusal(
            f"table: {prepared.file}: {prepared.trouble}",
            f"remove it and {prepared.file}.json, or leave FLASHNEXT_TABLE out to read the rows in the checkpoint",
            Exit.TABLE,
        )
    if mount is not None and mount.kind == "memory":
        raise Refusal(
            f"{prepared.file} lies in RAM ({mount.fs_type}), and the file takes {format_gib(table_bytes)} of it",
            "name a file on a disk, or leave FLASHNEXT_TABLE out to read the rows in the checkpoint",
            Exit.PLAN,
        )
    room = None if mount is None or mount.free_bytes is None else mount.free_bytes + prepared.reserved_bytes
    if not prepared.whole and room is not None and room < needed_bytes(table_bytes):
        raise Refusal(
            f"{prepared.file} is to be made: it takes {format_gib(table_bytes)} with {format_gib(rule('data_spare_bytes')[0])} to spare, and "
            f"its disk has {format_gib(room)} free for it",
            f"free {format_gib(needed_bytes(table_bytes) - room)} there, or leave FLASHNEXT_TABLE out to read the rows in the checkpoint",
            Exit.PLAN,
        )
    made = "which is there and whole" if prepared.whole else "which prepare and serve make if it is not there"
    reason = f"as {asked.source} asks, {made}; the disk is {disk_words(mount)}"
    return _from_file(prepared, table_bytes, "wished", reason, role, make=not prepared.whole)


def _pinned(table_bytes: int, source: str, wsl: bool) -> Place:
    if wsl:  # C16
        raise Refusal(
            f"{source} asks for {format_gib(table_bytes)} of page-locked RAM, and WSL2 page-locks about 1 GiB at most",
            "leave FLASHNEXT_TABLE out: the rows then stay on disk",
            Exit.PLAN,
        )
    pinned = power_of_two(table_bytes)
    return Place(
        backing="pinned",
        source="wished",
        reason=f"page-locked in host RAM, as {source} asks: {format_gib(pinned)}, the power of two that PyTorch's allocator takes for "
        f"{format_gib(table_bytes)}",
        table_bytes=table_bytes,
        pinned_bytes=pinned,
    )


def check_ram(place: Place, ram_bytes: int, engine_bytes: int, page_cache_bytes: int, pool_bytes: int) -> None:
    """Whether RAM holds a page-locked table beside the engine, `pool_bytes` of K/V and the least page cache. Raises Refusal (code 3)."""
    short = place.pinned_bytes + engine_bytes + page_cache_bytes + pool_bytes - ram_bytes
    if not place.pinned_bytes or short <= 0:
        return
    raise Refusal(
        f"{format_gib(ram_bytes)} of RAM are available; the page-locked table takes {format_gib(place.pinned_bytes)} "
        f"({format_gib(place.table_bytes)} rounded up to a power of two), the engine {format_gib(engine_bytes)}, K/V {format_gib(pool_bytes)}, the page "
        f"cache {format_gib(page_cache_bytes)}: {format_gib(short)} are missing",
        f"leave FLASHNEXT_TABLE out: the rows then stay on disk and need none of it; or free {format_gib(short)}"
        + (" (FLASHNEXT_HOST_KV_MAX caps the K/V)" if pool_bytes else ""),
        Exit.PLAN,
    )


def check_disk(place: Place, mounts: Mapping[str, Mount], left_bytes: int) -> list[str]:
    """C32: what the disk that is read means beside `left_bytes` of page cache, in words. Raises Refusal (code 3)."""
    mount = mounts.get(place.disk or "")
    if mount is None:
        return []
    share = min(1.0, left_bytes / place.table_bytes)
    if mount.kind == "hdd" and left_bytes < place.table_bytes:
        raise Refusal(
            f"the table ({format_gib(place.table_bytes)}) lies on a hard disk, about {rule('hdd_reads_s')[0]} random reads a second, and RAM keeps "
            f"{share:.0%} of it",
            f"move {'the checkpoint' if place.disk == 'model' else 'the file'} to an NVMe drive, or put FLASHNEXT_DATA (compose: the volume `data`) on an SSD "
            f"or NVMe drive with {format_gib(needed_bytes(place.table_bytes))} free, where a file of it is then made, or add "
            f"{math.ceil((place.table_bytes - left_bytes) / GIB)} GiB of RAM so that the table stays there",
            Exit.PLAN,
        )
    if mount.kind == "network":
        return [
            f"the table lies on {mount.fs_type}: each token reads it at random; RAM keeps {share:.0%} of its {format_gib(place.table_bytes)}"
        ]
    return []
