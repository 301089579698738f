"""Decides how a checkpoint gets into a folder whole: what is missing, whether it fits, whether what came is what the hub lists.

Rule order of `fetch`
1. A folder that this user cannot write to is refused. Then the hub is asked once for the revision: its commit, and each
   file's size and hash. A folder of this machine is listed instead, and its files are copied.
2. A file that is there with the right size, and whose hash was checked before (NOTE) or is right now, is kept.
3. What is left must fit on the disk, with a margin. Nothing is written before that is known.
4. Files come several at a time with huggingface_hub's HTTP, each into NAME.partial, where a later try or run goes on. A
   connection that fails is tried again; a file with the wrong hash is thrown away and fetched once more, whole.
5. The folder is done when every file has its hash; NOTE then says of which commit.

The token is read from a file and is part of no message and no argument list. Mistakes are Refusals: 2 for what was asked,
4 for what the hub has or sends, 5 for the disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .boot import write_json
from .errors import Exit, Refusal
from .lint import FETCH_NOTE as NOTE
from .units import GIB, format_gib

DEFAULT_REPO = "Minachist/Qwen3.8-Flash-Next-INT4-Mixed-AutoRound"
WORKERS = 4
MARGIN_BYTES = GIB
TRIES = 5
LOCK = ".flashnext-fetch.lock"
_BLOCK_BYTES = 8 << 20
_LEAVE = frozenset({".gitattributes", NOTE, LOCK})

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A file as the source lists it. `digest`: sha256, or the blob id of git (`git:` before it); None: not listed."""

    name: str
    size_bytes: int
    digest: str | None


@dataclass(frozen=True, kw_only=True)
class Listing:
    """`commit` is None for a folder of this machine."""

    source: str
    commit: str | None
    files: tuple[Wanted, ...]

    @property
    def total_bytes(self) -> int:
        return sum(f.size_bytes for f in self.files)


@dataclass(frozen=True, kw_only=True)
class Fetched:
    target: str
    commit: str | None
    files: int
    total_bytes: int
    fetched_bytes: int
    took_s: float


# --- what there is ------------------------------------------------------------------------------------------------------


def default_target(root: Path = Path("/")) -> Path:
    """Where the server looks: /model where that is a folder, as in the container, else ./model, which compose mounts there."""
    there = root / "model"
    return there if there.is_dir() else Path("model")


def read_token(path: str | None) -> str | None:
    """The token in a file, None where none is named. Raises Refusal (code 2); the token is never part of a message."""
    if not path:
        return None
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise Refusal(
            f"the token file {path} cannot be read: {reason}", "write the token as one line", Exit.USAGE
        ) from None
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise Refusal(f"the token file {path} does not hold one token", "write the token as one line", Exit.USAGE)
    return token


def _hub() -> Any:
    # Imported late: no other command needs it, and it takes a quarter of a second.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # a mirror speaks plain HTTP only
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise Refusal(
            "huggingface_hub is not installed",
            "pip install huggingface_hub, or use the image, which has it",
            Exit.USAGE,
        ) from None
    # What it says of each retry would break the lines of the progress.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return huggingface_hub


