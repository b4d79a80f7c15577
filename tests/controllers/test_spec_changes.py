"""Every optional part of the spec is added, changed and removed on a running service.

At the end the service must be like one that never had the part: fleet, pod templates, status, conditions, the gateways'
policy and the exported metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from plimsoll.api import crd, labels
from plimsoll.controllers.autoscale.autoscaler import scaling_spec
from plimsoll.core.errors import InvalidSpec
from plimsoll.telemetry import operator_metrics
from tests.controllers.single_service import DELETE, KEY, SingleService
from tests.gateway.kube_objects import build_catalog

Object = dict[str, Any]
Probe = Callable[[SingleService], object]

RATE = 40.0  # requests per second, enough for several replicas
WARM_UP_S, PHASE_S = 25, 12
SLO: Object = {"ttft": "2s", "tpot": "50ms"}
HORIZON: Object = {"horizon": "5s"}  # short stabilization windows
MODEL: Object = {"uri": "hf://example/model"}
SERVE: Object = {"model": MODEL, "slo": SLO, "scaling": HORIZON, "tiers": {"serve": {"maxReplicas": 9}}}
PAIR: Object = {**SERVE, "tiers": {"prefill": {"maxReplicas": 9}, "decode": {"maxReplicas": 9}}}
H200: Object = {"maxReplicas": 9, "pod": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"}}}
TUNED: Object = {
    **SERVE,
    "model": {"uri": "hf://meta-llama/Llama-3.1-8B"},
    "slo": {**SLO, "itl": "150ms"},
    "tiers": {"serve": H200},
}
STORED: Object = {**SERVE, "model": {"uri": "s3://bucket/model"}}
IN_IMAGE: Object = {**SERVE, "model": {"uri": "oci://example.com/model:1"}}
CLASS: Object = {"name": "default"}
BATCH: Object = {"name": "batch", "priority": 5}
POD = "tiers.serve.pod"
HISTORY = ("formerNames", "observedGeneration")  # tell of what was


def template(service: SingleService) -> object:
    return [service.deployment(tier)["spec"]["template"] for tier in service.replicas()]


def strategy(service: SingleService) -> object:
    return service.deployment("serve")["spec"]["strategy"]


def core_spec(service: SingleService) -> object:
    """What the pure core gets of the spec."""
    parsed = service.cache.parsed(service.object)
    assert not isinstance(parsed, InvalidSpec), parsed.problems
    return scaling_spec(parsed, service.now_s)


def replicas(service: SingleService) -> object:
    return service.replicas()


def request_limits(service: SingleService) -> object:
    """What gateways allow a single request, by class."""
    parsed = service.cache.parsed(service.object)
    assert not isinstance(parsed, InvalidSpec), parsed.problems
    return parsed.request_limits


def isolation(service: SingleService) -> object:
    """Whether gateways keep the tenants' prefixes apart."""
    return build_catalog([service.object], ()).services["/".join(KEY)].isolates_tenants


def policy(service: SingleService) -> object:
    """What gateways do, apart from the limits that the operator publishes."""
    return service.policy, service.limits is not None


def conditions(service: SingleService) -> object:
    return service.conditions


def field(name: str) -> Probe:
    return lambda service: service.status.get(name)


def scaling_inactive(service: SingleService) -> object:
    return service.conditions.get("ScalingInactive"), service.replicas()


def sized(service: SingleService) -> object:
    """The core's spec, and whether the prefill tier is above its lower bound."""
    return core_spec(service), service.replicas()["prefill"] > 1


def downgrade_to(name: str) -> Object:
    return {"whenFull": "Downgrade", "fallback": {"name": name}}


class Case(NamedTuple):
    """path: of the part in the spec. first, second: two values. probe: what must follow each of them."""

    path: str
    first: object
    second: object
    probe: Probe = template
    base: Object = SERVE


