"""Decides whether this server is healthy: one real token through the OpenAI API, or a reason why not.

    flashnext-health [--url U] [--model M] [--api-key-file F] [--state-dir D] [--timeout S] [--stall S] [--json]

From: the supervisor's state.json, one token asked for, vLLM's /health and /metrics, the last probe's health.json.
/health and /v1/models alone prove nothing: in vLLM both answer 200 while the engine behind them hangs.

Rule order, the first that applies:
 1. state.json, where there is one that can be used (records.py says when; otherwise a note, and rule 2):
      stopped, failed                                   dead
      its pid is gone                                   dead
      past its deadline, in any phase before serving,
        or stopping                                     hung
      a phase before serving                            starting
      stopping                                          refused
      serving, or a phase this probe does not know      rule 2
 2. The model's name from --model, state.json or /v1/models; then a chat completion of one token, and where the server
    has no chat template, a plain completion. A token (usage.completion_tokens, or any text, reasoning or tool call) is
    healthy. Everything else is in the tables below (FAULT_MEANS, HTTP_MEANS):
      no connection, reset, not HTTP, not JSON          dead
      200 without a token, 500, 502                     dead (vLLM answers 500 when its engine died)
      400 404 405 422 501                               the other kind of completion; after both, refused
      401 403, any other 3xx or 4xx                     refused
      408 429 503 504, or no answer in time             rule 3
 3. Busy is not dead. /health and /metrics are asked, in time kept back for them:
      /health says 503, or the server went away         dead
      neither answers (a busy engine does not keep
        vLLM's front end from answering these)          hung
      a progress mark moved (records.py has the list)
        during this probe or since the last one         busy
      nothing moved, for less than --stall seconds      busy, with a note
      nothing moved for --stall seconds                 hung
    "Since" needs health.json: where it cannot be written, nothing is ever older than one probe and hung is not
    found this way. A record older than --stall is forgotten, so probe more often than that. Without counters (/metrics
    refused, --disable-log-stats) nothing can be seen to move and the same limit holds.
    A prompt of 12,160 tokens, one block of the model this kit is for, moves a mark at least once: 300 s is enough down
    to a prefill of 41 tokens a second.

Exit codes: 0 healthy or busy, 1 everything else, also a usage error (Docker reserves 2). `starting` exits 1 because
it is true everywhere; under Docker the start period absorbs it: a failure in it does not count as one.

The whole probe ends within --timeout seconds, the interpreter's own start not counted: a server that trickles, a name
that does not resolve and a directory on a dead mount included. Give Docker's own --timeout two seconds more.
With --url alone, neither state.json nor health.json is touched: they are about the server of this container.
The standard library only, see wire.py.
"""

import argparse
import dataclasses
import math
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from . import records
from .records import Health, State
from .wire import Reply, Server, ask

HEALTHY, BUSY, STARTING, HUNG, DEAD, REFUSED = "healthy", "busy", "starting", "hung", "dead", "refused"
EXIT = {HEALTHY: 0, BUSY: 0, STARTING: 1, HUNG: 1, DEAD: 1, REFUSED: 1}

# What is not a status yet: ask the other way; or look at the counters (rule 3).
OTHER_WAY, NO_TOKEN = "other way", "no token"

BOOT, PROBE = "boot", "probe"
PHASES = {
    **dict.fromkeys(("planning", "preparing", "launching", "loading", "allocating", "warming", "capturing"), BOOT),
    "serving": PROBE,
    "stopping": REFUSED,
    "stopped": DEAD,
    "failed": DEAD,
}

FAULT_MEANS = {
    "closed": DEAD,
    "unresolved": DEAD,
    "reset": DEAD,
    "garbage": DEAD,
    "too long": DEAD,
    "silent": NO_TOKEN,
}
HTTP_MEANS = {
    **dict.fromkeys((400, 404, 405, 422, 501), OTHER_WAY),
    **dict.fromkeys((408, 429, 503, 504), NO_TOKEN),
}
HTTP_CLASS_MEANS = {3: REFUSED, 4: REFUSED}

