"""Image references, by the grammar of the distribution project: [HOST[:PORT]/]PATH[:TAG][@DIGEST].

The first path part is a host if it holds a dot or a colon or is `localhost`; that is the engine's rule too.
"""

from __future__ import annotations

import dataclasses
import re

from .errors import Exit, Refusal

_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"(?:localhost|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|[A-Za-z0-9-]+(?=:)|\[[0-9a-fA-F:]+\])(?::[0-9]+)?"
_REFERENCE = re.compile(
    rf"(?P<repository>(?:{_HOST}/)?{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


@dataclasses.dataclass(frozen=True)
class Reference:
    """A parsed reference. `tag` is None only where a digest stands alone."""

    repository: str
    tag: str | None
    digest: str | None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Parse `text`; a reference with neither tag nor digest means `latest`. Refusal (exit 2) if malformed."""
        found = _REFERENCE.fullmatch(text)
        if not found:
            raise Refusal(
                f"{text!r} is not an image reference",
                "write [HOST[:PORT]/]NAME[:TAG] or NAME@sha256:<64 hex digits>, the name in lower case",
                Exit.USAGE,
            )
        tag, digest = found["tag"], found["digest"]
        return cls(found["repository"], tag or (None if digest else "latest"), digest)

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return self.repository + tag + (f"@{self.digest}" if self.digest else "")
