#!/usr/bin/env python3
"""Decide whether a vLLM tree is exactly the one the series was made for, and only then patch it, or put it back.

    python3 patches/apply.py TREE              apply the series and install the engine package (both, or nothing)
    python3 patches/apply.py TREE --check      say in which state the tree is; changes nothing
    python3 patches/apply.py TREE --reverse    back to upstream's bytes; removes the engine package
    python3 patches/apply.py TREE --refresh    developers: rewrite targets.toml from the series and a pristine tree

TREE is the folder that holds `vllm/` (a site-packages folder). It needs the standard library only and never imports
vLLM. Options: `--no-engine` leaves TREE/flashnext alone, `--json` prints one JSON object on stdout, `--series DIR` and
`--package DIR` replace the folders beside this file.

What it reads: `vllm-X.Y.Z/series` (patch names in order, # comments), the patches, `vllm-X.Y.Z/targets.toml` (sha256 of
each touched file before and after the whole series), and the tree. Rules, in order:
1. The folder is chosen by the tree's own version (vllm/_version.py, else the dist-info name; a local part such as
   +cu129 is ignored). No folder for it: refused.
2. All targets `after`: done already. All `before`: go on. Anything else: refused, naming each file.
3. Patches are applied in memory, at the exact line and with exact context; what comes out must hash to `after` and
   compile.
4. Only then are files written: staged beside their targets with mode, owner and a different modification time,
   renamed into place, cached bytecode dropped. If a step fails, all that was done before it is undone.

Exit codes
     0  applied (now or before); with --check: series applied and engine package current; with --reverse: pristine
     2  usage: no such tree, unknown option, no TOML reader
    10  --check only: the tree is pristine
    11  drift: another vLLM version, or a file that is neither upstream's nor ours, or a half-applied tree
    12  the series itself is broken: a patch does not parse, does not apply, or gives other bytes than targets.toml says
    13  writing failed; everything was put back
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import csv
import hashlib
import importlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = "flashnext"
MANIFEST = "_installed.json"
HEADER_FIELDS = ("Subject", "Why", "How", "Upstream", "Remove when")

EXIT_OK, EXIT_USAGE, EXIT_PRISTINE, EXIT_DRIFT, EXIT_SERIES, EXIT_WRITE = 0, 2, 10, 11, 12, 13


class Refused(Exception):
    """One ERROR line, one Fix line, one exit code."""

    def __init__(self, code: int, error: str, fix: str) -> None:
        super().__init__(error)
        self.code, self.error, self.fix = code, error, fix


# ---------------------------------------------------------------------------------------------------------------------
# Unified diffs: a parser and an applier with no tolerance at all
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hunk:
    """`old_start` and `new_start` are 1-based; with no old lines, `old_start` is the line after which to insert."""

    old_start: int
    new_start: int
    lines: tuple[tuple[bytes, bytes], ...]  # (b" ", b"-" or b"+", the line with its line end)

    @property
    def old(self) -> list[bytes]:
        return [text for mark, text in self.lines if mark != b"+"]

    @property
    def new(self) -> list[bytes]:
        return [text for mark, text in self.lines if mark != b"-"]

    def reversed(self) -> Hunk:
        swap = {b"+": b"-", b"-": b"+", b" ": b" "}
        return Hunk(self.new_start, self.old_start, tuple((swap[mark], text) for mark, text in self.lines))


@dataclass(frozen=True)
class FileDiff:
    path: str  # relative to TREE, with forward slashes
    hunks: tuple[Hunk, ...]

    def reversed(self) -> FileDiff:
        return FileDiff(self.path, tuple(hunk.reversed() for hunk in self.hunks))


@dataclass(frozen=True)
class Patch:
    name: str
    header: Mapping[str, str]
    files: tuple[FileDiff, ...]


def _broken(name: str, why: str) -> Refused:
    return Refused(
        EXIT_SERIES,
        f"patch {name}: {why}",
        "make the diff again with `diff -U1` against the tree with the patches before it applied",
    )


_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(?: .*)?\n$")


def parse_patch(name: str, data: bytes) -> Patch:
    """Read a header of `Field: text` lines (continued by indented lines) and the unified diff under it.

    Only changes to existing files: no renames, creations or deletions (new code belongs in the engine package).
    Raises Refused (12) on anything else, line counts that do not add up, and text after the last hunk.
    """
    lines = split_lines(data)
    start = next((i for i, line in enumerate(lines) if line.startswith(b"--- ")), len(lines))
    header = _parse_header(name, lines[:start])
    files: list[FileDiff] = []
    i = start
    while i < len(lines):
        i, diff = _parse_file(name, lines, i)
        if any(diff.path == other.path for other in files):
            raise _broken(name, f"{diff.path} appears twice")
        files.append(diff)
    if not files:
        raise _broken(name, "has no diff")
    return Patch(name, header, tuple(files))


def _parse_header(name: str, lines: list[bytes]) -> dict[str, str]:
    header: dict[str, str] = {}
    current = ""
    for raw in lines:
        line = raw.decode("utf-8").rstrip()
        if not line:
            continue
        if line[0].isspace():
            if not current:
                raise _broken(name, f"header line without a field: {line.strip()!r}")
            header[current] += " " + line.strip()
            continue
        current, colon, text = line.partition(":")
        if not colon or current in header:
            raise _broken(name, f"header line is not `Field: text`, or its field is there twice: {line!r}")
        header[current] = text.strip()
    return header


def _parse_file(name: str, lines: list[bytes], i: int) -> tuple[int, FileDiff]:
    paths = []
    for offset, mark in ((0, b"--- a/"), (1, b"+++ b/")):
        line = lines[i + offset] if i + offset < len(lines) else b""
        if not line.startswith(mark):
            raise _broken(name, f"line {i + offset + 1}: expected `{mark.decode()}...`, found {line!r}")
        paths.append(line[len(mark) :].split(b"\t")[0].strip().decode("utf-8"))
    if paths[0] != paths[1] or not re.fullmatch(r"vllm/[\w./-]+", paths[0]) or ".." in paths[0].split("/"):
        raise _broken(name, f"{paths[0]!r} and {paths[1]!r} must be one and the same path under vllm/")
    i += 2
    hunks: list[Hunk] = []
    while i < len(lines) and lines[i].startswith(b"@@"):
        i, hunk = _parse_hunk(name, lines, i)
        hunks.append(hunk)
    if not hunks:
        raise _broken(name, f"{paths[0]}: no hunk at line {i + 1}")
    return i, FileDiff(paths[0], tuple(hunks))


def _parse_hunk(name: str, lines: list[bytes], i: int) -> tuple[int, Hunk]:
    match = _HUNK.match(lines[i])
    if not match:
        raise _broken(name, f"line {i + 1}: malformed hunk header {lines[i]!r}")
    old_start, old_count, new_start, new_count = (1 if g is None else int(g) for g in match.groups())
    body: list[tuple[bytes, bytes]] = []
    left = {b"-": old_count, b"+": new_count}
    i += 1
    while left[b"-"] > 0 or left[b"+"] > 0:
        line = lines[i] if i < len(lines) else b""
        mark, text = line[:1], line[1:]
        if mark not in (b" ", b"-", b"+"):
            raise _broken(name, f"line {i + 1}: the hunk ends before its line counts are used up")
        for side in (b"-", b"+"):
            if mark in (b" ", side):
                left[side] -= 1
        body.append((mark, text))
        i += 1
        if i < len(lines) and lines[i].startswith(b"\\"):
            body[-1] = (mark, text[: -len(b"\n")])
            i += 1
    if left[b"-"] or left[b"+"]:
        raise _broken(name, f"line {i + 1}: the hunk has more lines than its header says")
    return i, Hunk(old_start, new_start, tuple(body))


def split_lines(data: bytes) -> list[bytes]:
    """Lines with their line ends, broken at line feeds only (bytes.splitlines breaks at carriage returns too)."""
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def apply_diff(name: str, diff: FileDiff, data: bytes) -> bytes:
    """The file after `diff`; every hunk at its exact line with exactly its old lines, or Refused (12)."""
    source = split_lines(data)
    result: list[bytes] = []
    done = 0  # lines of source already handled
    for hunk in diff.hunks:
        old, new = hunk.old, hunk.new
        begin = hunk.old_start - 1 if old else hunk.old_start
        where = f"{diff.path}: hunk at line {hunk.old_start}"
        if begin < done or begin + len(old) > len(source):
            raise _broken(name, f"{where} overlaps the one before it or lies past the end of the file")
        if source[begin : begin + len(old)] != old:
            at = next(k for k, line in enumerate(old) if source[begin + k] != line)
            raise _broken(name, f"{where} does not match: line {begin + at + 1} is {source[begin + at]!r}")
        result += source[done:begin]
        if len(result) != (hunk.new_start - 1 if new else hunk.new_start):
            raise _broken(name, f"{where}: its new position +{hunk.new_start} does not follow from the hunks before it")
        result += new
        done = begin + len(old)
    return b"".join(result + source[done:])


# ---------------------------------------------------------------------------------------------------------------------
# The series and the tree
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    before: str  # sha256, hex
    after: str


@dataclass(frozen=True)
class Series:
    folder: Path
    version: str
    patches: tuple[Patch, ...]
    targets: Mapping[str, Target]

    def touched(self) -> list[str]:
        return sorted({diff.path for patch in self.patches for diff in patch.files})

    def results(self, before: Mapping[str, bytes]) -> dict[str, bytes]:
        """{path: bytes after the whole series} from {path: upstream's bytes}."""
        now = dict(before)
        for patch in self.patches:
            for diff in patch.files:
                now[diff.path] = apply_diff(patch.name, diff, now[diff.path])
        return now

    def originals(self, after: Mapping[str, bytes]) -> dict[str, bytes]:
        """The inverse of `results`, from the diffs alone."""
        now = dict(after)
        for patch in reversed(self.patches):
            for diff in patch.files:
                now[diff.path] = apply_diff(patch.name, diff.reversed(), now[diff.path])
        return now


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tree_version(tree: Path) -> str:
    """The tree's vLLM version without its local part, read as text. Refused (2) if it cannot be told."""
    if not (tree / "vllm").is_dir():
        raise Refused(EXIT_USAGE, f"{tree} holds no vllm/ folder", "pass the site-packages folder that holds vllm/")
    version = None
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        for node in ast.parse((tree / "vllm" / "_version.py").read_text(encoding="utf-8")).body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Constant)
                and any(isinstance(name, ast.Name) and name.id == "__version__" for name in node.targets)
            ):
                version = str(node.value.value)
    if version is None:
        found = sorted(info.name for info in _dist_infos(tree))
        version = found[0].removesuffix(".dist-info").split("-")[1] if len(found) == 1 else None
    if version is None:
        raise Refused(
            EXIT_USAGE,
            f"cannot tell which vLLM {tree} holds: no version in vllm/_version.py and not exactly one vllm dist-info",
            "pass the site-packages folder of an installed vLLM wheel",
        )
    return version.partition("+")[0]


