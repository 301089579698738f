"""Which cards CUDA_VISIBLE_DEVICES leaves, and in which order: as the driver itself reads it, in every spelling (C20).

Integers are read in PCI order. CUDA's own default is fastest first, which differs from it on mixed cards, so whoever starts the
engine has to set CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

from __future__ import annotations

import re
from dataclasses import replace

from .machine import Gpu


def visible_devices(spec: str | None, gpus: tuple[Gpu, ...]) -> tuple[tuple[Gpu, ...], str | None]:
    """The cards that CUDA_VISIBLE_DEVICES=`spec` leaves, in its order and renumbered, and a note where it is not plain.

    `gpus` are in PCI order. As the driver reads it: unset shows all; integers, or `GPU-` ids of which a unique
    beginning is enough, in the order given; the list ends at the first entry that names no card (so '', '-1' and 'none'
    show nothing); a card named twice shows nothing at all. A `MIG-` id (alone, or `MIG-GPU-<uuid>/<gi>/<ci>`) stands
    for the card it is a part of, marked mig.
    """
    if spec is None:
        return gpus, None
    if not spec.strip():
        return (), "CUDA_VISIBLE_DEVICES is set and empty: CUDA shows no card"
    chosen: list[Gpu] = []
    note = None
    entries = [entry.strip() for entry in spec.split(",")]
    first_kind = _entry_kind(entries[0])
    for entry in entries:
        gpu, why = _entry_card(entry, gpus)
        if gpu is not None and _entry_kind(entry) != first_kind:
            gpu, why = None, "mixes numbers and ids"
        if gpu is None:
            note = f"CUDA_VISIBLE_DEVICES={spec[:200]!r}: entry {entry!r} {why}; CUDA ignores it and all after it"
            break
        chosen.append(gpu)
    # Two parts of one card are two entries; the same card by number or id twice is CUDA's error.
    if first_kind != "mig" and len({gpu.nvml_index for gpu in chosen}) < len(chosen):
        return (), f"CUDA_VISIBLE_DEVICES={spec[:200]!r} names a card twice: CUDA shows none"
    return tuple(replace(gpu, index=place) for place, gpu in enumerate(chosen)), note


def _entry_kind(entry: str) -> str:
    return "mig" if entry.startswith("MIG-") else "id" if entry.startswith("GPU-") else "number"


def _entry_card(entry: str, gpus: tuple[Gpu, ...]) -> tuple[Gpu | None, str]:
    """The card that one entry names, or why it names none."""
    kind = _entry_kind(entry)
    if kind == "number":
        # The driver reads the leading digits and stops there ('1gpu' is 1).
        digits = re.match(r"\+?(\d+)", entry)
        if not digits:
            return None, "is no card number"
        number = int(digits.group(1))
        return (gpus[number], "") if number < len(gpus) else (None, f"is beyond the {len(gpus)} cards of this box")
    if kind == "mig":
        parent = re.match(r"MIG-(GPU-[0-9a-fA-F-]+)", entry)
        matches = [gpu for gpu in gpus if (parent and gpu.uuid == parent.group(1)) or entry in gpu.mig_ids]
        matches = [replace(gpu, mig=True) for gpu in matches]
    else:
        matches = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
    if len(matches) != 1:
        return None, "names no card of this box" if not matches else f"fits {len(matches)} cards"
    return matches[0], ""
