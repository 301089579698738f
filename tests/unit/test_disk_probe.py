"""The probe reads a real disk: bounded in time, at the places it was given, and never writing."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from entrypoint import disk_probe
from entrypoint.disk_probe import DEPTH, PAGE, Piece, Probe, probe

MB = 1 << 20


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """96 MiB whose pages say where they are."""
    path = tmp_path_factory.mktemp("disk") / "table.bin"
    with path.open("wb") as out:
        for first in range(0, 96 * MB // PAGE, 256):
            out.write(b"".join(n.to_bytes(8, "little") * (PAGE // 8) for n in range(first, first + 256)))
        os.fsync(out.fileno())
    return path


def test_a_real_disk_gives_rates_within_the_time(file):
    before = file.stat()
    begun = time.monotonic()
    found = probe([Piece(file, 0, 96 * MB)])
    assert time.monotonic() - begun < 3, found
    assert found.trouble is None
    assert found.rows_s > 10 and found.rows_deep_s > 10
    assert 0 < found.longest_s <= found.took_s
    assert DEPTH + 1 <= found.reads <= 2 * disk_probe.READS
    assert found.tokens_s == pytest.approx(found.rows_deep_s / 16)
    after = file.stat()
    assert (after.st_mtime_ns, after.st_ctime_ns, after.st_size) == (
        before.st_mtime_ns,
        before.st_ctime_ns,
        before.st_size,
    )


def test_only_the_given_bytes_are_read(file, monkeypatch):
    """A header of odd length before the table, and other tensors after it, are no business of the probe."""
    seen = []
    real = os.preadv

    def watched(descriptor, buffers, offset, *more):
        got = real(descriptor, buffers, offset, *more)
        seen.append((offset, int.from_bytes(bytes(buffers[0][:8]), "little")))
        return got

    monkeypatch.setattr(os, "preadv", watched)
    pieces = [Piece(file, 3 * PAGE + 100, 40 * MB), Piece(file, 60 * MB - 1, 30 * MB)]
    found = probe(pieces, reads=4000, limit_s=1.0, seed=1)
    assert found.trouble is None and len(seen) >= found.reads
    assert all(offset == page * PAGE for offset, page in seen), "the bytes came from where they were asked for"
    inside = [any(p.start <= offset and offset + PAGE <= p.start + p.nbytes for p in pieces) for offset, _ in seen]
    assert all(inside)
    assert {offset < 50 * MB for offset, _ in seen} == {True, False}, "both pieces are read"
    places = [offset for offset, _ in seen[1:]]
    assert len(places) == len(set(places)), "no place twice"


def test_reads_end_with_the_number_asked_for(file):
    assert probe([Piece(file, 0, 96 * MB)], reads=40, limit_s=60).reads == 80


def test_a_slow_disk_ends_with_the_time(file, monkeypatch):
    real = os.preadv

    def hard_disk(*arguments):
        time.sleep(0.02)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", hard_disk)
    begun = time.monotonic()
    found = probe([Piece(file, 0, 96 * MB)], limit_s=0.4)
    assert time.monotonic() - begun < 2
    assert 10 < found.rows_s < 51, "20 ms a read are at most 50 a second"
    assert found.rows_deep_s > 2 * found.rows_s, "side by side they overlap"


def test_a_disk_that_does_not_answer_is_given_up_on(file, monkeypatch):
    answered = threading.Event()

    def hung(*arguments):
        answered.wait(60)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", hung)
    begun = time.monotonic()
    found = probe([Piece(file, 0, 96 * MB)], patience_s=0.3)
    assert time.monotonic() - begun < 20
    assert found == Probe(took_s=0.3, trouble="no answer within 0.3 s")
    answered.set()  # and its thread goes, with its descriptors
    while any(t.name == "disk probe" for t in threading.enumerate()):
        time.sleep(0.01)


def test_memory_without_o_direct_still_gives_a_number(file, monkeypatch):
    """tmpfs and some FUSE file systems refuse O_DIRECT: said as such, not failed."""
    monkeypatch.setattr(os, "O_DIRECT", 0x40000000, raising=False)  # a flag that no read understands
    real = os.preadv
    first = []

    def refuses(descriptor, buffers, offset):
        if not first:
            first.append(True)
            raise OSError(22, "Invalid argument")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuses)
    found = probe([Piece(file, 0, 96 * MB)], reads=50)
    assert (found.direct, found.trouble) == (False, None) and found.rows_s > 10


@pytest.mark.parametrize(("nbytes", "words"), [(64 * MB - 1, "too little"), (64 * MB, None), (0, "too little")])
def test_too_few_bytes_are_not_judged(file, nbytes, words):
    found = probe([Piece(file, 0, nbytes)], reads=20)
    assert (found.trouble is None) if words is None else (words in found.trouble and found.rows_s is None)


def test_what_cannot_be_opened_or_ends_early(tmp_path, monkeypatch, file):
    assert probe([Piece(tmp_path / "nothing", 0, 96 * MB)]).trouble == "cannot be read: No such file or directory"
    monkeypatch.setattr(os, "preadv", lambda *arguments: 100)
    assert "100 of 4096 bytes" in probe([Piece(file, 0, 96 * MB)]).trouble


def test_a_hole_is_no_fast_disk(tmp_path):
    """A shard that was reserved and not filled: reading it costs nothing, and says nothing."""
    file = tmp_path / "shard.bin"
    with file.open("wb") as out:
        out.write(b"x" * (70 * MB))
        out.truncate(140 * MB)
        os.fsync(out.fileno())
    found = probe([Piece(file, 0, 140 * MB)])
    assert found.rows_s is None and found.trouble.startswith("shard.bin has a hole at byte 73,400,320")
    assert probe([Piece(file, 0, 70 * MB)], reads=20).trouble is None


def test_descriptors_are_given_back(file):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        probe([Piece(file, 0, 96 * MB)], reads=20)
    assert len(os.listdir("/proc/self/fd")) == before