def _dist_infos(tree: Path) -> list[Path]:
    return [info for info in tree.glob("vllm*.dist-info") if re.match(r"vllm(_cpu)?-\d", info.name)]


def load_patches(folder: Path) -> tuple[Patch, ...]:
    try:
        listed = (folder / "series").read_text(encoding="utf-8").splitlines()
    except OSError as err:
        raise Refused(EXIT_SERIES, f"cannot read {folder / 'series'}: {err.strerror}", "restore the folder") from None
    names = [name for line in listed if (name := line.partition("#")[0].strip())]
    patches = []
    for name in names:
        try:
            data = (folder / name).read_bytes()
        except OSError as err:
            raise _broken(name, f"listed in series, but cannot be read: {err.strerror}") from None
        patches.append(parse_patch(name, data))
    return tuple(patches)


def load_targets(folder: Path, version: str) -> dict[str, Target]:
    path = folder / "targets.toml"
    try:
        table = _toml_loads(path.read_text(encoding="utf-8"))
        if table["vllm"] != version:
            raise ValueError(f"it is for vLLM {table['vllm']}")
        return {name: Target(str(row["before"]), str(row["after"])) for name, row in table["files"].items()}
    except Refused:
        raise
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as err:
        raise Refused(EXIT_SERIES, f"{path} is not readable: {err!r}", "run apply.py TREE --refresh") from None