CASES = [
    Case("model.name", "other", "third", lambda service: service.status["modelNames"][0]),
    Case("model.revision", "v1", "v2"),
    Case("model.secretRef", {"name": "a"}, {"name": "b"}),
    Case("model.digest", f"sha256:{'a' * 64}", f"sha256:{'b' * 64}", base=STORED),
    Case("model.path", "a", "b", base=IN_IMAGE),
    Case("model.cache", {"sizeLimit": "1Gi"}, {"claimName": "weights"}),
    Case("adapters", [{"name": "a", "uri": "hf://x/y"}], [{"name": "a", "uri": "pvc://claim/path"}]),
    Case("engine.lora", {"maxLoras": 2}, {"maxLoras": 4}),
    Case("engine", {"args": ["--seed", "1"]}, {"runtime": "simulated"}),
    Case("engine.runtime", "simulated", "vllm"),
    Case("engine.image", "example.com/a:1", "example.com/a:2"),
    Case("engine.version", "0.31.0", "0.30.0"),
    Case("engine.args", ["--seed", "1"], ["--seed", "2"]),
    Case("engine.env", [{"name": "A", "value": "1"}], [{"name": "A", "value": "2"}]),
    Case("engine.drainTimeout", "30s", "60s"),
    Case("engine.tuning", "Off", "Auto", template, TUNED),
    Case("engine.speculative", {"method": "ngram"}, {"method": "ngram", "tokens": 5}, template),
    Case("kvOffload", {"memory": "4Gi"}, {"memory": "8Gi"}, template),
    Case("engine.prefixCache", "PerTenant", "Shared", isolation),
    Case("slo", SLO, {"ttft": "2s", "tpot": "18ms"}, replicas, {**SERVE, "slo": None}),
    Case("slo.ttft", "2s", "3s", core_spec, {**SERVE, "slo": {"tpot": "50ms"}}),
    Case("slo.ttft", "2s", "300ms", sized, {**PAIR, "slo": {"tpot": "50ms"}}),
    Case("slo.tpot", "50ms", "18ms", core_spec, {**PAIR, "slo": {"ttft": "2s"}}),
    Case("slo.ttftPerKToken", "1s", "2s", core_spec),
    Case("slo.tpot", "50ms", "18ms", core_spec, {**SERVE, "slo": {"ttft": "2s"}}),
    Case("slo.e2e", "9s", "8s", core_spec),
    Case("slo.itl", "100ms", "200ms", core_spec),
    Case("slo.percentile", 50, 90, core_spec),
    Case("tiers.serve.minReplicas", 7, 8, replicas),
    Case("tiers.serve.maxReplicas", 2, 3, replicas, {**SERVE, "tiers": {"serve": {}}}),
    Case("tiers.serve.gpus", 2, 4),
    Case("tiers.serve.gpuResource", "example.com/gpu", "example.com/card"),
    Case("tiers.serve.rollout", {"maxSurge": 2}, {"maxSurge": 0, "maxUnavailable": 1}, strategy),
    Case("tiers.serve.pod", {"runtimeClassName": "a"}, {"runtimeClassName": "b"}),
    Case(f"{POD}.nodeSelector", {"pool": "a"}, {"pool": "b", "disk": "ssd"}),
    Case(f"{POD}.tolerations", [{"operator": "Exists"}], [{"key": "gpu", "operator": "Exists"}]),
    Case(f"{POD}.affinity", {"podAffinity": {}}, {"nodeAffinity": {}}),
    Case(f"{POD}.topologySpreadConstraints", [{"topologyKey": "a"}], []),
    Case(f"{POD}.sharedMemory", "1Gi", "2Gi"),
    Case(f"{POD}.ipcLock", True, False),
    Case(f"{POD}.runtimeClassName", "a", "b"),
    Case(f"{POD}.priorityClassName", "a", "b"),
    Case(f"{POD}.schedulerName", "a", "b"),
    Case(f"{POD}.imagePullSecrets", [{"name": "a"}], [{"name": "b"}]),
    Case(f"{POD}.serviceAccountName", "a", "b"),
    Case(f"{POD}.annotations", {"a": "1"}, {"a": "2"}),
    Case(f"{POD}.labels", {"a": "1"}, {"b": "2"}),
    Case(f"{POD}.resources", {"limits": {"memory": "4Gi"}}, {"requests": {"cpu": "3"}}),
    Case(f"{POD}.volumes", [{"name": "a", "emptyDir": {}}], [{"name": "b", "emptyDir": {}}]),
    Case(
        f"{POD}.volumeMounts", [{"name": "a", "mountPath": "/a"}], [{"name": "a", "mountPath": "/b"}], template,
        {**SERVE, "tiers": {"serve": {"maxReplicas": 9, "pod": {"volumes": [{"name": "a", "emptyDir": {}}]}}}},
    ),
    Case(
        "scaling", {"warmReplicas": 2, **HORIZON}, {"warmReplicas": 4, **HORIZON}, replicas,
        {**SERVE, "scaling": None},
    ),
    Case("scaling.mode", "Recommend", "Off", scaling_inactive),
    Case("scaling.paused", True, False, scaling_inactive),
    Case("scaling.headroom", "40%", "60%", replicas),
    Case("scaling.sloMissCost", 0, 100_000, core_spec),
    Case("scaling.warmReplicas", 2, 4, replicas),
    Case("scaling.scaleUp", {"replicas": 1, "per": "1h"}, {"replicas": 2, "per": "1h"}, core_spec),
    Case("scaling.scaleDown", {"replicas": 1, "per": "10s"}, {"replicas": 2, "per": "10s"}, core_spec),
    Case("scaling.prefillPerDecode", {"min": 2}, {"min": 1, "max": 1}, core_spec, PAIR),
    Case("scaling.horizon", "7s", "9s", core_spec, {**SERVE, "scaling": {"warmReplicas": 1}}),
    Case(
        "scaling.schedule",
        [{"from": "00:00", "until": "24:00", "minReplicas": 6}],
        [{"from": "00:00", "until": "24:00", "maxReplicas": 2}],
        replicas,
    ),
    Case("admission", {"classes": [{"name": "a"}, {"name": "b"}]}, {"classes": [{"name": "b"}]}, policy),
    Case("admission.whenFull", "Shed", "Queue", policy),
    Case("admission", downgrade_to("nobody"), downgrade_to("nothing"), lambda one: (policy(one), conditions(one))),
    Case("admission.classes", [CLASS, BATCH], [CLASS, {**BATCH, "priority": 9}], policy),
    Case("admission.tenants", [{"name": "a", "weight": 2}], [{"name": "a", "requestsPerSecond": 1}], policy),
    Case("admission.maxQueued", 10, 20, policy),
    Case("requestLimits", {"maxOutputTokens": 100}, {"idleTimeout": "5s"}, request_limits),
    Case("requestLimits.maxOutputTokens", 100, 200, request_limits),
    Case("requestLimits.maxDuration", "10s", "20s", request_limits),
    Case("requestLimits.idleTimeout", "5s", "10s", request_limits),
    Case("cost", {"gpuHour": "2.5"}, {"gpuHour": "5", "currency": "EUR"}, field("cost")),
]  # fmt: skip


