"""What fills the cache of a service: a Job, a DaemonSet, or CronJobs ahead of its schedule."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.api.v1alpha1 import parse
from plimsoll.cli.cluster import ClusterQueryError
from plimsoll.cli.main import main
from plimsoll.cli.prefetch import prefetch_workloads
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
    (found,) = await all_made(model, has_deployment, **tier)
    return found


async def all_made(
    model: Object,
    has_deployment: bool = True,
    *,
    ahead_s: float | None = None,
    schedule: tuple[Object, ...] = (),
    **tier: Any,
) -> list[Object]:
    scaling = {"scaling": {"schedule": list(schedule)}} if schedule else {}
    tiers = {"serve": {**TIERS["serve"], **tier}}
    service = builders.service("chat", model=model, tiers=tiers, slo={"ttft": "1s"}, **scaling)
    answers: Object = {services("team", "chat"): service}
    if has_deployment:
        template = pod_template(parse(service), "serve", NODE_CACHE)
        path = "/apis/apps/v1/namespaces/team/deployments/chat-serve"
        answers[path] = {"metadata": {"name": "chat-serve"}, "spec": {"template": template}}
    return await prefetch_workloads(FakeKube(answers), "team", "chat", ahead_s)


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


async def test_pods_on_nodes_keep_their_model_in_use() -> None:
    """A model in use is not deleted when others need room: it is there when a schedule begins."""
    (done,) = (await made({"uri": "s3://models/chat", "cache": {"nodeLocal": True}}))["spec"]["template"]["spec"][
        "containers"
    ]
    assert done["command"][:4] == ["python3", "-P", "-m", "launcher.fetch"]
    assert "pause" in done["command"][-1]
    assert {"name": "PLIMSOLL_MODEL_SOURCE", "value": "s3://models/chat"} in done["env"]
    assert "model-cache" in {mount["name"] for mount in done["volumeMounts"]}


DAY = {"from": "08:00", "until": "20:00", "timeZone": "Europe/Berlin", "minReplicas": 3}


@pytest.mark.parametrize(
    ("entry", "ahead_s", "schedule"),
    [
        (DAY, 1800.0, "30 7 * * *"),
        ({**DAY, "days": ["Mon", "Fri"]}, 60.0, "59 7 * * MON,FRI"),
        ({**DAY, "from": "00:10", "days": ["Mon", "Sun"]}, 1800.0, "40 23 * * SUN,SAT"),  # of the day before
        ({**DAY, "from": "00:10"}, 86400.0, "10 0 * * *"),
    ],
)
async def test_cron_job_downloads_ahead_of_a_scheduled_rise(entry: Object, ahead_s: float, schedule: str) -> None:
    found = await all_made(S3, ahead_s=ahead_s, schedule=({"from": "21:00", "until": "22:00", "maxReplicas": 2}, entry))
    (cron,) = found  # the first entry adds no replicas
    assert (cron["kind"], cron["metadata"]["name"]) == ("CronJob", "chat-prefetch-1")
    assert (cron["spec"]["schedule"], cron["spec"]["timeZone"]) == (schedule, "Europe/Berlin")
    assert (cron["spec"]["concurrencyPolicy"], cron["spec"]["startingDeadlineSeconds"]) == ("Forbid", int(ahead_s))
    (job,) = await all_made(S3)
    assert cron["spec"]["jobTemplate"]["spec"]["template"] == job["spec"]["template"]


@pytest.mark.parametrize(
    ("model", "schedule", "tier", "reason"),
    [
        (S3, (), {}, "no entry of spec.scaling.schedule raises minReplicas above 1"),
        (S3, (DAY,), {"minReplicas": 3}, "no entry of spec.scaling.schedule raises minReplicas above 3"),
        (
            {"uri": "s3://models/a", "cache": {"nodeLocal": True}},
            (DAY,),
            {},
            "leave out --ahead: the DaemonSet keeps the",
        ),
    ],
)
async def test_prefetch_ahead_of_nothing_is_refused(
    model: Object, schedule: tuple[Object, ...], tier: Object, reason: str
) -> None:
    with pytest.raises(ClusterQueryError, match=reason):
        await all_made(model, ahead_s=600.0, schedule=schedule, **{"maxReplicas": 5, **tier})


@pytest.mark.parametrize("text", ["30", "0s", "25h", "soon"])
def test_time_ahead_must_be_a_duration_of_a_day_at_most(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefetch", "chat", "--ahead", text]) == 1
    assert f"--ahead: {text}" in capsys.readouterr().err
