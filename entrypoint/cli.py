"""`flashnext`: the command line inside the image and on a laptop.

    flashnext plan [--simulate 3x3090 --ram 125GiB] [--what-if ram=64GiB] [--json] [--explain] [wishes]
    flashnext doctor [--json] [--report FILE] [wishes]   check this box point by point
    flashnext prepare [wishes]                everything before the engine, once
    flashnext serve [wishes]                  prepare, start vLLM and stay with it
    flashnext fetch [REPO|FOLDER] [--to DIR]  bring a checkpoint here, resumed and verified
    flashnext checkpoint [--deep] [--json]    is the checkpoint whole, and read as it was written
    flashnext bits [--demo] [--what-if experts=g64] [--figure F.svg]   where the bytes are, and the roofline
    flashnext explain LOG [--json]            known failures in an engine's log

Exit codes: errors.Exit. Every mistake of a user ends in one ERROR and one Fix line.

Each command imports what it runs when it runs, because all of it takes a fifth of a second. So does pydantic, by which typer
converts each value that is no bool: `checkpoint` and `serve` have none.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import TyperException

from . import facts, flags
from .errors import Exit, Refusal
from .units import format_gib
from .wishes import Wishes, gather

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .machine import Machine
    from .plan import Plan
    from .speed import Speed
    from .what_if import Side

_HELP = {"default_map": {"help": False}}  # typer's own default, None, is no bool
app = typer.Typer(
    context_settings=_HELP,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Serve Qwen3.8-Flash-Next on a box of 24 GB cards.",
)
_WISHES = {**_HELP, "allow_extra_args": True, "ignore_unknown_options": True}
_SEE = "Wishes (--model, --env-file and more): `flashnext plan --help` lists them."
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def _wishes(ctx: typer.Context) -> Wishes:
    given = flags.read(ctx.args)
    return gather(given.wishes, os.environ, given.env_file)


@dataclass(frozen=True)
class _Box:
    """The box that a plan is for, in the words of the command line; `simulate` None means this one."""

    simulate: str | None
    ram: str | None
    cgroup: str | None
    disk: str | None
    wsl: bool

    @property
    def words(self) -> list[tuple[str, object]]:
        return [("ram", self.ram), ("cgroup", self.cgroup), ("disk", self.disk), ("wsl", self.wsl)]

    def machine(self, real: Callable[[], Machine]) -> Machine:
        """The machine; `real` reads this one. Words beside a real box replace what it has (--what-if)."""
        from .machine import least
        from .simulate import simulate as make_box

        if self.simulate is None and not any(value for _, value in self.words):
            return real()
        if self.simulate is not None and (self.ram is not None or self.simulate.startswith("@")):
            return make_box(self.simulate, ram=self.ram, cgroup=self.cgroup, disk=self.disk, wsl=self.wsl)
        box, like = real(), make_box(self.simulate or "3090", ram=self.ram, cgroup=self.cgroup, disk=self.disk)
        if self.simulate is not None:
            box = replace(box, gpus=like.gpus, gpu_error=None, gpu_fix=None, simulated=self.simulate)
        if self.ram is not None:
            box = replace(box, mem_total_bytes=like.mem_total_bytes, mem_available_bytes=like.mem_available_bytes)
        if self.cgroup is not None:
            box = replace(box, cgroup_limit_bytes=like.cgroup_limit_bytes, cgroup_used_bytes=0)
        if self.disk is not None:
            box = replace(box, mounts=like.mounts)
        room = None if box.cgroup_limit_bytes is None else box.cgroup_limit_bytes - (box.cgroup_used_bytes or 0)
        available = least(box.mem_available_bytes, room)
        return replace(box, wsl=box.wsl or self.wsl, ram_available_bytes=available)


def _planned(box: _Box, wishes: Wishes) -> tuple[Plan, Speed | None, str | None]:
    """The plan, its speed, and why there is none. Raises Refusal."""
    from . import account, rules
    from . import plan as plan_
    from . import speed as speed_

    if box.simulate is None:
        rules.check_exposure(wishes, facts.read_api_key(wishes) is not None)
    machine = box.machine(lambda: facts.machine(wishes))
    if not machine.gpus and wishes.value("device") != "cpu":
        raise Refusal(
            f"no NVIDIA card can be used: {machine.gpu_error or 'the driver lists none'}",
            machine.gpu_fix or "plan for another box with --simulate 3x3090 --ram 125GiB",
            Exit.PLAN,
        )
    # A laptop has no checkpoint at the default place; a path that was asked for is read.
    asked = wishes["model"].wished or Path(wishes.value("model"), "config.json").is_file()
    if box.simulate is None or asked:
        found = facts.checkpoint(wishes, lambda path: account.counted(path, account.notes_folder()))
        model, reads = plan_.model_of(found), speed_.token_bytes(found)
    else:
        model = plan_.published()
        reads = speed_.published_token_bytes(model.text, model.head_bytes)
    made = plan_.make_plan(machine, model, wishes, facts.prepared(wishes) if box.simulate is None else None)
    missing = speed_.unknown(made, machine, model.text, reads)
    return made, speed_.estimate(made, machine, model.text, reads), missing


def _side(label: str, box: _Box, wishes: Wishes) -> Side:
    from .what_if import Side

    try:
        made, speed, _ = _planned(box, wishes)
    except Refusal as e:
        if e.code not in (Exit.PLAN, Exit.TABLE):
            raise
        return Side(label=label, refusal=e)
    return Side(label=label, plan=made, speed=speed)


@app.command(context_settings=_WISHES, epilog=flags.help_text())
def plan(
    ctx: typer.Context,
    simulate: Annotated[str | None, typer.Option(help="Plan for a box in words: 3x3090, '2x3090+1x4090'.")] = None,
    ram: Annotated[str | None, typer.Option(help="RAM of the simulated box.")] = None,
    cgroup: Annotated[str | None, typer.Option(help="Container limit of the simulated box.")] = None,
    disk: Annotated[str | None, typer.Option(help="Disk of the simulated box: nvme, sata, hdd, nfs.")] = None,
    wsl: Annotated[bool, typer.Option(help="The simulated box is WSL2.")] = False,
    what_if: Annotated[
        str | None,
        typer.Option("--what-if", help="Compare with another box or wish: ram=64GiB, simulate=4x3090,max_num_seqs=8."),
    ] = None,
    explain: Annotated[bool, typer.Option(help="Print every reason, and the budget in bytes line by line.")] = False,
    as_json: Json = False,
) -> None:
    """Print the budget of every card and of the RAM, and every environment variable and argument of vllm serve."""
    box = _Box(simulate, ram, cgroup, disk, wsl)
    if simulate is None:
        for name, value in box.words:
            if value:
                raise Refusal(
                    f"--{name} describes a simulated box, and there is no --simulate",
                    "add --simulate 3x3090",
                    Exit.USAGE,
                )
    elif ram is None and not simulate.startswith("@"):
        raise Refusal("a simulated box needs its RAM", "add --ram 125GiB", Exit.USAGE)
    wishes = _wishes(ctx)
    if what_if is not None:
        _compare(box, ctx, what_if, as_json)
        return
    made, speed, no_speed = _planned(box, wishes)
    from .show import plan_dict, show
    from .terminal import console

    if as_json:
        print(json.dumps(plan_dict(made, speed), indent=1, ensure_ascii=False))
    else:
        show(made, console(), explain, speed, no_speed)


def _compare(box: _Box, ctx: typer.Context, text: str, as_json: bool) -> None:
    """`plan --what-if`: exits with the first side's code where both are refused, else with 0."""
    from . import what_if as what_if_
    from .terminal import console

    asked = what_if_.parse(text)
    words = {k: v for k, v in asked.items() if k in what_if_.BOX_KEYS}
    if "wsl" in words:
        on = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}.get(words["wsl"].lower())
        if on is None:
            raise Refusal(
                f"--what-if: wsl is {words['wsl'][:20]!r}, which is neither on nor off", "write wsl=on", Exit.USAGE
            )
        words["wsl"] = on
    given, env_file = flags.read(ctx.args)
    changed = gather({**given, **{k: v for k, v in asked.items() if k not in words}}, os.environ, env_file)
    label = " ".join([box.simulate or "this box", *(f"--{k} {v}" for k, v in box.words if v)])
    base = _side(label, box, gather(given, os.environ, env_file))
    other = _side(text.strip(), replace(box, **words), changed)
    if as_json:
        print(json.dumps(what_if_.as_dict(base, other), indent=1, ensure_ascii=False))
    else:
        what_if_.show(base, other, console())
    if base.refusal and other.refusal:
        raise typer.Exit(base.refusal.code)


