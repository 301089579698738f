"""Reads all facts of this box, or of a fixture: `Host(root)` reads files under any root, `Nvml` and `FakeNvml` give the same facts.

Rule order
1. NVML lists the cards in PCI order (nvml.py). A failure is a reason in words (`gpu_error`, `gpu_fix`), not an exception.
2. CUDA_VISIBLE_DEVICES picks and orders them (visible.py); `cuda_order` tells what the environment says of the order now.
3. RAM that may be used is min(MemAvailable, what the tightest cgroup level still allows), cgroup v1 and v2 alike (host.py).
4. A card's NUMA node comes from the kernel, and its PCIe link where NVML gave none.
5. A path's disk is the mount that holds it (host.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from .host import Host
from .machine import Gpu, Machine, Mount, least
from .nvml import FakeNvml, Nvml
from .visible import visible_devices


def read_machine(
    host: Host | None = None,
    nvml: Nvml | FakeNvml | None = None,
    environ: Mapping[str, str] | None = None,
    paths: Mapping[str, str | Path] | None = None,
) -> Machine:
    """The facts of this box, or of the fixtures given. `paths` maps a role to a path ({'model': '/model', 'data':
    ...}).

    Nothing here raises for what a box can be; a missing fact is None.
    """
    host = host or Host()
    environ = os.environ if environ is None else environ
    cards = (nvml or Nvml()).facts()
    spec = environ.get("CUDA_VISIBLE_DEVICES")
    located = tuple(_located(host, gpu) for gpu in cards.gpus)
    gpus, note = visible_devices(spec, located)
    error, fix = cards.error, cards.fix
    if not gpus and located and error is None:
        error, fix = note, "unset CUDA_VISIBLE_DEVICES, or name cards that `nvidia-smi -L` lists, each once"
    memory, cgroup = host.meminfo(), host.cgroup_memory()
    shm_total_bytes, shm_free_bytes = host.capacity("/dev/shm")
    return Machine(
        gpus=gpus,
        gpu_error=error,
        gpu_fix=fix,
        driver_version=cards.driver_version,
        driver_cuda_version=cards.driver_cuda_version,
        cuda_order=environ.get("CUDA_DEVICE_ORDER") or "FASTEST_FIRST",
        cuda_visible_devices=spec,
        visible_note=note,
        p2p=_reorder(cards.p2p, cards.gpus, gpus),
        mem_total_bytes=memory.get("MemTotal"),
        mem_available_bytes=memory.get("MemAvailable"),
        cgroup_version=cgroup.version if cgroup else None,
        cgroup_path=cgroup.path if cgroup else None,
        cgroup_limit_bytes=cgroup.limit_bytes if cgroup else None,
        cgroup_used_bytes=cgroup.used_bytes if cgroup else None,
        ram_available_bytes=least(memory.get("MemAvailable"), cgroup.available_bytes if cgroup else None),
        swap_total_bytes=memory.get("SwapTotal"),
        memlock_bytes=host.memlock_bytes(),
        ipc_lock=host.ipc_lock(),
        shm_total_bytes=shm_total_bytes,
        shm_free_bytes=shm_free_bytes,
        cpu_count=host.cpu_count(),
        numa=host.numa(),
        uvm=host.uvm() if gpus else None,
        kernel=host.kernel(),
        wsl=host.wsl(),
        container=host.container(),
        iommu=host.iommu(),
        mounts=dict(_mounts(host, paths or {})),
    )


def _located(host: Host, gpu: Gpu) -> Gpu:
    """A card with its NUMA node, and with the kernel's word on its link where NVML gave none."""
    told = {name: value for name, value in host.pcie_link(gpu.pci_bus_id).items() if getattr(gpu, name) is None}
    return replace(gpu, numa_node=host.numa_node(gpu.pci_bus_id), **told)


def _mounts(host: Host, paths: Mapping[str, str | Path]) -> Iterator[tuple[str, Mount]]:
    for role, path in paths.items():
        mount = host.mount_of(path)
        if mount is not None:
            yield role, mount


def _reorder(p2p, listed: tuple[Gpu, ...], chosen: tuple[Gpu, ...]):
    """The rows and columns of `p2p` (in the order `listed`) for `chosen`."""
    if p2p is None:
        return None
    place = {gpu.nvml_index: row for row, gpu in enumerate(listed)}
    rows = [place[gpu.nvml_index] for gpu in chosen]
    return tuple(tuple(p2p[row][column] for column in rows) for row in rows)
