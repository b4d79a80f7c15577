"""Rights of the chart's roles, and calls of the audit log that use them."""

from __future__ import annotations

from e2e.lib.node import ApiCall
from e2e.lib.rbac_use import ONLY_IN, UNTESTED, Right, accounts, excused, rights, unused
from tests.chart.rendering import ROOT, render

OPERATOR = "system:serviceaccount:plimsoll-system:plimsoll-operator"
GATEWAY = "system:serviceaccount:plimsoll-system:plimsoll-gateway"
USERS = {"operator": OPERATOR, "gateway": GATEWAY}
LEASES = "leases.coordination.k8s.io"


def call(
    verb: str,
    resource: str,
    group: str = "",
    name: str = "x",
    code: int = 200,
    user: str = OPERATOR,
    namespace: str = "a",
) -> ApiCall:
    return ApiCall(0.0, user, verb, resource, namespace, name, code, group)


def test_rights_come_from_rendered_bindings() -> None:
    objects = render()
    assert accounts(objects) == USERS
    found = rights(objects)
    assert Right("gateway", "watch", "endpointslices.discovery.k8s.io") in found
    assert Right("gateway", "watch", "pods") not in found
    assert Right("operator", "patch", "inferenceservices/status.plimsoll.dev") in found
    assert Right("operator", "update", LEASES, "plimsoll-operator", "plimsoll-system") in found
    assert Right("operator", "get", "secrets") not in found


def test_unused_right_is_one_that_no_call_needs() -> None:
    scale = Right("operator", "patch", "deployments/scale.apps")
    assert unused({scale}, [call("patch", "deployments", "apps")], USERS) == [scale]
    assert unused({scale}, [call("patch", "deployments/scale", "apps", user=GATEWAY)], USERS) == [scale]
    assert unused({scale}, [call("patch", "deployments/scale", "")], USERS) == [scale]
    assert unused({scale}, [call("patch", "deployments/scale", "apps")], USERS) == []


def test_unused_right_counts_name_and_namespace() -> None:
    own = Right("operator", "get", LEASES, "plimsoll-operator", "plimsoll-system")
    group = "coordination.k8s.io"
    assert unused({own}, [call("get", "leases", group, "other", namespace="plimsoll-system")], USERS) == [own]
    assert unused({own}, [call("get", "leases", group, "plimsoll-operator")], USERS) == [own]
    used = call("get", "leases", group, "plimsoll-operator", namespace="plimsoll-system")
    assert unused({own}, [used], USERS) == []


def test_apply_that_creates_uses_both_verbs() -> None:
    both = {Right("operator", verb, "services") for verb in ("create", "patch")}
    assert unused(both, [call("patch", "services", code=201)], USERS) == []
    assert unused(both, [call("patch", "services")], USERS) == [Right("operator", "create", "services")]


def test_listed_rights_exist_and_scenarios_too() -> None:
    granted = rights(render())
    assert UNTESTED.keys() <= granted
    for scenario, only in ONLY_IN.items():
        assert (ROOT / "e2e" / "scenarios" / f"test_{scenario}.py").exists()
        assert only <= granted


def test_excused_rights_depend_on_scenarios_of_run() -> None:
    patch = Right("operator", "patch", "pods")
    assert patch in excused([])
    assert patch not in excused(["scaling"])