@app.command(context_settings=_WISHES, epilog=_SEE)
def doctor(
    ctx: typer.Context,
    as_json: Json = False,
    report: Annotated[
        Path | None, typer.Option("--report", help="Also write a redacted report for a bug report to this new file.")
    ] = None,
) -> None:
    """Check this box point by point: PASS, WARN or FAIL, one fix each."""
    from . import doctor as doctor_
    from .terminal import console

    seen = doctor_.look(_wishes(ctx))
    findings = doctor_.judge(seen)
    if as_json:
        print(json.dumps([vars(f) for f in findings], indent=1, ensure_ascii=False))
    else:
        doctor_.show(findings, console())
    if report is not None:
        doctor_.write_report(report, seen, findings, os.environ)
        sys.stderr.write(f"flashnext: wrote {report}; read it once before you send it\n")
    worst = max((f.code for f in findings if f.verdict == "FAIL"), default=Exit.OK)
    raise typer.Exit(int(worst))


def _ready(wishes: Wishes, table: Callable[[Path, Path], object]) -> tuple[Plan, str | None, int, list[str]]:
    """Everything before the engine: (plan, API key, bytes of weights, what was repaired). Raises Refusal.

    `table` is called with the checkpoint's folder and the table file that is to be made, if one is.
    """
    from . import checkpoint_fix
    from . import prepare as prepare_

    repaired: list[str] = []

    def mend(found: Checkpoint) -> Checkpoint:
        served, words = checkpoint_fix.ready(found, Path(wishes.value("data"), "overlay"))
        repaired.extend(words)
        return served

    if wishes.value("device") == "cpu":
        _demo_model(wishes)
    _, model, made, key = facts.everything(wishes, mend)
    prepare_.folders(wishes)
    if made.table is not None and made.table.make:
        table(Path(wishes.value("model")), Path(made.table.file))
    return made, key, sum(s.size_bytes for s in model.shards), repaired


