"""Each control signal alone, on simulated engines under too much load: the tier that it concerns grows, and no other.

Gateways are silent to the operator, engines export one metric, and neither demand nor request lengths are known.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.core.ports import EngineReading, ServiceReading
from plimsoll.core.types import Role
from plimsoll.sim.operator import SimulatedOperator
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies.base import PlimsollPolicy
from plimsoll.sim.run_config import RunConfig
from plimsoll.sim.simulator import Simulator
from tests.sim.sim_harness import H200, PoissonLoad, make_plant, pd_manifest, serve_manifest

SECONDS = 90
ALONE, PAIR = serve_manifest(), pd_manifest()
LITTLE_KV = make_plant(replace(H200, kv_tokens=40_000))
SLOW = make_plant(scale=4.0)
CHAT = PoissonLoad(6 * SECONDS, 6.0)
LONG_OUTPUTS = PoissonLoad(6 * SECONDS, 6.0, output=800.0)
LONG_PROMPTS = PoissonLoad(6 * SECONDS, 6.0, prompt=6000.0, output=20.0)
FEW_SLOTS = make_plant(replace(H200, max_num_seqs=8))


class OneSignal(SimulatedOperator):
    """An operator that gets one metric of the engines."""

    def __init__(self, service: InferenceService, signal: str) -> None:
        super().__init__(service)
        self._signal = signal

    def observe_engine(self, role: Role, reading: EngineReading) -> None:
        heard = EngineReading(reading.pod, reading.at_s, reading.instance_id)
        super().observe_engine(role, replace(heard, **{self._signal: getattr(reading, self._signal)}))

    def observe_gateway(self, gateway: str, at_s: float, reading: ServiceReading) -> None:
        """Gateways are silent."""


def most_desired(service: InferenceService, plant: Plant, signal: str, load: PoissonLoad) -> dict[Role, int]:
    """The most replicas that each tier was to have; each starts with one."""
    tiers = {Role(name): 1 for name, _ in service.spec.tiers.items()}
    requests = load.requests_drawn()
    world = Simulator(service, plant, PlimsollPolicy(), RunConfig(tiers, end_s=SECONDS, tail_s=0.0), lambda _: None)
    world.operator = OneSignal(service, signal)
    world.run(requests)
    return {role: max(row[2] for row in world.log.replicas if row[1] is role) for role in tiers}


@pytest.mark.parametrize(
    ("signal", "service", "plant", "load", "grows"),
    [
        ("waiting", ALONE, FEW_SLOTS, CHAT, Role.SERVE),
        ("waiting", PAIR, FEW_SLOTS, CHAT, Role.DECODE),
        ("kv_used", ALONE, LITTLE_KV, LONG_OUTPUTS, Role.SERVE),
        ("kv_used", PAIR, LITTLE_KV, PoissonLoad(3 * SECONDS, 3.0, output=800.0), Role.DECODE),
        ("preemptions", ALONE, LITTLE_KV, LONG_OUTPUTS, Role.SERVE),
        ("tpot_s", ALONE, SLOW, LONG_OUTPUTS, Role.SERVE),
        ("tpot_s", PAIR, SLOW, LONG_OUTPUTS, Role.DECODE),
        ("ttft_s", PAIR, SLOW, LONG_PROMPTS, Role.PREFILL),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_signal_grows_its_tier(
    signal: str, service: InferenceService, plant: Plant, load: PoissonLoad, grows: Role
) -> None:
    most = most_desired(service, plant, signal, load)
    assert most.pop(grows) > 1
    assert all(replicas == 1 for replicas in most.values())
