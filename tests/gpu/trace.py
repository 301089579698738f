"""Where the time of a step goes: one engine of the published widths and few layers, dummy weights, one card.

    python3 -m tests.gpu.trace NAME --site DIR --work DIR --out FILE [--layers N] [--context N]

NAME is one of the experiments with full shapes (tests/gpu/experiments.py): its checkpoint, which is made if WORK has none yet, its
arguments and its environment. For four steps in the middle of a prefill and for 32 decoding steps, three times each (plainly timed,
under cProfile, under torch.profiler), one JSON document: milliseconds a step, time in which the card had work (the union over its
streams, and each stream by itself), launches, calls that wait for the card, the largest kernels, and the largest Python functions.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pathlib
import pstats
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
STEPS, DECODES, LARGEST = 4, 32, 30


def smaller(model: pathlib.Path, layers: int) -> pathlib.Path:
    """A copy of the checkpoint's small files with its first `layers` layers only."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="trace-"))
    for file in model.iterdir():
        if file.suffix != "" and file.is_file():  # not the table
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text["num_hidden_layers"], text["layer_types"] = layers, text["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def union_ms(spans: list[tuple[float, float]]) -> float:
    """Length of the union of [start, end) in microseconds, as milliseconds."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e3


def read_trace(events: list[dict], steps: int) -> dict:
    """What a Chrome trace of torch.profiler says about `steps` steps; times in ms a step."""
    streams: dict[str, list] = {}
    kernels: dict[str, list] = {}
    calls: dict[str, list] = {}
    for event in events:
        kind, start, length = event.get("cat"), event.get("ts"), event.get("dur")
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            streams.setdefault(str(event["args"].get("stream")), []).append((start, start + length))
            kernels.setdefault(event["name"][:90], []).append(length)
        elif kind in ("cuda_runtime", "cuda_driver"):
            calls.setdefault(event["name"], []).append(length)

    def largest(found: dict[str, list]) -> list:
        rows = [[name, len(each) / steps, round(sum(each) / steps / 1e3, 4)] for name, each in found.items()]
        return sorted(rows, key=lambda row: -row[2])[:LARGEST]

    return {
        "card_busy_ms": round(union_ms([span for spans in streams.values() for span in spans]) / steps, 3),
        "streams_busy_ms": {name: round(union_ms(spans) / steps, 3) for name, spans in streams.items()},
        "launches": sum(len(each) for name, each in calls.items() if "Launch" in name) / steps,
        "waits": {name: len(each) / steps for name, each in calls.items() if "Synchronize" in name},
        "kernels": largest(kernels),
        "calls": largest(calls),
    }


def python_functions(profile: cProfile.Profile, steps: int) -> list[str]:
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(LARGEST)
    lines = [line for line in text.getvalue().splitlines() if line.strip()]
    return [f"{steps} steps", *(line[-150:] for line in lines[-LARGEST - 1 :])]


def main() -> int:
    """Make the checkpoint and begin a process that has the experiment's environment; `traced_engine` is its part."""
    from . import experiments, run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[e.name for e in experiments.EXPERIMENTS if e.dummy and e.stages == 1])
    parser.add_argument("--site", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=16_384)
    opt = parser.parse_args()
    experiment = experiments.BY_NAME[opt.name]
    place = experiments.Place(opt.site.resolve(), opt.work.resolve(), opt.work.resolve() / "logs")
    model = place.checkpoint(experiment)
    if not model.exists() and run.make_all([experiment], place):
        return 1
    taken = {
        "model": str(model),
        "layers": opt.layers,
        "context": opt.context,
        "arguments": json.dumps(experiments.arguments_of(experiment, place)),
        "out": str(opt.out.resolve()),
    }
    # The engine's steps in that process, and no other.
    env = experiments.environment(experiment, place, "0") | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, str(HERE / "trace.py"), json.dumps(taken)]
    return subprocess.run(command, cwd=place.work, env=env).returncode


def traced_engine(opt: argparse.Namespace) -> int:
    sys.path.insert(0, str(HERE))
    import engine
    import torch
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    taken = argparse.Namespace(
        model=str(smaller(pathlib.Path(opt.model), opt.layers)),
        stages=1,
        dummy=True,
        contexts=[],
        arguments=opt.arguments,
    )
    llm = LLM(**engine.arguments(taken))
    core = llm.llm_engine
    result: dict = {"layers": opt.layers, "context": opt.context, "arguments": json.loads(opt.arguments)}

    def ask(name: str, length: int, tokens: int) -> None:
        prompt = TokensPrompt(prompt_token_ids=engine.tokens_of(length, 2000))
        core.add_request(
            name, prompt, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        )

    def step(count: int) -> float:
        torch.cuda.synchronize()
        begun = time.monotonic()
        for _ in range(count):
            core.step()
        torch.cuda.synchronize()
        return round((time.monotonic() - begun) * 1e3 / count, 3)

    def traced(count: int) -> dict:
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profiler:
            wall = step(count)
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profiler.export_chrome_trace(file.name)
            events = json.loads(pathlib.Path(file.name).read_text())["traceEvents"]
        return {"wall_ms": wall} | read_trace(events, count)

    def looked_at(plain: int, count: int) -> dict:
        """`plain` steps timed, then `count` under each profiler."""
        found: dict = {"plain_ms": step(plain)}
        profile = cProfile.Profile()
        profile.enable()
        found["profiled_ms"] = step(count)
        profile.disable()
        return found | {"python": python_functions(profile, count)} | traced(count)

    ask("warm", 3_000, 8)
    while core.has_unfinished_requests():
        core.step()
    ask("one", opt.context, 4 * DECODES)
    step(opt.context // 512 - 3 * STEPS - 2)
    result["prefill"] = looked_at(STEPS, STEPS)
    step(8)
    result["decode"] = looked_at(DECODES, DECODES // 2)
    pathlib.Path(opt.out).write_text(json.dumps(result, indent=1))
    for phase in ("prefill", "decode"):
        found = result[phase]
        told = {
            name: found[name]
            for name in ("plain_ms", "profiled_ms", "wall_ms", "card_busy_ms", "streams_busy_ms", "launches", "waits")
        }
        print(phase, json.dumps(told), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main() if __package__ else traced_engine(argparse.Namespace(**json.loads(sys.argv[1]))))
