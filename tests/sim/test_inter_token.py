"""Replicas that were counted by a target for gaps, and what the gaps then are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from plimsoll.core.capacity import tier_model
from plimsoll.core.capacity.sizing import Sizing, size_tier
from plimsoll.core.capacity.tier_model import Constraint, TierSpec
from plimsoll.core.engine_model.inter_token import ITL_SHARE, itl_quantile_s
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import from_samples
from plimsoll.sim import profile
from plimsoll.sim.engine_reading import scrape
from plimsoll.sim.policies.base import StaticPolicy
from plimsoll.sim.profile import HardwareProfile
from tests.sim import sim_harness


@dataclass(frozen=True)
class Mix:
    """A profile whose steps are linear, its chunk budget, and mean tokens of prompts and answers."""

    name: str
    budget: int
    prompt: float
    output: float

    @property
    def hardware(self) -> HardwareProfile:
        own = profile.load(self.name)
        return replace(own, hot=None, hinge_sequences=0, hinge_dec=0.0, budget=self.budget, max_num_seqs=1024)

    def tier(self, itl_s: float | None = None) -> TierSpec:
        own, c = self.hardware, self.hardware.coefficients
        observed = sim_harness.PoissonLoad(3000, 1.0, self.prompt, self.output, seed=9).draw()
        mix = from_samples([one[1] for one in observed], [0.0] * len(observed), [one[2] for one in observed])
        model = StepModel(c.base, c.anypre, c.pretok, c.preattn, c.dec, c.ctx)
        limits = EngineLimits(own.max_num_seqs, own.kv_tokens, own.budget)
        return TierSpec(Role.SERVE, model, mix, limits, Slo(0.95, 4.0, tpot_s=0.2, itl_s=itl_s))

    def simulated_s(self, rate_per_s: float, replicas: int, requests: int = 4000) -> float:
        """The 99th percentile of all gaps of a fleet of engines that are alike, no gate before it."""
        trace_requests = sim_harness.PoissonLoad(
            requests, rate_per_s, self.prompt, self.output, seed=4
        ).requests_drawn()
        policy, count = StaticPolicy({Role.SERVE: replicas}, runs_operator=False), {Role.SERVE: replicas}
        found = sim_harness.simulate(
            trace_requests, policy, hardware=sim_harness.make_plant(self.hardware, spread=0.0), initial=count
        ).world.itl
        return found.quantile_s(ITL_SHARE) or 0.0


CHAT, CHUNKED = Mix("h200-8b", 8192, 1200.0, 220.0), Mix("h200-8b", 2048, 1200.0, 220.0)
SHORT, LARGE = Mix("h200-8b", 8192, 230.0, 440.0), Mix("h200-70b-capped", 2048, 1200.0, 220.0)


@pytest.mark.parametrize(("mix", "itl_s"), [(CHAT, 0.03), (CHAT, 0.05), (CHUNKED, 0.035), (SHORT, 0.015), (LARGE, 0.2)])
def test_size_by_itl_target_meets_it_and_more_load_misses_it(mix: Mix, itl_s: float) -> None:
    limit = float(tier_model.build_profile(mix.tier(itl_s)).itl_limit_per_s[0])
    rate = 5.9 * limit
    sized = size_tier(mix.tier(itl_s), rate)
    assert isinstance(sized, Sizing)
    assert (sized.replicas, sized.constraint) == (6, Constraint.ITL)
    assert mix.simulated_s(rate, 6) <= itl_s
    assert mix.simulated_s(1.3 * rate, 6) > itl_s


def test_engine_kv_post_time_falls_into_one_inter_token_gap() -> None:
    found = {}
    for leap in (True, False):
        engine = sim_harness.make_engine(CHAT.hardware, can_skip=leap)
        sim_harness.run(engine, sim_harness.PoissonLoad(300, 12.0).draw(), remote=True)
        reported = scrape(engine, "p", 1e6, 1e6).itl_s
        assert reported is not None
        found[leap] = reported.counts, engine.metrics.itl.quantile_s(ITL_SHARE)
    assert found[True][0] == found[False][0]
    assert found[True][1] == pytest.approx(found[False][1], rel=0.01)
    assert (found[True][1] or 0.0) > 2 * CHAT.hardware.coefficients.base


@pytest.mark.parametrize("mix", [CHAT, CHUNKED, SHORT, LARGE])
@pytest.mark.parametrize("load", [0.1, 0.25, 0.4, 0.6])
def test_inter_token_law_matches_simulator(mix: Mix, load: float) -> None:
    """Within 8 % of the gap, at a load within 8 %: where just 1 % of the steps have a prompt the one is steep."""
    own, most = tier_model.inter_token_latency(mix.tier())
    found = mix.simulated_s(load * most, 1, 2000)
    assert 0.92 * itl_quantile_s(own, 0.92 * load * most) <= found <= 1.08 * itl_quantile_s(own, 1.08 * load * most)
