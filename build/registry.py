"""Tag, push and pull, against any registry, with the credentials of `docker login`.

A push ends with the digest that the registry gave, because that is the only name for the image that nobody can move.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import docker

from .errors import Exit, Refusal, docker_errors, hint
from .progress import LayerSum, Mode, show_transfer
from .reference import Reference


def parse_tag(text: str) -> Reference:
    """A reference that can be given to an image or pushed. Refusal (exit 2) if it is malformed or holds a digest."""
    reference = Reference.parse(text)
    if reference.digest:
        raise Refusal(f"{text} holds a digest", "give NAME:TAG; a digest is what a registry answers with", Exit.USAGE)
    return reference


def tag(client: docker.DockerClient, image: str, new: str) -> str:
    """Give the local `image` (a reference or an id) the further name `new`; the image's id."""
    target = parse_tag(new)
    with docker_errors(f"tag {image}"):
        found = client.images.get(image)
        found.tag(target.repository, target.tag)
    return found.id


def push(client: docker.DockerClient, ref: str, mode: Mode) -> dict:
    """Push a local tag; {"ref", "digest", "pinned", "size_bytes"} (of the manifest)."""
    reference = parse_tag(ref)
    with docker_errors(f"push {ref}"):
        client.images.get(str(reference))
        events = client.api.push(reference.repository, tag=reference.tag, stream=True, decode=True)
        aux = _follow(events, f"push {reference}", mode)
    pushed = next((a for a in aux if a.get("Digest")), None)
    if pushed is None:
        raise Refusal(f"the registry took {reference} without naming a digest", "pull it back to learn its digest")
    digest = pushed["Digest"]
    return {
        "ref": str(reference),
        "digest": digest,
        "pinned": f"{reference.repository}@{digest}",
        "manifest_bytes": pushed.get("Size"),
    }


def pull(
    client: docker.DockerClient, ref: str, mode: Mode, platform: str | None = None, name: str | None = None
) -> dict:
    """Pull a tag or a digest; {"ref", "id", "digest", "size_bytes"}.

    The engine itself refuses content that does not hash to the digest asked for. `name` is a tag to give the image: one
    pulled by digest has none.
    """
    reference = Reference.parse(ref)
    with docker_errors(f"pull {ref}"):
        wanted = reference.digest or reference.tag
        events = client.api.pull(reference.repository, tag=wanted, stream=True, decode=True, platform=platform)
        _follow(events, f"pull {reference}", mode)
        by_name = f"{reference.repository}@{reference.digest}" if reference.digest else str(reference)
        image = client.images.get(by_name)
    if name:
        tag(client, image.id, name)
    digests = [
        d.partition("@")[2] for d in image.attrs.get("RepoDigests") or () if d.startswith(reference.repository + "@")
    ]
    return {
        "ref": str(reference),
        "id": image.id,
        "digest": reference.digest or (digests[0] if digests else None),
        "tag": name or (None if reference.digest else str(reference)),
        "size_bytes": image.attrs["Size"],
    }


def _follow(events: Iterable[dict], doing: str, mode: Mode) -> list[dict]:
    """Show a push's or pull's events; its `aux` objects. Refusal (exit 8) if the stream reports an error."""
    total, aux = LayerSum(), []
    with show_transfer(doing, mode) as shown:
        for event in events:
            if "error" in event:
                text = str(event["error"])
                default = (
                    "see the registry's log" if re.search(r"\b5\d\d\b", text) else "check the name and the registry"
                )
                raise Refusal(f"cannot {doing}: {text}", hint(text, default))
            if isinstance(event.get("aux"), dict):
                aux.append(event["aux"])
            total.feed(event)
            shown(total.done_bytes, total.total_bytes, total.summary())
    return aux
