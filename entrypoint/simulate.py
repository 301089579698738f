"""A box that is not here: `--simulate '2x3090+1x4090' --ram 125GiB` becomes the same `Machine` that machine.py reads.

Rule order
1. Parts are joined with `+` (or a comma); each is `COUNTxCARD` or `CARD` (one of it), numbered in the order given, as
   CUDA would with CUDA_DEVICE_ORDER=PCI_BUS_ID.
2. CARD is a size with an optional compute capability (`24GiB@8.6`), or a name or alias of boards.yaml, filler words
   (NVIDIA, GeForce, RTX, Generation, ... Edition) aside. An unknown name is refused with the nearest ones.
3. A simulated card is empty: free = total - the driver's reserve as boards.yaml states it.
4. What is not said stays unknown (None): no --ram, no RAM; no --disk, no mount.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .errors import Exit, Refusal
from .machine import Gpu, Machine, Mount, least
from .units import MIB, parse_size

_BOARDS_FILE = Path(__file__).with_name("boards.yaml")
_MOST_CARDS = 64

# --disk word -> (kind, file system, rotational), as machine.Mount has them.
DISKS = {
    "nvme": ("nvme", "ext4", False),
    "sata": ("ssd", "ext4", False),
    "hdd": ("hdd", "ext4", True),
    "nfs": ("network", "nfs4", None),
}

_FILLER = re.compile(r"\b(nvidia|geforce|rtx|generation|blackwell|workstation|server|edition|max-q|graphics|card)\b")
_CARD_SIZE = re.compile(r"([0-9.]+)\s*([gm])(?:i?b)?(?:\s*@\s*([0-9]+)\.([0-9]+))?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Board:
    """One row of boards.yaml. `nominal`: the total is the marketing size, not a figure seen in an NVML listing."""

    name: str
    aliases: tuple[str, ...]
    compute_capability: tuple[int, int]
    total_bytes: int
    reserved_bytes: int
    bandwidth_bytes_s: float
    pcie_gen: int
    pcie_width: int
    nominal: bool


@cache
def _catalogue() -> dict[str, Any]:
    return yaml.safe_load(_BOARDS_FILE.read_text(encoding="utf-8"))


@cache
def boards() -> tuple[Board, ...]:
    """The catalogue, in the order of boards.yaml."""
    rows = []
    for row in _catalogue()["boards"]:
        major, _, minor = str(row["cc"]).partition(".")
        total_bytes = row["mib"] * MIB
        rows.append(
            Board(
                name=row["name"],
                aliases=tuple(row["aliases"]),
                compute_capability=(int(major), int(minor)),
                total_bytes=total_bytes,
                reserved_bytes=row["reserve"] * MIB if "reserve" in row else _reserve(total_bytes),
                bandwidth_bytes_s=row["gb_s"] * 1e9,
                pcie_gen=row["gen"],
                pcie_width=row["width"],
                nominal=row.get("nominal", False),
            )
        )
    return tuple(rows)


def _reserve(total_bytes: int) -> int:
    """The driver's share of a card without a known figure, in whole MiB."""
    return math.ceil(total_bytes * _catalogue()["reserve_fraction"] / MIB) * MIB


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _FILLER.sub("", name.lower()))


def find_board(name: str, total_bytes: int | None = None) -> Board | None:
    """The catalogue's row for a card as NVML or a person names it, None where it has none.

    With `total_bytes` (a real card) the row must also agree within 5 %: two sizes of a 4060 Ti share one NVML name.
    """
    key = _key(name)
    for board in boards():
        named = key in {_key(board.name), *map(_key, board.aliases)}
        # NVML leaves the size out of the name; compare without it once the size itself can be compared.
        if total_bytes is not None:
            named = named or key == _key(re.sub(r" [0-9]+GB$", "", board.name))
            named = named and abs(board.total_bytes - total_bytes) <= 0.05 * total_bytes
        if named:
            return board
    return None


def _cards(spec: str) -> list[Gpu]:
    """One Gpu per simulated card. Raises Refusal (code 2)."""
    gpus: list[Gpu] = []
    for part in re.split(r"[+,]", spec):
        found = re.fullmatch(r"\s*(?:([0-9]{1,4})\s*[x×*]\s*)?(\S.*?)\s*", part)
        if not found:
            raise Refusal(
                f"--simulate {spec[:80]!r}: {part.strip()[:40]!r} is not COUNTxCARD",
                "write for example --simulate 3x3090, 2x3090+1x4090 or 3x24GiB@8.6",
                Exit.USAGE,
            )
        count = int(found.group(1) or 1)
        if not 0 < count <= _MOST_CARDS or len(gpus) + count > _MOST_CARDS:
            raise Refusal(
                f"--simulate {spec[:80]!r}: between 1 and {_MOST_CARDS} cards can be simulated",
                "name the cards that the box has, for example --simulate 3x3090",
                Exit.USAGE,
            )
        for _ in range(count):
            gpus.append(_card(found.group(2), index=len(gpus)))
    return gpus