def _demo_model(wishes: Wishes) -> None:
    """On the CPU, a model folder inside our own volume is made if it is not there: the demo needs no download."""
    from . import demo
    from . import prepare as prepare_

    folder, data = Path(wishes.value("model")), Path(wishes.value("data"))
    if not folder.is_relative_to(data) or (folder / "config.json").exists():
        return
    prepare_.folders(wishes)
    try:
        demo.make(folder)
    except OSError as e:
        raise Refusal(
            f"the demo's model cannot be written to {folder}: {e.strerror}",
            "free space or give write access there",
            Exit.TABLE,
        ) from None


@app.command(context_settings=_WISHES, epilog=_SEE)
def prepare(ctx: typer.Context, as_json: Json = False) -> None:
    """Check the box and the checkpoint, make the plan, our folders and the table file that the plan reads, if it reads one.

    Exits 0 only where `serve` can start.
    """
    from . import table as table_
    from .show import show
    from .terminal import console

    tell = table_.teller(sys.stderr)
    made, _, weight_bytes, repaired = _ready(_wishes(ctx), lambda model, file: table_.prepare(model, file, tell))
    if as_json:
        out = {"plan": made.as_dict(), "weight_bytes": weight_bytes, "repaired": repaired}
        print(json.dumps(out, ensure_ascii=False))
    else:
        show(made, console())
        for words in repaired:
            print(f"repaired in a copy: {words}")
        print("prepared: the engine can start")


