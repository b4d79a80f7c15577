"""What was heard of a service, in the terms of a scaling decision. What is not known says so: it is never 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from plimsoll.core.calibration.window import WindowSums
from plimsoll.core.forecast import Unknown
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import Buckets, Judged
from plimsoll.core.scaling.observation import Measured
from plimsoll.core.transfer import Moved
from plimsoll.core.workload import Workload

NOTHING_HEARD: Final = Unknown("nothing heard yet")
NOTHING_MOVED: Final = Moved(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class TierHeard:
    """One tier's engines. All but `windows` is over the last minute or now.

    measured: promised percentiles of ended requests; `waiting` and `preemptions_per_s` are sums over the tier, scaled
    up to all its pods; `kv_used` is the fullest pod's. coverage: share of the tier's pods with a fresh reading; 1 for a
    tier without pods, of which nothing else is known. age_s: of the oldest reading among those. windows: new since the
    last call. running: requests in the engines that answer, waiting ones included. step_rate_per_s: steps of one pod,
    mean over the time in which it was never idle. post_share: share of a pod's time spent in posting KV reads. paces:
    times per output token of requests with a second token that ended, None where engines do not tell; ended: requests.
    """

    measured: Measured = field(default_factory=Measured)
    coverage: float = 0.0
    age_s: float | None = None
    windows: tuple[WindowSums, ...] = ()
    running: float | Unknown = NOTHING_HEARD
    step_rate_per_s: float | Unknown = NOTHING_HEARD
    post_share: float | Unknown = NOTHING_HEARD
    paces: Buckets | None = None
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Heard:
    """One service. Rates are means over the time since the last one, and sums over all gateways, silent ones included.

    rate_per_s: first attempts. fresh: whether there is a new rate since the last call; an old one is no new sample.
    coverage: share of the gateways whose word is fresh; 0 without any; age_s: of the oldest among these.
    prompt_tokens: mean of an arrival, last minute. workload: requests of the last minutes, their prompts scaled to
    `prompt_tokens` where that differs by more than a tenth. ttft_s: promised percentile as clients saw it, last
    minute; ttft: the distribution that it comes from. e2e_s: the same percentile of whole answers. judged: the last
    minute's answers against the promise; None where gateways do not tell; paced: how many of those were promised which
    time per output token (s), the rest none. arrived: first attempts, last minute;
    shed_share: refused over these. held: requests that wait at the gateways now, and held_work_s their GPU-seconds
    in the tier that answers. returning_s: GPU-seconds there of those that were refused and told when to come back,
    until they are due; retries are no arrivals, so they are in no rate. in_flight: requests that gateways have sent
    to engines and that have not ended. moved: what decode engines received of prefill engines, about the last ten
    minutes. gateways: those that exist.
    """

    rate_per_s: float | Unknown = NOTHING_HEARD
    fresh: bool = False
    coverage: float = 0.0
    age_s: float | None = None
    answered_per_s: float | Unknown = NOTHING_HEARD
    failed_per_s: float | Unknown = NOTHING_HEARD
    prompt_tokens: float | Unknown = NOTHING_HEARD
    workload: Workload | Unknown = NOTHING_HEARD
    ttft_s: float | Unknown = NOTHING_HEARD
    ttft: Buckets | None = None
    e2e_s: float | Unknown = NOTHING_HEARD
    judged: Judged | None = None
    paced: Mapping[float, float] | None = None
    arrived: float = 0.0
    shed_share: float | Unknown = NOTHING_HEARD
    held: float | Unknown = NOTHING_HEARD
    held_work_s: float | Unknown = NOTHING_HEARD
    returning_s: float | Unknown = NOTHING_HEARD
    in_flight: float | Unknown = NOTHING_HEARD
    moved: Moved = NOTHING_MOVED
    gateways: int = 1
    tiers: Mapping[Role, TierHeard] = field(default_factory=dict)
