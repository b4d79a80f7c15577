"""How long a replica takes to start, phase by phase, and when those that are starting will be ready.

Problem: capacity ordered now serves one start-up later. How much later differs by image, weights, cache and node; the
first start of a new service has no record; and a pod that hangs must not count as capacity for ever.

Idea: a ledger for each tier and hardware variant. The time of each phase, and of the whole, is log-normal: sums and
products of many small delays. Its median and spread begin at a prior reckoned from bytes over bandwidth and move to
what starts took, old ones fading. From the same law follow the horizon of the forecast, the time until a starting pod
is ready given the phase that it is in, and from when on it is overdue. A pod that fits on no node is neither: it begins
a back-off.

Times are seconds, points in time seconds since the epoch. Phases are the caller's names, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final, NamedTuple

VERSION: Final = 1
PHASES_KEPT: Final = 12  # of a ledger; what comes beyond counts in the whole alone

_NORMAL: Final = NormalDist()
_GUESS_SD: Final = 0.5  # of log seconds: a guess from bytes over bandwidth is off by a factor of 1.6 or so,
_STARTS_SD: Final = 0.15  # starts of one tier among themselves by much less,
_SPREAD_STARTS: Final = 1.0  # which is believed as if one start had shown it
_MEMORY_STARTS: Final = 20.0
_GATE_SDS: Final = 3.0  # a start further out counts as one there: one stuck pull is no new normal, many are;
_GATE_LEAST: Final = math.log(2.0)  # yet twice as long is never too far out
_SHORTEST_S: Final = 0.1  # a phase that was skipped
_LONGEST_S: Final = 1e8  # three years: nobody has waited for it
_FARTHEST_SDS: Final = 37.0  # beyond its median's so many spreads a law's tail is no number any more
_WIDEST: Final = math.log(_LONGEST_S / _SHORTEST_S) ** 2 / 4.0  # variance of what lies between these two (Popoviciu)

# Median seconds where nothing is known. Import (with the engine process and its config) and init (compiling, graphs and
# kernels): vLLM 0.26 on one H200 with an 8B model and cold caches, 62.8 s from start to healthy. The rest are guesses.
_FIXED_S: Final = {"schedule": 1.0, "launch": 1.0, "import": 33.0, "init": 25.0, "api": 3.0, "warmup": 5.0}
_UNPACKING: Final = 0.3  # of a pull's bandwidth is left, since its layers are unpacked too; a guess


class Learned(NamedTuple):
    """Log seconds of one phase: the prior's median (s), then discounted count, mean, and sum of squares about it."""

    prior_s: float
    starts: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def law(self) -> NormalDist:
        """Of the log seconds of the next start: normal, with the doubt about its own median in its spread.

        The median's posterior is that of a normal mean with a normal prior, given the starts' spread (Gelman et al.,
        Bayesian Data Analysis, 2.5), and the spread is an average with a prior weight (3.3).
        """
        spread = (_SPREAD_STARTS * _STARTS_SD**2 + self.squares) / (_SPREAD_STARTS + self.starts)
        sureness = 1.0 / _GUESS_SD**2 + self.starts / spread
        mean = (math.log(self.prior_s) / _GUESS_SD**2 + self.mean * self.starts / spread) / sureness
        return NormalDist(mean, math.sqrt(spread + 1.0 / sureness))

    def quantile_s(self, share: float) -> float:
        """Seconds within which a share of starts, in (0, 1), is through."""
        return math.exp(self.law.inv_cdf(share))

    def left_s(self, elapsed_s: float, share: float) -> float:
        """The same of what is left to one that has taken `elapsed_s` so far; 0 or more."""
        law = self.law
        sds = (math.log(max(elapsed_s, 1e-9)) - law.mean) / law.stdev
        # In the upper tail, where one less what is gone keeps its digits: what hangs for long goes on hanging.
        to_come = (1.0 - share) * 0.5 * math.erfc(min(sds, _FARTHEST_SDS) / math.sqrt(2.0))
        return max(0.0, math.exp(law.mean - law.stdev * _NORMAL.inv_cdf(to_come)) - elapsed_s)


class Quantiles(NamedTuple):
    """Seconds."""

    p50_s: float
    p90_s: float
    p99_s: float


class Ledger(NamedTuple):
    """Start-up times of one tier on one hardware variant: its phases in order, and the whole."""

    phases: tuple[tuple[str, Learned], ...]
    whole: Learned

    @property
    def quantiles(self) -> tuple[tuple[str, Quantiles], ...]:
        """Of each phase, in order, and of the "whole"."""
        named = (*self.phases, ("whole", self.whole))
        return tuple((name, Quantiles(*map(learned.quantile_s, (0.5, 0.9, 0.99)))) for name, learned in named)

    @property
    def horizon_s(self) -> float:
        """90th percentile of a start: how far ahead a forecast must look."""
        return self.whole.quantile_s(0.9)

    @property
    def overdue_s(self) -> float:
        """A start that takes longer is not counted on any more: the larger of its p99 and twice its median."""
        return max(self.whole.quantile_s(0.99), 2.0 * self.whole.quantile_s(0.5))


