"""The health probe against a server that misbehaves over real sockets, and its tables and records in isolation.

The server here stands for failures that a real vLLM cannot be brought to on demand; the real one is in
tests/engine/test_healthcheck_live.py.
"""

import contextlib
import http.server
import json
import os
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from entrypoint import boot
from healthcheck import probe as probing
from healthcheck import records
from healthcheck.probe import BUSY, DEAD, EXIT, HEALTHY, HUNG, NO_TOKEN, REFUSED, STARTING, Finding, decide, main
from healthcheck.records import Health
from healthcheck.wire import MAX_BODY_BYTES, Server, ask

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS, CHAT, PLAIN, METRICS, HEALTH = "/v1/models", "/v1/chat/completions", "/v1/completions", "/metrics", "/health"
MODEL_LIST = {"object": "list", "data": [{"id": "tiny", "object": "model"}]}
TOKEN = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "\n"}, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 11, "completion_tokens": 1},
}
NO_TEMPLATE = {
    "error": {"message": "default chat template is no longer allowed", "type": "BadRequestError", "code": 400}
}


def page(*, prompt=1970, generation=540, usage=0.25, running=1, waiting=2) -> bytes:
    """A metrics page in the spelling of vLLM 0.30.0."""
    label = '{engine="0",model_name="a {strange} \\"name\\" 1.5"}'
    return f"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{label} {running:.1f}
