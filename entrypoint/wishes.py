"""Decides what the user asked for, from where, and that it is well-formed.

Sources in the order of their right: command line flag > environment > .env file > default. The table of wishes is data
(`wishes.yaml`): name, environment variable, kind, bounds, default, aliases. An alias (a name from the article's hand-made
set-up) counts as the variable itself; both set to different values is a contradiction and refused.

A malformed value is a `Refusal` with exit code 2 that names the variable or flag, the value and what would be accepted.
An unknown FLASHNEXT_* variable is refused too, with the nearest known name: a silently ignored wish is worse than a stop.
An empty string means "not set", because compose passes empty values for variables that are missing from .env.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .data import data
from .errors import Exit, Refusal
from .units import parse_size

# Read by parts other than the plan (compose, the launcher, the image build); never a wish of the engine.
FOREIGN = frozenset(
    {
        "FLASHNEXT_IMAGE",
        "FLASHNEXT_BASE_IMAGE",
        "FLASHNEXT_DEMO_IMAGE",
        "FLASHNEXT_CPU_BASE_IMAGE",
        "FLASHNEXT_PYTHON_IMAGE",
        "FLASHNEXT_MODEL_DIR",
        "FLASHNEXT_PROJECT",
        # the tests' own, beside FLASHNEXT_TEST_*
        "FLASHNEXT_SHARED",
        "FLASHNEXT_ENGINE_PYTHON",
    }
)


@dataclass(frozen=True)
class Wish:
    """One row of `wishes.yaml`. `aliases` maps another variable's name to the unit of a bare number in it ('' for none)."""

    name: str
    env: str
    kind: str
    help: str
    default: Any = None
    choices: tuple[str, ...] = ()
    min: int | None = None
    max: int | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


@dataclass(frozen=True)
class Asked:
    """A value with where it came from: 'flag --x', 'environment X', 'file .env X' or 'default'."""

    value: Any
    source: str

    @property
    def wished(self) -> bool:
        return self.source != "default"


class Wishes(Mapping[str, Asked]):
    """All wishes by name. `wishes.value('context')` is the bare value, None where nothing was asked."""

    def __init__(self, asked: Mapping[str, Asked]):
        self._asked = MappingProxyType(dict(asked))

    def __getitem__(self, name: str) -> Asked:
        return self._asked[name]

    def __iter__(self):
        return iter(self._asked)

    def __len__(self) -> int:
        return len(self._asked)

    def value(self, name: str) -> Any:
        return self._asked[name].value


@cache
def table() -> tuple[Wish, ...]:
    """The rows of `wishes.yaml`."""
    out = []
    for row in map(dict, data("wishes")):
        aliases = row.pop("aliases", {})
        if isinstance(aliases, list):
            aliases = dict.fromkeys(aliases, "")
        choices = tuple(row.pop("choices", ()))
        out.append(Wish(aliases=MappingProxyType(aliases), choices=choices, **row))
    return tuple(out)


def _malformed(where: str, raw: str, expected: str) -> Refusal:
    return Refusal(f"{where} is {raw!r}, which is not {expected}", f"set it to {expected}, or leave it out", Exit.USAGE)


_FLAGS = {"1": "on", "true": "on", "yes": "on", "on": "on", "0": "off", "false": "off", "no": "off", "off": "off"}