def _toml_loads(text: str) -> dict:
    for module in ("tomllib", "tomli", "pip._vendor.tomli"):  # Python 3.10 has no tomllib; its pip brings one
        with contextlib.suppress(ImportError):
            return importlib.import_module(module).loads(text)
    raise Refused(EXIT_USAGE, "no TOML reader for this Python", "use Python 3.11 or newer, or install tomli")


def load_series(root: Path, version: str, need_targets: bool = True) -> Series:
    """The series for `version` below `root`; `root` may also be that folder itself."""
    folder = root if (root / "series").is_file() else root / f"vllm-{version}"
    if folder.name != f"vllm-{version}" or not folder.is_dir():
        have = sorted(path.name.removeprefix("vllm-") for path in folder.parent.glob("vllm-*") if path.is_dir())
        raise Refused(
            EXIT_DRIFT,
            f"the tree holds vLLM {version}; there is a series for {', '.join(have) or 'no version'} only",
            f"install vLLM {have[-1]}" if have else "add a series folder for this version",
        )
    series = Series(folder, version, load_patches(folder), load_targets(folder, version) if need_targets else {})
    if need_targets and set(series.touched()) != set(series.targets):
        odd = sorted(set(series.touched()) ^ set(series.targets))
        raise Refused(
            EXIT_SERIES,
            f"targets.toml and the series do not name the same files: {', '.join(odd)}",
            "run apply.py TREE --refresh on a pristine tree",
        )
    return series


