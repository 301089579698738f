"""A box that is not here: `--simulate '2x3090+1x4090' --ram 125GiB` becomes the same `Machine` that detect.py reads.

Rule order
1. `@FILE` is a box in a file (box_file.py); the other options replace what it says.
2. Parts are joined with `+` (or a comma); each is `COUNTxCARD`, `CARDxCOUNT` or `CARD` (one of it), numbered in the order
   given, as CUDA would with CUDA_DEVICE_ORDER=PCI_BUS_ID.
3. CARD is a size with an optional compute capability (`24GiB@8.6`, `24`), or a name or alias of boards.yaml, capitals,
   blanks and filler words (NVIDIA, GeForce, RTX, Generation, ... Edition) aside. An unknown name is refused with the
   nearest ones, and a size beside a name that the card does not have is refused too.
4. A simulated card is empty: free = total - the driver's reserve as boards.yaml states it.
5. What is not said stays unknown (None): no --ram, no RAM; no --disk, no mount.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from .data import data
from .errors import Exit, Refusal
from .machine import Gpu, Machine, Mount, least
from .units import MIB, format_gib, parse_size

_MOST_CARDS = 64

# --disk word -> (kind, file system, rotational), as machine.Mount has them.
DISKS = {
    "nvme": ("nvme", "ext4", False),
    "sata": ("ssd", "ext4", False),
    "hdd": ("hdd", "ext4", True),
    "nfs": ("network", "nfs4", None),
}

_FILLER = re.compile(r"nvidia|geforce|rtx|generation|blackwell|workstation|server|edition|maxq|graphics|card|tesla")
_SIZE_WORDS = r"([0-9]+(?:\.[0-9]+)?)\s*([gm])(?:i?b)?"
_CARD_SIZE = re.compile(rf"(?:{_SIZE_WORDS}|([0-9]{{1,3}}))(?:\s*@\s*(?:sm_?)?([0-9]+)\.([0-9]+))?", re.IGNORECASE)
_NAME_AND_SIZE = re.compile(rf"(.*?)[\s,(]+{_SIZE_WORDS}\)?", re.IGNORECASE)
_OTHER_MAKERS = re.compile(
    r"\b(amd|radeon|rx\s*\d{4}|instinct|mi\d{2,3}x?|xtx|intel|arc|b[56]\d0|apple|m\d\s*(max|ultra|pro))\b"
)


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
def boards() -> tuple[Board, ...]:
    """The catalogue, in the order of boards.yaml."""
    rows = []
    for row in data("boards")["boards"]:
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
    return math.ceil(total_bytes * data("boards")["reserve_fraction"] / MIB) * MIB


def _key(name: str) -> str:
    """A card's name without what people write differently: capitals, blanks, filler words."""
    return _FILLER.sub("", re.sub(r"[^a-z0-9]", "", name.lower()))


def find_board(name: str, total_bytes: int | None = None) -> Board | None:
    """The catalogue's row for a card as NVML or a person names it, None where it has none.

    With `total_bytes` (a real card) the row must also agree within 5 %: two sizes of a 4060 Ti share one NVML name.
    """
    key = _key(name)
    # '3x3090s' is a plural, 'L40S' is a card: the name as it stands goes first.
    for wanted in dict.fromkeys((key, re.sub(r"(?<=\d)s$", "", key))):
        for board in boards():
            named = wanted in {_key(board.name), *map(_key, board.aliases)}
            # NVML leaves the size out of the name; compare without it once the size itself can be compared.
            if total_bytes is not None:
                named = named or wanted == _key(re.sub(r" [0-9]+GB$", "", board.name))
                named = named and abs(board.total_bytes - total_bytes) <= 0.05 * total_bytes
            if named:
                return board
    return None


def cards_of(spec: str) -> list[Gpu]:
    """One Gpu per card of `3x3090`, `2x3090+1x4090`, `24+24+16`. Raises Refusal (code 2)."""
    gpus: list[Gpu] = []
    for part in re.split(r"[+,;&]|\band\b", spec):
        count, name = _counted(part.strip())
        if not name:
            raise Refusal(
                f"--simulate {spec[:80]!r}: {part.strip()[:40]!r} is not COUNTxCARD",
                "write for example --simulate 3x3090, 2x3090+1x4090 or 3x24GiB@8.6",
                Exit.USAGE,
            )
        if not 0 < count <= _MOST_CARDS or len(gpus) + count > _MOST_CARDS:
            raise Refusal(
                f"--simulate {spec[:80]!r}: between 1 and {_MOST_CARDS} cards can be simulated",
                "name the cards that the box has, for example --simulate 3x3090",
                Exit.USAGE,
            )
        first = _card(name, index=len(gpus))
        gpus += [replace(first, index=len(gpus) + n, nvml_index=len(gpus) + n) for n in range(count)]
    return gpus


