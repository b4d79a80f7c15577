"""Engines that show themselves by their metrics page alone, read through the API server's pod proxy.

Problem: an image of one's own, started by a script, says nothing of the engine in it. Its metrics page does, but each
page is a request to a program that may be anything.

Idea: only declared container ports are read, of one pod per owner, those with GPUs first, in bounded number, size and
time. A page with metrics of a known engine's prefix shows the engine and the port. Reading needs `get` on `pods/proxy`
and touches programs of others, so it needs the option `adopt --metrics-pages`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from plimsoll.adapters.kube_client import KubeClient
from plimsoll.adapters.pod_http import MAX_ENGINE_PAGE_BYTES
from plimsoll.cli.placement import GPU_RESOURCE
from plimsoll.core.errors import ClusterError, Forbidden
from plimsoll.engines.engine import Engine
from plimsoll.engines.registry import ENGINES

KubeObject = dict[str, Any]
OwnerKey = tuple[str, str]  # namespace, and uid of the owner or name of a pod without one

MAX_PODS: Final = 20
MAX_PORTS: Final = 3  # of a pod
TIMEOUT_S: Final = 3.0
_PARALLEL_READS: Final = 4


@dataclass(frozen=True)
class MetricsPage:
    """A page with an engine's metrics, and the container port that has it."""

    engine: Engine
    port: int


@dataclass(frozen=True)
class FoundPages:
    """Pages by the owner of their pod. unread: owners whose pods were not read, because there were too many."""

    pages: dict[OwnerKey, MetricsPage]
    unread: int = 0


def owner_key(pod: KubeObject) -> OwnerKey:
    """What all pods of one owner share."""
    owners = pod["metadata"].get("ownerReferences") or ()
    return pod["metadata"]["namespace"], str(owners[0].get("uid") if owners else pod["metadata"]["name"])


def engine_of_page(page: bytes) -> Engine | None:
    """The engine whose metrics a page has; None without one."""
    for engine in ENGINES.values():
        prefix = b"" if engine.metrics is None else engine.metrics.prefix.encode()
        if prefix and re.search(rb"^" + re.escape(prefix), page, re.MULTILINE):
            return engine
    return None


async def find_pages(kube: KubeClient, pods: Iterable[KubeObject]) -> FoundPages:
    """Read the pages of running pods with declared ports. Raises Forbidden without the right to.

    A pod that does not answer, or answers more than 1 MiB, has no page.
    """
    by_owner: dict[OwnerKey, KubeObject] = {}
    for pod in pods:
        if pod.get("status", {}).get("phase") == "Running" and _ports(pod):
            by_owner.setdefault(owner_key(pod), pod)
    ordered = sorted(by_owner.items(), key=lambda item: (not has_gpu(item[1]), item[0]))
    turns = asyncio.Semaphore(_PARALLEL_READS)

    async def read(pod: KubeObject) -> MetricsPage | None:
        async with turns:
            return await _page_of(kube, pod)

    chosen = ordered[:MAX_PODS]
    found = await asyncio.gather(*(read(pod) for _, pod in chosen))
    pages = {key: page for (key, _), page in zip(chosen, found, strict=True) if page is not None}
    return FoundPages(pages, len(ordered) - len(chosen))


async def _page_of(kube: KubeClient, pod: KubeObject) -> MetricsPage | None:
    meta = pod["metadata"]
    for port in _ports(pod)[:MAX_PORTS]:
        try:
            page = await kube.request_pod(
                meta["namespace"], meta["name"], port, "metrics", timeout=TIMEOUT_S, max_bytes=MAX_ENGINE_PAGE_BYTES
            )
        except Forbidden as error:
            if "pods/proxy" in str(error):
                raise
            continue  # the program's own answer
        except ClusterError:
            continue
        engine = engine_of_page(page)
        if engine is not None:
            return MetricsPage(engine, port)
    return None


def has_gpu(pod: KubeObject) -> bool:
    """Whether a container of a pod has a GPU in its limits."""
    limits = ((one.get("resources") or {}).get("limits") or {} for one in pod["spec"].get("containers", ()))
    return any(GPU_RESOURCE.search(name) for found in limits for name in found)


def _ports(pod: KubeObject) -> list[int]:
    """The declared TCP ports of the containers."""
    declared = [port for one in pod["spec"].get("containers", ()) for port in one.get("ports") or ()]
    return [int(one["containerPort"]) for one in declared if one.get("protocol", "TCP") == "TCP"]
