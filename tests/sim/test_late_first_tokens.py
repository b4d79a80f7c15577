"""First tokens near their target: what shows a slow host is not forgotten, and the model expects as many late ones as
several engines behind a gateway have.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plimsoll.core.autoscaling.scaling_decision import TierDecision
from plimsoll.core.autoscaling.ttft_offset import late_shares
from plimsoll.core.capacity.sizing import Sizing, size_tier
from plimsoll.core.capacity.tier_model import TierSpec, build_profile
from plimsoll.core.engine_model import roofline
from plimsoll.core.engine_model.step_time import EngineLimits
from plimsoll.core.planning.known_models import KNOWN_CONFIGS
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import from_samples
from plimsoll.sim import profile
from plimsoll.sim.attempt import Attempt, TraceRequest
from tests.sim.sim_harness import PoissonLoad, make_plant, serve_manifest, simulate


def test_standby_replica_stays_while_first_tokens_are_late() -> None:
    """It is ordered in the first minute, before late first tokens correct the model, and is not ordered twice."""
    slow_host = replace(profile.load("h200-8b-hot"), frontend=0.107)
    of = serve_manifest(slo={"ttft": "200ms", "tpot": "50ms"}, tiers={"serve": {"minReplicas": 1, "maxReplicas": 8}})
    requests = PoissonLoad(4000, 10.0, output=220.0).requests_drawn()
    run = simulate(requests, of=of, hardware=make_plant(slow_host, start_s=60.0))
    ordered = [
        one.replicas
        for at_s, _, _, one in run.world.log.changes
        if isinstance(one, TierDecision) and at_s < requests[-1].at_s
    ]
    assert ordered[0] == 2
    assert min(ordered) == 2


L4_8B = roofline.prior(roofline.model_shape(KNOWN_CONFIGS["Llama-3.1-8B"]), roofline.ACCELERATORS["L4"])
PROMPT, OUTPUT, RATE_PER_S, HOST_S = 700, 40, 8.0, 0.35
TPOT_S, SLO_SHARE = 0.25, 0.95


def l4_tier(ttft_s: float) -> TierSpec:
    """Engines whose prefill takes two steps of a batch of one; all requests are the same."""
    workload = from_samples(np.array([float(PROMPT)]), np.zeros(1), np.array([float(OUTPUT)]))
    return TierSpec(Role.SERVE, L4_8B, workload, EngineLimits(256, 43_312, 2048), Slo(SLO_SHARE, ttft_s, 0.0, TPOT_S))


def fixed_load(seconds: float, seed: int) -> list[TraceRequest]:
    at_s = np.cumsum(np.random.default_rng(seed).exponential(1.0 / RATE_PER_S, int(2 * RATE_PER_S * seconds)))
    return [TraceRequest(float(one), PROMPT, OUTPUT) for one in at_s[at_s < seconds]]


def constant_fleet(replicas: int, host_s: float, ttft: str) -> list[Attempt]:
    """What the requests of four minutes met on so many engines behind gateways."""
    c = L4_8B
    engine = profile.parse(
        {"base": c.base_s, "anypre": c.any_prefill_s, "pretok": c.prefill_token_s, "preattn": c.prefill_pair_s,
         "dec": c.sequence_s, "ctx": c.cached_token_s, "kv_tokens": 43_312, "kv_bytes_per_token": 131_072, "layers": 32,
         "budget": 2048, "max_model_len": 8192, "frontend": 0.003 + host_s}
    )  # fmt: skip
    tiers = {"serve": {"minReplicas": replicas, "maxReplicas": replicas}}
    of = serve_manifest(slo={"ttft": ttft, "tpot": f"{1e3 * TPOT_S:g}ms"}, tiers=tiers)
    return simulate(fixed_load(240.0, 3), of=of, hardware=make_plant(engine, spread=0.0), gateways=2).attempts


@pytest.mark.parametrize("replicas", [3, 6])
def test_model_expects_as_many_late_first_tokens(replicas: int) -> None:
    """Targets of 1.5 and 1.75 times the shortest TTFT; replicas taken at random would have twice as many late."""
    ttft_s = [one.ttft_s for one in constant_fleet(replicas, 0.0, "10s") if one.ttft_s is not None]
    for target_s in (0.42, 0.49):
        late = sum(one > target_s for one in ttft_s) / len(ttft_s)
        profile_at = build_profile(l4_tier(target_s))
        predicted = float(late_shares(profile_at, RATE_PER_S / replicas, replicas, np.zeros(1))[0])
        at_random = float(late_shares(profile_at, RATE_PER_S / replicas, 1, np.zeros(1))[0])
        assert 0.7 * late - 0.005 < predicted < 1.5 * late + 0.01 < at_random


def test_tier_near_the_shortest_ttft_has_one_more_at_most() -> None:
    """A host that adds 350 ms, TTFT 800 ms: three engines miss the SLO, so four are the fewest."""
    sizing = size_tier(replace(l4_tier(0.8), ttft_outside_s=HOST_S), RATE_PER_S)
    assert isinstance(sizing, Sizing)
    assert sizing.replicas <= 5
    shares = {}
    for replicas in (3, sizing.replicas):
        attempts = [one for one in constant_fleet(replicas, HOST_S, "800ms") if one.attempt == 1]
        shares[replicas] = sum(one.ttft_s is not None and one.ttft_s <= 0.8 for one in attempts) / len(attempts)
    assert shares[3] < SLO_SHARE <= shares[sizing.replicas]
