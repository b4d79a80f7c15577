"""Another chunk on simulated engines: one that measurements predict well, and one that they do not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from plimsoll.core.autoscaling.retuning_state import RetuningState
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.engine_model.inter_token import ITL_SHARE
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel
from plimsoll.core.planning import retuning
from plimsoll.core.planning.retuning import DAY_S, Minute
from plimsoll.core.planning.workloads import lognormal_workload
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.units import MINUTE_S
from plimsoll.sim import profile
from plimsoll.sim.profile import HardwareProfile
from tests.sim import sim_harness

START_S = 1.8e9
LINEAR = replace(profile.load("h200-8b"), hot=None, hinge_sequences=0, hinge_dec=0.0, max_num_seqs=1024)
MINUTES = 4  # simulated of each chunk; days are made of them


@dataclass
class Fleet:
    """One engine at a constant rate. real: how it behaves, and `LINEAR` is what the operator has measured."""

    slo: Slo
    rate_per_s: float
    prompt: float
    output: float
    real: HardwareProfile = LINEAR
    seen: dict[int, list[bool]] = field(default_factory=dict)

    def tier(self, chunk: int) -> TierSpec:
        c, mix = LINEAR.coefficients, lognormal_workload(self.prompt, self.output)
        model = StepModel(c.base, c.anypre, c.pretok, c.preattn, c.dec, c.ctx)
        return TierSpec(Role.SERVE, model, mix, EngineLimits(1024, LINEAR.kv_tokens, chunk), self.slo)

    def minutes(self, chunk: int) -> list[bool]:
        """Which of the simulated minutes are within the SLO, with this chunk."""
        if chunk not in self.seen:
            engine = sim_harness.make_engine(replace(self.real, budget=chunk))
            count = round(self.rate_per_s * MINUTE_S * MINUTES)
            load = sim_harness.PoissonLoad(count, self.rate_per_s, self.prompt, self.output, seed=4).draw()
            ended = sim_harness.run(engine, load)
            itl_s = engine.metrics.itl.quantile_s(ITL_SHARE) or 0.0
            itl_met = self.slo.itl_s is None or itl_s <= self.slo.itl_s
            at = np.array([at_s for at_s, _, _ in load]) // MINUTE_S
            met = np.array([self._is_met(one, at_s) for one, (at_s, _, _) in zip(ended, load, strict=True)])
            shares = [met[at == minute].mean() for minute in range(1, MINUTES) if (at == minute).any()]
            self.seen[chunk] = [bool(itl_met and share >= self.slo.share) for share in shares]
        return self.seen[chunk]

    def _is_met(self, one: object, at_s: float) -> bool:
        first_s, last_s = one.first_token_s, one.last_token_s  # type: ignore[attr-defined]
        if first_s is None or last_s is None or first_s - at_s > (self.slo.ttft_s or np.inf):
            return False
        tpot_s = (last_s - first_s) / max(1, one.output_tokens - 1)  # type: ignore[attr-defined]
        return self.slo.tpot_s is None or tpot_s <= self.slo.tpot_s

    def run(self, days: float) -> tuple[RetuningState, list[int]]:
        """The state after some days with this load, and the chunks that engines had, in order."""
        state, deployed, chunks, tiers = RetuningState(), 0, [8192], {}
        for count in range(round(days * DAY_S / MINUTE_S)):
            chunk = deployed or 8192
            met = self.minutes(chunk)
            tier = tiers.setdefault(chunk, self.tier(chunk))
            minute = Minute("chat-serve-1", deployed, True, self.rate_per_s, met[count % len(met)], tier)
            state = retuning.update(state, minute, START_S + count * MINUTE_S)
            if state.wanted is not None and state.wanted != deployed:
                deployed = state.wanted
                chunks.append(deployed or 8192)
        return state, chunks


@pytest.fixture(autouse=True)
def _predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant load has constant predictions."""
    known: dict[object, list[retuning.Prediction]] = {}
    predict = retuning.predict_goodputs

    def once(tier: TierSpec, chunks: tuple[int, ...], factor: float = 1.0) -> list[retuning.Prediction]:
        key = tier.limits, chunks, factor
        return known.setdefault(key, known.get(key) or predict(tier, chunks, factor))

    monkeypatch.setattr(retuning, "predict_goodputs", once)


def test_smaller_chunk_brings_simulated_engines_within_slo() -> None:
    fleet = Fleet(Slo(0.95, 0.5, tpot_s=0.03, itl_s=0.04), 10.0, 1200.0, 220.0)
    state, chunks = fleet.run(2.5)
    assert chunks == [8192, 1024]
    assert not any(fleet.minutes(8192))
    assert all(fleet.minutes(1024))
    assert state.before == ()


def test_chunk_that_real_steps_do_not_carry_is_undone() -> None:
    """Each step with a prompt takes longer than the model knows, so six small chunks cost more than a large one."""
    c = LINEAR.coefficients
    real = replace(LINEAR, coefficients=replace(c, anypre=c.anypre + 0.025, pretok=c.pretok / 8, preattn=c.preattn / 8))
    fleet = Fleet(Slo(0.95, 1.0, tpot_s=0.03, itl_s=0.05), 3.5, 6000.0, 150.0, real)
    state, chunks = fleet.run(3.0)
    assert chunks == [8192, 1024, 8192]
    assert [one.chunk for one in state.refused] == [1024]
    assert "% before at the same load" in state.reason
