"""Build an image: which arguments, labels and base it gets, and the run itself.

The driver is `docker buildx build --progress rawjson`, everything else here is the Docker SDK. The SDK's own build is
the classic builder: no mounts, no secrets, no named contexts, and it builds every stage above the target. buildx is
kept by Docker, honours the user's builders, proxies and credentials, and its rawjson stream is made for other programs
to read.

What an image says about itself, all of it from the tree that it is built from:
- version: pyproject.toml's.
- revision: git's commit, with "-dirty" behind it if the tree differs from it (untracked files count, the build sees
  them); "unknown" outside a git checkout.
- created: SOURCE_DATE_EPOCH if set (buildx then also gives layers that date), else now.
They go in twice: as build arguments for a Dockerfile that uses them, and as labels for one that does not. The label
io.flashnext.series is the sha256 of the series' targets.toml: which bytes of vLLM were found, and which were left.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .engine import buildx
from .errors import Exit, Refusal, hint
from .progress import BuildLog, Mode, Step, show_build
from .reference import Reference
from .registry import parse_tag

REPOSITORY = Path(__file__).resolve().parent.parent
CPU_BASE_TAG = "flashnext-cpu-base:0.30.0"
CPU_BASE_FROM = "python:3.11-slim-bookworm"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
LABEL = "org.opencontainers.image."
INPUTS_LABEL = "io.flashnext.inputs"
SERIES_LABEL = "io.flashnext.series"
SERIES_TARGETS = "patches/vllm-0.30.0/targets.toml"


@dataclasses.dataclass(frozen=True)
class Source:
    """What the tree says about itself. `created` is RFC 3339 UTC, `revision` 40 hex digits[-dirty] or "unknown"."""

    version: str
    revision: str
    created: str


def read_source(root: Path, environ: Mapping[str, str], now: datetime.datetime) -> Source:
    """Read version, revision and date of the tree at `root`. Refusal (exit 2) for a malformed SOURCE_DATE_EPOCH."""
    epoch = environ.get("SOURCE_DATE_EPOCH", "").strip()
    if epoch:
        try:
            now = datetime.datetime.fromtimestamp(int(epoch), datetime.timezone.utc)
        except (ValueError, OverflowError, OSError) as e:
            raise Refusal(
                f"SOURCE_DATE_EPOCH={epoch!r} is not a unix time",
                "set it to whole seconds, as `git log -1 --format=%ct` prints them",
                Exit.USAGE,
            ) from e
    return Source(_version(root), _revision(root), now.astimezone(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"))


def _version(root: Path) -> str:
    # tomllib is not in Python 3.10, and one line of a file of ours needs no parser
    try:
        text = (root / "pyproject.toml").read_text()
    except OSError:
        return "unknown"
    project = re.search(r"^\[project\]$(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    found = re.search(r'^version = "([^"]+)"$', project[1], re.MULTILINE) if project else None
    return found[1] if found else "unknown"


def _revision(root: Path) -> str:
    def git(*words: str) -> str | None:
        try:
            answer = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
        except FileNotFoundError:
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    # an unpacked release inside someone else's repository has no revision of ours
    top = git("rev-parse", "--show-toplevel")
    head = git("rev-parse", "--verify", "HEAD")
    if top is None or head is None or Path(top).resolve() != root.resolve():
        return "unknown"
    return head + ("-dirty" if git("status", "--porcelain") else "")


@dataclasses.dataclass(frozen=True)
class BuildRequest:
    """One run of buildx. `secrets` are buildx's own notation (id=NAME,src=FILE); `named` are further build contexts."""

    context: Path
    dockerfile: Path
    tags: tuple[str, ...]
    args: Mapping[str, str] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    named: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    target: str | None = None
    platform: str | None = None
    cache: bool = True
    pull: bool = False

    def argv(self, iid_file: Path) -> list[str]:
        """What follows `docker buildx`. The image's id is written to `iid_file`."""
        words = ["build", "--progress", "rawjson", "--iidfile", str(iid_file), "--file", str(self.dockerfile)]
        # --load and no provenance: the same kind of image, in the engine, whichever builder and image store is in use
        words += ["--load", "--provenance=false"]
        words += [word for tag in self.tags for word in ("--tag", tag)]
        words += [word for pair in self.args.items() for word in ("--build-arg", "=".join(pair))]
        words += [word for pair in self.labels.items() for word in ("--label", "=".join(pair))]
        words += [word for name, path in self.named.items() for word in ("--build-context", f"{name}={path}")]
        words += [word for secret in self.secrets for word in ("--secret", secret)]
        words += ["--target", self.target] if self.target else []
        words += ["--platform", self.platform] if self.platform else []
        words += [] if self.cache else ["--no-cache"]
        words += ["--pull"] if self.pull else []
        return [*words, str(self.context)]


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """A finished build. `cached_steps` of `steps` were taken from the cache."""

    image_id: str
    tags: tuple[str, ...]
    base: str
    revision: str
    seconds: float
    steps: int
    cached_steps: int
    warnings: tuple[str, ...]


