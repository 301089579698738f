"""`./flashnext up | down | logs | status | test`: decides how this machine can run the kit, and runs it.

Rule order of `up`
1. no Docker Engine answers: the demo engine from an environment of our own (.flashnext/engine), same entrypoint.
2. Docker and no NVIDIA card: the CPU demo, service `demo` of compose.yaml, its images built here where they are missing.
3. Docker and cards: the plan is shown (a refusal ends it), the image is pulled or built, service `server` starts.
Then it waits, showing the boot phases, until the healthcheck has had a real token; the endpoint and a curl line are printed.
`--demo` takes rule 2 on a box with cards.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import docker.errors
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from . import engine_env
from .engine import connect
from .errors import Exit, Refusal
from .image import CPU_BASE_FROM, CPU_BASE_TAG, REPOSITORY

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
err = Console(stderr=True, highlight=False, soft_wrap=True)
LOCAL = REPOSITORY / ".flashnext" / "run"
BOOT_LIMIT_S = 3 * 3600  # the supervisor's own limits end a boot long before
_TURN_S = 1.0


def _environ() -> dict[str, str]:
    """The environment for our own modules: found from any directory."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def _module(
    name: str, *args: str, capture: bool = False, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", name, *args], env={**_environ(), **(env or {})}, capture_output=capture, text=True
    )


def _compose(*args: str, capture: bool = False) -> subprocess.CompletedProcess:
    """docker compose on our file, with the caller's .env."""
    command = ["docker", "compose", "--project-directory", str(REPOSITORY), "-f", str(REPOSITORY / "compose.yaml")]
    if Path(".env").is_file():
        command += ["--env-file", str(Path(".env").resolve())]
    try:
        return subprocess.run([*command, "--profile", "demo", *args], capture_output=capture, text=True)
    except FileNotFoundError:
        raise Refusal(
            "the `docker` command is not on PATH", "install Docker with its compose plugin (2.24 or newer)"
        ) from None


