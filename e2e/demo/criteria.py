"""What the fleet's run must have reached; the demo ends non-zero where one of these does not hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from e2e.demo import figures as f
from e2e.demo.followers import Pair
from e2e.demo.lines import Replicas, Request

ADMITTED: Final = 0.97
BEHIND: Final = 0.02  # the best follower, at most
SHED_WINDOW_S: Final = 60.0
SHED_LEAST: Final = 20  # requests; fewer make no share
SHED_SLACK_S: Final = 5.0  # an engine that has become ready is filled within it
APART_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Facts:
    """What the lines do not say of a run: the promise, each tier's most replicas, and what was done when."""

    targets: f.Targets
    most: dict[str, int]
    end_s: float
    constant: f.Span
    kills: tuple[f.Span, ...]


@dataclass(frozen=True, slots=True)
class Criterion:
    """One thing that must hold; `found` says what was seen."""

    name: str
    holds: bool
    found: str


def judge(
    requests: Sequence[Request], replicas: Sequence[Replicas], facts: Facts, best: Pair | None
) -> list[Criterion]:
    """All criteria, in the order in which they are shown. `best`: the best follower at no more replica-seconds."""
    counted = f.attainment(requests, facts.targets)
    changes = f.changes(replicas)
    return [
        _admitted(counted),
        _offered(counted, best),
        _shedding(requests, replicas, facts),
        _steady(changes, facts),
        _independent(changes, f.tiers(replicas)),
        _unbroken(requests, facts),
    ]


def _admitted(counted: f.Attainment) -> Criterion:
    found = f"{counted.of_admitted:.2%} of {counted.admitted} admitted requests met both targets"
    return Criterion(
        f"at least {ADMITTED:.0%} of admitted requests meet both targets", counted.of_admitted >= ADMITTED, found
    )


def _offered(counted: f.Attainment, best: Pair | None) -> Criterion:
    name = f"offered: at most {100 * BEHIND:.0f} points behind the best follower at no more replica-seconds"
    ours = f"{counted.of_offered:.2%} of {counted.offered} offered requests met both targets"
    if best is None:
        return Criterion(name, True, f"{ours}; no follower is as cheap")
    found = f"{ours}; the best follower {best.attainment:.2%} at {best.paid_s:.0f} replica-seconds"
    return Criterion(name, counted.of_offered >= best.attainment - BEHIND, found)


def _shedding(requests: Sequence[Request], replicas: Sequence[Replicas], facts: Facts) -> Criterion:
    allowed = 1 - facts.targets.percentile / 100
    excuses = f.excused(replicas, facts.most, SHED_SLACK_S)
    worst, when = f.worst_shed_share(requests, excuses, SHED_WINDOW_S, SHED_LEAST)
    shed = sum(row.shed for row in requests)
    found = f"{shed} shed; without that excuse at most {worst:.1%} of any {SHED_WINDOW_S:.0f} s (at {when:.0f} s)"
    name = f"sheds only while capacity starts or is at its maximum, else at most {allowed:.0%} of any window"
    return Criterion(name, worst <= allowed + 1e-9, found)


def _steady(changes: Sequence[f.Change], facts: Facts) -> Criterion:
    against = f.reversals(changes, facts.constant)
    found = "; ".join(f"{c.tier} {c.before} -> {c.after} at {c.t_s:.0f} s" for c in against) or "none"
    return Criterion(
        f"no reversal under constant load ({facts.constant.begin_s:.0f} to {facts.constant.end_s:.0f} s)",
        not against,
        found,
    )


def _independent(changes: Sequence[f.Change], tiers: Sequence[str]) -> Criterion:
    moved = {tier: sum(one.tier == tier for one in changes) for tier in tiers}
    alone = {tier: len(f.alone(changes, tier, APART_S)) for tier in tiers}
    found = ", ".join(f"{tier} {moved[tier]} times, {alone[tier]} of them alone" for tier in tiers)
    holds = len(tiers) > 1 and all(moved.values()) and any(alone.values())
    return Criterion("prefill and decode both move, and independently at least once", holds, f"moved: {found}")


def _unbroken(requests: Sequence[Request], facts: Facts) -> Criterion:
    broken = sum(row.broken for row in requests)
    ours = f.broken_by_scaling(requests, facts.kills)
    kinds = ", ".join(sorted({row.outcome for row in ours}))
    found = f"{len(ours)} broken {f'({kinds}) ' if kinds else ''}beside {broken - len(ours)} of the killed engine"
    return Criterion("no stream broken by scaling down", not ours, found)
