"""The experiments on one and two cards: what each boots, how long it may take, and what its outcome means.

What it decides: whether an experiment passed, from the process's exit, its log and `compare`. Each runs tests/gpu/engine.py
in a process group of its own that is killed at its limit, so that a hang costs its limit and nothing more.

Kernels are those that an RTX 3090 takes, also on a newer card: Marlin for INT4 and INT8, Humming for INT6, Triton for the
linear attention (what only a newer card has is switched off by name).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from . import compare

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
REFERENCES = HERE / "references"

NEWER_CARDS_ONLY = "CutlassW4A8LinearKernel,MacheteLinearKernel,AllSparkLinearKernel"
LOADED = re.compile(r"(?:Worker_PP(\d)[^\n]*?)?Model loading took ([0-9.]+) GiB")
KERNELS = re.compile(r"Using (\w+) for CompressedTensorsWNA16|Using '(\w+)' WNA16 MoE backend")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """variant: of tests/support/checkpoints.py. stages: pipeline stages, one card each.

    without: file name of a patch that is taken out of the tree for this run. load_only: stop once every stage has reported
    the size of its weights. limit_s: wall clock, boot included.
    """

    name: str
    variant: str
    stages: int
    limit_s: int
    arguments: dict = dataclasses.field(default_factory=dict)
    wrapper: bool = False
    load_only: bool = False
    without: str | None = None

    @property
    def dummy(self) -> bool:
        return self.variant == "full-shapes"


MARLIN, TRITON = {"moe_backend": "marlin"}, {"moe_backend": "triton"}
TABLE_ON_DISK = {"additional_config": {"flashnext": {"table": {"backing": "checkpoint"}}}}
EXPERIMENTS = (
    Experiment("mixed-1", "mixed", 1, 420, MARLIN),
    Experiment("bf16-1", "bf16", 1, 420, TRITON),
    Experiment("mixed-2", "mixed", 2, 300, MARLIN),
    Experiment("mixed-2-disk", "mixed", 2, 240, MARLIN | TABLE_ON_DISK),
    Experiment("int8-dense-1", "int8-dense", 1, 240, MARLIN),
    Experiment("bf16-2", "bf16", 2, 240, TRITON),
    Experiment("wrapper-2", "mixed", 2, 240, MARLIN | {"language_model_only": True}, wrapper=True),
    Experiment("full-2", "full-shapes", 2, 520, MARLIN),
    Experiment(
        "full-2-ungated",
        "full-shapes",
        2,
        240,
        MARLIN | {"enforce_eager": True},
        load_only=True,
        without="0007-modules-of-this-stage-only.patch",
    ),
)
BY_NAME = {experiment.name: experiment for experiment in EXPERIMENTS}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an experiment runs. site: folder with the patched vllm and flashnext. work: checkpoints and caches."""

    site: pathlib.Path
    work: pathlib.Path
    out: pathlib.Path

    def checkpoint(self, experiment: Experiment) -> pathlib.Path:
        return self.work / "checkpoints" / (experiment.variant + ("-wrapper" if experiment.wrapper else ""))


