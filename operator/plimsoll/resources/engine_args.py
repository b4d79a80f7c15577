"""Reads counts from an engine's arguments like `vllm serve`.

In a flag `_` equals `-`. Its value is the next argument or follows `=`, and the last occurrence of a flag counts. In a
count `k` is 1,000 and `K` is 1,024 (vLLM's `FlexibleArgumentParser` and `human_readable_int`). Units are accepted for
every flag here; vLLM does not start if a flag that takes none has one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Final

_COUNT_PATTERN: Final = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,15}))?([kmgtKMGT]?)")
_UNIT_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def flag_values(args: Sequence[object]) -> dict[str, str]:
    """The flags that have a value, spelled with `-`, and their values."""
    values: dict[str, str] = {}
    for arg, following in itertools.pairwise([*map(str, args), "--"]):
        flag, equals, value = arg.partition("=")
        if flag.startswith("--") and (equals or not following.startswith("--")):
            values[flag.replace("_", "-")] = value if equals else following
    return values


def parse_count(text: str) -> int | None:
    """An integer with an optional unit; None for text that vLLM rejects."""
    parsed = _COUNT_PATTERN.fullmatch(text.strip())
    if parsed is None:
        return None
    number, decimals, unit = parsed.groups()
    if unit.lower() == unit and unit:
        return int(float(f"{number}.{decimals or 0}") * 1000 ** _UNIT_POWERS[unit])
    return None if decimals else int(number) * 1024 ** _UNIT_POWERS[unit.lower()]
