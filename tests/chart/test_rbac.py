"""Least privilege: what operator and gateway may do is exactly what they do, and nowhere else."""

from __future__ import annotations

import pytest

from plimsoll.controllers import namespace_leases
from plimsoll.controllers.operator import LEASE_NAME
from plimsoll.controllers.reconcile.service_namespaces import CONFIGMAP_NAME
from tests.chart.rendering import NAMESPACE, Object, RenderError, find, of_kind, render

FOLLOW = ("list", "watch")
READ = ("get", *FOLLOW)
OWNED = (*READ, "create", "patch", "delete")

GATEWAY = {
    "inferenceservices.plimsoll.dev": FOLLOW,
    "inferenceserviceadmissions.plimsoll.dev": FOLLOW,
    "endpointslices.discovery.k8s.io": FOLLOW,  # and no pods: who reads them sees their variables and volumes
}
OPERATOR = {
    "inferenceservices.plimsoll.dev": ("get", *FOLLOW),
    "inferenceservices/status.plimsoll.dev": ("patch",),
    "inferenceserviceadmissions.plimsoll.dev": OWNED,
    "inferenceservicecheckpoints.plimsoll.dev": ("list", "create", "patch"),
    "inferenceservices/finalizers.plimsoll.dev": ("update",),
    "deployments.apps": OWNED,
    "deployments/scale.apps": ("get", "patch"),
    "leaderworkersets.leaderworkerset.x-k8s.io": OWNED,
    "leaderworkersets/scale.leaderworkerset.x-k8s.io": ("patch",),
    "statefulsets.apps": ("get",),
    "statefulsets/scale.apps": ("get", "patch"),
    "horizontalpodautoscalers.autoscaling": ("list",),
    "controllerrevisions.apps": (*FOLLOW, "create", "delete"),
    "services": OWNED,
    "serviceaccounts": OWNED,
    "configmaps": OWNED,  # those with the adapters of services
    "poddisruptionbudgets.policy": OWNED,
    "networkpolicies.networking.k8s.io": OWNED,
    "pods": (*FOLLOW, "patch"),
    "events": ("create", "list"),
    "leases.coordination.k8s.io": ("create", "get", "update", "delete"),
}
OPERATOR_EVERYWHERE = OPERATOR | {"customresourcedefinitions.apiextensions.k8s.io": ("list", "watch")}
OPERATOR_AT_HOME = {
    "leases.coordination.k8s.io": ("create", "get", "update"),
    "configmaps": ("get", "patch"),
    "pods": FOLLOW,
}
GATEWAY_AT_HOME = {"pods": FOLLOW}


