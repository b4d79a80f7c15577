"""Does remote prefill pay: what was recorded between two H200s, and the assessment's own laws."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.forecast import Unknown
from plimsoll.core.latency import StepModel
from plimsoll.core.transfer import (
    BAND,
    BLOCKS,
    LEAST_TOKENS,
    MEMORY_S,
    RDMA,
    Meter,
    Moved,
    Verdict,
    computing_s,
    judge,
)
from plimsoll.core.workload import Workload, from_samples

COOL = StepModel(4.91977e-3, -1.67349e-3, 1.91458e-5, 1.73962e-9, 1.11519e-5, 3.53261e-8)  # an 8B that decodes only
HOT = StepModel(4.74166e-3, -1.30016e-3, 2.26495e-5, 1.03542e-9, 1.81580e-5, 3.04844e-8)
KV_BYTES = 131_072  # a token of it
BUDGET = 8192
PROMPTS = 100


def prompts(tokens: float, cached: float = 0.0) -> Workload:
    return from_samples([tokens], [cached], [200.0])


def computing(tokens: float, model: StepModel = COOL) -> float:
    found = computing_s(model, prompts(tokens), BUDGET)
    assert isinstance(found, float)
    return found


def assessment(moved: Moved, computing_s: float, before: bool = True) -> Verdict:
    found = judge(moved, computing_s, before)
    assert isinstance(found, Verdict)
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
        moved = Moved(PROMPTS * tokens, PROMPTS * transfer_ms / 1e3, PROMPTS * post_ms / 1e3)
        found = assessment(moved, computing(tokens, model), before)
        assert found.pays, (tokens, found.words)


@pytest.mark.parametrize(("tokens", "transfer_ms", "post_ms"), OVER_TCP)
@pytest.mark.parametrize("before", [True, False])
def test_kv_transfer_without_nvlink_does_not_pay_off(
    tokens: int, transfer_ms: float, post_ms: float, before: bool
) -> None:
    moved = Moved(PROMPTS * tokens, PROMPTS * transfer_ms / 1e3, PROMPTS * post_ms / 1e3)
    found = assessment(moved, computing(tokens), before)
    assert not found.pays
    assert found.words.endswith(RDMA)


@pytest.mark.parametrize("rate", [17e9, 106e9, 140e9])
def test_kv_transfer_fast_fabric_pays_off_for_8b(rate: float) -> None:
    assert assessment(Moved(1e6, 1e6 * KV_BYTES / rate, 0.0), computing(1200), before=False).pays


def test_kv_transfer_break_even_bandwidth_matches_recording() -> None:
    for model in (COOL, HOT):
        assert KV_BYTES / computing(1200, model) == pytest.approx(5.5e9, rel=0.15)


def test_kv_transfer_recorded_engine_counters_pay_off() -> None:
    """4,946 transfers of chats and long prompts with blocks of 16, up to an overload: its own counters."""
    found = assessment(Moved(6.962789e6, 109.32859, 42.416726), computing(6.962789e6 / 4946))
    assert found.pays
    assert found.moving_s == pytest.approx(15.7e-6, rel=0.01)
    assert found.words == (
        "moving a prompt token takes 15.7 us (6.09 us of it posting), computing it at the decode tier 22.7 us"
    )


def test_kv_transfer_slow_posting_advises_larger_blocks() -> None:
    found = assessment(Moved(1e6, 41.0, 40.0), 25e-6)
    assert not found.pays
    assert found.words.endswith(BLOCKS)


def test_kv_transfer_posting_outside_transfer_is_counted() -> None:
    assert assessment(Moved(1e6, 1.0, 30.0), 25e-6).moving_s == pytest.approx(30e-6)


def test_kv_transfer_too_few_tokens_is_unavailable() -> None:
    for tokens in (0.0, 1.0, LEAST_TOKENS - 1):
        found = judge(Moved(tokens, 1e3, 1e3), 25e-6)
        assert isinstance(found, Unknown)
        assert f"{tokens:.0f} prompt tokens" in found.why
    assert isinstance(judge(Moved(LEAST_TOKENS, 1e3, 1e3), 25e-6), Verdict)


def test_kv_transfer_assessment_has_hysteresis() -> None:
    """Within the band of the line nothing changes; beyond it everything does, once."""
    computed = 25e-6
    said, pays = [], True
    for factor in (0.5, 1.0, 1.2, 0.9, 1.24, 1.3, 1.2, 0.85, 1.1, 0.81, 0.79, 1.0, 1.24, 2.0, 0.5):
        pays = assessment(Moved(1e6, factor * computed * 1e6, 0.0), computed, pays).pays
        said.append(pays)
    assert said == [*[True] * 5, *[False] * 5, *[True] * 3, False, True]


@given(
    tokens=st.floats(LEAST_TOKENS, 1e12),
    transfer=st.floats(0.0, 1e6),
    post=st.floats(0.0, 1e6),
    computed=st.floats(1e-9, 1.0),
    before=st.booleans(),
)
def test_kv_transfer_assessment_follows_measurements(
    tokens: float, transfer: float, post: float, computed: float, before: bool
) -> None:
    found = assessment(Moved(tokens, transfer, post), computed, before)
    assert found.moving_s * tokens == pytest.approx(max(transfer, post))
    assert found.computing_s == computed
    if found.moving_s > computed * BAND * 1.0001:
        assert not found.pays
    if found.moving_s < computed / BAND * 0.9999:
        assert found.pays
    assert found.pays or not assessment(Moved(tokens, transfer * 2, post), computed, before).pays
    assert found.pays == (re.search(r"give both tiers", found.words) is None)


@pytest.mark.parametrize(
    ("moved", "computed"),
    [
        (Moved(-1.0, 1.0, 1.0), 1e-5),
        (Moved(1e6, -1.0, 1.0), 1e-5),
        (Moved(1e6, 1.0, -1.0), 1e-5),
        (Moved(math.nan, 1.0, 1.0), 1e-5),
        (Moved(1e6, math.inf, 1.0), 1e-5),
        (Moved(1e6, 1.0, 1.0), 0.0),
        (Moved(1e6, 1.0, 1.0), math.nan),
        (Moved(1e6, 1.0, 1.0), math.inf),
    ],
)
def test_kv_transfer_invalid_values_raise(moved: Moved, computed: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        judge(moved, computed)


def test_recompute_s_per_token_is_prefill_time_per_token() -> None:
    chunks, tokens = 3, 20_000
    work = COOL.prefill_token_s * tokens + COOL.prefill_pair_s * tokens**2 / 2
    assert computing(tokens) == pytest.approx((chunks * (COOL.base_s + COOL.any_prefill_s) + work) / tokens)
    mixed = from_samples([100.0, 900.0], [0.0, 0.0], [9.0, 9.0])
    both = computing_s(COOL, mixed, BUDGET)
    assert both == pytest.approx((computing(100) * 100 + computing(900) * 900) / 1000)


def test_recompute_s_per_token_of_cached_prompts_is_unavailable() -> None:
    assert isinstance(computing_s(COOL, prompts(0.0, 500.0), BUDGET), Unknown)


def test_transfer_meter_sums_over_restarts_and_decays() -> None:
    meter = Meter()
    meter.hear("a", "1", 0.0, Moved(1000.0, 1.0, 0.5))
    assert meter.moved == Moved(0.0, 0.0, 0.0), "what was moved before nobody saw it is not of late"
    meter.hear("a", "1", 10.0, Moved(3000.0, 2.0, 1.0))
    meter.hear("b", "1", 10.0, Moved(500.0, 9.0, 9.0))
    assert meter.moved == pytest.approx((2000.0, 1.0, 0.5))
    meter.hear("a", "2", 10.0, Moved(100.0, 0.1, 0.1))
    meter.hear("b", "1", 10.0, Moved(400.0, 9.0, 9.0))
    assert meter.moved == pytest.approx((2000.0, 1.0, 0.5)), "a restart and a counter that went back add nothing"
    meter.keep({"a"})
    meter.hear("a", "2", 10.0 + MEMORY_S, Moved(100.0, 0.1, 0.1))
    assert meter.moved.tokens == pytest.approx(2000.0 / math.e)
