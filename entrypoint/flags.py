"""Decides how a command line is read: wishes from `wishes.yaml` become `--name value` flags of every command that plans.

`--env-file` names the file of wishes beside them.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .errors import Exit, Refusal
from .wishes import table


class Given(NamedTuple):
    """`wishes`: wish name -> raw text. `env_file`: where the file of wishes is, if there is one."""

    wishes: dict[str, str]
    env_file: Path


def read(args: Sequence[str]) -> Given:
    """What `--context 8192` or `--context=8192` say. Raises Refusal (code 2) for anything else."""
    known = {w.flag: w.name for w in table()} | {"--env-file": "env_file"}
    out: dict[str, str] = {}
    rest = list(args)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in known:
            near = difflib.get_close_matches(flag, known, 1)
            fix = f"did you mean {near[0]}?" if near else "`flashnext plan --help` lists the flags"
            raise Refusal(f"{word!r} is not understood", fix, Exit.USAGE)
        if not equals:
            if not rest:
                raise Refusal(f"{flag} needs a value", f"write {flag} VALUE", Exit.USAGE)
            value = rest.pop(0)
        if known[flag] in out:
            raise Refusal(f"{flag} is given twice", "keep one", Exit.USAGE)
        out[known[flag]] = value
    env_file = Path(out.pop("env_file", ".env"))
    return Given(out, env_file)


def help_text() -> str:
    """One line per wish, for `--help`."""
    lines = ["Wishes (flag, or the environment variable, or .env):", ""]
    for w in table():
        default = "" if w.default is None else f" [{w.default}]"
        lines.append(f"{w.flag}, {w.env}: {w.help}{default}")
        lines.append("")
    lines.append("--env-file: File of wishes as NAME=value lines [.env]")
    return "\n".join(lines)
