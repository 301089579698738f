"""Decides how this box stands, point by point: each check gives PASS, WARN or FAIL and one fix. Reads; changes nothing.

Order
1. The box, the checkpoint's headers and the table's disk are read once each (`look`); every check and the plan use those facts.
2. A FAIL is what `serve` refuses: it comes from the plan's own rules, each asked about one fact alone, so that `doctor` never
   praises what `serve` refuses. A WARN is what costs speed, or will one day; its limits are the constants below.
3. Unknown is no mistake: a fact that a box does not tell is said as such and passes.
4. The plan comes last. Without the checkpoint it is made for the published one; without cards there is none. Beside a server of
   this kit that runs (state.json) cards and RAM are what it leaves, so what does not fit there is a WARN.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import disk_probe, facts, lint, plan, report, rules, table_place
from .checkpoint import Checkpoint, category_of
from .detect import read_machine
from .disk_probe import Piece, Probe
from .errors import Exit, Refusal
from .host import Host
from .machine import UNLIMITED, Gpu, Machine, pcie_bytes_s
from .nvml import FakeNvml, Nvml
from .table_place import Prepared, disk_words, why_slow
from .units import MIB, format_gib
from .wishes import Wishes

# The image's CUDA; a driver states the newest that it can run.
IMAGE_CUDA = (13, 0)
# Held by others: an idle card without a monitor shows a few MiB, a desktop several hundred.
IN_USE_BYTES = 256 * MIB
# A link below this carries a card's share of K/V rows visibly late: 3.0 x16 and 4.0 x8 (15.8 GB/s) are above, 3.0 x8 and 4.0 x4 below.
LEAST_LINK_BYTES_S = 12e9
# 160 tokens a second, the bound of a 3090 (article 5.6), times the 16 rows of a token.
LEAST_ROWS_S = 160 * disk_probe.ROWS_PER_TOKEN
# A prepared table needs its own size on top, which the plan checks.
LEAST_DATA_BYTES = plan.thumb()["data_spare_bytes"]["value"]
# Cards whose short peaks above the limit have switched boxes off (C26): compute capability 8.6 of 300 W and more.
PEAKY_CAPABILITY, PEAKY_W, CAP_SHARE = (8, 6), 300.0, 0.8

_STYLE = {"PASS": "green", "WARN": "yellow", "FAIL": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One point. `code` is the exit code that a FAIL stands for."""

    point: str
    verdict: str
    detail: str
    fix: str = ""
    code: int = int(Exit.OK)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was read, once: facts or the refusal that stands in their place (`*_refusal`)."""

    wishes: Wishes
    machine: Machine
    checkpoint: Checkpoint | None = None
    checkpoint_refusal: Refusal | None = None
    lint: lint.Report | None = None
    probe: Probe | None = None
    plan: plan.Plan | None = None
    plan_refusal: Refusal | None = None
    on_published: bool = False
    data_writable: bool | None = None
    running: str | None = None  # the phase of this kit's own server, where one runs here

    @property
    def on_cpu(self) -> bool:
        return self.wishes.value("device") == "cpu"


# --- reading ---------------------------------------------------------------------------------------------------------


def table_pieces(checkpoint: Checkpoint, prepared: str | Path | None = None) -> list[Piece]:
    """The table's bytes: the prepared file where there is one, else the checkpoint's table tensors; none in a model
    without a table."""
    if prepared and Path(prepared).is_file():
        return [Piece(Path(prepared), 0, Path(prepared).stat().st_size)]
    tensors = checkpoint.tensors
    # The first test spares a quarter of a million names the long one.
    found = [tensors[name] for name in tensors if ".ngram_embedding." in name and category_of(name) == "table"]
    return [Piece(Path(checkpoint.path) / tensor.file, tensor.offset, tensor.nbytes) for tensor in found]


def _writable(folder: Path) -> bool | None:
    """Whether this user can write to `folder`, or make it; None where no part of its path can be seen."""
    for place in (folder, *folder.parents):
        if place.exists():
            return place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    return None


def running_phase(state_dir: Path) -> str | None:
    """The phase of the server whose state.json lies in `state_dir`, None where none runs. Reads only."""
    try:
        state = json.loads((state_dir / "state.json").read_text(encoding="utf-8"))
        if state["phase"] in ("stopped", "failed"):
            return None
        if state["pid"]:
            os.kill(int(state["pid"]), 0)
        return str(state["phase"])
    except PermissionError:  # of os.kill: it runs, as another user
        return str(state["phase"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def look(
    wishes: Wishes,
    *,
    host: Host | None = None,
    nvml: Nvml | FakeNvml | None = None,
    environ: Mapping[str, str] | None = None,
    prober: Callable[[list[Piece]], Probe] = disk_probe.probe,
) -> Seen:
    """Read the box, the checkpoint and the table's disk, and make the plan. Raises no Refusal: it is part of what is seen."""
    machine = read_machine(host, nvml, environ, table_place.paths(wishes))
    seen = Seen(
        wishes=wishes,
        machine=machine,
        data_writable=_writable(Path(wishes.value("data"))),
        running=running_phase(Path(wishes.value("state_dir"))),
    )
    try:
        checkpoint = facts.checkpoint(wishes)
        seen = replace(seen, checkpoint=checkpoint, lint=lint.examine(checkpoint))
    except Refusal as e:
        seen = replace(seen, checkpoint_refusal=e)
    prepared = None if seen.checkpoint is None else facts.prepared(wishes)
    seen = _planned(seen, prepared)
    place = None if seen.plan is None else seen.plan.table
    file = prepared.file if prepared and prepared.whole and (place is None or place.file) else None
    if seen.checkpoint is not None and (pieces := table_pieces(seen.checkpoint, file)):
        seen = replace(seen, probe=prober(pieces))
    return seen


