"""Every figure of the report, as a function of the demo's lines and of the run's facts; nothing is read, nothing shown.

Counted as the project counts everywhere: offered is every request that was sent, the warm-up and the tail included,
and whatever was refused, failed or cut is missed; admitted leaves out what the gateway refused. Times to first token
and per token are the client's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from e2e.demo.lines import Replicas, Request

STEP_S: Final = 1.0  # of what is looked for in windows


@dataclass(frozen=True, slots=True)
class Targets:
    """The promise: seconds to the first token and for every token after it, and the percentile that keeps them."""

    ttft_s: float
    tpot_s: float
    percentile: int = 95
    ttft_per_k_token_s: float = 0.0

    def ttft_of(self, prompt_tokens: int) -> float:
        """The target for the first token of one request, in seconds."""
        return self.ttft_s + self.ttft_per_k_token_s * prompt_tokens / 1000

    def met(self, request: Request) -> bool:
        """Whether a request ended well and within both targets."""
        if request.refused or request.broken or request.gone or request.ttft_s is None:
            return False
        return request.ttft_s <= self.ttft_of(request.prompt_tokens) and (request.tpot_s or 0.0) <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a run, in seconds after its start: [begin, end)."""

    begin_s: float
    end_s: float

    def has(self, moment_s: float) -> bool:
        return self.begin_s <= moment_s < self.end_s


@dataclass(frozen=True, slots=True)
class Attainment:
    """Counts of requests. `broken` began to be answered, or got no answer at all, and did not end as it should;
    `gone`: the client's own patience ended."""

    offered: int
    admitted: int
    met: int
    shed: int
    refused: int
    broken: int
    gone: int

    @property
    def of_offered(self) -> float:
        return self.met / self.offered if self.offered else 1.0

    @property
    def of_admitted(self) -> float:
        return self.met / self.admitted if self.admitted else 1.0


def attainment(requests: Iterable[Request], targets: Targets) -> Attainment:
    """How many kept the promise, over offered and over admitted."""
    rows = list(requests)
    refused = sum(row.refused for row in rows)
    return Attainment(
        offered=len(rows),
        admitted=len(rows) - refused,
        met=sum(targets.met(row) for row in rows),
        shed=sum(row.shed for row in rows),
        refused=refused - sum(row.shed for row in rows),
        broken=sum(row.broken for row in rows),
        gone=sum(row.gone for row in rows),
    )


def goodput(requests: Sequence[Request], targets: Targets, length_s: float) -> tuple[float, float]:
    """Requests/s and output tokens/s of the requests that kept the promise, over a run of so many seconds."""
    good = [row for row in requests if targets.met(row)]
    return len(good) / length_s, sum(row.output_tokens for row in good) / length_s