QUESTION = "Say hi."
# No temperature, so the server's own sampling settings, as its users get them: at temperature 0 vLLM skips the sampler,
# and an engine whose sampler cannot be compiled gives the probe a token and dies at the first user.
WAYS = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}]}),
    ("/v1/completions", {"prompt": QUESTION}),
)

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_STATE_DIR = "/run/flashnext"
# A server that listens everywhere is asked on the loopback.
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
DEFAULT_TIMEOUT_S = 20.0
DEFAULT_STALL_S = 300.0
# Kept back from the token's time for rule 3: a quarter, and never more than this.
LAST_QUESTIONS_S = 5.0
MAX_DETAIL_CHARS = 400


@dataclass(frozen=True)
class Options:
    """What the probe was asked to do. `server` None: from state.json, else DEFAULT_URL."""

    server: Server | None
    model: str | None
    key: str | None
    key_words: str
    state_dir: Path | None
    timeout_s: float
    stall_s: float


@dataclass(frozen=True)
class Finding:
    """What this probe alone saw. `status` may still be NO_TOKEN; `moved` is whether a mark moved while it waited."""

    status: str
    detail: str
    latency_s: float | None = None
    metrics: dict[str, float] | None = None
    moved: bool = False

    @property
    def marks(self) -> dict[str, float] | None:
        return records.progress_marks(self.metrics) if self.metrics else None


def from_state(state: State, *, now_s: float, alive: bool | None) -> Finding | None:
    """Rule 1. `alive` is None where the state names no process. None means: ask the server."""
    meaning = PHASES.get(state.phase, PROBE)
    words = f"{state.label} ({state.phase})" if state.label else state.phase
    if meaning == DEAD:
        code = f", exit code {state.exit_code}" if state.exit_code is not None else ""
        return Finding(DEAD, f"{words}{code}" + (f": {state.reason}" if state.reason else ""))
    if alive is False:
        return Finding(DEAD, f"process {state.pid} is gone; its last word was {words}")
    if meaning == PROBE:
        return None
    words += f", {_ago(now_s - state.since_s)} so far"
    if meaning == BOOT and state.progress is not None:
        words += f", {100 * min(max(state.progress, 0.0), 1.0):.0f} %"
    if state.deadline_s is None:
        return Finding(STARTING if meaning == BOOT else meaning, words)
    left_s = state.deadline_s - now_s
    if left_s < 0:
        return Finding(HUNG, f"{words}: {_ago(-left_s)} past the limit of this phase")
    return Finding(STARTING if meaning == BOOT else meaning, f"{words}, at most {_ago(left_s)} more")


