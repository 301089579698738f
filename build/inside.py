"""What `image verify` runs inside the image, with the image's own Python, as the image's own user.

Stdlib only (and the image's vLLM for the last check): this text is handed to `python3 -c`, nothing is copied in. Which
Python is the engine's differs from base to base, and the kit's own stands before it on PATH: it is the first python3 on
PATH that finds `vllm`, and this text starts itself again with that one. Each check prints one line, `flashnext-check: {"name", "ok", "detail"}`; vLLM's own output may stand between them. A check
that raises has failed, the next one still runs.

The series is checked where Python finds vLLM, without importing it. The plan's argv is given to the parser that `vllm
serve` builds in this very image; an option has to be spelled in full, because argparse also takes prefixes, and those
break silently when upstream adds an option (vLLM PR 56002).
"""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

HOME = Path("/opt/flashnext")
PLAN = ["plan", "--simulate", "3x3090", "--ram", "125GiB", "--json"]


def last_line(*texts):
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["(no output)"])[-1][:300]


def engine_tree():
    """The folder that holds the package `vllm`."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise RuntimeError("no python3 on the image's PATH finds vllm")
    return Path(spec.origin).parent.parent


def become_engine_python():
    """Start this text again with the engine's Python, if there is one and this is not it."""
    if importlib.util.find_spec("vllm"):
        return
    probe = "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        python = os.path.join(folder, "python3")
        if os.access(python, os.X_OK) and subprocess.run([python, "-c", probe], capture_output=True).returncode == 0:
            os.execv(python, [python, *sys.orig_argv[1:]])


def series_label():
    folder = HOME / "patches" / "vllm-0.30.0"
    digest = hashlib.sha256((folder / "targets.toml").read_bytes()).hexdigest()
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    if digest != wanted:
        raise RuntimeError(f"label io.flashnext.series says {wanted or 'nothing'}, targets.toml has {digest}")
    return digest


def series_applied():
    tree = engine_tree()
    command = [sys.executable, str(HOME / "patches" / "apply.py"), str(tree), "--check", "--json"]
    answer = subprocess.run(command, capture_output=True, text=True)
    try:
        told = json.loads(answer.stdout)
        others = [f["path"] + " " + f["state"] for f in told["files"] if f["state"] != "applied"]
        seen = f"{len(told['patches'])} patches, {len(told['files'])} files, engine package {told['engine']}"
    except (ValueError, KeyError):
        others, seen = [], last_line(answer.stderr, answer.stdout)
    if answer.returncode:
        raise RuntimeError(f"{tree}: apply.py --check ended with {answer.returncode}: {', '.join(others) or seen}")
    return f"{tree}: {seen}"


def plan_accepted():
    answer = subprocess.run([str(HOME / "bin" / "flashnext"), *PLAN], capture_output=True, text=True)
    if answer.returncode:
        raise RuntimeError(f"flashnext {' '.join(PLAN)}: exit {answer.returncode}: {last_line(answer.stderr)}")
    plan = json.loads(answer.stdout)
    argv = list(map(str, plan["argv"]))
    if "serve" in argv[:2]:
        argv = argv[argv.index("serve") + 1 :]
    os.environ.update({k: str(v) for k, v in plan["env"].items()})

    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())

    def refuse(message):
        raise RuntimeError(f"the parser says: {message}")

    parser.error = refuse
    known = set(parser._option_string_actions)
    options = [word.partition("=")[0] for word in argv if word.startswith("--")]
    unknown = [o for o in options if o not in known]
    if unknown:
        raise RuntimeError(f"not an option of this vLLM, or only a prefix of one: {', '.join(unknown)}")
    parser.parse_args(argv)
    return f"{len(options)} options of `vllm serve`, each spelled in full"


def main():
    become_engine_python()
    for name, check in (
        ("series label", series_label),
        ("series applied", series_applied),
        ("plan accepted", plan_accepted),
    ):
        try:
            result = {"name": name, "ok": True, "detail": check()}
        except BaseException as e:
            result = {
                "name": name,
                "ok": False,
                "detail": f"{type(e).__name__}: {e}" if not isinstance(e, RuntimeError) else str(e),
            }
        print("flashnext-check: " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