def percentile(values: Iterable[float | None], q: float) -> float | None:
    """The nearest-rank q-th percentile of those that are known; None where none is."""
    ordered = sorted(value for value in values if value is not None)
    return ordered[max(0, -(-int(q * len(ordered)) // 100) - 1)] if ordered else None


def of_tier(replicas: Iterable[Replicas], tier: str) -> list[Replicas]:
    """One tier's looks, in order of time."""
    return sorted((one for one in replicas if one.tier == tier), key=lambda one: one.t_s)


def tiers(replicas: Iterable[Replicas]) -> list[str]:
    """Names of the tiers, sorted."""
    return sorted({one.tier for one in replicas})


def replica_seconds(replicas: Iterable[Replicas], end_s: float) -> dict[str, float]:
    """Replica-seconds of each tier from 0 to `end_s`, order to the pod's end; each look holds until the next."""
    rows = list(replicas)
    found = {}
    for tier in tiers(rows):
        own = of_tier(rows, tier)
        until = [one.t_s for one in own[1:]] + [end_s]
        found[tier] = sum(
            one.paid * max(0.0, min(then, end_s) - max(0.0, one.t_s)) for one, then in zip(own, until, strict=True)
        )
    return found


@dataclass(frozen=True, slots=True)
class Change:
    """A tier's wanted replicas became others."""

    t_s: float
    tier: str
    before: int
    after: int

    @property
    def up(self) -> bool:
        return self.after > self.before


def changes(replicas: Iterable[Replicas]) -> list[Change]:
    """Every change of what was wanted, in order of time."""
    rows = list(replicas)
    found = []
    for tier in tiers(rows):
        own = of_tier(rows, tier)
        found += [Change(b.t_s, tier, a.desired, b.desired) for a, b in pairwise(own) if a.desired != b.desired]
    return sorted(found, key=lambda one: (one.t_s, one.tier))


def reversals(found: Iterable[Change], span: Span) -> list[Change]:
    """The changes within the span that go against the change of the same tier before them, that one in the span too."""
    against = []
    last: dict[str, Change] = {}
    for change in found:
        if not span.has(change.t_s):
            continue
        before = last.get(change.tier)
        if before is not None and before.up != change.up:
            against.append(change)
        last[change.tier] = change
    return against


def alone(found: Sequence[Change], tier: str, apart_s: float) -> list[Change]:
    """The changes of one tier with none of another within so many seconds of them."""
    others = [one.t_s for one in found if one.tier != tier]
    return [one for one in found if one.tier == tier and all(abs(one.t_s - at) > apart_s for at in others)]


def excused(replicas: Iterable[Replicas], most: dict[str, int], slack_s: float) -> list[Span]:
    """When refusals are right: some tier has capacity that is starting, or is at its maximum; and so long after."""
    rows = list(replicas)
    found = []
    for tier in tiers(rows):
        own = of_tier(rows, tier)
        until = [one.t_s for one in own[1:]] + [own[-1].t_s + STEP_S]
        for one, then in zip(own, until, strict=True):
            if one.starting > 0 or one.desired >= most[tier]:
                found.append(Span(one.t_s, then + slack_s))
    return found


def worst_shed_share(
    requests: Sequence[Request], excuses: Sequence[Span], window_s: float, least: int
) -> tuple[float, float]:
    """The largest share of refusals without excuse in any window with at least so many requests, and when it begins."""
    if not requests:
        return 0.0, 0.0
    wrong = [row.shed and not any(span.has(row.sent_s) for span in excuses) for row in requests]
    worst, when = 0.0, 0.0
    last_s = max(row.sent_s for row in requests)
    begin_s = 0.0
    while begin_s <= max(0.0, last_s - window_s) + STEP_S:
        inside = [bad for row, bad in zip(requests, wrong, strict=True) if begin_s <= row.sent_s < begin_s + window_s]
        share = sum(inside) / len(inside) if len(inside) >= least else 0.0
        if share > worst:
            worst, when = share, begin_s
        begin_s += STEP_S
    return worst, when


def broken_by_scaling(requests: Iterable[Request], kills: Sequence[Span]) -> list[Request]:
    """Streams that broke although no engine was killed while they were open: scaling down broke them, or worse."""
    return [
        row
        for row in requests
        if row.broken and not any(row.sent_s < kill.end_s and row.ended_s >= kill.begin_s for kill in kills)
    ]


@dataclass(frozen=True, slots=True)
class Moment:
    """One point of the report's pictures and of the live view, over the window that ends at `t_s`."""

    t_s: float
    offered_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft_s: float | None
    tpot_s: float | None
    shed_share: float
    missed_share: float


def moments(
    requests: Sequence[Request], targets: Targets, end_s: float, every_s: float, window_s: float
) -> list[Moment]:
    """The run as the client saw it, at even times; requests count when they were sent."""
    count = int(end_s / every_s)
    return [moment(requests, targets, (n + 1) * every_s, window_s) for n in range(count)]


def moment(requests: Iterable[Request], targets: Targets, at_s: float, window_s: float) -> Moment:
    """The window of so many seconds that ends at `at_s`."""
    begin_s = max(0.0, at_s - window_s)
    length_s = max(at_s - begin_s, 1e-9)
    rows = [row for row in requests if begin_s <= row.sent_s < at_s]
    return Moment(
        t_s=at_s,
        offered_per_s=len(rows) / length_s,
        prompt_tokens_per_s=sum(row.prompt_tokens for row in rows) / length_s,
        output_tokens_per_s=sum(row.output_tokens for row in rows) / length_s,
        ttft_s=percentile((row.ttft_s for row in rows), targets.percentile),
        tpot_s=percentile((row.tpot_s for row in rows), targets.percentile),
        shed_share=sum(row.shed for row in rows) / len(rows) if rows else 0.0,
        missed_share=sum(not targets.met(row) for row in rows) / len(rows) if rows else 0.0,
    )