def running(base: Object) -> SingleService:
    return SingleService(RATE, **{name: part for name, part in base.items() if part is not None})


def outcome(service: SingleService) -> Object:
    """All that the spec decides about the service, without figures and without what tells of the past."""
    status = {name: part for name, part in service.status.items() if name not in HISTORY}
    series = {
        (sample.name, *sorted(sample.labels.items()))
        for family in operator_metrics.OPERATOR.collect()
        for sample in family.samples
        if sample.labels.get("service") == "/".join(KEY)
    }
    kinds = ("Deployment", "Service", "ServiceAccount", "PodDisruptionBudget", "NetworkPolicy", "ControllerRevision")
    kinds += (labels.ADMISSION_KIND,)
    return {
        "replicas": service.replicas(),
        "template": template(service),
        "strategy": [service.deployment(tier)["spec"]["strategy"] for tier in service.replicas()],
        "core": core_spec(service),
        "gateway": policy(service),
        "conditions": service.conditions,
        "status": sorted(status),
        "tiers": {name: (sorted(tier), tier["summary"].partition("/")[2]) for name, tier in status["tiers"].items()},
        "slo": sorted(status.get("slo", {})),
        "cost": status.get("cost", {}).keys(),
        "name": status["modelNames"][0],
        "classes": (service.limits or {}).get("classes"),
        "series": series,
        "objects": sorted(
            (kind, child["metadata"]["name"]) for kind in kinds for child in service.cache.children(kind, KEY)
        ),
    }


