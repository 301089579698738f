"""Gathers what a plan is made from: the box, the checkpoint and the key, each with a refusal where it cannot be read."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .checkpoint import Checkpoint, read_checkpoint
from .errors import Exit, Refusal
from .wishes import Wishes

if TYPE_CHECKING:
    from .machine import Machine
    from .plan import Plan
    from .table_place import Prepared


def read_api_key(wishes: Wishes) -> str | None:
    """The key in the file that FLASHNEXT_API_KEY_FILE names; None where no file is named or it is the null device.

    compose mounts /dev/null as the secret where the user has none. Raises Refusal (code 2) for an unreadable, empty or
    odd file; the key itself is never part of a message.
    """
    name = wishes.value("api_key_file")
    if not name:
        return None
    path = Path(name)
    try:
        if stat.S_ISCHR(path.stat().st_mode):
            return None
        key = path.read_text(encoding="utf-8").strip()
    except OSError as e:
        raise Refusal(
            f"the API key file {name} cannot be read: {e.strerror}",
            "Docker keeps the file's own owner and mode: make it readable for uid 10001 (chmod 644, in a folder only you can enter)",
            Exit.USAGE,
        ) from None
    except UnicodeDecodeError:
        raise Refusal(f"the API key file {name} is not text", "write the key as one line of text", Exit.USAGE) from None
    if not key or "\n" in key or not key.isprintable() or " " in key:
        raise Refusal(
            f"the API key file {name} does not hold one key", "write one key without spaces, on one line", Exit.USAGE
        )
    return key


def machine(wishes: Wishes) -> Machine:
    from . import table_place
    from .detect import read_machine

    return read_machine(paths=table_place.paths(wishes))


def prepared(wishes: Wishes) -> Prepared | None:
    """What lies where the prepared table file would be; None where the wish is for another place or for the CPU."""
    from . import table, table_place

    file = table_place.file_of(wishes)
    if file is None or wishes.value("device") == "cpu":
        return None
    return table.look(Path(wishes.value("model")), Path(file))


def checkpoint(wishes: Wishes, read: Callable[[str], Checkpoint] | None = None) -> Checkpoint:
    """The checkpoint as `read` gives it, by default with every header. Raises Refusal (code 4)."""
    found = (read or read_checkpoint)(wishes.value("model"))
    if not found.local:
        raise Refusal(
            f"{wishes.value('model')} is not a folder here",
            "flashnext fetch brings it; point FLASHNEXT_MODEL (compose: FLASHNEXT_MODEL_DIR) at its folder",
            Exit.CHECKPOINT,
        )
    if not found.tokenizer:
        raise Refusal(
            f"{wishes.value('model')} holds no tokenizer",
            "download tokenizer.json and tokenizer_config.json of the same repository",
            Exit.CHECKPOINT,
        )
    return found


def everything(
    wishes: Wishes, mend: Callable[[Checkpoint], Checkpoint] = lambda found: found
) -> tuple[Machine, Checkpoint, Plan, str | None]:
    """Box, checkpoint, plan and key, in the order in which a mistake is cheapest to mend. Raises Refusal.

    `mend` gives the checkpoint that is served in the place of the one that was found (checkpoint_fix.py).
    """
    from . import plan, rules

    key = read_api_key(wishes)
    rules.check_exposure(wishes, key is not None)
    box = machine(wishes)
    model = mend(checkpoint(wishes))
    return box, model, plan.make_plan(box, plan.model_of(model), wishes, prepared(wishes)), key
