"""Carry an image to a machine without a registry: save it to a file, load it from one.

`save X.tar[.gz|.zst]` writes X.partial and renames it when it is whole and on disk, so a file by that name is never
half an image; beside it lies X.sha256 in the notation of sha256sum. The name's ending chooses the compression: .tar
none, .tar.gz or .tgz gzip (fast level), .tar.zst zstd (needs the `zstd` program). `load` reads the file through once
against the checksum before the engine sees any of it, because an engine that meets a damaged archive in the middle
keeps the layers it already has.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import docker

from .errors import Exit, Refusal, docker_errors, hint
from .progress import Mode, human_bytes, show_transfer
from .reference import Reference

CHUNK_BYTES = 1 << 20
GZIP_LEVEL = 1  # layers of wheels and shared libraries: level 6 takes three times as long for a few percent


def compression(path: Path) -> str:
    """ "none", "gzip" or "zstd", by the file's name. Refusal (exit 2) for any other ending."""
    for ending, name in ((".tar", "none"), (".tar.gz", "gzip"), (".tgz", "gzip"), (".tar.zst", "zstd")):
        if path.name.endswith(ending) and path.name != ending:
            return name
    raise Refusal(f"{path.name} ends in no known way", "name it *.tar, *.tar.gz, *.tgz or *.tar.zst", Exit.USAGE)


def checksum_file(path: Path) -> Path:
    """Where the checksum of `path` lies."""
    return path.with_name(path.name + ".sha256")


def save(client: docker.DockerClient, ref: str, path: Path, mode: Mode) -> dict:
    """Write the local image `ref` to `path`; {"file", "bytes", "sha256", "images"}. A failure leaves nothing behind."""
    how = compression(path)
    name = str(Reference.parse(ref))
    if not path.parent.is_dir():
        raise Refusal(f"there is no folder {path.parent}", "make it, or choose another place", Exit.USAGE)
    with docker_errors("find the image"):
        image_bytes = client.images.get(name).attrs["Size"]
    free_bytes = shutil.disk_usage(path.parent).free
    if how == "none" and free_bytes < image_bytes:
        raise Refusal(
            f"the image has {human_bytes(image_bytes)}, {path.parent} has {human_bytes(free_bytes)} free",
            "free space there, or choose another place",
        )
    partial = path.with_name(path.name + ".partial")
    sha256, total_bytes = hashlib.sha256(), 0
    label = f"save {name}"
    try:
        with (
            partial.open("wb") as out,
            show_transfer(label, mode) as shown,
            docker_errors(label),
            _compressor(how, sha256, out) as write,
        ):
            # by name, not by id: the archive then carries the tag
            for chunk in client.api.get_image(name, chunk_size=CHUNK_BYTES):
                write(chunk)
                total_bytes += len(chunk)
                shown(total_bytes, image_bytes, "")
        with partial.open("rb") as out:
            os.fsync(out.fileno())
        # the checksum first: between the two renames an old file fails its check, a new one never lacks it
        beside = checksum_file(path)
        beside_partial = beside.with_name(beside.name + ".partial")
        beside_partial.write_text(f"{sha256.hexdigest()}  {path.name}\n")
        os.replace(beside_partial, beside)
        os.replace(partial, path)
    except OSError as e:
        raise Refusal(f"cannot write {path}: {e.strerror or e}", hint(str(e), "check the folder's rights")) from e
    finally:
        partial.unlink(missing_ok=True)
    return {"file": str(path), "bytes": path.stat().st_size, "sha256": sha256.hexdigest(), "images": [name]}


@contextmanager
def _compressor(how: str, sha256, out) -> Iterator[Callable[[bytes], None]]:
    """A function that takes the archive's bytes; what it makes of them goes to `out` and into `sha256`."""

    def emit(data: bytes) -> None:
        sha256.update(data)
        out.write(data)

    if how == "none":
        yield emit
    elif how == "gzip":
        packer = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, wbits=31)
        yield lambda data: emit(packer.compress(data))
        emit(packer.flush())
    else:
        yield from _zstd(sha256, out)


def _zstd(sha256, out) -> Iterator[Callable[[bytes], None]]:
    program = shutil.which("zstd")
    if program is None:
        raise Refusal("*.tar.zst needs the program `zstd`", "install zstd, or name the file *.tar.gz", Exit.USAGE)
    # zstd writes the file itself; it is hashed afterwards
    child = subprocess.Popen([program, "-q", "-T0", "-3", "-c"], stdin=subprocess.PIPE, stdout=out)
    assert child.stdin is not None
    try:
        yield child.stdin.write
    finally:
        child.stdin.close()
        returncode = child.wait()
    if returncode:
        raise Refusal(f"zstd ended with exit code {returncode}", "check the space left, or name the file *.tar.gz")
    with open(out.name, "rb") as written:
        for chunk in iter(lambda: written.read(CHUNK_BYTES), b""):
            sha256.update(chunk)


def load(client: docker.DockerClient, path: Path, mode: Mode, check: bool = True) -> dict:
    """Load the images in `path`; {"file", "sha256", "images"}. Refusal (exit 9) if the file is not what was saved."""
    try:
        size_bytes = path.stat().st_size
        sha256 = _checked(path, size_bytes, mode) if check else None
        with path.open("rb") as file, show_transfer(f"load {path.name}", mode) as shown, docker_errors(f"load {path}"):
            names = _load(client, _chunks(file, lambda done: shown(done, size_bytes, "")))
    except OSError as e:
        raise Refusal(
            f"cannot read {path}: {e.strerror or e}", "name a file that `image save` wrote", Exit.USAGE
        ) from e
    return {"file": str(path), "sha256": sha256, "images": names}


def _load(client: docker.DockerClient, chunks: Iterable[bytes]) -> list[str]:
    names: list[str] = []
    for event in client.api.load_image(chunks):
        if "error" in event:
            raise Refusal(f"the engine refused the archive: {event['error']}", hint(event["error"], "save it again"))
        found = re.match(r"Loaded image(?: ID)?: (\S+)", event.get("stream", ""))
        if found:
            names.append(found[1])
    if not names:
        raise Refusal("the archive holds no image", "name a file that `image save` wrote", Exit.VERIFY)
    return names


def _checked(path: Path, size_bytes: int, mode: Mode) -> str:
    beside = checksum_file(path)
    try:
        expected = re.match(r"[0-9a-f]{64}\b", beside.read_text())
    except FileNotFoundError as e:
        if not path.exists():
            raise
        raise Refusal(
            f"there is no {beside.name} beside {path.name}, so nothing tells whether the file is whole",
            "bring it along, or pass --no-check",
            Exit.VERIFY,
        ) from e
    if expected is None:
        raise Refusal(f"{beside} does not begin with a sha256", "write it again with `sha256sum`", Exit.VERIFY)
    sha256 = hashlib.sha256()
    with path.open("rb") as file, show_transfer(f"check {path.name}", mode) as shown:
        for chunk in _chunks(file, lambda done: shown(done, size_bytes, "")):
            sha256.update(chunk)
    if sha256.hexdigest() != expected[0]:
        raise Refusal(
            f"{path} is damaged: its sha256 is {sha256.hexdigest()}, {beside.name} says {expected[0]}",
            "copy it again from where it was saved",
            Exit.VERIFY,
        )
    return sha256.hexdigest()


def _chunks(file, done: Callable[[int], None]) -> Iterator[bytes]:
    total = 0
    for chunk in iter(lambda: file.read(CHUNK_BYTES), b""):
        yield chunk
        total += len(chunk)
        done(total)
