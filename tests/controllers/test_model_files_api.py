"""Where models come from, on a real API server: image volumes, and the status that shows what engines serve."""

from __future__ import annotations

import asyncio
import subprocess

from tests.apiserver import ApiServer
from tests.controllers.conftest import ControllerHarness

IMAGE = "registry.example.com/team/chat:1"
SERVE = {"serve": {"gpus": 0, "minReplicas": 1}}


async def test_image_volume_is_accepted_and_not_written_again(world: ControllerHarness) -> None:
    await world.create(model={"uri": f"oci://{IMAGE}", "path": "models"}, tiers=SERVE)
    parts = await world.reconcile_once("chat")
    live = await world.get("Deployment", "chat-serve")
    (volume,) = (one for one in live["spec"]["template"]["spec"]["volumes"] if one["name"] == "model")
    assert volume["image"] == {"reference": IMAGE, "pullPolicy": "IfNotPresent"}
    await world.sync(parts.store)
    await parts.reconciler.reconcile((world.namespace, "chat"))
    assert (await world.get("Deployment", "chat-serve"))["metadata"]["generation"] == live["metadata"]["generation"]


async def test_restricted_namespace_admits_a_pod_with_an_image_volume(
    world: ControllerHarness, cluster: ApiServer
) -> None:
    await world.create(model={"uri": f"oci://{IMAGE}"}, tiers=SERVE)
    await world.reconcile_once("chat")
    template = (await world.get("Deployment", "chat-serve"))["spec"]["template"]
    label = "pod-security.kubernetes.io/enforce=restricted"
    command = [cluster.kubectl, f"--kubeconfig={cluster.kubeconfig}", "label", "namespace", world.namespace, label]
    await asyncio.to_thread(subprocess.run, command, check=True)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "chat", "labels": template["metadata"]["labels"]}}
    path = f"/api/v1/namespaces/{world.namespace}/pods"
    made = await world.kube._json(
        "POST", path, {"dryRun": "All"}, {**pod, "spec": template["spec"]}, "application/json"
    )
    assert made["spec"]["volumes"]


async def test_model_revision_of_engines_stays_in_the_status(world: ControllerHarness) -> None:
    await world.create(model={"uri": "s3://models/chat"}, tiers=SERVE)
    parts = await world.reconcile_once("chat")
    assert "modelRevision" not in (await world.service())["status"]
    reported = ["sha256:0f"]
    parts.reconciler._model_revisions = lambda key: tuple(reported)
    await world.reconcile_once("chat", parts)
    assert (await world.service())["status"]["modelRevision"] == "sha256:0f"
    reported.clear()  # as after a restart of the operator, or at zero replicas
    await world.reconcile_once("chat", parts)
    assert (await world.service())["status"]["modelRevision"] == "sha256:0f"
