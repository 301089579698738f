"""Starts `vllm serve` as a child, and decides from its log, its life and the healthcheck's word when to end, and with which code.

Order of the rules, each turn of the loop
1. a stop signal: forwarded once; the engine has the drain time and `STOP_MARGIN_S` to go, then its process group is killed. Exit 0:
   it was asked for. (vLLM 0.30.0 can wait for ever for an open stream whose engine is gone.) A second signal kills at once.
2. the child ended: 6 before it ever served, 7 after. The log's last lines are matched with the known failures.
3. a boot phase over its limit: killed, 6, and the phase is named.
4. serving, and the healthcheck has said `hung` for `HUNG_GRACE_S`: killed, 7. Docker restarts what exits, not what is unhealthy.

When the engine serves, its own start-up report (log and /metrics) is compared with the plan, once: startup.py. That never ends a run.

As PID 1 it also reaps the orphans that a dying engine leaves. Log lines pass through unchanged and unbuffered.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Mapping, Sequence

from . import boot, startup
from .boot import Follower, StateFile
from .errors import Exit, Refusal
from .plan import Plan
from .units import format_gib

STOP_MARGIN_S = 2.0
HUNG_GRACE_S = 60.0
TAIL_LINES = 400
_TURN_S = 0.1
_METRICS_LIMIT_S = 10.0
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}


class Supervisor:
    """One engine run. `run` blocks until the engine is gone and returns the exit code."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        state: StateFile,
        *,
        weight_bytes: int = 0,
        drain_s: float = 5.0,
        phase_limit_s: float | None = None,
        plan: Plan | None = None,
        out=None,
    ):
        self.argv, self.env, self.state = list(argv), dict(env), state
        self.weight_bytes, self.drain_s, self.phase_limit_s = weight_bytes, drain_s, phase_limit_s
        self.out = out or sys.stdout.buffer
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.follower = Follower()
        self.plan, self.report = plan, startup.Report()
        self.served = False
        self._signals = 0
        self._stop_at: float | None = None
        self._lock = threading.Lock()

    def run(self) -> int:
        """Start the engine and stay with it. Raises Refusal (code 6) where it cannot be started at all."""
        previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._enter("launching")
            try:
                child = subprocess.Popen(
                    self.argv,
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as e:
                raise Refusal(
                    f"the engine cannot be started: {self.argv[0]}: {e.strerror}",
                    "run inside the image, or in an environment where `vllm` is installed",
                    Exit.ENGINE_START,
                ) from None
            reader = threading.Thread(target=self._read, args=(child.stdout,), daemon=True)
            reader.start()
            code = self._watch(child)
            reader.join(timeout=2)
            return code
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    # --- the log ---

    def _read(self, stream) -> None:
        pending = b""
        while chunk := os.read(stream.fileno(), 65536):
            self.out.write(chunk)
            self.out.flush()
            *lines, pending = (pending + chunk).replace(b"\r", b"\n").split(b"\n")
            for raw in lines:
                if raw.strip():
                    self._line(raw.decode("utf-8", "replace"))
        if pending.strip():
            self._line(pending.decode("utf-8", "replace"))

    def _line(self, line: str) -> None:
        with self._lock:
            self.tail.append(line)
            if self.served or self._signals:
                return
            phase, progress = self.follower.feed(line)
            if phase:
                self._enter(phase)
                self.served = phase == "serving"
            if progress is not None:
                self.state.update(progress=progress)
            if self.plan is not None:
                self.report.feed(line)
                if self.served:
                    threading.Thread(target=self._compare, args=(self.plan,), daemon=True).start()

    def _compare(self, plan: Plan) -> None:
        """Tell how the start-up report compares with the plan. /metrics has what no line of the log says; without it the rest counts."""
        state = self.state.state
        host = _ANY_HOST.get(state.host, f"[{state.host}]" if ":" in state.host else state.host)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(f"http://{host}:{state.port}/metrics", timeout=_METRICS_LIMIT_S) as answer:
                for line in answer.read().decode("utf-8", "replace").splitlines():
                    self.report.feed(line)
        except (OSError, ValueError):
            pass
        verdict = startup.compare(plan, self.report)
        self.state.update(startup=verdict.as_dict())
        for line in verdict.lines():
            self._say(line)

    def _enter(self, phase: str) -> None:
        limit = boot.phase_named(phase).longest_s(self.weight_bytes, self.phase_limit_s)
        self.state.update(phase, deadline_s=None if limit is None else time.time() + limit)

    # --- life and death ---

    def _on_signal(self, number, frame) -> None:
        self._signals += 1

    def _watch(self, child: subprocess.Popen) -> int:
        forwarded = 0
        status: int | None = None
        while status is None:
            status = self._reap(child)
            if status is not None:
                break
            if self._signals and not forwarded:
                forwarded = 1
                self._stop_at = time.monotonic() + self.drain_s + STOP_MARGIN_S
                self.state.update("stopping", deadline_s=time.time() + self.drain_s + STOP_MARGIN_S)
                self._say(f"stopping: running requests have {self.drain_s:g} s")
                child.send_signal(signal.SIGTERM)
            if forwarded and (self._signals > 1 or time.monotonic() > self._stop_at):
                if self._signals <= 1:
                    self._say("the engine did not go in time and is killed")
                self._kill_group(child)
                break
            if not forwarded and (refusal := self._stuck() or self._hung()):
                self._kill_group(child)
                return self._fail(refusal)
            time.sleep(_TURN_S)
        self._kill_group(child)
        if forwarded:
            self.state.update("stopped", exit_code=int(Exit.OK), pid=None)
            return Exit.OK
        return self._fail(self._died(status))

    def _reap(self, child: subprocess.Popen) -> int | None:
        """The child's exit status, or None while it lives. As PID 1, orphans are collected on the way."""
        if os.getpid() != 1:
            return child.poll()
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return child.returncode if child.returncode is not None else 0
            if pid == 0:
                return None
            if pid == child.pid:
                child.returncode = os.waitstatus_to_exitcode(status)
                return child.returncode

    def _kill_group(self, child: subprocess.Popen) -> None:
        """End whatever is left of the engine: it was started as the leader of a session of its own."""
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        for _ in range(50):
            if self._reap(child) is not None:
                return
            time.sleep(_TURN_S)

    def _stuck(self) -> Refusal | None:
        state = self.state.state
        if self.served or state.deadline_s is None or time.time() < state.deadline_s:
            return None
        stuck = f"the boot is stuck: {state.label} takes longer than {time.time() - state.since_s:.0f} s"
        with self._lock:
            known = boot.explain(self.tail)
        if known:
            return Refusal(f"{stuck}: {known[0][0].error}", known[0][0].fix, Exit.ENGINE_START)
        return Refusal(
            stuck, "see the engine's last lines above; FLASHNEXT_BOOT_TIMEOUT raises the limit", Exit.ENGINE_START
        )

    def _hung(self) -> Refusal | None:
        if not self.served:
            return None
        try:
            health = json.loads((self.state.path.parent / "health.json").read_text(encoding="utf-8"))
            hung = health["status"] == "hung" and health["since_s"] >= self.state.state.since_s
            lasted = health["checked_s"] - health["since_s"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not hung or lasted < HUNG_GRACE_S:
            return None
        return Refusal(
            f"the engine hangs: {health.get('detail') or 'no token came'}",
            "it is ended so that it can be restarted; if this comes back, run `flashnext explain` on the log",
            Exit.ENGINE_DIED,
        )

    def _died(self, status: int) -> Refusal:
        how = f"was killed by signal {signal.Signals(-status).name}" if status < 0 else f"exited with code {status}"
        with self._lock:
            known = boot.explain(self.tail)
        code = Exit.ENGINE_DIED if self.served else Exit.ENGINE_START
        when = "" if self.served else f" while {self.state.state.label}"
        if known:
            row = known[0][0]
            return Refusal(
                f"the engine {how}{when}: {row.error}",
                row.fix + (self._needs() if row.id == "ram-killed" else ""),
                code,
            )
        if status == -signal.SIGKILL:
            return Refusal(
                f"the engine {how}{when}",
                f"most often memory: see `dmesg` and the container's limit{self._needs()}",
                code,
            )
        return Refusal(
            f"the engine {how}{when}", "see its last lines above, or run `flashnext explain` on the log", code
        )

    def _needs(self) -> str:
        """How much RAM the plan counts on, as the end of a sentence."""
        lines = self.plan.host if self.plan else ()
        need = sum(line.bytes for line in lines if not line.what.startswith("left"))
        return f"; the plan needs {format_gib(need)} of RAM beside the page cache" if need else ""

    def _fail(self, refusal: Refusal) -> int:
        self.state.update("failed", exit_code=int(refusal.code), reason=refusal.message, pid=None)
        refusal.print()
        return refusal.code

    def _say(self, text: str) -> None:
        sys.stderr.write(f"flashnext: {text}\n")
        sys.stderr.flush()
