"""Is this image what its name says? A list of checks, each PASS or FAIL with what was seen.

From the image's configuration: the labels are there, the user is not root, there is a HEALTHCHECK, and ENTRYPOINT and
HEALTHCHECK are exec forms (a shell in between would swallow SIGTERM and the exit code).
From inside the image (`inside.py`, run without a network, as the image's user): the label names the series that is in
the image, the series is applied to the vLLM that Python finds, and the argv of our plan is accepted by that vLLM's
parser.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import docker
import requests.exceptions

from .errors import docker_errors
from .image import LABEL, SERIES_LABEL

LABELS = tuple(LABEL + n for n in ("title", "description", "version", "revision", "created", "licenses", "base.name"))
INSIDE = ("series label", "series applied", "plan accepted")
MARK = "flashnext-check: "
INSIDE_TIMEOUT_S = 300  # importing vLLM from a cold disk took 18 s where this was written


@dataclasses.dataclass(frozen=True)
class Check:
    """One check: its name, whether it passed, what was seen."""

    name: str
    ok: bool
    detail: str


def config_checks(config: dict) -> list[Check]:
    """The checks that need the image's `Config` (as `docker image inspect` gives it) only."""
    labels = config.get("Labels") or {}
    missing = [name for name in (*LABELS, SERIES_LABEL) if not labels.get(name, "").strip()]
    revision = labels.get(LABEL + "revision", "")
    user = config.get("User") or ""
    health = (config.get("Healthcheck") or {}).get("Test") or []
    entrypoint = config.get("Entrypoint") or []
    return [
        Check("labels", not missing, f"missing: {', '.join(missing)}" if missing else f"{len(LABELS) + 1} present"),
        Check(
            "revision",
            re.fullmatch(r"[0-9a-f]{40}", revision) is not None,
            f"{revision or 'none'}" + ("" if re.fullmatch(r"[0-9a-f]{40}", revision) else ": not a clean git commit"),
        ),
        Check("user", user.partition(":")[0] not in ("", "0", "root"), user or "root"),
        Check(
            "healthcheck",
            health[:1] == ["CMD"] and not _through_shell(health[1:]),
            " ".join(health) if health else "none",
        ),
        Check(
            "entrypoint",
            bool(entrypoint) and not _through_shell(entrypoint),
            json.dumps(entrypoint) if entrypoint else "none",
        ),
    ]


def _through_shell(argv: list[str]) -> bool:
    return len(argv) >= 2 and Path(argv[0]).name in ("sh", "bash", "dash", "ash") and argv[1] == "-c"


def inside_checks(client: docker.DockerClient, image_id: str, series: str) -> list[Check]:
    """The checks that run in a container of the image; it is removed afterwards."""
    with docker_errors("run the checks inside the image"):
        container = client.containers.create(
            image_id,
            entrypoint=["python3"],
            command=["-c", (Path(__file__).parent / "inside.py").read_text(), series],
            environment={"VLLM_TARGET_DEVICE": "cpu"},
            network_mode="none",
            healthcheck={"test": ["NONE"]},
        )
        try:
            container.start()
            try:
                code = container.wait(timeout=INSIDE_TIMEOUT_S)["StatusCode"]
            except requests.exceptions.ConnectionError:
                code = f"none within {INSIDE_TIMEOUT_S} s"
            output = container.logs(stdout=True, stderr=False).decode("utf-8", "replace")
            errors = container.logs(stdout=False, stderr=True).decode("utf-8", "replace")
        finally:
            container.remove(force=True)
    return read_inside(output, f"exit code {code}: {(errors.strip().splitlines() or ['no output'])[-1][:200]}")


def read_inside(output: str, ending: str) -> list[Check]:
    """The checks in `output`; one that printed nothing has failed, with how the container ended as its detail."""
    seen: dict[str, Check] = {}
    for line in output.splitlines():
        if line.startswith(MARK):
            data = json.loads(line[len(MARK) :])
            seen[data["name"]] = Check(data["name"], data["ok"] is True, str(data["detail"]))
    return [seen.get(name) or Check(name, False, f"did not run to its end: {ending}") for name in INSIDE]


def verify(client: docker.DockerClient, image: str, allow_dirty: bool = False) -> tuple[str, list[Check]]:
    """All checks on a local image; its id and the checks. Refusal (exit 8) if it is not here or does not start.

    `allow_dirty` leaves out "revision", for images from a tree that is being worked on.
    """
    with docker_errors(f"inspect {image}"):
        attrs = client.images.get(image).attrs
    config = attrs["Config"]
    checks = [c for c in config_checks(config) if not (allow_dirty and c.name == "revision")]
    series = (config.get("Labels") or {}).get(SERIES_LABEL, "")
    return attrs["Id"], [*checks, *inside_checks(client, attrs["Id"], series)]
