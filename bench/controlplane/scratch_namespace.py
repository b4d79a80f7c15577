"""A namespace for one measurement, deleted with it, and services without cost: their pods fit on no node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from e2e.lib import stack
from e2e.lib.kube import Cluster, Object
from e2e.lib.service import make_manifest

UNSCHEDULABLE: Object = {"pod": {"nodeSelector": {"bench.plimsoll.dev/no-such-node": "true"}}}


@contextmanager
def namespace(cluster: Cluster, name: str) -> Iterator[str]:
    """A fresh namespace."""
    stack.make_namespace(cluster, name)
    try:
        yield name
    finally:
        cluster.delete("namespace", name, timeout_s=240)


def unschedulable_service(name: str) -> Object:
    """A service with two tiers whose pods stay pending."""
    return make_manifest(name, {"prefill": UNSCHEDULABLE, "decode": UNSCHEDULABLE})
