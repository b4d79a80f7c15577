"""The generated definition: up to date, small, structural, and bounded everywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from plimsoll.api import crd
from tests.apiserver import CRDS, ROOT

LARGEST_BYTES = 220_000
FOREIGN = {"$ref", "$defs", "anyOf", "oneOf", "allOf", "title", "const", "nullable", "prefixItems", "exclusiveMinimum"}


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema below one, by its path."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in node:
            yield from nodes(node[key], f"{path}[{key}]")


# Fields whose schemas are those of Kubernetes.
KUBERNETES_OWN = re.compile(r"\.pod\.(affinity|volumes|topologySpreadConstraints)\b.*\.")
DEPRECATED_VOLUMES = {
    "awsElasticBlockStore", "azureDisk", "azureFile", "cephfs", "cinder", "flexVolume", "flocker", "gcePersistentDisk",
    "gitRepo", "glusterfs", "photonPersistentDisk", "portworxVolume", "quobyte", "rbd", "scaleIO", "storageos",
    "vsphereVolume",
}  # fmt: skip

NODES = dict(nodes(crd.schema()))
SPEC = {path: node for path, node in NODES.items() if path.startswith((".spec", ".status"))}


def test_crd_file_is_up_to_date() -> None:
    files = {path: path.read_text(encoding="utf-8") for path in CRDS}
    assert files == {ROOT / crd.path_of(plural): crd.render(one) for plural, one in crd.definitions().items()}


def test_crd_file_is_small_and_has_no_template_syntax() -> None:
    """kubectl stores the JSON of what it applies in an annotation, which holds 256 KiB."""
    text = crd.render(crd.definition())
    assert len(json.dumps(crd.definition(), separators=(",", ":"))) < LARGEST_BYTES
    assert "{{" not in text
    assert yaml.safe_load(text) == crd.definition()


def test_crd_schema_has_only_structural_keywords() -> None:
    assert {path: FOREIGN & node.keys() for path, node in NODES.items() if FOREIGN & node.keys()} == {}


def test_crd_every_field_has_a_description() -> None:
    missing = [path for path, node in SPEC.items() if not path.endswith("]") and not node.get("description")]
    assert [path for path in missing if not KUBERNETES_OWN.search(path)] == []


def test_crd_keeps_no_unknown_field_of_users() -> None:
    """An object of any depth or size would end whatever reads it."""
    key = "x-kubernetes-preserve-unknown-fields"
    assert [path for path, node in NODES.items() if node.get(key)] == []


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("affinity", client.V1Affinity),
        ("volumes[items]", client.V1Volume),
        ("topologySpreadConstraints[items]", client.V1TopologySpreadConstraint),
    ],
)
def test_crd_has_fields_of_kubernetes(path: str, kind: type) -> None:
    """Every field that Kubernetes' client knows exists here, but for the deprecated kinds of volumes."""
    known = {name.removesuffix("_") for name in kind.attribute_map.values()}
    found = NODES[f".spec.tiers.serve.pod.{path}"]["properties"].keys()
    assert known - DEPRECATED_VOLUMES <= found


def test_crd_every_size_is_bounded() -> None:
    for path, node in SPEC.items():
        match node.get("type"):
            case "string":
                assert node.keys() & {"maxLength", "enum", "format"}, path
            case "array":
                assert {"maxItems", "x-kubernetes-list-type"} <= node.keys(), path
            case "object" if "additionalProperties" in node:
                assert "maxProperties" in node, path


def test_crd_has_no_defaults_but_describes_them() -> None:
    assert [path for path, node in NODES.items() if "default" in node] == []
    assert SPEC[".spec.slo.percentile"]["description"].endswith(" Absent: 95.")
    assert SPEC[".spec.tiers.serve.pod.ipcLock"]["description"].endswith(" Absent: false.")


def test_check_reports_difference_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert crd.main(["--check"]) == 1
    assert "make generate" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert crd.main([]) == 0
    assert crd.main(["--check"]) == 0
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {path.name for path in CRDS}
