"""A table that fails under a running engine: the requests end with an error, the log has one line of ours; never zeros.

A real vLLM on the CPU, its engine core a process of its own as in `vllm serve`, with a tiny model and a worker
(tests/support/table_worker.py) that brings table rows before each step with the code that the model state calls on a card.
And the ways of loading weights that would read the table are refused.
"""

import json

import pytest

from entrypoint import demo
from entrypoint import table as kit
from tests.support.table_shards import write_table

ROWS, COLUMNS, HEADS = 20_000, 160, 16

SERVE = r"""
import asyncio, json, os, sys
from pathlib import Path
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

model, file, shape = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
args = AsyncEngineArgs(
    model=model, load_format="dummy", enforce_eager=True, max_model_len=512, max_num_seqs=4, block_size=32,
    max_num_batched_tokens=512, worker_cls="table_worker.TableWorker", distributed_executor_backend="uni",
    additional_config={"flashnext": {"table": {"path": file}}, "test_table": shape},
)


async def ask(engine, name, tokens):
    try:
        async for out in engine.generate(
            {"prompt_token_ids": [5] * 20}, SamplingParams(max_tokens=tokens, ignore_eos=True), name
        ):
            pass
        return len(out.outputs[0].token_ids)
    except Exception as error:
        return type(error).__name__


async def main():
    engine = AsyncLLM.from_engine_args(args)
    said = {"before": await asyncio.gather(ask(engine, "a", 8), ask(engine, "b", 8))}
    os.truncate(file, os.path.getsize(file) // 2)
    said["other half"] = await ask(engine, "c", 8)
    open(file + ".all", "w").close()
    said["after"] = await asyncio.gather(ask(engine, "d", 200), ask(engine, "e", 200))
    said["later"] = await ask(engine, "f", 8)
    engine.shutdown()
    return said


def loaded():
    # What the weight loader gets of each way of reading the checkpoint, and says to it.
    from flashnext import mapped_table
    from table_worker import PREFIX
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import weight_utils

    files = [str(path) for path in Path(model).with_name("model").glob("*.safetensors")]
    config = args.create_engine_config()
    ways = {
        "default": weight_utils.safetensors_weights_iterator(files, False),
        "eager": weight_utils.safetensors_weights_iterator(files, False, "eager"),
        "many threads": weight_utils.multi_thread_safetensors_weights_iterator(files, False, 2),
    }
    said = {}
    with set_current_vllm_config(config):
        for way, tensors in ways.items():
            taken = 0
            try:
                for name, tensor in tensors:
                    if "shard_" in name:
                        mapped_table._class().weight_loader(None, None, tensor)
                        taken += len(tensor)
                said[way] = taken
            except ValueError as error:
                said[way] = str(error)
        config.load_config.safetensors_load_strategy = "prefetch"
        try:
            mapped_table._open({"path": file}, config, PREFIX, *shape[:2], "BF16")
        except ValueError as error:
            said["prefetch"] = str(error)
    return said


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main()) | {"loaded": loaded()}))
"""


@pytest.fixture(scope="module")
def failed(run_patched, tmp_path_factory):
    base = tmp_path_factory.mktemp("failing")
    demo.make(base / "tiny")
    write_table(base / "model", rows=ROWS, columns=COLUMNS)
    kit.prepare(base / "model", base / "table")
    program = base / "serve.py"
    program.write_text(SERVE)
    environment = {
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    run = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    shape = json.dumps([ROWS, COLUMNS, HEADS])
    done = run_patched(run, str(program), str(base / "tiny"), str(base / "table"), shape, env=environment)
    return done.value, done.stdout + done.stderr, base / "table"


def test_requests_end_with_an_error(failed):
    said, _, _ = failed
    assert said["before"] == [8, 8]
    assert said["other half"] == 8, "what can be read is served"
    assert said["after"] == ["EngineDeadError", "EngineDeadError"]
    assert said["later"] == "EngineDeadError"


@pytest.mark.parametrize("way", ["eager", "many threads", "prefetch"])
def test_ways_of_loading_that_read_the_table_are_refused(failed, way):
    said = failed[0]["loaded"]
    assert said["default"] == ROWS, "by shape only, all of it"
    assert said[way].startswith("flashnext: ") and ". Fix: leave " in said[way] and "\n" not in said[way]
    assert ("prefetch reads every file" if way == "prefetch" else "has read the table") in said[way]


def test_log_has_one_line(failed):
    _, log, file = failed
    ours = [line for line in log.splitlines() if "flashnext: the N-gram table cannot be read" in line]
    assert len(ours) == 1, log[-6000:]
    assert "ERROR" in ours[0] and str(file) in ours[0] and "cut off at byte" in ours[0] and "Fix: " in ours[0]
