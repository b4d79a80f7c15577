"""Requests that no prefill engine has seen: what counts as such, and what the times of readings explain."""

from __future__ import annotations

import math

import pytest

from plimsoll.core.demand.metrics_aggregator import MetricsAggregator
from plimsoll.core.demand.skipped_prefill import SkippedPrefill
from plimsoll.core.ports import BucketCounts, EngineReading
from plimsoll.core.types import Role

NOW_S = 1.8e9
PODS = {Role.PREFILL: ["p"], Role.DECODE: ["d"]}


class Pair:
    """One engine of each role. Their counters grow between two readings."""

    def __init__(self) -> None:
        self.aggregator = MetricsAggregator([Role.PREFILL, Role.DECODE], demand_from_engines=True)
        self.second, self.instance_id, self.silent = 0, "1", ""
        self.totals = dict.fromkeys("pd", 0.0)

    def run(
        self, seconds: int, prefill: float, decode: float, growth: float = 0.0, waiting: float = 0.0
    ) -> SkippedPrefill | None:
        """prefill, decode: first tokens per second; growth: of the decode engine's queue, per second."""
        found = None
        for _ in range(0, seconds, 2):
            self.second += 2
            waiting = max(0.0, waiting + 2 * growth)
            for pod, rate in (("p", prefill), ("d", decode)):
                self.totals[pod] += 2 * rate
                if pod != self.silent:
                    self._read(pod, waiting if pod == "d" else 0.0)
            found = self.aggregator.collect(NOW_S + self.second, PODS, (), 0.95).skipped_prefill
        return found

    def _read(self, pod: str, waiting: float) -> None:
        count = self.totals[pod]
        ttft = BucketCounts((0.5, math.inf), (count, 0.0), 0.2 * count)
        reading = EngineReading(
            pod, NOW_S + self.second, self.instance_id, running=1.0, waiting=waiting, ttft_s=ttft,
            local_prompt_tokens=100.0 * (self.totals["d"] - self.totals["p"]),
        )  # fmt: skip
        self.aggregator.observe_engine(Role.PREFILL if pod == "p" else Role.DECODE, reading)


def test_difference_of_first_tokens_skips_prefill() -> None:
    found = Pair().run(90, prefill=10.0, decode=25.0)
    assert found is not None
    assert found.per_s == pytest.approx(15.0, rel=0.1)
    assert found.share == pytest.approx(0.6, rel=0.1)
    assert found.prompt_tokens == pytest.approx(100.0, rel=0.15)


@pytest.mark.parametrize(("prefill", "decode"), [(10.0, 10.0), (10.0, 10.4), (20.0, 10.0), (0.0, 0.0), (0.1, 0.15)])
def test_small_difference_is_none(prefill: float, decode: float) -> None:
    assert Pair().run(90, prefill, decode) is None


def test_queue_of_decode_that_drains_had_its_prefill_before() -> None:
    pair = Pair()
    assert pair.run(60, prefill=20.0, decode=10.0, growth=10.0) is None
    assert pair.run(60, prefill=10.0, decode=20.0, growth=-10.0, waiting=600.0) is None


def test_queue_of_decode_that_grows_before_prefill_is_none() -> None:
    assert Pair().run(90, prefill=10.0, decode=10.0, growth=5.0) is None, "a router may ask the decode engine first"


def test_silent_engine_keeps_the_last_result() -> None:
    pair = Pair()
    assert pair.run(90, prefill=20.0, decode=20.0) is None
    pair.silent = "p"
    assert pair.run(60, prefill=20.0, decode=20.0) is None
    pair.silent = ""
    assert pair.run(90, prefill=20.0, decode=20.0) is None


def test_result_is_dropped_when_an_engine_stays_silent() -> None:
    pair = Pair()
    assert pair.run(90, prefill=10.0, decode=25.0) is not None
    pair.silent = "d"
    assert pair.run(120, prefill=0.0, decode=0.0) is not None
    assert pair.run(300, prefill=0.0, decode=0.0) is None


def test_restarted_engines_begin_anew() -> None:
    pair = Pair()
    before = pair.run(90, prefill=10.0, decode=20.0)
    pair.totals, pair.instance_id = {"p": 5.0, "d": 500.0}, "2"
    after = pair.run(90, prefill=10.0, decode=20.0)
    assert before is not None
    assert after is not None
    assert after.per_s == pytest.approx(before.per_s, rel=0.1)


def test_nothing_is_known_in_the_first_seconds() -> None:
    assert Pair().run(16, prefill=10.0, decode=50.0) is None


def test_service_without_pair_has_no_such_requests() -> None:
    aggregator = MetricsAggregator([Role.PREFILL, Role.DECODE])
    assert aggregator.collect(NOW_S, PODS, (), 0.95).skipped_prefill is None