def _planned(seen: Seen, prepared: Prepared | None) -> Seen:
    if not seen.machine.gpus and not seen.on_cpu:
        return seen
    try:
        if seen.checkpoint is not None:
            model = plan.model_of(seen.checkpoint)
            return replace(seen, plan=plan.make_plan(seen.machine, model, seen.wishes, prepared))
        if seen.on_cpu:
            return seen
        return replace(seen, plan=plan.make_plan(seen.machine, plan.published(), seen.wishes), on_published=True)
    except Refusal as e:
        return replace(seen, plan_refusal=e, on_published=seen.checkpoint is None)


# --- the points ------------------------------------------------------------------------------------------------------


def _tried(point: str, check: Callable[[], str]) -> Finding:
    """PASS with the check's words, or FAIL with the refusal's."""
    try:
        return Finding(point, "PASS", check())
    except Refusal as e:
        return Finding(point, "FAIL", e.message, e.fix, int(e.code))


def _rules(machine: Machine) -> None:
    rules.check_machine(machine, plan.thumb())


def _each(machine: Machine) -> str:
    """'3 x NVIDIA GeForce RTX 3090' and so on, in order of first appearance."""
    names = [gpu.name for gpu in machine.gpus]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _cards(machine: Machine) -> str:
    if not machine.gpus:
        raise Refusal(
            machine.gpu_error or "the driver lists no card",
            machine.gpu_fix or "install the driver, or run the demo",
            Exit.PLAN,
        )
    free = ", ".join(format_gib(gpu.free_bytes) for gpu in machine.gpus)
    return f"{_each(machine)}; {free} free" + ("; mixed, counted in PCI order" if machine.mixed else "")


def _lost_card(machine: Machine) -> Finding | None:
    if not machine.gpus or not machine.gpu_error:
        return None
    return Finding("lost cards", "WARN", machine.gpu_error, machine.gpu_fix or "run nvidia-smi on the host")


def _visible(machine: Machine) -> Finding | None:
    spec = machine.cuda_visible_devices
    if spec is None or not machine.gpus:
        return None
    if machine.visible_note:
        return Finding(
            "CUDA_VISIBLE_DEVICES", "WARN", machine.visible_note, "name cards that `nvidia-smi -L` lists, each once"
        )
    order = ", ".join(str(gpu.nvml_index) for gpu in machine.gpus)
    return Finding("CUDA_VISIBLE_DEVICES", "PASS", f"cards {order} of the box, in this order")


def _kit_cards(machine: Machine) -> Finding:
    def check() -> str:
        for gpu in machine.gpus:
            _rules(Machine(gpus=(gpu,)))
        known = sorted({gpu.compute_capability for gpu in machine.gpus if gpu.compute_capability})
        return "compute capability " + (", ".join(f"{a}.{b}" for a, b in known) or "unknown") + "; no MIG slices"

    return _tried("kind of cards", check)


