"""Start-up time model: start-up phases of a replica, and the expected readiness of starting pods.

Problem: capacity ordered now serves one start-up time later. The start-up time depends on image, weights, cache and
node. A new service has no measurements, and a hanging pod must not count as capacity.

Idea: one model per tier and variant. The duration of each phase, and the total, is log-normal. Its median and spread
start from a prior (bytes over bandwidth) and follow the measured starts, with discounting. One stuck start is an
outlier; starts that have changed make what was learned before a prior. The model gives the forecast horizon, the
remaining time of a starting pod in its current phase, and the limit after which it is overdue. An
unschedulable pod starts a back-off instead. An engine that restarts in its pod has fewer and shorter phases, because
node, image and caches are there. Its phases are learned apart from those of new pods, and only its own remaining time
follows them.

Durations are in seconds, times in seconds since the epoch. The caller names the phases, in order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, Final, NamedTuple, TypeAlias

from plimsoll.core import codec
from plimsoll.core.codec import Length, Number

MAX_PHASES: Final = 12  # per model; further phases count in the total only

POD_PHASES: Final = ("schedule", "pull")  # of a new pod only
RESTART_PHASE: Final = "restart"  # of a restart only: from the end of the engine's container to its next start

_NORMAL: Final = NormalDist()
_PRIOR_SD: Final = 0.5  # of log seconds: a prior is wrong by a factor of about 1.6
_STARTUP_SD: Final = 0.15  # of log seconds: spread between starts of one tier
_SPREAD_PRIOR_WEIGHT: Final = 1.0  # weight of that spread, in starts
_MEMORY_STARTUPS: Final = 20.0
_OUTLIER_SDS: Final = 3.0  # larger deviations are clipped, so that one stuck pull has little effect
_MIN_OUTLIER_LOG: Final = math.log(2.0)  # a factor of 2 is never clipped
_ESTABLISHED_STARTUPS: Final = 2.5  # three starts: with fewer, the spread is still learned and any outlier widens it
_MIN_PHASE_S: Final = 0.1  # also for a skipped phase
_MAX_PHASE_S: Final = 1e8  # three years
_MAX_TAIL_SDS: Final = 37.0  # beyond it the tail probability underflows
_MAX_LOG_VARIANCE: Final = (
    math.log(_MAX_PHASE_S / _MIN_PHASE_S) ** 2 / 4.0
)  # largest variance of values between these two (Popoviciu)

# Median seconds without measurements. Import (with the engine process and its config) and init (compiling, graphs and
# kernels): vLLM 0.26 on one H200 with an 8B model and cold caches, 62.8 s from start to healthy. The rest are guesses.
_DEFAULT_PHASE_S: Final = {"schedule": 1.0, "launch": 1.0, "import": 33.0, "init": 25.0, "api": 3.0, "warmup": 5.0}
_RESTART_GAP_S: Final = 1.0  # prior of the restart phase; the kubelet starts the container at once the first time
_PULL_BANDWIDTH_SHARE: Final = 0.3  # effective share of a pull's bandwidth, because layers are unpacked; an estimate


class PhaseEstimate(NamedTuple):
    """Log seconds of one phase: the prior's median (s), then discounted count, mean, and sum of squares about it."""

    prior_s: Annotated[float, Number(_MIN_PHASE_S, _MAX_PHASE_S, digits=6)]
    startups: Annotated[float, Number(0.0, _MEMORY_STARTUPS, digits=6)] = 0.0
    mean: Annotated[float, Number(-20.0, 20.0, digits=6)] = 0.0
    squared_deviations: Annotated[float, Number(0.0, digits=6)] = 0.0

    def validate(self) -> None:
        """Raise ValueError for a spread that no starts have."""
        if self.squared_deviations > self.startups * _MAX_LOG_VARIANCE:
            raise ValueError(f"invalid start-up statistics: {self}")

    @property
    def distribution(self) -> NormalDist:
        """Distribution of the log seconds of the next start: normal, with the uncertainty of its median in its spread.

        The median's posterior is that of a normal mean with a normal prior, given the starts' spread (Gelman et al.,
        Bayesian Data Analysis, 2.5), and the spread is an average with a prior weight (3.3).
        """
        spread = (_SPREAD_PRIOR_WEIGHT * _STARTUP_SD**2 + self.squared_deviations) / (
            _SPREAD_PRIOR_WEIGHT + self.startups
        )
        precision = 1.0 / _PRIOR_SD**2 + self.startups / spread
        mean = (math.log(self.prior_s) / _PRIOR_SD**2 + self.mean * self.startups / spread) / precision
        return NormalDist(mean, math.sqrt(spread + 1.0 / precision))

    @property
    def outlier_bounds(self) -> tuple[float, float]:
        """Log seconds below and above which a start is an outlier."""
        distribution = self.distribution
        limit = max(_OUTLIER_SDS * distribution.stdev, _MIN_OUTLIER_LOG)
        return distribution.mean - limit, distribution.mean + limit

    def quantile_s(self, share: float) -> float:
        """Return the quantile of the duration for `share` in (0, 1), s."""
        return math.exp(self.distribution.inv_cdf(share))

    def remaining_s(self, elapsed_s: float, share: float) -> float:
        """Return the quantile of the remaining duration after `elapsed_s`, s; at least 0."""
        distribution = self.distribution
        sds = (math.log(max(elapsed_s, 1e-9)) - distribution.mean) / distribution.stdev
        # Computed from the upper tail, which keeps its precision for long elapsed times.
        tail_probability = (1.0 - share) * 0.5 * math.erfc(min(sds, _MAX_TAIL_SDS) / math.sqrt(2.0))
        return max(
            0.0, math.exp(distribution.mean - distribution.stdev * _NORMAL.inv_cdf(tail_probability)) - elapsed_s
        )


