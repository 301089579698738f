"""Asks NVML for the cards, and says in words why it cannot.

Rule order: NVML lists the cards in PCI order; a card that fails is told beside the others; an answer that a card or driver does not
know is None; a failure of the whole is a reason and a fix, never an exception (C24). `FakeNvml` is the twin for made-up boxes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .machine import Gpu


@dataclass(frozen=True, kw_only=True)
class NvmlFacts:
    """What NVML tells: cards in PCI order (`index` = `nvml_index`), or `error` and `fix` in words."""

    gpus: tuple[Gpu, ...] = ()
    driver_version: str | None = None
    driver_cuda_version: tuple[int, int] | None = None
    p2p: tuple[tuple[bool | None, ...], ...] | None = None
    error: str | None = None
    fix: str | None = None


# NVML return code -> (what it means here, what to do). Codes are nvml.h's nvmlReturn_t.
_NVML_WORDS: dict[int, tuple[str, str]] = {
    4: (
        "NVML may not open the card (Insufficient Permissions)",
        "give this user read and write access to /dev/nvidia*, or start the container with --gpus all",
    ),
    9: (
        "the NVIDIA kernel driver is not loaded",
        "run nvidia-smi on the host; after a driver update reboot or `modprobe nvidia`",
    ),
    12: (
        "the NVML library (libnvidia-ml.so.1) is not here: no NVIDIA driver, or a container started without its cards",
        "install the NVIDIA driver and the NVIDIA Container Toolkit, and start the container with --gpus all",
    ),
    15: (
        "a card has fallen off the bus (GPU is lost)",
        "look for Xid lines in dmesg; check power and riser, then reboot",
    ),
    16: (
        "a card needs a reset (GPU requires restart)",
        "stop what uses it and run `nvidia-smi --gpu-reset`, or reboot",
    ),
    18: (
        "driver and NVML library have different versions",
        "the driver was updated under a running kernel: reboot the host (or reload its nvidia modules)",
    ),
    999: (
        "NVML cannot start (Unknown Error): the container has lost its devices, as after `systemctl daemon-reload`",
        "restart the container; to end it for good use Docker's cgroupfs driver or name the /dev/nvidia* devices",
    ),
}


class Nvml:
    """NVML by nvidia-ml-py, imported when first asked. `library` stands in for the module in tests."""

    def __init__(self, library=None):
        self._library = library

    def facts(self) -> NvmlFacts:
        """All cards, or the reason why there are none. Never raises an NVML error."""
        lib = self._library
        if lib is None:
            try:
                import pynvml as lib
            except ImportError:
                return NvmlFacts(
                    error="the Python package nvidia-ml-py is not installed", fix="pip install nvidia-ml-py"
                )
        try:
            lib.nvmlInit()
        except lib.NVMLError as error:
            words, fix = _in_words(error)
            return NvmlFacts(error=words, fix=fix)
        try:
            return self._read(lib)
        except lib.NVMLError as error:
            words, fix = _in_words(error)
            return NvmlFacts(error=words, fix=fix)
        finally:
            _ask(lib, lib.nvmlShutdown)

    def _read(self, lib) -> NvmlFacts:
        cuda = _ask(lib, lib.nvmlSystemGetCudaDriverVersion_v2)
        gpus, handles, error, fix = [], [], None, None
        for index in range(lib.nvmlDeviceGetCount()):
            try:
                handle = lib.nvmlDeviceGetHandleByIndex(index)
            except lib.NVMLError as failure:
                words, fix = _in_words(failure)
                error = f"card {index}: {words}"
                continue
            handles.append(handle)
            gpus.append(self._card(lib, handle, index))
        return NvmlFacts(
            gpus=tuple(gpus),
            driver_version=_text(_ask(lib, lib.nvmlSystemGetDriverVersion)),
            driver_cuda_version=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
            p2p=tuple(tuple(_peer(lib, one, other) for other in handles) for one in handles),
            error=error,
            fix=fix,
        )

    def _card(self, lib, handle, index: int) -> Gpu:
        def ask(name: str, *extra):
            return _ask(lib, getattr(lib, name, None), handle, *extra)

        # The second form tells the driver's reserve apart; drivers before R510 know only the first.
        memory = ask("nvmlDeviceGetMemoryInfo", lib.nvmlMemory_v2) or ask("nvmlDeviceGetMemoryInfo")
        bar1, pci = ask("nvmlDeviceGetBAR1MemoryInfo"), ask("nvmlDeviceGetPciInfo")
        power, sold_with = ask("nvmlDeviceGetEnforcedPowerLimit"), ask("nvmlDeviceGetPowerManagementDefaultLimit")
        mig, capability = ask("nvmlDeviceGetMigMode"), ask("nvmlDeviceGetCudaComputeCapability")
        processes, drawing = (
            ask("nvmlDeviceGetComputeRunningProcesses"),
            ask("nvmlDeviceGetGraphicsRunningProcesses"),
        )
        # One process may do both and is then in both lists.
        holding = {
            process.pid: getattr(process, "usedGpuMemory", None) for process in [*(processes or ()), *(drawing or ())]
        }
        told = [int(held) for held in holding.values() if held is not None]
        display = [ask("nvmlDeviceGetDisplayMode"), ask("nvmlDeviceGetDisplayActive")]
        persistence = ask("nvmlDeviceGetPersistenceMode")
        mig_ids = []
        if mig and mig[0] == 1:
            for slot in range(ask("nvmlDeviceGetMaxMigDeviceCount") or 0):
                part = ask("nvmlDeviceGetMigDeviceHandleByIndex", slot)
                if part is not None and (uuid := _ask(lib, lib.nvmlDeviceGetUUID, part)):
                    mig_ids.append(_text(uuid))
        return Gpu(
            index=index,
            nvml_index=index,
            name=_text(ask("nvmlDeviceGetName")) or "unknown card",
            uuid=_text(ask("nvmlDeviceGetUUID")) or "",
            compute_capability=tuple(capability) if capability else None,
            total_bytes=int(memory.total) if memory else None,
            free_bytes=int(memory.free) if memory else None,
            reserved_bytes=int(memory.reserved) if memory and hasattr(memory, "reserved") else None,
            pci_bus_id=_text(pci.busId) if pci else None,
            pcie_gen_now=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            pcie_gen_max=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            pcie_gen_card=ask("nvmlDeviceGetGpuMaxPcieLinkGeneration"),
            pcie_width_now=ask("nvmlDeviceGetCurrPcieLinkWidth"),
            pcie_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
            bar1_total_bytes=int(bar1.bar1Total) if bar1 else None,
            power_limit_w=None if power is None else power / 1000,
            power_default_w=None if sold_with is None else sold_with / 1000,
            persistence=None if persistence is None else persistence == 1,
            display=None if display == [None, None] else 1 in display,
            mig=None if mig is None else mig[0] == 1,
            mig_ids=tuple(mig_ids),
            processes=None if processes is None else len(processes),
            graphics_processes=None if drawing is None else len(drawing),
            process_bytes=sum(told) if told else None if holding or processes is None else 0,
        )


class FakeNvml:
    """The fixture twin of `Nvml`: the cards of a made-up box, in PCI order.

    `index` and `nvml_index` are numbered here; `p2p` and the texts are given as NVML would tell them.
    """

    def __init__(self, gpus: Iterable[Gpu] = (), **facts):
        numbered = tuple(replace(gpu, index=place, nvml_index=place) for place, gpu in enumerate(gpus))
        self._facts = NvmlFacts(gpus=numbered, **facts)

    def facts(self) -> NvmlFacts:
        return self._facts


def _ask(lib, function, *arguments):
    """The answer of one NVML call, None where this card or driver does not know it."""
    if function is None:
        return None
    try:
        return function(*arguments)
    except lib.NVMLError:
        return None


def _in_words(error) -> tuple[str, str]:
    unknown = (f"NVML says: {error}", "run nvidia-smi on the host; it has to list the cards before this can")
    return _NVML_WORDS.get(getattr(error, "value", None), unknown)


def _text(value) -> str | None:
    # Older nvidia-ml-py gives bytes, newer str.
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _peer(lib, one, other) -> bool | None:
    """Whether the driver reports peer reads and writes between two cards; None for a card and itself.

    By nvml.h: nvmlGpuP2PCapsIndex_t 0 is read and 1 write, status 0 is OK.
    """
    if one is other:
        return None
    answers = [_ask(lib, lib.nvmlDeviceGetP2PStatus, one, other, index) for index in (0, 1)]
    return None if None in answers else all(answer == 0 for answer in answers)