def _server(seen: Seen) -> Finding | None:
    if seen.running is None:
        return None
    return Finding(
        "server", "PASS", f"this kit's server runs here ({seen.running}): cards and RAM below are what it leaves"
    )


def _in_use(seen: Seen) -> Finding:
    machine = seen.machine
    held = [(gpu, gpu.used_bytes) for gpu in machine.gpus if (gpu.used_bytes or 0) >= IN_USE_BYTES or gpu.processes]
    if not held:
        return Finding("cards in use", "PASS", "nobody else is on the cards")

    def words(gpu: Gpu, used_bytes: int | None) -> str:
        who = [f"{gpu.processes} compute processes"] if gpu.processes else []
        who += [f"{gpu.graphics_processes} that draw"] if gpu.graphics_processes else []
        who += ["a display"] if gpu.display else []
        known = f" ({format_gib(gpu.process_bytes)} of it by processes that can be seen)" if gpu.process_bytes else ""
        return f"card {gpu.index}: {format_gib(used_bytes)} held by {', '.join(who) or 'somebody'}{known}"

    if seen.running:
        return Finding("cards in use", "PASS", f"beside the running server: {'; '.join(words(*one) for one in held)}")
    drawing = any(gpu.display or gpu.graphics_processes for gpu, _ in held)
    return Finding(
        "cards in use",
        "WARN",
        "; ".join(words(*one) for one in held),
        "end what `nvidia-smi` lists there; the plan counts only what is free now"
        + (", and a desktop's share grows: put the monitor on another card" if drawing else ""),
    )


def _driver(machine: Machine) -> Finding:
    def check() -> str:
        _rules(Machine(driver_version=machine.driver_version))
        newest = machine.driver_cuda_version
        if newest is not None and newest < IMAGE_CUDA:
            raise Refusal(
                f"the driver {machine.driver_version or ''} runs CUDA {newest[0]}.{newest[1]} at most, and the image is "
                f"CUDA {IMAGE_CUDA[0]}.{IMAGE_CUDA[1]}",
                "install driver 580 or newer on the machine (not in the container)",
                Exit.PLAN,
            )
        runs = f", CUDA {newest[0]}.{newest[1]} at most" if newest else ""
        return f"{machine.driver_version or 'unknown'}{runs}"

    return _tried("driver", check)


def _uvm(machine: Machine) -> Finding | None:
    if machine.uvm is not False or machine.wsl:
        return None
    return Finding(
        "CUDA device node",
        "WARN",
        "/dev/nvidia-uvm is not here: NVML lists the cards, and CUDA cannot start",
        "on the machine: nvidia-modprobe -u -c=0; in a container: start it with --gpus all",
    )


def _gb(bytes_s: float | None) -> str:
    return "unknown" if bytes_s is None else f"{bytes_s / 1e9:.1f} GB/s"


def token_kv_bytes() -> int:
    """K/V rows in host RAM that one decoded token reads, all layers: budget x row (planner: 2,048 x 2,048 B x 12)."""
    text = plan.published().text
    row = 2 * text.need("num_key_value_heads") * text.need("head_dim") * 2
    return text.need("indexer_budget") * row * len(text.attention_layers)


def _links(machine: Machine) -> Finding:
    slow, known = [], []
    for gpu in machine.gpus:
        now = gpu.pcie_bytes_s
        if now is None:
            continue
        link = f"{gpu.pcie_gen_max}.0 x{gpu.pcie_width_now or gpu.pcie_width_max}"
        best = pcie_bytes_s(gpu.pcie_gen_card or gpu.pcie_gen_max, gpu.pcie_width_max)
        known.append(f"card {gpu.index} {link}")
        if now < LEAST_LINK_BYTES_S:
            share_ms = token_kv_bytes() / len(machine.gpus) / now * 1e3
            slow.append(
                f"card {gpu.index} hangs on PCIe {link}: {_gb(now)} at most of the {_gb(best)} it could do; its share of a token's "
                f"K/V rows takes {share_ms:.1f} ms"
            )
    if slow:
        return Finding(
            "PCIe links",
            "WARN",
            "; ".join(slow),
            "put the card into a slot with 8 lanes or more that go to the CPU, without an x1 riser",
        )
    return Finding("PCIe links", "PASS", ", ".join(known) or "unknown")