@dataclass(frozen=True)
class FileState:
    path: str
    state: str  # "pristine", "applied", "drift" or "missing"
    found: str | None
    target: Target


def read_files(tree: Path, paths: list[str]) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {}
    for path in paths:
        try:
            found[path] = (tree / path).read_bytes()
        except FileNotFoundError:
            found[path] = None
        except OSError as err:
            fix = "check its permissions"
            raise Refused(EXIT_DRIFT, f"{tree / path} cannot be read: {err.strerror}", fix) from None
    return found


def inspect_files(series: Series, content: Mapping[str, bytes | None]) -> list[FileState]:
    states = []
    for path, target in sorted(series.targets.items()):
        data = content[path]
        found = None if data is None else sha256(data)
        state = {None: "missing", target.before: "pristine", target.after: "applied"}.get(found, "drift")
        states.append(FileState(path, state, found, target))
    return states


def overall(files: list[FileState]) -> str:
    """ "pristine", "applied", "mixed" (each file is one or the other) or "drift"."""
    kinds = {file.state for file in files}
    if not kinds:
        return "applied"  # an empty series
    if kinds & {"drift", "missing"}:
        return "drift"
    return kinds.pop() if len(kinds) == 1 else "mixed"


# ---------------------------------------------------------------------------------------------------------------------
# The engine package
# ---------------------------------------------------------------------------------------------------------------------


def package_files(folder: Path) -> dict[str, bytes]:
    """{relative path: bytes} of a package folder, without caches and the manifest."""
    found = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_file() and "__pycache__" not in relative.parts and str(relative) != MANIFEST:
            found[relative.as_posix()] = path.read_bytes()
    return found


def package_state(tree: Path, source: Mapping[str, bytes]) -> str:
    """ "absent", "current", "outdated" (ours, unchanged since it was installed), "modified" or "foreign"."""
    folder = tree / PACKAGE
    if not folder.exists():
        return "absent"
    try:
        recorded = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return "foreign"
    found = package_files(folder)
    if found == source:
        return "current"
    return "outdated" if {name: sha256(data) for name, data in found.items()} == recorded else "modified"


