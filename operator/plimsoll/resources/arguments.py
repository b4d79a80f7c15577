"""Counts among an engine's arguments, as `vllm serve` reads them.

`_` is `-` in a flag, its value is the next word or follows `=`, of a flag that is there twice the last one counts, and
of a count thousands are `k` and 1,024 are `K` (vLLM's `FlexibleArgumentParser` and `human_readable_int`). Which
flags take units is not known here: with one where none is taken the engine does not start.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Final

_COUNT: Final = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,15}))?([kmgtKMGT]?)")
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def stated(args: Sequence[object]) -> dict[str, str]:
    """Flags, with `-` between their words, that have a value, and that value."""
    found: dict[str, str] = {}
    for arg, following in itertools.pairwise([*map(str, args), "--"]):
        flag, equals, value = arg.partition("=")
        if flag.startswith("--") and (equals or not following.startswith("--")):
            found[flag.replace("_", "-")] = value if equals else following
    return found


def count(text: str) -> int | None:
    """A whole number with or without its unit; None for what vLLM would not take for one."""
    read = _COUNT.fullmatch(text.strip())
    if read is None:
        return None
    number, decimals, unit = read.groups()
    if unit.lower() == unit and unit:
        return int(float(f"{number}.{decimals or 0}") * 1000 ** _POWERS[unit])
    return None if decimals else int(number) * 1024 ** _POWERS[unit.lower()]
