"""How a failure is told on the host: one ERROR line, one Fix line, one documented exit code.

Everything that a user, a registry or the engine can cause ends in a `Refusal`; `cli.main` prints it and exits with its
code. Anything else is a bug of ours and may show a traceback.
"""

from __future__ import annotations

import contextlib
import enum
import re
import sys
from collections.abc import Iterator

import docker.errors
import requests.exceptions


class Exit(enum.IntEnum):
    """Exit codes of `python -m build`, as the README lists them."""

    OK = 0
    USAGE = 2
    DOCKER = 8
    VERIFY = 9


class Refusal(Exception):
    """What is wrong, what would work, and the exit code. Both texts are one line; newlines are folded."""

    def __init__(self, message: str, fix: str, code: int = Exit.DOCKER):
        super().__init__(message)
        self.message = " ".join(message.split())
        self.fix = " ".join(fix.split())
        self.code = Exit(code)

    def print(self, stream=None) -> None:
        """Write the two lines to `stream` (stderr by default)."""
        out = stream or sys.stderr
        out.write(f"ERROR: {self.message}\nFix: {self.fix}\n")
        out.flush()


# What an engine, a registry or BuildKit says -> what helps. First match wins, so the narrow ones stand first.
HINTS: tuple[tuple[str, str], ...] = (
    (r"no such host|temporary failure in name resolution|i/o timeout|TLS handshake timeout",
     "the registry cannot be reached from this machine; check the network or proxy, or bring the image as a file: "
     "`image save` where there is a network, `image load` here"),
    (r"connect: connection refused", "nothing listens there; check the registry's host and port"),
    (r"server gave HTTP response to HTTPS client",
     "the registry speaks plain HTTP; give it TLS, or list it under insecure-registries in the engine's daemon.json"),
    (r"certificate signed by unknown authority|failed to verify certificate",
     "put the registry's CA at /etc/docker/certs.d/HOST:PORT/ca.crt on the engine's machine"),
    (r"manifest unknown|manifest for .* not found|: not found$|not found: manifest",
     "the registry has no such tag or digest; check the spelling (`image lock --check` tells whether a tag moved)"),
    (r"unauthorized|authentication required|access denied|requested access to the resource|no basic auth|denied:",
     "run `docker login` for that registry, or check the repository's name"),
    (r"toomanyrequests|429 Too Many", "the registry limits pulls; `docker login`, wait, or use a mirror"),
    (r"does not exist locally|No such image", "list what is here with `docker image ls`; build or pull it first"),
    (r"no space left on device", "free space on the engine's disk (`docker system df`, `docker builder prune`)"),
    (r"no match for platform|does not match the specified platform|exec format error",
     "this image or engine has no such platform; leave --platform out, or use one that the image lists"),
    (r"target stage .* could not be found", "name a stage with --target (`grep -i ^FROM Dockerfile` lists them)"),
    (r"dockerfile parse error|unknown instruction", "correct the Dockerfile at the line named"),
)  # fmt: skip


def hint(text: str, default: str) -> str:
    """The fix for an engine's message, `default` where no entry of HINTS matches."""
    return next((fix for pattern, fix in HINTS if re.search(pattern, text, re.IGNORECASE)), default)


@contextlib.contextmanager
def docker_errors(doing: str) -> Iterator[None]:
    """Turn what the Docker SDK raises while `doing` something ("pull X") into a `Refusal` with exit code 8."""
    try:
        yield
    except docker.errors.APIError as e:
        text = e.explanation or str(e)
        raise Refusal(f"cannot {doing}: {text}", hint(text, "see the engine's log for more")) from e
    except docker.errors.DockerException as e:
        raise Refusal(f"cannot {doing}: {e}", hint(str(e), "see the engine's log for more")) from e
    except requests.exceptions.RequestException as e:
        raise Refusal(
            f"cannot {doing}: the engine stopped answering: {e}", "check `docker info`, then try again"
        ) from e