def _counted(part: str) -> tuple[int, str]:
    """(how many, of what) for `3x3090`, `3 RTX 3090`, `3090 x 3` and `3090`; an empty name for what is none of these."""
    if found := re.fullmatch(r"([0-9]{1,5})\s*[x×*]\s*(\S.*)", part, re.IGNORECASE):
        count, name = int(found[1]), found[2]
        # '3090x3': nobody has 3090 cards, and a card of 3 GB is none.
        if count > _MOST_CARDS and re.fullmatch(r"[0-9]{1,2}", name) and find_board(found[1]):
            return int(name), found[1]
        return count, name
    if found := re.fullmatch(r"(\S.*?)\s*[x×*]\s*([0-9]{1,2})", part, re.IGNORECASE):
        return int(found[2]), found[1]
    if (found := re.fullmatch(r"([0-9]{1,2})\s+(\S.*)", part)) and find_board(found[2]) and not find_board(part):
        return int(found[1]), found[2]
    return 1, part


def _card(text: str, index: int) -> Gpu:
    sized = _CARD_SIZE.fullmatch(text)
    if sized:
        number, letter, bare, major, minor = sized.groups()
        # A card's "24GB" is the maker's, which is 24 GiB.
        total_bytes = parse_size(f"{number or bare}{letter or 'G'}iB", "--simulate")
        if total_bytes < 1024 * MIB:
            raise Refusal(f"--simulate: a card of {text[:40]!r} is too small to be one", "write 24GiB@8.6", Exit.USAGE)
        return Gpu(
            index=index,
            nvml_index=index,
            name=f"card of {text}" if letter else f"card of {bare}GB",
            compute_capability=(int(major), int(minor)) if major else None,
            total_bytes=total_bytes,
            reserved_bytes=_reserve(total_bytes),
            free_bytes=total_bytes - _reserve(total_bytes),
            mig=False,
            processes=0,
        )
    board = find_board(text) or _named_with_size(text)
    if board is None:
        other = _OTHER_MAKERS.search(text.lower())
        what = f"{text[:60]!r} is not an NVIDIA card, and the kernels are CUDA's" if other else None
        raise Refusal(
            f"--simulate: {what}"
            if what
            else f"--simulate does not know the card {text[:60]!r}; nearest: {', '.join(_nearest(text))}",
            "name an NVIDIA card, such as 3x3090"
            if what
            else "name one of those, or give memory and compute capability, such as 24GiB@8.6",
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


def _named_with_size(text: str) -> Board | None:
    """The row of `3090 24GB`; None where the text is no such pair or the name is unknown. Raises Refusal (code 2) where
    that card has another size."""
    found = _NAME_AND_SIZE.fullmatch(text)
    if not found or not (board := find_board(found[1])):
        return None
    said_bytes = parse_size(f"{found[2]}{found[3]}iB", "--simulate")
    # A size is said in round numbers: 48 for the 44.99 GiB that an A40 with ECC shows.
    if abs(board.total_bytes - said_bytes) > 0.07 * said_bytes:
        raise Refusal(
            f"--simulate: {board.name} has {format_gib(board.total_bytes, 0)}, not {found[2]} {found[3].upper()}iB",
            f"leave the size out, or write only the size, such as {found[2]}GiB@8.6",
            Exit.USAGE,
        )
    return board


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
    """The box that the words or the file describe. Sizes as `units.parse_size` reads them; raises Refusal (code 2) for what
    it cannot read.

    `ram` is MemTotal; MemAvailable is that minus boards.yaml's host_reserve_mib. `cgroup` is a memory limit with
    nothing used yet. `disk` (a key of DISKS) holds both the model and our data. Each replaces what a file says.
    """
    from . import box_file  # which describes its own short words by the functions of this file

    name = cards.strip()
    if name.startswith("@"):
        box = box_file.read(Path(name[1:]))
    elif re.search(r"\.(ya?ml|json)$", name, re.IGNORECASE):
        raise Refusal(f"--simulate {name[:60]!r} names no cards", f"for a box in a file write @{name[:60]}", Exit.USAGE)
    else:
        box = Machine(gpus=tuple(cards_of(cards)), cuda_order="PCI_BUS_ID", simulated=cards)
    return host(box, ram=ram, cgroup=cgroup, disk=disk, wsl=wsl)


def host(
    box: Machine,
    *,
    ram: str | int | None = None,
    cgroup: str | int | None = None,
    disk: str | None = None,
    wsl: bool = False,
) -> Machine:
    """`box` with the host facts that were said; what was not said stays as it is. Raises Refusal (code 2)."""
    changes: dict[str, Any] = {}
    if ram is not None:
        total_bytes = parse_size(ram, "--ram")
        available_bytes = max(0, total_bytes - data("boards")["host_reserve_mib"] * MIB)
        changes |= {"mem_total_bytes": total_bytes, "mem_available_bytes": available_bytes}
    if cgroup is not None:
        limit_bytes = parse_size(cgroup, "--cgroup")
        changes |= {"cgroup_version": 2, "cgroup_limit_bytes": limit_bytes, "cgroup_used_bytes": 0}
    if disk is not None:
        changes |= {"mounts": _simulated_mounts(disk)}
    if wsl:
        changes |= {"wsl": True}
    box = replace(box, **changes)
    if ram is not None or cgroup is not None:
        limit = box.cgroup_limit_bytes
        allowed = None if limit is None else max(0, limit - (box.cgroup_used_bytes or 0))
        box = replace(box, ram_available_bytes=least(box.mem_available_bytes, allowed))
    return box


def _simulated_mounts(disk: str) -> dict[str, Mount]:
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
