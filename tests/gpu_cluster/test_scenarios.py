"""Scenarios as the operator and the figures see them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from bench.hardware import traces
from e2e.gpu import adapters, rival, run, scenarios, settings
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.core.types import Unavailable
from plimsoll.resources import engine_pod, engine_tuning
from tests import builders


@pytest.mark.parametrize("name", sorted(scenarios.SCENARIOS))
def test_each_manifest_is_valid(name: str) -> None:
    scenario = scenarios.SCENARIOS[name]
    service = InferenceService.model_validate(scenarios.manifest(scenario))
    for tier in (getattr(service.spec.tiers, name) for name in scenario.tiers):
        assert tier.max_replicas == scenario.high


def test_a_rival_has_one_replica_of_lower_priority() -> None:
    first = scenarios.manifest(scenarios.SCENARIOS["rivals"])
    priorities = {item["metadata"]["name"]: item["value"] for item in rival.classes()["items"]}
    tiers = [InferenceService.model_validate(one).spec.tiers.serve for one in (first, rival.manifest_of(first))]
    assert [tier.max_replicas for tier in tiers if tier] == [2, 1]
    names = [str(tier.pod.priority_class_name) for tier in tiers if tier]
    assert priorities[names[0]] > priorities[names[1]]


def test_acts_lie_within_the_load() -> None:
    for scenario in scenarios.SCENARIOS.values():
        assert all(0 < act.at_s < scenario.seconds for act in scenario.acts)
        assert all(act.what in run._ACTS for act in scenario.acts)


def test_a_trace_is_the_same_each_time_and_follows_its_phases(tmp_path: Path) -> None:
    scenario = scenarios.SCENARIOS["step"]
    digests = {scenarios.write_trace(scenario, 10.0, tmp_path / f"{n}.csv") for n in range(2)}
    assert len(digests) == 1
    rows = scenarios.trace(scenario, 10.0)
    (share, seconds), *_ = scenario.phases
    assert sum(row.at_s < seconds for row in rows) == round(share * 10.0 * seconds)
    assert [row.at_s for row in rows] == sorted(row.at_s for row in rows)


def test_a_trace_after_another_scenario_keeps_its_gaps(tmp_path: Path) -> None:
    step, later = scenarios.SCENARIOS["step"], scenarios.SCENARIOS["trace"]
    scenarios.write_trace(later, 10.0, tmp_path / "both.csv", step)
    rows, own = traces.read(tmp_path / "both.csv"), scenarios.trace(later, 10.0)
    assert len(rows) == len(scenarios.trace(step, 10.0)) + len(own)
    assert rows[-len(own)].at_s == pytest.approx(step.seconds + scenarios.PAUSE_S + own[0].at_s)


def test_recorded_trace_has_its_times_and_the_load_of_its_phases() -> None:
    scenario = scenarios.SCENARIOS["trace"]
    rows = scenarios.trace(scenario, 10.0)
    assert rows == scenarios.trace(scenario, 20.0)
    assert [row.at_s for row in rows] == sorted(row.at_s for row in rows)
    (share, seconds), (other, _) = scenario.phases
    rate = sum(row.at_s < seconds for row in rows) / seconds
    assert rate / share == pytest.approx(
        sum(row.at_s >= seconds for row in rows) / (scenario.seconds - seconds) / other, rel=0.1
    )


def test_kills_of_both_engines_leave_none() -> None:
    assert scenarios.seconds_without_engine(scenarios.SCENARIOS["kills"], 90.0) == 30.0 + 30.0
    assert scenarios.seconds_without_engine(scenarios.SCENARIOS["kills"], 50.0) == 0.0
    assert scenarios.seconds_without_engine(scenarios.SCENARIOS["kill"], 50.0) == 50.0


def test_a_shortened_scenario_keeps_its_slo() -> None:
    found = run.shortened(scenarios.SCENARIOS["trace"], 0.1)
    assert found.seconds == pytest.approx(30.0)
    assert found.ttft_s == scenarios.SCENARIOS["trace"].ttft_s


def _row(at_s: float, first_s: float | None, last_s: float | None, *, status: int = 200) -> dict[str, Any]:
    ok = status == 200 and last_s is not None
    return {
        "at_s": at_s, "late_s": 0.0, "first_s": first_s, "last_s": last_s, "output": 11, "ok": ok, "status": status,
    }  # fmt: skip


def test_figures_count_what_was_offered() -> None:
    rows = [
        _row(0.0, 0.2, 0.5),
        _row(1.0, 0.6, 0.9),  # the first token too late
        _row(2.0, 0.2, 0.8),  # tokens too slow
        _row(3.0, 0.2, None),  # cut
        _row(12.0, None, None, status=429),
    ]
    found = run.figures(rows, scenarios.Scenario("twice", 1, 1, ((1.0, 10.0), (1.0, 10.0))))
    assert found["all"]["offered"] == 5
    assert found["all"]["within"] == 1
    assert found["all"]["statuses"] == {"200": 3, "cut": 1, "429": 1}
    assert found["1: 1 for 10 s"]["statuses"] == {"429": 1}


def test_figures_use_the_targets_of_the_scenario() -> None:
    scenario = scenarios.Scenario("slow", 1, 1, ((1.0, 10.0),), ttft_s=1.0, tpot_s=0.1)
    assert run.figures([_row(1.0, 0.6, 0.9), _row(2.0, 0.2, 0.8)], scenario)["all"]["within"] == 2


def test_a_load_beside_begins_when_it_should() -> None:
    tuning, lora = scenarios.SCENARIOS["tuning"], scenarios.SCENARIOS["lora"]
    assert tuning.beside
    assert scenarios.trace_beside(tuning.beside, tuning, 10.0) == scenarios.trace(tuning, 10.0)
    assert lora.beside
    assert min(row.at_s for row in scenarios.trace_beside(lora.beside, lora, 10.0)) >= lora.beside.begin_s
    assert run.shortened(lora, 0.1).beside == scenarios.Beside(lora.beside.names, 0.25, 3.5)


def test_the_service_beside_differs_in_its_arguments_only() -> None:
    first = scenarios.manifest(scenarios.SCENARIOS["tuning"])
    other = scenarios.without_tuning(first)
    assert (first["spec"]["engine"]["tuning"], other["spec"]["engine"]["tuning"]) == ("Auto", "Off")
    assert first["spec"] | {"engine": None} == other["spec"] | {"engine": None}
    arguments = engine_tuning.tuned_arguments(
        service := InferenceService.model_validate(first), "serve", service.spec.tiers.serve, (), "nvidia.com/gpu"
    )
    assert not isinstance(arguments, Unavailable)
    assert arguments[0].args in itertools.pairwise(scenarios.compiled(["tuning"])[1])


def test_added_adapters_need_no_other_pods() -> None:
    scenario = scenarios.SCENARIOS["lora"]
    first, later = (scenarios.manifest(scenario, version=version) for version in (0, 1))
    assert [one["name"] for one in later["spec"].pop("adapters")] == list(scenarios.ADAPTERS)
    del first["spec"]["adapters"]
    assert first == later


def test_a_made_adapter_has_the_shapes_of_its_model(tmp_path: Path) -> None:
    model = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32}
    adapters.write(tmp_path / "a", model | {"num_hidden_layers": 1}, 0)
    raw = (tmp_path / "a" / "adapter_model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + size])
    assert [one["shape"] for one in table.values()] == [[8, 32], [32, 8], [8, 32], [16, 8]]
    assert max(one["data_offsets"][1] for one in table.values()) == len(raw) - 8 - size


@pytest.mark.parametrize("name", ["overload", "starts", "lora"])
def test_filled_caches_are_those_of_the_operators_pods(name: str) -> None:
    service = InferenceService.model_validate(scenarios.manifest(scenarios.SCENARIOS[name]))
    pod = engine_pod.pod_template(service, "serve", builders.PLATFORM)
    (container,) = pod["spec"]["containers"]
    made = {entry["name"]: entry.get("value") for entry in container["env"]}
    expected = scenarios.cache_variables()
    assert {name: made[name] for name in expected} == expected
    assert made["VLLM_ENABLE_STARTUP_PLAN"] == "1"
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    folder = {one["name"]: one.get("hostPath") for one in pod["spec"]["volumes"]}[mounts[str(scenarios.CACHE_MOUNT)]]
    assert folder == {"path": str(settings.CACHES), "type": "Directory"}


def test_caches_are_filled_for_the_scenarios_that_run() -> None:
    (common,) = scenarios.compiled(["overload", "starts"])
    assert scenarios.compiled(["tuning"]) == [common, (*common, "--max-num-batched-tokens", "1024")]
    (lora,) = scenarios.compiled(["lora"])
    assert "--enable-lora" in lora
    assert scenarios.compiled(["overload", "lora"]) == [common, lora]