def _config() -> dict[str, Any]:
    """compose.yaml as compose itself resolves it. Raises Refusal (code 2 or 8)."""
    done = _compose("config", "--format", "json", capture=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        if "is not a docker command" in done.stderr or "unknown flag" in done.stderr:
            raise Refusal("docker has no compose plugin", "install docker-compose-plugin, version 2.24 or newer")
        raise Refusal(f"compose cannot read its settings: {last}", "check .env against .env.example", Exit.USAGE)
    return json.loads(done.stdout)


def _card_trouble() -> str | None:
    """None where NVML lists cards, else its reason in words. A malformed wish ends here with its own two lines."""
    done = _module("entrypoint", "doctor", "--json", capture=True)
    try:
        findings = json.loads(done.stdout)
    except ValueError:
        sys.stderr.write(done.stderr)
        raise typer.Exit(done.returncode or int(Exit.USAGE)) from None
    return next((f["detail"] for f in findings if f["point"] == "cards" and f["verdict"] == "FAIL"), None)


# --- up ---


@app.command()
def up(demo: Annotated[bool, typer.Option("--demo", help="The CPU demo, also where there are cards.")] = False) -> None:
    """Start the server and wait for a real token."""
    trouble = _card_trouble()
    try:
        client = connect(timeout_s=60)
    except Refusal as e:
        err.print(f"flashnext: {e.message}")
        if trouble is None and not demo:
            raise
        err.print(
            "flashnext: running the CPU demo from .flashnext/engine; with Docker you would get the same in one sealed image, restarted when it fails"
        )
        return _up_local()
    if demo or trouble is not None:
        err.print(
            f"flashnext: {'the demo was asked for' if demo else trouble}; running the CPU demo (a tiny random model, to see the path work)"
        )
        _demo_images(client)
        return _up_compose(client, "demo")
    config = _config()
    server = config["services"]["server"]
    folder = next(v["source"] for v in server["volumes"] if v["target"] == "/model")
    shown = _module("entrypoint", "plan", "--model", folder)
    if shown.returncode:
        raise typer.Exit(shown.returncode)
    _server_image(client, server["image"], server["build"]["args"]["BASE_IMAGE"])
    return _up_compose(client, "server")


def _has(client, tag: str) -> bool:
    try:
        client.images.get(tag)
    except docker.errors.ImageNotFound:
        return False
    return True


def _built(*args: str) -> None:
    done = _module("build", *args)
    if done.returncode:
        raise typer.Exit(done.returncode)


def _demo_images(client) -> None:
    demo = _config()["services"]["demo"]
    base = demo["build"]["args"]["BASE_IMAGE"]
    if not _has(client, base):
        if base != CPU_BASE_TAG:
            raise Refusal(
                f"the base image {base} is not here",
                f"build it, or unset FLASHNEXT_CPU_BASE_IMAGE to build {CPU_BASE_TAG}",
            )
        _built("cpu-base", "--base", os.environ.get("FLASHNEXT_PYTHON_IMAGE") or CPU_BASE_FROM)
    _built("build", "--base", base, "--tag", demo["image"], "--context", str(REPOSITORY))


def _server_image(client, tag: str, base: str) -> None:
    if _has(client, tag):
        return
    if "/" in tag and _module("build", "pull", tag).returncode == 0:
        return
    _built("build", "--base", base, "--tag", tag, "--context", str(REPOSITORY))


def _start(client, service: str) -> subprocess.CompletedProcess:
    """`compose up`, and meanwhile what `prepare` says of its progress: it may have a table of 95 GiB to copy."""
    project, begun, said = _config()["name"], int(time.time()), 0
    label = [f"com.docker.compose.project={project}", "com.docker.compose.service=prepare"]
    with ThreadPoolExecutor(1) as pool:
        up = pool.submit(_compose, "up", "--detach", "--no-build", service, capture=True)
        while True:
            ended, lines = up.done(), []
            with contextlib.suppress(docker.errors.APIError):  # compose is just replacing the container
                for container in client.containers.list(all=True, filters={"label": label}):
                    lines += container.logs(stdout=False, since=begun).decode("utf-8", "replace").splitlines()
            told = [line for line in lines if line.startswith("flashnext: ")]
            for line in told[said:]:
                err.print(line)
            said = len(told)
            if ended:
                return up.result()
            time.sleep(_TURN_S)


def _up_compose(client, service: str) -> None:
    done = _start(client, service)
    if done.returncode:
        _compose_failed(client, done.stderr)
    found = _compose("ps", "--all", "--quiet", service, capture=True).stdout.split()
    if not found:
        raise Refusal(f"compose started no container for {service}", "see `./flashnext logs`")
    container = client.containers.get(found[0])

    def look() -> tuple[str, dict[str, Any], int | None]:
        container.reload()
        state = container.attrs["State"]
        if state["Status"] in {"exited", "dead"}:
            return "ended", {}, state["ExitCode"]
        text = ""
        if state["Status"] == "running":
            code, out = container.exec_run(["cat", "/run/flashnext/state.json"])
            text = out.decode("utf-8", "replace") if code == 0 else ""
        return (state.get("Health") or {}).get("Status", "starting"), _json(text), None

    code = _wait(look)
    if code is not None:
        sys.stderr.write(_last_words(container.logs(tail=400).decode("utf-8", "replace")))
        raise typer.Exit(code or int(Exit.DOCKER))
    ports = container.attrs["NetworkSettings"]["Ports"].get("8000/tcp") or []
    host, port = (ports[0]["HostIp"], ports[0]["HostPort"]) if ports else ("127.0.0.1", "8000")
    key = os.environ.get("FLASHNEXT_API_KEY_FILE") or _config()["secrets"]["flashnext_api_key"]["file"]
    _endpoint(host, port, _model(look()[1]), key not in {"/dev/null", ""})


def _compose_failed(client, text: str) -> None:
    """Tell what compose said in two lines. A failed `prepare` has said it better: its lines and exit code are passed on."""
    found = _compose("ps", "--all", "--quiet", "prepare", capture=True).stdout.split()
    for name in found:
        container = client.containers.get(name)
        code = container.attrs["State"]["ExitCode"]
        if container.attrs["State"]["Status"] == "exited" and code:
            sys.stderr.write(_last_words(container.logs(tail=100).decode("utf-8", "replace")))
            raise typer.Exit(code)
    last = (text.strip().splitlines() or ["no output"])[-1]
    table = (
        ("could not select device driver", "install the NVIDIA Container Toolkit and restart Docker"),
        ("port is already allocated", "stop what uses the port, or set FLASHNEXT_PORT to a free one"),
        ("address already in use", "stop what uses the port, or set FLASHNEXT_PORT to a free one"),
        (
            "bind source path does not exist",
            "set FLASHNEXT_MODEL_DIR to the folder of the checkpoint, FLASHNEXT_API_KEY_FILE to a file",
        ),
        ("error setting rlimit", "this Docker may not raise limits: see README, Rootless and nested Docker"),
    )
    fix = next((f for words, f in table if words in text), "see `docker compose logs`")
    raise Refusal(f"compose could not start it: {last}", fix)


def _up_local() -> None:
    if (running := _local()) is not None:
        raise Refusal(
            f"it is running already (pid {running['pid']})", "./flashnext status, or ./flashnext down", Exit.USAGE
        )
    python = engine_env.ensure()
    LOCAL.mkdir(parents=True, exist_ok=True)
    for stale in ("state.json", "health.json"):
        (LOCAL / stale).unlink(missing_ok=True)
    data = REPOSITORY / ".flashnext" / "demo"
    env = {
        **_environ(),
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLASHNEXT_DEVICE": "cpu",
        "FLASHNEXT_MODEL": str(data / "model"),
        "FLASHNEXT_MODEL_NAME": os.environ.get("FLASHNEXT_MODEL_NAME") or "demo",
        "FLASHNEXT_DATA": str(data),
        "FLASHNEXT_STATE_DIR": str(LOCAL),
        "FLASHNEXT_HOST": os.environ.get("FLASHNEXT_HOST") or "127.0.0.1",
    }
    with open(LOCAL / "server.log", "wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "entrypoint", "serve"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    probe = 0.0

    def look() -> tuple[str, dict[str, Any], int | None]:
        nonlocal probe
        state = _json(_text(LOCAL / "state.json"))
        if (code := child.poll()) is not None:
            return "ended", state, code
        if state.get("phase") == "serving" and time.monotonic() >= probe:
            probe = time.monotonic() + 5
            if _module("healthcheck", "--state-dir", str(LOCAL), capture=True).returncode == 0:
                return "healthy", state, None
        return "starting", state, None

    code = _wait(look)
    if code is not None:
        sys.stderr.write(_last_words(_text(LOCAL / "server.log")))
        raise typer.Exit(code or int(Exit.DOCKER))
    state = _json(_text(LOCAL / "state.json"))
    _endpoint(state["host"], str(state["port"]), _model(state), bool(os.environ.get("FLASHNEXT_API_KEY_FILE")))


def _wait(look: Callable[[], tuple[str, dict[str, Any], int | None]]) -> int | None:
    """Show the boot phases until `look` says healthy (None) or the process ended (its exit code)."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    started, seen = time.monotonic(), None
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        while True:
            status, state, code = look()
            if code is not None:
                return code
            if status == "healthy":
                err.print(f"flashnext: a real token came back after {time.monotonic() - started:.0f} s")
                return None
            if status == "unhealthy":
                raise Refusal(
                    "the healthcheck gets no token", "see `./flashnext status` and `./flashnext logs`", Exit.DOCKER
                )
            label = state.get("label") or "starting"
            if label != seen:
                seen = label
                if not err.is_terminal:
                    err.print(f"flashnext: {time.monotonic() - started:5.0f} s  {label}")
            progress = state.get("progress")
            bar.update(task, description=label, total=1.0 if progress is not None else None, completed=progress or 0)
            if time.monotonic() - started > BOOT_LIMIT_S:
                raise Refusal("no token came within three hours", "see `./flashnext logs`", Exit.DOCKER)
            time.sleep(_TURN_S)


def _last_words(log: str) -> str:
    """The ERROR and Fix lines at a log's end, or its last lines where there are none."""
    lines = log.splitlines()
    for at in range(len(lines) - 1, -1, -1):
        if lines[at].startswith("ERROR: "):
            return "\n".join(lines[at : at + 2]) + "\n"
    return "\n".join(lines[-5:]) + "\n" if lines else ""


def _endpoint(host: str, port: str, model: str, key: bool) -> None:
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(host, host)
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64})
    auth = ' -H "Authorization: Bearer $(cat $FLASHNEXT_API_KEY_FILE)"' if key else ""
    print(f"Serving {model} at http://{host}:{port}/v1")
    print(f"curl http://{host}:{port}/v1/chat/completions -H 'Content-Type: application/json'{auth} -d '{body}'")


