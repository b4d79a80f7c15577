"""The recommendations of the leader, for the HTTP API and the KEDA scaler. Pure, except for the clock.

Problem: a reader that applies an old count scales by a load that is gone. One that always asks for all services blocks
the event loop.

Idea: a recommendation is stale when its service was not decided for STALE_SECONDS, which is several times the longest
interval between two decisions. A decision of an earlier process does not count. The list is built once a second at
most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Final

from plimsoll.api.recommendation import Recommendation, RecommendationList, TierLoad, TierRecommendation
from plimsoll.controllers.object_cache import Key
from plimsoll.core import units
from plimsoll.core.autoscaling.cadence import DecisionBasis
from plimsoll.core.autoscaling.observations import SizingResult
from plimsoll.core.autoscaling.scaling_decision import TierDecision
from plimsoll.core.autoscaling.scaling_policy import ScalingMode
from plimsoll.core.autoscaling.service_state import ServiceState, TimedDecision

STALE_SECONDS: Final = 60.0
LIST_SECONDS: Final = 1.0  # the list is built again when it is older
_DIGITS: Final = 6
_NO_DECISION: Final = "the operator has not decided about the service yet"


class Recommendations:
    """Reads the recommendations of all services.

    keys: of all services. state_of: the state of a service, None for an unknown one. clock: seconds since the epoch.
    """

    def __init__(
        self,
        keys: Callable[[], Iterable[Key]],
        state_of: Callable[[Key], ServiceState | None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._keys = keys
        self._state_of = state_of
        self._clock = clock
        self._listed: tuple[float, bytes] = (-math.inf, b"")

    def get(self, key: Key) -> Recommendation | None:
        """The recommendation for a service by namespace and name; None for an unknown service."""
        state = self._state_of(key)
        return None if state is None else build_recommendation(key, state, self._clock())

    def list_json(self) -> bytes:
        """The RecommendationList as JSON, at most LIST_SECONDS old."""
        now_s = self._clock()
        if not 0.0 <= now_s - self._listed[0] < LIST_SECONDS:
            states = [(key, self._state_of(key)) for key in sorted(self._keys())]
            items = [build_recommendation(key, state, now_s) for key, state in states if state is not None]
            document = RecommendationList(at=_rfc3339(now_s), items=items)
            self._listed = now_s, to_json(document)
        return self._listed[1]


def to_json(document: Recommendation | RecommendationList) -> bytes:
    return document.model_dump_json(by_alias=True).encode()


def build_recommendation(key: Key, state: ServiceState, now_s: float) -> Recommendation:
    """The recommendation for one service. now_s: seconds since the epoch."""
    last, basis = state.last_decision, state.basis
    if last is None or basis is None:  # without a basis the decision is one of an earlier process
        return Recommendation(
            namespace=key[0], name=key[1], mode=None, paused=False, decided_at=None, age_seconds=None, stale=True,
            stale_reason=_NO_DECISION, binding_tier=None, tiers={},
        )  # fmt: skip
    age_s = max(0.0, now_s - last.at_s)
    is_stale = age_s > STALE_SECONDS
    stale_reason = f"the last decision is {age_s:.0f} s old, which is more than {STALE_SECONDS:.0f} s"
    return Recommendation(
        namespace=key[0],
        name=key[1],
        mode=basis.spec.policy.mode,
        paused=basis.spec.policy.paused,
        decided_at=_rfc3339(last.at_s),
        age_seconds=round(age_s, 3),
        stale=is_stale,
        stale_reason=stale_reason if is_stale else None,
        binding_tier=last.decision.binding_tier,
        tiers=dict(_tiers(state, last, basis)),
    )


def _tiers(state: ServiceState, last: TimedDecision, basis: DecisionBasis) -> Iterable[tuple[str, TierRecommendation]]:
    policy = basis.spec.policy
    is_sized = policy.slo is not None and policy.mode is not ScalingMode.OFF
    for name, decision in last.decision.tiers.items():
        sizing = state.sizings.get(name)
        minimum, maximum = policy.tiers[name].bounds(last.at_s, state.horizon_s(name, basis.spec))
        _, ready, _ = basis.counts.get(name, (None, None, None))
        yield (
            str(name),
            TierRecommendation(
                current_replicas=decision.previous_replicas,
                ready_replicas=ready,
                recommended_replicas=_recommended(decision) if is_sized else None,
                needed_replicas=sizing.replicas if is_sized and isinstance(sizing, SizingResult) else None,
                min_replicas=minimum,
                max_replicas=maximum,
                limits=list(decision.limits),
                frozen=decision.is_held,
                reasons=list(decision.brief_reasons),
                demand=_demand(state, name, sizing, ready or 0) if isinstance(sizing, SizingResult) else None,
            ),
        )


def _recommended(decision: TierDecision) -> int:
    return decision.replicas if decision.recommended is None else decision.recommended


def _demand(state: ServiceState, name: str, sizing: SizingResult, ready: int) -> TierLoad | None:
    """The demand of a tier; None if it is not a finite number."""
    if sizing.request_gpu_s <= 0.0:
        return None
    level = state.tiers[name].forecast_state.estimate.level
    rates = [level / sizing.request_gpu_s, sizing.rate_per_s, sizing.replica_work / sizing.request_gpu_s]
    if not all(math.isfinite(rate) and rate >= 0.0 for rate in rates):
        return None
    current, forecast, capacity = (units.round_significant(rate, _DIGITS) for rate in rates)
    utilization = sizing.utilization(level, ready)
    return TierLoad(
        requests_per_second=current,
        forecast_requests_per_second=forecast,
        capacity_per_replica=capacity,
        utilization=units.round_significant(utilization, _DIGITS) if ready and math.isfinite(utilization) else None,
    )


def _rfc3339(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
