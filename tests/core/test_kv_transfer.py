"""Does remote prefill pay: what was recorded between two H200s, and the verdict's own laws."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.engine_model.kv_transfer import (
    BLOCK_SIZE_REMEDY,
    HYSTERESIS_RATIO,
    MIN_TRANSFERRED_TOKENS,
    RDMA_REMEDY,
    TRANSFER_MEMORY_S,
    TransferAssessment,
    TransferMeter,
    TransferStats,
    assess,
    recompute_s_per_token,
)
from plimsoll.core.engine_model.step_time import StepModel
from plimsoll.core.types import Unavailable
from plimsoll.core.workload import Workload, from_samples

COOL = StepModel(4.91977e-3, -1.67349e-3, 1.91458e-5, 1.73962e-9, 1.11519e-5, 3.53261e-8)  # an 8B that decodes only
HOT = StepModel(4.74166e-3, -1.30016e-3, 2.26495e-5, 1.03542e-9, 1.81580e-5, 3.04844e-8)
KV_BYTES = 131_072  # a token of it
BUDGET = 8192
PROMPTS = 100


def prompts(tokens: float, cached: float = 0.0) -> Workload:
    return from_samples([tokens], [cached], [200.0])


def computing(tokens: float, model: StepModel = COOL) -> float:
    found = recompute_s_per_token(model, prompts(tokens), BUDGET)
    assert isinstance(found, float)
    return found


def assessment(moved: TransferStats, computing_s: float, before: bool = True) -> TransferAssessment:
    found = assess(moved, computing_s, before)
    assert isinstance(found, TransferAssessment)
    return found


# Prompt tokens, then medians of one transfer and of its posting, ms.
OVER_NVLINK = {
    "64 KiB pieces": [(128, 2.05, 0.52), (1024, 2.08, 0.51), (4096, 4.19, 0.60), (16384, 8.73, 0.82)],
    "64 KiB pieces, a cache that has gone round": [(1200, 12.1, 10.1), (8192, 60.0, 51.4), (32000, 244.8, 213.3)],
    "512 KiB pieces": [(128, 1.89, 0.39), (1024, 2.07, 0.40), (16384, 7.82, 0.63), (32000, 45.5, 40.4)],
    "2 MiB pieces": [(1024, 1.81, 0.14), (4096, 2.28, 0.14), (8192, 10.4, 3.92), (32000, 17.49, 4.06)],
}  # fmt: skip
OVER_TCP = [(128, 35.67, 0.68), (512, 136.0, 0.69), (1024, 272.8, 0.81), (2048, 541.4, 0.84), (4096, 1123.9, 0.82)]


@pytest.mark.parametrize("pieces", OVER_NVLINK)
@pytest.mark.parametrize("model", [COOL, HOT])
@pytest.mark.parametrize("before", [True, False])
def test_kv_transfer_over_nvlink_pays_off(pieces: str, model: StepModel, before: bool) -> None:
    for tokens, transfer_ms, post_ms in OVER_NVLINK[pieces]:
        moved = TransferStats(PROMPTS * tokens, PROMPTS * transfer_ms / 1e3, PROMPTS * post_ms / 1e3)
        found = assessment(moved, computing(tokens, model), before)
        assert found.pays, (tokens, found.message)


@pytest.mark.parametrize(("tokens", "transfer_ms", "post_ms"), OVER_TCP)
@pytest.mark.parametrize("before", [True, False])
def test_kv_transfer_without_nvlink_does_not_pay_off(
    tokens: int, transfer_ms: float, post_ms: float, before: bool
) -> None:
    moved = TransferStats(PROMPTS * tokens, PROMPTS * transfer_ms / 1e3, PROMPTS * post_ms / 1e3)
    found = assessment(moved, computing(tokens), before)
    assert not found.pays
    assert found.message.endswith(RDMA_REMEDY)


@pytest.mark.parametrize("rate", [17e9, 106e9, 140e9])
def test_kv_transfer_fast_fabric_pays_off_for_8b(rate: float) -> None:
    assert assessment(TransferStats(1e6, 1e6 * KV_BYTES / rate, 0.0), computing(1200), before=False).pays


def test_kv_transfer_break_even_bandwidth_matches_recording() -> None:
    for model in (COOL, HOT):
        assert KV_BYTES / computing(1200, model) == pytest.approx(5.5e9, rel=0.15)


def test_kv_transfer_recorded_engine_counters_pay_off() -> None:
    """4,946 transfers of chats and long prompts with blocks of 16, up to an overload: its own counters."""
    found = assessment(TransferStats(6.962789e6, 109.32859, 42.416726), computing(6.962789e6 / 4946))
    assert found.pays
    assert found.transfer_s == pytest.approx(15.7e-6, rel=0.01)
    assert found.message == (
        "moving a prompt token takes 15.7 us (6.09 us of it posting), computing it at the decode tier 22.7 us"
    )


def test_kv_transfer_slow_posting_advises_larger_blocks() -> None:
    found = assessment(TransferStats(1e6, 41.0, 40.0), 25e-6)
    assert not found.pays
    assert found.message.endswith(BLOCK_SIZE_REMEDY)


def test_kv_transfer_posting_outside_transfer_is_counted() -> None:
    assert assessment(TransferStats(1e6, 1.0, 30.0), 25e-6).transfer_s == pytest.approx(30e-6)


def test_kv_transfer_too_few_tokens_is_unavailable() -> None:
    for tokens in (0.0, 1.0, MIN_TRANSFERRED_TOKENS - 1):
        found = assess(TransferStats(tokens, 1e3, 1e3), 25e-6)
        assert isinstance(found, Unavailable)
        assert f"{tokens:.0f} prompt tokens" in found.reason
    assert isinstance(assess(TransferStats(MIN_TRANSFERRED_TOKENS, 1e3, 1e3), 25e-6), TransferAssessment)


def test_kv_transfer_assessment_has_hysteresis() -> None:
    """Within the band of the line nothing changes; beyond it everything does, once."""
    computed = 25e-6
    said, pays = [], True
    for factor in (0.5, 1.0, 1.2, 0.9, 1.24, 1.3, 1.2, 0.85, 1.1, 0.81, 0.79, 1.0, 1.24, 2.0, 0.5):
        pays = assessment(TransferStats(1e6, factor * computed * 1e6, 0.0), computed, pays).pays
        said.append(pays)
    assert said == [*[True] * 5, *[False] * 5, *[True] * 3, False, True]


@given(
    tokens=st.floats(MIN_TRANSFERRED_TOKENS, 1e12),
    transfer=st.floats(0.0, 1e6),
    post=st.floats(0.0, 1e6),
    computed=st.floats(1e-9, 1.0),
    before=st.booleans(),
)
def test_kv_transfer_assessment_follows_measurements(
    tokens: float, transfer: float, post: float, computed: float, before: bool
) -> None:
    found = assessment(TransferStats(tokens, transfer, post), computed, before)
    assert found.transfer_s * tokens == pytest.approx(max(transfer, post))
    assert found.recompute_s == computed
    if found.transfer_s > computed * HYSTERESIS_RATIO * 1.0001:
        assert not found.pays
    if found.transfer_s < computed / HYSTERESIS_RATIO * 0.9999:
        assert found.pays
    assert found.pays or not assessment(TransferStats(tokens, transfer * 2, post), computed, before).pays
    assert found.pays == (re.search(r"give both tiers", found.message) is None)


@pytest.mark.parametrize(
    ("moved", "computed"),
    [
        (TransferStats(-1.0, 1.0, 1.0), 1e-5),
        (TransferStats(1e6, -1.0, 1.0), 1e-5),
        (TransferStats(1e6, 1.0, -1.0), 1e-5),
        (TransferStats(math.nan, 1.0, 1.0), 1e-5),
        (TransferStats(1e6, math.inf, 1.0), 1e-5),
        (TransferStats(1e6, 1.0, 1.0), 0.0),
        (TransferStats(1e6, 1.0, 1.0), math.nan),
        (TransferStats(1e6, 1.0, 1.0), math.inf),
    ],
)
def test_kv_transfer_invalid_values_raise(moved: TransferStats, computed: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        assess(moved, computed)


def test_recompute_s_per_token_is_prefill_time_per_token() -> None:
    chunks, tokens = 3, 20_000
    work = COOL.prefill_token_s * tokens + COOL.prefill_pair_s * tokens**2 / 2
    assert computing(tokens) == pytest.approx((chunks * (COOL.base_s + COOL.any_prefill_s) + work) / tokens)
    mixed = from_samples([100.0, 900.0], [0.0, 0.0], [9.0, 9.0])
    both = recompute_s_per_token(COOL, mixed, BUDGET)
    assert both == pytest.approx((computing(100) * 100 + computing(900) * 900) / 1000)


def test_recompute_s_per_token_of_cached_prompts_is_unavailable() -> None:
    assert isinstance(recompute_s_per_token(COOL, prompts(0.0, 500.0), BUDGET), Unavailable)


def test_transfer_meter_sums_over_restarts_and_decays() -> None:
    meter = TransferMeter()
    meter.record("a", "1", 0.0, TransferStats(1000.0, 1.0, 0.5))
    assert meter.stats == TransferStats(0.0, 0.0, 0.0), "what was moved before nobody saw it is not of late"
    meter.record("a", "1", 10.0, TransferStats(3000.0, 2.0, 1.0))
    meter.record("b", "1", 10.0, TransferStats(500.0, 9.0, 9.0))
    assert meter.stats == pytest.approx((2000.0, 1.0, 0.5))
    meter.record("a", "2", 10.0, TransferStats(100.0, 0.1, 0.1))
    meter.record("b", "1", 10.0, TransferStats(400.0, 9.0, 9.0))
    assert meter.stats == pytest.approx((2000.0, 1.0, 0.5)), "a restart and a counter that went back add nothing"
    meter.retain({"a"})
    meter.record("a", "2", 10.0 + TRANSFER_MEMORY_S, TransferStats(100.0, 0.1, 0.1))
    assert meter.stats.tokens == pytest.approx(2000.0 / math.e)
