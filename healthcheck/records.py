"""Decides what the three records around a server say: the supervisor's state.json, vLLM's /metrics, our health.json.

From: file contents, a metrics page, a clock. Reading never raises: a record that is absent, broken, too new or from
before the last boot of this machine is None and a sentence for the person who reads the result.

state.json (the supervisor's; schema 1)   {schema, phase, label, since_s, started_s, progress, deadline_s, pid, host,
                                          port, exit_code, reason} and, if it knows it, {model}
health.json (ours; schema 1)              {schema, status, since_s, checked_s, detail, latency_s, tokens_total} and, for
                                          the next probe only, {url, marks, no_progress_since_s}
All times are Unix seconds.
"""

import contextlib
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

SCHEMA = 1
MAX_FILE_BYTES = 64 * 2**10

PROMPT_TOKENS = "vllm:prompt_tokens_total"
GENERATION_TOKENS = "vllm:generation_tokens_total"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"

# What moves in vLLM 0.30.0 when the engine completes a step, read in v1/metrics/loggers.py and sampled during a
# 1,900-token prompt in 16-token chunks (tests/engine/test_healthcheck_live.py does it again):
#   generation_tokens, prompt_tokens    with the tokens that reach the front end. The prompt is counted in one piece,
#                                       with its first token: through a chunked prefill of minutes nothing moves, and
#                                       iteration_tokens_total neither.
#   kv_cache_usage_perc, requests_running    with the scheduler's report after each step, also one without output; the
#                                       usage changes when a step needs a new block.
#   estimated_flops_per_gpu_total       each step, but only under --enable-mfu-metrics.
# Not here: num_requests_waiting. An engine that cannot schedule anything still counts our own probe in and out.
PROGRESS_MARKS = (
    GENERATION_TOKENS,
    PROMPT_TOKENS,
    "vllm:kv_cache_usage_perc",
    RUNNING,
    "vllm:estimated_flops_per_gpu_total",
)

_SAMPLE = re.compile(rb"^(vllm:\w+)(?:\{.*\})?[ \t]+(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class State:
    """The supervisor's word on where the server is in its life."""

    phase: str
    label: str
    since_s: float
    started_s: float
    progress: float | None
    deadline_s: float | None
    pid: int | None
    host: str | None
    port: int | None
    exit_code: int | None
    reason: str | None
    model: str | None


@dataclass(frozen=True)
class Health:
    """One probe's result, as health.json has it."""

    status: str
    since_s: float
    checked_s: float
    detail: str
    latency_s: float | None = None
    tokens_total: int | None = None
    url: str | None = None
    marks: Mapping[str, float] | None = None
    no_progress_since_s: float | None = None
    schema: int = SCHEMA

    def to_json(self) -> str:
        record = asdict(self)
        return json.dumps({"schema": record.pop("schema"), **record})


def read_state(directory: Path, *, boot_s: float | None) -> tuple[State | None, str | None]:
    """state.json, or None and why it was passed over (None and None where there is none).

    `boot_s` is when this kernel started: a state from before it is about processes that are gone.
    """
    record, note = _read(directory / "state.json")
    if record is None:
        return None, note
    try:
        if record.get("schema") != SCHEMA:
            return None, f"state.json has schema {record.get('schema')!r}, this probe reads {SCHEMA}"
        state = State(
            phase=_typed(record, "phase", str, required=True),
            label=_typed(record, "label", str) or "",
            since_s=_typed(record, "since_s", float, required=True),
            started_s=_typed(record, "started_s", float, required=True),
            progress=_typed(record, "progress", float),
            deadline_s=_typed(record, "deadline_s", float),
            pid=_typed(record, "pid", int),
            host=_typed(record, "host", str),
            port=_typed(record, "port", int),
            exit_code=_typed(record, "exit_code", int),
            reason=_typed(record, "reason", str),
            model=_typed(record, "model", str),
        )
        if state.pid is not None and state.pid < 1:
            raise ValueError("pid is below 1")
        if state.port is not None and not 0 < state.port < 65536:
            raise ValueError("port is no port")
    except ValueError as error:
        return None, f"state.json is not a state: {error}"
    if boot_s is not None and max(state.since_s, state.started_s) < boot_s:
        return None, "state.json is from before this machine's last boot"
    return state, None


def read_health(directory: Path) -> Health | None:
    """The last probe's result, or None where it cannot be used (which costs the history, nothing else)."""
    record, _ = _read(directory / "health.json")
    if record is None or record.get("schema") != SCHEMA:
        return None
    try:
        marks = record.get("marks")
        if marks is not None:
            marks = {name: _typed(marks, name, float, required=True) for name in marks}
        return Health(
            status=_typed(record, "status", str, required=True),
            since_s=_typed(record, "since_s", float, required=True),
            checked_s=_typed(record, "checked_s", float, required=True),
            detail=_typed(record, "detail", str) or "",
            latency_s=_typed(record, "latency_s", float),
            tokens_total=_typed(record, "tokens_total", int),
            url=_typed(record, "url", str),
            marks=marks,
            no_progress_since_s=_typed(record, "no_progress_since_s", float),
        )
    except (ValueError, TypeError, AttributeError):
        return None


def write_health(directory: Path, health: Health) -> str | None:
    """Replace health.json in one step. Returns why it could not, or None. A directory that is absent stays absent."""
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix="health.", suffix=".partial", dir=directory)
        with open(descriptor, "w", encoding="ascii") as stream:
            stream.write(health.to_json() + "\n")
            # `docker exec` probes as another user than Docker's own probe and the supervisor.
            os.fchmod(stream.fileno(), 0o644)
        os.replace(temporary, directory / "health.json")
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return f"health.json not written ({error.strerror or error}), so no memory of earlier probes"
    return None


