"""What the fleet's run must have reached; the demo ends non-zero where one of these does not hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from e2e.demo import figures as f
from e2e.demo.reactive_baseline import Pair
from e2e.demo.records import ReplicaSample, RequestLine

MIN_ADMITTED_ATTAINMENT: Final = 0.97
MAX_ATTAINMENT_GAP: Final = 0.02  # the best follower, at most
SHED_WINDOW_S: Final = 60.0
MIN_SHED_REQUESTS: Final = 20  # requests; fewer make no share
SHED_SLACK_S: Final = 5.0  # an engine that has become ready is filled within it
INDEPENDENT_CHANGE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Facts:
    """What the lines do not say of a run: the promise, each tier's most replicas, and what was done when."""

    targets: f.Targets
    most: dict[str, int]
    end_s: float
    constant: f.TimeSpan
    kills: tuple[f.TimeSpan, ...]


@dataclass(frozen=True, slots=True)
class Criterion:
    """One thing that must hold; `found` says what was seen."""

    name: str
    holds: bool
    found: str


def assess(
    requests: Sequence[RequestLine], replicas: Sequence[ReplicaSample], facts: Facts, best: Pair | None
) -> list[Criterion]:
    """All criteria, in the order in which they are shown. `best`: the best follower at no more replica-seconds."""
    attainment = f.attainment(requests, facts.targets)
    changes = f.replica_changes(replicas)
    return [
        _admitted(attainment),
        _offered(attainment, best),
        _shedding(requests, replicas, facts),
        _no_reversals(changes, facts),
        _independent(changes, f.tier_names(replicas)),
        _no_broken_streams(requests, facts),
    ]


def _admitted(counts: f.Attainment) -> Criterion:
    found = f"{counts.of_admitted:.2%} of {counts.admitted} admitted requests met both targets"
    return Criterion(
        f"at least {MIN_ADMITTED_ATTAINMENT:.0%} of admitted requests meet both targets",
        counts.of_admitted >= MIN_ADMITTED_ATTAINMENT,
        found,
    )


def _offered(counts: f.Attainment, best: Pair | None) -> Criterion:
    name = f"offered: at most {100 * MAX_ATTAINMENT_GAP:.0f} points behind the best follower at no more replica-seconds"
    own_attainment = f"{counts.of_offered:.2%} of {counts.offered} offered requests met both targets"
    if best is None:
        return Criterion(name, True, f"{own_attainment}; no follower is as cheap")
    found = f"{own_attainment}; the best follower {best.attainment:.2%} at {best.paid_s:.0f} replica-seconds"
    return Criterion(name, counts.of_offered >= best.attainment - MAX_ATTAINMENT_GAP, found)


def _shedding(requests: Sequence[RequestLine], replicas: Sequence[ReplicaSample], facts: Facts) -> Criterion:
    max_share = 1 - facts.targets.percentile / 100
    excuses = f.excused_spans(replicas, facts.most, SHED_SLACK_S)
    worst, at_s = f.worst_shed_share(requests, excuses, SHED_WINDOW_S, MIN_SHED_REQUESTS)
    shed = sum(row.shed for row in requests)
    found = f"{shed} shed; without that excuse at most {worst:.1%} of any {SHED_WINDOW_S:.0f} s (at {at_s:.0f} s)"
    name = f"sheds only while capacity starts or is at its maximum, else at most {max_share:.0%} of any window"
    return Criterion(name, worst <= max_share + 1e-9, found)


def _no_reversals(changes: Sequence[f.ReplicaChange], facts: Facts) -> Criterion:
    reversed_changes = f.reversals(changes, facts.constant)
    found = "; ".join(f"{c.tier} {c.before} -> {c.after} at {c.t_s:.0f} s" for c in reversed_changes) or "none"
    return Criterion(
        f"no reversal under constant load ({facts.constant.begin_s:.0f} to {facts.constant.end_s:.0f} s)",
        not reversed_changes,
        found,
    )


def _independent(changes: Sequence[f.ReplicaChange], tiers: Sequence[str]) -> Criterion:
    changed_tiers = {tier: sum(single_tier.tier == tier for single_tier in changes) for tier in tiers}
    alone = {tier: len(f.isolated_changes(changes, tier, INDEPENDENT_CHANGE_S)) for tier in tiers}
    found = ", ".join(f"{tier} {changed_tiers[tier]} times, {alone[tier]} of them alone" for tier in tiers)
    holds = len(tiers) > 1 and all(changed_tiers.values()) and any(alone.values())
    return Criterion("prefill and decode both move, and independently at least once", holds, f"moved: {found}")


def _no_broken_streams(requests: Sequence[RequestLine], facts: Facts) -> Criterion:
    broken = sum(row.broken for row in requests)
    caused_by_scaling = f.broken_by_scaling(requests, facts.kills)
    outcomes = ", ".join(sorted({row.outcome for row in caused_by_scaling}))
    found = (
        f"{len(caused_by_scaling)} broken {f'({outcomes}) ' if outcomes else ''}"
        f"beside {broken - len(caused_by_scaling)} of the killed engine"
    )
    return Criterion("no stream broken by scaling down", not caused_by_scaling, found)