class StartupQuantiles(NamedTuple):
    """Seconds."""

    p50_s: float
    p90_s: float
    p99_s: float


_NamedPhase: TypeAlias = Annotated[tuple[str, PhaseEstimate], codec.FLAT]


@codec.stored_as(
    "a start-up model", version=1, optional=("restart_phases", "restart_total", "slow_starts"), slow_starts="slow"
)
class StartupModel(NamedTuple):
    """Start-up model of one variant of a tier: its phases in order, and the total.

    restart_phases, restart_total: the same of measured restarts in the pod; empty and None before the first.
    slow_starts: outliers among the last starts, in a row, that took longer than the model expects.
    """

    phases: Annotated[tuple[_NamedPhase, ...], Length(1, MAX_PHASES)]
    total: PhaseEstimate
    restart_phases: Annotated[tuple[_NamedPhase, ...], Length(0, MAX_PHASES)] = ()
    restart_total: PhaseEstimate | None = None
    slow_starts: codec.Count = 0

    def validate(self) -> None:
        """Raise ValueError if a phase is listed twice, or restarts have phases without a total or the reverse."""
        if any(len(dict(phases)) < len(phases) for phases in (self.phases, self.restart_phases)):
            raise ValueError("a phase is listed twice")
        if bool(self.restart_phases) != (self.restart_total is not None):
            raise ValueError("the phases and the total of restarts belong together")

    @property
    def restart(self) -> StartupModel:
        """Model of a restart in the pod; before the first measured one, a prior from the container's phases."""
        if self.restart_total is not None:
            return StartupModel(self.restart_phases, self.restart_total, self.restart_phases, self.restart_total)
        own = {name: phase.quantile_s(0.5) for name, phase in self.phases if name not in (*POD_PHASES, RESTART_PHASE)}
        prior = from_medians({RESTART_PHASE: _RESTART_GAP_S, **own})
        return StartupModel(prior.phases, prior.total, prior.phases, prior.total)

    @property
    def quantiles(self) -> tuple[tuple[str, StartupQuantiles], ...]:
        """Return the quantiles of each phase, in order, and of "total"."""
        estimates = (*self.phases, ("total", self.total))
        return tuple((name, StartupQuantiles(*map(phase.quantile_s, (0.5, 0.9, 0.99)))) for name, phase in estimates)

    @property
    def horizon_s(self) -> float:
        """90th percentile of the start-up time, s: the forecast horizon."""
        return self.total.quantile_s(0.9)

    @property
    def overdue_s(self) -> float:
        """Start-up limit, s: the larger of the p99 and twice the median. A longer start is overdue."""
        return max(self.total.quantile_s(0.99), 2.0 * self.total.quantile_s(0.5))


@dataclass(frozen=True, slots=True)
class StartingPod:
    """A pod that is not ready yet.

    created_s: time of its creation, or later when it got a node: a long wait for one is no sign that its engine hangs;
    if its engine restarts, when it became unready. phase: current start-up phase, None if unknown; phase_since_s: its
    start. unschedulable_reason: the scheduler's message while the pod fits on no node, else None. restart_since_s: when
    the engine's container ended for a restart in the pod; None for a new pod. silent_node: the pod's node if it no
    longer reports, so that nothing is known of the pod; created_s is then when it became unready.
    """

    pod: str
    created_s: float
    phase: str | None = None
    phase_since_s: float | None = None
    unschedulable_reason: str | None = None
    restart_since_s: float | None = None
    silent_node: str | None = None


