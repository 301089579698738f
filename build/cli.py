"""`python -m build` (= `./flashnext image`): build, tag, push, pull, lock, save, load, verify, cpu-base.

Results go to stdout (one JSON object with --json), progress and errors to stderr. A failure is one ERROR and one Fix
line and an exit code: 2 usage, 8 the engine, a registry or a build, 9 a verification (image, archive, moved tag); with
--json the same facts stand on stdout too.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import rich.console
import rich.table
import rich.text
import typer

from . import archive, image, lock, registry
from . import verify as verification
from .engine import connect
from .errors import Exit, Refusal, docker_errors
from .progress import Mode, human_bytes
from .reference import Reference

INTERRUPTED = 130  # 128 + SIGINT, as a shell says it

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Build, lock, carry and verify the image.",
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Progress = Annotated[Mode, typer.Option("--progress", help="How progress is shown on stderr.")]
LockFile = Annotated[Path, typer.Option("--lock-file", help="Where the base's digest is kept.")]
Platform = Annotated[str | None, typer.Option("--platform", metavar="OS/ARCH", help="One platform, as linux/amd64.")]
Tags = Annotated[list[str] | None, typer.Option("--tag", "-t", help="Name of the result; may be repeated.")]
BuildArgs = Annotated[
    list[str] | None,
    typer.Option("--build-arg", metavar="NAME=VALUE", help="Passed on; stays readable in the history."),
]
Secrets = Annotated[
    list[str] | None,
    typer.Option("--secret", metavar="id=NAME,src=FILE", help="Passed on: id=pip a pip.conf, id=uv a uv.toml."),
]
Cache = Annotated[bool, typer.Option("--cache/--no-cache", help="Take unchanged steps from the cache.")]
PullBase = Annotated[bool, typer.Option("--pull", help="Ask the registry for the base even if it is here.")]
Root = Annotated[Path, typer.Option("--context", help="The clone to build from.")]


def _answer(as_json: bool, data: dict, text: str) -> None:
    print(json.dumps({"ok": True, **data}) if as_json else text)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def _pairs(words: list[str] | None, option: str) -> dict[str, str]:
    pairs = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise Refusal(f"{option} {word!r} is not NAME=VALUE", f"write {option} NAME=VALUE", Exit.USAGE)
        pairs[name] = value
    return pairs


def _built(as_json: bool, request: image.BuildRequest, progress: Mode) -> None:
    client = connect()
    result = image.run_build(request, progress)
    with docker_errors("inspect the result"):
        size_bytes = client.images.get(result.image_id).attrs["Size"]
    text = "\n".join(
        (
            ", ".join(result.tags),
            f"  id       {result.image_id}",
            f"  base     {result.base}",
            f"  revision {result.revision}",
            f"  size     {human_bytes(size_bytes)}",
            f"  took     {result.seconds} s, {result.cached_steps} of {result.steps} steps from the cache",
        )
    )
    _answer(as_json, {**dataclasses.asdict(result), "size_bytes": size_bytes}, text)


@app.command()
def build(
    target: Annotated[str | None, typer.Option("--target", help="Stage to build; the last one if not given.")] = None,
    base: Annotated[
        str | None, typer.Option("--base", help=f"Image for FROM; the locked base, else {lock.DEFAULT_BASE}.")
    ] = None,
    tags: Tags = None,
    platform: Platform = None,
    cache: Cache = True,
    pull: PullBase = False,
    build_arg: BuildArgs = None,
    secret: Secrets = None,
    context: Root = image.REPOSITORY,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="The Dockerfile, if not CONTEXT/Dockerfile.")
    ] = None,
    lock_file: LockFile = lock.LOCK_FILE,
    progress: Progress = Mode.AUTO,
    as_json: Json = False,
) -> None:
    """Build the image on its base: the locked digest if there is a lock file."""
    request = image.image_request(
        context,
        image.read_source(context, os.environ, _now()),
        lock.choose_base(base, lock.read(lock_file), platform),
        tags or (),
        dockerfile=file,
        extra_args=_pairs(build_arg, "--build-arg"),
        environ=os.environ,
        secrets=tuple(secret or ()),
        target=target,
        platform=platform,
        cache=cache,
        pull=pull,
    )
    _built(as_json, request, progress)


@app.command("cpu-base")
def cpu_base(
    base: Annotated[str, typer.Option("--base", help="A Debian 12 with Python 3.11.")] = image.CPU_BASE_FROM,
    tags: Tags = None,
    find_links: Annotated[
        list[Path] | None,
        typer.Option(
            "--find-links", help="Folder that may hold the pinned torch wheel; PIP_FIND_LINKS is looked at too."
        ),
    ] = None,
    cache: Cache = True,
    pull: PullBase = False,
    build_arg: BuildArgs = None,
    secret: Secrets = None,
    context: Root = image.REPOSITORY,
    progress: Progress = Mode.AUTO,
    as_json: Json = False,
) -> None:
    """Build the CPU base (vLLM 0.30.0 for the CPU), to build the image on where there is no card."""
    pinned = context / "build" / "locks" / "cpu-base.txt"
    if not pinned.is_file():
        raise Refusal(f"there is no {pinned}", "name a clone of the repository with --context", Exit.USAGE)
    folders = [*(find_links or ()), *image.find_links_folders(os.environ)]
    with image.torch_wheels(pinned, folders) as wheels:
        request = image.cpu_base_request(
            context,
            image.read_source(context, os.environ, _now()),
            base,
            tags or (),
            wheels=wheels,
            extra_args=_pairs(build_arg, "--build-arg"),
            environ=os.environ,
            secrets=tuple(secret or ()),
            cache=cache,
            pull=pull,
        )
        _built(as_json, request, progress)


@app.command()
def tag(
    source: Annotated[str, typer.Argument(metavar="IMAGE", help="A local image, by name or id.")],
    new: Annotated[str, typer.Argument(metavar="NAME:TAG")],
    as_json: Json = False,
) -> None:
    """Give a local image a further name."""
    registry.parse_tag(new)
    image_id = registry.tag(connect(), source, new)
    _answer(as_json, {"id": image_id, "tag": new}, f"{new} -> {image_id}")


@app.command()
def push(
    ref: Annotated[str, typer.Argument(metavar="NAME:TAG")], progress: Progress = Mode.AUTO, as_json: Json = False
) -> None:
    """Push a tag; prints the digest that the registry gave it."""
    registry.parse_tag(ref)
    result = registry.push(connect(), ref, progress)
    _answer(as_json, result, f"pushed {result['ref']}\n  by digest: {result['pinned']}")


@app.command()
def pull(
    ref: Annotated[str, typer.Argument(metavar="REF", help="NAME:TAG or NAME@sha256:...")],
    name: Annotated[
        str | None, typer.Option("--tag", "-t", help="Name the pulled image; one by digest has none.")
    ] = None,
    platform: Platform = None,
    progress: Progress = Mode.AUTO,
    as_json: Json = False,
) -> None:
    """Pull an image by tag or by digest."""
    Reference.parse(ref)
    if name:
        registry.parse_tag(name)
    result = registry.pull(connect(), ref, progress, platform, name)
    text = f"pulled {result['ref']}\n  id     {result['id']}\n  digest {result['digest']}"
    _answer(as_json, result, text + (f"\n  tag    {result['tag']}" if result["tag"] else ""))


@app.command("lock")
def lock_command(
    ref: Annotated[
        str | None, typer.Argument(help=f"The base's tag; the locked one, else {lock.DEFAULT_BASE}.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 9 if the tag moved.")] = False,
    lock_file: LockFile = lock.LOCK_FILE,
    as_json: Json = False,
) -> None:
    """Note the digest behind the base's tag, so that every build takes the same base. Pulls nothing."""
    old = lock.read(lock_file) if check or ref is None else None
    if check:
        if old is None or (ref is not None and ref != old.ref):
            what = f"{lock_file} locks {old.ref}, not {ref}" if old else f"there is no lock file {lock_file}"
            raise Refusal(what, "write one with `image lock` first", Exit.USAGE)
        lock.check(connect(), old)
        _answer(as_json, {"moved": False, **dataclasses.asdict(old)}, f"{old.ref} is still {old.digest}")
        return
    wanted = registry.parse_tag(ref or (old.ref if old else lock.DEFAULT_BASE))
    new = lock.resolve(connect(), str(wanted))
    lock.write(lock_file, new)
    _answer(
        as_json,
        {"file": str(lock_file), **dataclasses.asdict(new)},
        f"{new.ref}\n  digest {new.digest}\n  for    {', '.join(new.platforms)}\n  in     {lock_file}",
    )


