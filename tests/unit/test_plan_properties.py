"""What holds for every box: budgets add up, nothing is exceeded, more memory is never worse, a refusal names a number."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from entrypoint import budget, choice
from entrypoint import plan as p
from entrypoint.errors import Exit, Refusal
from entrypoint.machine import Gpu, Machine, Mount
from entrypoint.table_place import Prepared
from entrypoint.units import GIB, MIB
from entrypoint.wishes import gather

pytestmark = pytest.mark.filterwarnings("error")
_SLOW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def box(cards_mib: list[int], ram_bytes: int) -> Machine:
    gpus = tuple(
        Gpu(
            index=i,
            nvml_index=i,
            name=f"card of {mib} MiB",
            compute_capability=(8, 6),
            total_bytes=(mib + 300) * MIB,
            reserved_bytes=300 * MIB,
            free_bytes=mib * MIB,
            mig=False,
        )
        for i, mib in enumerate(cards_mib)
    )
    return Machine(gpus=gpus, mem_total_bytes=ram_bytes, mem_available_bytes=ram_bytes, ram_available_bytes=ram_bytes)


# Around the edges: cards that hold a third, a quarter, half of the model, and anything between.
card = st.one_of(st.sampled_from([15_700, 20_100, 24_253, 32_092, 48_352, 97_235]), st.integers(7_000, 60_000))
boxes = st.builds(box, st.lists(card, min_size=1, max_size=5), st.integers(12 * GIB, 160 * GIB))
wishes = st.fixed_dictionaries(
    {},
    optional={
        "FLASHNEXT_STREAMS": st.integers(1, 40).map(str),
        "FLASHNEXT_CONTEXT": st.integers(4_096, 262_144).map(str),
        "FLASHNEXT_CHUNK": st.integers(16, 8_192).map(str),
        "FLASHNEXT_HOST_KV": st.sampled_from(["on", "off", "auto"]),
        "FLASHNEXT_EXPANDABLE_SEGMENTS": st.sampled_from(["on", "off"]),
    },
)


def make(machine: Machine, environ: dict[str, str]) -> p.Plan | Refusal:
    try:
        return p.make_plan(machine, p.published(), gather({}, environ, None))
    except Refusal as refusal:
        return refusal


def worth(made: p.Plan | Refusal) -> tuple[int, ...]:
    """The objective of a plan (choice.py), below all of them for a refusal."""
    if isinstance(made, Refusal):
        return ()
    c = made.capacity
    chunk = int(made.argv[made.argv.index("--max-num-batched-tokens") + 1])
    return c["context"], c["streams"], c["whole_requests_at_once"], chunk


@_SLOW
@given(boxes, wishes)
def test_a_plan_adds_up_and_exceeds_nothing_and_a_refusal_names_a_number(machine, environ):
    made = make(machine, environ)
    if isinstance(made, Refusal):
        assert made.code == Exit.PLAN
        assert re.search(r"\d", made.message) and re.search(r"\d", made.fix), (made.message, made.fix)
        return
    c = made.capacity
    assert sum(c["partition"]) == 48 and len(made.stages) == len(c["partition"])
    for stage in made.stages:
        assert all(line.bytes >= 0 and line.source for line in stage.lines)
        assert stage.used_bytes == sum(line.bytes for line in stage.lines) <= stage.available_bytes
    assert sum(line.bytes for line in made.host) == machine.ram_available_bytes
    assert made.host[-1].bytes >= p.thumb()["page_cache_bytes"]["value"]
    # every weight is on one card, once
    weights = sum(line.bytes for stage in made.stages for line in stage.lines if line.source == p.published().origin)
    model = p.published()
    assert weights == sum(model.layer_bytes) + model.embed_bytes + model.head_bytes
    # one whole request, a start for every other stream, a spare
    layout = budget.kv_layout(p.shapes(model.text), tuple(c["partition"]), bool(c["host_pool_bytes"]))
    assert c["blocks"] >= choice.least_blocks(layout, c["context"], c["streams"])
    assert c["whole_requests_at_once"] >= 1
    assert c["host_pool_bytes"] == (layout.host_bytes(c["blocks"]) if c["host_pool_bytes"] else 0)
    assert made == make(machine, environ)


@_SLOW
@given(boxes, wishes, st.integers(1, 40 * GIB))
def test_more_ram_is_never_worse(machine, environ, more):
    ram = machine.ram_available_bytes + more
    larger = replace(machine, mem_total_bytes=ram, mem_available_bytes=ram, ram_available_bytes=ram)
    assert worth(make(larger, environ)) >= worth(make(machine, environ))


@_SLOW
@given(boxes, wishes, st.integers(0, 4), st.integers(1, 20_000))
def test_a_larger_card_is_never_worse(machine, environ, at, more_mib):
    at %= len(machine.gpus)
    gpus = list(machine.gpus)
    old = gpus[at]
    more = more_mib * MIB
    gpus[at] = replace(old, free_bytes=old.free_bytes + more, total_bytes=old.total_bytes + more)
    assert worth(make(replace(machine, gpus=tuple(gpus)), environ)) >= worth(make(machine, environ))


@_SLOW
@given(boxes, wishes, card)
def test_one_more_card_is_never_worse(machine, environ, mib):
    one_more = replace(box([mib], 1).gpus[0], index=len(machine.gpus), nvml_index=len(machine.gpus))
    assume(len(machine.gpus) < 5)
    assert worth(make(replace(machine, gpus=(*machine.gpus, one_more)), environ)) >= worth(make(machine, environ))


kinds = st.sampled_from(["nvme", "ssd", "hdd", "network", "overlay", "memory", "unknown"])
mounts = st.none() | st.builds(
    Mount,
    path=st.just("/x"),
    mount_point=st.just("/x"),
    fs_type=st.sampled_from(["ext4", "zfs", "btrfs"]),
    source=st.just("x"),
    kind=kinds,
    read_only=st.sampled_from([None, False, True]),
    usb=st.sampled_from([None, True]),
    compressed=st.sampled_from([None, True]),
    free_bytes=st.none() | st.integers(0, 200 * GIB),
)
files = st.none() | st.builds(
    Prepared,
    file=st.just("/f"),
    whole=st.booleans(),
    trouble=st.sampled_from([None, "it is 77 bytes long"]),
    reserved_bytes=st.integers(0, 96 * GIB),
).filter(lambda found: not (found.whole and found.trouble))


@_SLOW
@given(
    st.builds(box, st.sampled_from([[24_253] * 3, [24_253] * 4, [97_235]]), st.integers(16 * GIB, 260 * GIB)),
    mounts,
    mounts,
    mounts,
    files,
    st.sampled_from(["auto", "checkpoint", "prepared", "/f", "pinned"]),
)
def test_the_tables_place_keeps_its_promises(machine, model, data, named, found, wish):
    """On disk it takes nothing of a plan; page-locked it fits beside the same plan or is refused; a file has the room it needs."""
    disks = {role: m for role, m in {"model": model, "data": data, "table": named}.items() if m is not None}
    machine = replace(machine, mounts=disks)
    # the same box with its checkpoint on a drive that nothing is known against
    plain = make(replace(machine, mounts={}), {})
    try:
        asked = gather({}, {"FLASHNEXT_TABLE": wish}, None)
        made = p.make_plan(machine, p.published(), asked, found)
    except Refusal as refusal:
        assert refusal.code in (Exit.PLAN, Exit.TABLE) and re.search(r"\d", refusal.message)
        if wish == "auto" and not isinstance(plain, Refusal):
            assert "hard disk" in refusal.message, "nothing but a hard disk is refused where nothing was asked"
        return
    assert isinstance(plain, p.Plan) and made.capacity == plain.capacity and made.stages == plain.stages
    place, table_bytes = made.table, p.published().table_bytes
    assert place.reason and "\n" not in place.reason and (place.file is None) == (place.backing != "file")
    assert made.host[-1].bytes == plain.host[-1].bytes - place.pinned_bytes >= p.thumb()["page_cache_bytes"]["value"]
    assert place.pinned_bytes in (0, 128 * GIB) and bool(place.pinned_bytes) == (wish == "pinned")
    if place.make:
        at = disks.get(place.disk)
        have = None if at is None or at.free_bytes is None else at.free_bytes + (found.reserved_bytes if found else 0)
        assert have is None or have >= table_bytes + 5 * GIB
        assert wish != "auto" or (have is not None and at.kind in ("nvme", "ssd") and not at.read_only and not at.usb)