def allowed(role: Object) -> dict[str, tuple[str, ...]]:
    """resource.group -> verbs."""
    out: dict[str, tuple[str, ...]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                key = f"{resource}.{group}".rstrip(".")
                out[key] = (*out.get(key, ()), *rule["verbs"])
    return out


def subjects(objects: list[Object], kind: str, name: str) -> list[tuple[str, str]]:
    return [(s["namespace"], s["name"]) for o in of_kind(objects, kind, name) for s in o["subjects"]]


def test_rbac_cluster_wide_grants_minimal_rights() -> None:
    objects = render()
    assert allowed(find(objects, "ClusterRole", "plimsoll-operator")) == OPERATOR_EVERYWHERE
    assert allowed(find(objects, "ClusterRole", "plimsoll-gateway")) == GATEWAY
    assert len(of_kind(objects, "Role")) == 2
    for part, rights in (("operator", OPERATOR_AT_HOME), ("gateway", GATEWAY_AT_HOME)):
        own = find(objects, "Role", f"plimsoll-{part}-own")
        assert own["metadata"]["namespace"] == NAMESPACE
        assert allowed(own) == rights
        account = (NAMESPACE, f"plimsoll-{part}")
        assert subjects(objects, "ClusterRoleBinding", f"plimsoll-{part}") == [account]
        assert subjects(objects, "RoleBinding", f"plimsoll-{part}-own") == [account]


def test_rbac_watched_namespaces_need_no_cluster_role() -> None:
    objects = render({"watchNamespaces": ["team-a", "team-b"]})
    assert of_kind(objects, "ClusterRole") == of_kind(objects, "ClusterRoleBinding") == []
    for part, rights in (("operator", OPERATOR), ("gateway", GATEWAY)):
        roles = of_kind(objects, "Role", f"plimsoll-{part}")
        assert {role["metadata"]["namespace"] for role in roles} == {"team-a", "team-b"}
        assert all(allowed(role) == rights for role in roles)
        assert subjects(objects, "RoleBinding", f"plimsoll-{part}") == [(NAMESPACE, f"plimsoll-{part}")] * 2
    assert allowed(find(objects, "Role", "plimsoll-operator-own")) == OPERATOR_AT_HOME
    assert allowed(find(objects, "Role", "plimsoll-gateway-own")) == GATEWAY_AT_HOME


def test_rbac_targets_add_their_scale_alone() -> None:
    workers = {"apiGroup": "leaderworkerset.x-k8s.io", "resources": ["leaderworkersets", "disaggregatedsets"]}
    for values in ({}, {"watchNamespaces": ["team-a"]}):
        objects = render(values | {"targets": {"resources": [workers]}})
        role = next(
            one for one in objects if one["kind"].endswith("Role") and one["metadata"]["name"].endswith("operator")
        )
        granted = {name: verbs for name, verbs in allowed(role).items() if "set" in name and "replica" not in name}
        assert granted == {
            "leaderworkersets.leaderworkerset.x-k8s.io": ("get", *OWNED),
            "disaggregatedsets.leaderworkerset.x-k8s.io": ("get",),
            "leaderworkersets/scale.leaderworkerset.x-k8s.io": ("get", "patch", "patch"),
            "disaggregatedsets/scale.leaderworkerset.x-k8s.io": ("get", "patch"),
        }


@pytest.mark.parametrize(
    "resources", [[{"apiGroup": "*", "resources": ["a"]}], [{"apiGroup": "a", "resources": ["*"]}]]
)
def test_rbac_targets_refuse_wildcards(resources: list[Object]) -> None:
    with pytest.raises(RenderError):
        render({"targets": {"resources": resources}})


@pytest.mark.parametrize("values", [{}, {"watchNamespaces": [NAMESPACE]}])
def test_rbac_grants_no_secrets_and_no_wildcards(values: Object) -> None:
    for role in (o for o in render(values) if o["kind"] in ("Role", "ClusterRole")):
        for rule in role["rules"]:
            words = [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert "secrets" not in words
            assert "*" not in words


@pytest.mark.parametrize("mode", ["Optional", "Required"])
def test_rbac_gateway_reads_secrets_of_its_namespace_for_keys(mode: str) -> None:
    objects = render({"gateway": {"authentication": {"apiKeys": mode}}})
    assert allowed(find(objects, "Role", "plimsoll-gateway-own")) == GATEWAY_AT_HOME | {"secrets": FOLLOW}
    readers = [
        (role["kind"], role["metadata"]["name"])
        for role in objects
        if role["kind"] in ("Role", "ClusterRole") and "secrets" in allowed(role)
    ]
    assert readers == [("Role", "plimsoll-gateway-own")]


def test_rbac_bindings_reference_existing_roles() -> None:
    for objects in (render(), render({"watchNamespaces": ["team-a"]})):
        roles = {(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects}
        for binding in (o for o in objects if o["kind"].endswith("RoleBinding")):
            role = binding["roleRef"]
            assert (role["kind"], binding["metadata"].get("namespace"), role["name"]) in roles


@pytest.mark.parametrize(
    ("kind", "resource", "verbs", "name"),
    [
        ("Lease", "leases", {"get", "update"}, LEASE_NAME),
        ("ConfigMap", "configmaps", {"get", "patch", "create"}, CONFIGMAP_NAME),
    ],
)
def test_rbac_only_release_objects_may_be_changed(kind: str, resource: str, verbs: set[str], name: str) -> None:
    objects = render({}, "--name-template", "llm")
    assert name in {one["metadata"]["name"] for one in of_kind(objects, kind)}
    changing = [
        rule
        for role in of_kind(objects, "Role")
        for rule in role["rules"]
        if rule["resources"] == [resource] and set(rule["verbs"]) & verbs
    ]
    assert [rule["resourceNames"] for rule in changing] == [[name]]


def test_rbac_only_namespace_leases_may_be_changed_elsewhere() -> None:
    rules = find(render(), "ClusterRole", "plimsoll-operator")["rules"]
    changing = [rule for rule in rules if rule["resources"] == ["leases"] and set(rule["verbs"]) != {"create"}]
    assert [rule["resourceNames"] for rule in changing] == [[namespace_leases.LEASE_NAME]]


def test_service_namespaces_are_written_by_operator_only() -> None:
    assert "data" not in find(render(), "ConfigMap", CONFIGMAP_NAME)


def test_rbac_aggregates_view_and_edit_roles() -> None:
    objects = render()
    view, edit = find(objects, "ClusterRole", "plimsoll-view"), find(objects, "ClusterRole", "plimsoll-edit")
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-admin"] == "true"
    assert allowed(view) == {"inferenceservices.plimsoll.dev": READ, "inferenceserviceadmissions.plimsoll.dev": READ}
    assert set(allowed(edit)) == {"inferenceservices.plimsoll.dev"}
    without = render({"rbac": {"aggregate": False}})
    assert {o["metadata"]["name"] for o in of_kind(without, "ClusterRole")} == {"plimsoll-operator", "plimsoll-gateway"}


def test_rbac_roles_can_be_disabled() -> None:
    kinds = {o["kind"] for o in render({"rbac": {"create": False}})}
    assert kinds & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"} == set()


def test_rbac_service_accounts_can_be_external() -> None:
    account = {"create": False, "name": "theirs"}
    objects = render({"operator": {"serviceAccount": account}, "gateway": {"serviceAccount": account}})
    assert of_kind(objects, "ServiceAccount") == []
    assert {o["spec"]["template"]["spec"]["serviceAccountName"] for o in of_kind(objects, "Deployment")} == {"theirs"}
    assert subjects(objects, "ClusterRoleBinding", "plimsoll-operator") == [(NAMESPACE, "theirs")]


def test_values_of_an_earlier_chart_have_default_targets() -> None:
    """As `helm upgrade --reuse-values` renders it, which has the old chart's values alone."""
    assert render({"targets": None}) == render()
    assert render({"targets": {"resources": []}}) != render()
