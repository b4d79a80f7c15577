"""v1beta1 on a real API server: every field is equal in both versions, and none is served unless asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.api import labels
from plimsoll.api.next_version import NEXT_VERSION, convert, definition, main
from plimsoll.api.v1alpha1 import parse
from tests.api.manifests import Manifest, adopted, aggregated, engine_examples, examples, service
from tests.api.statuses import STATUS
from tests.api.valid_manifests import VALID_ADOPTED, VALID_AGGREGATED, VALID_EDITS
from tests.apiserver import api_server
from tests.crds.conftest import Kubectl

OLD_PLURAL, NEXT_PLURAL = (f"{labels.PLURAL}.{version}.{labels.GROUP}" for version in (labels.VERSION, NEXT_VERSION))
TABLES = ((service, VALID_EDITS), (aggregated, VALID_AGGREGATED), (adopted, VALID_ADOPTED))
MANIFESTS: list[Manifest] = [
    *examples().values(),
    *engine_examples().values(),
    *(base(**edits) for base, table in TABLES for edits in table),
]


@pytest.fixture
def both_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Kubectl]:
    """A cluster of its own that serves both versions, because a second one changes what `kubectl get plim` means."""
    path = tmp_path / "crd.yaml"
    assert main(["--serve"]) == 0
    path.write_text(capsys.readouterr().out)
    with api_server("AlwaysAllow") as server:
        server.install_crds([path])
        yield Kubectl(server)


def fields(value: object, path: str = "") -> set[str]:
    """Paths of all fields, each with the type of its value. Entries of a list have one path."""
    if isinstance(value, dict):
        return {path}.union(*(fields(one, f"{path}.{name}") for name, one in value.items()))
    if isinstance(value, list):
        return {path}.union(*(fields(one, f"{path}[]") for one in value))
    return {f"{path}:{type(value).__name__}"}


def with_all_fields(manifests: list[Manifest]) -> list[Manifest]:
    """A few of the manifests, which have all fields of all of them: a schema loses a field in each or in none."""
    left = [(one, fields(one["spec"])) for one in manifests]
    chosen: list[Manifest] = []
    while left:
        best, found = max(left, key=lambda one: len(one[1]))
        chosen.append(best)
        left = [(one, others - found) for one, others in left if others - found]
    return chosen


def numbered(manifests: list[Manifest]) -> list[Manifest]:
    """The manifests under names of their own."""
    return [{**one, "metadata": {"name": f"m{number}", "namespace": "default"}} for number, one in enumerate(manifests)]


def content(item: Manifest) -> dict[str, Any]:
    """What the user and the operator wrote."""
    return {"spec": item["spec"], "status": item.get("status")}


def by_name(items: list[Manifest]) -> dict[str, Manifest]:
    return {item["metadata"]["name"]: item for item in items}


@pytest.mark.api
def test_objects_round_trip_through_the_api_server(both_versions: Kubectl) -> None:
    created = numbered(with_all_fields(MANIFESTS))
    both_versions.run_ok("create", "-f", "-", stdin="\n---\n".join(json.dumps(one) for one in created))
    status = json.dumps({"status": STATUS.manifest()})
    both_versions.run_ok("patch", labels.PLURAL, "m0", "--subresource=status", "--type=merge", "-p", status)
    old = by_name(both_versions.get(OLD_PLURAL)["items"])
    new = by_name(both_versions.get(NEXT_PLURAL)["items"])
    assert len(new) == len(created)
    assert {item["apiVersion"] for item in new.values()} == {f"{labels.GROUP}/{NEXT_VERSION}"}
    assert new == {name: convert(item, NEXT_VERSION) for name, item in old.items()}
    both_versions.run_ok("replace", "-f", "-", stdin="\n---\n".join(json.dumps(item) for item in new.values()))
    again = by_name(both_versions.get(OLD_PLURAL)["items"])
    assert {name: content(item) for name, item in again.items()} == {name: content(item) for name, item in old.items()}


def test_stored_manifests_have_each_field_of_all() -> None:
    stored = with_all_fields(MANIFESTS)
    assert len(stored) < len(MANIFESTS)
    everything = set[str]().union(*(fields(one["spec"]) for one in MANIFESTS))
    assert set[str]().union(*(fields(one["spec"]) for one in stored)) == everything


@given(st.sampled_from(MANIFESTS), st.lists(st.sampled_from([labels.VERSION, NEXT_VERSION]), max_size=6))
@settings(deadline=None)
def test_convert_loses_nothing_along_any_way(manifest: Manifest, way: list[str]) -> None:
    found = manifest
    for version in [*way, labels.VERSION]:
        found = convert(found, version)
    assert found == manifest
    assert parse(found) == parse(manifest)


def test_convert_refuses_versions_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="'v2': use one of v1alpha1, v1beta1"):
        convert(service(), "v2")
    with pytest.raises(ValueError, match="apiVersion is None"):
        convert({"spec": {}}, NEXT_VERSION)


def test_next_version_is_unserved_unless_asked_for() -> None:
    versions = definition()["spec"]["versions"]
    assert [(one["name"], one["served"], one["storage"]) for one in versions] == [
        (labels.VERSION, True, True),
        (NEXT_VERSION, False, False),
    ]


def test_definition_fits_into_an_object_of_etcd() -> None:
    """An object of more than 1.5 MiB is refused. What the API server adds is small compared with the schemas."""
    assert len(json.dumps(definition(serve=True))) < 1 << 20
