"""Decides what must be on our own volume before the engine starts: folders that can be written, nothing of the user's touched."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import Exit, Refusal
from .wishes import Wishes

if TYPE_CHECKING:
    from .boot import StateFile
    from .table import Progress

FOLDERS = ("table", "overlay", "cache/vllm", "cache/triton", "cache/xdg")


def folders(wishes: Wishes) -> None:
    """Make our folders and prove that a file can be written there. Raises Refusal (code 5)."""
    root = Path(wishes.value("data"))
    try:
        for name in FOLDERS:
            folder = root / name
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".probe-{uuid.uuid4().hex}"
            probe.write_bytes(b"x")
            probe.unlink()
    except OSError as e:
        raise Refusal(
            f"cannot write to {root}: {e.strerror}",
            f"give uid {os.getuid()} a writable folder there (compose: the volume `data`), or set FLASHNEXT_DATA to one",
            Exit.TABLE,
        ) from None


def state_folder(wishes: Wishes) -> Path:
    """The folder of state.json, made if need be. Raises Refusal (code 2)."""
    folder = Path(wishes.value("state_dir"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{uuid.uuid4().hex}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as e:
        raise Refusal(
            f"cannot write to {folder}: {e.strerror}",
            "mount a tmpfs there, as compose.yaml does, or set FLASHNEXT_STATE_DIR",
            Exit.USAGE,
        ) from None
    return folder


def told_in(state: StateFile, tell: Callable[[Progress], None]) -> Callable[[Progress], None]:
    """`tell` for the table's file that also moves the present phase's label and progress in state.json."""

    def both(progress: Progress) -> None:
        state.update(label="making the table file", progress=progress.done_bytes / progress.total_bytes)
        tell(progress)

    return both


def port_free(host: str, port: int) -> None:
    """Refuse early where the port is taken: the engine would find out minutes later. Raises Refusal (code 2)."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = found[0]
        with socket.socket(family, kind, proto) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(address)
    except socket.gaierror:
        raise Refusal(
            f"{host!r} is not an address of this machine", "set FLASHNEXT_HOST to 0.0.0.0 or 127.0.0.1", Exit.USAGE
        ) from None
    except PermissionError:
        raise Refusal(
            f"port {port} may not be opened by this user", "set FLASHNEXT_PORT to 1024 or more", Exit.USAGE
        ) from None
    except OSError as e:
        raise Refusal(
            f"port {port} on {host} cannot be opened: {e.strerror}",
            "stop what uses it, or set FLASHNEXT_PORT to a free one",
            Exit.USAGE,
        ) from None