def parse_metrics(page: bytes) -> dict[str, float]:
    """vLLM's samples, each name's series added up (an engine of several ranks has one series a rank)."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(page):
        with contextlib.suppress(ValueError):
            number = float(value)
            if math.isfinite(number):
                key = name.decode()
                sums[key] = sums.get(key, 0.0) + number
    return sums


def progress_marks(metrics: Mapping[str, float]) -> dict[str, float] | None:
    """The part of a metrics page that moves only when the engine works; None where the page has none of it."""
    return {name: metrics[name] for name in PROGRESS_MARKS if name in metrics} or None


def tokens_total(metrics: Mapping[str, float]) -> int | None:
    """Prompt and generated tokens since the engine started, or None where it does not count them."""
    if PROMPT_TOKENS not in metrics or GENERATION_TOKENS not in metrics:
        return None
    return int(metrics[PROMPT_TOKENS] + metrics[GENERATION_TOKENS])


def boot_time_s(proc: Path = Path("/proc")) -> float | None:
    """Unix time at which this kernel started, None where /proc does not tell."""
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "stat").read_text().splitlines():
            if line.startswith("btime "):
                return float(line.split()[1])
    return None


def is_alive(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether the process runs. A zombie, dead but not yet collected by its parent, does not."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    try:
        # The name in parentheses may hold anything, so the state is found behind the last one. Not readable (another
        # system, hidepid) is not dead: kill() has just said that there is such a process.
        return (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return True


def _read(path: Path) -> tuple[dict | None, str | None]:
    try:
        with open(path, "rb") as stream:
            text = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"{path.name} cannot be read ({error.strerror or error})"
    if len(text) > MAX_FILE_BYTES:
        return None, f"{path.name} is longer than {MAX_FILE_BYTES} bytes"
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None, f"{path.name} is not JSON"
    if not isinstance(record, dict):
        return None, f"{path.name} is not a JSON object"
    return record, None


def _typed(record: Mapping, name: str, kind: type, *, required: bool = False):
    """record[name] as `kind`, None where it is absent or null. ValueError names the key."""
    value = record.get(name)
    if value is None:
        if required:
            raise ValueError(f"{name} is missing")
        return None
    accepted = (int, float) if kind is float else kind
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise ValueError(f"{name} is not {kind.__name__}")
    if kind is float:
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise ValueError(f"{name} is not finite")
    if kind is int and not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} is out of range")
    return value
