"""`plimsoll check`: whether a cluster can run Plimsoll and its services, and which values to set.

Problem: what a cluster lacks shows only after the installation, as pods that stay pending or metrics that nobody reads.

Idea: read what the user may read, apply one rule per topic, and print each finding with its remedy. Before the
installation (`--pre`) one engine with one GPU and the chart's defaults stands for the services. It changes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from plimsoll.adapters.kube_client import (
    CONFIGMAPS,
    DEPLOYMENTS,
    HORIZONTALPODAUTOSCALERS,
    INFERENCESERVICES,
    LEADERWORKERSETS,
    KubeClient,
    Resource,
)
from plimsoll.api import crd, labels
from plimsoll.cli import check_cluster, check_release, cluster, render
from plimsoll.cli.findings import NODES, PROBLEM, UNCHECKED, Finding, print_findings, read_all
from plimsoll.cli.json_access import get_int, get_mapping, get_text
from plimsoll.cli.manifests import load_documents
from plimsoll.cli.placement import TierPods, gpu_totals, placement, runtime_class
from plimsoll.cli.replica_writers import foreign_writers
from plimsoll.controllers import tier_workload
from plimsoll.core.errors import ClusterError, Forbidden, NotFound

KubeObject = dict[str, Any]

NAMESPACES: Final = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
DAEMONSETS: Final = Resource("apps", "v1", "daemonsets", "DaemonSet")
RUNTIMECLASSES: Final = Resource("node.k8s.io", "v1", "runtimeclasses", "RuntimeClass", namespaced=False)
STORAGECLASSES: Final = Resource("storage.k8s.io", "v1", "storageclasses", "StorageClass", namespaced=False)
CLAIMS: Final = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
DEFINITIONS: Final = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)
PROMETHEUSES: Final = Resource("monitoring.coreos.com", "v1", "prometheuses", "Prometheus")
PODMONITORS: Final = Resource("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor")
_DISTRIBUTION: Final = "plimsoll-operator"
_PART_OF: Final = "app.kubernetes.io/part-of=plimsoll"
_GPU_KEY: Final = render.DEFAULT_PLATFORM.engine.gpu_resource
# What the chart's defaults give an engine with one GPU.
_FIRST_ENGINE: Final = TierPods(
    "engines",
    "spec.tiers.serve",
    {
        "spec": {
            "containers": [{"resources": {"limits": {_GPU_KEY: "1"}}}],
            "tolerations": [{"key": _GPU_KEY, "operator": "Exists", "effect": "NoSchedule"}],
        }
    },
)


@dataclass(frozen=True)
class CheckedService:
    """A service with its workloads: those of the cluster, or rendered from a manifest."""

    service: KubeObject
    workloads: Sequence[KubeObject] = ()

    @property
    def key(self) -> str:
        return f"{get_text(self.service, 'metadata', 'namespace')}/{get_text(self.service, 'metadata', 'name')}"


@dataclass
class ClusterObjects:
    """Objects of a cluster by kind. A kind that could not be read is absent, and `unread` says why."""

    by_kind: dict[Resource, list[KubeObject]] = field(default_factory=dict)
    operators: list[KubeObject] | None = None
    definitions: dict[str, KubeObject] | None = None
    unread: list[Finding] = field(default_factory=list)

    def get(self, resource: Resource) -> list[KubeObject] | None:
        return self.by_kind.get(resource)

    def of_namespace(self, resource: Resource, namespace: str | None) -> list[KubeObject]:
        return [one for one in self.get(resource) or () if get_text(one, "metadata", "namespace") == namespace]


def run(arguments: argparse.Namespace) -> int:
    """Print the findings. Returns exit status 1 if one is a problem."""
    manifests = load_documents(arguments.filename) if arguments.filename else []
    findings = asyncio.run(_connect_and_check(arguments, manifests))
    return print_findings("cluster", findings, as_json=arguments.json)


async def _connect_and_check(arguments: argparse.Namespace, manifests: Sequence[Any]) -> list[Finding]:
    async with cluster.connect(arguments.kubeconfig) as kube:
        return await check(kube, arguments.namespace, manifests, before_install=arguments.pre)


async def check(
    kube: KubeClient, namespace: str | None, manifests: Sequence[Any] = (), *, before_install: bool = False
) -> list[Finding]:
    """Return the findings. Raises InvalidSpec and ClusterQueryError.

    namespace: of services and their objects, None for all.
    manifests: services that are checked as well, rendered with the chart's defaults.
    """
    await cluster.reach(kube)
    objects = await _read(kube, namespace)
    services = [*_services(objects), *map(_rendered, manifests)]
    tiers = [tier for one in services for tier in _tiers(one)]
    sets = [one for one in services for workload in one.workloads if tier_workload.is_set(workload)]
    return [
        *_releases(objects, before_install),
        *_nodes(objects, tiers),
        *_storage(objects, services),
        *_network(objects),
        *(finding for one in services for finding in _writers(objects, one)),
        *(await _sets(kube, sets[0]) if sets else ()),
        *objects.unread,
    ]


async def _read(kube: KubeClient, namespace: str | None) -> ClusterObjects:
    """Read all kinds. Those of nodes, releases and monitoring are read in the whole cluster."""
    objects = ClusterObjects()

    async def read(kind: Resource, place: str | None = None, selector: str | None = None) -> None:
        found = await read_all(kube, kind, place, objects.unread, selector)
        if found is not None:
            objects.by_kind[kind] = found

    async def read_operators() -> None:
        objects.operators = await read_all(kube, DEPLOYMENTS, None, objects.unread, check_release.OPERATORS)

    await asyncio.gather(
        *map(read, (NODES, RUNTIMECLASSES, STORAGECLASSES, NAMESPACES, DAEMONSETS, PROMETHEUSES)),
        *(read(one, namespace) for one in (INFERENCESERVICES, CLAIMS, HORIZONTALPODAUTOSCALERS)),
        read(PODMONITORS, None, _PART_OF),
        read(CONFIGMAPS, None, check_release.OPERATORS),
        read(DEPLOYMENTS, namespace, labels.SERVICE),
        read_operators(),
        _read_definitions(kube, objects),
    )
    if any(_has_sets(one) for one in objects.get(INFERENCESERVICES) or ()):  # most users may not read them
        await read(LEADERWORKERSETS, namespace, labels.SERVICE)
    objects.unread = list(dict.fromkeys(objects.unread))
    return objects


async def _read_definitions(kube: KubeClient, objects: ClusterObjects) -> None:
    """Read the CRDs one by one: a list of all is large."""
    found = {}
    for plural in crd.definitions():
        try:
            found[plural] = await kube.get(DEFINITIONS, None, f"{plural}.{labels.GROUP}")
        except NotFound:
            continue
        except Forbidden:
            remedy = "ask for permission to get customresourcedefinitions.apiextensions.k8s.io"
            objects.unread.append(Finding(UNCHECKED, "crds", "forbidden: cannot get CRDs", remedy))
            return
        except ClusterError as error:
            objects.unread.append(Finding(UNCHECKED, "crds", f"cannot get CRDs: {error}", "try again"))
            return
    objects.definitions = found


def _has_sets(service: KubeObject) -> bool:
    return any((get_int(tier, "nodes") or 1) > 1 for tier in get_mapping(service, "spec", "tiers").values())


def _services(objects: ClusterObjects) -> Iterable[CheckedService]:
    for service in objects.get(INFERENCESERVICES) or ():
        namespace, name = (get_text(service, "metadata", key) for key in ("namespace", "name"))
        workloads = [
            one
            for kind in tier_workload.TIER_WORKLOADS
            for one in objects.of_namespace(kind, namespace)
            if get_mapping(one, "metadata", "labels").get(labels.SERVICE) == name
        ]
        yield CheckedService(service, workloads)


def _rendered(manifest: Any) -> CheckedService:
    """A service that is not applied yet, as the chart's defaults render it. Raises InvalidSpec."""
    kinds = {one.kind for one in tier_workload.TIER_WORKLOADS}
    workloads = [one for one in render.render_manifest(manifest, render.DEFAULT_PLATFORM) if one["kind"] in kinds]
    meta = {"namespace": "default", **manifest["metadata"]}
    return CheckedService({**manifest, "metadata": meta}, workloads)


