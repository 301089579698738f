"""How a size is spelled: text in, bytes out, and GiB only where a person reads it.

Rule order: a bare number is bytes; `B`; the binary letters K, M, G, T (alone or with `iB`) are powers of 1024, as
Docker reads
`48g`; the decimal names KB, MB, GB, TB are powers of 1000, as disk makers count. "128GB" is therefore 119.2 GiB: the
smaller reading is the one that cannot overcommit a box.
"""

from __future__ import annotations

import re
from decimal import Decimal

from .errors import Exit, Refusal

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

_FACTORS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _FACTORS[_letter] = _FACTORS[_letter + "ib"] = 1024**_power
    _FACTORS[_letter + "b"] = 1000**_power

_SIZE = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?|\.[0-9]+)\s*([a-z]*)")
_LARGEST_BYTES = 1 << 60  # 1 EiB: above it the text is a slip of the keyboard, not a box


def parse_size(text: str | int, what: str = "size") -> int:
    """Bytes meant by `text`: '125GiB', '48G', '550000000', '0.5 TiB', '550_000_000'.

    `what` names the wish in the message. A fraction of a byte is cut off. Raises Refusal (code 2) for anything else,
    for a negative number and for more than 1 EiB.
    """
    found = _SIZE.fullmatch(str(text).strip().lower())
    factor = _FACTORS.get(found.group(2)) if found else None
    if factor is not None:
        number = found.group(1).replace("_", "")
        # A comma is accepted between thousands only: "1,5" is one and a half to half of Europe.
        if "," in number and not re.fullmatch(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?", number):
            factor = None
        elif (size_bytes := int(Decimal(number.replace(",", "")) * factor)) <= _LARGEST_BYTES:
            return size_bytes
    raise Refusal(
        f"{what}: {str(text)[:60]!r} is not a size",
        "write bytes or a number with a unit, such as 125GiB, 48G (= GiB), 500GB or 550000000",
        Exit.USAGE,
    )


def format_gib(size_bytes: int | None, digits: int = 2) -> str:
    """`size_bytes` as GiB for a person ('47.50 GiB'); 'unknown' for None."""
    return "unknown" if size_bytes is None else f"{size_bytes / GIB:,.{digits}f} GiB"
