"""Boxes made up from words, the catalogue behind them, and the spelling of sizes."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.box_file import from_dict
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


@pytest.mark.parametrize(
    "spec",
    [
        "3x3090",
        "3 x RTX 3090",
        "3x rtx3090",
        "3X NVIDIA GeForce RTX 3090",
        "3*geforce rtx 3090",
        "3090x3",
        "rtx3090 x 3",
        "RTX-3090 × 3",
        "3 3090",
        "3 RTX 3090",
        "3x3090s",
        "3090+3090+3090",
        "2x3090 and 3090",
        "3090, 3090, 3090",
        "3x3090 24GB",
        "3x RTX 3090 (24 GiB)",
        "1x3090+2x rtx_3090",
    ],
)
def test_one_box_in_many_spellings(spec):
    assert names(simulate(spec)) == ["RTX 3090"] * 3
    assert simulate(spec).gpus == simulate("3x3090").gpus


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("3090ti", "NVIDIA GeForce RTX 3090 Ti"),
        ("RTX 3090TI", "NVIDIA GeForce RTX 3090 Ti"),
        ("4080super", "NVIDIA GeForce RTX 4080 SUPER"),
        ("rtxa6000", "NVIDIA RTX A6000"),
        ("RTX6000Ada", "NVIDIA RTX 6000 Ada Generation"),
        ("rtx pro6000", "NVIDIA RTX PRO 6000 Blackwell"),
        ("RTX PRO 6000 96GB", "NVIDIA RTX PRO 6000 Blackwell"),
        ("PRO 5000 72GB", "NVIDIA RTX PRO 5000 72GB Blackwell"),
        ("PRO 5000 48GB", "NVIDIA RTX PRO 5000 Blackwell"),
        ("4090 48GB", "NVIDIA GeForce RTX 4090 48GB"),
        ("4090d", "NVIDIA GeForce RTX 4090 D"),
        ("A40 48GB", "NVIDIA A40"),
        ("Tesla P40", "Tesla P40"),
        ("v100 32GB", "Tesla V100-PCIE-32GB"),
        ("a100", "NVIDIA A100-PCIE-40GB"),
    ],
)
def test_one_card_by_what_people_call_it(text, name):
    assert [gpu.name for gpu in simulate(text).gpus] == [name]


def test_sizes_alone_are_cards():
    """24+24+16, as people write a mixed box."""
    assert [gpu.total_bytes // GIB for gpu in simulate("24+24+16").gpus] == [24, 24, 16]
    assert names(simulate("2x24+16@8.6")) == ["card of 24GB", "card of 24GB", "card of 16GB"]
    assert simulate("16@8.6").gpus[0].compute_capability == (8, 6)


@pytest.mark.parametrize(("spec", "words"), [("3090 12GB", "has 24 GiB, not 12"), ("A40 24GB", "has 45 GiB, not 24")])
def test_a_size_that_the_card_does_not_have_is_refused(spec, words):
    with pytest.raises(Refusal, match=words) as refusal:
        simulate(spec)
    assert refusal.value.code == Exit.USAGE


@pytest.mark.parametrize("spec", ["3x RX 7900 XTX", "radeon pro w7900", "2x MI300X", "Intel Arc B580", "M3 Ultra"])
def test_cards_of_other_makers_are_called_that(spec):
    with pytest.raises(Refusal, match="is not an NVIDIA card"):
        simulate(spec)


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


# --- boxes in files ---------------------------------------------------------------------------------------------------

BOX = """
cards:
  - 2x3090
  - {card: "4090", free_bytes: 20GiB, pcie_gen_max: 3, pcie_width_now: 4, display: true, processes: 2}
