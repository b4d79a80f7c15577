"""Light engines that differ from the model: what they announce, what they are, and how many keep the SLO."""

from __future__ import annotations

import json

import pytest

from e2e.lib.mismatched_engines import DRIVER_NAME, MismatchedEngines
from plimsoll.api.v1alpha1 import parse
from plimsoll.core.engine_model.self_benchmark import choose_prior
from plimsoll.core.ports import EngineInfo
from plimsoll.core.types import Unavailable
from plimsoll.sim import profile
from plimsoll.sim.attempt import TraceRequest
from simulated.options import parse_options

REQUESTS = [TraceRequest(0.125 * n, 700, 40) for n in range(240)]
SLOW = MismatchedEngines("slow", 8.0, 0.9, scale=1.4)
HOST = MismatchedEngines("host", 8.0, 0.9, host_s=0.35)
AS_ANNOUNCED = MismatchedEngines("none", 8.0, 0.9)


def test_engine_is_prior_of_its_data_sheet() -> None:
    config = json.loads(SLOW.objects()[0]["data"]["config.json"])
    prior = choose_prior(EngineInfo("simulated", "", DRIVER_NAME, 1, 256, 1, 1, 16, 1, config, None))
    assert not isinstance(prior, Unavailable)
    true = profile.parse(SLOW.profile)
    found = prior[0].base_s, prior[0].prefill_token_s, prior[0].sequence_s, prior[0].cached_token_s
    assert found == (true.coefficients.base, true.coefficients.pretok, true.coefficients.dec, true.coefficients.ctx)
    assert HOST.profile["frontend"] == pytest.approx(true.frontend + 0.35)


def test_arguments_are_known_to_the_engine_simulator() -> None:
    service = parse({**SLOW.objects()[1], "metadata": {"name": "slow", "namespace": "team"}})
    arguments = [arg for arg in service.spec.engine.args if not arg.startswith("--profile=")]
    options = parse_options(["serve", "m", *arguments], {})
    assert options.step_factor == 1.4
    assert options.ignored == ()


def test_mismatched_engines_need_a_larger_constant_fleet() -> None:
    least = AS_ANNOUNCED.smallest_fleet(REQUESTS)
    assert SLOW.smallest_fleet(REQUESTS) > least
    assert HOST.smallest_fleet(REQUESTS) > least
