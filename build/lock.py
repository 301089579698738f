"""The base image by digest: a tag can be moved or deleted by its owner, a digest cannot.

`build/locks/base.json` holds one entry: {"schema": 1, "ref", "digest", "platforms", "locked_at"}. The digest is what
the registry answers for the tag (of the list, where the tag names several platforms), asked through the engine with
the user's own `docker login`; nothing is pulled.

A fresh clone has no base.json: the tag is a released one, and which registry or mirror answers for it is the user's
choice. After `image lock`, every build takes ref@digest; commit the file to share it.

The base that a build takes, first rule that holds:
1. --base names another image than the lock's ref: that image as given.
2. a lock file exists: its ref@digest.
3. the default, by tag.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
from pathlib import Path

import docker

from .errors import Exit, Refusal, docker_errors
from .reference import Reference
from .registry import parse_tag

DEFAULT_BASE = "vllm/vllm-openai:v0.30.0"
LOCK_FILE = Path(__file__).parent / "locks" / "base.json"
SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Lock:
    """One locked base. `platforms` are "os/arch[/variant]"; `locked_at` is UTC, RFC 3339."""

    ref: str
    digest: str
    platforms: tuple[str, ...]
    locked_at: str

    @property
    def pinned(self) -> str:
        """ref@digest: the tag stays for the reader, the digest decides."""
        return f"{self.ref}@{self.digest}"


def read(path: Path) -> Lock | None:
    """The lock in `path`, None where there is no such file. Refusal (exit 2) for a file that is not one."""
    try:
        data = json.loads(path.read_text())
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}, this kit reads {SCHEMA}")
        lock = Lock(str(data["ref"]), str(data["digest"]), tuple(map(str, data["platforms"])), str(data["locked_at"]))
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", lock.digest):
            raise ValueError(f"digest {lock.digest!r} is not sha256:<64 hex digits>")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as e:
        why = f"no key {e}" if isinstance(e, KeyError) else e
        raise Refusal(
            f"the lock file {path} cannot be used: {why}", "write it again with `image lock`, or delete it", Exit.USAGE
        ) from e
    return lock


def write(path: Path, lock: Lock) -> None:
    """Write `lock` to `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps({"schema": SCHEMA, **dataclasses.asdict(lock)}, indent=2) + "\n")
    os.replace(partial, path)


def resolve(client: docker.DockerClient, ref: str) -> Lock:
    """Ask ref's registry for the digest behind its tag; nothing is pulled. Refusal (exit 8) where it has no answer."""
    reference = parse_tag(ref)
    with docker_errors(f"ask the registry for {reference}"):
        answer = client.api.inspect_distribution(str(reference))
    platforms = tuple(
        "/".join(filter(None, (p.get("os"), p.get("architecture"), p.get("variant"))))
        for p in answer["Platforms"] or ()
    )
    now = datetime.datetime.now(datetime.timezone.utc)
    return Lock(
        ref=str(reference),
        digest=answer["Descriptor"]["digest"],
        # attestations are listed as platform unknown/unknown
        platforms=tuple(p for p in platforms if not p.startswith("unknown")),
        locked_at=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def check(client: docker.DockerClient, lock: Lock) -> Lock:
    """Resolve the locked tag again. Refusal (exit 9) if it has moved; the new answer where it has not."""
    fresh = resolve(client, lock.ref)
    if fresh.digest != lock.digest:
        raise Refusal(
            f"{lock.ref} moved: locked {lock.digest} at {lock.locked_at}, the registry now says {fresh.digest}",
            "builds still take the locked digest; run `image lock` to take the new one",
            Exit.VERIFY,
        )
    return fresh


def choose_base(requested: str | None, lock: Lock | None, platform: str | None) -> str:
    """The image for FROM, by the rules at the top. Refusal (exit 2) if the locked base lacks `platform`."""
    if requested and (lock is None or str(Reference.parse(requested)) != lock.ref):
        Reference.parse(requested)
        return requested
    if lock is None:
        return DEFAULT_BASE
    if platform and lock.platforms and platform not in lock.platforms:
        raise Refusal(
            f"the locked base {lock.ref} has no {platform}, only {', '.join(lock.platforms)}",
            "leave --platform out, or choose another --base",
            Exit.USAGE,
        )
    return lock.pinned