def _tiers(service: CheckedService) -> Iterable[TierPods]:
    for workload in service.workloads:
        yield _tier(service, workload)


def _tier(service: CheckedService, workload: KubeObject) -> TierPods:
    role = get_mapping(workload, "metadata", "labels").get(labels.ROLE)
    return TierPods(f"{service.key} {role}", f"spec.tiers.{role}", tier_workload.pod_template(workload))


def _releases(objects: ClusterObjects, before_install: bool) -> Iterable[Finding]:
    if objects.definitions is not None:
        if before_install:
            yield from check_release.definitions_before_install(objects.definitions)
        else:
            yield from check_release.definitions(objects.definitions, crd.definitions())
    configs = objects.get(CONFIGMAPS) or []
    yield from check_release.releases(objects.operators or [], configs, _own_version(), before_install=before_install)


def _nodes(objects: ClusterObjects, tiers: Sequence[TierPods]) -> Iterable[Finding]:
    nodes, classes = objects.get(NODES), objects.get(RUNTIMECLASSES)
    if nodes is not None:
        yield from check_cluster.gpus(nodes, objects.get(DAEMONSETS), tiers)
        first = [_FIRST_ENGINE] if gpu_totals(nodes) else []  # without GPUs, the finding about them says it
        for tier in tiers or first:
            yield from placement(tier, nodes)
        yield from check_cluster.rdma(nodes, tiers)
    if classes is not None:
        names = [get_text(one, "metadata", "name") or "" for one in classes]
        for tier in tiers:
            yield from runtime_class(tier, names)
        yield from check_cluster.unused_runtime_class(classes, tiers)


