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


def rendered() -> Object:
    (found,) = [one for one in render_manifest(SERVICE, builders.PLATFORM) if one["kind"] == labels.SET_KIND]
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


def test_default_args_split_the_model_over_the_nodes() -> None:
    [engine] = rendered()["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"]
    variables = {one["name"]: one.get("value") for one in engine["env"]}
    args = json.loads(variables["PLIMSOLL_DEFAULT_ARGS"])
    assert args[:4] == ["--tensor-parallel-size", "4", "--pipeline-parallel-size", "2"]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "4"


def test_set_has_a_service_per_leader() -> None:
    """The tier's own Service has the name that a shared one would have."""
    assert rendered()["spec"]["networkConfig"] == {"subdomainPolicy": "UniquePerReplica"}


def test_replica_counts_the_gpus_of_all_nodes() -> None:
    service = parse(SERVICE)
    assert service.policy(0.0).tiers["serve"].gpus_per_replica == 8