def _card(text: str, index: int) -> Gpu:
    sized = _CARD_SIZE.fullmatch(text)
    if sized:
        number, letter, major, minor = sized.groups()
        # A card's "24GB" is the maker's, which is 24 GiB.
        total_bytes = parse_size(f"{number}{letter}iB", "--simulate")
        if total_bytes < 1024 * MIB:
            raise Refusal(f"--simulate: a card of {text!r} is too small to be one", "write 24GiB@8.6", Exit.USAGE)
        return Gpu(
            index=index,
            nvml_index=index,
            name=f"card of {text}",
            compute_capability=(int(major), int(minor)) if major else None,
            total_bytes=total_bytes,
            reserved_bytes=_reserve(total_bytes),
            free_bytes=total_bytes - _reserve(total_bytes),
            mig=False,
            processes=0,
        )
    board = find_board(text)
    if board is None:
        raise Refusal(
            f"--simulate does not know the card {text[:60]!r}; nearest: {', '.join(_nearest(text))}",
            "name one of those, or give memory and compute capability, such as 24GiB@8.6",
            Exit.USAGE,
        )
    return Gpu(
        index=index,
        nvml_index=index,
        name=board.name,
        compute_capability=board.compute_capability,
        total_bytes=board.total_bytes,
        reserved_bytes=board.reserved_bytes,
        free_bytes=board.total_bytes - board.reserved_bytes,
        pcie_gen_max=board.pcie_gen,
        pcie_width_max=board.pcie_width,
        mig=False,
        processes=0,
    )


def _nearest(text: str, count: int = 3) -> list[str]:
    """Names of the catalogue that look most like `text`, best first."""
    keys = {key: board.name for board in boards() for key in (_key(board.name), *map(_key, board.aliases))}
    close = difflib.get_close_matches(_key(text), keys, n=2 * count, cutoff=0.0)
    return list(dict.fromkeys(keys[key] for key in close))[:count]


def simulate(
    cards: str,
    *,
    ram: str | int | None = None,
    cgroup: str | int | None = None,
    disk: str | None = None,
    wsl: bool = False,
) -> Machine:
    """The box that the words describe. Sizes as `units.parse_size` reads them; raises Refusal (code 2) for what it
    cannot.

    `ram` is MemTotal; MemAvailable is that minus boards.yaml's host_reserve_mib. `cgroup` is a memory limit with
    nothing used yet. `disk` (a key of DISKS) holds both the model and our data.
    """
    gpus = _cards(cards)
    total_bytes = available_bytes = limit_bytes = None
    if ram is not None:
        total_bytes = parse_size(ram, "--ram")
        available_bytes = max(0, total_bytes - _catalogue()["host_reserve_mib"] * MIB)
    if cgroup is not None:
        limit_bytes = parse_size(cgroup, "--cgroup")
    return Machine(
        gpus=tuple(gpus),
        cuda_order="PCI_BUS_ID",
        mem_total_bytes=total_bytes,
        mem_available_bytes=available_bytes,
        cgroup_version=None if limit_bytes is None else 2,
        cgroup_limit_bytes=limit_bytes,
        cgroup_used_bytes=None if limit_bytes is None else 0,
        ram_available_bytes=least(available_bytes, limit_bytes),
        wsl=wsl,
        mounts=_simulated_mounts(disk),
        simulated=cards,
    )


def _simulated_mounts(disk: str | None) -> dict[str, Mount]:
    if disk is None:
        return {}
    if disk.lower() not in DISKS:
        raise Refusal(f"--disk {disk[:40]!r} is not a kind of disk", f"write one of {', '.join(DISKS)}", Exit.USAGE)
    kind, fs_type, rotational = DISKS[disk.lower()]
    mount = Mount(
        path="/",
        mount_point="/",
        fs_type=fs_type,
        source="simulated",
        kind=kind,
        rotational=rotational,
        read_only=False,
    )
    return {"model": mount, "data": mount}