vllm:num_requests_waiting{label} {waiting:.1f}
vllm:num_requests_waiting_by_reason{{engine="0",model_name="tiny",reason="capacity"}} 7.0
vllm:kv_cache_usage_perc{label} {usage}
vllm:prompt_tokens_total{label} {prompt:.1f}
vllm:prompt_tokens_created{label} 1.796046934e+09
vllm:generation_tokens_total{label} {generation:.1f}
process_cpu_seconds_total 11.4
""".encode()


class Handler(http.server.BaseHTTPRequestHandler):
    disable_nagle_algorithm = True

    def do_GET(self):
        self._play()

    do_POST = do_GET

    def _play(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.command, self.path, dict(self.headers), json.loads(body) if body else None))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.server.routes.get(self.path, says(404, {"detail": "Not Found"}))(self)

    def log_message(self, *_):
        pass


class PlayedServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.over = threading.Event()
        self.seen = []
        self.routes = {
            MODELS: says(200, MODEL_LIST),
            CHAT: says(200, TOKEN),
            METRICS: says(200, page()),
            HEALTH: says(200, b""),
        }
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def paths(self):
        return [path for _, path, _, _ in self.seen]


def says(status, body, **headers):
    """Answer at once."""

    def play(handler):
        data = body() if callable(body) else body
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return play


def raw(*pieces, pause_s=0.0, then="close"):
    """Write bytes as they are, pausing before each; then close, reset or hold the connection."""

    def play(handler):
        for piece in pieces:
            if handler.server.over.wait(pause_s):
                return
            handler.wfile.write(piece)
            handler.wfile.flush()
        if then == "hold":
            handler.server.over.wait()
        if then == "reset":
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            handler.connection.close()
        handler.close_connection = True

    return play


hang = raw(then="hold")
# Sends the probe to the counters at once, where `hang` would take the token's whole time first.
overloaded = says(503, {"error": {"message": "try later"}})
reset = raw(then="reset")
trickled_body = raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", *[b"{"] * 600, pause_s=0.1)
trickled_headers = raw(b"HTTP/1.1 200 OK\r\n", *[b"X"] * 600, pause_s=0.1)
trickled_without_length = raw(b"HTTP/1.0 200 OK\r\n\r\n", *[b"{"] * 600, pause_s=0.1)
endless_continue = raw(*[b"HTTP/1.1 100 Continue\r\n\r\n"] * 600, pause_s=0.1)


@pytest.fixture
def server():
    played = PlayedServer()
    thread = threading.Thread(target=played.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield played
    played.over.set()
    played.shutdown()
    played.server_close()


@pytest.fixture(autouse=True)
def no_settings(monkeypatch, tmp_path):
    for name in ("FLASHNEXT_API_KEY_FILE", "VLLM_API_KEY", "FLASHNEXT_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    # A proxy must never stand between the probe and its own loopback.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")


@pytest.fixture
def check(server, tmp_path, capsys):
    """Run the command against the played server; returns (exit code, its health record)."""

    def run(*argv, timeout=10, state_dir=tmp_path):
        where = ["--state-dir", str(state_dir)] if state_dir else []
        code = main(["--url", server.url, "--json", "--timeout", str(timeout), *where, *argv])
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        return code, json.loads(out)

    return run


# --- a token, in all its forms -----------------------------------------------------------------------------------


def test_one_token_is_healthy_and_the_record_is_kept(server, check, tmp_path):
    before = time.time()
    code, health = check()
    assert code == 0
    assert health["status"] == "healthy"
    assert health["tokens_total"] == 1970 + 540
    assert 0 < health["latency_s"] < 1
    assert before <= health["since_s"] <= health["checked_s"] <= time.time()
    assert health["detail"].startswith("one token from tiny in 0.")
    assert json.loads((tmp_path / "health.json").read_text()) == health
    assert list(tmp_path.iterdir()) == [tmp_path / "health.json"]
    assert (tmp_path / "health.json").stat().st_mode & 0o777 == 0o644


def test_what_is_asked(server, check):
    check()
    assert server.paths() == [MODELS, METRICS, CHAT, METRICS]
    method, _, headers, body = server.seen[2]
    assert method == "POST"
    # Nothing about sampling: a greedy probe would not see the sampler fail (tests/engine/test_healthcheck_live.py).
    assert sorted(body) == ["max_tokens", "messages", "model"]
    assert (body["model"], body["max_tokens"]) == ("tiny", 1)
    assert "Authorization" not in headers


def test_a_named_model_is_not_looked_up(server, check):
    assert check("--model", "mine")[0] == 0
    assert MODELS not in server.paths()
    assert server.seen[1][3]["model"] == "mine"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"choices": [{"message": {"content": ""}}], "usage": {"completion_tokens": 1}}, True),  # the token was the end
        ({"choices": [{"message": {"content": None, "reasoning": "So"}}]}, True),
        ({"choices": [{"message": {"content": None, "reasoning_content": "So"}}]}, True),
        ({"choices": [{"message": {"content": None, "tool_calls": [{"id": "1"}]}}]}, True),
        ({"choices": [{"delta": {"content": "So"}}]}, True),
        ({"choices": [{"text": "So"}]}, True),
        ({"choices": [{"message": {"content": ""}}], "usage": {"completion_tokens": 0}}, False),
        ({"choices": [], "usage": {"completion_tokens": 0}}, False),
        ({"choices": []}, False),
        ({"choices": None, "usage": None}, False),
        ({"choices": [None, {"message": "text"}], "usage": {"completion_tokens": "1"}}, False),
        ({"usage": {"completion_tokens": -1}}, False),
        ({}, False),
    ],
)
def test_has_token(server, check, answer, expected):
    server.routes[CHAT] = says(200, answer)
    code, health = check()
    assert (code, health["status"]) == ((0, HEALTHY) if expected else (1, DEAD))
    if not expected:
        assert "without a token" in health["detail"]


def test_a_model_without_chat_template_is_asked_plainly(server, check):
    server.routes[CHAT] = says(400, NO_TEMPLATE)
    server.routes[PLAIN] = says(200, {"choices": [{"text": "x"}], "usage": {"completion_tokens": 1}})
    code, health = check()
    assert code == 0
    assert "default chat template is no longer allowed" in health["detail"]
    assert "prompt" in server.seen[-2][3]


def test_a_model_that_the_server_does_not_know_is_refused(server, check):
    unknown = {"error": {"message": "The model `nope` does not exist.", "type": "NotFoundError", "code": 404}}
    server.routes[CHAT] = server.routes[PLAIN] = says(404, unknown)
    code, health = check("--model", "nope")
    assert (code, health["status"]) == (1, REFUSED)
    each = "HTTP 404: The model `nope` does not exist."
    assert health["detail"] == f"/v1/chat/completions: {each}; /v1/completions: {each}"


# --- the tables --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [MODELS, CHAT])
@pytest.mark.parametrize(
    ("status", "expected"),
    [
        *[(status, REFUSED) for status in (301, 307, 400, 401, 403, 404, 405, 409, 413, 422, 501)],
        *[(status, DEAD) for status in (204, 299, 500, 502, 507)],
        *[(status, BUSY) for status in (408, 429, 503, 504)],
    ],
)
def test_http_status(server, check, where, status, expected):
    server.routes[where] = says(status, {"error": {"message": "why not"}}, Location="http://127.0.0.1:9/elsewhere")
    code, health = check()
    assert (code, health["status"]) == (EXIT[expected], expected), health["detail"]
    assert f"HTTP {status}" in health["detail"]


@pytest.mark.parametrize("where", [MODELS, CHAT])
@pytest.mark.parametrize(
    ("play", "expected", "words"),
    [
        (reset, DEAD, "closed before the answer was whole"),
        (raw(), DEAD, "closed before the answer was whole"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{}"), DEAD, "closed before the answer was whole"),
        (raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n{}"), DEAD, "before the answer was whole"),
        (raw(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n"), DEAD, "not HTTP"),
        (raw(b"\x15\x03\x01\x00\x02\x02\x46" * 40), DEAD, "not HTTP"),
        (raw(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n"), DEAD, "not HTTP"),
        (raw(b"HTTP/1.1 200 OK\r\n" + b"A" * 70_000), DEAD, "not HTTP"),
        (says(200, b"<html>welcome to nginx</html>"), DEAD, "not a JSON object: <html>welcome to nginx</html>"),
        (says(200, b""), DEAD, "an empty body"),
        (says(200, b"[1, 2"), DEAD, "not a JSON object"),
        (says(200, b"[" * 100_000), DEAD, "not a JSON object"),
        (says(200, b"\xff\xfe\x00"), DEAD, "not a JSON object"),
        (says(200, b'"text"'), DEAD, "not a JSON object"),
        (
            says(500, {"error": {"message": "EngineCore encountered an issue."}}),
            DEAD,
            "EngineCore encountered an issue.",
        ),
        (says(500, b"\x1b[2J\x07boom\r\nline"), DEAD, "HTTP 500: [2J boom line"),
        (says(200, b"x" * (MAX_BODY_BYTES + 10)), DEAD, "longer than"),
    ],
)
def test_broken_answers(server, check, where, play, expected, words):
    server.routes[where] = play
    code, health = check()
    assert (code, health["status"]) == (EXIT[expected], expected), health["detail"]
    assert words in health["detail"]
    assert health["detail"].isprintable()


@pytest.mark.parametrize("models", [{"data": []}, {"data": None}, {"data": [{"id": ""}, {"id": 3}, "x"]}, {}])
def test_a_server_without_a_model_is_dead(server, check, models):
    server.routes[MODELS] = says(200, models)
    assert check()[1]["status"] == DEAD


def test_nothing_listens(server, check):
    server.shutdown()
    server.server_close()
    code, health = check()
    assert (code, health["status"]) == (1, DEAD)
    assert "no connection" in health["detail"]


def test_plain_http_where_tls_was_asked_for(server, capsys):
    assert main(["--url", server.url.replace("http", "https"), "--timeout", "3"]) == 1
    assert capsys.readouterr().out.startswith("dead: /v1/models: what came back is not HTTP, or not trusted TLS")


def test_every_fault_and_status_has_an_exit_code():
    from healthcheck.wire import FAULTS

    assert probing.FAULT_MEANS.keys() == FAULTS.keys()
    assert EXIT == {"healthy": 0, "busy": 0, "starting": 1, "hung": 1, "dead": 1, "refused": 1}


# --- one total deadline ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "play"),
    [
        (CHAT, hang),
        (CHAT, trickled_body),
        (CHAT, trickled_headers),
        (CHAT, trickled_without_length),
        (CHAT, endless_continue),
        (MODELS, trickled_body),
        (METRICS, trickled_body),
        (HEALTH, trickled_body),
    ],
)
def test_the_deadline_holds_for_servers_that_hang_or_trickle(server, check, where, play):
    server.routes[where] = play
    if where == HEALTH:
        server.routes[CHAT] = overloaded
    began = time.monotonic()
    code, health = check(timeout=1.0)
    assert time.monotonic() - began < 2.0
    # hung where this machine was too slow to ask the last questions in the 0.24 s that are left for them
    assert health["status"] in ([HEALTHY] if where == METRICS else [BUSY, HUNG])
    assert code == EXIT[health["status"]]


def test_a_server_that_answers_nothing_is_hung_at_once(server, check):
    server.routes = dict.fromkeys([MODELS, METRICS, CHAT, HEALTH], hang)
    began = time.monotonic()
    code, health = check(timeout=1.0)
    assert time.monotonic() - began < 2.0
    assert (code, health["status"]) == (1, HUNG)
    assert "neither /health nor /metrics answers" in health["detail"]


def test_a_listener_that_accepts_nobody_is_hung(capsys):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        began = time.monotonic()
        code = main(["--url", f"http://127.0.0.1:{listener.getsockname()[1]}", "--timeout", "1"])
        assert time.monotonic() - began < 2.0
    assert code == 1
    assert capsys.readouterr().out.startswith("hung: no token in ")


def test_the_deadline_holds_for_a_state_directory_that_blocks(server, check, tmp_path):
    os.mkfifo(tmp_path / "state.json")
    began = time.monotonic()
    code, health = check(timeout=0.5)
    assert time.monotonic() - began < 1.5
    assert (code, health["status"]) == (1, HUNG)
    assert "the probe itself did not end" in health["detail"]
    with open(tmp_path / "state.json", "w"):
        pass  # lets the left-behind thread go


def test_the_connection_of_a_token_that_did_not_come_is_closed(server, check):
    gone = threading.Event()

    def wait_for_hangup(handler):
        handler.connection.settimeout(5)
        if handler.connection.recv(1) == b"":
            gone.set()

    server.routes[CHAT] = wait_for_hangup
    check(timeout=0.8)
    assert gone.wait(2), "the engine would go on with a request that nobody waits for"


def test_the_command_is_quick(server):
    argv = [sys.executable, "-m", "healthcheck", "--url", server.url]
    spent = []
    for _ in range(3):
        before = os.times().children_user
        done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        spent.append(os.times().children_user - before)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("healthy: one token from tiny in ")
        assert done.stderr == ""
    assert min(spent) < 0.3


# --- busy is not dead --------------------------------------------------------------------------------------------


def counting(**changes):
    """A metrics page where each sample differs from the last by `changes`."""
    values = {"prompt": 1970, "generation": 540, "usage": 0.25, "running": 1, "waiting": 2}

    def next_page():
        for name, step in changes.items():
            values[name] += step
        return page(**values)

    return says(200, next_page)


@pytest.mark.parametrize("change", [{"prompt": 100}, {"generation": 1}, {"usage": 0.01}, {"running": 1}])
def test_no_token_but_a_mark_moves_within_one_probe(server, check, change):
    server.routes[CHAT] = overloaded
    server.routes[METRICS] = counting(**change)
    code, health = check(state_dir=None)
    assert (code, health["status"]) == (0, BUSY)
    assert health["detail"].startswith("the engine works: no token in ")
    assert health["no_progress_since_s"] is None


def test_a_queue_that_only_our_own_probe_moves_is_no_progress(server, check):
    server.routes[CHAT] = overloaded
    server.routes[METRICS] = counting(waiting=1)
    assert check("--stall", "1e-6")[1]["status"] == HUNG


def test_progress_between_two_probes_is_seen(server, check):
    server.routes[CHAT] = overloaded
    first = check("--stall", "60")[1]
    assert first["status"] == BUSY
    assert first["no_progress_since_s"] is not None
    server.routes[METRICS] = says(200, page(usage=0.26))
    second = check("--stall", "60")[1]
    assert second["detail"].startswith("the engine works")
    assert second["no_progress_since_s"] is None
    assert second["since_s"] == first["since_s"]


def age(directory, by_s):
    """Let `by_s` seconds go by since the last probe."""
    record = json.loads((directory / "health.json").read_text())
    for name in ("since_s", "checked_s", "no_progress_since_s"):
        if record[name] is not None:
            record[name] -= by_s
    (directory / "health.json").write_text(json.dumps(record))


def test_no_progress_is_hung_after_the_stall_limit_and_healthy_again_after_it(server, check, tmp_path):
    assert check()[1]["status"] == HEALTHY  # its marks are those of every later probe here
    server.routes[CHAT] = overloaded
    age(tmp_path, 200)
    code, health = check()
    assert (code, health["status"]) == (0, BUSY)
    assert health["detail"].startswith("no progress for 20")
    assert ", hung at 300 s: no token in " in health["detail"]
    assert "requests: 1 running, 2 waiting" in health["detail"]
    age(tmp_path, 110)
    code, hung = check()
    assert (code, hung["status"]) == (1, HUNG)
    assert ", the limit is 300 s: no token in " in hung["detail"]
    server.routes[CHAT] = says(200, TOKEN)
    code, health = check()
    assert (code, health["status"], health["no_progress_since_s"]) == (0, HEALTHY, None)


@pytest.mark.parametrize("metrics", [says(404, b""), says(401, b""), says(200, b"process_cpu_seconds_total 1\n")])
def test_without_counters_the_same_limit_holds(server, check, tmp_path, metrics):
    server.routes[CHAT] = overloaded
    server.routes[METRICS] = metrics
    for after_s, expected in ((0, BUSY), (200, BUSY), (110, HUNG)):
        if after_s:
            age(tmp_path, after_s)
        code, health = check()
        assert (code, health["status"]) == (EXIT[expected], expected)
        assert "/metrics has no counters" in health["detail"]
        assert health["tokens_total"] is None


def test_metrics_that_never_end_are_like_none(server, check):
    server.routes[CHAT] = overloaded
    server.routes[METRICS] = hang
    code, health = check(timeout=2)
    assert (code, health["status"]) == (0, BUSY)
    assert "/metrics has no counters" in health["detail"]


@pytest.mark.parametrize(
    ("play", "words"),
    [(overloaded, "/health says 503"), (reset, "then /health"), (raw(b"junk\r\n"), "then /health")],
)
def test_an_engine_that_died_while_the_token_was_awaited(server, check, play, words):
    server.routes[CHAT] = overloaded
    server.routes[HEALTH] = play
    code, health = check()
    assert (code, health["status"]) == (1, DEAD)
    assert words in health["detail"]


# --- the history, pure -------------------------------------------------------------------------------------------

URL = "http://127.0.0.1:8000"
IDLE = {records.GENERATION_TOKENS: 10.0, records.PROMPT_TOKENS: 5.0}
OTHER = {records.GENERATION_TOKENS: 11.0, records.PROMPT_TOKENS: 5.0}
BUSY_NOW = Finding(NO_TOKEN, "no token in 15.0 s", metrics=IDLE)


def last(status=HEALTHY, checked_s=960.0, marks=IDLE, since_s=500.0, no_progress_since_s=None, url=URL):
    return Health(status, since_s, checked_s, "", marks=marks, no_progress_since_s=no_progress_since_s, url=url)


@pytest.mark.parametrize(
    ("previous", "finding", "status", "no_progress_since_s"),
    [
        (None, BUSY_NOW, BUSY, 980.0),
        (last(), BUSY_NOW, BUSY, 960.0),
        (last(marks=OTHER), BUSY_NOW, BUSY, None),
        (last(marks=None), BUSY_NOW, BUSY, 980.0),
        (last(STARTING, marks=None), BUSY_NOW, BUSY, 980.0),
        (last(BUSY, no_progress_since_s=701.0), BUSY_NOW, BUSY, 701.0),
        (last(BUSY, no_progress_since_s=700.0), BUSY_NOW, HUNG, 700.0),
        (last(HUNG, no_progress_since_s=600.0), BUSY_NOW, HUNG, 600.0),
        (last(BUSY, no_progress_since_s=600.0, marks=OTHER), BUSY_NOW, BUSY, None),
        (last(BUSY, no_progress_since_s=600.0), replace(BUSY_NOW, moved=True), BUSY, None),
        (last(BUSY, no_progress_since_s=600.0, marks=None), replace(BUSY_NOW, metrics=None), HUNG, 600.0),
        # The last probe was of another server, too long ago, or in the future: it proves nothing.
        (last(HUNG, no_progress_since_s=600.0, url="http://127.0.0.1:1"), BUSY_NOW, BUSY, 980.0),
        (last(HUNG, no_progress_since_s=600.0, checked_s=699.0), BUSY_NOW, BUSY, 980.0),
        (last(HUNG, no_progress_since_s=600.0, checked_s=1001.0), BUSY_NOW, BUSY, 980.0),
    ],
)
def test_decide(previous, finding, status, no_progress_since_s):
    health = decide(finding, previous, url=URL, began_s=980.0, now_s=1000.0, stall_s=300.0)
    assert (health.status, health.no_progress_since_s) == (status, no_progress_since_s)
    assert health.checked_s == 1000.0


def test_since_is_the_first_time_of_an_unbroken_run():
    healthy = Finding(HEALTHY, "one token", 0.1, IDLE)
    times = {"url": URL, "began_s": 999.0, "now_s": 1000.0, "stall_s": 300.0}
    assert decide(healthy, last(HEALTHY), **times).since_s == 500.0
    assert decide(healthy, last(BUSY), **times).since_s == 1000.0
    assert decide(healthy, None, **times).since_s == 1000.0


# --- the supervisor's word ---------------------------------------------------------------------------------------


def state(**changes):
    now = time.time()
    return {
        "schema": 1,
        "phase": "serving",
        "label": "serving",
        "since_s": now - 60,
        "started_s": now - 120,
        "progress": None,
        "deadline_s": None,
        "pid": os.getpid(),
        "host": "127.0.0.1",
        "port": 8000,
        "exit_code": None,
        "reason": None,
    } | changes


@pytest.fixture
def with_state(tmp_path, capsys):
    """Write state.json and run the command as Docker does, without --url."""

    def run(content, *argv):
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        (tmp_path / "state.json").write_bytes(text)
        code = main(["--state-dir", str(tmp_path), "--timeout", "2", "--json", *argv])
        return code, json.loads(capsys.readouterr().out)

    return run


def dead_pid():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.mark.parametrize(
    "phase", ["planning", "preparing", "launching", "loading", "allocating", "warming", "capturing"]
)
def test_booting(server, with_state, phase):
    booting = state(phase=phase, label="loading the weights", progress=0.417, deadline_s=time.time() + 500)
    code, health = with_state(booting | {"port": server.server_address[1]})
    assert (code, health["status"]) == (1, STARTING)
    assert health["detail"] in [
        f"loading the weights ({phase}), 60 s so far, 42 %, at most {s} s more" for s in (499, 500)
    ]
    assert server.seen == []


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"phase": "loading", "pid": None}, STARTING, "serving (loading), 60 s so far"),
        ({"phase": "loading", "deadline_s": -90}, HUNG, "90 s past the limit of this phase"),
        ({"phase": "stopping"}, REFUSED, "serving (stopping), 60 s so far"),
        ({"phase": "stopping", "deadline_s": -1}, HUNG, "past the limit"),
        ({"phase": "stopped", "exit_code": 0}, DEAD, "serving (stopped), exit code 0"),
        ({"phase": "failed", "exit_code": 6, "reason": "no /dev/shm"}, DEAD, "exit code 6: no /dev/shm"),
        ({"phase": "failed", "pid": None, "label": ""}, DEAD, "failed"),
        ({"phase": "loading", "pid": "gone"}, DEAD, "is gone; its last word was serving (loading)"),
        ({"phase": "serving", "pid": "gone"}, DEAD, "is gone"),
        ({"phase": "stopping", "pid": "gone"}, DEAD, "is gone"),
    ],
)
def test_phases(server, with_state, changes, status, words):
    changes = dict(changes)
    if changes.get("deadline_s"):
        changes["deadline_s"] += time.time()
    if changes.get("pid") == "gone":
        changes["pid"] = dead_pid()
    code, health = with_state(state(**changes) | {"port": server.server_address[1]})
    assert (code, health["status"]) == (1, status)
    assert words in health["detail"]
    assert server.seen == []


def test_serving_is_probed_where_the_state_says(server, with_state):
    port = server.server_address[1]
    code, health = with_state(state(host="0.0.0.0", port=port, model="mine", deadline_s=1.0))
    assert (code, health["status"], health["url"]) == (0, HEALTHY, f"http://127.0.0.1:{port}")
    assert server.seen[1][3]["model"] == "mine"


def test_what_the_supervisor_writes_is_what_the_probe_reads(server, tmp_path, capsys):
    file = boot.StateFile(tmp_path, "0.0.0.0", server.server_address[1])
    said = []
    for phase in [*(phase.phase for phase in boot.phases()), "stopping", "stopped", "failed"]:
        file.update(phase, model="mine", reason="why" if phase == "failed" else None)
        main(["--state-dir", str(tmp_path)])
        said.append((phase, capsys.readouterr().out.split(":")[0]))
        assert records.read_state(tmp_path, boot_s=None)[1] is None
    statuses = dict(said)
    assert [statuses.pop(phase) for phase in ("serving", "stopping", "stopped", "failed")] == [
        HEALTHY,
        REFUSED,
        DEAD,
        DEAD,
    ]
    assert set(statuses.values()) == {STARTING}
    assert statuses.keys() == {phase for phase, meaning in probing.PHASES.items() if meaning == probing.BOOT}


def test_a_zombie_is_not_alive():
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not records.is_alive(child.pid)
    finally:
        child.wait()
    assert records.is_alive(os.getpid())
    assert not records.is_alive(child.pid)
    assert not records.is_alive(2**62)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "state.json is not JSON"),
        (b'{"schema": 1, "phase": "load', "state.json is not JSON"),
        (b"[" * 50_000, "state.json is not JSON"),
        (b"\xff\xfe", "state.json is not JSON"),
        (b" " * 70_000, "state.json is longer than 65536 bytes"),
        (b"[]", "state.json is not a JSON object"),
        ({"schema": 2, "phase": "loading"}, "state.json has schema 2, this probe reads 1"),
        ({"phase": "loading"}, "state.json has schema None, this probe reads 1"),
        (state(phase=None), "state.json is not a state: phase is missing"),
        (state(phase="loading", since_s="now"), "state.json is not a state: since_s is not float"),
        (state(phase="loading", since_s=float("nan")), "state.json is not a state: since_s is not finite"),
        (state(phase="loading", since_s=10**400), "state.json is not a state: since_s is not finite"),
        (state(phase="loading", pid=True), "state.json is not a state: pid is not int"),
        (state(phase="loading", pid=-1), "state.json is not a state: pid is below 1"),
        (state(phase="loading", pid=10**30), "state.json is not a state: pid is out of range"),
        (state(port=70_000), "state.json is not a state: port is no port"),
        (state(phase="failed", since_s=1000.0, started_s=900.0), "state.json is from before this machine's last boot"),
        (state(phase="dreaming"), "state.json has a phase that this probe does not know, 'dreaming'"),
    ],
)
def test_a_state_that_cannot_be_used_is_named_and_the_server_is_asked(server, with_state, content, words):
    code, health = with_state(content, "--url", server.url)
    assert (code, health["status"]) == (0, HEALTHY)
    assert health["detail"].startswith("one token from tiny in 0.")
    assert health["detail"].endswith("; " + words)


def test_state_json_is_a_directory(server, check, tmp_path):
    (tmp_path / "state.json").mkdir()
    code, health = check()
    assert code == 0
    assert "state.json cannot be read (Is a directory)" in health["detail"]


# --- our own record ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b'{"schema": 1}',
        b'{"schema": 9, "status": "hung", "since_s": 1, "checked_s": 2}',
        b'{"schema": 1, "status": "hung", "since_s": 1, "checked_s": Infinity}',
        b'{"schema": 1, "status": "hung", "since_s": 1, "checked_s": 2, "marks": 3}',
        b'{"schema": 1, "status": "hung", "since_s": 1, "checked_s": 2, "marks": {"a": "b"}}',
    ],
)
def test_a_broken_health_record_is_replaced(server, check, tmp_path, content):
    (tmp_path / "health.json").write_bytes(content)
    assert records.read_health(tmp_path) is None
    assert check()[0] == 0
    assert json.loads((tmp_path / "health.json").read_text())["status"] == "healthy"


def test_health_json_that_cannot_be_written_costs_nothing_but_a_note(server, check, tmp_path):
    (tmp_path / "health.json").mkdir()
    code, health = check()
    assert (code, health["status"]) == (0, HEALTHY)
    assert "health.json not written (Is a directory), so no memory of earlier probes" in health["detail"]
    assert [p.name for p in tmp_path.iterdir()] == ["health.json"]


def test_a_state_directory_that_nobody_may_write(server, check):
    # sysfs refuses new files to root too.
    code, health = check(state_dir="/sys/kernel")
    assert (code, health["status"]) == (0, HEALTHY)
    assert "health.json not written (" in health["detail"]


def test_a_state_directory_that_is_not_there_stays_so(server, check, tmp_path):
    code, health = check(state_dir=tmp_path / "none")
    assert (code, "health.json" in health["detail"]) == (0, False)
    assert not (tmp_path / "none").exists()


def test_with_a_url_alone_this_containers_records_are_left_alone(server, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FLASHNEXT_STATE_DIR", str(tmp_path))
    (tmp_path / "state.json").write_text(json.dumps(state(phase="failed")))
    assert main(["--url", server.url]) == 0
    assert not (tmp_path / "health.json").exists()
    assert main([]) == 1
    assert capsys.readouterr().out.splitlines()[1] == "dead: serving (failed)"
    assert (tmp_path / "health.json").exists()


def test_an_old_record_is_replaced_whole(tmp_path):
    long = Health(HEALTHY, 1.0, 2.0, "x" * 4000)
    short = Health(DEAD, 1.0, 2.0, "\ud800 and \x00")
    assert records.write_health(tmp_path, long) is None
    assert records.write_health(tmp_path, short) is None
    assert records.read_health(tmp_path) == short


# --- the API key -------------------------------------------------------------------------------------------------


def wants_key(key):
    def play(handler):
        right = handler.headers.get("Authorization") == f"Bearer {key}"
        answer = MODEL_LIST if handler.path == MODELS else TOKEN
        (says(200, answer) if right else says(401, {"error": "Unauthorized"}))(handler)

    return play


@pytest.fixture
def guarded(server):
    server.routes[MODELS] = server.routes[CHAT] = wants_key("s3cret")
    return server


def test_key_from_option_environment_file_and_environment(guarded, check, monkeypatch, tmp_path):
    (tmp_path / "key").write_text("s3cret\n")
    assert check("--api-key-file", str(tmp_path / "key"))[0] == 0
    monkeypatch.setenv("FLASHNEXT_API_KEY_FILE", str(tmp_path / "key"))
    assert check()[0] == 0
    monkeypatch.delenv("FLASHNEXT_API_KEY_FILE")
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    assert check()[0] == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "the server wants an API key: name its file with --api-key-file or FLASHNEXT_API_KEY_FILE"),
        (b"wrong", "the server refuses the API key in "),
        (b"", "does not hold one line of printable ASCII"),
        (b"two\nlines", "does not hold one line of printable ASCII"),
        ("schlüssel".encode(), "does not hold one line of printable ASCII"),
        (b"\xff\xfe\xfa", "cannot be read (not text)"),
    ],
)
def test_a_key_that_does_not_open(guarded, check, tmp_path, content, words):
    argv = []
    if content is not None:
        (tmp_path / "key").write_bytes(content)
        argv = ["--api-key-file", str(tmp_path / "key")]
    code, health = check(*argv)
    assert (code, health["status"]) == (1, REFUSED)
    assert words in health["detail"]
    assert "wrong" not in health["detail"]


def test_a_key_file_that_is_absent_is_named(guarded, check, tmp_path):
    _, health = check("--api-key-file", str(tmp_path / "nokey"))
    assert f"{tmp_path}/nokey cannot be read (No such file or directory)" in health["detail"]


def test_the_key_does_not_follow_a_redirect(server, check, tmp_path):
    other = PlayedServer()
    threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        server.routes[MODELS] = says(302, b"", Location=other.url + MODELS)
        (tmp_path / "key").write_text("s3cret")
        assert check("--api-key-file", str(tmp_path / "key"))[1]["status"] == REFUSED
        assert other.seen == []
    finally:
        other.shutdown()
        other.server_close()


# --- the command line --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ["--timeout", "0"],
        ["--timeout", "-1"],
        ["--timeout", "nan"],
        ["--timeout", "inf"],
        ["--timeout", "soon"],
        ["--stall", "0"],
        ["--url", "127.0.0.1:8000"],
        ["--url", "ftp://127.0.0.1"],
        ["--url", "http://"],
        ["--url", "http://[::1"],
        ["--url", "http://h:99999"],
        ["--url", "http://h:x"],
        ["--url", "http://h/a b"],
        ["--frobnicate"],
    ],
)
def test_usage_errors_exit_1_because_docker_reserves_2(argv, capsys):
    try:
        code = main(argv)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 1
    assert out == ""
    assert err.splitlines()[0].startswith("ERROR: ")
    assert err.splitlines()[1].startswith("Fix: ")
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", Server("http", "127.0.0.1", 8000)),
        ("http://127.0.0.1:8000/v1/", Server("http", "127.0.0.1", 8000)),
        ("https://example.org/llm/v1", Server("https", "example.org", 443, "/llm")),
        ("http://[::1]:9", Server("http", "::1", 9)),
        ("http://example.org", Server("http", "example.org", 80)),
    ],
)
def test_urls(url, expected):
    assert Server.from_url(url) == expected
    assert Server.from_url(str(expected)) == expected


def test_a_path_before_v1_is_kept(server, capsys):
    for path in (MODELS, CHAT, METRICS):
        server.routes["/llm" + path] = server.routes.pop(path)
    assert main(["--url", server.url + "/llm/v1"]) == 0


def test_a_host_that_no_name_can_have():
    reply = ask(Server("http", "a\x00b", 80), "/health", deadline=time.monotonic() + 1)
    assert reply.fault == "unresolved"
    reply = ask(Server("http", "no-such-host.invalid", 80), "/health", deadline=time.monotonic() + 5)
    assert reply.fault in ("unresolved", "silent")


# --- the metrics page --------------------------------------------------------------------------------------------


def test_metrics_are_summed_over_ranks_and_read_past_strange_labels():
    text = page() + b'vllm:generation_tokens_total{engine="1",model_name="tiny"} 3.0\nvllm:kv_cache_usage_perc{} NaN\n'
    metrics = records.parse_metrics(text + b"vllm:prompt_tokens_total{broken\nvllm:odd 1.2.3\n")
    assert metrics[records.GENERATION_TOKENS] == 543.0
    assert metrics[records.PROMPT_TOKENS] == 1970.0
    assert metrics["vllm:kv_cache_usage_perc"] == 0.25
    assert records.tokens_total(metrics) == 2513
    assert records.progress_marks(metrics) == {
        records.GENERATION_TOKENS: 543.0,
        records.PROMPT_TOKENS: 1970.0,
        "vllm:kv_cache_usage_perc": 0.25,
        records.RUNNING: 1.0,
    }
    assert records.progress_marks({"vllm:num_requests_waiting": 1.0}) is None
    assert records.tokens_total({}) is None


@pytest.mark.parametrize(("text", "expected"), [("cpu 1 2\nbtime 1796046000\n", 1796046000.0), ("cpu 1\n", None)])
def test_boot_time(tmp_path, text, expected):
    (tmp_path / "stat").write_text(text)
    assert records.boot_time_s(tmp_path) == expected
    assert records.boot_time_s(tmp_path / "none") is None
