"""The health probe against a real vLLM 0.30.0 on a CPU: healthy, refused, busy, hung, dead.

One server for all but the last test, with one sequence at a time and 8 tokens a step, so that a tiny model is as busy
as a large one. The test that ends the server comes last of those that share it.
"""

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from healthcheck import records
from tests.support.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
KEY = "a-key-of-the-test"
BOOT_LIMIT_S = 400
MAX_MODEL_LEN = 4096


@dataclass
class Vllm:
    process: subprocess.Popen
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, body: dict) -> http.client.HTTPConnection:
        """Send a completion request and leave its answer unread; closing the connection makes vLLM drop the request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        connection.request(
            "POST", "/v1/completions", json.dumps({"model": "tiny", "ignore_eos": True, **body}), headers
        )
        return connection

    def metrics(self) -> dict[str, float]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            return records.parse_metrics(connection.getresponse().read())

    def wait_for(self, running: int, waiting: int) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            metrics = self.metrics()
            if (metrics[records.RUNNING], metrics[records.WAITING]) == (running, waiting):
                return
            time.sleep(0.1)
        raise AssertionError(f"not {running} running and {waiting} waiting, but {metrics}")

    def engine_core(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if "EngineCor" in " ".join([child.name(), *child.cmdline()]))


@contextlib.contextmanager
def serving(python: str, model: Path, folder: Path, *flags: str, **environment: str):
    """`vllm serve` until its /health answers; ended with all its children."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON", "FLASHNEXT_"))}
    env = kept | {
        "VLLM_API_KEY": KEY,
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **environment,
    }
    port = free_port()
    argv = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "tiny"]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "1"]
    argv += ["--max-num-batched-tokens", "8", "--block-size", "32", "--no-enable-prefix-caching", *flags]
    log = folder / "vllm.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(argv, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)
    try:
        end = time.monotonic() + BOOT_LIMIT_S
        while True:
            assert process.poll() is None, f"vllm serve ended with {process.returncode}\n{log.read_text()[-6000:]}"
            assert time.monotonic() < end, f"vllm serve took more than {BOOT_LIMIT_S} s\n{log.read_text()[-6000:]}"
            with (
                contextlib.suppress(OSError),
                contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection,
            ):
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    break
            time.sleep(0.5)
        yield Vllm(process, port, log)
    finally:
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(process.pid)
            family = [*parent.children(recursive=True), parent]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait(30)


