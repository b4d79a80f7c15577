"""The light engine's own histogram of gaps between tokens, beside the law that sizes by it."""

from __future__ import annotations

import math

import pytest

from plimsoll.core.engine_model.inter_token import InterTokenLatency
from plimsoll.core.engine_model.step_time import StepModel, serve_tier
from plimsoll.core.workload import from_samples
from tests.engine_image.simulated.core_harness import FITTED_STEPS, make_core, make_profile
from tests.sim.sim_harness import PoissonLoad

EDGES_S = (0.01, 0.025, 0.05, 0.075)  # of vLLM's histogram


@pytest.mark.parametrize(("budget", "per_s"), [(8192, 4.0), (8192, 12.0), (2048, 12.0), (1024, 8.0)])
def test_itl_histogram_matches_inter_token_law(budget: int, per_s: float) -> None:
    """Within an eighth of that share."""
    light = make_core(
        make_profile(
            FITTED_STEPS, kv_tokens=919_824, max_num_seqs=1024, budget=budget, block_size=16, max_model_len=40_960
        )
    )
    load = PoissonLoad(1500, per_s, seed=3).draw()
    for at_s, prompt, output in load:
        light.add(at_s, prompt, output)
    light.run()
    observed = light.meters.histograms["inter_token_latency_seconds"]
    model = StepModel(
        FITTED_STEPS.base,
        FITTED_STEPS.anypre,
        FITTED_STEPS.pretok,
        FITTED_STEPS.preattn,
        FITTED_STEPS.dec,
        FITTED_STEPS.ctx,
    )
    mix = from_samples([one[1] for one in load], [0.0] * len(load), [one[2] for one in load])
    law = InterTokenLatency(serve_tier(model, mix), budget)
    rate = len(load) / load[-1][0]
    for edge in EDGES_S:
        long = 1 - sum(observed.counts[: observed.edges.index(edge) + 1]) / math.fsum(observed.counts)
        assert law.share_above(rate, edge) == pytest.approx(long, rel=0.125, abs=1e-4)
