"""Lengths of requests where engines count tokens alone: means, with an assumed spread."""

from __future__ import annotations

import math

import pytest

from plimsoll.core.demand.counter_delta import EngineInterval
from plimsoll.core.demand.mean_lengths import ASSUMED_LOG_SD, MeanLengths
from plimsoll.core.ports import BucketCounts
from plimsoll.core.types import Unavailable

TOTALS = EngineInterval(5.0, generated_tokens=2000.0, local_prompt_tokens=8000.0, cached_prompt_tokens=2000.0)


def test_gateways_count_the_requests_of_an_engine_that_does_not() -> None:
    lengths = MeanLengths()
    lengths.on_served(0.0, 10.0)
    lengths.on_tokens(0.0, TOTALS)
    found = lengths.workload(0.2)
    assert not isinstance(found, Unavailable)
    assert found.mean(found.prompt_tokens) == pytest.approx(1000.0, rel=0.05)
    assert found.mean(found.cached_tokens) == pytest.approx(200.0, rel=0.05)
    assert found.mean(found.output_tokens) == pytest.approx(200.0, rel=0.05)
    assert found.scv(found.output_tokens) == pytest.approx(math.expm1(ASSUMED_LOG_SD**2), rel=0.2)


def test_first_tokens_of_the_engine_come_before_those_counts() -> None:
    lengths = MeanLengths()
    lengths.on_served(0.0, 1000.0)
    ttft = BucketCounts((1.0, math.inf), (20.0, 0.0), 2.0)
    lengths.on_tokens(0.0, EngineInterval(5.0, generated_tokens=2000.0, all_prompt_tokens=8000.0, ttft_s=ttft))
    found = lengths.workload(0.0)
    assert not isinstance(found, Unavailable)
    assert found.mean(found.prompt_tokens) == pytest.approx(400.0, rel=0.05)
    assert found.mean(found.output_tokens) == pytest.approx(100.0, rel=0.05)


def test_engine_with_lengths_is_not_taken() -> None:
    lengths, histogram = MeanLengths(), BucketCounts((1.0, math.inf), (1.0, 0.0), 1.0)
    lengths.on_tokens(0.0, TOTALS._replace(output_tokens=histogram))
    assert not lengths.is_known


def test_few_requests_give_no_lengths() -> None:
    lengths = MeanLengths()
    lengths.on_served(0.0, 4.0)
    lengths.on_tokens(0.0, TOTALS)
    assert isinstance(lengths.workload(0.0), Unavailable)
