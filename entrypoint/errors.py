"""How a user's mistake is told: one ERROR line, one Fix line, one documented exit code.

Anything a user can cause ends in a `Refusal`; `cli.main` prints it and exits. Anything else is a bug and may show a traceback.
"""

from __future__ import annotations

import enum
import sys


class Exit(enum.IntEnum):
    """Exit codes of `flashnext`, as the README lists them."""

    OK = 0
    USAGE = 2
    PLAN = 3
    CHECKPOINT = 4
    TABLE = 5
    ENGINE_START = 6
    ENGINE_DIED = 7


class Refusal(Exception):
    """A request that cannot be met: what is wrong, what would work, and the exit code.

    Both texts are one line each; newlines are folded so that log collectors keep them whole.
    """

    def __init__(self, message: str, fix: str, code: int = Exit.PLAN):
        super().__init__(message)
        self.message = " ".join(message.split())
        self.fix = " ".join(fix.split())
        self.code = Exit(code)

    def print(self, stream=None) -> None:
        """Write the two lines to `stream` (stderr by default)."""
        out = stream or sys.stderr
        out.write(f"ERROR: {self.message}\nFix: {self.fix}\n")
        out.flush()
