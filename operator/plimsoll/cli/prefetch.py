"""`plimsoll prefetch NAME`: prints what downloads a service's model into its cache. It writes nothing.

Problem: the first engine of a large model spends most of its start on the download, also when it starts on demand.

Idea: the pod template of the service has image, credentials, cache and node selection. A pod runs the launcher's
download with them, without a GPU: that of a Job for a claim, those of a DaemonSet for a folder of each node.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any, Final

import yaml

from plimsoll.adapters.kube_client import DEPLOYMENTS, KubeClient
from plimsoll.api import labels
from plimsoll.api.v1alpha1 import UNKNOWN_GPU_RESOURCE, InferenceService, parse
from plimsoll.cli import cluster
from plimsoll.cli.cluster import ClusterQueryError
from plimsoll.cli.kubeconfig import current_namespace
from plimsoll.cli.output_files import print_text
from plimsoll.core.errors import ClusterError, NotFound
from plimsoll.resources.object_meta import tier_name

KubeObject = dict[str, Any]

COMMAND: Final = ["python3", "-P", "-m", "launcher.fetch"]
_KEPT_SECONDS: Final = 3600  # after the end
_LABELS: Final = {labels.NAME: "plimsoll-prefetch"}
_WAIT: Final = ["python3", "-c", "import signal; signal.pause()"]
_POD_FIELDS: Final = (
    "serviceAccountName",
    "automountServiceAccountToken",
    "enableServiceLinks",
    "securityContext",
    "volumes",
    "nodeSelector",
    "imagePullSecrets",
    "priorityClassName",
    "schedulerName",
    "tolerations",
    "affinity",
)


def run(arguments: argparse.Namespace) -> int:
    """Print the Job or the DaemonSet."""

    async def make() -> KubeObject:
        async with cluster.connect(arguments.kubeconfig) as kube:
            namespace = arguments.namespace or current_namespace(arguments.kubeconfig)
            return await prefetch_workload(kube, namespace, arguments.name)

    print_text(yaml.safe_dump(asyncio.run(make()), sort_keys=False))
    return 0


async def prefetch_workload(kube: KubeClient, namespace: str, name: str) -> KubeObject:
    """The Job or DaemonSet of a service; raises ClusterQueryError if it has no model to download, or no cache that
    stays.
    """
    service = parse(await cluster.get_service(kube, namespace, name), UNKNOWN_GPU_RESOURCE)
    _check(service)
    role, _ = next(iter(service.spec.tiers.items()))
    try:
        deployment = await kube.get(DEPLOYMENTS, namespace, tier_name(name, role))
    except NotFound:
        raise ClusterQueryError(
            f"service {name} has no Deployment {tier_name(name, role)} yet: the operator makes it, also with "
            "minReplicas 0"
        ) from None
    except ClusterError as error:
        raise ClusterQueryError(f"cannot read Deployment {tier_name(name, role)}: {error}") from error
    pod = deployment["spec"]["template"]["spec"]
    (cache,) = (one for one in pod["volumes"] if one["name"] == "model-cache")
    if "emptyDir" in cache:
        raise ClusterQueryError(
            f"service {name} has a cache in each pod, which ends with it: set claimName, hostPath or nodeLocal in "
            "spec.model.cache"
        )
    return daemon_set(name, namespace, pod) if "hostPath" in cache else job(name, namespace, pod)


def _check(service: InferenceService) -> None:
    name, model = service.metadata.name, service.spec.model
    if service.spec.targets is not None:
        raise ClusterQueryError(f"service {name} has targets: their owner downloads the model")
    if not model.is_cached or not service.spec.engine.contract.launched or service.spec.engine.is_simulated:
        raise ClusterQueryError(f"service {name} downloads nothing: spec.model.uri is {model.uri}")
    if any(tier.nodes > 1 for _, tier in service.spec.tiers.items()):
        raise ClusterQueryError(f"service {name} has engines of several nodes: prefetch reads Deployments only")


def job(name: str, namespace: str, pod: KubeObject) -> KubeObject:
    """The Job that downloads the model of a pod template's engine into the template's volumes."""
    template = {**_pod(pod), "restartPolicy": "OnFailure", "containers": [_fetch(pod)]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{name}-prefetch", "namespace": namespace, "labels": _LABELS},
        "spec": {
            "ttlSecondsAfterFinished": _KEPT_SECONDS,
            "template": {"metadata": {"labels": _LABELS}, "spec": template},
        },
    }


def daemon_set(name: str, namespace: str, pod: KubeObject) -> KubeObject:
    """The DaemonSet that does so on each node where the template's pods may run. A node whose pod is ready has it."""
    fetch = _fetch(pod)
    wait = {field: fetch[field] for field in ("image", "imagePullPolicy", "securityContext")}
    template = {
        **_pod(pod),
        "terminationGracePeriodSeconds": 1,
        "initContainers": [fetch],
        "containers": [{"name": "done", "command": _WAIT, **wait, "resources": {"limits": {"memory": "64Mi"}}}],
    }
    labelled = {**_LABELS, labels.INSTANCE: name}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": f"{name}-prefetch", "namespace": namespace, "labels": _LABELS},
        "spec": {
            "selector": {"matchLabels": labelled},
            "template": {"metadata": {"labels": labelled}, "spec": template},
        },
    }


def _pod(pod: KubeObject) -> KubeObject:
    return {field: pod[field] for field in _POD_FIELDS if field in pod}


def _fetch(pod: KubeObject) -> KubeObject:
    """The container that downloads."""
    (engine,) = (one for one in pod["containers"] if one["name"] == "engine")
    return {
        "name": "fetch",
        "command": COMMAND,
        **{field: engine[field] for field in ("image", "imagePullPolicy", "env", "securityContext", "volumeMounts")},
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "8Gi"}},
    }
