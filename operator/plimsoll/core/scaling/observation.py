"""What is known of a service at the time of a decision. What is not known says so: it is never 0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from plimsoll.core.forecast import Forecast, Odds, Pause, Unknown
from plimsoll.core.knee import Constraint
from plimsoll.core.lifecycle import Ledger, Starting
from plimsoll.core.scaling.state import State
from plimsoll.core.sizing import Infeasible

NOT_MEASURED: Final = Unknown("not measured")
NOT_HEARD: Final = Unknown("whether requests come is not known")
MEASURED_S: Final = 60.0  # what is measured of requests is of those that were answered in so long


@dataclass(frozen=True, slots=True)
class Demand:
    """What is coming within the start-up time, and how often load leaps by how much within it."""

    forecast: Forecast
    odds: Odds


@dataclass(frozen=True, slots=True)
class Need:
    """What the load model makes of a demand; `sized.needs` makes it for many tiers at once.

    replicas: fewest that carry the forecast with `headroom`. release: where more are ordered, fewest that carry it with
    the margin beyond which a step down is not taken back by chance. rate_per_s: the forecast in requests of the mix.
    request_gpu_s: work of one. replica_work: what one replica carries within the promise, GPU-seconds per second.
    constraint: what binds. attained, tpot_s: share in promise and promised percentile of TPOT at the forecast on the
    replicas ordered now; None without a TPOT target, infinite where they cannot keep up. one_fewer: share in promise on
    one replica fewer than needed. law_tpot_s: what the percentile of TPOT should be by now, on the ready replicas at
    the present level; None where that is not told. infeasible: the promise cannot be kept by any number of replicas,
    and the rest is sized for the feasible one that it names. short: what refusals have shown the model to be short by,
    a factor that is in `replicas` already.
    """

    replicas: int
    release: int
    rate_per_s: float
    request_gpu_s: float
    replica_work: float
    constraint: Constraint
    attained: float
    one_fewer: float
    tpot_s: float | None = None
    law_tpot_s: float | None = None
    headroom: float = 0.0
    infeasible: Infeasible | None = None
    short: float = 1.0

    @property
    def filled(self) -> int:
        """Replicas of those needed that the forecast fills by more than half."""
        line = self.replica_work * (1.0 - self.headroom) / self.short
        return filled(self.rate_per_s * self.request_gpu_s, line, self.replicas)

    def used(self, work: float, replicas: int) -> float:
        """Share of so many replicas' load line that this work (GPU-seconds per second) takes; any work is too much
        where they carry none."""
        line = replicas * self.replica_work
        if line > 0.0:
            return work / line
        return math.inf if work > 0.0 else 0.0


def filled(work: float, line: float, most: int) -> int:
    """Replicas that carry `line` each and that so much work (GPU-seconds per second) fills by more than half, at most
    `most`."""
    return min(most, math.floor(work / line + 0.5)) if work < line * most else most


@dataclass(frozen=True, slots=True)
class Measured:
    """Lagging signals of one tier: promised percentiles (s), requests waiting, share of KV used, preemptions per s.
    itl_s: the 99th percentile of the gaps between tokens.

    They steer the tail of the law, and, where demand is not known, they alone say that a tier needs more.
    """

    tpot_s: float | Unknown = NOT_MEASURED
    ttft_s: float | Unknown = NOT_MEASURED
    waiting: float | Unknown = NOT_MEASURED
    kv_used: float | Unknown = NOT_MEASURED
    preemptions_per_s: float | Unknown = NOT_MEASURED
    e2e_s: float | Unknown = NOT_MEASURED
    itl_s: float | Unknown = NOT_MEASURED


@dataclass(frozen=True)
class TierObservation:
    """One tier. Raises ValueError for a fleet that cannot be.

    replicas: ordered now. ready: of those, able to serve. starting: of those, not yet. backlog_gpu_s: work that waits
    for the tier at the gateways. coverage: share of what was asked that answered, above 0 to 1; sums are scaled to
    the whole by `summed`, and below 1 nothing goes down.
    """

    replicas: int
    ready: int
    ledger: Ledger
    demand: Demand | Unknown
    need: Need | Unknown
    starting: tuple[Starting, ...] = ()
    backlog_gpu_s: float | Unknown = 0.0
    coverage: float = 1.0
    measured: Measured = Measured()

    def __post_init__(self) -> None:
        if self.replicas < 0 or self.ready < 0:
            raise ValueError(f"counts are 0 or more, not {self.replicas} ordered and {self.ready} ready")
        if not 0.0 < self.coverage <= 1.0:
            raise ValueError(f"coverage is a share above 0, up to 1, not {self.coverage}; without any, all is Unknown")

    @property
    def horizon_s(self) -> float:
        """How long a replica ordered now takes to serve, as far as is known."""
        return self.demand.forecast.horizon_s if isinstance(self.demand, Demand) else self.ledger.horizon_s


@dataclass(frozen=True)
class Observation:
    """One service. tiers: those of which anything is observed. state: what the last decision left. pause: of its
    requests, as all gateways and engines tell.

    gpus_granted: of the GPU budget to this service, None without a budget.
    """

    tiers: Mapping[str, TierObservation] = field(default_factory=dict)
    state: State = field(default_factory=State)
    gpus_granted: int | None = None
    pause: Pause | Unknown = NOT_HEARD


def summed(parts: Sequence[float | Unknown]) -> tuple[float | Unknown, float]:
    """The sum over all that were asked, scaled up from those that answered, and the share that did.

    NaN, infinite and negative parts are no answers. Unknown and 0.0 where there is none.
    """
    known = [part for part in parts if not isinstance(part, Unknown) and 0.0 <= part < math.inf]
    if not known:
        return Unknown("nobody answered"), 0.0
    coverage = len(known) / len(parts)
    return math.fsum(known) / coverage, coverage
