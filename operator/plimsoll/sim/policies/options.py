"""The words after a policy's name: `name:word,key=value`. What is not understood is refused by its name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from plimsoll.api.v1alpha1.tiers import MAX_REPLICAS
from plimsoll.core.picking.endpoint import Role
from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies.base import Bounds
from plimsoll.sim.rows import shown

MOST: Final = 1_000_000  # of anything that is counted
LARGEST: Final = 1e9  # of any other figure


class Options:
    """Each option is taken once by whoever knows it; `end` refuses what is left. All raise BadInput.

    words: those without a key. place: where the text stood, for messages.
    """

    def __init__(self, place: str, text: str) -> None:
        self.place = place
        words = [word for word in text.split(",") if word]
        self.words = [word for word in words if "=" not in word]
        self._left: dict[str, str] = {}
        for key, value in (word.split("=", 1) for word in words if "=" in word):
            if key in self._left:
                raise self.bad(f"{key} is given twice")
            self._left[key] = value

    def number(self, key: str, usual: float, most: float = LARGEST) -> float:
        """At least 0, and nothing that a sum could not hold."""
        value = self._float(key, usual)
        if not 0.0 <= value <= most:
            raise self.bad(f"{key} is a number of at least 0 and at most {most:g}, not {value:g}")
        return value

    def positive(self, key: str, usual: float, most: float = LARGEST) -> float:
        """Above 0, and nothing that a quotient could not hold."""
        value = self._float(key, usual)
        if not 0.0 < value <= most:
            raise self.bad(f"{key} is a number above 0 and at most {most:g}, not {value:g}")
        if value < 1.0 / LARGEST:
            raise self.bad(f"{key} is at least {1.0 / LARGEST:g}, not {value:g}")
        return value

    def period(self, key: str, usual: float) -> float:
        """Seconds between two looks: at least one, since nobody is asked more often."""
        value = self.positive(key, usual)
        if value < 1.0:
            raise self.bad(f"{key} is at least 1 s, not {value:g}: policies are asked once a second")
        return value

    def count(self, key: str, usual: int, least: int = 0) -> int:
        """A whole number."""
        text = self._left.pop(key, str(usual))
        value = whole(text)
        if value is None or value < least:
            raise self.bad(f"{key} is a whole number of at least {least} and at most {MOST:,}, not {shown(text)}")
        return value

    def flag(self, key: str, usual: bool) -> bool:
        return self.choice(key, "1" if usual else "0", ("0", "1")) == "1"

    def choice(self, key: str, usual: str, among: Collection[str]) -> str:
        value = self._left.pop(key, usual)
        if value not in among:
            raise self.bad(f"{key} is {' or '.join(among)}, not {value!r}")
        return value

    def text(self, key: str, usual: str) -> str:
        """As it is."""
        return self._left.pop(key, usual)

    def among(self, keys: Collection[str]) -> list[str]:
        """Those of the keys that were given and nobody has taken yet."""
        return [key for key in keys if key in self._left]

    def parts(self, count: int) -> list[Options]:
        """All that is left, for each of so many tiers: `key=A/B` is a value for each, any other is for all."""
        found = []
        for place in range(count):
            part = Options(self.place, "")
            for key, value in self._left.items():
                values = value.split("/")
                if len(values) not in (1, count):
                    raise self.bad(f"{key} is one value, or {count} with / between them, not {value!r}")
                part._left[key] = values[place if len(values) > 1 else 0]
            found.append(part)
        self._left = {}
        return found

    def end(self, plain: bool = False) -> None:
        """Nothing else may have been said. plain: whether words without a key were expected."""
        if self.words and not plain:
            raise self.bad(f"{', '.join(self.words)}: options are key=value")
        if self._left:
            raise self.bad(f"unknown {', '.join(self._left)}")

    def bad(self, why: str) -> BadInput:
        return BadInput(f"{self.place}: {why}")

    def _float(self, key: str, usual: float) -> float:
        text = self._left.pop(key, str(usual))
        try:
            return float(text)
        except ValueError:
            raise self.bad(f"{key} is a number, not {text!r}") from None


def replicas(words: list[str], bounds: Bounds, place: str) -> Mapping[Role, int]:
    """A count for each tier, prefill before decode, from as many words. Raises BadInput."""
    counts = [whole(word, MAX_REPLICAS) for word in words]
    found = [count for count in counts if count is not None]
    if len(words) != len(bounds) or len(found) != len(words):
        tiers = ",".join(str(role).upper() for role in bounds)
        several = "s" if len(bounds) > 1 else ""
        raise BadInput(f"{place}: must be {tiers} as {len(bounds)} whole number{several} up to {MAX_REPLICAS:,}")
    return dict(zip(bounds, found, strict=True))


def whole(text: str, most: int = MOST) -> int | None:
    """A whole number from 0 to `most`; None where the text is none."""
    if not text.isdecimal() or len(text) > len(str(most)) or int(text) > most:
        return None
    return int(text)