def _peer(seen: Seen) -> Finding | None:
    machine = seen.machine
    if len(machine.gpus) < 2:
        return None
    pairs = [
        told for i, row in enumerate(machine.p2p or ()) for j, told in enumerate(row) if i < j and told is not None
    ]
    told = "unknown" if not pairs else f"reported for {sum(pairs)} of {len(pairs)} pairs"
    bars = [(gpu.bar1_total_bytes, gpu.total_bytes) for gpu in machine.gpus if gpu.bar1_total_bytes and gpu.total_bytes]
    small = [bar for bar, total in bars if bar < total]
    window = (
        "BAR1 unknown"
        if not bars
        else f"BAR1 {format_gib(min(small))}, less than the memory (Resizable BAR is off)"
        if small
        else "BAR1 shows the whole memory"
    )
    words = f"{told}; {window}; IOMMU {'on' if machine.iommu else 'unknown' if machine.iommu is None else 'off'}"
    if seen.wishes.value("p2p") != "on":
        return Finding("copies between cards", "PASS", f"through host RAM, as planned; P2P {words}")
    doubt = [why for why, is_so in (("it is not reported", not all(pairs)), ("BAR1 is small", small)) if is_so]
    doubt += ["the IOMMU may block it"] if machine.iommu else []
    if doubt:
        return Finding(
            "copies between cards",
            "WARN",
            f"FLASHNEXT_P2P=on, and {', '.join(doubt)}: {words}",
            "unset FLASHNEXT_P2P, or turn on Resizable BAR and turn off the IOMMU in the BIOS: a blocked copy hangs the start",
        )
    return Finding("copies between cards", "PASS", f"P2P {words}")


def _power(machine: Machine) -> Finding | None:
    limits = [gpu.power_limit_w for gpu in machine.gpus]
    if None in limits or not limits:
        return None
    total = f"{len(limits)} cards, {sum(limits):,.0f} W together at their limits"
    peaky = [
        gpu
        for gpu in machine.gpus
        if gpu.compute_capability == PEAKY_CAPABILITY
        and (gpu.power_default_w or 0) >= PEAKY_W
        and gpu.power_limit_w >= gpu.power_default_w
    ]
    if len(machine.gpus) > 1 and peaky:
        cap = int(min(gpu.power_default_w for gpu in peaky) * CAP_SHARE)
        return Finding(
            "power",
            "WARN",
            f"{total}; {len(peaky)} of them are uncapped and draw short peaks above that, which have switched boxes off",
            f"cap them: sudo nvidia-smi -pl {cap} (80 % of the default); this kit never sets it",
        )
    return Finding("power", "PASS", total)


def _persistence(machine: Machine) -> Finding | None:
    off = [str(gpu.index) for gpu in machine.gpus if gpu.persistence is False]
    if machine.wsl or all(gpu.persistence is None for gpu in machine.gpus):
        return None
    if off:
        return Finding(
            "persistence mode",
            "WARN",
            f"off on card {', '.join(off)}: the driver lets go of an unused card, and a power cap is lost with it",
            "on the machine: sudo nvidia-smi -pm 1, or enable nvidia-persistenced",
        )
    return Finding("persistence mode", "PASS", "on")


def _numa(machine: Machine) -> Finding | None:
    if len(machine.numa) < 2:
        return None
    memory = ", ".join(
        f"node {n.node} {format_gib(n.free_bytes, 1)} of {format_gib(n.total_bytes, 1)} free" for n in machine.numa
    )
    nodes = sorted({gpu.numa_node for gpu in machine.gpus if gpu.numa_node is not None})
    where = ", ".join(f"card {g.index} on node {g.numa_node}" for g in machine.gpus if g.numa_node is not None)
    if len(nodes) > 1:
        return Finding(
            "NUMA",
            "WARN",
            f"{where}; {memory}: K/V rows of cards on another node cross the link between the sockets",
            f"move the cards to slots of node {nodes[0]}, where the board has them",
        )
    return Finding("NUMA", "PASS", f"{where or 'cards unknown'}; {memory}")


def _system(machine: Machine) -> Finding:
    kernel = f"kernel {machine.kernel or 'unknown'}" + (", in a container" if machine.container else "")
    if machine.wsl:
        return Finding(
            "system",
            "WARN",
            f"WSL2, {kernel}: about 1 GiB of RAM at most can be page-locked, so K/V has to stay on the cards",
            "run on Linux itself for long contexts",
        )
    return Finding("system", "PASS", kernel)