@app.command(context_settings=_WISHES, epilog=_SEE)
def serve(ctx: typer.Context) -> None:
    """Prepare, start vllm serve and stay with it until it ends; exits with the documented codes."""
    from . import boot
    from . import prepare as prepare_
    from . import table as table_
    from .supervisor import Supervisor

    wishes = _wishes(ctx)
    state = boot.StateFile(prepare_.state_folder(wishes), wishes.value("host"), wishes.value("port"))
    state.update(deadline_s=state.state.started_s + (boot.phase_named("planning").limit_s or 0))
    try:
        state.update("preparing")
        tell = prepare_.told_in(state, table_.teller(sys.stderr))
        made, key, weight_bytes, repaired = _ready(wishes, lambda model, file: table_.prepare(model, file, tell))
        prepare_.port_free(wishes.value("host"), wishes.value("port"))
        vllm = shutil.which("vllm")
        if vllm is None:
            raise Refusal(
                "there is no `vllm` on PATH",
                "run inside the image, or where vLLM 0.30.0 is installed",
                Exit.ENGINE_START,
            )
        state.update(model=made.model_name, repaired=repaired)
        for words in repaired:
            sys.stderr.write(f"flashnext: repaired in a copy: {words}\n")
        if made.table is not None:
            sys.stderr.write(f"flashnext: n-gram table: {made.table.reason}\n")
        for note in made.notes:
            sys.stderr.write(f"flashnext: note: {note}\n")
        sys.stderr.write("flashnext: " + " ".join(["vllm", *made.argv]) + "\n")
        env = {**os.environ, **made.env}
        if key is not None:
            env["VLLM_API_KEY"] = key
        code = Supervisor(
            [vllm, *made.argv],
            env,
            state,
            weight_bytes=weight_bytes,
            drain_s=wishes.value("drain"),
            phase_limit_s=wishes.value("boot_timeout"),
            plan=made,
        ).run()
    except Refusal as e:
        state.update("failed", exit_code=int(e.code), reason=e.message, pid=None)
        raise
    raise typer.Exit(int(code))


