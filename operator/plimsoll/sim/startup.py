"""Start-up times of engines: drawn from a distribution, and reported phase by phase as by a launcher."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from plimsoll.sim import profile
from plimsoll.sim.errors import BadInput

StartupPhases = tuple[tuple[str, float], ...]

# Shares of a start-up: Kubernetes' part, then the phases of a cold start on an H200.
_PHASE_SHARES: Final = (
    ("schedule", 0.01),
    ("pull", 0.05),
    ("launch", 0.04),
    ("import", 0.40),
    ("load", 0.20),
    ("init", 0.25),
    ("warmup", 0.05),
)


@dataclass(frozen=True)
class StartupDistribution:
    """Time from the order of an engine until gateways send requests to it, seconds: uniform, or one of the samples."""

    uniform_min_s: float = 0.0
    uniform_max_s: float = 0.0
    samples_s: tuple[float, ...] = ()

    def sample(self, random: Random) -> StartupPhases:
        """Draw one start-up."""
        total_s = (
            random.choice(self.samples_s) if self.samples_s else random.uniform(self.uniform_min_s, self.uniform_max_s)
        )
        return tuple((name, share * total_s) for name, share in _PHASE_SHARES)

    @property
    def mean_s(self) -> float:
        return (
            sum(self.samples_s) / len(self.samples_s)
            if self.samples_s
            else (self.uniform_min_s + self.uniform_max_s) / 2
        )

    @property
    def min_s(self) -> float:
        return min(self.samples_s, default=self.uniform_min_s)

    @property
    def max_s(self) -> float:
        return max(self.samples_s, default=self.uniform_max_s)


def current_phase(phases: StartupPhases, started_s: float, now_s: float) -> tuple[str, float]:
    """Return the phase at now_s of a start-up that began at started_s, and its begin; after the end, the last phase."""
    for name, seconds in phases:
        if now_s < started_s + seconds:
            return name, started_s
        started_s += seconds
    return phases[-1][0], started_s


def parse(text: str) -> StartupDistribution:
    """`60`, `uniform:100,135` or the path of a file with a list of times, seconds: JSON, or one a line. Raises
    BadInput."""
    try:
        if text.startswith("uniform:"):
            low_s, high_s = map(float, text.removeprefix("uniform:").split(","))
            return _validated(StartupDistribution(low_s, high_s), text)
        return _validated(StartupDistribution(float(text), float(text)), text)
    except ValueError:
        if text.startswith("uniform:"):
            raise BadInput(f"--start-up: {text!r} is not uniform:FROM,TO in seconds") from None
    try:
        samples = profile.document(text)
    except BadInput as error:
        samples = _read_lines(text)
        if samples is None:
            raise BadInput(f"--start-up: neither a number nor uniform:FROM,TO, and as a file {error}") from None
    if not isinstance(samples, list) or not samples or not all(_is_duration(one) for one in samples):
        raise BadInput(f"--start-up: {text}: must be a list of at least one time in seconds")
    return StartupDistribution(samples_s=tuple(float(one) for one in samples))


def _read_lines(path: str) -> list[float] | None:
    """Return the numbers of a file with one per line; None for any other file."""
    try:
        return [float(line) for line in Path(path).read_text(encoding="utf-8").split()]
    except (OSError, ValueError):
        return None


def _validated(startup: StartupDistribution, text: str) -> StartupDistribution:
    if not 0.0 <= startup.uniform_min_s <= startup.uniform_max_s < 86_400.0:
        raise BadInput(f"--start-up: {text!r} is not a span of time of less than a day")
    return startup


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value < 86_400.0