def image_request(
    root: Path,
    source: Source,
    base: str,
    tags: Iterable[str] = (),
    *,
    dockerfile: Path | None = None,
    extra_args: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    **options,
) -> BuildRequest:
    """The image itself, from `root`/Dockerfile on `base`. Further `options` are BuildRequest's."""
    reference = Reference.parse(base)
    labels = {
        "version": source.version,
        "revision": source.revision,
        "created": source.created,
        "base.name": base.partition("@")[0],
    }
    if reference.digest:
        labels["base.digest"] = reference.digest
    labels = {LABEL + key: value for key, value in labels.items()}
    targets = root / SERIES_TARGETS
    if targets.is_file():
        labels[SERIES_LABEL] = hashlib.sha256(targets.read_bytes()).hexdigest()
    return BuildRequest(
        context=root,
        dockerfile=dockerfile or root / "Dockerfile",
        tags=tuple(tags) or (f"flashnext:{source.version}",),
        args={
            **proxies(environ or {}),
            "BASE_IMAGE": base,
            "VERSION": source.version,
            "REVISION": source.revision,
            "CREATED": source.created,
            **(extra_args or {}),
        },
        labels=labels,
        **options,
    )


def cpu_base_request(
    root: Path,
    source: Source,
    base: str,
    tags: Iterable[str] = (),
    *,
    wheels: Path | None = None,
    extra_args: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    **options,
) -> BuildRequest:
    """The CPU base, from build/cpu-base/Dockerfile. `wheels` is a folder with the pinned torch wheel, if any has it."""
    Reference.parse(base)
    folder = root / "build"
    dockerfile = folder / "cpu-base" / "Dockerfile"
    return BuildRequest(
        context=folder,
        dockerfile=dockerfile,
        tags=tuple(tags) or (CPU_BASE_TAG,),
        args={**proxies(environ or {}), "BASE": base, **(extra_args or {})},
        labels={
            LABEL + "revision": source.revision,
            LABEL + "created": source.created,
            LABEL + "base.name": base.partition("@")[0],
            INPUTS_LABEL: inputs_digest(base, dockerfile, folder / "locks" / "cpu-base.txt"),
        },
        named={"wheels": wheels} if wheels else {},
        **options,
    )


def inputs_digest(base: str, *files: Path) -> str:
    """sha256 over what decides an image's content; the same as an image's INPUTS_LABEL: no need to build it again."""
    digest = hashlib.sha256(base.encode())
    for file in files:
        digest.update(b"\0" + file.read_bytes())
    return digest.hexdigest()


def proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """The host's proxy variables, upper or lower case: predefined build arguments, which no image history keeps."""
    return {name: environ[name] for upper in PROXIES for name in (upper, upper.lower()) if environ.get(name)}


