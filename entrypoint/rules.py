"""Decides which wishes and boxes are refused before any arithmetic. Each rule names the report it answers (design case Cn).

A rule is a function that raises a Refusal or returns None; `check_wishes` and `check_machine` run theirs in order, so that the
first thing to mend is the first thing told.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .budget import Shapes, bounds
from .errors import Exit, Refusal
from .machine import UNLIMITED, Machine
from .units import format_gib
from .wishes import Wishes


def check_wishes(wishes: Wishes) -> None:
    """Contradictions among the wishes themselves. Raises Refusal (code 2)."""
    _host_kv_off_with_size(wishes)


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(wishes: Wishes, has_key: bool) -> None:
    """A port that other machines can reach asks for a key. Raises Refusal (code 3)."""
    bind = wishes.value("bind")
    if not _loopback(bind) and not has_key:
        raise Refusal(
            f"FLASHNEXT_BIND is {bind}, which other machines can reach, and there is no API key",
            "put a key into a file and set FLASHNEXT_API_KEY_FILE to it, or bind to 127.0.0.1",
            Exit.PLAN,
        )


def _host_kv_off_with_size(wishes: Wishes) -> None:
    if wishes.value("host_kv") == "off" and wishes["host_kv_max"].wished:
        raise Refusal(
            "contradiction: K/V in host RAM is turned off and its size is set",
            "drop one of FLASHNEXT_HOST_KV=off and FLASHNEXT_HOST_KV_MAX",
            Exit.USAGE,
        )


def check_machine(machine: Machine, thumb: Mapping[str, Mapping[str, Any]]) -> None:
    """What no plan can mend on this box. `thumb` is rules.yaml. Raises Refusal (code 3)."""
    _mig(machine)
    _memory_known(machine)
    _compute_capability(machine, float(thumb["compute_capability_min"]["value"]))
    _driver(machine, thumb["driver_min"])
    _shm(machine)


def _mig(machine: Machine) -> None:
    """C20: a slice of a card has neither the memory nor the copy engines that the plan counts on."""
    for gpu in machine.gpus:
        if gpu.mig:
            raise Refusal(
                f"card {gpu.index} ({gpu.name}) is split into MIG slices",
                "turn MIG off on that card, or leave it out with CUDA_VISIBLE_DEVICES",
                Exit.PLAN,
            )


def _memory_known(machine: Machine) -> None:
    for gpu in machine.gpus:
        if gpu.free_bytes is None or gpu.total_bytes is None:
            raise Refusal(
                f"the free memory of card {gpu.index} ({gpu.name}) cannot be read",
                "check that nvidia-smi shows the card's memory",
                Exit.PLAN,
            )


def _compute_capability(machine: Machine, least: float) -> None:
    for gpu in machine.gpus:
        if gpu.compute_capability and gpu.compute_capability < (int(least), round(least % 1 * 10)):
            have = ".".join(map(str, gpu.compute_capability))
            raise Refusal(
                f"card {gpu.index} ({gpu.name}) has compute capability {have}, and the kernels need {least}",
                "leave it out with CUDA_VISIBLE_DEVICES, or use cards of the RTX 30 series or newer",
                Exit.PLAN,
            )


def _driver(machine: Machine, row: Mapping[str, Any]) -> None:
    """C23: CUDA error 803 or 804 from deep inside the engine otherwise."""
    if not machine.driver_version:
        return
    branch = machine.driver_version.split(".")[0]
    if branch.isdigit() and int(branch) < int(row["value"]):
        raise Refusal(
            f"the NVIDIA driver is {machine.driver_version}: {row['source']}",
            f"install driver {row['value']} or newer on the machine (not in the container)",
            Exit.PLAN,
        )


def _shm(machine: Machine) -> None:
    """C18: Docker's default of 64 MB is less than one message ring of the engine."""
    if machine.shm_total_bytes is not None and machine.shm_total_bytes < 1 << 30:
        raise Refusal(
            f"/dev/shm holds {format_gib(machine.shm_total_bytes)}, and the engine's processes talk through it",
            "start the container with shm_size: 8gb, as compose.yaml does",
            Exit.PLAN,
        )