def _with_manifest(source: Mapping[str, bytes]) -> dict[str, bytes]:
    manifest = {"by": "patches/apply.py", "files": {name: sha256(data) for name, data in source.items()}}
    return {**source, MANIFEST: (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()}


# ---------------------------------------------------------------------------------------------------------------------
# Writing: all or nothing
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Transaction:
    """Steps that are staged first, then carried out in order, and undone in reverse order if one fails."""

    _steps: list[tuple[Callable[[], None], Callable[[], None]]] = field(default_factory=list)
    _litter: list[Path] = field(default_factory=list)

    def _aside(self, path: Path, what: str) -> Path:
        aside = path.with_name(f".{path.name}.{what}-{os.getpid()}")
        self._litter.append(aside)
        return aside

    def write(self, path: Path, data: bytes) -> None:
        """Replace a file's bytes; keeps mode and owner, drops its cached bytecode.

        The modification time must differ by a whole second (bytecode records it in seconds); bytecode of the
        unchecked-hash kind does not look at it at all, so the cache files go too.
        """
        was = path.stat()
        staged = self._aside(path, "new")
        with open(staged, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        now = staged.stat()
        if (now.st_uid, now.st_gid) != (was.st_uid, was.st_gid):
            os.chown(staged, was.st_uid, was.st_gid)
        os.chmod(staged, was.st_mode & 0o7777)  # after chown, which may clear bits
        if int(now.st_mtime) == int(was.st_mtime):
            os.utime(staged, ns=(now.st_atime_ns, was.st_mtime_ns + 2_000_000_000))
        kept = self._aside(path, "old")
        try:
            os.link(path, kept)
        except OSError:  # a file system without hard links
            shutil.copy2(path, kept)

        def do() -> None:
            os.replace(staged, path)
            for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
                cached.unlink()

        self._steps.append((do, lambda: os.replace(kept, path)))

    def folder(self, path: Path, files: Mapping[str, bytes] | None) -> None:
        """Replace a folder by one with `files`, or remove it (None)."""
        old, new = self._aside(path, "old"), self._aside(path, "new")
        for name, data in (files or {}).items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(data)

        def do() -> None:
            if path.exists():
                os.rename(path, old)
            if files is not None:
                os.rename(new, path)

        def undo() -> None:
            if files is not None and not new.exists():
                os.rename(path, new)
            if old.exists():
                os.rename(old, path)

        self._steps.append((do, undo))

    def commit(self) -> None:
        undo: list[Callable[[], None]] = []
        try:
            for do, back in self._steps:
                undo.append(back)
                do()
        except BaseException as err:
            failed = []
            for back in reversed(undo):
                try:
                    back()
                except OSError as again:
                    failed.append(str(again))
            if failed:
                kept = [str(path) for path in self._litter if path.exists()]
                self._litter.clear()
                raise Refused(
                    EXIT_WRITE,
                    f"writing failed ({err}) and not all was put back ({'; '.join(failed)})",
                    f"reinstall vLLM; set aside and not removed: {', '.join(kept)}",
                ) from err
            raise

    def clean(self) -> None:
        for path in self._litter:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def transaction() -> Iterator[Transaction]:
    steps = Transaction()
    try:
        yield steps
        steps.commit()
    except OSError as err:
        raise Refused(
            EXIT_WRITE,
            f"could not write {err.filename or 'the tree'}: {err.strerror or err}; everything was put back",
            "free space or fix the permissions, then run it again",
        ) from err
    finally:
        steps.clean()


# ---------------------------------------------------------------------------------------------------------------------
# The four actions
# ---------------------------------------------------------------------------------------------------------------------


def _drift(tree: Path, files: list[FileState]) -> Refused:
    state = overall(files)
    odd = [file for file in files if file.state in ({"drift", "missing"} if state == "drift" else {"pristine"})]
    named = "; ".join(
        f"{file.path} is {file.found or 'not there'} "
        + (f"(expected {file.target.before} before or {file.target.after} after)" if state == "drift" else "(before)")
        for file in odd
    )
    if state == "mixed":
        named += "; all others are as after the series"
    return Refused(EXIT_DRIFT, f"{tree} is neither pristine nor patched: {named}", "reinstall vLLM, then run it again")


def _package_refusal(tree: Path, state: str) -> Refused:
    why = {"foreign": "was not put there by apply.py", "modified": "was changed after apply.py put it there"}[state]
    return Refused(EXIT_DRIFT, f"{tree / PACKAGE} {why}", "move it away, or pass --no-engine")


def _report(tree: Path, series: Series, files: list[FileState], engine: str | None, changed: bool) -> dict:
    state = overall(files)
    if engine is not None and state in ("applied", "pristine"):
        wanted = {"applied": ("current",), "pristine": ("absent",)}[state]
        state = state if engine in wanted else "mixed"
    return {
        "schema": 1,
        "tree": str(tree),
        "vllm": series.version,
        "state": state,
        "engine": engine,
        "changed": changed,
        "patches": [patch.name for patch in series.patches],
        "files": [
            {
                "path": file.path,
                "state": file.state,
                "found": file.found,
                "before": file.target.before,
                "after": file.target.after,
                "patches": [p.name for p in series.patches if any(diff.path == file.path for diff in p.files)],
            }
            for file in files
        ],
    }


def check(tree: Path, series: Series, source: Mapping[str, bytes] | None) -> dict:
    """The state of the tree; `source` None leaves the engine package out of it."""
    files = inspect_files(series, read_files(tree, series.touched()))
    return _report(tree, series, files, None if source is None else package_state(tree, source), False)


def apply(tree: Path, series: Series, source: Mapping[str, bytes] | None) -> dict:
    """Apply the series and install the package. Raises Refused (11, 12, 13); then nothing has changed."""
    return _turn(tree, series, source, to="applied")


def reverse(tree: Path, series: Series, source: Mapping[str, bytes] | None) -> dict:
    """Back to upstream's bytes and no package. Raises Refused (11, 12, 13); then nothing has changed."""
    return _turn(tree, series, source, to="pristine")


def _turn(tree: Path, series: Series, source: Mapping[str, bytes] | None, to: str) -> dict:
    content = read_files(tree, series.touched())
    files = inspect_files(series, content)
    state = overall(files)
    if state not in ("pristine", "applied"):
        raise _drift(tree, files)
    on = to == "applied"
    writes: dict[str, bytes] = {}
    if state != to:
        writes = series.results(content) if on else series.originals(content)
        wanted = {path: target.after if on else target.before for path, target in series.targets.items()}
        _verify(series, writes, wanted)
    engine = None if source is None else package_state(tree, source)
    if engine in ("foreign", "modified"):
        raise _package_refusal(tree, engine)
    package = engine in (("absent", "outdated") if on else ("current", "outdated"))
    with transaction() as steps:
        if package and on:  # first, so that a patched vLLM never lacks what it imports
            steps.folder(tree / PACKAGE, _with_manifest(source))
        for path, data in writes.items():
            steps.write(tree / path, data)
        if package and not on:  # last, for the same reason
            steps.folder(tree / PACKAGE, None)
    return {**check(tree, series, source), "changed": bool(writes) or package}


def _verify(series: Series, results: Mapping[str, bytes], wanted: Mapping[str, str]) -> None:
    for path, data in results.items():
        if sha256(data) != wanted[path]:
            raise Refused(
                EXIT_SERIES,
                f"the series gives {path} with sha256 {sha256(data)}, targets.toml says {wanted[path]}",
                "run apply.py TREE --refresh on a pristine tree",
            )
        _compile(path, data)


def _compile(path: str, data: bytes) -> None:
    if not path.endswith(".py"):
        return
    try:
        compile(data, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as err:
        raise Refused(EXIT_SERIES, f"{path} does not compile after the series: {err}", "mend the patch") from None


def refresh(tree: Path, series: Series) -> dict:
    """Rewrite targets.toml. The wheel's own RECORD says what is pristine, so that a patched tree cannot slip in."""
    records = [info / "RECORD" for info in _dist_infos(tree) if (info / "RECORD").is_file()]
    if len(records) != 1:
        raise Refused(EXIT_USAGE, f"{tree} has no vllm dist-info/RECORD to compare with", "use an installed wheel")
    with open(records[0], newline="", encoding="utf-8") as file:
        recorded = {row[0]: row[1].removeprefix("sha256=") for row in csv.reader(file) if len(row) > 1}
    content = read_files(tree, series.touched())
    for path, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data or b"").digest()).rstrip(b"=").decode()
        if data is None or recorded.get(path) != digest:
            raise Refused(EXIT_DRIFT, f"{path} is not as the wheel brought it", "--reverse first, or reinstall vLLM")
    results = series.results(content)
    for path, data in results.items():
        _compile(path, data)
    lines = ["# Written by `apply.py TREE --refresh`: sha256 of each touched file, before and after the whole series."]
    lines += [f'vllm = "{series.version}"']
    for path in series.touched():
        lines += ["", f'[files."{path}"]', f'before = "{sha256(content[path])}"', f'after = "{sha256(results[path])}"']
    (series.folder / "targets.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return check(tree, load_series(series.folder, series.version), None)


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="apply.py",
        description="Apply the vLLM patch series to TREE (the folder that holds vllm/), check it, or take it back.",
        epilog="exit codes: 0 applied (--reverse: pristine), 2 usage, 10 --check: pristine, 11 drift, 12 the series is "
        "broken, 13 writing failed and everything was put back",
    )
    parser.add_argument("tree", type=Path, metavar="TREE")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="only report the state")
    action.add_argument("--reverse", action="store_true", help="restore upstream's bytes")
    action.add_argument("--refresh", action="store_true", help="developers: rewrite targets.toml")
    parser.add_argument(
        "--engine",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=f"install (--reverse: remove) TREE/{PACKAGE} too",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--series", type=Path, default=HERE, metavar="DIR", help="folder with vllm-X.Y.Z/ or one of it")
    parser.add_argument("--package", type=Path, default=HERE / PACKAGE, metavar="DIR", help="the engine package")
    return parser


def _sentence(report: dict, args: argparse.Namespace) -> str:
    count = f"{len(report['patches'])} patches, {len(report['files'])} files"
    head = f"vLLM {report['vllm']} at {report['tree']}"
    engine = "" if report["engine"] is None else f", engine package {report['engine']}"
    if args.refresh:
        return f"targets.toml rewritten ({count})"
    done = "" if args.check else ("" if report["changed"] else " already")
    return f"{head}:{done} {report['state']} ({count}{engine})"


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        tree = args.tree.resolve()
        series = load_series(args.series.resolve(), tree_version(tree), need_targets=not args.refresh)
        source = package_files(args.package) if args.engine else None
        if source is not None and "__init__.py" not in source:
            raise Refused(EXIT_USAGE, f"{args.package} is not the engine package", "pass --package, or --no-engine")
        if args.refresh:
            report = refresh(tree, series)
        elif args.check:
            report = check(tree, series, source)
        else:
            report = (reverse if args.reverse else apply)(tree, series, source)
    except Refused as refused:
        if args.json:
            print(json.dumps({"schema": 1, "state": "refused", "error": refused.error, "code": refused.code}))
        print(f"ERROR: {refused.error}\nFix: {refused.fix}", file=sys.stderr)
        return refused.code
    print(json.dumps(report, indent=1) if args.json else _sentence(report, args))
    if not args.check:
        return EXIT_OK
    if report["state"] in ("drift", "mixed") and not args.json:
        for file in report["files"]:
            print(f"  {file['state']:9} {file['path']} ({file['found'] or 'not there'})")
    return {"applied": EXIT_OK, "pristine": EXIT_PRISTINE}.get(report["state"], EXIT_DRIFT)


if __name__ == "__main__":
    sys.exit(main())
