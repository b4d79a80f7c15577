"""The Job that fills the cache of a service."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.api.v1alpha1 import parse
from plimsoll.cli.cluster import ClusterQueryError
from plimsoll.cli.prefetch import prefetch_workload
from plimsoll.resources.engine_pod import pod_template
from plimsoll.resources.platform_config import NodeCacheSettings
from tests import builders
from tests.cli.fake_kube import FakeKube, services

Object = dict[str, Any]

NODE_CACHE = builders.PLATFORM.model_copy(
    update={"engine": builders.PLATFORM.engine.model_copy(update={"node_cache": NodeCacheSettings(path="/cache")})}
)
S3 = {"uri": "s3://models/chat", "secretRef": {"name": "s3"}, "cache": {"claimName": "models"}}
TIERS = {"serve": {"gpus": 2, "pod": {"nodeSelector": {"zone": "a"}}}}


async def made(model: Object, has_deployment: bool = True, **tier: Any) -> Object:
    service = builders.service("chat", model=model, tiers={"serve": {**TIERS["serve"], **tier}})
    answers: Object = {services("team", "chat"): service}
    if has_deployment:
        template = pod_template(parse(service), "serve", NODE_CACHE)
        path = "/apis/apps/v1/namespaces/team/deployments/chat-serve"
        answers[path] = {"metadata": {"name": "chat-serve"}, "spec": {"template": template}}
    return await prefetch_workload(FakeKube(answers), "team", "chat")


async def test_job_downloads_with_claim_and_keys_and_without_gpu() -> None:
    pod = (await made(S3))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python3", "-P", "-m", "launcher.fetch"]
    assert {"name": "PLIMSOLL_MODEL_SOURCE", "value": "s3://models/chat"} in container["env"]
    assert "AWS_SECRET_ACCESS_KEY" in {one["name"] for one in container["env"]}
    assert {"name": "model-cache", "persistentVolumeClaim": {"claimName": "models"}} in pod["volumes"]
    assert "nvidia.com/gpu" not in str(container["resources"])
    assert pod["nodeSelector"] == {"zone": "a"}
    assert pod["restartPolicy"] == "OnFailure"


@pytest.mark.parametrize(("cache", "path"), [({"nodeLocal": True}, "/cache"), ({"hostPath": "/models"}, "/models")])
async def test_each_node_downloads_into_its_folder(cache: Object, path: str) -> None:
    found = await made({"uri": "s3://models/chat", "cache": cache})
    pod = found["spec"]["template"]["spec"]
    assert found["kind"] == "DaemonSet"
    assert found["spec"]["selector"]["matchLabels"] == found["spec"]["template"]["metadata"]["labels"]
    assert {"name": "model-cache", "hostPath": {"path": path, "type": "Directory"}} in pod["volumes"]
    assert pod["initContainers"][0]["command"] == ["python3", "-P", "-m", "launcher.fetch"]
    assert pod["nodeSelector"] == {"zone": "a"}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert "nvidia.com/gpu" not in str([pod["initContainers"], pod["containers"]])


async def test_job_is_no_engine_of_the_service() -> None:
    made_labels = (await made(S3))["spec"]["template"]["metadata"]["labels"]
    assert made_labels == {"app.kubernetes.io/name": "plimsoll-prefetch"}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"uri": "s3://models/chat"}, "has a cache in each pod, which ends with it: set claimName, hostPath or "),
        ({"uri": "pvc://models/chat"}, "downloads nothing: spec.model.uri is pvc://models/chat"),
        ({"uri": "oci://ghcr.io/team/chat:1"}, "downloads nothing"),
    ],
)
async def test_service_without_shared_download_is_refused(model: Object, reason: str) -> None:
    with pytest.raises(ClusterQueryError, match=reason):
        await made(model)


async def test_engines_of_several_nodes_are_refused() -> None:
    with pytest.raises(ClusterQueryError, match="has engines of several nodes"):
        await made(S3, nodes=2)


async def test_service_without_deployment_says_who_makes_it() -> None:
    with pytest.raises(ClusterQueryError, match="no Deployment chat-serve yet"):
        await made(S3, has_deployment=False)
