"""Updates the TTFT offset of a service (`ttft_offset`) from the late first tokens of each settled minute.

A minute is settled if no replica that the load needs was missing, and the number of ready replicas and the targets were
the same. Responses that are many more than the arrivals are of an earlier load, and do not count. A standby replica
that starts serves nothing, so it unsettles no minute. Without a gateway nothing is rejected while replicas are missing,
so the next minute begins when the queue at the engines is served, and one whose load jumped does not count.

Only one tier, which prefills and decodes, has an offset: with two tiers, late first tokens do not show which of them
is slow. Classes with TTFT targets of their own rule it out too, because gateways count late requests by class and the
model predicts them for one target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.observations import LATENCY_WINDOW_S, SizingResult
from plimsoll.core.autoscaling.sizing_requests import waiting_at_engines
from plimsoll.core.autoscaling.snapshot_signals import is_fully_ready, late_first_tokens
from plimsoll.core.autoscaling.tier_state import TierState
from plimsoll.core.autoscaling.ttft_offset import TtftOffset, no_offset, update_offset
from plimsoll.core.capacity.tier_model import build_profile
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.workload import Workload

MIN_RESPONSES: Final = 20.0  # of a minute that is used
MIN_ARRIVAL_SHARE: Final = 0.5  # of its responses
MAX_RISE: Final = 2.0  # of the rate at the end of a minute over its mean, without a gateway
_Targets = tuple[float | None, float]  # TTFT in s, and s for each 1,000 tokens of the prompt


@dataclass(slots=True)
class TtftFeedback:
    """The offset of one service; None without a TTFT target, with several of them, and with two tiers.

    carried_per_s: load per replica, requests/s, below which not too many first tokens were late; infinite if none were.
    """

    offset: TtftOffset | None = None
    carried_per_s: float = math.inf
    # and the number of replicas and the targets
    _settled_since: tuple[float, int, _Targets] | None = field(default=None, repr=False)
    _drains: bool = field(default=False, repr=False)  # a queue from before is not served yet

    @property
    def offset_s(self) -> float:
        """TTFT beyond the model, s."""
        return 0.0 if self.offset is None else self.offset.seconds

    def update(
        self,
        snapshot: ServiceSnapshot,
        spec: ScalingSpec,
        tiers: Mapping[str, TierState],
        workload: Workload | Unavailable,
        sizings: Mapping[str, SizingResult | Unavailable],
        now_s: float,
    ) -> None:
        """Process one tick. sizings: of the last one. now_s: seconds since the epoch."""
        slo, tier, tier_snapshot = spec.slo, tiers.get(Role.SERVE), snapshot.tiers.get(Role.SERVE)
        targets = {(one.ttft_s, one.ttft_per_1k_tokens_s) for one in (slo, *spec.slos) if one is not None}
        if slo is None or slo.ttft_s is None or tier is None or len(targets) > 1:
            self.offset, self._settled_since, self.carried_per_s = None, None, math.inf
            return
        if self.offset is None or self.offset.target_s != slo.ttft_s:
            self.offset = no_offset(slo.ttft_s)
        self.carried_per_s = self.offset.carried_per_s(slo.share)
        if tier_snapshot is None:
            self._settled_since = None
            return
        ready, target = tier_snapshot.ready, (slo.ttft_s, slo.ttft_per_1k_tokens_s)
        since_s = self._settled_since_s(snapshot, ready, target, sizings.get(Role.SERVE), now_s)
        if 0.0 <= now_s - since_s < LATENCY_WINDOW_S:
            return
        self._settled_since = now_s, ready, target
        metrics = snapshot.metrics
        counts, rate_per_s = late_first_tokens(metrics, slo), metrics.arrivals / LATENCY_WINDOW_S
        if metrics.slo_counts is None and slo.ttft_per_1k_tokens_s:
            return  # how many are late by the target of their own prompt is not known
        tier_spec = tier.capacity_state.tier_spec
        if counts is None or counts[1] < MIN_RESPONSES or tier_spec is None or isinstance(workload, Unavailable):
            return
        if metrics.arrivals < MIN_ARRIVAL_SHARE * counts[1] or _jumped(metrics, rate_per_s):
            return
        if not self.offset.is_significant and counts[0] < 0.5 * (1.0 - slo.share) * counts[1]:
            return  # nothing to correct: a profile takes milliseconds
        profile = build_profile(replace(tier_spec, workload=workload, ttft_outside_s=0.0))
        self.offset = update_offset(self.offset, profile, ready, rate_per_s / ready, *counts)

    def _settled_since_s(
        self,
        snapshot: ServiceSnapshot,
        ready: int,
        target: _Targets,
        sizing: SizingResult | Unavailable | None,
        now_s: float,
    ) -> float:
        """When what is counted now began, s; now while it cannot be settled."""
        since = self._settled_since
        if since is None or since[1:] != (ready, target) or not _carries_need(snapshot.tiers[Role.SERVE], sizing):
            since = self._settled_since = now_s, ready, target
            self._drains = snapshot.metrics.is_measured_at_engines
        self._drains = self._drains and waiting_at_engines(snapshot.metrics, Role.SERVE) > ready
        if self._drains:
            since = self._settled_since = now_s, ready, target
        return since[0]

    def mark(self, sizing: SizingResult | Unavailable) -> SizingResult | Unavailable:
        """Return the sizing with the offset that it includes, if that changes anything."""
        if isinstance(sizing, Unavailable) or self.offset is None or not self.offset.is_significant:
            return sizing
        return replace(sizing, ttft_offset_s=self.offset.seconds)


def _jumped(metrics: ServiceMetrics, minute_per_s: float) -> bool:
    """Whether the last requests wait in engines without a gateway, and are of a load that the sizing has not seen.

    minute_per_s: mean rate of the minute, requests/s.
    """
    last_per_s = metrics.rate_per_s
    return (
        metrics.is_measured_at_engines
        and not isinstance(last_per_s, Unavailable)
        and last_per_s > MAX_RISE * minute_per_s
    )


def _carries_need(tier_snapshot: TierSnapshot, sizing: SizingResult | Unavailable | None) -> bool:
    """Whether the ready replicas are all that are ordered, or all that the load needs, if that is known already."""
    needed = sizing.replicas if isinstance(sizing, SizingResult) else 1
    return is_fully_ready(tier_snapshot) or 0 < needed <= tier_snapshot.ready <= tier_snapshot.replicas