def _cpus(machine: Machine) -> Finding | None:
    if machine.cpu_count is None:
        return None
    needed = len(machine.gpus) + 2
    words = f"{machine.cpu_count} may be used"
    if machine.gpus and machine.cpu_count < needed:
        return Finding(
            "CPUs",
            "WARN",
            f"{words}, and {needed} processes are always busy: one per card, the scheduler and the API",
            "raise the container's CPU limit (compose: cpus), or give the machine more cores",
        )
    return Finding("CPUs", "PASS", words)


def _ram(machine: Machine) -> Finding:
    words = f"{format_gib(machine.ram_available_bytes)} available of {format_gib(machine.mem_total_bytes)}"
    limit, available = machine.cgroup_limit_bytes, machine.mem_available_bytes
    if limit is not None and (available is None or (machine.ram_available_bytes or 0) < available):
        return Finding(
            "RAM",
            "WARN",
            f"{words}: the container's limit is {format_gib(limit)} (cgroup v{machine.cgroup_version}), "
            f"{format_gib(machine.cgroup_used_bytes)} of it in use, and the machine has {format_gib(available)} available",
            "raise the limit (docker run --memory, compose: mem_limit), if the machine is for this",
        )
    if limit is not None:
        words += f"; the container's limit of {format_gib(limit)} does not bind"
    return Finding("RAM", "PASS", words)


def _memlock(seen: Seen) -> Finding:
    limit, pool = seen.machine.memlock_bytes, _locked_bytes(seen)
    if limit is None:
        return Finding("memlock", "PASS", "unknown")
    if limit == UNLIMITED or seen.machine.ipc_lock:
        return Finding("memlock", "PASS", "no limit")
    words = f"{limit / MIB:,.0f} MiB may be locked"
    if pool is not None and limit >= pool:
        return Finding("memlock", "PASS", f"{words}, and the plan locks {format_gib(pool)}")
    return Finding(
        "memlock",
        "WARN",
        words + (f", and the plan locks {format_gib(pool)}" if pool else ""),
        "compose.yaml lifts it (ulimits: memlock); outside Docker: ulimit -l unlimited",
    )


def _pool_bytes(seen: Seen) -> int | None:
    return (seen.plan.capacity.get("host_pool_bytes") or None) if seen.plan else None


def _locked_bytes(seen: Seen) -> int | None:
    """What the plan page-locks: K/V, and the table where that is asked for."""
    table = seen.plan.table.pinned_bytes if seen.plan is not None and seen.plan.table is not None else 0
    return (_pool_bytes(seen) or 0) + table or None


def _shm(machine: Machine) -> Finding:
    def check() -> str:
        _rules(Machine(shm_total_bytes=machine.shm_total_bytes))
        return f"{format_gib(machine.shm_total_bytes)}, {format_gib(machine.shm_free_bytes)} free"

    return _tried("/dev/shm", check)


def _disk(seen: Seen) -> Finding:
    mount, point = seen.machine.mounts.get("model"), "disk of the checkpoint"
    if mount is None:
        return Finding(point, "WARN", "cannot be told", "put the checkpoint on a local NVMe drive")
    words, slow = disk_words(mount), why_slow(mount)
    place = None if seen.plan is None else seen.plan.table
    if slow is None:
        return Finding(point, "PASS", words)
    if place is not None and place.disk != "model":
        return Finding(point, "PASS", f"{words}: {slow}; n-gram table {place.words}")
    fix = "move it to a local NVMe drive: the table is read at random"
    if mount.kind not in ("hdd", "network", "overlay") and not mount.usb:
        fix = (
            "chattr +C an empty folder (or mount without compress) and copy the checkpoint into it again"
            if mount.compressed
            else "zfs set recordsize=16K on that dataset and copy the checkpoint again, or use ext4 or xfs"
        )
    return Finding(point, "WARN", f"{words}: {slow}", fix)


