"""The targets that the tiers of a service with request classes are sized for.

Problem: each class may have latency targets of its own. A fleet that is sized for those of the service is too small for
a stricter class, whose requests are then rejected, and too large if all requests are of a looser one.

Idea: all streams of a replica share its steps, so admission keeps a step within the tightest budget of the classes that
run there (`admission.replica`), and a request of any class may find any other ahead of it. So a rate is within the
targets of each class if it is within the tightest of them, and the tiers are sized for

    T = min T_k over all classes k but the smallest, which together have at most the share 1 - p of the arrivals

for each target T (TTFT, TPOT, e2e), with p the SLO's share of requests. The smallest classes are within the error
budget: the SLO holds although all their requests miss. T goes through the same sizing as `spec.slo`, and is `spec.slo`
where no class has targets of its own, or none has had arrivals. The target of the inter-token latency is that of the
service.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Final

from plimsoll.core.autoscaling.inputs import ScalingSpec
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.slo import Slo, tightest
from plimsoll.core.types import Role

CLASS_MEMORY_S: Final = 600.0  # for which a class counts after it last exceeded the error budget of a minute


@dataclass(slots=True)
class ClassTargets:
    """Classes of one service that count for its size.

    noticed_s: by class, the last time at which it was not within the error budget of a minute's arrivals, seconds since
    the epoch. by_target: the class whose own target the last spec was sized for, by the target's name in `Slo.targets`.
    """

    noticed_s: Mapping[str, float] = field(default_factory=dict)
    by_target: Mapping[str, str] = field(default_factory=dict)

    def apply(self, spec: ScalingSpec, metrics: ServiceMetrics, now_s: float) -> ScalingSpec:
        """Return the spec with the SLO to size for: the same spec without targets of classes, or without arrivals."""
        if spec.slo is None or all(one.slo == replace(spec.slo, itl_s=None) for one in spec.classes):
            self.noticed_s, self.by_target = {}, {}
            return spec
        self._notice(spec, metrics, now_s)
        counted = {one.name: one.slo for one in spec.classes if one.name in self.noticed_s}
        slo = _sized_slo(spec.slo, tuple(counted.values()), has_prefill=Role.PREFILL in spec.policy.tiers)
        own, sized = dict(spec.slo.targets), dict(slo.targets)
        self.by_target = {
            name: next(class_name for class_name, of_class in counted.items() if dict(of_class.targets)[name] == value)
            for name, value in sized.items()
            if value is not None and value != own[name]
        }
        return spec if slo == spec.slo else replace(spec, slo=slo, policy=replace(spec.policy, slo=slo))

    def _notice(self, spec: ScalingSpec, metrics: ServiceMetrics, now_s: float) -> None:
        """Update which classes count. Without arrivals those of before do, as after a restart of the operator."""
        assert spec.slo is not None
        known = {one.name for one in spec.classes}
        counts = {name: count for name, count in metrics.arrivals_by_class.items() if name in known}
        noticed_s = {name: at_s for name, at_s in self.noticed_s.items() if name in known}
        if total := sum(counts.values()):
            noticed_s = {name: at_s for name, at_s in noticed_s.items() if 0.0 <= now_s - at_s <= CLASS_MEMORY_S}
            budget, ascending = (1.0 - spec.slo.share) * total, sorted(counts, key=counts.__getitem__)
            sums = accumulate(counts[name] for name in ascending)
            noticed_s |= {name: now_s for name, up_to in zip(ascending, sums, strict=True) if up_to > budget}
        self.noticed_s = noticed_s


def _sized_slo(slo: Slo, of_classes: tuple[Slo, ...], *, has_prefill: bool) -> Slo:
    """Return the tightest targets of the classes; that of the service without a class.

    A prefill tier needs a TTFT target, so that of the service stays where no class has one.
    """
    if not of_classes:
        return slo
    sized = replace(tightest(of_classes), itl_s=slo.itl_s)
    if has_prefill and sized.ttft_s is None:
        return replace(sized, ttft_s=slo.ttft_s, ttft_per_1k_tokens_s=slo.ttft_per_1k_tokens_s)
    return sized
