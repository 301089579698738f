"""A server on this machine that speaks as much of the Hugging Face hub's protocol as huggingface_hub needs to fetch a model.

Real HTTP over a real socket: the model's listing with sizes and hashes, HEAD and GET of a file at a commit, ranges, ETag,
X-Repo-Commit and X-Linked-Size, X-Error-Code for what is refused. `cut[name] = [n, ...]` closes the connection after n bytes of the next
answers; `wrong[name] = k` sends wrong bytes in the next k answers; `slow[name] = s` waits s seconds after each MB; `token` asks
for one; `seen` lists what was asked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


def git_blob(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


class Hub:
    """`with Hub(repo, folder) as hub: ... hub.url`. Files over 64 KiB are large (LFS: sha256), the others git blobs."""

    def __init__(self, repo: str, folder: Path, token: str | None = None):
        self.repo, self.token = repo, token
        self.files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
        self.cut: dict[str, list[int]] = {}
        self.wrong: dict[str, int] = {}
        self.slow: dict[str, float] = {}
        self.seen: list[tuple[str, str, str | None]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()

    def is_large(self, name: str) -> bool:
        return len(self.files[name]) > 65_536

    def etag(self, name: str) -> str:
        data = self.files[name]
        return hashlib.sha256(data).hexdigest() if self.is_large(name) else git_blob(data)

    def sent(self, name: str) -> list[str | None]:
        """The Range headers of the GETs of a file."""
        return [span for method, path, span in self.seen if method == "GET" and path.endswith("/" + name)]

    def listing(self) -> dict:
        siblings = []
        for name, data in self.files.items():
            entry = {"rfilename": name, "size": len(data), "blobId": git_blob(data)}
            if self.is_large(name):
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {
            "id": self.repo,
            "modelId": self.repo,
            "sha": COMMIT,
            "siblings": siblings,
            "tags": [],
            "private": False,
        }


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _answer(self, body: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.seen.append((self.command, path, self.headers.get("Range")))
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._refuse(401, "GatedRepo")
        if path.startswith(f"/api/models/{hub.repo}"):
            revision = path.removeprefix(f"/api/models/{hub.repo}").removeprefix("/revision/")
            if revision not in ("", "main", COMMIT):
                return self._refuse(404, "RevisionNotFound")
            data = json.dumps(hub.listing()).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data if body else b"")
            return None
        name = path.removeprefix(f"/{hub.repo}/resolve/{COMMIT}/")
        if name not in hub.files:
            return self._refuse(404, "RepoNotFound" if not path.startswith(f"/{hub.repo}/") else "EntryNotFound")
        return self._send_file(name, body)

    def _send_file(self, name: str, body: bool) -> None:
        hub = self.hub
        whole, start = hub.files[name], 0
        span = self.headers.get("Range")
        if span:
            start = int(span.removeprefix("bytes=").partition("-")[0])
        data = whole[start:]
        if body and hub.wrong.get(name, 0) > 0:
            hub.wrong[name] -= 1
            data = bytes(b ^ 1 for b in data[:100]) + data[100:]
        self.send_response(206 if span else 200)
        self.send_header("ETag", f'"{hub.etag(name)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if hub.is_large(name):
            self.send_header("X-Linked-Etag", f'"{hub.etag(name)}"')
            self.send_header("X-Linked-Size", str(len(whole)))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data)))
        if span:
            self.send_header("Content-Range", f"bytes {start}-{len(whole) - 1}/{len(whole)}")
        self.end_headers()
        if not body:
            return
        cuts = hub.cut.get(name)
        if cuts:
            self.wfile.write(data[: cuts.pop(0)])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return
        if name not in hub.slow:
            self.wfile.write(data)
            return
        with contextlib.suppress(OSError):  # the reader may leave
            for at in range(0, len(data), 1_000_000):
                self.wfile.write(data[at : at + 1_000_000])
                time.sleep(hub.slow[name])
