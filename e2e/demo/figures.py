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

from e2e.demo.records import ReplicaSample, RequestLine

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

    def met(self, request: RequestLine) -> bool:
        """Whether a request ended well and within both targets."""
        if request.rejected or request.broken or request.client_gone or request.ttft_s is None:
            return False
        return request.ttft_s <= self.ttft_of(request.prompt_tokens) and (request.tpot_s or 0.0) <= self.tpot_s


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A stretch of a run, in seconds after its start: [begin, end)."""

    begin_s: float
    end_s: float

    def contains(self, moment_s: float) -> bool:
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


def attainment(requests: Iterable[RequestLine], targets: Targets) -> Attainment:
    """How many kept the promise, over offered and over admitted."""
    rows = list(requests)
    rejected = sum(row.rejected for row in rows)
    return Attainment(
        offered=len(rows),
        admitted=len(rows) - rejected,
        met=sum(targets.met(row) for row in rows),
        shed=sum(row.shed for row in rows),
        refused=rejected - sum(row.shed for row in rows),
        broken=sum(row.broken for row in rows),
        gone=sum(row.client_gone for row in rows),
    )


def goodput(requests: Sequence[RequestLine], targets: Targets, length_s: float) -> tuple[float, float]:
    """Requests/s and output tokens/s of the requests that kept the promise, over a run of so many seconds."""
    within_slo = [row for row in requests if targets.met(row)]
    return len(within_slo) / length_s, sum(row.output_tokens for row in within_slo) / length_s


def nearest_rank(values: Iterable[float | None], q: float) -> float | None:
    """The nearest-rank q-th percentile of those that are known; None where none is."""
    ordered = sorted(value for value in values if value is not None)
    return ordered[max(0, -(-int(q * len(ordered)) // 100) - 1)] if ordered else None


def tier_samples(replicas: Iterable[ReplicaSample], tier: str) -> list[ReplicaSample]:
    """One tier's looks, in order of time."""
    return sorted((sample for sample in replicas if sample.tier == tier), key=lambda sample: sample.t_s)


def tier_names(replicas: Iterable[ReplicaSample]) -> list[str]:
    """Names of the tiers, sorted."""
    return sorted({sample.tier for sample in replicas})


def replica_seconds(replicas: Iterable[ReplicaSample], end_s: float) -> dict[str, float]:
    """Replica-seconds of each tier from 0 to `end_s`, order to the pod's end; each look holds until the next."""
    rows = list(replicas)
    totals = {}
    for tier in tier_names(rows):
        samples = tier_samples(rows, tier)
        until = [sample.t_s for sample in samples[1:]] + [end_s]
        totals[tier] = sum(
            sample.billed * max(0.0, min(next_sample, end_s) - max(0.0, sample.t_s))
            for sample, next_sample in zip(samples, until, strict=True)
        )
    return totals


@dataclass(frozen=True, slots=True)
class ReplicaChange:
    """A tier's wanted replicas became others."""

    t_s: float
    tier: str
    before: int
    after: int

    @property
    def is_increase(self) -> bool:
        return self.after > self.before


def replica_changes(replicas: Iterable[ReplicaSample]) -> list[ReplicaChange]:
    """Every change of what was wanted, in order of time."""
    rows = list(replicas)
    result = []
    for tier in tier_names(rows):
        samples = tier_samples(rows, tier)
        result += [
            ReplicaChange(current.t_s, tier, previous.desired, current.desired)
            for previous, current in pairwise(samples)
            if previous.desired != current.desired
        ]
    return sorted(result, key=lambda one: (one.t_s, one.tier))


def reversals(changes_found: Iterable[ReplicaChange], span: TimeSpan) -> list[ReplicaChange]:
    """The changes within the span that go against the change of the same tier before them, that one in the span too."""
    opposing = []
    last_by_tier: dict[str, ReplicaChange] = {}
    for change in changes_found:
        if not span.contains(change.t_s):
            continue
        before = last_by_tier.get(change.tier)
        if before is not None and before.is_increase != change.is_increase:
            opposing.append(change)
        last_by_tier[change.tier] = change
    return opposing