def from_server(server: Server, *, model: str | None, key: str | None, key_words: str, deadline: float) -> Finding:
    """Rules 2 and 3, without the history. `deadline` is time.monotonic()'s; it is kept, whatever the server does."""
    began = time.monotonic()
    last_questions_s = min(LAST_QUESTIONS_S, 0.25 * (deadline - began))
    patience = deadline - last_questions_s

    def sample(until: float) -> dict[str, float] | None:
        reply = ask(server, "/metrics", key=key, deadline=until)
        return records.parse_metrics(reply.body) or None if reply.status == 200 else None

    before = None
    if model is None:
        reply = ask(server, "/v1/models", key=key, deadline=patience)
        meaning, words = judge(reply, key_words)
        model = _first_model(reply)
        if meaning == HEALTHY and model is None:
            return Finding(DEAD, "/v1/models names no model")
        if meaning not in (HEALTHY, NO_TOKEN):
            return Finding(REFUSED if meaning == OTHER_WAY else meaning, f"/v1/models: {words}")
    if model is not None:
        before = sample(min(patience, time.monotonic() + last_questions_s))
        note = ""
        for path, body in WAYS:
            request = {"model": model, "max_tokens": 1, **body}
            reply = ask(server, path, key=key, body=request, deadline=patience)
            meaning, words = judge(reply, key_words)
            if meaning != OTHER_WAY:
                break
            note += f"; {path}: {words}"
        if meaning == OTHER_WAY:
            return Finding(REFUSED, note.removeprefix("; "))
        if meaning == HEALTHY:
            if not has_token(reply.json()):
                return Finding(DEAD, f"{path} answers without a token: {_excerpt(reply)}")
            detail = f"one token from {model} in {reply.took_s:.2f} s{note}"
            after = sample(min(deadline, time.monotonic() + last_questions_s))
            return Finding(HEALTHY, detail, reply.took_s, after)
        if meaning != NO_TOKEN:
            return Finding(meaning, f"{path}: {words}")

    waited = f"no token in {time.monotonic() - began:.1f} s" + (f" ({words})" if reply.status else "")
    health = ask(server, "/health", key=key, deadline=time.monotonic() + 0.5 * (deadline - time.monotonic()))
    if health.status == 503:
        return Finding(DEAD, f"{waited}, and /health says 503: the engine is dead")
    if health.fault and FAULT_MEANS[health.fault] == DEAD:
        return Finding(DEAD, f"{waited}, then /health: {health.detail}")
    after = sample(deadline)
    if health.fault and after is None:
        return Finding(HUNG, f"{waited}, and neither /health nor /metrics answers")
    if after is None:
        return Finding(NO_TOKEN, f"{waited}; /metrics has no counters to look at")
    moved = before is not None and records.progress_marks(before) != records.progress_marks(after)
    counts = [f"{after[name]:.0f} {word}" for name, word in _GAUGES if name in after]
    return Finding(NO_TOKEN, f"{waited}; requests: {', '.join(counts) or 'not counted'}", None, after, moved)


_GAUGES = ((records.RUNNING, "running"), (records.WAITING, "waiting"))