def check_extra(
    pairs: Sequence[tuple[str, str | None]],
    s: Shapes,
    block_size: int,
    chunk: int,
    machine: Machine,
    table_on_disk: bool = False,
) -> None:
    """The user's arguments whose refusal has facts of this plan. `pairs` are (flag, value). Raises Refusal (code 3)."""
    for flag, value in pairs:
        if table_on_disk:
            _loading(flag, value)
        if flag in ("--tensor-parallel-size", "-tp"):
            _tensor_parallel(flag, value, s)
        if flag == "--enable-prefix-caching":  # C7
            raise Refusal(
                f"{flag}: prefill would be cut at blocks of {block_size} tokens, and a step has {chunk}: no request would be scheduled",
                f"leave {flag} out",
                Exit.PLAN,
            )
        if flag == "--kv-cache-dtype" and (value or "").startswith("fp8"):  # C12
            old = [g.index for g in machine.gpus if g.compute_capability == (8, 6)]
            where = (
                f"does not compile on compute capability 8.6 (cards {', '.join(map(str, old))})" if old else "is BF16"
            )
            raise Refusal(
                f"{flag} {value}: K/V of this engine's sparse attention {where if old else where + ' only in vLLM 0.30.0'}",
                f"leave {flag} out: a K/V row is 2 B a value",
                Exit.PLAN,
            )


# Ways of loading that leave the table's bytes alone (patches/flashnext/mapped_table.py); vLLM has more, which read every byte.
_LOADING: Mapping[str, tuple[str, ...]] = {
    "--load-format": ("auto", "safetensors", "hf"),
    "--safetensors-load-strategy": ("lazy",),
    "--model-loader-extra-config": (),
}


def _loading(flag: str, value: str | None) -> None:
    if flag in _LOADING and value not in _LOADING[flag]:
        raise Refusal(
            f"{flag} {value or ''}: the n-gram table stays on disk, and this way of loading reads all of it at each start",
            f"leave {flag} out",
            Exit.PLAN,
        )


def _tensor_parallel(flag: str, value: str | None, s: Shapes) -> None:
    """Rule 6 of the planner: which widths a number of cards per layer does not divide."""
    n = int(value) if (value or "").isdigit() else 0
    if n == 1:
        return
    widths = {
        "hidden size": s.hidden,
        "linear key heads": s.linear_num_key_heads,
        "experts": s.experts,
        "expert width": s.moe_inner,
        "K/V heads": s.num_key_value_heads,
    }
    bad = [f"{what} {width}" for what, width in widths.items() if n and width % n]
    why = f"{n} does not divide {', '.join(bad)}" if bad else "the host pool and the table belong to one card per stage"
    raise Refusal(
        f"{flag} {value}: {why}", f"leave {flag} out: layers are split over the cards, 1 card a layer", Exit.PLAN
    )


def check_memlock(machine: Machine, pool_bytes: int, table_bytes: int = 0) -> None:
    """C17: a limit on locked memory below the pool and a page-locked table. Raises Refusal (code 3)."""
    limit = machine.memlock_bytes
    parts = {"the K/V pool takes": pool_bytes, "the page-locked table takes": table_bytes}
    if limit is not None and limit != UNLIMITED and not machine.ipc_lock and limit < sum(parts.values()):
        raise Refusal(
            f"{format_gib(limit)} of memory may be locked (RLIMIT_MEMLOCK), and "
            + " and ".join(f"{what} {format_gib(size)}" for what, size in parts.items() if size),
            "lift it: compose.yaml sets ulimits memlock: -1; outside Docker: ulimit -l unlimited",
            Exit.PLAN,
        )


def check_partition(wished: Sequence[int], s: Shapes, cards: int) -> None:
    """A partition that the user wrote. Raises Refusal (code 3). C9: the table layer reads token ids that only stage 0 has."""
    text = ",".join(map(str, wished))
    if len(wished) != cards:
        raise Refusal(
            f"the partition {text} has {len(wished)} stages, and {cards} cards are to be used",
            f"name {cards} numbers",
            Exit.PLAN,
        )
    if sum(wished) != s.layers or min(wished) < 1:
        raise Refusal(
            f"the partition {text} has {sum(wished)} layers, and the model has {s.layers}",
            f"name {cards} numbers above 0 that add up to {s.layers}",
            Exit.PLAN,
        )
    first = max(s.table_layer_ids, default=0)
    if wished[0] < first:
        raise Refusal(
            f"the partition {text} puts table layer {first} on a later stage, which never sees the token ids",
            f"give the first stage at least {first} layers",
            Exit.PLAN,
        )
    empty = [i for i, (a, b) in enumerate(bounds(wished)) if not s.count("full_attention", a, b)]
    if empty:
        per = math.ceil(s.layers / max(1, s.count("full_attention", 0, s.layers)))
        raise Refusal(
            f"stage {empty[0]} of the partition {text} has no full-attention layer",
            f"use multiples of {per} layers",
            Exit.PLAN,
        )
