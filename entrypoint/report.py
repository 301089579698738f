"""What a bug report may say: everything a person needs to help, nothing that says who or where the box is.

Rule order of `Redactor`, each on every text of the report (keys of mappings stay):
1. What is known to be secret on this box, by its very text: API key, values of variables whose names say so, host name.
2. Tokens by their shape: hf_..., sk-..., gh?_..., AKIA..., JWTs, `Bearer ...`, user:password in an address, `--api-key X`.
3. Ids of hardware: GPU- and MIG- ids, any UUID, MAC addresses, serial numbers (long runs of digits).
4. Addresses: IPv4 and IPv6 other than loopback and "any", mail addresses, the server of a network mount or address.
5. Paths under a home, a person's mounts (/media/NAME) or a server (/net/NAME), whole: the names of a person's folders say as much as their own. User names anywhere else.
The same text always becomes the same placeholder (<gpu-1>, <host-1>), so that what belongs together still does.

The file is made new and readable by its owner only; one that is there is never overwritten.
"""

from __future__ import annotations

import getpass
import ipaddress
import json
import os
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .errors import Exit, Refusal

SCHEMA = 1

# Variables that say how the kit, CUDA and vLLM were set up; no other variable is copied into a report.
_TOLD = re.compile(r"(FLASHNEXT|CUDA|NVIDIA|NCCL|VLLM|PYTORCH|TORCH|OMP|HF_HUB|HF_ENDPOINT|TRITON)(_|$)")
_SECRET_NAME = re.compile(
    r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASS|PWD|CREDENTIALS?|AUTH|COOKIE)S?(_|$)|APIKEY", re.IGNORECASE
)
_NOT_SECRET = re.compile(r"_(FILE|PATH|DIR)$|^PWD$|^OLDPWD$")
_LONGEST_TEXT = 20_000
_LEAST_SECRET = 4  # a shorter "secret" would tear holes into every text

_TOKENS = re.compile(
    r"\b(?:hf_|api_org_|sk-|pk-|rk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|npm_|pypi-|AKIA|ASIA|AIza|ya29\.|nvapi-)[A-Za-z0-9_\-./+=]{8,}"
    r"|\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]*"
)
_AFTER_WORD = re.compile(
    r"(?P<word>\bbearer\s+"
    r"|\b(?:\w{0,40}[_-])?(?:token|password|passwd|secret|api[_-]?key|authorization)[\"']?\s*[:=]\s*[\"']?(?:(?:basic|bearer)\s+)?"
    r"|--[\w-]{0,40}(?:token|password|secret|api-key)\s+)"
    r"(?P<value>[^\s,;\"'}\]]{4,})",
    re.IGNORECASE,
)
_SECRET_FLAG = re.compile(r"--?[\w-]*(?:token|password|secret|api-key)", re.IGNORECASE)
_URL_USER = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.\-]{0,20}://)[^\s/@]+@", re.IGNORECASE)
_URL_HOST = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.\-]{0,20}://)(?P<host>[^\s/:@<>\[\]\"']+)", re.IGNORECASE)
_UUID = re.compile(
    r"\b(?P<kind>GPU-|MIG-GPU-|MIG-)?[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE
)
_GPU_ID = re.compile(r"\b(?:MIG-GPU|GPU|MIG)-[0-9a-fA-F]{4,}[0-9a-zA-Z\-]*")
_MAC = re.compile(r"(?<![0-9a-f:])[0-9a-f]{2}(?:[:-][0-9a-f]{2}){5}(?![0-9a-f:])", re.IGNORECASE)
_MAIL = re.compile(r"(?<![\w.+\-])[\w.+\-]{1,64}@[\w\-]{1,64}(?:\.[\w\-]{1,64}){1,8}")
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d|-microsoft)")
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?:%\w+)?(?![\w:])", re.IGNORECASE)
_SERIAL = re.compile(
    r"(?P<word>\bserial(?:\s*(?:number|no\.?))?\b[\"']?\s*[:=]?\s*)(?P<value>[A-Za-z0-9\-]{5,})", re.IGNORECASE
)
_HOME = re.compile(
    r"(?:/(?:var/)?home/[^/\s:,;\"'<>]+|/Users/[^/\s:,;\"'<>]+|/mnt/[a-z]/Users/[^/\s:,;\"'<>]+|/(?:run/)?media/[^/\s:,;\"'<>]+|/net/[^/\s:,;\"'<>]+|/root(?![\w\-])|~(?=/))(?:/[^\s:,;\"'<>]*)?"
)
_HARMLESS_HOSTS = {"localhost", "huggingface.co", "github.com", "pypi.org", "docs.nvidia.com", "host.docker.internal"}
_HARMLESS_USERS = {"root", "user", "flashnext", "nobody", "ubuntu", "admin", "docker", "nvidia"}


