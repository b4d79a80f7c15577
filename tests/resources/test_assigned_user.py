"""Engine pods where the platform assigns users, as OpenShift's default security context constraint does.

The constraint is written as a ValidatingAdmissionPolicy, which a real API server enforces.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from plimsoll.adapters.kube_client import KubeClient
from plimsoll.cli.render import render_manifest
from plimsoll.core.errors import ClusterError
from plimsoll.resources.platform_config import PlatformConfig
from tests import builders
from tests.apiserver import ApiServer

pytestmark = pytest.mark.api

Object = dict[str, Any]

NAMESPACE = "assigned-users"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
BINDINGS = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
FIRST, LAST = 1000660000, 1000669999
EXPRESSIONS = (
    "object.spec.containers.all(c, !has(c.securityContext) || !has(c.securityContext.runAsUser)"
    f" || (c.securityContext.runAsUser >= {FIRST} && c.securityContext.runAsUser <= {LAST}))",
    "!has(object.spec.securityContext) || !has(object.spec.securityContext.fsGroup)"
    f" || (object.spec.securityContext.fsGroup >= {FIRST} && object.spec.securityContext.fsGroup <= {LAST})",
)


@pytest.fixture
async def kube(cluster: ApiServer) -> AsyncIterator[KubeClient]:
    connected = await KubeClient.connect(str(cluster.kubeconfig))

    async def create(path: str, obj: Object) -> None:
        await connected._json("POST", path, None, obj, "application/json")

    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    checks = [{"expression": text, "message": "must be in the range of the namespace"} for text in EXPRESSIONS]
    spec = {"failurePolicy": "Fail", "matchConstraints": {"resourceRules": [rule]}, "validations": checks}
    await create(POLICIES, {"metadata": {"name": NAMESPACE}, "spec": spec})
    selector = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}}}
    binding = {"policyName": NAMESPACE, "validationActions": ["Deny"], "matchResources": selector}
    await create(BINDINGS, {"metadata": {"name": NAMESPACE}, "spec": binding})
    await create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    yield connected
    for path in (f"{BINDINGS}/{NAMESPACE}", f"{POLICIES}/{NAMESPACE}", f"/api/v1/namespaces/{NAMESPACE}"):
        await connected._json("DELETE", path)
    await connected.close()


async def create_engine_pod(kube: KubeClient, name: str, platform: PlatformConfig) -> Object:
    made = render_manifest(builders.service("chat", NAMESPACE, tiers={"serve": {}}), platform)
    (deployment,) = [one for one in made if one["kind"] == "Deployment"]
    template = deployment["spec"]["template"]
    meta = {"name": name, "namespace": NAMESPACE, "labels": template["metadata"]["labels"]}
    return await kube.create(
        {"kind": "Pod", "metadata": meta, "spec": {**template["spec"], "serviceAccountName": "default"}}
    )


async def test_pod_without_user_is_accepted_where_a_fixed_one_is_not(kube: KubeClient) -> None:
    for attempt in range(600):  # until the policy is enforced
        try:
            await create_engine_pod(kube, f"fixed-{attempt}", builders.PLATFORM)
        except ClusterError as error:
            refusal = str(error)
            break
        await asyncio.sleep(0.1)
    else:
        pytest.fail("the policy was never enforced")
    assert "must be in the range of the namespace" in refusal
    engine = builders.PLATFORM.engine.model_copy(update={"run_as_user": None})
    live = await create_engine_pod(kube, "assigned", builders.PLATFORM.model_copy(update={"engine": engine}))
    assert "fsGroup" not in live["spec"]["securityContext"]
    assert live["spec"]["containers"][0]["securityContext"]["runAsNonRoot"] is True
