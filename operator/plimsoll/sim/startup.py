"""How long engines take to start: drawn from a distribution, told phase by phase as a launcher tells it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from plimsoll.sim import profile
from plimsoll.sim.errors import BadInput

Phases = tuple[tuple[str, float], ...]

# Of a start: what Kubernetes does first, then as a cold start on an H200 divides.
_SHARES: Final = (
    ("schedule", 0.01),
    ("pull", 0.05),
    ("launch", 0.04),
    ("import", 0.40),
    ("load", 0.20),
    ("init", 0.25),
    ("warmup", 0.05),
)


@dataclass(frozen=True)
class StartUp:
    """From the order of an engine until gateways send to it: evenly between two times, or one of those listed, s."""

    low_s: float = 0.0
    high_s: float = 0.0
    listed_s: tuple[float, ...] = ()

    def draw(self, random: Random) -> Phases:
        """One start."""
        whole_s = random.choice(self.listed_s) if self.listed_s else random.uniform(self.low_s, self.high_s)
        return tuple((name, share * whole_s) for name, share in _SHARES)

    @property
    def mean_s(self) -> float:
        return sum(self.listed_s) / len(self.listed_s) if self.listed_s else (self.low_s + self.high_s) / 2

    @property
    def shortest_s(self) -> float:
        return min(self.listed_s, default=self.low_s)

    @property
    def longest_s(self) -> float:
        return max(self.listed_s, default=self.high_s)


def under_way(phases: Phases, began_s: float, now_s: float) -> tuple[str, float]:
    """The phase of a start that began then, and since when it is in it; the last one where all are over."""
    for name, seconds in phases:
        if now_s < began_s + seconds:
            return name, began_s
        began_s += seconds
    return phases[-1][0], began_s


def parse(text: str) -> StartUp:
    """`60`, `uniform:100,135` or the path of a file with a list of times, seconds: JSON, or one a line. Raises
    BadInput."""
    try:
        if text.startswith("uniform:"):
            low_s, high_s = map(float, text.removeprefix("uniform:").split(","))
            return _checked(StartUp(low_s, high_s), text)
        return _checked(StartUp(float(text), float(text)), text)
    except ValueError:
        if text.startswith("uniform:"):
            raise BadInput(f"--start-up: {text!r} is not uniform:FROM,TO in seconds") from None
    try:
        listed = profile.document(text)
    except BadInput as error:
        listed = _lines(text)
        if listed is None:
            raise BadInput(f"--start-up: neither a number nor uniform:FROM,TO, and as a file {error}") from None
    if not isinstance(listed, list) or not listed or not all(_is_time(one) for one in listed):
        raise BadInput(f"--start-up: {text}: must be a list of at least one time in seconds")
    return StartUp(listed_s=tuple(float(one) for one in listed))


def _lines(path: str) -> list[float] | None:
    """The numbers of a file that has one a line; None: it is none such."""
    try:
        return [float(line) for line in Path(path).read_text(encoding="utf-8").split()]
    except (OSError, ValueError):
        return None


def _checked(start: StartUp, text: str) -> StartUp:
    if not 0.0 <= start.low_s <= start.high_s < 86_400.0:
        raise BadInput(f"--start-up: {text!r} is not a span of time of less than a day")
    return start


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value < 86_400.0
