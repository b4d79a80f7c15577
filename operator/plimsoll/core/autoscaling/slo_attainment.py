"""SLO attainment: the share of responses that met each target, and all of them together.

Problem: a request must meet all its targets, but no component measures all of them for one request. The gateway times
the first and the last byte of each response. The engines measure TPOT in a histogram over all requests.

Idea: a bound that holds for any overlap of the misses. The gateway counts late requests; the engines give the share of
slow ones in the same minute. At most the sum of both misses (Bonferroni), so at least the rest meets all targets. The
shares of single targets are reported as well. A target that is not measured has no attainment.

Where requests do not pass a gateway, the engines' histogram of TTFT takes its place; e2e then stays unknown.

Classes may have different TPOT targets, but engines do not know classes. Gateways count the responses per TPOT target,
engines those slower than each target. Which of them were slow is unknown, so the share is a bound, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from plimsoll.core.demand.histogram_percentile import share_within
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.histogram import total_count
from plimsoll.core.ports import BucketCounts
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.units import format_seconds

_NO_RESPONSES: Final = Unavailable("no response of the last minute counts for the target")
_NO_GATEWAY_METRICS: Final = Unavailable("no gateway reports it")
_NO_ENGINE_METRICS: Final = Unavailable("no engine reports it")
_NOT_AT_ENGINES: Final = Unavailable("it cannot be measured at engines")
_DEPENDS_ON_PROMPT: Final = Unavailable("its target depends on each prompt, and engines do not count that")


@dataclass(frozen=True, slots=True)
class SloAttainment:
    """Attainment of the last minute's responses, as shares.

    by_target: share that met each target of a request, by its name in `Slo.targets`; a lower bound for several TPOT
    targets. lower_bound, upper_bound: bounds of the share that met all targets; upper_bound is None if nothing is
    measured. including_rejected: lower bound over all arrivals. missed_upper_bound: upper bound of the share of
    arrivals that were rejected or missed a target; None if nothing is measured.
    """

    by_target: Mapping[str, float | Unavailable]
    lower_bound: float | Unavailable
    upper_bound: float | None
    including_rejected: float | Unavailable
    missed_upper_bound: float | None

    @property
    def unmeasured_target(self) -> tuple[str, Unavailable] | None:
        """A target that is not measured, and the reason; None if all are measured."""
        return next(((name, share) for name, share in self.by_target.items() if isinstance(share, Unavailable)), None)


def slo_attainment(metrics: ServiceMetrics, *slos: Slo) -> SloAttainment:
    """Return the attainment. slos: one per request class, or that of the service."""
    (late_share, *late_by_target), (min_slow, max_slow) = (
        _late_shares(metrics, slos),
        _slow_share_bounds(metrics, slos),
    )
    missed_by_target = {
        "TTFT": late_by_target[0],
        "TPOT": max_slow,
        "e2e": late_by_target[1],
    }  # itl is not a target of single requests
    target_names = {name for slo in slos for name, target_s in slo.targets if target_s is not None}
    by_target = {name: _complement(share) for name, share in missed_by_target.items() if name in target_names}
    upper_misses, lower_misses = (
        ([late_share, max_slow], [late_share, min_slow]) if "TPOT" in target_names else ([late_share], [late_share])
    )
    known_upper, known_lower = (
        [share for share in shares if not isinstance(share, Unavailable)] for shares in (upper_misses, lower_misses)
    )
    unavailable = next((share for share in by_target.values() if isinstance(share, Unavailable)), None)
    lower_bound = unavailable or max(0.0, 1.0 - math.fsum(known_upper))
    rejected = metrics.rejected_share
    return SloAttainment(
        by_target,
        lower_bound,
        1.0 - max(known_lower) if known_lower else None,
        lower_bound
        if isinstance(lower_bound, Unavailable)
        else lower_bound * (1.0 - (0.0 if isinstance(rejected, Unavailable) else rejected)),
        _missed_of_arrivals(rejected, min(1.0, math.fsum(known_upper)) if known_upper else None),
    )


def _complement(share: float | Unavailable) -> float | Unavailable:
    return share if isinstance(share, Unavailable) else 1.0 - share


def _missed_of_arrivals(rejected_share: float | Unavailable, missed_of_responses: float | None) -> float | None:
    """Return the missed share of all arrivals, including rejected ones; without responses, the rejected share."""
    if missed_of_responses is None:
        return None if isinstance(rejected_share, Unavailable) else rejected_share
    rejected = 0.0 if isinstance(rejected_share, Unavailable) else rejected_share
    return rejected + (1.0 - rejected) * missed_of_responses


def _late_shares(
    metrics: ServiceMetrics, slos: Sequence[Slo]
) -> tuple[float | Unavailable, float | Unavailable, float | Unavailable]:
    """Return the shares of responses that missed any gateway target, the TTFT target, and the e2e target."""
    slo_counts = metrics.slo_counts
    if metrics.is_measured_at_engines and metrics.ttft_histogram is not None:
        late_first_token = _late_at_engines(metrics.ttft_histogram, slos)
        has_e2e = any(slo.e2e_s is not None for slo in slos)
        return _NOT_AT_ENGINES if has_e2e else late_first_token, late_first_token, _NOT_AT_ENGINES
    if slo_counts is None:
        unavailable = metrics.ttft_s if isinstance(metrics.ttft_s, Unavailable) else _NO_GATEWAY_METRICS
        return unavailable, unavailable, unavailable
    if slo_counts.responses <= 0.0:
        unavailable = metrics.ttft_s if isinstance(metrics.ttft_s, Unavailable) else _NO_RESPONSES
        return unavailable, unavailable, unavailable
    late_any, late_first_token, late_last_token = (min(1.0, missed / slo_counts.responses) for missed in slo_counts[1:])
    return late_any, late_first_token, late_last_token


def _late_at_engines(histogram: BucketCounts, slos: Sequence[Slo]) -> float | Unavailable:
    """Return the share of responses that missed the TTFT target, by the engines' histogram.

    It is 0 without a target. Classes belong to the gateway, so all SLOs have the same target.
    """
    target_s = next((slo.ttft_s for slo in slos if slo.ttft_s is not None), None)
    if target_s is None:
        return 0.0
    if any(slo.ttft_per_1k_tokens_s for slo in slos):
        return _DEPENDS_ON_PROMPT
    within = share_within(histogram, target_s)
    if within is None:
        return _NO_RESPONSES
    if histogram.counts[-1] > 0.0 and not _is_resolvable(histogram, target_s):
        return _unresolvable("TTFT", histogram)
    return 1.0 - within


def _slow_share_bounds(metrics: ServiceMetrics, slos: Sequence[Slo]) -> tuple[float | Unavailable, float | Unavailable]:
    """Return a lower and an upper bound of the share of responses that missed their TPOT target.

    Responses slower than a target need not miss a looser one of their own. A response that missed a target is also
    slower than every tighter target. Nothing else is known about which responses were slow.
    """
    target_mix = _tpot_target_mix(metrics, slos)
    if isinstance(target_mix, Unavailable):
        return target_mix, target_mix
    min_slow, max_slow, tighter = 0.0, 1.0, 0.0
    for target_s, share in sorted(target_mix.items()):
        slower_share = _share_slower_than(metrics, target_s)
        if isinstance(slower_share, Unavailable):
            return slower_share, slower_share
        max_slow = min(max_slow, tighter + slower_share)
        tighter += share
        min_slow = max(min_slow, slower_share - (1.0 - tighter))
    return min_slow, min(max_slow, tighter)


def _tpot_target_mix(metrics: ServiceMetrics, slos: Sequence[Slo]) -> Mapping[float, float] | Unavailable:
    """Return the share of responses by TPOT target, s."""
    targets = {slo.tpot_s for slo in slos}
    if len(targets) == 1:
        return {target_s: 1.0 for target_s in targets if target_s is not None}
    if metrics.slo_counts is None or metrics.by_tpot_target is None:
        return metrics.ttft_s if isinstance(metrics.ttft_s, Unavailable) else _NO_GATEWAY_METRICS
    if metrics.slo_counts.responses <= 0.0:
        return _NO_RESPONSES
    return {
        target_s: count / metrics.slo_counts.responses
        for target_s, count in metrics.by_tpot_target.items()
        if count > 0.0
    }


def _share_slower_than(metrics: ServiceMetrics, target_s: float) -> float | Unavailable:
    """Return the share of responses with a TPOT above a target; a response of one token has no TPOT."""
    tier_metrics = next(
        (tier_metrics for role, tier_metrics in metrics.tiers.items() if role is not Role.PREFILL), None
    )
    if tier_metrics is None:
        return _NO_ENGINE_METRICS
    tpot_histogram, measured_tpot = tier_metrics.tpot_histogram, tier_metrics.lagging.tpot_s
    if tpot_histogram is None:
        return measured_tpot if isinstance(measured_tpot, Unavailable) else _NO_ENGINE_METRICS
    within, with_tpot = share_within(tpot_histogram, target_s), total_count(tpot_histogram)
    if within is None:
        return 0.0 if tier_metrics.completed > 0.0 else _NO_RESPONSES
    if tpot_histogram.counts[-1] > 0.0 and not _is_resolvable(tpot_histogram, target_s):
        return _unresolvable("TPOT", tpot_histogram)
    return (1.0 - within) * with_tpot / max(with_tpot, tier_metrics.completed)


def _is_resolvable(histogram: BucketCounts, target_s: float) -> bool:
    """Whether every value of the last, unbounded bucket exceeds the target."""
    return len(histogram.edges) > 1 and target_s <= histogram.edges[-2]


def _unresolvable(name: str, histogram: BucketCounts) -> Unavailable:
    last = format_seconds(histogram.edges[-2:][0])
    return Unavailable(f"{name} values and the target exceed the engines' last histogram bucket, {last}")
