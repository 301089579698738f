"""Reach the Docker Engine, and the buildx plugin beside it.

The engine is the one that the `docker` command would use: DOCKER_HOST, else the current docker context, else the
default socket. The SDK by itself knows the first and the last only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import docker
import docker.errors
import requests.exceptions
from docker.context import ContextAPI

from .errors import Refusal

BUILDX_AT_LEAST = (0, 13)  # --progress rawjson


def connect(timeout_s: float = 600) -> docker.DockerClient:
    """A client whose engine has answered. Refusal (exit 8) where none does."""
    host = os.environ.get("DOCKER_HOST")
    try:
        if host:
            client = docker.from_env(timeout=timeout_s)
        else:
            context = ContextAPI.get_current_context()
            host = context.Host
            client = docker.DockerClient(base_url=host, tls=context.TLSConfig or False, timeout=timeout_s)
        client.ping()
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError, ValueError) as e:
        raise Refusal(
            f"no Docker Engine answers at {host or 'the default socket'}: {_last_cause(e)}",
            "start Docker, or point DOCKER_HOST at a running engine (`docker info` must work for this user)",
        ) from e
    return client


def _last_cause(error: BaseException) -> str:
    # requests wraps the one sentence that helps ("Permission denied") in three layers of its own
    found = re.findall(r"(?:FileNotFoundError|PermissionError|ConnectionRefusedError)\(\d+, '([^']*)'\)", str(error))
    return found[-1] if found else str(error)


def buildx() -> list[str]:
    """argv prefix of the buildx command. Refusal (exit 8) where the CLI or a recent enough plugin is missing."""
    docker_cli = shutil.which("docker")
    if docker_cli is None:
        raise Refusal("the `docker` command is not on PATH", "install the Docker CLI with its buildx plugin")
    answer = subprocess.run([docker_cli, "buildx", "version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    found = re.search(r"\bv?(\d+)\.(\d+)\.\d+", answer.stdout)
    if answer.returncode or not found:
        raise Refusal(
            "the Docker CLI has no buildx plugin, and builds here are BuildKit builds",
            "install it (package docker-buildx or docker-buildx-plugin), then `docker buildx version` must answer",
        )
    version = (int(found[1]), int(found[2]))
    if version < BUILDX_AT_LEAST:
        raise Refusal(
            f"buildx {version[0]}.{version[1]} is too old", "install buildx {}.{} or later".format(*BUILDX_AT_LEAST)
        )
    return [docker_cli, "buildx"]