def parse(wish: Wish, raw: str, where: str, unit: str = "") -> Any:
    """The value of `raw` for `wish`; `unit` is appended to a bare number (an alias that counts in GiB).

    Returns int bytes for sizes, float seconds, 'auto'|'on'|'off' for flags, a tuple of int for ints, else str.
    Raises Refusal (code 2).
    """
    text = raw.strip()
    if wish.kind == "choice":
        if text.lower() not in wish.choices:
            raise _malformed(where, raw, "one of " + ", ".join(wish.choices))
        return text.lower()
    if wish.kind == "flag":
        if text.lower() == "auto":
            return "auto"
        if text.lower() not in _FLAGS:
            raise _malformed(where, raw, "one of auto, on, off")
        return _FLAGS[text.lower()]
    if wish.kind == "ints":
        if not re.fullmatch(r"\d{1,4}(\s*,\s*\d{1,4})*", text):
            raise _malformed(where, raw, "a list of whole numbers such as 16,16,16")
        return tuple(int(part) for part in text.split(","))
    if wish.kind == "place" and text.lower() in wish.choices:
        return text.lower()
    if wish.kind == "place" and "/" not in text:
        raise _malformed(where, raw, f"one of {', '.join(wish.choices)} or a path with a / in it")
    if wish.kind in ("path", "place"):
        if "\0" in text or "\n" in text:
            raise _malformed(where, raw, "one path")
        return text
    if wish.kind == "str":
        if any(ord(c) < 32 for c in text):
            raise _malformed(where, raw, "text without control characters")
        return text
    number: int | float
    if wish.kind == "size":
        number = parse_size(text + unit if unit and re.fullmatch(r"[\d.]+", text) else text, where)
        if number <= 0:
            raise _malformed(where, raw, "a size above zero")
    elif wish.kind == "seconds":
        match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)\s*(s|m|h)?", text)
        if not match:
            raise _malformed(where, raw, "a time in seconds such as 90, 90s or 15m")
        number = float(match[1]) * {"s": 1, "m": 60, "h": 3600, None: 1}[match[2]]
    else:
        if not re.fullmatch(r"-?\d{1,12}", text.replace("_", "")):
            raise _malformed(where, raw, "a whole number")
        number = int(text.replace("_", ""))
    low, high = wish.min, wish.max
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"between {low} and {high}" if high is not None else f"at least {low}"
        raise _malformed(where, raw, f"a number {bounds}")
    return number


def read_dotenv(path: Path) -> dict[str, str]:
    """The NAME=value lines of a .env file as compose reads them: `export`, quotes and ` #` comments; no interpolation.

    Returns {} where the file is missing. Raises Refusal (code 2) for an unreadable file or a line that is neither.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as e:
        reason = getattr(e, "strerror", None) or "not UTF-8 text"
        raise Refusal(f"cannot read {path.name}: {reason}", "make it a readable text file", Exit.USAGE) from None
    out = {}
    for n, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)", line)
        if not match:
            raise Refusal(f"line {n} of {path.name} is not NAME=value", "see .env.example", Exit.USAGE)
        value = match[2]
        if quoted := re.fullmatch(r"""(["'])(.*)\1\s*(?:#.*)?""", value):
            value = quoted[2]
        else:
            value = re.sub(r"(^|\s)#.*$", "", value).strip()
        out[match[1]] = value
    return out


def _from(wish: Wish, variables: Mapping[str, str], label: str) -> Asked | None:
    """What `variables` asks for `wish`, by its own name or an alias; two names with different values are refused."""
    found: list[tuple[str, Any]] = []
    for name, unit in {wish.env: "", **wish.aliases}.items():
        raw = variables.get(name, "")
        if raw.strip():
            found.append((name, parse(wish, raw, f"{label} {name}", unit)))
    if len({value for _, value in found}) > 1:
        raise Refusal(
            "contradiction: " + " but ".join(f"{n}={variables[n]}" for n, _ in found),
            f"keep only {wish.env}",
            Exit.USAGE,
        )
    return Asked(found[0][1], f"{label} {found[0][0]}") if found else None


def gather(
    flags: Mapping[str, str | None] | None = None,
    environ: Mapping[str, str] | None = None,
    dotenv: Path | None = None,
) -> Wishes:
    """All wishes, each with its source.

    flags: wish name -> raw text from the command line (None where absent); environ: os.environ by default; dotenv: a .env
    file or None. Raises Refusal (code 2) for anything malformed, unknown or contradictory.
    """
    flags = flags or {}
    environ = os.environ if environ is None else environ
    file = read_dotenv(dotenv) if dotenv else {}
    label = f"file {dotenv.name}" if dotenv else ""
    known = {w.env for w in table()} | FOREIGN
    for source, variables in (("environment", environ), (label, file)):
        for name in variables:
            if name.startswith("FLASHNEXT_") and not name.startswith("FLASHNEXT_TEST_") and name not in known:
                near = difflib.get_close_matches(name, known, 1)
                fix = f"did you mean {near[0]}?" if near else "see .env.example for the names"
                raise Refusal(f"{source} sets {name}, which no part of this kit reads", fix, Exit.USAGE)
    asked = {}
    for wish in table():
        raw = flags.get(wish.name)
        if raw is not None:
            asked[wish.name] = Asked(parse(wish, str(raw), f"flag {wish.flag}"), f"flag {wish.flag}")
            continue
        asked[wish.name] = (
            _from(wish, environ, "environment")
            or (_from(wish, file, label) if file else None)
            or Asked(wish.default, "default")
        )
    return Wishes(asked)
