"""The queueing model of llm-d's autoscaler: published values, theory, what the tuner learns, and the policy."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from plimsoll.core.ports import EngineReading, ServiceReading
from plimsoll.core.types import Role
from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies import registry, wva_queueing
from plimsoll.sim.policies.wva_chain import (
    BirthDeathChain,
    RequestSizes,
    TunerSample,
    WvaTuner,
    default_targets,
    initial_parameters,
)
from tests.sim.policies.observations import BOTH, SERVE, buckets, observe_readings, policy

# parameters, batch, queue, tokens in and out; rate; TTFT, ITL, highest rate; targets; rates for them. These are what
# the controller's own Go package computes at the commit of 18 August 2026, to the digits that are written here.
GOLDEN = [
    ((12.0, 0.05, 0.0005), 48, 128, 128, 512, 3.0, "75.317 20.5345 3.8208", (60.0, 20.0), "2.911 2.874"),
    ((5.0, 0.05, 0.00005), 256, 100, 1024, 256, 8.0, "80.817 14.9906 11.8744", (500.0, 50.0), "11.599 11.271"),
    ((5.0, 0.05, 0.00005), 64, 100, 4000, 1000, 1.5, "259.02 20.5102 1.7812", (1000.0, 30.0), "1.638 1.700"),
]
TRUE = (9.0, 0.03, 0.0002)


def record_values(words: str, values: list[float | None]) -> None:
    for word, value in zip(words.split(), values, strict=True):
        assert value is not None
        assert f"{value:.{len(word.partition('.')[2])}f}" == word


@pytest.mark.parametrize(
    ("parameters", "batch", "queue", "prompt", "output", "rate", "found", "targets", "rates"), GOLDEN
)
def test_chain_matches_published_values(
    parameters: tuple[float, float, float], batch: int, queue: int, prompt: int, output: int, rate: float, found: str,
    targets: tuple[float, float], rates: str,
) -> None:  # fmt: skip
    chain = BirthDeathChain(parameters, RequestSizes(prompt, output), batch, queue)
    at = chain.latency_at(rate)
    record_values(found, [at.ttft_ms, at.itl_ms, chain.max_rate])
    record_values(rates, [chain.max_rate_within(targets[0], None), chain.max_rate_within(None, targets[1])])
    assert chain.max_rate_within(*targets) == min(
        filter(None, (chain.max_rate_within(targets[0], None), chain.max_rate_within(None, targets[1])))
    )


def test_chain_one_slot_matches_mm1k_formula() -> None:
    """M/M/1/K: L = r (1 - (K + 1) r^K + K r^(K+1)) / ((1 - r)(1 - r^(K+1))), Kleinrock, Queueing Systems I, 3.6."""
    chain, room = BirthDeathChain(TRUE, RequestSizes(500.0, 50.0), 1, 20), 21
    leave = chain.max_rate / 0.999
    for r in (0.3, 0.7, 0.95):
        inside = r * (1 - (room + 1) * r**room + room * r ** (room + 1)) / ((1 - r) * (1 - r ** (room + 1)))
        through = leave * r * (1 - r**room) / (1 - r ** (room + 1))
        assert chain.latency_at(leave * r).wait_ms == pytest.approx(1000.0 * (inside / through - 1.0 / leave), rel=1e-9)


def test_chain_latency_rises_with_rate_and_rate_is_highest() -> None:
    chain = BirthDeathChain(TRUE, RequestSizes(1_000.0, 200.0), 64, 100)
    rates = np.linspace(chain.min_rate, chain.max_rate, 40)
    ttft = [chain.latency_at(rate).ttft_ms for rate in rates]
    assert all(after > before for before, after in pairwise(ttft))
    found = chain.max_rate_within(400.0, None)
    assert found is not None
    assert chain.latency_at(found).ttft_ms == pytest.approx(400.0, rel=1e-5)
    assert chain.max_rate_within(1e9, 1e9) == chain.max_rate
    assert chain.max_rate_within(0.9 * chain.latency_at(chain.min_rate).ttft_ms, None) is None
    assert chain.max_rate_within(None, 0.9 * chain.latency_at(chain.min_rate).itl_ms) is None


def test_tuner_converges_to_true_parameters() -> None:
    tuner, random = WvaTuner(64), np.random.default_rng(1)
    for _ in range(200):
        sizes = RequestSizes(float(random.uniform(300, 3000)), float(random.uniform(50, 400)))
        chain = BirthDeathChain(TRUE, sizes, 64, 640)
        rate = float(random.uniform(0.1, 0.7)) * chain.max_rate
        at = chain.latency_at(rate)
        tuner.update(TunerSample(rate, sizes, at.wait_ms + at.prefill_ms, at.itl_ms))
    assert tuner.parameters is not None
    sizes = RequestSizes(1_500.0, 150.0)
    true, learned = BirthDeathChain(TRUE, sizes, 64, 100), BirthDeathChain(tuner.parameters, sizes, 64, 100)
    assert learned.max_rate == pytest.approx(true.max_rate, rel=0.05)
    assert learned.latency_at(0.5 * true.max_rate).itl_ms == pytest.approx(
        true.latency_at(0.5 * true.max_rate).itl_ms, rel=0.05
    )


def test_tuner_implausible_observations_are_rejected() -> None:
    tuner, sizes = WvaTuner(64), RequestSizes(1_000.0, 200.0)
    chain = BirthDeathChain(TRUE, sizes, 64, 640)
    at = chain.latency_at(0.5 * chain.max_rate)
    usual = TunerSample(0.5 * chain.max_rate, sizes, at.wait_ms + at.prefill_ms, at.itl_ms)
    assert all(tuner.update(usual) for _ in range(20))
    before = tuner.parameters
    assert not tuner.update(replace(usual, ttft_ms=30.0 * usual.ttft_ms))
    assert not tuner.update(replace(usual, rate=3.0 * chain.max_rate))
    assert tuner.parameters == before


def test_first_observation_yields_consistent_or_default_values() -> None:
    sizes = RequestSizes(1_000.0, 200.0)
    alpha, beta, gamma = initial_parameters(TunerSample(2.0, sizes, 150.0, 20.0))
    assert alpha == 18.0
    assert beta > 0.0
    assert gamma > 0.0
    assert initial_parameters(TunerSample(2.0, sizes, 1.0, 20.0)) == (18.0, 0.05, 0.00005)


def test_usual_targets_are_three_base_steps_plus_work() -> None:
    ttft_ms, itl_ms = default_targets((10.0, 0.1, 0.001), RequestSizes(1_000.0, 199.0), 3.0)
    assert ttft_ms == pytest.approx(30.0 + 101.0)
    assert itl_ms == pytest.approx(30.0 + 0.1 + 1.1)


# ---------------------------------------------------------------- the policy


def reading(pod: str, requests: float, ttft_s: float = 0.1, itl_s: float = 0.012) -> EngineReading:
    """An engine at which so many requests of 1,000 and 200 tokens ended with these means."""
    means = {"prompt_tokens": 1_000.0, "output_tokens": 200.0, "ttft_s": ttft_s, "tpot_s": itl_s}
    histograms: dict[str, Any] = {
        key: buckets(requests)._replace(value_sum=requests * mean) for key, mean in means.items()
    }
    return EngineReading(pod, 0.0, pod, running=0.0, waiting=0.0, kv_used=0.1, **histograms)


def gateway(arrived: float, refused: float = 0.0, waiting: float = 0.0) -> ServiceReading:
    return ServiceReading(arrived, None, 0.0, arrived, 0.0, 0.0, {"full": refused}, None, queued=waiting)


def orders(text: str, rate: float, until_s: int, **engine: float) -> list[int]:
    """One engine that gets so many requests a second and is never joined by another."""
    made, found = policy(text), []
    for second in range(0, until_s, 15):
        shown = observe_readings(float(second), 1, [reading("a", rate * second, **engine)])
        found.append(made.desired_replicas(replace(shown, gateway_readings=(gateway(rate * second),)))[Role.SERVE])
    return found


def test_wva_queueing_first_two_minutes_order_nothing() -> None:
    found = orders("wva-queueing:itl=0.0115", 5.0, 150)
    assert found[:8] == [1] * 8
    assert found[8] > 1


def test_wva_queueing_replicas_are_arrivals_over_engine_capacity() -> None:
    slow = {"ttft_s": 0.2, "itl_s": 0.03}
    found = orders("wva-queueing:ttft=1,itl=0.02,up=0", 4.0, 240, **slow)
    parameters = initial_parameters(TunerSample(4.0, RequestSizes(1_000.0, 200.0), 200.0, 30.0))
    chain = BirthDeathChain(parameters, RequestSizes(1_000.0, 200.0), SERVE.plant.profile.max_num_seqs, 100)
    assert chain.max_rate_within(1000.0, 20.0) is None  # alpha alone is 27 ms: nothing can be done, so nothing is
    assert set(found) == {1}
    desired = wva_queueing.replicas_for_rate(chain, 4.0, 1000.0, 28.0)
    assert desired is not None
    assert desired > 1
    assert orders("wva-queueing:ttft=1,itl=0.028", 4.0, 240, **slow)[8] == min(desired, 5)  # four more at once


def test_wva_queueing_rejected_and_queued_are_not_arrivals() -> None:
    def desired_replicas_after(**kept: float) -> int:
        made, found = policy("wva-queueing:itl=0.0115"), 1
        for second in range(0, 150, 15):
            share = {key: value * second for key, value in kept.items()}
            shown = observe_readings(float(second), 1, [reading("a", 5.0 * second)])
            found = made.desired_replicas(replace(shown, gateway_readings=(gateway(20.0 * second, **share),)))[
                Role.SERVE
            ]
        return found

    assert desired_replicas_after() > desired_replicas_after(refused=15.0) == desired_replicas_after(waiting=15.0)


def test_wva_queueing_times_with_targets_is_rejected() -> None:
    with pytest.raises(BadInput, match="times goes without targets"):
        registry.parse("wva-queueing:times=4", SERVE)
    free = replace(SERVE, slo=None)
    registry.parse("wva-queueing:times=4", free)
    with pytest.raises(BadInput, match="times goes without targets"):
        registry.parse("wva-queueing:times=4,ttft=1", free)


def test_wva_queueing_two_tiers_are_rejected() -> None:
    with pytest.raises(BadInput, match="prefill and decode apart"):
        registry.parse("wva-queueing", BOTH)
