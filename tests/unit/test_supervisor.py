"""The supervisor around real processes: small programs that behave as an engine can, one per way to live and die."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys
from pathlib import Path
from entrypoint.boot import StateFile
from entrypoint.errors import Refusal
from entrypoint.supervisor import Supervisor
state = StateFile(Path(sys.argv[1]), "127.0.0.1", 8000)
try:
    sys.exit(Supervisor([sys.executable, "-uc", sys.argv[2]], {}, state, drain_s=float(sys.argv[3]), phase_limit_s=float(sys.argv[4]) or None).run())
except Refusal as e:
    e.print(); sys.exit(int(e.code))
"""
SERVING = "print('INFO:     Application startup complete.')\n"
WAIT = "import time\nwhile True: time.sleep(0.1)\n"
POLITE = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *a: sys.exit(0))\n"
DEAF = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def start(folder, program, drain=1.0, limit=0.0):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", RUN, str(folder), textwrap.dedent(program), str(drain), str(limit)]
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def state(folder):
    try:
        return json.loads((folder / "state.json").read_text())
    except (OSError, ValueError):
        return {}


def until(folder, phase, limit_s=20):
    end = time.monotonic() + limit_s
    while state(folder).get("phase") != phase:
        assert time.monotonic() < end, state(folder)
        time.sleep(0.05)


def ended(process, limit_s=20):
    out, err = process.communicate(timeout=limit_s)
    assert "Traceback" not in err
    return process.returncode, out, err


def test_death_before_serving_is_6_and_names_the_known_cause(tmp_path):
    code, out, err = ended(start(tmp_path, "print('torch.OutOfMemoryError: CUDA out of memory.'); raise SystemExit(1)"))
    assert code == 6 and "CUDA out of memory" in out
    assert "ERROR: the engine exited with code 1 while" in err and "a card ran out of memory" in err and "Fix: " in err
    assert (state(tmp_path)["phase"], state(tmp_path)["exit_code"]) == ("failed", 6)


def test_death_after_serving_is_7(tmp_path):
    code, _, err = ended(start(tmp_path, SERVING + "import time; time.sleep(0.5); raise SystemExit(3)"))
    assert code == 7 and "exited with code 3" in err


def test_killed_engine_is_told_by_its_signal(tmp_path):
    process = start(tmp_path, SERVING + "import os, time; time.sleep(0.5); os.kill(os.getpid(), 9)")
    code, _, err = ended(process)
    assert code == 7 and "SIGKILL" in err and "memory" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_forwarded_and_ends_with_0(tmp_path, number):
    process = start(tmp_path, POLITE + SERVING + WAIT)
    until(tmp_path, "serving")
    process.send_signal(number)
    code, _, _ = ended(process)
    assert code == 0 and state(tmp_path)["phase"] == "stopped"


def test_a_stop_while_booting_ends_with_0(tmp_path):
    process = start(tmp_path, POLITE + "print('x')\n" + WAIT)
    until(tmp_path, "launching")
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 0


def test_an_engine_that_does_not_go_is_killed_after_the_drain(tmp_path):
    process = start(tmp_path, DEAF + SERVING + WAIT, drain=0.5)
    until(tmp_path, "serving")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert code == 0 and "killed" in err and 2.0 < time.monotonic() - began < 12


def test_a_second_signal_does_not_wait(tmp_path):
    process = start(tmp_path, DEAF + SERVING + WAIT, drain=60)
    until(tmp_path, "serving")
    process.send_signal(signal.SIGTERM)
    until(tmp_path, "stopping")
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 0


def test_children_of_the_engine_do_not_outlive_it(tmp_path):
    program = "import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\nprint('CHILD', p.pid)\nraise SystemExit(1)"
    _, out, _ = ended(start(tmp_path, program))
    pid = int(out.split()[-1])
    with pytest.raises(ProcessLookupError):
        for _ in range(50):
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                raise ProcessLookupError  # dead; whoever adopted it has not collected it yet
            time.sleep(0.1)


def test_a_phase_that_takes_too_long_is_named_and_is_6(tmp_path):
    code, _, err = ended(start(tmp_path, "print('Starting to load model x')\n" + WAIT, limit=1.0))
    assert code == 6 and "loading weights takes longer" in err