def _probe(seen: Seen) -> Finding | None:
    found, point = seen.probe, "random reads of the table"
    if found is None:
        return None
    if found.trouble:
        is_hung = found.trouble.startswith("no answer")
        return Finding(
            point,
            "FAIL" if is_hung else "WARN",
            found.trouble,
            "mend the mount (a network disk that is gone?)"
            if is_hung
            else "download the whole checkpoint to a local disk",
            int(Exit.TABLE) if is_hung else int(Exit.OK),
        )
    words = (
        f"{found.rows_s:,.0f} rows/s one by one, {found.rows_deep_s:,.0f} with {disk_probe.DEPTH} at a time "
        f"(longest read {found.longest_s * 1e3:.1f} ms)"
        + ("" if found.direct else ", through the page cache: at most that")
        + f"; cold, that is {found.tokens_s:,.1f} tokens/s"
    )
    if found.rows_deep_s < LEAST_ROWS_S:
        return Finding(
            point,
            "WARN",
            f"{words}, below the {LEAST_ROWS_S / disk_probe.ROWS_PER_TOKEN:,.0f} that the cards can ask for",
            "move the table to a faster local disk, or leave more RAM as its page cache",
        )
    return Finding(point, "PASS", words)


def _data(seen: Seen) -> Finding:
    mount, folder = seen.machine.mounts.get("data"), seen.wishes.value("data")
    point = "our own folder"
    if seen.data_writable is False or (mount is not None and mount.read_only):
        place = f"{folder} cannot be written by this user"
        fix = "give write access there, or set FLASHNEXT_DATA to a folder of yours"
        if seen.machine.container:
            return Finding(point, "FAIL", place, "mount a volume there that uid 10001 can write to", int(Exit.TABLE))
        return Finding(point, "WARN", f"{place}; in the image it is a volume", fix)
    if mount is None:
        return Finding(point, "PASS", f"{folder}; its disk cannot be told")
    words = f"{format_gib(mount.free_bytes, 1)} free on {disk_words(mount)}"
    if mount.kind == "memory":
        return Finding(point, "WARN", f"{words}: gone after a restart", "mount a volume on a disk there")
    if mount.free_bytes is not None and mount.free_bytes < LEAST_DATA_BYTES:
        return Finding(
            point, "WARN", f"{words}, and kernels are compiled into it", f"free {format_gib(LEAST_DATA_BYTES, 0)} there"
        )
    return Finding(point, "PASS", words)


def _exposure(wishes: Wishes) -> str:
    has_key = facts.read_api_key(wishes) is not None
    rules.check_exposure(wishes, has_key)
    return f"{wishes.value('bind')}:{wishes.value('port')}, {'with' if has_key else 'without'} a key"


def _checkpoint(seen: Seen) -> Finding:
    if seen.checkpoint_refusal is not None:
        e = seen.checkpoint_refusal
        return Finding("checkpoint", "FAIL", e.message, e.fix, int(e.code))
    found, looked = seen.checkpoint, seen.lint
    words = f"{len(found.shards)} files, {len(found.tensors):,} tensors, {format_gib(found.total_bytes)}"
    mended = [f for f in looked.findings if f.repair]
    bad = [f for f in looked.errors if not f.repair]
    if bad:
        first = bad[0]
        more = f" ({len(bad) - 1} more)" if len(bad) > 1 else ""
        return Finding("checkpoint", "FAIL", f"{first.check}: {first.message}{more}", first.fix, int(Exit.CHECKPOINT))
    rest = len(looked.findings) - len(mended)
    if mended or rest:
        parts = [f"{len(mended)} mistakes that prepare and serve mend in a copy"] if mended else []
        parts += [f"{rest} warnings"] if rest else []
        return Finding("checkpoint", "WARN", f"{words}; {', '.join(parts)}", "`flashnext checkpoint` lists them")
    return Finding("checkpoint", "PASS", f"{words}; read as it was written")


