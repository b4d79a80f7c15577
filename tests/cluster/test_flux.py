"""The source that Flux gets in the cluster scenario."""

from __future__ import annotations

import io
import tarfile

import yaml

from e2e.lib import flux
from e2e.scenarios import test_flux as scenario
from plimsoll.api.v1alpha1 import parse


def test_archive_of_same_files_has_same_bytes() -> None:
    files = scenario.files(scenario.example_service())
    archive = flux._archive(files)
    assert archive == flux._archive(dict(reversed(files.items())))
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        assert opened.getnames() == sorted(files)


def test_example_service_for_flux_is_valid() -> None:
    service = scenario.example_service()
    parse(service)
    assert [one["name"] for one in service["spec"]["admission"]["classes"]] == ["people", "jobs"]


def test_files_without_service_leave_the_namespace() -> None:
    files = scenario.files(None)
    assert yaml.safe_load(files[f"{scenario.FOLDER}/kustomization.yaml"])["resources"] == ["namespace.yaml"]
    assert f"{scenario.FOLDER}/chat.yaml" not in files