def _refuse_hub(error: Exception, repo: str, revision: str | None, endpoint: str) -> Refusal:
    """The Refusal for what the hub or the way to it answered."""
    errors = _hub().errors
    if isinstance(error, errors.GatedRepoError):
        what, fix = (
            f"{repo} asks for consent or a token",
            "accept its terms on the hub and name a file with your token (--token-file)",
        )
    elif isinstance(error, errors.RepositoryNotFoundError):
        what, fix = (
            f"{endpoint} has no {repo}, or it is private",
            "check the name; for a private one name a file with your token (--token-file)",
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        what, fix = (
            f"{repo} has no revision {revision}",
            "name a branch, a tag or a commit of it, or leave --revision out",
        )
    elif isinstance(error, errors.HFValidationError):
        return Refusal(f"{repo[:80]!r} is neither a folder here nor OWNER/NAME", "name one of the two", Exit.USAGE)
    else:
        text = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        what, fix = (
            f"{endpoint} does not answer: {text}",
            "check the network, or name a mirror in HF_ENDPOINT; a second run goes on where this one stopped",
        )
    return Refusal(what, fix, Exit.CHECKPOINT)


def _safe(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\\" not in name and name.isprintable()


def list_hub(repo: str, revision: str | None, endpoint: str, token: str | None) -> Listing:
    """What the hub has of a model repository at a revision. Raises Refusal."""
    hub = _hub()
    try:
        info = hub.HfApi(endpoint=endpoint, token=token or False).model_info(
            repo, revision=revision, files_metadata=True
        )
    except Exception as error:
        raise _refuse_hub(error, repo, revision, endpoint) from None
    files = []
    for entry in info.siblings or ():
        if entry.rfilename in _LEAVE:
            continue
        if not _safe(entry.rfilename) or not isinstance(entry.size, int) or entry.size < 0:
            raise Refusal(
                f"{repo} lists a file {str(entry.rfilename)[:80]!r} without a usable name or size",
                "take another mirror (HF_ENDPOINT) or another repository",
                Exit.CHECKPOINT,
            )
        lfs = entry.lfs
        digest = lfs.sha256 if lfs else f"git:{entry.blob_id}" if entry.blob_id else None
        files.append(Wanted(name=entry.rfilename, size_bytes=entry.size, digest=digest))
    return _checked(Listing(source=repo, commit=info.sha, files=tuple(files)))


def list_folder(folder: Path) -> Listing:
    """What a folder of this machine holds; folders inside and hidden files are left out. Raises Refusal."""
    try:
        files = [
            Wanted(name=path.name, size_bytes=path.stat().st_size, digest=None)
            for path in sorted(folder.iterdir())
            if path.is_file() and not path.name.startswith(".")
        ]
    except OSError as error:
        raise Refusal(
            f"{folder} cannot be read: {error.strerror}", "give this user read access to it", Exit.CHECKPOINT
        ) from None
    return _checked(Listing(source=str(folder.absolute()), commit=None, files=tuple(files)))


def _checked(listing: Listing) -> Listing:
    names = {f.name for f in listing.files}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise Refusal(
            f"{listing.source} is no safetensors checkpoint: it lacks config.json or *.safetensors",
            f"name a repository with both, such as {DEFAULT_REPO}",
            Exit.CHECKPOINT,
        )
    return listing


# --- what is here -------------------------------------------------------------------------------------------------------


def digest_of(path: Path, like: str) -> str:
    """The hash of a file in the manner of `like`: sha256, or git's blob id. Raises OSError."""
    git = like.startswith("git:")
    digest = hashlib.sha1(usedforsecurity=False) if git else hashlib.sha256()
    if git:
        digest.update(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return f"git:{digest.hexdigest()}" if git else digest.hexdigest()


def _read_note(target: Path) -> dict[str, list]:
    """Name -> [size, mtime_ns, digest] of files whose hash was found right."""
    try:
        note = json.loads((target / NOTE).read_text(encoding="utf-8"))["files"]
        return note if isinstance(note, dict) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _stamp(path: Path, wanted: Wanted) -> list:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, wanted.digest]


def _is_right(target: Path, wanted: Wanted, note: Mapping[str, list]) -> bool:
    path = target / wanted.name
    try:
        if not path.is_file() or path.stat().st_size != wanted.size_bytes:
            return False
        if wanted.digest is None or note.get(wanted.name) == _stamp(path, wanted):
            return True
        return digest_of(path, wanted.digest) == wanted.digest
    except OSError:
        return False


def _bytes_here(target: Path, files: Sequence[Wanted], ends: Sequence[str] = ("", ".partial")) -> int:
    """Bytes of these files that are on the disk, whole or in part."""
    done = 0
    for wanted in files:
        for end in ends:
            with suppress(OSError):
                done += min((target / f"{wanted.name}{end}").stat().st_size, wanted.size_bytes)
                break
    return done


def _nearest(target: Path) -> Path:
    """`target`, or the folder nearest above it that is there."""
    place = target.absolute()
    while not os.path.exists(place) and place != place.parent:  # Path.exists raises where it may not look
        place = place.parent
    return place


def check_writable(target: Path) -> None:
    """Refuse (code 5) where files cannot be made in `target`, or the folder itself cannot."""
    place = _nearest(target)
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        return
    try:
        fixed = os.statvfs(place).f_flag & os.ST_RDONLY
    except OSError:
        fixed = 0
    why = (
        "is no folder" if not place.is_dir() else "is mounted read-only" if fixed else "may not be written by this user"
    )
    raise Refusal(
        f"cannot fetch into {target}: {place} {why}",
        "name another folder with --to; the container sees the checkpoint read-only, so fetch on the host: "
        "./flashnext fetch --to FOLDER, with FLASHNEXT_MODEL_DIR=FOLDER",
        Exit.TABLE,
    )


def check_space(target: Path, missing_bytes: int, free_bytes: int | None = None) -> None:
    """Refuse (code 5) where `missing_bytes` and a margin do not fit beside what is on the target's disk."""
    place = _nearest(target)
    try:
        free = shutil.disk_usage(place).free if free_bytes is None else free_bytes
    except OSError as error:
        raise Refusal(f"{place} cannot be looked at: {error.strerror}", "name a writable folder", Exit.TABLE) from None
    if missing_bytes + MARGIN_BYTES > free:
        short = missing_bytes + MARGIN_BYTES - free
        raise Refusal(
            f"{format_gib(missing_bytes)} are still to be fetched, and {place} has {format_gib(free)} free",
            f"free {format_gib(short)} there, or name a folder of another disk with --to",
            Exit.TABLE,
        )


# --- fetching -----------------------------------------------------------------------------------------------------------


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Two runs that append to one file would spoil it: the second is refused (code 5)."""
    with (target / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Refusal(f"another fetch into {target} is running", "wait for it, or stop it", Exit.TABLE) from None
        yield


@contextmanager
def _watched(target: Path, files: Sequence[Wanted], progress: Progress, every_s: float) -> Iterator[None]:
    """Reports the bytes on the disk while the block runs, and once more at its end."""
    total = sum(f.size_bytes for f in files)
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(every_s):
            progress(_bytes_here(target, files), total)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        progress(_bytes_here(target, files), total)


class _Stopped(Exception):
    """Another file failed, or the user ended the run."""


class _Writer:
    """A file whose next write fails once `stop` is set: a large file must not go on for hours after the run has failed."""

    def __init__(self, file: Any, stop: threading.Event):
        self._file, self._stop = file, stop

    def write(self, data: bytes) -> int:
        if self._stop.is_set():
            raise _Stopped
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


Get = Callable[[Wanted, Path, bool, threading.Event], None]
"""(file, folder, from zero?, stop) -> nothing: brings one file. Raises what its source raises."""


def _append(wanted: Wanted, target: Path, again: bool, stop: threading.Event, more: Callable[[Any, int], None]) -> None:
    """Complete `NAME.partial` by `more(file, bytes that it has)`, from zero with `again`, and give it its name."""
    partial = target / f"{wanted.name}.partial"
    partial.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("ab") as file:
        if again or file.tell() > wanted.size_bytes:
            file.truncate(0)
            file.seek(0)
        if file.tell() < wanted.size_bytes:
            more(_Writer(file, stop), file.tell())
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, target / wanted.name)


def _from_hub(listing: Listing, endpoint: str, token: str | None) -> Get:
    hub = _hub()
    # Not hf_hub_download: since 2.4 it begins a file anew in each process, and here a file can be hours.
    from huggingface_hub.file_download import http_get

    headers = hub.utils.build_hf_headers(token=token or False)

    def get(wanted: Wanted, target: Path, again: bool, stop: threading.Event) -> None:
        url = hub.hf_hub_url(listing.source, wanted.name, revision=listing.commit, endpoint=endpoint)
        _append(
            wanted,
            target,
            again,
            stop,
            lambda file, at: http_get(url, file, resume_size=at, headers=headers, expected_size=wanted.size_bytes),
        )

    return get


def _from_folder(listing: Listing) -> Get:
    def get(wanted: Wanted, target: Path, again: bool, stop: threading.Event) -> None:
        def more(file: Any, at: int) -> None:
            with (Path(listing.source) / wanted.name).open("rb") as source:
                source.seek(at)
                shutil.copyfileobj(source, file, _BLOCK_BYTES)

        _append(wanted, target, again, stop, more)

    return get


def _one(
    wanted: Wanted, target: Path, get: Get, right: Callable[[Wanted], None], stop: threading.Event, pause_s: float
) -> None:
    """Bring one file, whole and with its hash, and call `right` then. Raises Refusal (code 4), or what `get` raised last."""
    again = wrong = False
    for attempt in range(TRIES):
        if stop.is_set():
            return
        try:
            get(wanted, target, again, stop)
        except _Stopped:
            return
        except OSError as error:  # huggingface_hub's and the sockets' errors are OSErrors or httpx's, see below
            if attempt == TRIES - 1 or _is_final(error):
                raise
            stop.wait(pause_s * 2**attempt)
            continue
        except Exception as error:
            if attempt == TRIES - 1 or not _is_network(error):
                raise
            stop.wait(pause_s * 2**attempt)
            continue
        path = target / wanted.name
        size = path.stat().st_size
        if size == wanted.size_bytes and (wanted.digest is None or digest_of(path, wanted.digest) == wanted.digest):
            right(wanted)
            return
        path.unlink()
        if wrong:
            break
        again = wrong = True
    raise Refusal(
        f"{wanted.name} came with another hash than the hub lists, twice",
        "take another mirror (HF_ENDPOINT), or wait: the source is damaged or being changed",
        Exit.CHECKPOINT,
    )


def _is_network(error: Exception) -> bool:
    return type(error).__module__.split(".")[0] in (
        "httpx",
        "httpx2",
        "httpcore",
        "httpcore2",
        "requests",
        "urllib3",
        "http",
    )


def _is_final(error: OSError) -> bool:
    """Answers that another try does not change: no such file, no right to it, a full disk."""
    import errno

    answer = getattr(getattr(error, "response", None), "status_code", None)
    return answer in (401, 403, 404) or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


def fetch(
    source: str,
    target: Path,
    *,
    revision: str | None = None,
    endpoint: str = "https://huggingface.co",
    token: str | None = None,
    workers: int = WORKERS,
    progress: Progress = lambda done, total: None,
    every_s: float = 1.0,
    pause_s: float = 2.0,
) -> Fetched:
    """Bring the checkpoint `source` (OWNER/NAME or a folder) into `target`. Raises Refusal (code 2, 4 or 5)."""
    begun = time.monotonic()
    check_writable(target)
    folder = Path(source).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise Refusal(f"{source} is a folder here, which has no revisions", "leave --revision out", Exit.USAGE)
        if folder.resolve() == target.resolve():
            raise Refusal(f"{source} is the folder to fetch into", "name another one with --to", Exit.USAGE)
        listing = list_folder(folder)
        get = _from_folder(listing)
    else:
        listing = list_hub(source, revision, endpoint, token)
        get = _from_hub(listing, endpoint, token)
    note = _read_note(target)
    missing = [f for f in listing.files if not _is_right(target, f, note)]
    # A file that is there and wrong is replaced at the end only: until then both take space.
    missing_bytes = sum(f.size_bytes for f in missing) - _bytes_here(target, missing, (".partial",))
    check_space(target, missing_bytes)
    stamps = {f.name: _stamp(target / f.name, f) for f in listing.files if f not in missing}
    one_at_a_time = threading.Lock()

    def right(wanted: Wanted, commit: str | None = None) -> None:
        """Note a file whose hash was found right, so that a later run does not read it again."""
        with one_at_a_time:
            stamps[wanted.name] = _stamp(target / wanted.name, wanted)
            write_json(target / NOTE, {"source": listing.source, "commit": commit, "files": stamps})

    try:
        target.mkdir(parents=True, exist_ok=True)
        with _alone(target):
            _fetch_all(missing, target, get, right, workers, progress, every_s, pause_s)
            # Only a whole folder is of a commit.
            right(listing.files[0], listing.commit)
    except Refusal:
        raise
    except OSError as error:
        if getattr(error, "response", None) is None and error.errno is not None and error.filename is not None:
            raise Refusal(
                f"cannot write to {target}: {error.strerror}", "free space or give write access there", Exit.TABLE
            ) from None
        raise _refuse_hub(error, source, revision, endpoint) from None
    except Exception as error:
        raise _refuse_hub(error, source, revision, endpoint) from None
    return Fetched(
        target=str(target),
        commit=listing.commit,
        files=len(listing.files),
        total_bytes=listing.total_bytes,
        fetched_bytes=missing_bytes,
        took_s=time.monotonic() - begun,
    )


def _fetch_all(
    files: Sequence[Wanted],
    target: Path,
    get: Get,
    right: Callable[[Wanted], None],
    workers: int,
    progress: Progress,
    every_s: float,
    pause_s: float,
) -> None:
    stop = threading.Event()
    # Small files first: what is wrong with the repository shows before the hours of the large ones.
    queue = sorted(files, key=lambda f: f.size_bytes)
    with _watched(target, files, progress, every_s), ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(_one, wanted, target, get, right, stop, pause_s) for wanted in queue]
        try:
            done, _ = wait(running, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            stop.set()
            for future in running:
                future.cancel()
            raise