@app.command()
def fetch(
    source: Annotated[
        str | None,
        typer.Argument(help="OWNER/NAME on the hub, or a folder here.", show_default="the published checkpoint"),
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Folder to fetch into: /model if there is one, else ./model.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit; a commit pins it.")] = None,
    token_file: Annotated[
        str | None, typer.Option(envvar="HF_TOKEN_PATH", help="File that holds a hub token, for gated repositories.")
    ] = None,
    endpoint: Annotated[
        str, typer.Option(envvar="HF_ENDPOINT", help="The hub, or a mirror.")
    ] = "https://huggingface.co",
    workers: Annotated[int | None, typer.Option(min=1, max=16, help="Files at a time.", show_default="4")] = None,
    as_json: Json = False,
) -> None:
    """Bring a checkpoint into a folder: resumed after a cut, space checked first, each file against the hub's hash."""
    from . import fetch as fetch_
    from .terminal import byte_progress

    source = source or fetch_.DEFAULT_REPO
    token = fetch_.read_token(token_file)
    with byte_progress("fetching") as progress:
        done = fetch_.fetch(
            source,
            to or fetch_.default_target(),
            revision=revision,
            endpoint=endpoint.rstrip("/"),
            token=token,
            workers=workers or fetch_.WORKERS,
            progress=progress,
        )
    facts.read_checkpoint(done.target)
    if as_json:
        print(json.dumps(vars(done), indent=1, ensure_ascii=False))
    else:
        print(
            f"{done.target}: {done.files} files, {format_gib(done.total_bytes)}, "
            + (f"commit {done.commit}" if done.commit else f"copied from {source}")
            + f"; {format_gib(done.fetched_bytes)} fetched in {done.took_s:,.0f} s"
        )


@app.command(context_settings=_WISHES, epilog=_SEE)
def checkpoint(
    ctx: typer.Context,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte: sha256 of each file, weight_shape of each weight.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check the checkpoint: files, headers, shapes, packing, config groups, tokenizer, EOS ids, sampling defaults."""
    from . import lint

    found = facts.checkpoint(_wishes(ctx))
    if deep:
        from .terminal import byte_progress

        with byte_progress("hashing") as progress:
            report = lint.examine(found, lint.hasher(progress))
    else:
        report = lint.examine(found)
    if as_json:
        print(json.dumps(report.as_dict(), indent=1, ensure_ascii=False))
    else:
        from .terminal import console

        lint.show(report, console())
    raise typer.Exit(int(Exit.CHECKPOINT if report.errors else Exit.OK))


@app.command(context_settings=_WISHES, epilog=_SEE)
def bits(
    ctx: typer.Context,
    demo: Annotated[
        bool, typer.Option("--demo", help="Count the published shapes in a stated allocation, without a checkpoint.")
    ] = False,
    what_if: Annotated[
        list[str] | None, typer.Option("--what-if", help="CATEGORY=FORM: experts=g64, hyper_connection=bf16.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Write an SVG here.")] = None,
    as_json: Json = False,
) -> None:
    """Count parameters, bytes, bytes per decoded token and the roofline of each card, from headers alone."""
    from . import bits as bits_
    from .terminal import console

    if demo:
        stored, text = bits_.demo()
        origin, more = f"the published shapes in this allocation: {bits_.DEMO_ALLOCATION}", {}
    else:
        found = facts.checkpoint(_wishes(ctx))
        stored, text, more = bits_.weights_of(found), found.text, bits_.unread(found)
        origin = f"the headers of {found.path}"
    before = account = bits_.count(stored, text, origin, more)
    for wish in what_if or ():
        stored = bits_.what_if(stored, wish)
    if what_if:
        account = bits_.count(stored, text, f"{origin}; and if {', '.join(what_if)}", more)
    if figure is not None:
        try:
            figure.write_text(bits_.svg(account), encoding="utf-8")
        except OSError as e:
            raise Refusal(
                f"cannot write {figure}: {e.strerror}", "name a file in a writable folder", Exit.USAGE
            ) from None
    if as_json:
        both = {"stored": before.as_dict()} if what_if else {}
        print(json.dumps({**account.as_dict(), **both}, indent=1, ensure_ascii=False))
    else:
        bits_.show(account, console(), before if what_if else None)


@app.command()
def explain(
    log: Annotated[Path, typer.Argument(help="An engine's log, or - for standard input.")], as_json: Json = False
) -> None:
    """Find known failures in an engine's log and say what to do."""
    from . import boot

    try:
        text = sys.stdin.read() if str(log) == "-" else log.read_text(encoding="utf-8", errors="replace")
    except OSError as e:
        raise Refusal(
            f"cannot read {log}: {e.strerror}", "name a readable file, or - for standard input", Exit.USAGE
        ) from None
    found = boot.explain(text.splitlines())
    if as_json:
        print(json.dumps([{**vars(row), "line": line} for row, line in found], indent=1, ensure_ascii=False))
        return
    if not found:
        print("No known failure in this log.")
    for row, line in found:
        print(f"ERROR: {row.error}\nFix: {row.fix}\n  line: {line}")


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit: refusals and usage errors as two lines, never a traceback."""
    args = sys.argv[1:] if argv is None else argv
    try:
        code = app(args=args, prog_name="flashnext", standalone_mode=False)
        sys.exit(code or 0)
    except Refusal as e:
        e.print()
        sys.exit(int(e.code))
    except typer.Exit as e:
        sys.exit(e.exit_code)
    except typer.Abort:
        sys.exit(130)
    except TyperException as e:
        if not e.format_message():  # no command: the help has been printed
            sys.exit(int(Exit.USAGE))
        Refusal(e.format_message(), "`flashnext --help` lists the commands and their flags", Exit.USAGE).print()
        sys.exit(int(Exit.USAGE))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