async def test_prefill_tier_without_target_keeps_its_minimum() -> None:
    """Nothing in the SLO depends on it: it is not frozen at a count of earlier, and the decision says why."""
    service = running(PAIR)
    try:
        await service.run(WARM_UP_S)
        before = service.replicas()
        assert min(before.values()) > 1
        service.edit("slo.ttft", DELETE)
        await service.run(3)
        assert service.replicas() == {"prefill": 1, "decode": before["decode"]}
        assert service.conditions.keys() & {"ScalingInactive", "SLOInfeasible"} == set()
        document = service.scaler.explain(KEY)
        assert document is not None
        steps = document["decisions"][0]["tiers"]["prefill"]["steps"]
        assert any("spec.slo.ttft is not set" in step["reason"] for step in steps), "as long as it is so"
        [event] = [one for one in service.kube.events if one["reason"] == "ScaledDown"]
        assert "spec.slo.ttft is not set" in event["message"]
        service.edit("tiers.prefill.minReplicas", 3)
        await service.run(3)
        assert service.replicas()["prefill"] == 3
        service.edit("scaling.prefillPerDecode", {"min": 2})
        await service.run(3)
        assert service.replicas()["prefill"] == 2 * before["decode"]
    finally:
        await service.delete()


_never_set: dict[str, Object] = {}


async def never_set(base: Object) -> Object:
    """The outcome of the same service under the same load without the part."""
    key = repr(base)
    if key not in _never_set:
        service = running(base)
        await service.run(WARM_UP_S + 3 * PHASE_S)
        _never_set[key] = outcome(service)
        await service.delete()
    return _never_set[key]


@pytest.mark.parametrize("case", CASES, ids=[case.path for case in CASES])
async def test_spec_part_added_changed_removed_leaves_nothing(case: Case) -> None:
    expected = await never_set(case.base)
    service = running(case.base)
    try:
        await walk(service, case)
        for _ in range(10):  # a stabilization window is two start-ups at most
            if outcome(service) == expected:
                break
            await service.run(60)
        assert outcome(service) == expected
    finally:
        await service.delete()


async def walk(service: SingleService, case: Case) -> None:
    """Add, change and remove the part, and check that the service follows the first two."""
    await service.run(WARM_UP_S)
    absent, added = case.probe(service), first_missing(service.object["spec"], case.path)
    observed = []
    for value in (case.first, case.second):
        service.edit(case.path, value)
        await service.run(PHASE_S)
        assert "Stalled" not in service.conditions, service.status["conditions"]
        observed.append(case.probe(service))
    # The second value of a switch is its default.
    is_default = case.second in ("vllm", False, "Queue", "Shared") or case.path == "engine.tuning"
    assert observed[0] not in (absent, observed[1]), "it had no effect"
    assert (observed[1] == absent) is is_default, "its change had no effect"
    service.edit(added, DELETE)
    await service.run(PHASE_S)


def first_missing(spec: Object, path: str) -> str:
    """The outermost part of the path that the spec lacks."""
    part, names = spec, path.split(".")
    for depth, name in enumerate(names):
        if name not in part:
            return ".".join(names[: depth + 1])
        part = part[name]
    raise AssertionError(f"spec.{path} is set already")


def optional_parts() -> Iterator[str]:
    """The optional fields of the spec down to the blocks' own fields; both shapes of tiers are equal."""
    spec = crd.schema()["properties"]["spec"]
    for name, node in spec["properties"].items():
        if name == "tiers":
            tier = node["properties"]["serve"]
            yield from (f"tiers.serve.{part}" for part in tier["properties"])
            yield from (f"{POD}.{part}" for part in tier["properties"]["pod"]["properties"])
            continue
        if name not in spec.get("required", ()):
            yield name
        yield from (f"{name}.{part}" for part in node.get("properties", {}) if part not in node.get("required", ()))


def test_cases_cover_every_optional_part_of_spec() -> None:
    # Not allowed without another part; or another model, which is another service.
    own_server = {f"engine.{part}" for part in ("command", "port", "healthPath", "metrics")}
    # targets stand in place of tiers: `test_targets`, `test_target_pairs`. LeaderWorkerSets: `test_leader_worker_sets`.
    several_nodes = {f"tiers.serve.{part}" for part in ("nodes", "exclusiveTopology")}
    # What only gateways read: `test_prefill_policy`.
    in_gateways = {"whenPrefillUnavailable"}
    targets = {"targets", "targets.serve", "targets.prefill", "targets.decode"}
    in_other_cases = {"cost.currency", "admission.fallback", "model.task", *targets, *own_server, *several_nodes}
    assert set(optional_parts()) - {case.path for case in CASES} == in_other_cases | in_gateways
