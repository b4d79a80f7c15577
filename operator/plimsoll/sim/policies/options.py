"""Options after a policy's name: `name:word,key=value`. An unknown option is rejected by its name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from plimsoll.api.v1alpha1.tiers import MAX_TIER_REPLICAS
from plimsoll.core.types import Role
from plimsoll.core.units import format_number
from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies.base import Bounds
from plimsoll.sim.trace_files import printable

MAX_COUNT: Final = 1_000_000  # of anything that is counted
MAX_NUMBER: Final = 1e9  # of any other figure


class PolicyOptions:
    """Options of a policy. Each is read once; `finish` rejects the unread ones. All methods raise BadInput.

    positional: values without a key. origin: where the text came from, for messages.
    """

    def __init__(self, origin: str, text: str) -> None:
        self.origin = origin
        words = [word for word in text.split(",") if word]
        self.positional = [word for word in words if "=" not in word]
        self._remaining: dict[str, str] = {}
        for key, value in (word.split("=", 1) for word in words if "=" in word):
            if key in self._remaining:
                raise self.error(f"{key} is given twice")
            self._remaining[key] = value

    def number(self, key: str, default: float, maximum: float = MAX_NUMBER) -> float:
        """Return a number from 0 to `maximum`, small enough for sums."""
        value = self._float(key, default)
        if not 0.0 <= value <= maximum:
            raise self.error(
                f"{key} is a number of at least 0 and at most {format_number(maximum)}, not {format_number(value)}"
            )
        return value

    def positive(self, key: str, default: float, maximum: float = MAX_NUMBER) -> float:
        """Return a number above 0, large enough to divide by."""
        value = self._float(key, default)
        if not 0.0 < value <= maximum:
            raise self.error(
                f"{key} is a number above 0 and at most {format_number(maximum)}, not {format_number(value)}"
            )
        if value < 1.0 / MAX_NUMBER:
            raise self.error(f"{key} is at least {format_number(1.0 / MAX_NUMBER)}, not {format_number(value)}")
        return value

    def period(self, key: str, default: float) -> float:
        """Return the seconds between two syncs: at least one, because no policy runs more often."""
        value = self.positive(key, default)
        if value < 1.0:
            raise self.error(f"{key} is at least 1 s, not {format_number(value)}: policies are asked once a second")
        return value

    def count(self, key: str, default: int, minimum: int = 0) -> int:
        """Return a whole number."""
        text = self._remaining.pop(key, str(default))
        value = parse_count(text)
        if value is None or value < minimum:
            raise self.error(
                f"{key} is a whole number of at least {minimum} and at most {MAX_COUNT:,}, not {printable(text)}"
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        return self.choice(key, "1" if default else "0", ("0", "1")) == "1"

    def choice(self, key: str, default: str, choices: Collection[str]) -> str:
        value = self._remaining.pop(key, default)
        if value not in choices:
            raise self.error(f"{key} is {' or '.join(choices)}, not {value!r}")
        return value

    def text(self, key: str, default: str) -> str:
        """Return the text of an option."""
        return self._remaining.pop(key, default)

    def remaining_of(self, keys: Collection[str]) -> list[str]:
        """Return those of the keys that were given and are not read yet."""
        return [key for key in keys if key in self._remaining]

    def split(self, count: int) -> list[PolicyOptions]:
        """Return the remaining options of each of `count` tiers: `key=A/B` has a value for each, any
        other is for all.
        """
        per_tier = []
        for place in range(count):
            part = PolicyOptions(self.origin, "")
            for key, value in self._remaining.items():
                values = value.split("/")
                if len(values) not in (1, count):
                    raise self.error(f"{key} is one value, or {count} with / between them, not {value!r}")
                part._remaining[key] = values[place if len(values) > 1 else 0]
            per_tier.append(part)
        self._remaining = {}
        return per_tier

    def finish(self, allow_positional: bool = False) -> None:
        """Raise BadInput if any option was not read. allow_positional: whether values without a key are allowed."""
        if self.positional and not allow_positional:
            raise self.error(f"{', '.join(self.positional)}: options are key=value")
        if self._remaining:
            raise self.error(f"unknown {', '.join(self._remaining)}")

    def error(self, message: str) -> BadInput:
        return BadInput(f"{self.origin}: {message}")

    def _float(self, key: str, default: float) -> float:
        text = self._remaining.pop(key, str(default))
        try:
            return float(text)
        except ValueError:
            raise self.error(f"{key} is a number, not {text!r}") from None


def parse_replicas(words: list[str], bounds: Bounds, origin: str) -> Mapping[Role, int]:
    """Return a count for each tier, prefill before decode, from one word per tier. Raises BadInput."""
    counts = [parse_count(word, MAX_TIER_REPLICAS) for word in words]
    valid_counts = [count for count in counts if count is not None]
    if len(words) != len(bounds) or len(valid_counts) != len(words):
        tiers = ",".join(str(role).upper() for role in bounds)
        several = "s" if len(bounds) > 1 else ""
        raise BadInput(f"{origin}: must be {tiers} as {len(bounds)} whole number{several} up to {MAX_TIER_REPLICAS:,}")
    return dict(zip(bounds, valid_counts, strict=True))


def parse_count(text: str, maximum: int = MAX_COUNT) -> int | None:
    """Return a whole number from 0 to `maximum`; None for any other text."""
    if not text.isdecimal() or len(text) > len(str(maximum)) or int(text) > maximum:
        return None
    return int(text)