@contextmanager
def torch_wheels(lock: Path, folders: Iterable[Path]) -> Iterator[Path | None]:
    """A temporary folder with the one torch wheel that `lock` pins, taken from the first of `folders` that has it.

    None where no folder does: the build then downloads it. Only that wheel is handed in, because a named context is
    sent whole and a wheel folder may hold anything.
    """
    pinned = re.search(r"^torch==(\S+)$", lock.read_text(), re.MULTILINE)
    wheel = next((w for f in folders for w in sorted(f.glob(f"torch-{pinned[1]}-*.whl"))), None) if pinned else None
    if wheel is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="flashnext-wheels-") as folder:
        try:
            os.link(wheel, Path(folder) / wheel.name)
        except OSError:  # another file system, or a file that is not ours
            shutil.copyfile(wheel, Path(folder) / wheel.name)
        yield Path(folder)


def find_links_folders(environ: Mapping[str, str]) -> list[Path]:
    """pip's own setting for wheel folders on this host, as far as it names local folders."""
    words = environ.get("PIP_FIND_LINKS", "").split()
    return [p for p in (Path(w.removeprefix("file://")) for w in words) if p.is_dir()]


def run_build(request: BuildRequest, mode: Mode) -> BuildResult:
    """Build, showing progress. Refusal (exit 2) if the Dockerfile is missing, (exit 8) if the build fails.

    A failing step's last lines come along in the refusal, to be printed before the ERROR line.
    """
    if not request.dockerfile.is_file():
        raise Refusal(
            f"there is no {request.dockerfile}",
            "run this from a clone of the repository, or name one with --file",
            Exit.USAGE,
        )
    for tag in request.tags:
        parse_tag(tag)
    command = buildx()
    log = BuildLog()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flashnext-build-") as scratch:
        iid_file = Path(scratch) / "iid"
        returncode = _run([*command, *request.argv(iid_file)], log, mode)
        if returncode != 0 or not iid_file.exists():
            raise _failure(log, returncode)
        image_id = iid_file.read_text().strip()
    done = [s for s in log.visible if s.completed_s is not None]
    return BuildResult(
        image_id=image_id,
        tags=request.tags,
        base=request.args.get("BASE_IMAGE") or request.args.get("BASE", ""),
        revision=request.labels.get(LABEL + "revision", "unknown"),
        seconds=round(time.monotonic() - began_s, 1),
        steps=len(done),
        cached_steps=sum(s.cached for s in done),
        warnings=tuple(log.warnings),
    )


def _run(argv: list[str], log: BuildLog, mode: Mode) -> int:
    # an own group: Ctrl-C comes to us alone, and the builder is then asked to stop and waited for
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert child.stderr is not None
    try:
        with show_build(log, mode) as shown:
            for line in child.stderr:
                shown(log.feed(line))
        return child.wait()
    except BaseException:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise


class BuildFailed(Refusal):
    """A failed build, with the last output lines of the step that failed."""

    def __init__(self, message: str, fix: str, step: Step | None):
        super().__init__(message, fix, Exit.DOCKER)
        self.lines = step.last_lines() if step else []
        self.step = step.name if step else None


def _failure(log: BuildLog, returncode: int) -> Refusal:
    step, complaint = log.failed, log.complaint or f"buildx ended with exit code {returncode}"
    if step is None:
        return BuildFailed(f"the build did not start: {complaint}", hint(complaint, "see the lines above"), None)
    exit_code = re.search(r"exit code: \d+", step.error or "")
    if exit_code and step.last_lines():
        # the two streams of a step arrive in any order, and the cause stands on the second
        said = step.last_error_line or step.last_lines()[-1]
        text = f"the build failed at {step.name[:120]!r}, {exit_code[0]}, saying {said[:200]!r}"
    else:
        text = f"the build failed at {step.name[:120]!r}: {step.error}"
    both = "\n".join([step.error or "", *step.last_lines()])
    return BuildFailed(text, hint(both, "correct the step named; its last lines stand above"), step)