def _is_secret_name(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _NOT_SECRET.search(name.upper())


class Redactor:
    """Replaces what says who and where. `secrets`, `hosts` and `users` are texts known on this box, `homes` their folders."""

    def __init__(
        self,
        secrets: Iterable[str] = (),
        hosts: Iterable[str] = (),
        users: Iterable[str] = (),
        homes: Iterable[str] = (),
    ):
        self._names: dict[tuple[str, str], str] = {}
        self._secrets = sorted({s for s in secrets if s and len(s) >= _LEAST_SECRET}, key=len, reverse=True)
        words = [("host", h) for h in hosts if h and h.lower() not in _HARMLESS_HOSTS]
        words += [("user", u) for u in users if u and u.lower() not in _HARMLESS_USERS]
        self._words = sorted(dict.fromkeys(words), key=lambda word: len(word[1]), reverse=True)
        self._homes = sorted(
            {h.rstrip("/") for h in homes if h and h.rstrip("/").count("/") >= 1}, key=len, reverse=True
        )

    def _name(self, kind: str, text: str) -> str:
        key = (kind, text.lower())
        if key not in self._names:
            self._names[key] = f"<{kind}-{sum(k == kind for k, _ in self._names) + 1}>"
        return self._names[key]

    def text(self, text: str) -> str:
        """`text` without what the rules name, and without what lies beyond its first 20,000 characters."""
        if len(text) > _LONGEST_TEXT:
            text = text[:_LONGEST_TEXT] + " (cut)"
        for secret in self._secrets:
            text = text.replace(secret, self._name("secret", secret))
        text = _URL_USER.sub(lambda m: m["scheme"] + "<user>@", text)
        text = _TOKENS.sub(lambda m: self._name("secret", m[0]), text)
        text = _AFTER_WORD.sub(
            lambda m: m[0] if m["value"].startswith("<") else m["word"] + self._name("secret", m["value"]), text
        )
        text = _SERIAL.sub(lambda m: m["word"] + self._name("serial", m["value"]), text)
        text = _UUID.sub(lambda m: self._name("gpu" if m["kind"] else "id", m[0]), text)
        text = _GPU_ID.sub(lambda m: self._name("gpu", m[0]), text)
        text = _MAIL.sub(lambda m: self._name("mail", m[0]), text)
        for home in self._homes:
            pattern = re.escape(home) + r"(?![\w\-.])(?:/[^\s:,;\"'<>]*)?"
            text = re.sub(pattern, lambda m: self._name("home-path", m[0]), text)
        text = _HOME.sub(lambda m: self._name("home-path", m[0]), text)
        text = _URL_HOST.sub(lambda m: m["scheme"] + self._host(m["host"]), text)
        text = _MAC.sub(lambda m: self._name("mac", m[0]), text)
        text = _IPV4.sub(lambda m: self._address(m[0]), text)
        text = _IPV6.sub(lambda m: self._address(m[0]), text)
        for kind, word in self._words:
            text = re.sub(
                rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", self._name(kind, word), text, flags=re.IGNORECASE
            )
        return text

    def _host(self, host: str) -> str:
        if host.lower() in _HARMLESS_HOSTS or host.startswith("<"):
            return host
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return self._name("host", host)
        return self._address(host)

    def _address(self, text: str) -> str:
        try:
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            return text
        return text if address.is_loopback or address.is_unspecified else self._name("address", text)

    def value(self, value: Any, key: str = "") -> Any:
        """`value` with every text in it redacted; what stands under a key that names a secret is dropped whole."""
        if isinstance(value, Mapping):
            # {"name": "X_TOKEN", "value": "..."} is a secret as much as {"X_TOKEN": "..."}.
            if isinstance(value.get("name"), str) and "value" in value and _is_secret_name(value["name"]):
                value = {
                    **value,
                    "value": None if value["value"] is None else self._name("secret", str(value["value"])),
                }
            return {k if isinstance(k, str) else str(k): self.value(v, str(k)) for k, v in value.items()}
        if isinstance(value, (list, tuple, set)):
            items = list(value)
            after = [False, *(isinstance(item, str) and bool(_SECRET_FLAG.fullmatch(item)) for item in items)]
            return [
                self._name("secret", item) if secret and isinstance(item, str) else self.value(item, key)
                for item, secret in zip(items, after[:-1], strict=True)
            ]
        if isinstance(value, str) and value:
            if _is_secret_name(key):
                return self._name("secret", value)
            return self.text(value)
        return value if value is None or isinstance(value, (bool, int, float)) else self.text(str(value))


def of_this_box(environ: Mapping[str, str], more_secrets: Iterable[str] = ()) -> Redactor:
    """A Redactor that knows this box's host name, users and homes, and every secret in `environ`."""
    secrets = [v for k, v in environ.items() if _is_secret_name(k)]
    full = socket.gethostname()
    hosts = [full, full.partition(".")[0], environ.get("HOSTNAME", ""), environ.get("HOST", "")]
    users = [environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER", "USERNAME")]
    try:
        users.append(getpass.getuser())
    except (KeyError, OSError):  # a uid without a name, as in many containers
        users.append("")
    for folder in ("/home", "/Users"):
        try:
            users += [entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name != "Shared"]
        except OSError:
            continue
    homes = [environ.get("HOME", ""), os.path.expanduser("~")]
    return Redactor([*secrets, *more_secrets], hosts, users, [h for h in homes if h not in ("/", "")])


def told_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a report tells: those of the kit, CUDA and vLLM."""
    return {name: environ[name] for name in sorted(environ) if _TOLD.match(name)}


def machine_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a box without the parts that only say where it is: a network mount's server, a pool's name, bus ids.

    Bus ids stay: they say on which root port a card hangs, and are the same on every board of a kind.
    """
    out = dict(facts)
    out["mounts"] = {
        role: {
            **mount,
            "source": mount["source"] if str(mount["source"]).startswith("/dev/") else f"<{mount['fs_type']} source>",
        }
        for role, mount in facts.get("mounts", {}).items()
    }
    # The name of a cgroup holds the container's id or the user's number.
    out["cgroup_path"] = None if facts.get("cgroup_path") is None else "<cgroup>"
    return out


def write(path: Path, content: Mapping[str, Any], redactor: Redactor) -> None:
    """Write `content`, redacted, as JSON to a file that is not there yet. Raises Refusal (code 2)."""
    text = json.dumps(redactor.value(content), indent=1, ensure_ascii=False) + "\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise Refusal(f"{path} is there already", "name a file that is not there yet", Exit.USAGE) from None
    except OSError as e:
        raise Refusal(f"cannot write {path}: {e.strerror}", "name a file in a writable folder", Exit.USAGE) from None
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as out:
            out.write(text)
    except OSError as e:
        path.unlink(missing_ok=True)
        raise Refusal(f"cannot write {path}: {e.strerror}", "free space, or name another folder", Exit.USAGE) from None
