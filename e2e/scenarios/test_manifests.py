"""i. Manifests as a user meets them: the good ones are taken, the bad ones are refused with the field and what to do.

The whole table of constraints runs against an API server in the tests; here a few go through kubectl, whose own
validation comes first, and every example is tried on the installed definition.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from e2e.cluster.settings import ROOT
from e2e.lib.kube import Cluster, KubectlError, Object
from e2e.lib.service import make_manifest

EXAMPLES = sorted((ROOT / "crds" / "examples").glob("*.yaml"))
GOOD = make_manifest("good", {"prefill": {}, "decode": {"minReplicas": 2}}, slo={"ttft": "500ms", "tpot": "50ms"})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_manifest_is_accepted(path: Path, cluster: Cluster, namespace: str) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        said = cluster.apply_dry(document, namespace)
        assert said.strip().endswith("created (server dry run)")


def _set(*path: str, value: object) -> Callable[[Object], None]:
    def change(obj: Object) -> None:
        for step in path[:-1]:
            obj = obj.setdefault(step, {})
        obj[path[-1]] = value

    return change


DECODE = ("spec", "tiers", "decode")
ROLE = [{"name": "PLIMSOLL_ROLE", "value": "x"}]
BAD = {
    "no model": (_set("spec", "model", value={}), "spec.model.uri", "Required"),
    "an unknown scheme": (_set("spec", "model", "uri", value="ftp://b/m"), "spec.model.uri", "unknown scheme"),
    "fewer than none": (_set(*DECODE, "minReplicas", value=-1), "spec.tiers.decode.minReplicas", "equal to 0"),
    "half asleep": (
        _set(*DECODE, "minReplicas", value=0),
        "spec.tiers.prefill.minReplicas",
        "both tiers scale to zero",
    ),
    "limits crossed": (_set(*DECODE, "maxReplicas", value=1), "spec.tiers.decode.maxReplicas", "below minReplicas"),
    "three tiers": (_set("spec", "tiers", "serve", value={}), "spec.tiers", "use either serve alone"),
    "a reserved flag": (_set("spec", "engine", "args", value=["--port", "1"]), "spec.engine.args", "--port"),
    "a reserved variable": (_set("spec", "engine", "env", value=ROLE), "spec.engine.env", "PLIMSOLL_"),
    "a duration without unit": (_set("spec", "slo", "ttft", value="500"), "spec.slo.ttft", "500ms"),
    "a volume of the node": (
        _set(*DECODE, "pod", value={"volumes": [{"name": "data", "hostPath": {"path": "/"}}]}),
        "spec.tiers.decode.pod.volumes",
        "volume data (hostPath) is not of an allowed kind",
    ),
    "a long name": (_set("metadata", "name", value="a" * 41), "metadata.name", "at most 40"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_manifest_is_rejected_with_field(case: str, cluster: Cluster, namespace: str) -> None:
    change, field, words = BAD[case]
    bad = copy.deepcopy(GOOD)
    change(bad)
    with pytest.raises(KubectlError) as refused:
        cluster.apply_dry(bad, namespace)
    said = str(refused.value)
    print(said.splitlines()[-1])
    assert field in said
    assert words in said


def test_unknown_field_is_named(cluster: Cluster, namespace: str) -> None:
    bad = copy.deepcopy(GOOD)
    bad["spec"]["tiers"]["decode"]["replicas"] = 3
    with pytest.raises(KubectlError, match=r'unknown field "spec\.tiers\.decode\.replicas"'):
        cluster.apply_dry(bad, namespace)


def test_tier_shape_is_immutable(cluster: Cluster, namespace: str) -> None:
    """On an object whose pods fit nowhere, so that no engine starts."""
    nowhere = {"pod": {"nodeSelector": {"example.com/nowhere": "yes"}}}
    cluster.apply(make_manifest("shape", {"serve": nowhere}), namespace=namespace)
    with pytest.raises(KubectlError, match="the shape of tiers cannot change"):
        cluster.apply(make_manifest("shape", {"prefill": nowhere, "decode": nowhere}), namespace=namespace)
    cluster.delete("inferenceservices", "shape", namespace=namespace)