def _storage(objects: ClusterObjects, services: Sequence[CheckedService]) -> Iterable[Finding]:
    classes, claims = objects.get(STORAGECLASSES), objects.get(CLAIMS)
    if classes is not None:
        yield from check_cluster.storage_classes(classes)
    for one in services if claims is not None else ():
        namespace = get_text(one.service, "metadata", "namespace")
        found = {get_text(claim, "metadata", "name") or "": claim for claim in objects.of_namespace(CLAIMS, namespace)}
        for workload in one.workloads:
            tier = _tier(one, workload)
            bounds = get_mapping(one.service, "spec", "tiers", tier.field.rpartition(".")[2])
            most = max(get_int(bounds, "maxReplicas") or 1, get_int(workload, "spec", "replicas") or 1)
            yield from check_cluster.claims(tier, most * (get_int(bounds, "nodes") or 1), found, classes)


def _network(objects: ClusterObjects) -> Iterable[Finding]:
    daemon_sets, servers, monitors = (objects.get(one) for one in (DAEMONSETS, PROMETHEUSES, PODMONITORS))
    if daemon_sets is not None:
        yield from check_cluster.network_policies(objects.get(NODES) or [], daemon_sets)
    if servers is not None and monitors is not None:
        places = {
            get_text(one, "metadata", "name") or "": get_mapping(one, "metadata", "labels")
            for one in objects.get(NAMESPACES) or ()
        }
        yield from check_cluster.prometheus(servers, monitors, places)


def _writers(objects: ClusterObjects, service: CheckedService) -> Iterable[Finding]:
    namespace = get_text(service.service, "metadata", "namespace")
    scalers = objects.of_namespace(HORIZONTALPODAUTOSCALERS, namespace)
    return foreign_writers(service.service, service.workloads, scalers, f"{service.key} ")


async def _sets(kube: KubeClient, service: CheckedService) -> Iterable[Finding]:
    """Whether the cluster has LeaderWorkerSets, which tiers of several nodes need."""
    try:
        found = await kube.discover(labels.SET_API_VERSION, labels.SET_KIND)
    except ClusterError as error:
        return [Finding(UNCHECKED, "leaderworkersets", f"cannot read the kind: {error}", "try again")]
    if found is not None:
        return []
    message = f"{service.key} has tiers of several nodes, and the cluster has no {labels.SET_KIND} v1"
    return [Finding(PROBLEM, "leaderworkersets", message, "install the controller of LeaderWorkerSet")]


def _own_version() -> str:
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:  # run from a checkout
        return ""