@app.command()
def save(
    ref: Annotated[str, typer.Argument(metavar="IMAGE")],
    file: Annotated[Path, typer.Argument(help="*.tar, *.tar.gz, *.tgz or *.tar.zst; the ending chooses.")],
    progress: Progress = Mode.AUTO,
    as_json: Json = False,
) -> None:
    """Write a local image to a file, and its sha256 beside it."""
    archive.compression(file)
    Reference.parse(ref)
    result = archive.save(connect(), ref, file, progress)
    _answer(as_json, result, f"{result['file']} ({human_bytes(result['bytes'])})\n  sha256 {result['sha256']}")


@app.command()
def load(
    file: Annotated[Path, typer.Argument(help="A file that `save` wrote.")],
    check: Annotated[bool, typer.Option("--check/--no-check", help="Compare with the sha256 beside it first.")] = True,
    progress: Progress = Mode.AUTO,
    as_json: Json = False,
) -> None:
    """Load an image from a file, after its checksum holds."""
    result = archive.load(connect(), file, progress, check)
    _answer(as_json, result, "loaded " + ", ".join(result["images"]))


@app.command("verify")
def verify_command(
    ref: Annotated[str, typer.Argument(metavar="IMAGE")],
    allow_dirty: Annotated[bool, typer.Option("--allow-dirty", help="Accept an image from a changed tree.")] = False,
    as_json: Json = False,
) -> None:
    """Check what an image is: labels, user, healthcheck, entrypoint, the series, and our plan against its vLLM."""
    image_id, checks = verification.verify(connect(), ref, allow_dirty)
    failed = [c.name for c in checks if not c.ok]
    if as_json:
        data = {"image": ref, "id": image_id, "checks": [dataclasses.asdict(c) for c in checks]}
        print(json.dumps({"ok": not failed, **data}))
    else:
        _print_checks(checks)
    if failed:
        only_dirty = failed == ["revision"]
        refusal = Refusal(
            f"{ref} failed {len(failed)} of {len(checks)} checks: {', '.join(failed)}",
            "build it from a committed tree, or pass --allow-dirty"
            if only_dirty
            else "build it with `image build` from a clean clone; the first FAIL tells where it differs",
            Exit.VERIFY,
        )
        refusal.print()
        raise typer.Exit(refusal.code)