def test_a_stuck_boot_names_a_known_cause(tmp_path):
    program = (
        "print('Starting to load model x')\nprint('No available shared memory broadcast block found in 60 seconds.')\n"
    )
    code, _, err = ended(start(tmp_path, program + WAIT, limit=1.0))
    assert code == 6 and "loading weights takes longer" in err and "the stages wait for each other" in err


def test_hung_for_longer_than_the_grace_is_7(tmp_path):
    process = start(tmp_path, SERVING + WAIT)
    until(tmp_path, "serving")
    now = time.time()
    health = {"schema": 1, "status": "hung", "since_s": now, "checked_s": now + 61, "detail": "no token for 300 s"}
    (tmp_path / "health.json").write_text(json.dumps(health))
    code, _, err = ended(process)
    assert code == 7 and "no token for 300 s" in err


@pytest.mark.parametrize(
    "health",
    [
        {"status": "busy", "since_s": 10.0, "checked_s": 1e6},
        {"status": "hung", "since_s": 10.0, "checked_s": 1e6},  # of an earlier run
        {"status": "hung"},
        ["hung"],
    ],
)
def test_other_health_does_not_end_it(tmp_path, health):
    process = start(tmp_path, POLITE + SERVING + WAIT)
    until(tmp_path, "serving")
    (tmp_path / "health.json").write_text(json.dumps(health))
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 0


ENGINE_WITH_METRICS = """
import http.server, sys, time
blocks, port = sys.argv[1:]
class Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/metrics" else 404); self.end_headers()
        self.wfile.write(f'vllm:cache_config_info{{block_size="12160",num_gpu_blocks="{blocks}"}} 1.0'.encode())
    def log_message(self, *a): pass
server = http.server.HTTPServer(("127.0.0.1", int(port)), Metrics) if blocks != "none" else None
print("(EngineCore pid=9) GPU KV cache size: 1,245,184 tokens, Maximum concurrency for 262,144 tokens per request: 4.75x")
print("INFO:     Application startup complete.")
server.serve_forever() if server else time.sleep(60)
"""
RUN_PLANNED = """
import sys
from pathlib import Path
from entrypoint.boot import StateFile
from entrypoint.supervisor import Supervisor
from tests.unit.test_startup import CARDS
folder = Path(sys.argv[1])
state = StateFile(folder, "0.0.0.0", int(sys.argv[4]))
argv = [sys.executable, "-uc", *sys.argv[2:]]
sys.exit(Supervisor(argv, {}, state, drain_s=1, plan=CARDS).run())
"""


@pytest.mark.parametrize(
    "blocks, words", [("171", "171, 171 planned"), ("146", "blocks 146, 171 planned"), ("none", "K/V")]
)
def test_the_start_up_report_is_compared_once_it_serves(tmp_path, blocks, words):
    """`blocks` none: nothing answers /metrics, and what the log said is compared alone."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    argv = [sys.executable, "-c", RUN_PLANNED, str(tmp_path), ENGINE_WITH_METRICS, blocks, str(port)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "http_proxy": "http://127.0.0.1:9"}
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 20
    while not state(tmp_path).get("startup"):
        assert time.monotonic() < end, state(tmp_path)
        time.sleep(0.05)
    found = state(tmp_path)["startup"]
    process.send_signal(signal.SIGTERM)
    _, _, err = ended(process)
    told = [line for line in err.splitlines() if "start-up" in line]
    assert len(told) == 1 and words in told[0] and told[0].startswith("flashnext: ")
    assert found["agrees"] == (blocks != "146") == ("WARN" not in told[0])
    assert found["compared"] == (2 if blocks == "none" else 4)
    assert "weights of rank 0 not said, 21.11 GiB planned" in found["not_said"]


def test_output_passes_through_unchanged(tmp_path):
    payload = b"a\rb\n\xff no newline"
    process = start(tmp_path, f"import sys; sys.stdout.buffer.write({payload!r}); raise SystemExit(1)")
    process.wait(timeout=20)
    assert process.stdout.buffer.read() == payload


def test_a_program_that_is_not_there_is_6(tmp_path):
    from entrypoint.boot import StateFile
    from entrypoint.errors import Exit, Refusal
    from entrypoint.supervisor import Supervisor

    with pytest.raises(Refusal) as e:
        Supervisor([str(tmp_path / "none")], {}, StateFile(tmp_path, "h", 1), out=io.BytesIO()).run()
    assert e.value.code == Exit.ENGINE_START