@dataclass(frozen=True, slots=True)
class Starting:
    """A pod that is not ready yet. since_s: when it was created.

    phase: what it is doing, None if not known; phase_since_s: since when. refused: the scheduler's words while it fits
    on no node, else None.
    """

    pod: str
    since_s: float
    phase: str | None = None
    phase_since_s: float | None = None
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Eta:
    """Seconds from now until a starting pod is ready: as likely as not, and in nine cases of ten."""

    likely_s: float
    late_s: float


@dataclass(frozen=True, slots=True)
class Overdue:
    """A start that takes too long to be counted on: for how long it runs, and from when on it was overdue, s."""

    elapsed_s: float
    limit_s: float


class Backoff(NamedTuple):
    """Tries that fitted on no node, and until when no further replica is ordered."""

    tries: int = 0
    until_s: float = 0.0


def prior(
    image_bytes: float,
    download_bytes: float,
    weight_bytes: float,
    network_bytes_per_s: float,
    disk_bytes_per_s: float,
) -> Ledger:
    """A ledger that has seen no start: bytes over bandwidth, and what an engine takes beside.

    download_bytes: of weights that come over the network, 0 where they lie on a volume or in the image. weight_bytes:
    read into the GPU, at disk_bytes_per_s. Raises ValueError that names the argument.
    """
    amounts = {"image_bytes": image_bytes, "download_bytes": download_bytes, "weight_bytes": weight_bytes}
    for name, value in amounts.items():
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and 0 or more, not {value}")
    for name, value in (("network_bytes_per_s", network_bytes_per_s), ("disk_bytes_per_s", disk_bytes_per_s)):
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name} must be finite and above 0, not {value}")
    medians_s = {
        "schedule": _FIXED_S["schedule"],
        "pull": image_bytes / (network_bytes_per_s * _UNPACKING),
        "launch": _FIXED_S["launch"],
        "import": _FIXED_S["import"],
        "download": download_bytes / network_bytes_per_s,
        "load": weight_bytes / disk_bytes_per_s,
        "init": _FIXED_S["init"],
        "api": _FIXED_S["api"],
        "warmup": _FIXED_S["warmup"],
    }
    return expecting(medians_s)


def expecting(medians_s: Mapping[str, float]) -> Ledger:
    """A ledger that has seen no start, from a guess at each phase's median, in order. Raises ValueError."""
    if not medians_s or not all(0.0 <= median < math.inf for median in medians_s.values()):
        raise ValueError(f"a ledger begins with a finite time of 0 s or more for each phase, not {medians_s}")
    phases = tuple((name, Learned(_within(median))) for name, median in medians_s.items())
    return Ledger(phases[:PHASES_KEPT], Learned(_within(sum(medians_s.values()))))


def record(ledger: Ledger, took_s: Sequence[tuple[str, float]]) -> Ledger:
    """The ledger after a pod became ready. took_s: its phases in order with their seconds; their sum is the whole.

    A phase not seen before begins at what it took; one that was only guessed and did not come is forgotten. One that
    is there twice, as after a restart, took the time of both.
    Raises ValueError for a start that has no phase, or a time that is negative or not finite.
    """
    if not took_s or not all(0.0 <= seconds < math.inf for _, seconds in took_s):
        raise ValueError(f"a start is a list of phases with finite times of 0 s or more, not {took_s}")
    spent_s: dict[str, float] = {}
    for name, seconds in took_s:
        spent_s[name] = spent_s.get(name, 0.0) + seconds
    known = {name: learned for name, learned in ledger.phases if learned.starts or name in spent_s}
    for name, seconds in spent_s.items():
        if name in known or len(known) < PHASES_KEPT:
            known[name] = _learn(known.get(name) or Learned(_within(seconds)), seconds)
    return Ledger(_ordered(known, list(spent_s)), _learn(ledger.whole, sum(spent_s.values())))


def _ordered(known: Mapping[str, Learned], seen: Sequence[str]) -> tuple[tuple[str, Learned], ...]:
    """Phases as last seen; one that was not seen this time stays behind the one that it followed."""
    names = [name for name in seen if name in known]
    before: str | None = None
    for name in known:
        if name not in names:
            names.insert(names.index(before) + 1 if before is not None else 0, name)
        before = name
    return tuple((name, known[name]) for name in names)


def _within(seconds: float) -> float:
    return min(max(seconds, _SHORTEST_S), _LONGEST_S)


