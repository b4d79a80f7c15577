"""`plimsoll prefetch NAME`: prints what downloads a service's model into its cache. It writes nothing.

Problem: the first engine of a large model spends most of its start on the download, also when it starts on demand.

Idea: the pod template of the service has image, credentials, cache and node selection. A pod runs the launcher's
download with them, without a GPU: that of a Job for a claim, those of a DaemonSet for a folder of each node. A model
of a claim may be deleted between two scheduled rises, so CronJobs can download it ahead of each. The DaemonSet's pods
use the model while they run, and one in use is not deleted.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from typing import Any, Final

import yaml

from plimsoll.adapters.kube_client import DEPLOYMENTS, KubeClient
from plimsoll.api import labels
from plimsoll.api.v1alpha1 import UNKNOWN_GPU_RESOURCE, InferenceService, ScheduleEntry, parse
from plimsoll.api.v1alpha1.schedule import DAYS
from plimsoll.cli import cluster
from plimsoll.cli.cluster import ClusterQueryError
from plimsoll.cli.kubeconfig import current_namespace
from plimsoll.cli.output_files import print_text
from plimsoll.core.errors import ClusterError, NotFound
from plimsoll.core.units import parse_duration
from plimsoll.resources.object_meta import tier_name

KubeObject = dict[str, Any]

COMMAND: Final = ["python3", "-P", "-m", "launcher.fetch"]
_KEPT_SECONDS: Final = 3600  # after the end
_MAX_AHEAD_S: Final = 86_400.0
_DAY_MINUTES: Final = 1440
_LABELS: Final = {labels.NAME: "plimsoll-prefetch"}
_WAIT: Final = ["python3", "-c", "import signal; signal.pause()"]
_KEEP_RESOURCES: Final = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "8Gi"}}
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
    """Print the Job, the DaemonSet or the CronJobs. Raises ClusterQueryError."""
    ahead_s = None if arguments.ahead is None else _ahead_s(arguments.ahead)

    async def make() -> list[KubeObject]:
        async with cluster.connect(arguments.kubeconfig) as kube:
            namespace = arguments.namespace or current_namespace(arguments.kubeconfig)
            return await prefetch_workloads(kube, namespace, arguments.name, ahead_s)

    print_text(yaml.safe_dump_all(asyncio.run(make()), sort_keys=False))
    return 0


def _ahead_s(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _MAX_AHEAD_S:
        raise ClusterQueryError(f"--ahead: {text} must be a duration above 0 and at most 24h, such as 30m")
    return seconds


async def prefetch_workloads(
    kube: KubeClient, namespace: str, name: str, ahead_s: float | None = None
) -> list[KubeObject]:
    """The Job or DaemonSet of a service; with `ahead_s` a CronJob for each scheduled rise, that many seconds before.

    Raises ClusterQueryError if there is no model to download, no cache that stays, or no scheduled rise.
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
    if ahead_s is None:
        return [daemon_set(name, namespace, pod) if "hostPath" in cache else job(name, namespace, pod)]
    if "hostPath" in cache:
        raise ClusterQueryError(
            f"service {name} has its cache on nodes: leave out --ahead: the DaemonSet keeps the model on each node "
            "while it exists"
        )
    return cron_jobs(service, namespace, pod, math.ceil(ahead_s / 60))


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


def cron_jobs(service: InferenceService, namespace: str, pod: KubeObject, minutes: int) -> list[KubeObject]:
    """The CronJobs that run the Job before each period of the schedule with more replicas than a tier's minReplicas.

    Raises ClusterQueryError without such a period.
    """
    name, lowest = service.metadata.name, min(tier.min_replicas for _, tier in service.spec.tiers.items())
    rises = [
        (at, entry) for at, entry in enumerate(service.spec.scaling.schedule) if (entry.min_replicas or 0) > lowest
    ]
    if not rises:
        raise ClusterQueryError(
            f"service {name}: no entry of spec.scaling.schedule raises minReplicas above {lowest}, so nothing is to be "
            "downloaded ahead"
        )
    made = job(name, namespace, pod)
    return [
        {
            "apiVersion": "batch/v1",
            "kind": "CronJob",
            "metadata": {**made["metadata"], "name": f"{name}-prefetch-{at}"},
            "spec": {
                "schedule": _cron(entry, minutes),
                "timeZone": entry.time_zone,
                "concurrencyPolicy": "Forbid",
                "startingDeadlineSeconds": minutes * 60,
                "jobTemplate": {"spec": made["spec"]},
            },
        }
        for at, entry in rises
    ]


def _cron(entry: ScheduleEntry, minutes: int) -> str:
    """The time of day this many minutes before an entry begins, as cron has it."""
    hour, minute = map(int, entry.from_.split(":"))
    day_shift, at = divmod(hour * 60 + minute - minutes, _DAY_MINUTES)
    days = sorted(DAYS.index(day) for day in entry.days or ())
    names = ",".join(DAYS[(day + day_shift) % len(DAYS)].upper() for day in days)
    return f"{at % 60} {at // 60} * * {names or '*'}"


def daemon_set(name: str, namespace: str, pod: KubeObject) -> KubeObject:
    """The DaemonSet that does so on each node where the template's pods may run.

    A node whose pod is ready has the model, and keeps it: the pod then waits as a program that uses it.
    """
    fetch = _fetch(pod)
    template = {
        **_pod(pod),
        "terminationGracePeriodSeconds": 1,
        "initContainers": [fetch],
        "containers": [{**fetch, "name": "keep", "command": [*COMMAND, *_WAIT], "resources": _KEEP_RESOURCES}],
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
