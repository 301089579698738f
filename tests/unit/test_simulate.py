"""Boxes made up from words, the catalogue behind them, and the spelling of sizes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.errors import Exit, Refusal
from entrypoint.machine import Machine
from entrypoint.simulate import DISKS, boards, find_board, simulate
from entrypoint.units import GIB, MIB, format_gib, parse_size

# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("125GiB", 134_217_728_000),
        ("48G", 51_539_607_552),
        ("48g", 51_539_607_552),
        ("550000000", 550_000_000),
        (550_000_000, 550_000_000),
        ("550_000_000", 550_000_000),
        ("1,048,576", 1_048_576),
        ("0.5 TiB", 549_755_813_888),
        (" 1.5 MiB ", 1_572_864),
        ("128GB", 128_000_000_000),
        ("4kb", 4_000),
        ("4K", 4_096),
        ("7B", 7),
        ("0", 0),
        (".5k", 512),
        ("0.1k", 102),
    ],
)
def test_sizes(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1",
        "1,5 GiB",
        "12,34",
        "1e9",
        "48 GiBs",
        "4 8G",
        "nan",
        "0x10",
        "1 EiB",
        "2000000T",
        "１２G",
        "1..5G",
    ],
)
def test_what_is_no_size_is_refused_by_the_name_of_the_wish(text):
    with pytest.raises(Refusal, match=r"^--ram: .* is not a size$") as refusal:
        parse_size(text, "--ram")
    assert refusal.value.code == Exit.USAGE


@given(st.integers(0, 1 << 50))
def test_a_number_of_bytes_reads_back(size_bytes):
    assert parse_size(str(size_bytes)) == parse_size(f"{size_bytes:,}") == parse_size(f"{size_bytes}B") == size_bytes


@given(st.text(max_size=30))
def test_any_text_is_a_size_or_a_refusal(text):
    try:
        assert 0 <= parse_size(text) <= 1 << 60
    except Refusal as refusal:
        assert refusal.code == Exit.USAGE and "\n" not in refusal.message


@pytest.mark.parametrize(
    ("size", "text"), [(51_002_736_640, "47.50 GiB"), (None, "unknown"), (1 << 50, "1,048,576.00 GiB")]
)
def test_gib_for_people(size, text):
    assert format_gib(size) == text


# --- cards ------------------------------------------------------------------------------------------------------------


def names(machine: Machine) -> list[str]:
    return [gpu.name.removeprefix("NVIDIA ").removeprefix("GeForce ") for gpu in machine.gpus]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("3x3090", ["RTX 3090"] * 3),
        ("3090", ["RTX 3090"]),
        ("4 x RTX 3090", ["RTX 3090"] * 4),
        ("2x3090+1x4090", ["RTX 3090", "RTX 3090", "RTX 4090"]),
        ("4090 + 2×3090", ["RTX 4090", "RTX 3090", "RTX 3090"]),
        ("1x3090 Ti, 1x4080 super", ["RTX 3090 Ti", "RTX 4080 SUPER"]),
        ("1xRTX PRO 6000", ["RTX PRO 6000 Blackwell"]),
        ("2x NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", ["RTX PRO 6000 Blackwell"] * 2),
        ("3xA5000", ["RTX A5000"] * 3),
        ("2x24GB+1x16GB", ["card of 24GB", "card of 24GB", "card of 16GB"]),
    ],
)
def test_cards_in_the_order_given(spec, expected):
    machine = simulate(spec)
    assert names(machine) == expected
    assert [gpu.index for gpu in machine.gpus] == list(range(len(expected)))
    assert (machine.simulated, machine.cuda_order, machine.gpu_error) == (spec, "PCI_BUS_ID", None)


def test_a_3090_to_the_byte():
    """Total: nvidia-smi's 24576MiB. Free: CUDA's own total as PyTorch prints it, 23.69 GiB, rounded down."""
    card = simulate("3x3090").gpus[2]
    assert card.total_bytes == 25_769_803_776
    assert card.reserved_bytes == 323 * MIB
    assert card.free_bytes == 25_431_113_728 and 23.68 < card.free_bytes / GIB < 23.695
    assert (card.compute_capability, card.pcie_gen_max, card.pcie_width_max) == ((8, 6), 4, 16)
    assert (card.processes, card.mig) == (0, False)


@pytest.mark.parametrize(
    ("spec", "total_gib", "capability"),
    [
        ("24GiB@8.6", 24, (8, 6)),
        ("24G@12.0", 24, (12, 0)),
        ("24GB", 24, None),
        ("1.5x", None, None),
        ("24576 MiB @ 8.9", 24, (8, 9)),
    ],
)
def test_free_form_cards(spec, total_gib, capability):
    if total_gib is None:
        with pytest.raises(Refusal):
            simulate(spec)
        return
    (card,) = simulate(spec).gpus
    assert (card.total_bytes, card.compute_capability) == (total_gib * GIB, capability)
    assert card.free_bytes == card.total_bytes - 394 * MIB  # 1.6 % of 24,576 MiB, rounded up


@pytest.mark.parametrize(
    ("spec", "nearest"),
    [
        ("3x3091", "RTX 3090"),
        ("1xA6001", "RTX A6000"),
        ("2xRTX PRO 6001", "RTX PRO 6000 Blackwell"),
        ("3090ti max", "RTX 3090 Ti"),
    ],
)
def test_an_unknown_card_is_refused_with_the_nearest(spec, nearest):
    with pytest.raises(Refusal) as refusal:
        simulate(spec)
    assert refusal.value.code == Exit.USAGE
    assert (
        f"nearest: NVIDIA GeForce {nearest}" in refusal.value.message
        or f"nearest: NVIDIA {nearest}" in refusal.value.message
    )


@pytest.mark.parametrize(
    "spec", ["", " ", "+", "3x3090+", "0x3090", "65x3090", "40x3090+30x4090", "99999x3090", "-1x3090", "1x1MiB"]
)
def test_specs_that_name_no_box(spec):
    with pytest.raises(Refusal) as refusal:
        simulate(spec)
    assert refusal.value.code == Exit.USAGE and "simulate" in refusal.value.message


@given(st.text(max_size=40))
def test_any_text_is_a_box_or_a_refusal(spec):
    try:
        assert 1 <= len(simulate(spec).gpus) <= 64
    except Refusal as refusal:
        assert refusal.code == Exit.USAGE


# --- host -------------------------------------------------------------------------------------------------------------


def test_ram_and_cgroup():
    machine = simulate("3x3090", ram="125GiB", cgroup="64G")
    assert machine.mem_total_bytes == 134_217_728_000
    assert machine.mem_available_bytes == 134_217_728_000 - 2 * GIB
    assert (machine.cgroup_limit_bytes, machine.cgroup_used_bytes) == (64 * GIB, 0)
    assert machine.ram_available_bytes == 64 * GIB
    assert simulate("3x3090", ram="48GiB", cgroup="64G").ram_available_bytes == 46 * GIB


def test_what_is_not_said_is_unknown():
    machine = simulate("3x3090")
    assert (machine.mem_total_bytes, machine.ram_available_bytes, machine.memlock_bytes, machine.cpu_count) == (
        None,
    ) * 4
    assert (dict(machine.mounts), machine.wsl) == ({}, False)


@pytest.mark.parametrize(
    ("disk", "kind", "rotational"),
    [("nvme", "nvme", False), ("SATA", "ssd", False), ("hdd", "hdd", True), ("nfs", "network", None)],
)
def test_disks(disk, kind, rotational):
    mounts = simulate("3x3090", disk=disk, wsl=True).mounts
    assert {(role, mount.kind, mount.rotational) for role, mount in mounts.items()} == {
        ("model", kind, rotational),
        ("data", kind, rotational),
    }


def test_an_unknown_disk_is_refused_with_the_known_ones():
    with pytest.raises(Refusal) as refusal:
        simulate("3x3090", disk="floppy")
    assert all(word in refusal.value.fix for word in DISKS)


# --- catalogue --------------------------------------------------------------------------------------------------------


def test_the_catalogue_is_consistent():
    seen = [alias for board in boards() for alias in board.aliases]
    assert len(seen) == len(set(seen))
    for board in boards():
        assert board.total_bytes % MIB == 0 and 0 < board.reserved_bytes < 0.02 * board.total_bytes, board
        assert 2e11 < board.bandwidth_bytes_s < 2e12, board
        assert board.pcie_gen in (3, 4, 5) and board.pcie_width in (8, 16), board
        assert find_board(board.name) == find_board(board.aliases[0]) == board
    sizes = {round(board.total_bytes / GIB / 4) * 4 for board in boards()}
    assert sizes >= {16, 20, 24, 32, 48, 96}
    assert next(b for b in boards() if b.name.endswith("3090")).bandwidth_bytes_s == 936e9


@pytest.mark.parametrize(
    ("nvml_name", "total_mib", "expected"),
    [
        ("NVIDIA GeForce RTX 3090", 24_576, "NVIDIA GeForce RTX 3090"),
        ("NVIDIA GeForce RTX 3090", 20_480, None),
        ("NVIDIA GeForce RTX 4060 Ti", 16_380, "NVIDIA GeForce RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 4060 Ti", 8_188, None),
        ("NVIDIA GeForce RTX 4090", 24_564, "NVIDIA GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 4090", 49_140, "NVIDIA GeForce RTX 4090 48GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_887, "NVIDIA RTX PRO 6000 Blackwell"),
        ("NVIDIA RTX 6000 Ada Generation", 49_140, "NVIDIA RTX 6000 Ada Generation"),
        ("Quadro RTX 6000", 24_576, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16_376, None),
        ("NVIDIA H200", 143_771, None),
    ],
)
def test_a_real_card_finds_its_row(nvml_name, total_mib, expected):
    board = find_board(nvml_name, total_mib * MIB)
    assert (board and board.name) == expected


def test_a_simulated_machine_is_plain_data():
    assert dataclasses.asdict(simulate("2x3090", ram="64G", disk="nvme"))["mounts"]["data"]["kind"] == "nvme"