def _learn(learned: Learned, seconds: float) -> Learned:
    law = learned.law
    gate = max(_GATE_SDS * law.stdev, _GATE_LEAST)
    value = min(max(math.log(_within(seconds)), law.mean - gate), law.mean + gate)
    keep = 1.0 - 1.0 / _MEMORY_STARTS
    starts = keep * learned.starts + 1.0
    moved = value - learned.mean if learned.starts else 0.0
    mean = learned.mean + moved / starts if learned.starts else value
    squares = keep * learned.squares + moved * (value - mean)
    return Learned(learned.prior_s, starts, mean, squares)


def eta(ledger: Ledger, pod: Starting, now_s: float) -> Eta | Overdue:
    """When a starting pod will be ready; Overdue if it has taken too long for that to be known.

    With its phase: what is left of that phase, given how long it has run, and the phases after it; medians add, and
    spreads add in squares. Without: what is left of the whole. A pod that fits on no node has the whole before it.
    """
    if pod.refused is not None:
        return Eta(ledger.whole.quantile_s(0.5), ledger.whole.quantile_s(0.9))
    elapsed_s = max(0.0, now_s - pod.since_s)
    if elapsed_s > ledger.overdue_s:
        return Overdue(elapsed_s, ledger.overdue_s)
    names = [name for name, _ in ledger.phases]
    if pod.phase not in names:
        return Eta(ledger.whole.left_s(elapsed_s, 0.5), ledger.whole.left_s(elapsed_s, 0.9))
    at = names.index(pod.phase)
    begun_s = pod.since_s if pod.phase_since_s is None else pod.phase_since_s
    in_phase_s = max(0.0, now_s - begun_s)
    here = ledger.phases[at][1]
    pairs = [(here.left_s(in_phase_s, 0.5), here.left_s(in_phase_s, 0.9))]
    pairs += [(later.quantile_s(0.5), later.quantile_s(0.9)) for _, later in ledger.phases[at + 1 :]]
    likely_s = sum(p50_s for p50_s, _ in pairs)
    return Eta(likely_s, likely_s + math.hypot(*(p90_s - p50_s for p50_s, p90_s in pairs)))


_FIRST_WAIT_S: Final = 30.0
_LONGEST_WAIT_S: Final = 1800.0


def refused(backoff: Backoff, now_s: float) -> Backoff:
    """The back-off while some pod fits on no node: a wait that has run out is followed by one twice as long."""
    if backoff.tries and now_s < backoff.until_s <= now_s + _LONGEST_WAIT_S:
        return backoff
    tries = min(backoff.tries + 1, 16)  # beyond, the wait does not grow any more
    return Backoff(tries, now_s + min(_FIRST_WAIT_S * 2.0 ** (tries - 1), _LONGEST_WAIT_S))


def to_dict(ledger: Ledger) -> dict[str, Any]:
    """The ledger as numbers, lists and a version: about 1 KB of JSON."""
    return {
        "version": VERSION,
        "phases": [[name, *_rounded(learned)] for name, learned in ledger.phases],
        "whole": _rounded(ledger.whole),
    }


def from_dict(stored: Mapping[str, Any]) -> Ledger:
    """The ledger that `to_dict` gave, to its six digits. Raises ValueError for anything else, other versions too."""
    if not isinstance(stored, Mapping) or stored.get("version") != VERSION:
        raise ValueError(f"not a start-up ledger of version {VERSION}: {str(stored)[:80]}")
    phases, whole = stored.get("phases"), stored.get("whole")
    if not isinstance(phases, list) or not 0 < len(phases) <= PHASES_KEPT:
        raise ValueError(f"a ledger has 1 to {PHASES_KEPT} phases, not {str(phases)[:80]}")
    read = {}
    for row in phases:
        if not isinstance(row, list) or not row or not isinstance(row[0], str):
            raise ValueError(f"a phase is a name and its numbers, not {str(row)[:80]}")
        read[row[0]] = _learned(row[1:])
    if len(read) < len(phases):
        raise ValueError("a phase is told twice")
    return Ledger(tuple(read.items()), _learned(whole))


def _rounded(learned: Learned) -> list[float]:
    return [float(f"{number:.6g}") for number in learned]


def _learned(stored: Any) -> Learned:
    if not isinstance(stored, list) or len(stored) != len(Learned._fields):
        raise ValueError(f"{len(Learned._fields)} numbers are kept of a phase, not {str(stored)[:80]}")
    for value in stored:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
            raise ValueError(f"{value!r:.80} is no number that a ledger holds")
    prior_s, starts, mean, squares = map(float, stored)
    spread = 0.0 <= starts <= _MEMORY_STARTS and 0.0 <= squares <= starts * _WIDEST
    if not _SHORTEST_S <= prior_s <= _LONGEST_S or not spread or abs(mean) > 20.0:
        raise ValueError(f"no start-up time has these figures: {stored}")
    return Learned(prior_s, starts, mean, squares)