def _model(state: Mapping[str, Any]) -> str:
    return state.get("model") or "qwen3.8-flash-next"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


# --- down, logs, status ---


def _startup(state: dict[str, Any]) -> str | None:
    """How the engine's start-up report compares with the plan, in words; None before it is known."""
    found = state.get("startup")
    if not found:
        return None
    if found["agrees"]:
        return f"as planned: {found['compared']} figures"
    return "WARN not as planned: " + ("; ".join(found["deviations"]) or "the engine said no figure of the plan")


def _row(
    service: str | None, runs: str, health: str | None, detail: str | None, state: dict[str, Any]
) -> dict[str, Any]:
    """A line of `status`: what Docker or the process table says, and what the run's own state file does."""
    repaired = "; ".join(f"repaired: {words}" for words in state.get("repaired") or [])
    return {
        "service": service,
        "state": runs,
        "phase": state.get("label"),
        "health": health,
        "detail": detail or state.get("reason"),
        "repaired": repaired or None,
        "startup": _startup(state),
    }


def _local() -> dict[str, Any] | None:
    """The state of a run without Docker that is alive, else None."""
    state = _json(_text(LOCAL / "state.json"))
    pid = state.get("pid")
    if not isinstance(pid, int):
        return None
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    return state if b"entrypoint" in command else None


