"""A dump of all resources, to show that nothing is left behind.

Problem: "nothing left" must hold for kinds nobody thought of. Idea: ask the API server for every kind it can list, keep
what identifies and defines an object and drop what moves by itself (status, versions, heartbeats), and compare.
Events are left out: they tell what happened and expire by themselves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from e2e.lib.kube import Cluster, Object
from e2e.lib.wait import sleep

Dump = dict[str, str]

_SKIPPED = frozenset({"events", "events.events.k8s.io", "componentstatuses"})
_MOVING_METADATA = ("resourceVersion", "managedFields", "generation")
_DELETION_MARK = '"deletionTimestamp"'
SETTLED_S = 8.0  # the garbage collector and the controllers of endpoints act within it


def dump_resources(cluster: Cluster, namespace: str | None = None) -> Dump:
    """Every object of the cluster, or of one namespace: `resource namespace/name` to what defines it."""
    scope = "--namespaced=true" if namespace else "--namespaced="
    argv = ["api-resources", "--verbs=list", "--no-headers", "-o", "name", *([scope] if namespace else [])]
    kinds = sorted(set(cluster.kubectl(*argv).split()) - _SKIPPED)
    where = ["-n", namespace] if namespace else ["-A"]
    entries = json.loads(cluster.kubectl("get", ",".join(kinds), *where, "-o", "json", "--ignore-not-found") or "{}")
    return dict(_entries(entries.get("items", [])))


def wait_stable(cluster: Cluster, namespace: str | None = None, timeout_s: float = 120) -> Dump:
    """The dump once nothing comes or goes any more: what is deleted leaves the cluster seconds later, in parts.

    Raises AssertionError, with what still moves, after so many seconds.
    """
    end = time.monotonic() + timeout_s
    previous = dump_resources(cluster, namespace)
    while True:
        sleep(SETTLED_S)
        now = dump_resources(cluster, namespace)
        changed = difference(previous, now) or [
            f"still going: {key}" for key, item in now.items() if _DELETION_MARK in item
        ]
        if not changed:
            return now
        assert time.monotonic() < end, "the cluster does not settle:\n" + "\n".join(changed)
        previous = now


def _entries(items: Iterable[Object]) -> Iterable[tuple[str, str]]:
    for item in items:
        metadata = {k: v for k, v in item["metadata"].items() if k not in _MOVING_METADATA}
        body = {k: v for k, v in item.items() if k not in ("metadata", "status")}
        if item["kind"] == "Lease":
            body.pop("spec")  # heartbeats
        yield (
            f"{item['kind']} {metadata.get('namespace', '')}/{metadata['name']}",
            json.dumps([metadata, body], sort_keys=True),
        )


def difference(before: Dump, after: Dump) -> list[str]:
    """What was added, removed or changed, a line each."""
    added = [f"left behind: {key}" for key in sorted(after.keys() - before.keys())]
    removed = [f"gone: {key}" for key in sorted(before.keys() - after.keys())]
    changed = [
        f"changed: {key}\n  {before[key]}\n  {after[key]}"
        for key in sorted(before.keys() & after.keys())
        if before[key] != after[key]
    ]
    return added + removed + changed
