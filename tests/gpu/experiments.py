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
POOL = re.compile(r"K/V pool of [^\n]+")
CAPACITY = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
RATES = re.compile(r"^RATES (\{.*\})$", re.MULTILINE)
STREAMS = re.compile(r"step_trace (\d+) apply .*streams=main (\w+) current (\w+)")
KERNELS = re.compile(r"Using (\w+) for CompressedTensorsWNA16|Using '(\w+)' WNA16 MoE backend")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """variant: of tests/support/checkpoints.py. stages: pipeline stages, one card each.

    without: file name of a patch that is taken out of the tree for this run. load_only: stop once every stage has reported
    the size of its weights. limit_s: wall clock, boot included.
    lengths: prompts of so many tokens, whose answers are a reference for others. contexts: rates at these, with dummy weights.
    against: the experiment whose answers or rates, of the same run, this one is judged by: answers have to be there before,
    rates are judged by `hold_rates` at the end. rounds: how often all prompts are asked again four at a time. boots: how often the engine is started and stopped, one after another.
    trace: with tests/support/step_trace, whose lines are in the experiment's log. flat_table: the table is the checkpoint's prepared file.
    """

    name: str
    variant: str
    stages: int
    limit_s: int
    arguments: dict = dataclasses.field(default_factory=dict)
    wrapper: bool = False
    load_only: bool = False
    without: str | None = None
    lengths: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    against: str | None = None
    rounds: int = 0
    boots: int = 1
    trace: bool = False
    flat_table: bool = False

    @property
    def host_kv(self) -> bool:
        return "host_kv" in self.arguments.get("additional_config", {}).get("flashnext", {})

    @property
    def dummy(self) -> bool:
        return self.variant.startswith("full-")


MARLIN, TRITON = {"moe_backend": "marlin"}, {"moe_backend": "triton"}
TABLE_ON_DISK = {"additional_config": {"flashnext": {"table": {"backing": "checkpoint"}}}}


def host_kv(max_bytes: int, arena_bytes: int, hot_rows: bool = False, **arguments) -> dict:
    setting = {"max_bytes": max_bytes, "arena_bytes": arena_bytes, "hot_rows": hot_rows}
    return arguments | {"additional_config": {"flashnext": {"host_kv": setting}}}