ram: 125GiB
cgroup: 96GiB
disk: nfs
wsl: true
driver_version: 580.95.05
driver_cuda_version: "13.0"
memlock_bytes: 8MiB
shm_total_bytes: 67108864
numa: [{node: 0, total_bytes: 64GiB, free_bytes: 60GiB, cpus: 16}]
"""


def test_a_box_in_a_file(tmp_path):
    file = tmp_path / "box.yaml"
    file.write_text(BOX)
    for box in (simulate(f"@{file}"), simulate(f" @{file} ")):
        assert names(box) == ["RTX 3090", "RTX 3090", "RTX 4090"]
        assert [gpu.index for gpu in box.gpus] == [gpu.nvml_index for gpu in box.gpus] == [0, 1, 2]
        last = box.gpus[2]
        assert (last.free_bytes, last.display, last.processes) == (20 * GIB, True, 2)
        assert round(last.pcie_bytes_s / 1e6) == 3938
        assert (box.mem_available_bytes, box.ram_available_bytes) == (123 * GIB, 96 * GIB)
        assert (box.memlock_bytes, box.shm_total_bytes, box.wsl) == (8 * MIB, 64 * MIB, True)
        assert (box.driver_version, box.driver_cuda_version) == ("580.95.05", (13, 0))
        assert box.mounts["model"].kind == "network"
        assert box.numa[0].free_bytes == 60 * GIB
    over = simulate(f"@{file}", ram="60GiB", disk="nvme")
    assert (over.ram_available_bytes, over.mounts["data"].kind) == (58 * GIB, "nvme")


def test_the_example_in_the_docs_is_a_box(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    file = tmp_path / "box.yaml"
    file.write_text(re.search(r"```\n(cards:.*?)```", text, re.DOTALL)[1])
    box = simulate(f"@{file}")
    assert names(box) == ["RTX 3090", "RTX 3090", "RTX 4090"] and box.ram_available_bytes == 96 * GIB


def test_the_facts_of_any_box_read_back(tmp_path):
    """What doctor's report writes can be planned again, as the very same facts."""
    from entrypoint.detect import read_machine

    for box in (simulate("2x3090+1x4090", ram="64G", disk="hdd"), read_machine(paths={"model": tmp_path, "data": "/"})):
        file = tmp_path / "report.json"
        file.write_text(json.dumps({"schema": 1, "machine": dataclasses.asdict(box)}))
        again = simulate(f"@{file}")
        assert dataclasses.replace(again, simulated=box.simulated) == box


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "one mapping"),
        ("cards: 3x3090\ncolour: red", "'colour' is no fact of a machine"),
        ("cards: [{card: '3090', colour: red}]", "'colour' is no fact of a gpu"),
        ("cards: [{card: 3x3090}]", "names one card"),
        ("cards: [{card: '3090', count: 0}]", "from 1 to 64"),
        ("cards: [{card: '3090', count: 65}]", "from 1 to 64"),
        ("cards: [[3090]]", "not a text or a mapping"),
        ("cards: 3x3090\nram: [1]", "ram is a list"),
        ("cards: 3x3090\nram: lots", "is not a size"),
        ("cards: 3x3090\nwsl: perhaps", "neither true nor false"),
        ("cards: 3x3090\nmemlock_bytes: some", "is not a size"),
        ("cards: 3x3090\ndriver_version: [580]", "driver_version is a list"),
        ("cards: 3x3090\ndriver_cuda_version: thirteen", "is not a version"),
        ("cards: 3x3090\nmounts: {model: nvme}", "mounts is not a mapping"),
        ("cards: 3x3090\nmounts: {model: {kind: nvme}}", "a mount lacks path"),
        ("cards: 3x3090\nwsl: null\ncontainer: null", "container is empty"),
        ("cards: {", "neither JSON nor YAML"),
        ("\x00", "neither JSON nor YAML"),
    ],
)
def test_a_file_that_is_no_box_is_refused_by_its_key(tmp_path, text, words):
    file = tmp_path / "box.yaml"
    file.write_text(text)
    with pytest.raises(Refusal) as refusal:
        simulate(f"@{file}")
    assert words in refusal.value.message and refusal.value.code == Exit.USAGE


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(Refusal, match="cannot be read"):
        simulate("@nowhere")
    with pytest.raises(Refusal, match="names no cards") as refusal:
        simulate("nowhere.json")
    assert refusal.value.fix == "for a box in a file write @nowhere.json"
    (tmp_path / "box.json").write_bytes(b"\xff\xfe")
    with pytest.raises(Refusal, match="is not text"):
        simulate(f"@{tmp_path / 'box.json'}")


KEYS = st.sampled_from(["cards", "gpus", "ram", "cgroup", "disk", "wsl", "mounts", "numa", "p2p", "memlock_bytes", "x"])
PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(["3x3090", "24G"])
)
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner))


@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_any_mapping_is_a_box_or_a_refusal(document):
    try:
        assert isinstance(from_dict(document), Machine)
    except Refusal as refusal:
        assert refusal.code == Exit.USAGE


# --- catalogue --------------------------------------------------------------------------------------------------------


def test_the_catalogue_is_consistent():
    seen = [alias for board in boards() for alias in board.aliases]
    assert len(seen) == len(set(seen))
    for board in boards():
        assert board.total_bytes % MIB == 0 and 0 < board.reserved_bytes < 0.02 * board.total_bytes, board
        assert 2e11 < board.bandwidth_bytes_s < 5e12, board
        assert board.pcie_gen in (3, 4, 5) and board.pcie_width in (8, 16), board
        assert board.compute_capability in {(6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)}, board
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
        ("Quadro RTX 6000", 24_576, "Quadro RTX 6000"),
        ("Tesla P40", 24_576, "Tesla P40"),
        ("NVIDIA A100-SXM4-80GB", 81_920, "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA L40", 46_068, "NVIDIA L40"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16_376, None),
        ("NVIDIA H200", 143_771, "NVIDIA H200"),
        ("NVIDIA B200", 183_359, None),
    ],
)
def test_a_real_card_finds_its_row(nvml_name, total_mib, expected):
    board = find_board(nvml_name, total_mib * MIB)
    assert (board and board.name) == expected


def test_a_simulated_machine_is_plain_data():
    assert dataclasses.asdict(simulate("2x3090", ram="64G", disk="nvme"))["mounts"]["data"]["kind"] == "nvme"