@pytest.fixture(scope="module")
def model(engine_python, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run([engine_python, "-m", "entrypoint.demo", str(out)], cwd=REPOSITORY, check=True, timeout=120)
    return out


@pytest.fixture(scope="module")
def vllm(engine_python, model, tmp_path_factory):
    with serving(engine_python, model, tmp_path_factory.mktemp("vllm"), TORCH_COMPILE_DISABLE="1") as server:
        yield server


@pytest.fixture
def health(vllm, tmp_path):
    return command(vllm, tmp_path)


def command(vllm: Vllm, folder: Path):
    """Run the probe as Docker does, as a process of its own; returns (exit code, its record)."""
    (folder / "key").write_text(KEY + "\n")
    (folder / "state").mkdir()

    def run(*argv, key=True) -> tuple[int, dict]:
        where = ["--url", vllm.url, "--state-dir", str(folder / "state"), "--json"]
        where += ["--api-key-file", str(folder / "key")] if key else []
        argv = [sys.executable, "-m", "healthcheck", *where, *argv]
        done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        assert done.stderr == ""
        return done.returncode, json.loads(done.stdout)

    return run


def test_healthy(vllm, health):
    code, first = health()
    assert (code, first["status"]) == (0, "healthy"), first
    assert first["detail"].startswith("one token from tiny in ")
    code, second = health()
    # The probe's own prompt and token are all that was asked of this server in between.
    assert second["marks"][records.GENERATION_TOKENS] == first["marks"][records.GENERATION_TOKENS] + 1
    assert first["tokens_total"] < second["tokens_total"] < first["tokens_total"] + 100


def test_refused_without_the_key(health):
    code, record = health(key=False)
    assert (code, record["status"]) == (1, "refused")
    assert record["detail"].startswith("/v1/models: HTTP 401, the server wants an API key")


def test_refused_for_a_model_that_is_not_served(health):
    code, record = health("--model", "another")
    assert (code, record["status"]) == (1, "refused")
    assert "The model `another` does not exist." in record["detail"]


def test_busy_while_a_long_generation_has_the_engine(vllm, health):
    hogs = [vllm.post({"prompt": "x", "max_tokens": 4000}) for _ in range(3)]
    try:
        vllm.wait_for(running=1, waiting=2)
        code, record = health("--timeout", "4")
        assert (code, record["status"]) == (0, "busy"), record
        assert record["detail"].startswith("the engine works: no token in ")
        # What we gave up on must not stay behind in the queue.
        vllm.wait_for(running=1, waiting=2)
    finally:
        for hog in hogs:
            hog.close()
    vllm.wait_for(running=0, waiting=0)
    assert health()[1]["status"] == "healthy"


def test_busy_through_a_chunked_prefill_in_which_no_token_counter_moves(vllm, health):
    before = vllm.metrics()
    tokens = (records.PROMPT_TOKENS, records.GENERATION_TOKENS, "vllm:iteration_tokens_total_sum")
    long_prompt = vllm.post({"prompt": [5] * (MAX_MODEL_LEN - 10), "max_tokens": 1})
    with contextlib.closing(long_prompt):
        vllm.wait_for(running=1, waiting=0)
        code, record = health("--timeout", "2")
        samples = [vllm.metrics()]
        assert samples[0][records.RUNNING] == 1, "the prefill was over too soon to be probed"
        assert (code, record["status"]) == (0, "busy"), record
        assert record["detail"].startswith("the engine works: no token in ")
        while samples[-1][records.RUNNING] == 1:
            time.sleep(0.1)
            samples.append(vllm.metrics())
        answer = json.loads(long_prompt.getresponse().read())
    assert answer["usage"]["prompt_tokens"] == MAX_MODEL_LEN - 10
    during = [sample for sample in samples if sample[records.GENERATION_TOKENS] == before[records.GENERATION_TOKENS]]
    assert len(during) >= 3
    assert {tuple(sample[name] for name in tokens) for sample in during} == {tuple(before[name] for name in tokens)}
    usage = [sample["vllm:kv_cache_usage_perc"] for sample in during if sample[records.RUNNING] == 1]
    assert usage == sorted(usage)
    assert len(set(usage)) >= 3


def test_hung_when_the_engine_stands_still_and_healthy_when_it_goes_on(vllm, health):
    assert health()[1]["status"] == "healthy"
    core = vllm.engine_core()
    core.send_signal(signal.SIGSTOP)
    try:
        seen = []
        while not seen or seen[-1][1]["status"] == "busy":
            seen.append(health("--timeout", "2", "--stall", "6"))
            assert len(seen) < 20
        assert [code for code, _ in seen] == [0] * (len(seen) - 1) + [1]
        assert len(seen) >= 2, "busy at first: the limit has not been reached"
        record = seen[-1][1]
        assert record["status"] == "hung"
        assert record["checked_s"] - record["no_progress_since_s"] >= 6
        # What Docker's usual check would have said meanwhile.
        connection = http.client.HTTPConnection("127.0.0.1", vllm.port, timeout=10)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        core.send_signal(signal.SIGCONT)
    vllm.wait_for(running=0, waiting=0)
    code, record = health()
    assert (code, record["status"], record["no_progress_since_s"]) == (0, "healthy", None)


def test_dead_when_the_engine_is_killed(vllm, health):
    assert health()[1]["status"] == "healthy"
    vllm.engine_core().kill()
    for _ in range(3):
        code, record = health()
        assert (code, record["status"]) == (1, "dead"), record
        time.sleep(0.5)
    vllm.process.wait(30)  # with 0, as if someone had asked it to stop: its exit status tells nothing
    assert "no connection" in health()[1]["detail"]


@pytest.mark.slow
def test_dead_at_the_first_token_where_torch_has_no_compiler(engine_python, model, tmp_path):
    """It boots, /health says 200, and the first token that is sampled ends the engine: why a token is asked for at all.

    A greedy token does not reach the code that fails, so a probe at temperature 0 would say healthy here.
    """
    bare, folder = tmp_path / "bin", tmp_path / "vllm"
    bare.mkdir()
    folder.mkdir()
    (bare / "lscpu").symlink_to(shutil.which("lscpu"))  # vLLM's CPU worker does not start without it
    environment = {"PATH": str(bare), "CXX": str(bare / "c++"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    with serving(engine_python, model, folder, "--enforce-eager", **environment) as server:
        greedy = server.post({"prompt": "x", "max_tokens": 1, "temperature": 0})
        with contextlib.closing(greedy):
            assert greedy.getresponse().status == 200
        code, record = command(server, tmp_path)("--timeout", "60")
        assert (code, record["status"]) == (1, "dead"), record
        assert "InvalidCxxCompiler" in server.log.read_text()
