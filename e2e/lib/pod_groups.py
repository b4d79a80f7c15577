"""A controller of LeaderWorkerSets for scenarios: it makes the pods of each group as the real one does.

The local cluster has the kind only. Names, labels, variables and the Service of a group are those that the
LeaderWorkerSet API documents for `subdomainPolicy: UniquePerReplica`.
"""

from __future__ import annotations

from e2e.lib.kube import Cluster, Object
from plimsoll.api import labels

_PREFIX = labels.SET_NAME.partition("/")[0]
_GROUP_INDEX, _WORKER_INDEX = f"{_PREFIX}/group-index", f"{_PREFIX}/worker-index"


def make_groups(cluster: Cluster, namespace: str, name: str) -> list[str]:
    """Create what is missing of the groups of a LeaderWorkerSet. Returns the names of all its pods."""
    live = cluster.get_object(f"{labels.SET_PLURAL}.{labels.SET_GROUP}", name, namespace)
    made = [one for group in range(live["spec"]["replicas"]) for one in _group(live, group)]
    cluster.apply(*made, namespace=namespace)
    return [one["metadata"]["name"] for one in made if one["kind"] == "Pod"]


def replace_groups(cluster: Cluster, namespace: str, name: str, pods: list[str]) -> None:
    """Create all pods of a group again, as `RecreateGroupOnPodRestart` does once a container has restarted."""
    cluster.delete("pods", *pods, namespace=namespace)
    make_groups(cluster, namespace, name)


def _group(live: Object, group: int) -> list[Object]:
    """The headless Service of a group, and its pods. live: the LeaderWorkerSet."""
    meta = live["metadata"]
    own = {labels.SET_NAME: meta["name"], _GROUP_INDEX: str(group), labels.SET_REVISION: "only"}
    owner = {key: live[key] for key in ("apiVersion", "kind")} | {"name": meta["name"], "uid": meta["uid"]}
    subdomain = f"{meta['name']}-{group}"
    service: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": subdomain, "ownerReferences": [owner]},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": own},
    }
    template = live["spec"]["leaderWorkerTemplate"]
    size = template["size"]
    pods = []
    for rank in range(size):
        part = template["workerTemplate" if rank else "leaderTemplate"]
        pod = subdomain + (f"-{rank}" if rank else "")
        variables = {
            "LWS_LEADER_ADDRESS": f"{subdomain}.{subdomain}.{meta['namespace']}",
            "LWS_GROUP_SIZE": str(size),
            "LWS_WORKER_INDEX": str(rank),
        }
        pod_labels = {**part["metadata"]["labels"], **own, _WORKER_INDEX: str(rank)}
        pod_meta = {**part["metadata"], "name": pod, "labels": pod_labels, "ownerReferences": [owner]}
        spec = {**part["spec"], "hostname": pod, "subdomain": subdomain}
        spec["containers"] = [_with_variables(one, variables) for one in spec["containers"]]
        pods.append({"apiVersion": "v1", "kind": "Pod", "metadata": pod_meta, "spec": spec})
    return [service, *pods]


def _with_variables(container: Object, variables: dict[str, str]) -> Object:
    own = [{"name": name, "value": value} for name, value in variables.items()]
    return {**container, "env": [*own, *container.get("env", ())]}