def judge(reply: Reply, key_words: str) -> tuple[str, str]:
    """What one reply means: a status, OTHER_WAY or NO_TOKEN, and words. HEALTHY is only "200 and JSON" here."""
    if reply.fault:
        return FAULT_MEANS[reply.fault], reply.detail or "no complete answer in time"
    words = f"HTTP {reply.status}: {_excerpt(reply)}"
    if reply.status == 200:
        return (HEALTHY, "") if isinstance(reply.json(), dict) else (DEAD, f"not a JSON object: {_excerpt(reply)}")
    if reply.status in (401, 403):
        return REFUSED, f"HTTP {reply.status}, {key_words}"
    return HTTP_MEANS.get(reply.status, HTTP_CLASS_MEANS.get(reply.status // 100, DEAD)), words


def has_token(answer: object) -> bool:
    """Whether a completion, chat or plain, carries at least one generated token."""
    if not isinstance(answer, dict):
        return False
    usage = answer.get("usage")
    if isinstance(usage, dict):
        count = usage.get("completion_tokens")
        if isinstance(count, int) and count >= 1:
            return True
    choices = answer.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        if not isinstance(choice, dict):
            continue
        for part in (choice, choice.get("message"), choice.get("delta")):
            if isinstance(part, dict) and any(part.get(name) for name in _TOKEN_TEXT):
                return True
    return False


_TOKEN_TEXT = ("text", "content", "reasoning", "reasoning_content", "tool_calls")


def decide(
    finding: Finding, previous: Health | None, *, url: str, began_s: float, now_s: float, stall_s: float
) -> Health:
    """Rule 3's history: turn a finding and the last probe's record into this probe's record. Pure.

    `began_s` and `now_s` are this probe's first and last moment, Unix seconds.
    """
    if previous and not (previous.url == url and 0 <= now_s - previous.checked_s <= stall_s):
        previous = None
    status, detail, marks = finding.status, finding.detail, finding.marks
    no_progress_since_s = None
    if status == NO_TOKEN:
        comparable = previous is not None and previous.marks is not None and marks is not None
        if finding.moved or (comparable and previous.marks != marks):
            status, detail = BUSY, f"the engine works: {detail}"
        else:
            no_progress_since_s = began_s
            if previous and previous.no_progress_since_s is not None:
                no_progress_since_s = previous.no_progress_since_s
            elif comparable:
                no_progress_since_s = previous.checked_s
            stalled_s = now_s - no_progress_since_s
            status = HUNG if stalled_s >= stall_s else BUSY
            limit = f"the limit is {_ago(stall_s)}" if status == HUNG else f"hung at {_ago(stall_s)}"
            detail = f"no progress for {_ago(stalled_s)}, {limit}: {detail}"
    return Health(
        status=status,
        since_s=previous.since_s if previous and previous.status == status else now_s,
        checked_s=now_s,
        detail=_clean(detail),
        latency_s=finding.latency_s,
        tokens_total=records.tokens_total(finding.metrics) if finding.metrics else None,
        url=url,
        marks=marks,
        no_progress_since_s=no_progress_since_s,
    )


def probe(options: Options, *, deadline: float) -> Health:
    """The whole probe, health.json included. `deadline` is time.monotonic()'s."""
    began_s = time.time()
    state, note = None, None
    if options.state_dir:
        state, note = records.read_state(options.state_dir, boot_s=records.boot_time_s())
    server = options.server
    if server is None:
        server = Server.from_url(DEFAULT_URL)
        if state:
            host = state.host if state.host is not None else server.host
            server = dataclasses.replace(
                server, host=ANY_ADDRESS.get(host, host), port=server.port if state.port is None else state.port
            )
    finding = None
    if state:
        alive = None if state.pid is None else records.is_alive(state.pid)
        finding = from_state(state, now_s=began_s, alive=alive)
        if state.phase not in PHASES:
            note = f"state.json has a phase that this probe does not know, {state.phase!r}"
    if finding is None:
        model = options.model or (state.model if state else None)
        finding = from_server(server, model=model, key=options.key, key_words=options.key_words, deadline=deadline)
    if note:
        finding = dataclasses.replace(finding, detail=f"{finding.detail}; {note}")
    previous = records.read_health(options.state_dir) if options.state_dir else None
    times = {"began_s": began_s, "now_s": time.time(), "stall_s": options.stall_s}
    health = decide(finding, previous, url=str(server), **times)
    if options.state_dir and options.state_dir.is_dir():
        trouble = records.write_health(options.state_dir, health)
        if trouble:
            health = dataclasses.replace(health, detail=_clean(f"{health.detail}; {trouble}"))
    return health


def main(argv: list[str] | None = None) -> int:
    began = time.monotonic()
    arguments = _parser().parse_args(argv)
    try:
        options = _options(arguments)
    except ValueError as error:
        return _usage_error(str(error))
    # What a socket's deadline does not reach (a resolver, a dead mount) is left behind in a daemon thread.
    result: list[Health | BaseException] = []

    def work() -> None:
        try:
            result.append(probe(options, deadline=began + 0.95 * options.timeout_s))
        except BaseException as error:
            result.append(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(began + options.timeout_s - time.monotonic())
    if not result:
        now_s = time.time()
        health = Health(
            HUNG, now_s, now_s, "the probe itself did not end: a name that does not resolve, or a dead mount"
        )
    elif isinstance(result[0], BaseException):
        raise result[0]
    else:
        health = result[0]
    print(health.to_json() if arguments.json else _ascii(f"{health.status}: {health.detail}"))
    return EXIT[health.status]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        self.exit(_usage_error(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="flashnext-health",
        description="Ask the server for one real token. Exit 0: healthy or busy. Exit 1: everything else.",
    )
    parser.add_argument("--url", help=f"server to ask (default: the one in state.json, else {DEFAULT_URL})")
    parser.add_argument("--model", help="model to ask (default: the first that the server lists)")
    parser.add_argument("--api-key-file", metavar="FILE", help="default: $FLASHNEXT_API_KEY_FILE, else $VLLM_API_KEY")
    parser.add_argument(
        "--state-dir", metavar="DIR", help=f"default: $FLASHNEXT_STATE_DIR, else {DEFAULT_STATE_DIR}; none with --url"
    )
    parser.add_argument("--timeout", metavar="S", default=DEFAULT_TIMEOUT_S, help="for the whole probe (default: 20)")
    parser.add_argument(
        "--stall",
        metavar="S",
        default=os.environ.get("FLASHNEXT_STALL_TIMEOUT") or DEFAULT_STALL_S,
        help="no progress for so long is hung, not busy (default: $FLASHNEXT_STALL_TIMEOUT, else 300)",
    )
    parser.add_argument("--json", action="store_true", help="print the health record instead of one line")
    return parser


def _options(arguments: argparse.Namespace) -> Options:
    """ValueError says which option is wrong."""
    state_dir = arguments.state_dir
    if state_dir is None and arguments.url is None:
        state_dir = os.environ.get("FLASHNEXT_STATE_DIR") or DEFAULT_STATE_DIR
    key, key_words = _key(arguments.api_key_file)
    return Options(
        server=None if arguments.url is None else Server.from_url(arguments.url),
        model=arguments.model,
        key=key,
        key_words=key_words,
        state_dir=Path(state_dir) if state_dir else None,
        timeout_s=_seconds("--timeout", arguments.timeout),
        stall_s=_seconds("--stall", arguments.stall),
    )


def _seconds(name: str, text: str | float) -> float:
    words = str(text).strip()
    # the wishes' spelling: 90, 90s, 15m, 1h
    factor = {"s": 1, "m": 60, "h": 3600}.get(words[-1:], 0)
    try:
        value = float(words[:-1].strip()) * factor if factor else float(words)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and 0 < value <= threading.TIMEOUT_MAX):
        raise ValueError(f"{name} {text}: not a number of seconds above 0")
    return value


def _key(path: str | None) -> tuple[str | None, str]:
    """The API key, and what to say if the server refuses it. A key that cannot be read is found out by the 401."""
    path = path or os.environ.get("FLASHNEXT_API_KEY_FILE")
    if not path:
        key = os.environ.get("VLLM_API_KEY")
        if key:
            return key, "the server refuses the API key in VLLM_API_KEY"
        return None, "the server wants an API key: name its file with --api-key-file or FLASHNEXT_API_KEY_FILE"
    try:
        key = Path(path).read_text().strip()
    except (OSError, UnicodeError) as error:
        return None, f"the server wants an API key and {path} cannot be read ({getattr(error, 'strerror', 'not text')})"
    if not key or not (key.isascii() and key.isprintable()):
        return None, f"the server wants an API key and {path} does not hold one line of printable ASCII"
    return key, f"the server refuses the API key in {path}"


def _usage_error(message: str) -> int:
    print(f"ERROR: {message}", file=sys.stderr)
    print("Fix: flashnext-health --help lists the options", file=sys.stderr)
    return 1


def _first_model(reply: Reply) -> str | None:
    record = reply.json() if reply.status == 200 else None
    entries = record.get("data") if isinstance(record, dict) else None
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("id"), str) and entry["id"]:
            return entry["id"]
    return None


def _excerpt(reply: Reply) -> str:
    """The server's own words: its error message, or the beginning of what it sent."""
    record = reply.json()
    error = record.get("error", record.get("detail", record.get("message"))) if isinstance(record, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    text = error if isinstance(error, str) else reply.body[:200].decode(errors="replace")
    return _clean(text)[:160] or "an empty body"


def _clean(text: str) -> str:
    """One line, nothing that a terminal would obey."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(line.split())[:MAX_DETAIL_CHARS]


def _ascii(text: str) -> str:
    # Docker runs the probe with no locale set.
    return text.encode("ascii", "backslashreplace").decode()


def _ago(seconds: float) -> str:
    seconds = max(seconds, 0.0)
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
