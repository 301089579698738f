# SPDX-License-Identifier: Apache-2.0
"""Decide what a disk can give at most for random rows: io_uring with O_DIRECT and many reads in flight, in C.

The program reads offsets, then each row as the one or two whole pages around it, DEPTH of them with the disk at any time,
through the raw system calls (linux/io_uring.h; no liburing). It waits for one completion at a time and takes all that
have come. What it returns is compared by the caller, so a yardstick that skips work is found out. Its clock starts when
the ring is set up and stops when the last row lies in its place: no start of a process, no pipe is in it.

Used by table_bench only. Compiled when asked for, because a shipped image has no compiler; where there is none, or the
kernel refuses io_uring (Docker's default seccomp profile does), `Unavailable` says so.
"""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DEPTH = 128
SOURCE = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096L

static void die(const char *what, int error) {
    fprintf(stderr, "%s: %s\n", what, strerror(error));
    exit(3);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    long row = atol(argv[2]), depth = atol(argv[3]), count = atol(argv[4]);
    long room = (row + PAGE - 1) / PAGE * PAGE + PAGE;
    int64_t *at = malloc(count * sizeof *at);
    char *rows = malloc(count * row);
    if (fread(at, sizeof *at, count, stdin) != (size_t)count) die("offsets", EIO);
    memset(rows, 0, count * row);
    int file = open(argv[1], O_RDONLY | O_DIRECT);
    if (file < 0) die("open O_DIRECT", errno);
    char *pages = mmap(NULL, depth * room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    struct io_uring_params p;
    memset(&p, 0, sizeof p);
    int ring = syscall(SYS_io_uring_setup, depth, &p);
    if (ring < 0) die("io_uring_setup", errno);
    int rw = PROT_READ | PROT_WRITE;
    size_t sq_size = p.sq_off.array + p.sq_entries * 4, cq_size = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
    char *sq = mmap(NULL, sq_size, rw, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    char *cq = mmap(NULL, cq_size, rw, MAP_SHARED, ring, IORING_OFF_CQ_RING);
    struct io_uring_sqe *sqes = mmap(NULL, p.sq_entries * sizeof *sqes, rw, MAP_SHARED, ring, IORING_OFF_SQES);
    if (pages == MAP_FAILED || sq == MAP_FAILED || cq == MAP_FAILED || sqes == MAP_FAILED) die("mmap", errno);
    unsigned *sq_tail = (unsigned *)(sq + p.sq_off.tail), *sq_array = (unsigned *)(sq + p.sq_off.array);
    unsigned *cq_head = (unsigned *)(cq + p.cq_off.head), *cq_tail = (unsigned *)(cq + p.cq_off.tail);
    unsigned sq_mask = *(unsigned *)(sq + p.sq_off.ring_mask), cq_mask = *(unsigned *)(cq + p.cq_off.ring_mask);
    struct io_uring_cqe *cqes = (struct io_uring_cqe *)(cq + p.cq_off.cqes);
    long *owner = malloc(depth * sizeof *owner), *idle = malloc(depth * sizeof *idle), idles = depth;
    for (long n = 0; n < depth; n++) idle[n] = n;

    double begin = now();
    long sent = 0, done = 0;
    while (done < count) {
        unsigned tail = *sq_tail, fresh = 0;
        while (idles && sent < count) {
            long slot = idle[--idles], first = at[sent] / PAGE * PAGE;
            struct io_uring_sqe *e = &sqes[tail & sq_mask];
            memset(e, 0, sizeof *e);
            e->opcode = IORING_OP_READ;
            e->fd = file;
            e->off = first;
            e->addr = (uintptr_t)(pages + slot * room);
            e->len = (at[sent] + row - first + PAGE - 1) / PAGE * PAGE;
            e->user_data = slot;
            sq_array[tail & sq_mask] = tail & sq_mask;
            owner[slot] = sent++;
            tail++;
            fresh++;
        }
        __atomic_store_n(sq_tail, tail, __ATOMIC_RELEASE);
        while (syscall(SYS_io_uring_enter, ring, fresh, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0)
            if (errno != EINTR) die("io_uring_enter", errno);
        unsigned head = *cq_head, end = __atomic_load_n(cq_tail, __ATOMIC_ACQUIRE);
        for (; head != end; head++) {
            struct io_uring_cqe *c = &cqes[head & cq_mask];
            long slot = c->user_data, n = owner[slot], within = at[n] % PAGE;
            if (c->res < within + row) die("read", c->res < 0 ? -c->res : EIO);
            memcpy(rows + n * row, pages + slot * room + within, row);
            idle[idles++] = slot;
            done++;
        }
        __atomic_store_n(cq_head, head, __ATOMIC_RELEASE);
    }
    double seconds = now() - begin;

    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    fprintf(stderr, "%.9f %ld\n", seconds, used.ru_inblock * 512L);
    if (fwrite(rows, row, count, stdout) != (size_t)count || fflush(stdout)) die("write", errno);
    return 0;
}
"""


class Unavailable(RuntimeError):
    """No yardstick here; the reason in a few words."""


@dataclass(frozen=True)
class Reading:
    """One run: the rows (uint8 [n, row_bytes]), seconds, and bytes that the disk gave."""

    rows: np.ndarray
    seconds: float
    disk_bytes: int


def build(folder: Path) -> Path:
    """Compile the program into `folder`. Raises Unavailable."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise Unavailable("no compiler")
    source, program = folder / "yardstick.c", folder / "yardstick"
    source.write_text(SOURCE, encoding="utf-8")
    done = subprocess.run([compiler, "-O2", "-o", program, source], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise Unavailable(f"{compiler}: {next(iter(done.stderr.splitlines()), 'failed')}")
    return program


def read(program: Path, file: str, offsets: np.ndarray, row_bytes: int, depth: int = DEPTH) -> Reading:
    """Rows of `row_bytes` at `offsets` (int64 [n], bytes). Raises Unavailable with the program's own words."""
    words = [program, file, str(row_bytes), str(depth), str(len(offsets))]
    done = subprocess.run(words, input=offsets.tobytes(), capture_output=True, timeout=600)
    if done.returncode:
        raise Unavailable(done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}")
    seconds, disk_bytes = done.stderr.split()
    rows = np.frombuffer(done.stdout, np.uint8).reshape(len(offsets), row_bytes)
    return Reading(rows, float(seconds), int(disk_bytes))
