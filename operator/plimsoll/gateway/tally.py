"""What one service's requests came to, since this picker started: for `/signals` and `/metrics` alike.

Counters of `/metrics` cost more than what they count, so they are brought in line when somebody reads them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client import Counter as Counted

from plimsoll.core import buckets
from plimsoll.core.admission import Outcome as Decided
from plimsoll.core.picking.endpoint import Prompt
from plimsoll.core.slo import Deadlines
from plimsoll.gateway.accesslog import Outcome, Record
from plimsoll.gateway.replies import Reason
from plimsoll.telemetry import metrics


class Tally:
    """Counts of one service; `service` "" takes the refusals of requests that named none."""

    def __init__(self, service: str) -> None:
        self._service = service
        self.arrived = 0  # first attempts: a client's retries are no new demand
        self.arrived_tokens = 0  # of their prompts, each as often as it is to be answered
        self.retried = 0
        self.ended: Counter[Outcome] = Counter()
        self.refusals: Counter[Reason] = Counter()
        self.decided: Counter[Decided] = Counter()
        self.ttft: Counter[int] = Counter()  # by bucket of LATENCY_EDGES_S
        self.ttft_s = 0.0  # sum
        self.e2e: Counter[int] = Counter()
        self.e2e_s = 0.0
        self.judged = self.missed = self.missed_ttft = self.missed_e2e = 0  # answers of which something was promised
        self.paced: Counter[float] = Counter()  # of these, those that were promised a pace, by that target in seconds
        self.remote = 0
        self.local = 0
        self._first = metrics.GATEWAY_ARRIVED.labels(service, "first")
        self._retry = metrics.GATEWAY_ARRIVED.labels(service, "retry")
        self._remote = metrics.GATEWAY_PREFILLS.labels(service, "remote")
        self._local = metrics.GATEWAY_PREFILLS.labels(service, "local")
        self._shown: dict[Counted, int] = {}
        self._ended = {outcome: metrics.GATEWAY_ENDED.labels(service, outcome.value) for outcome in Outcome}
        self._ttft = metrics.GATEWAY_TTFT.labels(service)
        self._duration = metrics.GATEWAY_DURATION.labels(service)

    def arrive(self, prompt: Prompt, *, retry: bool) -> None:
        """Count a request for this service, whatever will become of it."""
        if retry:
            self.retried += 1
        else:
            self.arrived += 1
            self.arrived_tokens += prompt.tokens * prompt.sequences

    def prefill(self, *, remote: bool) -> None:
        if remote:
            self.remote += 1
        else:
            self.local += 1

    def refuse(self, reason: Reason) -> None:
        self.refusals[reason] += 1

    def decide(self, outcome: Decided) -> None:
        """Count what admission made of a request; one that is held has another outcome later."""
        self.decided[outcome] += 1

    def end(self, record: Record, deadlines: Deadlines | None = None) -> None:
        """Count a request that a pick had sent to an engine. deadlines: what was promised of it, None for nothing."""
        outcome = record.outcome
        self.ended[outcome] += 1
        ttft_s = record.ttft_s
        if ttft_s is not None:
            self._time(ttft_s)
        e2e_s = record.e2e_s
        if e2e_s is not None:
            self.e2e[buckets.index(buckets.LATENCY_EDGES_S, e2e_s)] += 1
            self.e2e_s += e2e_s
        if deadlines is not None and ttft_s is not None and e2e_s is not None:
            self._judge(ttft_s > deadlines.first_s, e2e_s > deadlines.last_s)
            if deadlines.pace_s < math.inf:
                self.paced[deadlines.pace_s] += 1
        if record.duration_us is not None:
            self._duration.observe(record.duration_us / 1e6)

    def _judge(self, late_first: bool, late_last: bool) -> None:
        self.judged += 1
        self.missed += late_first or late_last
        self.missed_ttft += late_first
        self.missed_e2e += late_last

    def _time(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)
        self.ttft[buckets.index(buckets.LATENCY_EDGES_S, ttft_s)] += 1
        self.ttft_s += ttft_s

    def show(self) -> None:
        """Bring the counters of `/metrics` in line, just before they are read."""
        for counter, count in self._counts():
            counter.inc(count - self._shown.get(counter, 0))
            self._shown[counter] = count

    def _counts(self) -> Iterator[tuple[Counted, int]]:
        yield self._first, self.arrived
        yield self._retry, self.retried
        yield self._remote, self.remote
        yield self._local, self.local
        for outcome, counter in self._ended.items():
            yield counter, self.ended[outcome]
        for decided, count in self.decided.items():
            yield metrics.GATEWAY_OUTCOMES.labels(self._service, decided.value), count
        for reason, count in self.refusals.items():
            yield metrics.GATEWAY_REFUSED.labels(self._service, reason.value), count

    def signals(self) -> dict[str, Any]:
        """The `requests`, `ttft`, `e2e`, `promise` and `prefill` parts of this service in `/signals`."""
        return {
            "requests": {
                "arrived": self.arrived,
                "arrived_tokens": self.arrived_tokens,
                "retried": self.retried,
                "answered": self.ended[Outcome.ANSWERED],
                "failed": self.ended[Outcome.FAILED],
                "cancelled": self.ended[Outcome.CANCELLED],
                "refused": {reason.value: count for reason, count in self.refusals.items()},
            },
            "ttft": {"sum_s": round(self.ttft_s, 6), "buckets": list(self.ttft), "counts": list(self.ttft.values())},
            "e2e": {"sum_s": round(self.e2e_s, 6), "buckets": list(self.e2e), "counts": list(self.e2e.values())},
            "promise": {
                "judged": self.judged,
                "missed": self.missed,
                "missed_ttft": self.missed_ttft,
                "missed_e2e": self.missed_e2e,
                "tpot": {"targets_s": list(self.paced), "answers": list(self.paced.values())},
            },
            "prefill": {"remote": self.remote, "local": self.local},
        }
