"""A service with targets in the simulator: demand and step times come from the engines' metrics alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll.api.v1alpha1 import InferenceService, parse
from plimsoll.cli.main import main
from plimsoll.core.autoscaling.inputs import TierSnapshot
from plimsoll.core.autoscaling.startup_time import StartingPod
from plimsoll.core.ports import ServiceReading
from plimsoll.core.types import Role
from plimsoll.sim.adopted_engines import AdoptedEngines, known_phases
from plimsoll.sim.attempt import Attempt
from plimsoll.sim.engine_reading import scrape
from plimsoll.sim.operator import SimulatedOperator
from plimsoll.sim.policies.base import PlimsollPolicy
from plimsoll.sim.run_config import RunConfig
from plimsoll.sim.simulator import Simulator
from tests.api.manifests import adopted, adopted_pair
from tests.sim.sim_harness import H200, PoissonLoad, make_engine, make_plant, run, serve_manifest, simulate

SLO = {"ttft": "2s", "tpot": "50ms"}
PLANT = make_plant(scale=4.0)
MANY = [(0.1 * n, 400, 40) for n in range(30)]


def target_manifest(**spec: Any) -> InferenceService:
    return parse(adopted(**{"spec.slo": SLO, "spec.targets.serve.maxReplicas": 8, "spec.scaling.mode": "Auto", **spec}))


class SilentGateways(SimulatedOperator):
    """An operator that no gateway tells anything."""

    def observe_gateway(self, gateway: str, at_s: float, reading: ServiceReading) -> None:
        """Nothing."""


def test_fleet_is_sized_without_gateways_and_nothing_is_rejected() -> None:
    requests = PoissonLoad(600, 6.0).requests_drawn()
    config = RunConfig({Role.SERVE: 1}, end_s=requests[-1].at_s)
    world = Simulator(target_manifest(), PLANT, PlimsollPolicy(), config, lambda _: None)
    world.operator = SilentGateways(target_manifest())
    world.run(requests)
    tiers = {"serve": {"minReplicas": 1, "maxReplicas": 8}}
    beside = simulate(requests, of=serve_manifest(slo=SLO, tiers=tiers), hardware=PLANT).world
    last, last_beside = ([row[2] for row in one.log.replicas if row[0] < config.end_s][-1] for one in (world, beside))
    assert last > 1
    assert abs(last - last_beside) <= 1
    assert world.operator.published is None
    assert beside.operator is not None
    assert beside.operator.published is not None


def test_pair_is_sized_by_engines_alone_and_keeps_its_slo() -> None:
    """Requests are counted at prefill engines: decode engines see none that waits for its prefill."""
    edits = {f"spec.targets.{role}.maxReplicas": 8 for role in ("prefill", "decode")}
    pair = parse(adopted_pair(**{"spec.slo": SLO, "spec.scaling.mode": "Auto", **edits}))
    requests = PoissonLoad(600, 6.0).requests_drawn()
    config = RunConfig({Role.PREFILL: 1, Role.DECODE: 1}, end_s=requests[-1].at_s)
    attempts: list[Attempt] = []
    world = Simulator(pair, PLANT, PlimsollPolicy(), config, attempts.append)
    world.operator = SilentGateways(pair)
    world.run(requests)
    within = sum(
        one.ttft_s is not None and one.ttft_s <= 2.0 and (one.tpot_s is None or one.tpot_s <= 0.05) for one in attempts
    )
    assert within >= 0.99 * len(requests)
    assert max(row[2] for row in world.log.replicas if row[1] == Role.PREFILL) > 1
    assert world.operator.published is None


def test_target_with_a_port_has_admission_control_of_gateways() -> None:
    requests = PoissonLoad(600, 6.0).requests_drawn()
    world = simulate(requests, of=target_manifest(**{"spec.targets.serve.port": 8000}), hardware=PLANT).world
    assert world.operator is not None
    assert world.operator.published is not None
    assert any(gateway.admission is not None for gateway in world.gateways)


def test_operator_knows_what_metrics_and_kubernetes_report() -> None:
    engine, engines = make_engine(H200), AdoptedEngines()
    reported = make_plant().engine_info(Role.SERVE)
    starting = (StartingPod("b", 0.0, "pull", 1.0), StartingPod("c", 0.0, "import", 2.0))
    tier = TierSnapshot(1, 1, starting, reported)
    assert reported.self_benchmark is not None
    assert engines.known(tier, ["a"]).engine_info is None
    engines.observe(Role.SERVE, scrape(engine, "a", 0.0, 0.0))
    known = engines.known(tier, ["a"])
    assert known.engine_info is not None
    assert (known.engine_info.self_benchmark, known.engine_info.accelerator) == (None, "unknown")
    assert known.engine_info.kv_tokens == reported.kv_tokens
    assert known.starting == (starting[0], StartingPod("c", 0.0, "launch"))
    run(engine, MANY)
    engines.observe(Role.SERVE, scrape(engine, "a", 10.0, 10.0))
    info = engines.known(tier, ["a"]).engine_info
    assert info is not None
    assert info.self_benchmark is not None
    assert info.self_benchmark.is_observed


def test_completed_start_has_the_phases_of_a_pod() -> None:
    phases = (("schedule", 1.0), ("pull", 2.0), ("launch", 3.0), ("import", 4.0), ("warmup", 5.0))
    assert known_phases(phases) == (("schedule", 1.0), ("pull", 2.0), ("engine", 12.0))


def test_simulate_takes_targets_and_refuses_admission_control(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, trace = tmp_path / "service.yaml", tmp_path / "trace.csv"
    manifest.write_text(yaml.safe_dump(adopted()))
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *(f"{n},100,10" for n in range(30))]))
    command = ["simulate", f"--service={manifest}", f"--trace={trace}", "--hardware=h200-8b", "--output=json"]
    assert main([*command, "--policy=plimsoll", "--policy=static:2"]) == 0
    assert [one["offered"] for one in json.loads(capsys.readouterr().out)] == [30, 30]
    assert main([*command, "--policy=static:2,gated=1"]) == 1
    assert (
        "--policy static:2,gated=1: needs admission control, which targets without a port do not have: set gated=0"
        in (capsys.readouterr().err)
    )
    manifest.write_text(yaml.safe_dump(adopted(**{"spec.targets.serve.port": 8000})))
    assert main([*command, "--policy=static:2,gated=1"]) == 0