def _plan(seen: Seen, before: list[Finding]) -> Finding:
    if seen.plan_refusal is not None:
        e = seen.plan_refusal
        for_whom = "for the published checkpoint: " if seen.on_published else ""
        if seen.running:
            return Finding(
                "plan",
                "WARN",
                f"none beside the running server: {for_whom}{e.message}",
                "stop it first: ./flashnext down",
            )
        return Finding("plan", "FAIL", for_whom + e.message, e.fix, int(e.code))
    if seen.plan is None:
        code = max((f.code for f in before if f.verdict == "FAIL"), default=int(Exit.PLAN))
        without = "the cards" if not seen.machine.gpus and not seen.on_cpu else "a checkpoint"
        return Finding(
            "plan",
            "FAIL",
            f"none without {without}",
            "mend the points above; `flashnext plan --simulate 3x3090 --ram 125GiB` plans for another box",
            code,
        )
    made = seen.plan
    words = f"{made.device}, {made.capacity.get('context') or 0:,} tokens"
    if made.capacity.get("full_requests"):
        words += f", {made.capacity['full_requests']} full requests on {len(made.stages)} cards"
    if pool := _pool_bytes(seen):
        words += f", {format_gib(pool)} of K/V in host RAM"
    if made.table is not None:
        words += f", n-gram table {made.table.words}"
    if seen.on_published:
        return Finding(
            "plan", "WARN", f"{words}, for the published checkpoint: none was read here", "mend the checkpoint's point"
        )
    return Finding("plan", "PASS", words + (f"; {len(made.notes)} notes (`flashnext plan`)" if made.notes else ""))


def judge(seen: Seen) -> list[Finding]:
    """All findings, in the order in which they are best mended. Pure, but for the key file."""
    machine = seen.machine
    out: list[Finding | None] = [_system(machine), _server(seen)]
    if not seen.on_cpu:
        out.append(_tried("cards", lambda: _cards(machine)))
        if machine.gpus:
            out += [
                _lost_card(machine),
                _visible(machine),
                _kit_cards(machine),
                _driver(machine),
                _uvm(machine),
                _in_use(seen),
                _links(machine),
                _peer(seen),
                _power(machine),
                _persistence(machine),
                _numa(machine),
            ]
        out += [_memlock(seen), _shm(machine)]
    out += [_cpus(machine), _ram(machine)]
    if not seen.on_cpu:
        out += [_disk(seen), _probe(seen)]
    out += [
        _data(seen),
        _tried("API key and port", lambda: _exposure(seen.wishes)),
        _checkpoint(seen),
    ]
    found = [f for f in out if f is not None]
    return [*found, _plan(seen, found)]


def examine(wishes: Wishes) -> list[Finding]:
    """Look and judge. Never raises for what a box can be."""
    return judge(look(wishes))


# --- output ----------------------------------------------------------------------------------------------------------


def show(findings: list[Finding], out: Console) -> None:
    """Print the findings as a table, the fixes under their points."""
    t = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "point", "found"):
        t.add_column(column, overflow="fold")
    for f in findings:
        t.add_row(Text(f.verdict, style=_STYLE[f.verdict]), f.point, Text(f.detail))
        if f.fix:
            t.add_row("", "", Text(f"Fix: {f.fix}", style="dim"))
    out.print(t)
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in ("FAIL", "WARN", "PASS")}
    out.print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))


def as_report(seen: Seen, findings: list[Finding], environ: Mapping[str, str]) -> dict[str, Any]:
    """What a bug report holds, not yet redacted. `machine` can be planned again: `plan --simulate @FILE`."""
    found = seen.checkpoint
    return {
        "schema": report.SCHEMA,
        "findings": [vars(f) for f in findings],
        "machine": report.machine_facts(asdict(seen.machine)),
        "probe": None if seen.probe is None else asdict(seen.probe),
        "wishes": {
            name: {
                "value": asked.value if isinstance(asked.value, (bool, int, float)) else str(asked.value),
                "source": asked.source,
            }
            for name, asked in seen.wishes.items()
            if asked.wished
        },
        "environment": report.told_environment(environ),
        "checkpoint": None
        if found is None
        else {
            "architectures": list(found.architectures),
            "model_type": found.model_type,
            "files": len(found.shards),
            "tensors": len(found.tensors),
            "total_bytes": found.total_bytes,
            "bytes_by_category": found.weights.by_category,
            "revision": seen.lint.revision if seen.lint else None,
            "findings": [vars(f) for f in seen.lint.findings] if seen.lint else [],
        },
        "plan": None if seen.plan is None else seen.plan.as_dict(),
    }


def write_report(path: Path, seen: Seen, findings: list[Finding], environ: Mapping[str, str]) -> None:
    """Write the redacted report to a file that is not there yet. Raises Refusal (code 2)."""
    try:
        key = facts.read_api_key(seen.wishes)
    except Refusal:
        key = None
    report.write(path, as_report(seen, findings, environ), report.of_this_box(environ, [key] if key else []))
