"""Times the phases of a cold start, from vLLM's log.

Problem: forecasting needs the duration of a start and of its phases, and vLLM reports them only in log lines. Idea:
each phase ends with an event; four of them are lines that vLLM has printed for many versions. A line that a version no
longer prints costs precision, never the sum: its time goes to the next observed phase.
"""

from __future__ import annotations

import re

# Phase -> the line that ends it. `launch`, `api` and `warmup` are ended by the launcher itself.
LOG_PATTERNS = (
    ("import", re.compile(rb"Initializing a V1 LLM engine")),
    ("download", re.compile(rb"Time spent downloading weights|model files are complete")),
    ("load", re.compile(rb"(?:Model loading took|Loading weights took)")),
    ("init", re.compile(rb"init engine \(.*?\) took")),
)


def phase_order(order: tuple[str, ...], *, fetched: bool) -> tuple[str, ...]:
    """Return the phases in the order of this start: a model that is fetched is there before the engine's imports."""
    if not fetched:
        return order
    later = [phase for phase in order if phase != "download"]
    later.insert(later.index("import"), "download")
    return tuple(later)


class StartupPhases:
    """Ends of phases on one clock (seconds); `order` is the contract's list, `start` when the launcher began.

    skipped: phases that this start is expected not to have; one that ends nevertheless is counted.
    """

    def __init__(self, order: tuple[str, ...], start: float, skipped: tuple[str, ...] = ()) -> None:
        self._order = order
        self._start = start
        self._skipped = skipped
        self._ends: dict[str, float] = {}

    def end(self, phase: str, now: float) -> None:
        """End a phase, once, and not after a later one has ended (workers of one engine log in any order)."""
        later = self._order[self._order.index(phase) :]
        if not any(name in self._ends for name in later):
            self._ends[phase] = now

    def observe(self, line: bytes, now: float) -> None:
        """Process one line of the engine's log."""
        for phase, pattern in LOG_PATTERNS:
            if pattern.search(line):
                self.end(phase, now)

    def seconds(self) -> dict[str, float]:
        """Return the duration of each phase that has ended, in order; they add up to the time since the start."""
        durations, previous = {}, self._start
        for phase in self._order:
            if phase in self._ends:
                durations[phase] = self._ends[phase] - previous
                previous = self._ends[phase]
        return durations

    def current(self, now: float) -> tuple[str, float] | None:
        """Return the current phase and its seconds so far, None once the last one has ended."""
        ended = [phase for phase in self._order if phase in self._ends]
        following = self._order[self._order.index(ended[-1]) + 1 :] if ended else self._order
        name = next((phase for phase in following if phase not in self._skipped), None)
        return None if name is None else (name, now - (self._ends[ended[-1]] if ended else self._start))
