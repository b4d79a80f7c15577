"""The plant where it reduces to queues that are solved.

Problem: an engine is no queue that a textbook solves; but a profile can be chosen with which it is one.
Idea: a step that costs the same whatever is in it makes each slot a server, and a request's tokens its service time. A
step that costs by the sequence is processor sharing. Means are compared with the theory's by 99 % confidence intervals
from batches of one long run. What an engine adds to the model is known and small: two steps are in flight, and a slot
stands empty for one.

Sources: Erlang's C (M/M/c); Kleinrock, Queueing Systems I and II (GI/M/1 6.4, M/G/1 5.6, processor sharing 4.4);
Kiefer and Wolfowitz 1955, the recursion that gives every wait of G/G/c from its arrivals and service times.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

import numpy as np

from bench.trust.check import SimulatorCheck
from bench.trust.engine_driver import EventLoop
from plimsoll.core.capacity.queueing import erlang_c
from plimsoll.sim import profile
from plimsoll.sim.engine.engine_metrics import EngineMetrics
from plimsoll.sim.engine.kv_cache import KvCache
from plimsoll.sim.engine.kv_link import KvLink
from plimsoll.sim.engine.sequence import EngineSequence
from plimsoll.sim.engine.simulated_engine import SimulatedEngine
from plimsoll.sim.engine.step_timing import StepTiming
from plimsoll.sim.profile import HardwareProfile, StepCoefficients

BATCH_MEANS: Final = 20
T_QUANTILE_99: Final = 2.861  # Student's t, 19 degrees of freedom, two-sided 99 %
STEP_S: Final = 1e-3

Draw = Callable[[Random], float]


def exponential(mean: float) -> Draw:
    return lambda random: random.expovariate(1.0 / mean)


def erlang2(mean: float) -> Draw:
    """Squared coefficient of variation 1/2."""
    return lambda random: random.gammavariate(2.0, mean / 2.0)


def hyper(mean: float) -> Draw:
    """Two exponentials with equal shares of the mean, squared coefficient of variation 4."""
    share = (1.0 + math.sqrt(3.0 / 5.0)) / 2.0
    return lambda random: random.expovariate(2.0 * (share if random.random() < share else 1.0 - share) / mean)


def constant(mean: float) -> Draw:
    return lambda _: mean


def interval(values: Sequence[float]) -> tuple[float, float]:
    """99 % confidence interval of the mean from batch means, the first tenth left out."""
    stationary = values[len(values) // 10 :]
    size = len(stationary) // BATCH_MEANS
    means = [math.fsum(stationary[n * size : (n + 1) * size]) / size for n in range(BATCH_MEANS)]
    mean = math.fsum(means) / BATCH_MEANS
    spread = math.sqrt(math.fsum((batch - mean) ** 2 for batch in means) / (BATCH_MEANS - 1) / BATCH_MEANS)
    return mean - T_QUANTILE_99 * spread, mean + T_QUANTILE_99 * spread


@dataclass(frozen=True)
class QueueRun:
    """Requests of one prompt token: when each came, its tokens, its wait for the first one and its stay."""

    at_s: Sequence[float]
    tokens: Sequence[int]
    waits_s: Sequence[float]
    stays_s: Sequence[float]


def simulate_queue(
    profile: HardwareProfile, requests: int, draw_interarrival: Draw, draw_tokens: Draw, seed: int
) -> QueueRun:
    random, now_s = Random(seed), 0.0
    at_s, sequences = [], []
    for number in range(requests):
        now_s += draw_interarrival(random)
        at_s.append(now_s)
        sequences.append(EngineSequence(number, 1, max(1, round(draw_tokens(random)))))
    engine = SimulatedEngine(
        profile.max_num_seqs,
        profile.budget,
        KvCache(profile.kv_tokens // profile.block_size, profile.block_size),
        StepTiming(profile),
        KvLink(profile.layers, profile.block_size, profile.kv_bytes_per_token),
        EngineMetrics(profile.max_model_len),
    )
    loop = EventLoop([engine], lambda _, __: None)
    for sequence, moment in zip(sequences, at_s, strict=True):
        loop.schedule(moment, lambda when_s, sequence=sequence: engine.add(sequence, when_s))  # type: ignore[misc]
    loop.run()
    waits = [(sequence.first_token_s or math.nan) - sequence.arrived_s for sequence in sequences]
    return QueueRun(
        at_s,
        [sequence.output_tokens for sequence in sequences],
        waits,
        [(sequence.last_token_s or math.nan) - sequence.arrived_s for sequence in sequences],
    )


def slot_profile(count: int) -> HardwareProfile:
    """Each of so many sequences is served at one rate, whoever else is."""
    coefficients = StepCoefficients(STEP_S, 0.0, 0.0, 0.0, 0.0, 0.0)
    return replace(
        profile.load("h200-8b"), coefficients=coefficients, hot=None, hinge_dec=0.0, max_num_seqs=count, kv_tokens=10**9
    )


def processor_sharing_profile(token_s: float) -> HardwareProfile:
    """Each of n sequences goes on at a n-th of the rate."""
    coefficients = StepCoefficients(1e-12, 0.0, token_s, 0.0, token_s, 0.0)
    return replace(
        profile.load("h200-8b"), coefficients=coefficients, hot=None, hinge_dec=0.0, max_num_seqs=4096, kv_tokens=10**9
    )


def service_s(tokens: float, servers: int) -> float:
    """How long a slot is taken: a step a token, and, where others go on meanwhile, one for which it stands empty."""
    return (tokens + (servers > 1)) * STEP_S


def kiefer_wolfowitz(at_s: Sequence[float], services_s: Sequence[float], servers: int) -> list[float]:
    """The wait of each in a queue of that many servers, first come first served."""
    free_s = [0.0] * servers
    waits = []
    for moment, service_s in zip(at_s, services_s, strict=True):
        begins_s = max(moment, free_s[0])
        heapq.heapreplace(free_s, begins_s + service_s)
        waits.append(begins_s - moment)
    return waits


def erlang_wait_s(queue_run: QueueRun, servers: int) -> float:
    """M/M/c, at the rate and with the mean service that came."""
    rate = len(queue_run.at_s) / queue_run.at_s[-1]
    mean_s = math.fsum(service_s(tokens, servers) for tokens in queue_run.tokens) / len(queue_run.tokens)
    return float(erlang_c(rate * mean_s, servers)) * mean_s / (servers * (1 - rate * mean_s / servers))


def pollaczek_wait_s(queue_run: QueueRun) -> float:
    """M/G/1: rate E[S^2] / 2 (1 - rho)."""
    rate = len(queue_run.at_s) / queue_run.at_s[-1]
    services = [service_s(tokens, 1) for tokens in queue_run.tokens]
    mean_s = math.fsum(services) / len(services)
    return rate * math.fsum(tokens * tokens for tokens in services) / len(services) / 2.0 / (1.0 - rate * mean_s)


def gi_m_1_wait_s(transform: Callable[[float], float], mean_s: float) -> float:
    """GI/M/1: sigma mean / (1 - sigma), sigma = A*((1 - sigma) / mean), A* the transform of the time between two."""
    sigma = 0.5
    for _ in range(10_000):
        sigma = transform((1.0 - sigma) / mean_s)
    return sigma * mean_s / (1.0 - sigma)


def checks(requests: int = 40_000) -> list[SimulatorCheck]:
    results, mean = [], 400.0
    service_time_s = service_s(mean, 1)
    for servers, rho in ((1, 0.5), (4, 0.8), (16, 0.85)):
        queue_run = simulate_queue(
            slot_profile(servers), requests, exponential(service_time_s / rho / servers), exponential(mean), servers
        )
        results.append(
            _mean_check(
                f"M/M/{servers}, rho {rho}: mean wait", queue_run.waits_s, erlang_wait_s(queue_run, servers), 3 * STEP_S
            )
        )
    for name, draw in (("D", constant), ("E2", erlang2), ("H2", hyper)):
        queue_run = simulate_queue(slot_profile(1), requests, exponential(service_time_s / 0.7), draw(mean), 5)
        results.append(
            _mean_check(f"M/{name}/1, rho 0.7: mean wait", queue_run.waits_s, pollaczek_wait_s(queue_run), 3 * STEP_S)
        )
    interarrival_s = service_time_s / 0.7
    for name, draw, transform in (
        ("D", constant, lambda s: math.exp(-s * interarrival_s)),
        ("E2", erlang2, lambda s: (2.0 / (2.0 + s * interarrival_s)) ** 2),
        ("H2", hyper, hyper_transform(interarrival_s)),
    ):
        queue_run = simulate_queue(slot_profile(1), requests, draw(interarrival_s), exponential(mean), 6)
        results.append(
            _mean_check(
                f"{name}/M/1, rho 0.7: mean wait",
                queue_run.waits_s,
                gi_m_1_wait_s(transform, service_time_s),
                3 * STEP_S,
            )
        )
    for name, gaps, sizes, servers in (
        ("H2/H2", hyper, hyper, 4),
        ("E2/H2", erlang2, hyper, 16),
        ("D/E2", constant, erlang2, 8),
    ):
        queue_run = simulate_queue(
            slot_profile(servers), requests, gaps(service_time_s / 0.9 / servers), sizes(mean), 7
        )
        results.append(sample_path(f"{name}/{servers}, rho 0.9: worst wait of {requests:,}", queue_run, servers))
    token_s = 1e-4
    for name, sizes in (("D", constant), ("M", exponential), ("H2", hyper)):
        queue_run = simulate_queue(
            processor_sharing_profile(token_s), requests, exponential(100 * token_s / 0.7), sizes(100.0), 3
        )
        size = math.fsum(queue_run.tokens) / len(queue_run.tokens)
        rho = len(queue_run.at_s) / queue_run.at_s[-1] * size * token_s
        round_s = 2 * token_s / (1 - rho)  # the rest of one step and the whole of the next
        expected_s = size * token_s / (1 - rho)
        results.append(
            _mean_check(f"M/{name}/1 processor sharing, rho 0.7: mean stay", queue_run.stays_s, expected_s, round_s)
        )
    return results


def hyper_transform(mean: float) -> Callable[[float], float]:
    share = (1.0 + math.sqrt(3.0 / 5.0)) / 2.0
    parts = [(p, 2.0 * p / mean) for p in (share, 1.0 - share)]
    return lambda s: sum(p * rate / (rate + s) for p, rate in parts)


def sample_path(name: str, queue_run: QueueRun, servers: int) -> SimulatorCheck:
    """The engine's waits against the recursion's, each request by itself; its first token is its own, a step."""
    expected_waits = kiefer_wolfowitz(queue_run.at_s, [service_s(one, servers) for one in queue_run.tokens], servers)
    worst_s = float(np.max(np.abs(np.array(queue_run.waits_s) - STEP_S - np.array(expected_waits))))
    return SimulatorCheck(
        "theory", f"{name}, steps off", worst_s / STEP_S, 3.0, "", {"mean_wait_s": float(np.mean(expected_waits))}
    )


def _mean_check(name: str, values: Sequence[float], expected_s: float, own_s: float) -> SimulatorCheck:
    """Half-widths of the interval by which the theory's mean is off the run's; own_s: what an engine adds at most."""
    low_s, high_s = interval(values)
    middle_s, half_s = (low_s + high_s) / 2, (high_s - low_s) / 2
    off_s = max(0.0, low_s - own_s - expected_s, expected_s - high_s)
    detail = {"theory_s": expected_s, "low_s": low_s, "high_s": high_s, "engine_adds_s": own_s}
    detail["half_width_percent"] = 100 * half_s / middle_s
    detail["engine_adds_percent"] = 100 * own_s / middle_s
    deviation = 1.0 + off_s / half_s if off_s else abs(expected_s - middle_s) / (half_s + own_s)
    return SimulatorCheck("theory", name, math.copysign(deviation, middle_s - expected_s), 1.0, "CI", detail)