@dataclass(frozen=True, slots=True)
class Eta:
    """Time until a starting pod is ready: median, s."""

    likely_s: float


@dataclass(frozen=True, slots=True)
class Overdue:
    """An overdue start: elapsed time and start-up limit, s."""

    elapsed_s: float
    limit_s: float


class Backoff(NamedTuple):
    """Number of unschedulable attempts, and the time until which no further replica is ordered."""

    tries: codec.Count = 0
    until_s: float = 0.0


def startup_prior(
    image_bytes: float,
    download_bytes: float,
    weight_bytes: float,
    network_bytes_per_s: float,
    disk_bytes_per_s: float,
) -> StartupModel:
    """Return a model without measured starts, from bytes over bandwidth and typical engine phases.

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
        "schedule": _DEFAULT_PHASE_S["schedule"],
        "pull": image_bytes / (network_bytes_per_s * _PULL_BANDWIDTH_SHARE),
        "launch": _DEFAULT_PHASE_S["launch"],
        "import": _DEFAULT_PHASE_S["import"],
        "download": download_bytes / network_bytes_per_s,
        "load": weight_bytes / disk_bytes_per_s,
        "init": _DEFAULT_PHASE_S["init"],
        "api": _DEFAULT_PHASE_S["api"],
        "warmup": _DEFAULT_PHASE_S["warmup"],
    }
    return from_medians(medians_s)


def from_medians(medians_s: Mapping[str, float]) -> StartupModel:
    """Return a model without measured starts, from prior medians of the phases in order. Raises ValueError."""
    if not medians_s or not all(0.0 <= median < math.inf for median in medians_s.values()):
        raise ValueError(f"each phase must have a finite duration of at least 0 s, not {medians_s}")
    phases = tuple((name, PhaseEstimate(_clamp(median))) for name, median in medians_s.items())
    return StartupModel(phases[:MAX_PHASES], PhaseEstimate(_clamp(sum(medians_s.values()))))


def record(model: StartupModel, durations_s: Sequence[tuple[str, float]]) -> StartupModel:
    """Return the model after a new pod became ready. durations_s: its phases in order, s; their sum is the total.

    A new phase starts at its measured duration. A phase of the prior that the start did not have is dropped. Durations
    of a phase that is listed twice are added. If the start shows that starts have changed, the earlier ones become a
    prior. Raises ValueError for a start without phases, or a duration that is negative or not finite.
    """
    _check_durations(durations_s)
    slow_starts, is_change = _compare(model, sum(seconds for _, seconds in durations_s))
    phases, total = priors(model.phases, model.total) if is_change else (model.phases, model.total)
    phases, total = _update_phases(phases, total, durations_s)
    return model._replace(phases=phases, total=total, slow_starts=slow_starts)


def _compare(model: StartupModel, total_s: float) -> tuple[int, bool]:
    """Return the number of slow outliers in a row after a start, and whether starts have changed.

    No pod starts quickly by mistake, so one fast outlier shows a change. A single slow one may have been stuck.
    """
    fastest, slowest = model.total.outlier_bounds
    log_s = math.log(_clamp(total_s))
    slow_starts = model.slow_starts + 1 if log_s > slowest else 0
    if model.total.startups < _ESTABLISHED_STARTUPS or (log_s >= fastest and slow_starts < 2):
        return slow_starts, False
    return 0, True


def priors(phases: tuple[_NamedPhase, ...], total: PhaseEstimate) -> tuple[tuple[_NamedPhase, ...], PhaseEstimate]:
    """Return estimates without starts, with the medians of these as priors."""
    medians = tuple((name, PhaseEstimate(phase.quantile_s(0.5))) for name, phase in phases)
    return medians, PhaseEstimate(total.quantile_s(0.5))


def record_restart(model: StartupModel, durations_s: Sequence[tuple[str, float]]) -> StartupModel:
    """Return the model after an engine that restarted in its pod became ready. As `record`; starts are unchanged."""
    _check_durations(durations_s)
    restart = model.restart
    phases, total = _update_phases(restart.phases, restart.total, durations_s)
    return model._replace(restart_phases=phases, restart_total=total)


def _check_durations(durations_s: Sequence[tuple[str, float]]) -> None:
    if not durations_s or not all(0.0 <= seconds < math.inf for _, seconds in durations_s):
        raise ValueError(f"a start must be a list of phases with finite durations of at least 0 s, not {durations_s}")


def _update_phases(
    phases: tuple[_NamedPhase, ...], total: PhaseEstimate, durations_s: Sequence[tuple[str, float]]
) -> tuple[tuple[tuple[str, PhaseEstimate], ...], PhaseEstimate]:
    phase_s: dict[str, float] = {}
    for name, seconds in durations_s:
        phase_s[name] = phase_s.get(name, 0.0) + seconds
    known = {name: phase for name, phase in phases if phase.startups or name in phase_s}
    for name, seconds in phase_s.items():
        if name in known or len(known) < MAX_PHASES:
            known[name] = _update_phase(known.get(name) or PhaseEstimate(_clamp(seconds)), seconds)
    return _order_phases(known, list(phase_s)), _update_phase(total, sum(phase_s.values()))


def _order_phases(known: Mapping[str, PhaseEstimate], observed: Sequence[str]) -> tuple[tuple[str, PhaseEstimate], ...]:
    """Return the observed order of phases; a phase not observed keeps its predecessor."""
    names = [name for name in observed if name in known]
    before: str | None = None
    for name in known:
        if name not in names:
            names.insert(names.index(before) + 1 if before is not None else 0, name)
        before = name
    return tuple((name, known[name]) for name in names)


def _clamp(seconds: float) -> float:
    return min(max(seconds, _MIN_PHASE_S), _MAX_PHASE_S)


def _update_phase(phase: PhaseEstimate, seconds: float) -> PhaseEstimate:
    fastest, slowest = phase.outlier_bounds
    value = min(max(math.log(_clamp(seconds)), fastest), slowest)
    keep = 1.0 - 1.0 / _MEMORY_STARTUPS
    startups = keep * phase.startups + 1.0
    deviation = value - phase.mean if phase.startups else 0.0
    mean = phase.mean + deviation / startups if phase.startups else value
    squared_deviations = keep * phase.squared_deviations + deviation * (value - mean)
    return PhaseEstimate(phase.prior_s, startups, mean, squared_deviations)


def eta(model: StartupModel, pod: StartingPod, now_s: float) -> Eta | Overdue:
    """Return when a starting pod will be ready; Overdue if it has taken too long to predict it.

    With a known phase: the remaining time of that phase, given how long it has run, and the phases after it; medians
    add. Otherwise: the remaining time of the whole start. An unschedulable pod has the whole start before it. A restart
    has the phases of restarts. It is overdue when a new pod would be, because a replacement takes that long. A pod on a
    silent node is overdue at once.
    """
    if pod.unschedulable_reason is not None:
        return Eta(model.total.quantile_s(0.5))
    elapsed_s = max(0.0, now_s - pod.created_s)
    limit_s = model.overdue_s if pod.silent_node is None else 0.0
    if pod.silent_node is not None or elapsed_s > limit_s:
        return Overdue(elapsed_s, limit_s)
    if pod.restart_since_s is not None:
        model, elapsed_s = model.restart, max(0.0, now_s - pod.restart_since_s)
    names = [name for name, _ in model.phases]
    if pod.phase not in names:
        return Eta(model.total.remaining_s(elapsed_s, 0.5))
    phase_index = names.index(pod.phase)
    phase_start_s = pod.created_s if pod.phase_since_s is None else pod.phase_since_s
    in_phase_s = max(0.0, now_s - phase_start_s)
    (_, current_phase), *later_phases = model.phases[phase_index:]
    return Eta(current_phase.remaining_s(in_phase_s, 0.5) + sum(phase.quantile_s(0.5) for _, phase in later_phases))


_MIN_BACKOFF_S: Final = 30.0
_MAX_BACKOFF_S: Final = 1800.0


def extend_backoff(backoff: Backoff, now_s: float) -> Backoff:
    """Return the back-off while a pod is unschedulable; an expired wait doubles."""
    if backoff.tries and now_s < backoff.until_s <= now_s + _MAX_BACKOFF_S:
        return backoff
    tries = min(backoff.tries + 1, 16)  # the wait does not grow further
    return Backoff(tries, now_s + min(_MIN_BACKOFF_S * 2.0 ** (tries - 1), _MAX_BACKOFF_S))