# Blocks of 6,080 tokens on one stage and 12,160 on two: 74 of them, 1.7 or 3.4 GiB of host memory; the arena takes 8 or 4.
TINY_HOST = host_kv(8 << 30, 4 * 12_160 * 2_048, kv_cache_memory_bytes=60_000_000)
TINY_HOT = host_kv(8 << 30, 4 * 12_160 * 2_048, hot_rows=True, kv_cache_memory_bytes=60_000_000)
LONG = {"max_model_len": 24_576}
LENGTHS = (1, 2, 3, 511, 512, 513, 2_050, 2_051, 4_097, 6_079, 6_080, 6_081, 12_161, 13_000, 20_000)
FAR = {"max_model_len": 262_144, "max_num_seqs": 4}
CONTEXTS = (4_096, 32_768, 131_072, 253_952)
FAR_BYTES = 600_000_000
"""With all 36 linear-attention layers on one stage a request takes 38 blocks of 3.2 MB and those of its context: 470 MB are three requests."""
PIECEWISE = {"compilation_config": {"mode": 0, "cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4]}}
NEAR = {"kv_cache_memory_bytes": 4_000_000_000}

EXPERIMENTS = (
    Experiment("mixed-1", "mixed", 1, 420, MARLIN),
    Experiment("bf16-1", "bf16", 1, 420, TRITON),
    Experiment("mixed-2", "mixed", 2, 300, MARLIN),
    Experiment("mixed-2-disk", "mixed", 2, 240, MARLIN | TABLE_ON_DISK),
    # Its first token decoded after each prefill was wrong (docs/gpu.md): without graphs, without run-ahead, without stages.
    Experiment("mixed-1-disk-eager", "mixed", 1, 240, MARLIN | TABLE_ON_DISK | {"enforce_eager": True}),
    Experiment("mixed-1-disk", "mixed", 1, 240, MARLIN | TABLE_ON_DISK),
    Experiment("mixed-2-disk-eager", "mixed", 2, 240, MARLIN | TABLE_ON_DISK | {"enforce_eager": True}),
    Experiment("mixed-2-disk-trace", "mixed", 2, 240, MARLIN | TABLE_ON_DISK, trace=True),
    Experiment("mixed-2-trace", "mixed", 2, 240, MARLIN, trace=True),  # the same lines where the answers are right
    Experiment("mixed-2-disk-sync", "mixed", 2, 240, MARLIN | TABLE_ON_DISK | {"async_scheduling": False}),
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
    # K/V in host memory: against transformers, then against K/V on the card with prompts of one to 20,000 tokens.
    Experiment("bf16-1-host", "bf16", 1, 300, TRITON | TINY_HOST),
    Experiment("bf16-1-host-again", "bf16", 1, 560, TRITON | TINY_HOST, boots=5),
    Experiment("bf16-2-host", "bf16", 2, 300, TRITON | TINY_HOST),
    Experiment("mixed-2-host", "mixed", 2, 300, MARLIN | TINY_HOST),
    Experiment("bf16-1-long", "bf16", 1, 420, TRITON | LONG, lengths=LENGTHS),
    Experiment("bf16-1-long-host", "bf16", 1, 540, TRITON | LONG | TINY_HOST, against="bf16-1-long", rounds=14),
    Experiment("bf16-2-long-host", "bf16", 2, 540, TRITON | LONG | TINY_HOST, against="bf16-1-long", rounds=14),
    # Decoding rows keep on the card what the step before selected.
    Experiment("mixed-2-hot", "mixed", 2, 300, MARLIN | TINY_HOT),
    Experiment("bf16-1-hot", "bf16", 1, 300, TRITON | TINY_HOT),
    Experiment("bf16-1-long-hot", "bf16", 1, 540, TRITON | LONG | TINY_HOT, against="bf16-1-long", rounds=14),
    # The bars of compare.BARS, full shapes on one card of 139 GiB.
    Experiment(
        "full-1-rates",
        "full-shapes",
        1,
        560,
        MARLIN | FAR | {"kv_cache_memory_bytes": 30_000_000_000},
        contexts=CONTEXTS,
    ),
    Experiment(
        "full-1-rates-host",
        "full-shapes",
        1,
        560,
        MARLIN | FAR | host_kv(24 << 30, 12 * 4_064 * 2_048, kv_cache_memory_bytes=FAR_BYTES),
        contexts=CONTEXTS,
        against="full-1-rates",
    ),
    Experiment(
        "full-1-rates-hot",
        "full-shapes",
        1,
        560,
        MARLIN | FAR | host_kv(24 << 30, 12 * 4_064 * 2_048, hot_rows=True, kv_cache_memory_bytes=FAR_BYTES),
        contexts=(4_096, 131_072),
        against="full-1-rates",
    ),
    # A table of 5.1 GB: rows from a file in the page cache, before the forward pass or between pieces of it; upstream's pinned memory.
    Experiment("full-1-table", "full-table", 1, 300, MARLIN | NEAR, contexts=(4_096,), flat_table=True),
    Experiment(
        "full-1-table-piecewise", "full-table", 1, 300, MARLIN | NEAR | PIECEWISE, contexts=(4_096,), flat_table=True
    ),
    Experiment("full-1-table-pinned", "full-table", 1, 300, MARLIN | NEAR, contexts=(4_096,)),
)
BY_NAME = {experiment.name: experiment for experiment in EXPERIMENTS}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an experiment runs. site: folder with the patched vllm and flashnext. work: checkpoints and caches. one_card: its
    stages share a card (tests/support/one_card). at_once: so many experiments share a card."""

    site: pathlib.Path
    work: pathlib.Path
    out: pathlib.Path
    one_card: bool = False
    at_once: int = 1

    def cards(self, experiment: Experiment) -> int:
        return 1 if self.one_card else experiment.stages

    def checkpoint(self, experiment: Experiment) -> pathlib.Path:
        return self.work / "checkpoints" / (experiment.variant + ("-wrapper" if experiment.wrapper else ""))


def arguments_of(experiment: Experiment, place: Place) -> dict:
    more: dict = {}
    if experiment.flat_table:
        file = place.checkpoint(experiment) / "table"  # tests/support/checkpoints.TABLE_FILE
        more["additional_config"] = {"flashnext": {"table": {"path": str(file)}}}
    engines = place.at_once * experiment.stages // place.cards(experiment)
    if engines > 1:
        more["gpu_memory_utilization"] = int(90 / engines) / 100
    return experiment.arguments | more


def reference_of(experiment: Experiment, place: Place) -> pathlib.Path:
    """What the experiment's answers are held to."""
    if experiment.against:
        return place.work / f"{experiment.against}.answers.json"
    return REFERENCES / f"{experiment.variant}.json"


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
    if place.cards(experiment) < experiment.stages:
        path.append(str(REPOSITORY / "tests" / "support" / "one_card"))
    if experiment.trace:
        path.append(str(REPOSITORY / "tests" / "support" / "step_trace"))
    if experiment.without:
        target = place.work / f"without-{experiment.name}"
        if not target.exists():
            target.mkdir(parents=True)
            tree_without(place.site, experiment.without, target)
        path.insert(0, str(target))
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        # As entrypoint/settings.py has it: without, the indexer's growing buffers leave a gigabyte unused by 131,072 tokens.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
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


def stray_waits(log: str) -> list[str]:
    """What tests/support/step_trace says of steps that waited for their tokens on another stream than their own."""
    steps = STREAMS.findall(log)
    stray = [step for step, waiting, running in steps if waiting != running]
    if not steps:
        return ["no step was traced"]
    return [f"{len(stray)} of {len(steps)} steps wait on another stream, step {stray[0]} first"] if stray else []


LEAST_LEAK_BYTES = 1 << 30
"""Host memory that boots after the first may cost without being called a leak: less than any pool here, more than noise."""


def available_bytes() -> int:
    text = pathlib.Path("/proc/meminfo").read_text()
    return int(re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024


def watch(experiment: Experiment, place: Place, cards: str, command: list[str], log: pathlib.Path, limit_s: float):
    """Run the engine to its end or its limit, its output behind that in `log`: (how it ended, exit status)."""
    start = time.monotonic()
    with log.open("a", encoding="utf-8") as sink:
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
            if time.monotonic() - start > limit_s:
                ended = f"killed at its limit of {limit_s:.0f} s"
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
    return ended, process.returncode


def run(experiment: Experiment, place: Place, cards: str, limit_s: float | None = None) -> dict:
    """Boot, answer, judge. Never raises for what the engine does: `faults` says it (empty: passed)."""
    place.out.mkdir(parents=True, exist_ok=True)
    log, answers = place.out / f"{experiment.name}.log", place.work / f"{experiment.name}.answers.json"
    answers.unlink(missing_ok=True)
    reference = reference_of(experiment, place)
    if experiment.against and not experiment.contexts and not reference.exists():
        fault = f"{experiment.against} has left no answers to be held to: run it before, with the same work folder"
        return {
            "name": experiment.name,
            "wall_s": 0.0,
            "ended": "not begun",
            "weights_gib": [],
            "kernels": [],
            "faults": [fault],
        }
    command = [
        sys.executable,
        str(HERE / "engine.py"),
        *("--model", str(place.checkpoint(experiment)), "--out", str(answers), "--stages", str(experiment.stages)),
        *("--arguments", json.dumps(arguments_of(experiment, place))),
        *(["--dummy"] if experiment.dummy else [] if experiment.lengths else ["--reference", str(reference)]),
        *(["--lengths", ",".join(map(str, experiment.lengths))] if experiment.lengths else []),
        *(["--contexts", ",".join(map(str, experiment.contexts))] if experiment.contexts else []),
        *("--rounds", str(experiment.rounds)),
    ]
    limit = min(experiment.limit_s, limit_s or experiment.limit_s)
    start = time.monotonic()
    log.unlink(missing_ok=True)
    available = []
    for _ in range(experiment.boots):
        ended, status = watch(experiment, place, cards, command, log, limit - (time.monotonic() - start))
        available.append(available_bytes())
        if ended != "in time" or status != 0:
            break
    text = log.read_text(errors="replace")
    result: dict = {"name": experiment.name, "wall_s": round(time.monotonic() - start, 1), "ended": ended}
    if experiment.boots > 1:
        result["available_bytes"] = available
    result["weights_gib"] = [float(gib) for _, gib in sorted(LOADED.findall(text))]
    result["kernels"] = sorted({a or b for a, b in KERNELS.findall(text)})
    faults = []
    if experiment.load_only:
        if len(result["weights_gib"]) < experiment.stages:
            faults.append("not every stage reported the size of its weights")
    elif not answers.exists():
        faults.append(f"no answers: {ended}, exit status {status}")
        result["tail"] = text.splitlines()[-40:]
        if rates := RATES.findall(text):  # what was measured before it ended
            result["rates"] = [json.loads(row) for row in rates]
    else:
        got = json.loads(answers.read_text())
        result["boot_s"] = round(got["boot_s"], 1)
        result["pool"] = POOL.findall(text)
        result["capacity"] = CAPACITY.findall(text)
        if experiment.trace:
            faults += stray_waits(text)
        if experiment.host_kv and len(result["pool"]) != experiment.stages * experiment.boots:
            faults.append(f"{len(result['pool'])} times a stage said that it allocated a K/V pool in host memory")
        if available[0] - available[-1] > LEAST_LEAK_BYTES:
            faults.append(f"host memory available after each boot: {available}")
        if experiment.contexts:
            result["rates"] = got["rates"]
        elif experiment.dummy:
            result["lengths"] = got["lengths"]
            if any(length != 16 for length in got["lengths"]):
                faults.append(f"requests ended early: {got['lengths']}")
        elif experiment.lengths:
            # The noise is of one engine that computes in BF16 against one that does not; here both do, each in its own way.
            noise = json.loads((REFERENCES / f"{experiment.variant}.json").read_text())["noise"]
            both = {name: noise[name] * 2**0.5 for name in ("mean", "max")}
            answers.write_text(json.dumps(got | {"noise": both}))
            result["made"] = [prompt["name"] for prompt in got["prompts"]]
        else:
            judged = compare.judge_all(json.loads(reference.read_text()), got)
            result["modes"], faults, result["known"] = judged["modes"], judged["faults"], judged["known"]
            result["answers_s"] = round(got["answers_s"], 1)
    result["faults"] = faults
    return result


def hold_rates(results: list[dict], work: pathlib.Path) -> list[str]:
    """Add to the faults of each experiment of rates what it fell short of, and return all that was added.

    One that is held to another may run beside it, each on a card of its own, so this comes when all have ended; or the other
    has run before on the same machine and left its rates in `work`.
    """
    whole = (result for result in results if "rates" in result and "tail" not in result)  # with a tail it was cut short
    rates = {result["name"]: result["rates"] for result in whole}
    for against in {BY_NAME[name].against for name in rates} - {None, *rates}:
        if (answers := work / f"{against}.answers.json").exists():
            rates[against] = json.loads(answers.read_text())["rates"]
    added = []
    for result in results:
        against = BY_NAME[result["name"]].against
        if result["name"] not in rates or against is None:
            continue
        if against in rates:
            faults = compare.judge_rates(rates[result["name"]], rates[against])
        else:
            faults = [f"{against} has left no rates to be held to: run it before, with the same work folder"]
        result["faults"] += faults
        added += [f"{result['name']}: {fault}" for fault in faults]
    return added


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
    for row in result.get("rates", []):
        lines.append(
            f"  {row['streams']} x {row['context']} tokens: prefill {row['prefill_tokens_per_s']:.0f}/s, decode {row['decode_tokens_per_s']:.1f}/s, "
            f"cards {row['cards_mib']} MiB"
        )
    lines += [f"  {line}" for line in result.get("pool", [])[:4]]
    lines += [f"  K/V for {tokens} tokens" for tokens in result.get("capacity", [])[:1]]
    if "available_bytes" in result:
        lines.append(f"  host memory available after each boot: {result['available_bytes']}")
    lines += [f"  fault: {fault}" for fault in result["faults"][:12]]
    lines += [f"  known: {fault}" for fault in result.get("known", [])[:3]]
    lines += [f"  | {line}" for line in result.get("tail", [])[-15:]]
    return "\n".join(lines)
