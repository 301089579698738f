"""All experiments in one command, within a budget of time: make the checkpoints, fill the cards, print as they end.

    python3 -m tests.gpu.run --site DIR --out DIR [--work DIR] [--only NAME,...] [--budget SECONDS] [--cache FILE]

One-card experiments run side by side, one on each card; then those of two cards, one after another; one that is held to the
answers of another waits for it, and rates are held to one another at the end. What does not fit into the budget any more is
named and left out. --one-card: the stages of an experiment share a card (tests/support/one_card), for a machine that has one.
--at-once N: N experiments share a card, for answers, not for rates. OUT gets results.json and logs.tar.xz (both after every
experiment), and with --pack the compiled kernels as cache.tar.xz.0, .1, ...; --cache takes a folder with such files from an
earlier run. Few and small files, since that is all that comes back from some machines.
Exit status: 0 all passed, 1 a failure, 3 something was left out for lack of time or cards.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from . import experiments
from .experiments import EXPERIMENTS, Experiment, Place

RESERVE_S = 30
"""Kept back for packing the kernels."""
CACHE_PARTS, CACHE_PART_BYTES = 4, 15 << 20
LEAST_S = 45
"""An experiment with less time left than this is not begun."""


def cards() -> int:
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return len([line for line in listed.stdout.splitlines() if line.startswith("GPU ")])


def make_all(chosen: list[Experiment], place: Place) -> set[str]:
    """Make every checkpoint at once, each in a process. Returns the names of experiments whose checkpoint is not right."""
    each = {place.checkpoint(e): e for e in chosen}
    started = {folder: (e, experiments.make_checkpoint(e, place)) for folder, e in each.items()}
    wrong: set[pathlib.Path] = set()
    for folder, (experiment, process) in started.items():
        printed = process.communicate()[0]
        fault = experiments.check_digest(experiment, printed) if process.returncode == 0 else printed[-2000:]
        print(f"checkpoint {folder.name}: {fault or 'as the reference has it'}", flush=True)
        if fault:
            wrong.add(folder)
    return {e.name for e in chosen if place.checkpoint(e) in wrong}


def shell(line: str, limit_s: float) -> bool:
    try:
        return subprocess.run(["sh", "-c", line], timeout=limit_s).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def pack_cache(work: pathlib.Path, out: pathlib.Path) -> None:
    """The compiled kernels in parts; nothing at all if there are too many, since a part alone is of no use."""
    whole = work / "cache.tar.xz"
    if shell(f"tar -C {work} -c cache/triton cache/humming | xz -3 -T0 > {whole}", RESERVE_S - 5):
        size = whole.stat().st_size
        print(f"compiled kernels: {size / 1e6:.1f} MB packed", flush=True)
        if size <= CACHE_PARTS * CACHE_PART_BYTES:
            shell(f"split -d -a 1 -b {CACHE_PART_BYTES} {whole} {out / 'cache.tar.xz.'}", 30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/flashnext-gpu"))
    parser.add_argument("--only", default=",".join(e.name for e in EXPERIMENTS))
    parser.add_argument("--budget", type=float, default=570)
    parser.add_argument("--cache", type=pathlib.Path, help="folder with cache.tar.xz.N of an earlier run")
    parser.add_argument("--pack", action="store_true", help="bring the compiled kernels back")
    parser.add_argument("--one-card", action="store_true", help="stages share a card; times then mean nothing")
    parser.add_argument("--at-once", type=int, default=1, help="experiments on a card; times then mean nothing")
    opt = parser.parse_args()
    begun = time.monotonic()

    def left() -> float:
        return opt.budget - RESERVE_S * opt.pack - (time.monotonic() - begun)

    place = Place(opt.site.resolve(), opt.work.resolve(), opt.work.resolve() / "logs", opt.one_card, opt.at_once)
    place.work.mkdir(parents=True, exist_ok=True)
    opt.out.mkdir(parents=True, exist_ok=True)
    if opt.cache and (parts := sorted(opt.cache.glob("cache.tar.xz.*"))):
        shell(f"cat {' '.join(str(part.resolve()) for part in parts)} | tar -xJ -C {place.work}", 120)
    chosen = [experiments.BY_NAME[name] for name in opt.only.split(",")]
    wrong = make_all(chosen, place)
    print(f"made after {time.monotonic() - begun:.0f} s", flush=True)
    count = cards()
    results, skipped = [], sorted(wrong)
    free, todo, running = list(range(count)) * opt.at_once, [e for e in chosen if e.name not in wrong], {}
    names_running: dict = {}
    with ThreadPoolExecutor() as pool:
        while todo or running:
            for experiment in sorted(todo, key=place.cards):
                if not experiment.contexts and experiment.against in {e.name for e in todo} | set(
                    names_running.values()
                ):
                    continue  # it is held to that one's answers
                need = place.cards(experiment)
                if need > count or left() < LEAST_S:
                    todo.remove(experiment)
                    skipped.append(experiment.name)
                elif need <= len(set(free)):
                    todo.remove(experiment)
                    mine = sorted(set(free))[:need]
                    for card in mine:
                        free.remove(card)
                    names = ",".join(map(str, mine))
                    print(f"{time.monotonic() - begun:.0f} s: begin {experiment.name} on {names}", flush=True)
                    future = pool.submit(experiments.run, experiment, place, names, left())
                    running[future], names_running[future] = mine, experiment.name
                else:
                    break
            if not running:
                continue
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                free += running.pop(done)
                del names_running[done]
                results.append(done.result())
                print(experiments.summary(results[-1]), flush=True)
                (opt.out / "results.json").write_text(json.dumps(results, indent=1))
                shell(f"tar -C {place.work} -cJf {opt.out / 'logs.tar.xz'} logs", 60)
    for fault in experiments.hold_rates(results, place.work):
        print(f"below a bar: {fault}", flush=True)
    (opt.out / "results.json").write_text(json.dumps(results, indent=1))
    if opt.pack and (place.work / "cache").exists():
        pack_cache(place.work, opt.out)
    failed = [r["name"] for r in results if r["faults"]]
    print(
        f"{len(results) - len(failed)} passed, failed: {failed}, left out: {skipped}, {time.monotonic() - begun:.0f} s"
    )
    return 1 if failed or wrong else 3 if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
