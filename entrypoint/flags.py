"""Decides how a command line is read: wishes from `wishes.yaml` become `--name value` flags of every command that plans."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from .errors import Exit, Refusal
from .wishes import table


def read(args: Sequence[str]) -> dict[str, str]:
    """Wish name -> raw text from `--context 8192` or `--context=8192`. Raises Refusal (code 2) for anything else."""
    known = {w.flag: w.name for w in table()}
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
    return out


def help_text() -> str:
    """One line per wish, for `--help`."""
    lines = ["Wishes (flag, or the environment variable, or .env):", ""]
    for w in table():
        default = "" if w.default is None else f" [{w.default}]"
        lines.append(f"{w.flag}, {w.env}: {w.help}{default}")
        lines.append("")
    return "\n".join(lines)