def make_checkpoint(experiment: Experiment, place: Place) -> subprocess.Popen:
    """Start making the checkpoint; `check_digest` afterwards."""
    command = [sys.executable, "-m", "tests.support.checkpoints", experiment.variant, str(place.checkpoint(experiment))]
    env = os.environ | {"PYTHONPATH": f"{place.site}{os.pathsep}{REPOSITORY}", "OMP_NUM_THREADS": "4"}
    return subprocess.Popen(
        command + (["--wrapper"] if experiment.wrapper else []),
        cwd=REPOSITORY,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def check_digest(experiment: Experiment, printed: str) -> str | None:
    """None if the checkpoint that was just made is the one that the reference was taken on, else what differs."""
    if experiment.dummy or experiment.wrapper:
        return None
    wanted = json.loads((REFERENCES / f"{experiment.variant}.json").read_text())["digest"]
    return (
        None
        if f"sha256 {wanted}" in printed
        else f"{experiment.variant}: wanted sha256 {wanted}, made: {printed.strip()}"
    )


def tree_without(site: pathlib.Path, patch: str, target: pathlib.Path) -> None:
    """A copy of site/vllm (hard links) in `target` with one patch of the series taken back."""
    sys.path.insert(0, str(REPOSITORY / "patches"))
    import apply as series

    subprocess.run(["cp", "-al", str(site / "vllm"), str(target / "vllm")], check=True)
    file = next(REPOSITORY.glob(f"patches/vllm-*/{patch}"))
    for diff in series.parse_patch(patch, file.read_bytes()).files:
        path = target / diff.path
        data = series.apply_diff(patch, diff.reversed(), path.read_bytes())
        path.unlink()
        path.write_bytes(data)


def environment(experiment: Experiment, place: Place, cards: str) -> dict[str, str]:
    path = [str(place.site)]
    if experiment.dummy:
        path.append(str(REPOSITORY / "tests" / "support" / "tame_dummy"))
    if experiment.without:
        target = place.work / f"without-{experiment.name}"
        if not target.exists():
            target.mkdir(parents=True)
            tree_without(place.site, experiment.without, target)
        path.insert(0, str(target))
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONSAFEPATH": "1",  # this folder's module names are nobody else's business
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": cards,
        "HF_HUB_OFFLINE": "1",
        "HUMMING_CACHE_DIR": str(place.work / "cache" / "humming"),
        "TRITON_CACHE_DIR": str(place.work / "cache" / "triton"),
        "VLLM_CACHE_ROOT": str(place.work / "cache" / "vllm"),
        "VLLM_DISABLED_KERNELS": NEWER_CARDS_ONLY,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": "64",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }


def run(experiment: Experiment, place: Place, cards: str, limit_s: float | None = None) -> dict:
    """Boot, answer, judge. Never raises for what the engine does: `faults` says it (empty: passed)."""
    place.out.mkdir(parents=True, exist_ok=True)
    log, answers = place.out / f"{experiment.name}.log", place.work / f"{experiment.name}.answers.json"
    answers.unlink(missing_ok=True)
    reference = REFERENCES / f"{experiment.variant}.json"
    command = [
        sys.executable,
        str(HERE / "engine.py"),
        *("--model", str(place.checkpoint(experiment)), "--out", str(answers), "--stages", str(experiment.stages)),
        *("--arguments", json.dumps(experiment.arguments)),
        *(["--dummy"] if experiment.dummy else ["--reference", str(reference)]),
    ]
    limit = min(experiment.limit_s, limit_s or experiment.limit_s)
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as sink:
        process = subprocess.Popen(
            command,
            cwd=place.work,
            env=environment(experiment, place, cards),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ended = "in time"
        while process.poll() is None:
            if time.monotonic() - start > limit:
                ended = f"killed at its limit of {limit:.0f} s"
            elif experiment.load_only and len(LOADED.findall(log.read_text(errors="replace"))) >= experiment.stages:
                ended = "stopped after loading"
            if ended != "in time":
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                break
            time.sleep(1)
        # Workers of a dead engine would hold the cards.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    text = log.read_text(errors="replace")
    result: dict = {"name": experiment.name, "wall_s": round(time.monotonic() - start, 1), "ended": ended}
    result["weights_gib"] = [float(gib) for _, gib in sorted(LOADED.findall(text))]
    result["kernels"] = sorted({a or b for a, b in KERNELS.findall(text)})
    faults = []
    if experiment.load_only:
        if len(result["weights_gib"]) < experiment.stages:
            faults.append("not every stage reported the size of its weights")
    elif not answers.exists():
        faults.append(f"no answers: {ended}, exit status {process.returncode}")
        result["tail"] = text.splitlines()[-40:]
    else:
        got = json.loads(answers.read_text())
        result["boot_s"] = round(got["boot_s"], 1)
        if experiment.dummy:
            result["lengths"] = got["lengths"]
            if any(length != 16 for length in got["lengths"]):
                faults.append(f"requests ended early: {got['lengths']}")
        else:
            judged = compare.judge_all(json.loads(reference.read_text()), got)
            result["modes"], faults, result["known"] = judged["modes"], judged["faults"], judged["known"]
            result["answers_s"] = round(got["answers_s"], 1)
    result["faults"] = faults
    return result


def summary(result: dict) -> str:
    """A few lines for the terminal."""
    state = "PASS" if not result["faults"] else "FAIL"
    lines = [f"{state} {result['name']}: {result['wall_s']} s, {result['ended']}, boot {result.get('boot_s')} s"]
    if result["weights_gib"]:
        lines.append(f"  weights by stage, GiB: {result['weights_gib']}; kernels: {', '.join(result['kernels'])}")
    for mode, prompts in result.get("modes", {}).items():
        rows = [
            f"{name} {p['mean']:.4f}/{p['most']:.3f}" + (f" {p['flips']}x" if p["flips"] else "")
            for name, p in prompts.items()
        ]
        lines.append(f"  {mode} (mean/most): " + "; ".join(rows))
        given = [p["prompt_mean"] for p in prompts.values() if "prompt_mean" in p]
        if given:
            lines.append(
                f"    prompts: mean {max(given):.4f}, most {max(p.get('prompt_most', 0) for p in prompts.values()):.3f}"
            )
    lines += [f"  fault: {fault}" for fault in result["faults"][:12]]
    lines += [f"  known: {fault}" for fault in result.get("known", [])[:3]]
    lines += [f"  | {line}" for line in result.get("tail", [])[-15:]]
    return "\n".join(lines)