@app.command()
def down(
    volumes: Annotated[
        bool, typer.Option("--volumes", help="Also remove our volumes: prepared files and caches.")
    ] = False,
) -> None:
    """Stop it. Our volumes stay unless asked; the checkpoint is never touched."""
    if (state := _local()) is not None:
        os.kill(state["pid"], signal.SIGTERM)
        for _ in range(400):
            if _local() is None:
                print("stopped")
                return
            time.sleep(0.1)
        raise Refusal(f"pid {state['pid']} does not end", f"kill -9 {state['pid']}", Exit.DOCKER)
    connect(timeout_s=60)
    done = _compose("down", "--remove-orphans", *(["--volumes"] if volumes else []))
    raise typer.Exit(int(Exit.DOCKER) if done.returncode else 0)


@app.command()
def logs(follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay and print what comes.")] = False) -> None:
    """Print the server's log."""
    if _local() is not None or (_text(LOCAL / "server.log") and not _has_engine()):
        command = ["tail", "-n", "+1", *(["-f"] if follow else []), str(LOCAL / "server.log")]
        raise typer.Exit(subprocess.run(command).returncode)
    connect(timeout_s=60)
    done = _compose("logs", "--no-log-prefix", *(["--follow"] if follow else []))
    raise typer.Exit(int(Exit.DOCKER) if done.returncode else 0)


def _has_engine() -> bool:
    try:
        connect(timeout_s=10)
    except Refusal:
        return False
    return True


@app.command()
def status(as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False) -> None:
    """Say what runs, in which phase, and what the healthcheck found. Exit 0 only where a token can be had."""
    rows = []
    if (state := _local()) is not None:
        health = _json(_module("healthcheck", "--state-dir", str(LOCAL), "--json", capture=True).stdout)
        rows.append(_row("demo (no Docker)", "running", health.get("status"), health.get("detail"), state))
    else:
        client = connect(timeout_s=60)
        for name in _compose("ps", "--all", "--quiet", capture=True).stdout.split():
            c = client.containers.get(name)
            s = c.attrs["State"]
            state = {}
            if s["Status"] == "running":
                code, out = c.exec_run(["cat", "/run/flashnext/state.json"])
                state = _json(out.decode("utf-8", "replace")) if code == 0 else {}
            words = ((s.get("Health") or {}).get("Log") or [{}])[-1].get("Output", "").strip()
            runs = s["Status"] if s["Status"] == "running" else f"{s['Status']} ({s['ExitCode']})"
            service = c.labels.get("com.docker.compose.service")
            rows.append(_row(service, runs, (s.get("Health") or {}).get("Status"), words, state))
    good = any(r["health"] in {"healthy", "busy"} for r in rows)
    if as_json:
        print(json.dumps(rows, indent=1))
    elif not rows:
        print("Nothing runs. ./flashnext up starts it.")
    for r in rows if not as_json else ():
        print("  ".join(str(v) for v in r.values() if v))
    raise typer.Exit(0 if good else 1)


# --- test ---


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def test(
    ctx: typer.Context,
    fast: Annotated[
        bool, typer.Option("--fast", help="Only what needs neither Docker nor vLLM: under three minutes.")
    ] = False,
) -> None:
    """Set up what the tests need and run them all; further words go to pytest."""
    locks = REPOSITORY / "build" / "locks"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--require-hashes",
            "-r",
            str(locks / "test.txt"),
        ]
    )
    if done.returncode:
        raise Refusal(
            "the tests' packages cannot be installed", "check the network to the Python package index", Exit.DOCKER
        )
    os.chdir(REPOSITORY)
    if fast:
        raise typer.Exit(
            subprocess.run(
                [sys.executable, "-m", "pytest", "tests/unit", "-m", "not slow", *ctx.args], env=_environ()
            ).returncode
        )
    engine = engine_env.ensure(extras=locks / "engine-test.txt")
    live = "tests/engine/test_healthcheck_live.py"
    runs = (
        (sys.executable, "tests/unit"),
        # the engine's tests run in the engine's own environment, unpatched: they make patched copies of its tree themselves;
        # two files at a time, because most of each is one process importing vLLM
        (str(engine), "tests/engine", "tests/gpu", f"--ignore={live}", "-n2", "--dist=loadfile"),
        (str(engine), live),  # not beside others: it judges a live server by the clock
        (sys.executable, "tests/docker"),
    )
    environ = {**_environ(), "FLASHNEXT_ENGINE_PYTHON": str(engine)}
    codes = [
        subprocess.run([python, "-m", "pytest", *words, *ctx.args], env=environ).returncode for python, *words in runs
    ]
    # 5 is pytest's word for "none of mine was asked for": words like -k leave whole parts out
    raise typer.Exit(next((code for code in codes if code not in (0, 5)), 0 if 0 in codes else 5))


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code. Refusals and usage errors are two lines."""
    try:
        return int(
            typer.main.get_command(app)(
                args=sys.argv[1:] if argv is None else argv, prog_name="flashnext", standalone_mode=False
            )
            or 0
        )
    except Refusal as e:
        e.print()
        return int(e.code)
    except typer.Exit as e:
        return e.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as e:
        if not hasattr(e, "format_message"):
            raise
        Refusal(e.format_message() or "no command", "./flashnext --help lists the commands", Exit.USAGE).print()
        return int(Exit.USAGE)


if __name__ == "__main__":
    sys.exit(main())