def _print_checks(checks: list[verification.Check]) -> None:
    if not sys.stdout.isatty():
        for c in checks:
            print(f"{'PASS' if c.ok else 'FAIL'}  {c.name:15} {c.detail}")
        return
    table = rich.table.Table(box=None, pad_edge=False)
    for header in ("", "check", "seen"):
        table.add_column(header, overflow="fold")
    for c in checks:
        mark = rich.text.Text("PASS", "green") if c.ok else rich.text.Text("FAIL", "bold red")
        table.add_row(mark, c.name, rich.text.Text(c.detail))
    rich.console.Console(highlight=False).print(table)


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        result = typer.main.get_command(app)(
            args=argv or ["--help"], prog_name="flashnext image", standalone_mode=False
        )
        if not argv:
            return int(Exit.USAGE)
        # newer typers answer Ctrl-C with this code, older ones raise
        return _interrupted() if result == INTERRUPTED else int(result or 0)
    except Refusal as e:
        return _refused(e, argv)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except Exception as e:
        # typer's own usage errors: its vendored click and the real one share the method, not the class
        if not hasattr(e, "format_message"):
            raise
        words = " ".join(w for w in argv[:1] if w in {c.name or c.callback.__name__ for c in app.registered_commands})
        fix = f"see `flashnext image {words} --help`".replace("  ", " ")
        return _refused(Refusal(e.format_message(), fix, Exit.USAGE), argv)


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return INTERRUPTED


def _refused(refusal: Refusal, argv: list[str]) -> int:
    lines = refusal.lines if isinstance(refusal, image.BuildFailed) else []
    if lines:
        print(f"--- the last lines of {refusal.step}", *lines, "---", sep="\n", file=sys.stderr)
    refusal.print()
    if "--json" in argv:
        facts = {"ok": False, "error": refusal.message, "fix": refusal.fix, "exit_code": int(refusal.code)}
        print(json.dumps({**facts, **({"step_output": lines} if lines else {})}))
    return int(refusal.code)
