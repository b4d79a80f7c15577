"""Replicas that were counted by a target for gaps, and what the gaps then are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from plimsoll.core import knee
from plimsoll.core.gaps import SHARE, gap_s
from plimsoll.core.knee import Constraint, Tier
from plimsoll.core.latency import EngineLimits, StepModel
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.sizing import Sizing, size
from plimsoll.core.slo import Slo
from plimsoll.core.workload import from_samples
from plimsoll.sim import profile
from plimsoll.sim.policies.base import Static
from plimsoll.sim.profile import Profile
from tests.sim import lab


@dataclass(frozen=True)
class Mix:
    """A profile whose steps are linear, its chunk budget, and mean tokens of prompts and answers."""

    name: str
    budget: int
    prompt: float
    output: float

    @property
    def hardware(self) -> Profile:
        own = profile.load(self.name)
        return replace(own, hot=None, hinge_sequences=0, hinge_dec=0.0, budget=self.budget, max_num_seqs=1024)

    def tier(self, itl_s: float | None = None) -> Tier:
        own, c = self.hardware, self.hardware.coefficients
        seen = lab.Load(3000, 1.0, self.prompt, self.output, seed=9).draw()
        mix = from_samples([one[1] for one in seen], [0.0] * len(seen), [one[2] for one in seen])
        model = StepModel(c.base, c.anypre, c.pretok, c.preattn, c.dec, c.ctx)
        limits = EngineLimits(own.max_num_seqs, own.kv_tokens, own.budget)
        return Tier(Role.SERVE, model, mix, limits, Slo(0.95, 4.0, tpot_s=0.2, itl_s=itl_s))

    def simulated_s(self, rate_per_s: float, replicas: int, requests: int = 4000) -> float:
        """The 99th percentile of all gaps of a fleet of engines that are alike, no gate before it."""
        asked = lab.Load(requests, rate_per_s, self.prompt, self.output, seed=4).asked()
        policy, count = Static({Role.SERVE: replicas}, gated=False), {Role.SERVE: replicas}
        found = lab.simulate(asked, policy, hardware=lab.plant(self.hardware, spread=0.0), initial=count).world.gaps
        return found.quantile_s(SHARE) or 0.0


CHAT, CHUNKED = Mix("h200-8b", 8192, 1200.0, 220.0), Mix("h200-8b", 2048, 1200.0, 220.0)
SHORT, LARGE = Mix("h200-8b", 8192, 230.0, 440.0), Mix("h200-70b-capped", 2048, 1200.0, 220.0)


@pytest.mark.parametrize(("mix", "itl_s"), [(CHAT, 0.03), (CHAT, 0.05), (CHUNKED, 0.035), (SHORT, 0.015), (LARGE, 0.2)])
def test_size_by_itl_target_meets_it_and_more_load_misses_it(mix: Mix, itl_s: float) -> None:
    limit = float(knee.profile(mix.tier(itl_s)).gap_limit_per_s[0])
    rate = 5.9 * limit
    sized = size(mix.tier(itl_s), rate)
    assert isinstance(sized, Sizing)
    assert (sized.replicas, sized.constraint) == (6, Constraint.ITL)
    assert mix.simulated_s(rate, 6) <= itl_s
    assert mix.simulated_s(1.3 * rate, 6) > itl_s


def test_engine_kv_post_time_falls_into_one_inter_token_gap() -> None:
    found = {}
    for leap in (True, False):
        engine = lab.engine(CHAT.hardware, leap=leap)
        lab.run(engine, lab.Load(300, 12.0).draw(), remote=True)
        told = engine.scraped("p", 1e6, 1e6).gaps_s
        assert told is not None
        found[leap] = told.counts, engine.meters.gaps.quantile_s(SHARE)
    assert found[True][0] == found[False][0]
    assert found[True][1] == pytest.approx(found[False][1], rel=0.01)
    assert (found[True][1] or 0.0) > 2 * CHAT.hardware.coefficients.base


@pytest.mark.parametrize("mix", [CHAT, CHUNKED, SHORT, LARGE])
@pytest.mark.parametrize("load", [0.1, 0.25, 0.4, 0.6])
def test_inter_token_law_matches_simulator(mix: Mix, load: float) -> None:
    """Within 8 % of the gap, at a load within 8 %: where just 1 % of the steps have a prompt the one is steep."""
    own, most = knee.gaps(mix.tier())
    found = mix.simulated_s(load * most, 1, 2000)
    assert 0.92 * gap_s(own, 0.92 * load * most) <= found <= 1.08 * gap_s(own, 1.08 * load * most)
