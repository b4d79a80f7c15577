"""Which rights of the chart's roles the audit log shows in use, and which were never used.

A right that no scenario uses is either not needed, or not tested. A right that only a few scenarios use is listed in
`ONLY_IN` with them; one that no scenario can use is listed in `UNTESTED` with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from e2e.lib.kube import Object
from e2e.lib.node import ApiCall


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """One verb on one resource. name: "" for every object. namespace: "" for the whole cluster."""

    component: str  # operator or gateway
    verb: str
    resource: str  # RESOURCE[/SUBRESOURCE][.GROUP]
    name: str = ""
    namespace: str = ""

    def __str__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return f"{self.component}: {self.verb} {self.resource}{name}" + f" in {self.namespace}" * bool(self.namespace)

    def covers(self, call: ApiCall, account: str) -> bool:
        """Whether a call of this account needs the right. An apply that creates an object needs `create` too."""
        verbs = {call.verb, "create"} if call.verb == "patch" and call.code == 201 else {call.verb}
        return (
            call.user == account
            and self.verb in verbs
            and self.resource == f"{call.resource}.{call.group}".rstrip(".")
            and self.name in ("", call.name)
            and self.namespace in ("", call.namespace)
        )


OWNED = ("deployments.apps", "services", "serviceaccounts", "poddisruptionbudgets.policy")
_SYSTEM = "plimsoll-system"

# Rights that only these scenarios use: they may be unused in a run without them.
ONLY_IN: dict[str, frozenset[Right]] = {
    "adopt": frozenset(
        {
            Right("operator", "get", "deployments/scale.apps"),
            Right("operator", "list", "horizontalpodautoscalers.autoscaling"),
        }
    ),
    "condition_messages": frozenset({Right("operator", "list", "events")}),
    "scaling": frozenset({Right("operator", "patch", "deployments/scale.apps"), Right("operator", "patch", "pods")}),
    "lora": frozenset(Right("operator", verb, "configmaps") for verb in ("get", "create", "patch", "delete")),
    "rolling_update": frozenset({Right("operator", "delete", "controllerrevisions.apps")}),
    "uninstall": frozenset({Right("operator", "delete", "leases.coordination.k8s.io", "plimsoll-release")}),
}

NO_SETS = "only for tiers of several nodes; the scenarios' cluster has no LeaderWorkerSet controller"
# Rights that no scenario uses, and why the chart grants them.
UNTESTED: dict[Right, str] = {
    Right("operator", "update", "inferenceservices/finalizers.plimsoll.dev"): "only OpenShift's admission asks for it",
    Right("operator", "create", "leases.coordination.k8s.io", namespace=_SYSTEM): "only if somebody deletes the lease",
    Right("operator", "delete", "networkpolicies.networking.k8s.io"): "only after networkPolicy.enabled becomes false",
    Right("operator", "delete", "inferenceserviceadmissions.plimsoll.dev"): "only if a target loses its port",
    **{
        Right("operator", verb, resource): "only for a target of this kind; the scenarios adopt a Deployment"
        for verb, resource in (
            ("get", "statefulsets.apps"),
            ("get", "statefulsets/scale.apps"),
            ("patch", "statefulsets/scale.apps"),
        )
    },
    **{
        Right("operator", verb, "leaderworkersets.leaderworkerset.x-k8s.io"): NO_SETS
        for verb in ("get", "list", "watch", "create", "patch", "delete")
    },
    Right("operator", "patch", "leaderworkersets/scale.leaderworkerset.x-k8s.io"): NO_SETS,
    **{
        Right("operator", "delete", kind): "only objects that an earlier release made, and this one not"
        for kind in OWNED
    },
}


def component_of(account: str) -> str:
    """The component that a service account of the chart belongs to: operator or gateway."""
    return account.rpartition("-")[2]


def accounts(objects: Iterable[Object]) -> dict[str, str]:
    """The user name of each component's service account, from the bindings of the rendered chart."""
    subjects = [s for o in objects if o["kind"].endswith("Binding") for s in o.get("subjects", [])]
    return {component_of(s["name"]): f"system:serviceaccount:{s['namespace']}:{s['name']}" for s in subjects}


def rights(objects: Iterable[Object]) -> set[Right]:
    """The rights of operator and gateway in the rendered chart."""
    every = list(objects)
    roles = {
        (o["kind"], o["metadata"].get("namespace", ""), o["metadata"]["name"]): o["rules"]
        for o in every
        if o["kind"] in ("Role", "ClusterRole")
    }
    found: set[Right] = set()
    for binding in every:
        if not binding["kind"].endswith("Binding") or "subjects" not in binding:
            continue
        namespace, role = binding["metadata"].get("namespace", ""), binding["roleRef"]
        rules = roles[role["kind"], namespace, role["name"]]
        for subject in binding["subjects"]:
            found |= {
                Right(component_of(subject["name"]), verb, f"{resource}.{group}".rstrip("."), name, namespace)
                for rule in rules
                for group in rule["apiGroups"]
                for resource in rule["resources"]
                for verb in rule["verbs"]
                for name in rule.get("resourceNames", [""])
            }
    return found


def unused(granted: Iterable[Right], calls: Iterable[ApiCall], users: dict[str, str]) -> list[Right]:
    """The rights that no call needed. users: as `accounts` returns them."""
    distinct = {(c.user, c.verb, c.resource, c.group, c.namespace, c.name, c.code): c for c in calls}.values()
    return sorted(
        right for right in granted if not any(right.covers(call, users[right.component]) for call in distinct)
    )


def excused(scenarios: Iterable[str]) -> set[Right]:
    """The rights that may be unused in a run of these scenarios."""
    played = set(scenarios)
    return {right for name, only in ONLY_IN.items() if name not in played for right in only} | UNTESTED.keys()
