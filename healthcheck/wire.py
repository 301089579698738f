"""Decides what one HTTP exchange with the server came to, within one total deadline.

From: a base URL, a path, a deadline on the monotonic clock. Rule order: address, connection, answer, size.
Nothing is raised for anything a server or a network can do; each outcome is a `Reply`.

Why not `requests`: its time limit restarts with each read, so a server that sends one byte a second holds a probe for
ever; it follows HTTP_PROXY even to this container's own loopback; and its import takes longer than the whole probe
of a healthy server (measure: `python -X importtime -c 'import requests'`). The standard library's client with one
timer that shuts the socket at the deadline has none of that.
"""

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
import urllib.parse
from dataclasses import dataclass

# An answer longer than this is not one that this probe asked for. /metrics of vLLM 0.30.0 is 48 kB.
MAX_BODY_BYTES = 8 * 2**20

# fault -> words for a person; what each means for the server's health is decided in probe.py.
FAULTS = {
    "closed": "no connection",
    "unresolved": "the host name cannot be resolved",
    "reset": "the connection was closed before the answer was whole",
    "garbage": "what came back is not HTTP, or not trusted TLS",
    "too long": f"the answer is longer than {MAX_BODY_BYTES} bytes",
    "silent": "no complete answer in time",
}


@dataclass(frozen=True)
class Reply:
    """One exchange: either `status` is set (HTTP; the body is whole) or `fault` (a key of FAULTS)."""

    status: int | None
    fault: str | None
    body: bytes
    detail: str
    took_s: float

    def json(self) -> object | None:
        """The body as JSON, or None where it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


@dataclass(frozen=True)
class Server:
    """Where the server is. `path` is what a reverse proxy put before /v1, without a slash at its end."""

    scheme: str
    host: str
    port: int
    path: str = ""

    @classmethod
    def from_url(cls, url: str) -> "Server":
        """Parse `http(s)://host[:port][/prefix]`, without a trailing `/v1`. ValueError says what is wrong with it."""
        parts = urllib.parse.urlsplit(url)
        if not url.isascii() or any(c <= " " for c in url):
            raise ValueError(f"{url!r} has characters that no URL has")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not http://HOST:PORT")
        port = parts.port if parts.port is not None else {"http": 80, "https": 443}[parts.scheme]
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


def ask(server: Server, path: str, *, deadline: float, key: str | None = None, body: object = None) -> Reply:
    """GET `path`, or POST `body` as JSON. `deadline` is time.monotonic()'s, in seconds, for the exchange as a whole.

    `key` goes out as a bearer token. A redirect is not followed: the key must not leave the server it was given for.
    """
    began = time.monotonic()
    left_s = deadline - began

    def took_s() -> float:
        return time.monotonic() - began

    if left_s <= 0:
        return Reply(None, "silent", b"", "no time left to ask", 0.0)
    connect = http.client.HTTPSConnection if server.scheme == "https" else http.client.HTTPConnection
    try:
        connection = connect(server.host, server.port, timeout=left_s)
    except http.client.InvalidURL as error:
        return Reply(None, "unresolved", b"", f"{FAULTS['unresolved']} ({_words(error)})", 0.0)
    expired = threading.Event()
    held: list[socket.socket] = []

    def expire() -> None:
        expired.set()
        # Shutting it down is what wakes a blocked read; closing it stays the reading thread's. `held`, because
        # http.client forgets its socket once the headers of a `Connection: close` answer are in.
        sock = held[0] if held else connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(left_s, expire)
    timer.daemon = True
    timer.start()
    headers = {"User-Agent": "flashnext-health", "Accept": "application/json, text/plain", "Connection": "close"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    payload = None
    if body is not None:
        payload = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
    try:
        connection.connect()
        held.append(connection.sock)
        connection.request("POST" if payload else "GET", server.path + path, body=payload, headers=headers)
        answer = connection.getresponse()
        data = answer.read(MAX_BODY_BYTES + 1)
        if answer.length and len(data) <= MAX_BODY_BYTES:
            raise http.client.IncompleteRead(data, answer.length)
        status = answer.status
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        fault = "silent" if expired.is_set() else _fault(error)
        return Reply(None, fault, b"", f"{FAULTS[fault]} ({_words(error)})" if fault != "silent" else "", took_s())
    finally:
        timer.cancel()
        connection.close()
    # A body without a length that the timer cut short looks whole; only the flag tells.
    if expired.is_set():
        return Reply(None, "silent", b"", "", took_s())
    if len(data) > MAX_BODY_BYTES:
        return Reply(None, "too long", b"", FAULTS["too long"], took_s())
    return Reply(status, None, data, "", took_s())


def _fault(error: Exception) -> str:
    """A key of FAULTS. Order matters: RemoteDisconnected is a reset and a bad status line at once."""
    return next(fault for kind, fault in _KINDS if isinstance(error, kind))


_KINDS = (
    (TimeoutError, "silent"),
    (ConnectionRefusedError, "closed"),
    (ConnectionError, "reset"),
    (http.client.IncompleteRead, "reset"),
    (socket.gaierror, "unresolved"),
    (UnicodeError, "unresolved"),
    (ssl.SSLError, "garbage"),
    (http.client.HTTPException, "garbage"),
    (OSError, "closed"),
)


def _words(error: Exception) -> str:
    text = " ".join(str(error).split())[:120]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