def isolated_changes(changes_found: Sequence[ReplicaChange], tier: str, apart_s: float) -> list[ReplicaChange]:
    """The changes of one tier with none of another within so many seconds of them."""
    other_times = [change.t_s for change in changes_found if change.tier != tier]
    return [
        change
        for change in changes_found
        if change.tier == tier and all(abs(change.t_s - change_s) > apart_s for change_s in other_times)
    ]


def excused_spans(replicas: Iterable[ReplicaSample], max_replicas: dict[str, int], slack_s: float) -> list[TimeSpan]:
    """When refusals are right: some tier has capacity that is starting, or is at its maximum; and so long after."""
    rows = list(replicas)
    spans = []
    for tier in tier_names(rows):
        samples = tier_samples(rows, tier)
        until = [sample.t_s for sample in samples[1:]] + [samples[-1].t_s + STEP_S]
        for sample, next_sample in zip(samples, until, strict=True):
            if sample.starting > 0 or sample.desired >= max_replicas[tier]:
                spans.append(TimeSpan(sample.t_s, next_sample + slack_s))
    return spans


def worst_shed_share(
    requests: Sequence[RequestLine], excuses: Sequence[TimeSpan], window_s: float, min_requests: int
) -> tuple[float, float]:
    """The largest share of refusals without excuse in any window with at least so many requests, and when it begins."""
    if not requests:
        return 0.0, 0.0
    unexcused = [row.shed and not any(span.contains(row.sent_s) for span in excuses) for row in requests]
    worst, when = 0.0, 0.0
    last_s = max(row.sent_s for row in requests)
    begin_s = 0.0
    while begin_s <= max(0.0, last_s - window_s) + STEP_S:
        in_window = [
            unexcused_count
            for row, unexcused_count in zip(requests, unexcused, strict=True)
            if begin_s <= row.sent_s < begin_s + window_s
        ]
        share = sum(in_window) / len(in_window) if len(in_window) >= min_requests else 0.0
        if share > worst:
            worst, when = share, begin_s
        begin_s += STEP_S
    return worst, when


def broken_by_scaling(requests: Iterable[RequestLine], kills: Sequence[TimeSpan]) -> list[RequestLine]:
    """Streams that broke although no engine was killed while they were open: scaling down broke them, or worse."""
    return [
        row
        for row in requests
        if row.broken and not any(row.sent_s < kill.end_s and row.ended_s >= kill.begin_s for kill in kills)
    ]


@dataclass(frozen=True, slots=True)
class WindowFigures:
    """One point of the report's pictures and of the live view, over the window that ends at `t_s`."""

    t_s: float
    offered_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft_s: float | None
    tpot_s: float | None
    shed_share: float
    missed_share: float


def window_series(
    requests: Sequence[RequestLine], targets: Targets, end_s: float, every_s: float, window_s: float
) -> list[WindowFigures]:
    """The run as the client saw it, at even times; requests count when they were sent."""
    count = int(end_s / every_s)
    return [window_figures(requests, targets, (n + 1) * every_s, window_s) for n in range(count)]


def window_figures(requests: Iterable[RequestLine], targets: Targets, at_s: float, window_s: float) -> WindowFigures:
    """The window of so many seconds that ends at `at_s`."""
    begin_s = max(0.0, at_s - window_s)
    length_s = max(at_s - begin_s, 1e-9)
    rows = [row for row in requests if begin_s <= row.sent_s < at_s]
    return WindowFigures(
        t_s=at_s,
        offered_per_s=len(rows) / length_s,
        prompt_tokens_per_s=sum(row.prompt_tokens for row in rows) / length_s,
        output_tokens_per_s=sum(row.output_tokens for row in rows) / length_s,
        ttft_s=nearest_rank((row.ttft_s for row in rows), targets.percentile),
        tpot_s=nearest_rank((row.tpot_s for row in rows), targets.percentile),
        shed_share=sum(row.shed for row in rows) / len(rows) if rows else 0.0,
        missed_share=sum(not targets.met(row) for row in rows) / len(rows) if rows else 0.0,
    )
