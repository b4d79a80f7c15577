"""The LeaderWorkerSet of a tier with several nodes: what its pods have in common, and what tells them apart."""

from __future__ import annotations

import json
from typing import Any

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import parse
from plimsoll.cli.render import render_manifest
from tests import builders

Object = dict[str, Any]

SERVICE = builders.service(tiers={"serve": {"nodes": 2, "gpus": 4, "minReplicas": 1, "maxReplicas": 3}})


def rendered(service: Object = SERVICE) -> Object:
    (found,) = [one for one in render_manifest(service, builders.PLATFORM) if one["kind"] == labels.SET_KIND]
    return found


def default_args(service: Object = SERVICE) -> list[str]:
    [engine] = rendered(service)["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"]
    variables = {one["name"]: one.get("value") for one in engine["env"]}
    found: list[str] = json.loads(variables["PLIMSOLL_DEFAULT_ARGS"])
    return found


def test_worker_has_template_of_leader_but_no_role() -> None:
    template = rendered()["spec"]["leaderWorkerTemplate"]
    leader, worker = template["leaderTemplate"], template["workerTemplate"]
    assert worker["spec"]["containers"] == leader["spec"]["containers"]
    assert leader["metadata"]["labels"][labels.ROLE] == "serve"
    assert labels.ROLE not in worker["metadata"]["labels"]
    assert worker["metadata"]["labels"][labels.WORKER_OF] == "serve"
    assert worker["metadata"]["labels"][labels.SERVICE] == "chat"
    assert "topologySpreadConstraints" not in worker["spec"]
    assert {key for one in leader["spec"]["topologySpreadConstraints"] for key in one["matchLabelKeys"]} == {
        labels.SET_REVISION
    }


def test_pods_tell_which_template_they_have() -> None:
    def template_labels(**spec: Any) -> set[str]:
        found = rendered({**SERVICE, "spec": {**SERVICE["spec"], **spec}})["spec"]["leaderWorkerTemplate"]
        return {found[part]["metadata"]["labels"][labels.TEMPLATE] for part in ("leaderTemplate", "workerTemplate")}

    assert len(template_labels()) == 1
    assert template_labels() != template_labels(engine={"args": ["--max-num-seqs", "8"]})


def test_default_args_split_the_model_over_the_nodes() -> None:
    [engine] = rendered()["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"]
    assert default_args()[:4] == ["--tensor-parallel-size", "4", "--pipeline-parallel-size", "2"]
    small = builders.service(tiers={"serve": {"nodes": 2, "minReplicas": 1}})
    assert default_args(small)[:4] == ["--tensor-parallel-size", "1", "--pipeline-parallel-size", "2"]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "4"


def test_set_has_a_service_per_leader() -> None:
    """The tier's own Service has the name that a shared one would have."""
    assert rendered()["spec"]["networkConfig"] == {"subdomainPolicy": "UniquePerReplica"}


def test_replica_counts_the_gpus_of_all_nodes() -> None:
    service = parse(SERVICE)
    assert service.policy(0.0).tiers["serve"].gpus_per_replica == 8


def test_labels_of_pods_reach_the_schedulers_of_groups() -> None:
    """Kueue reads its queue from a label of the LeaderWorkerSet, Volcano's from an annotation of it."""
    queue, volcano = {"kueue.x-k8s.io/queue-name": "team"}, {"scheduling.volcano.sh/queue-name": "team"}
    tier = {"nodes": 2, "exclusiveTopology": "rack", "pod": {"labels": queue, "annotations": volcano}}
    metadata = rendered(builders.service(tiers={"serve": tier}))["metadata"]
    assert metadata["labels"] == {**rendered()["metadata"]["labels"], **queue}
    assert metadata["annotations"] == {labels.SET_EXCLUSIVE_TOPOLOGY: "rack", **volcano}
    assert "annotations" not in rendered()["metadata"]
