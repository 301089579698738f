"""All experiments in one command, within a budget of time: make the checkpoints, fill the cards, print as they end.

    python3 -m tests.gpu.run --site DIR --out DIR [--work DIR] [--only NAME,...] [--budget SECONDS] [--cache FILE]

One-card experiments run side by side, one on each card; then those of two cards, one after another. What does not fit
into the budget any more is named and left out. OUT gets one log an experiment, results.json, and cache.tar.xz with the
compiled kernels; --cache takes such a file from an earlier run. Exit status: 0 all passed, 1 a failure, 3 something was
left out for lack of time or cards.
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

RESERVE_S = 25
"""Kept back for packing the caches."""
LEAST_S = 45
"""An experiment with less time left than this is not begun."""


def cards() -> int:
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return len([line for line in listed.stdout.splitlines() if line.startswith("GPU ")])


def make_all(chosen: list[Experiment], place: Place) -> set[str]:
    """Make every checkpoint at once, each in a process. Returns the names of experiments whose checkpoint is not right."""
    started = {place.checkpoint(e): (e, experiments.make_checkpoint(e, place)) for e in reversed(chosen)}
    wrong: set[pathlib.Path] = set()
    for folder, (experiment, process) in started.items():
        printed = process.communicate()[0]
        fault = experiments.check_digest(experiment, printed) if process.returncode == 0 else printed[-2000:]
        print(f"checkpoint {folder.name}: {fault or 'as the reference has it'}", flush=True)
        if fault:
            wrong.add(folder)
    return {e.name for e in chosen if place.checkpoint(e) in wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/flashnext-gpu"))
    parser.add_argument("--only", default=",".join(e.name for e in EXPERIMENTS))
    parser.add_argument("--budget", type=float, default=570)
    parser.add_argument("--cache", type=pathlib.Path)
    opt = parser.parse_args()
    begun = time.monotonic()

    def left() -> float:
        return opt.budget - RESERVE_S - (time.monotonic() - begun)

    place = Place(opt.site.resolve(), opt.work.resolve(), opt.out.resolve())
    place.work.mkdir(parents=True, exist_ok=True)
    place.out.mkdir(parents=True, exist_ok=True)
    if opt.cache and opt.cache.exists():
        subprocess.run(["tar", "-xJf", str(opt.cache.resolve()), "-C", str(place.work)], check=True)
    chosen = [experiments.BY_NAME[name] for name in opt.only.split(",")]
    wrong = make_all(chosen, place)
    print(f"made after {time.monotonic() - begun:.0f} s", flush=True)
    count = cards()
    results, skipped = [], sorted(wrong)
    free, todo, running = list(range(count)), [e for e in chosen if e.name not in wrong], {}
    with ThreadPoolExecutor() as pool:
        while todo or running:
            for experiment in sorted(todo, key=lambda e: e.stages):
                if experiment.stages > count or left() < LEAST_S:
                    todo.remove(experiment)
                    skipped.append(experiment.name)
                elif experiment.stages <= len(free):
                    todo.remove(experiment)
                    mine, free = free[: experiment.stages], free[experiment.stages :]
                    names = ",".join(map(str, mine))
                    print(f"{time.monotonic() - begun:.0f} s: begin {experiment.name} on {names}", flush=True)
                    running[pool.submit(experiments.run, experiment, place, names, left())] = mine
                else:
                    break
            if not running:
                continue
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                free = sorted(free + running.pop(done))
                results.append(done.result())
                print(experiments.summary(results[-1]), flush=True)
                (place.out / "results.json").write_text(json.dumps(results, indent=1))
    if (place.work / "cache").exists():
        pack = f"tar -C {place.work} -c cache/triton cache/humming | xz -3 -T0 > {place.out / 'cache.tar.xz'}"
        try:
            subprocess.run(["sh", "-c", pack], timeout=RESERVE_S)
        except subprocess.TimeoutExpired:
            (place.out / "cache.tar.xz").unlink(missing_ok=True)
    failed = [r["name"] for r in results if r["faults"]]
    print(
        f"{len(results) - len(failed)} passed, failed: {failed}, left out: {skipped}, {time.monotonic() - begun:.0f} s"
    )
    return 1 if failed or wrong else 3 if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
