"""The JSON schema for editors and catalogues is that of the CRD, and accepts what the API server accepts."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from crds import json_schema
from plimsoll.api import crd, labels
from tests.api.manifests import Manifest, adopted, adopted_pair, aggregated, edited, engine_examples, examples, service
from tests.api.valid_manifests import VALID_ADOPTED, VALID_AGGREGATED, VALID_EDITS, VALID_PAIRS
from tests.chart.rendering import ROOT

PATH = ROOT / json_schema.path_of(crd.definition())
SCHEMA = json.loads(PATH.read_text())
VALIDATOR = Draft7Validator(SCHEMA)


def problems(manifest: Manifest) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(manifest)]


def test_file_matches_models() -> None:
    assert json_schema.json_schema(crd.definition()) == SCHEMA, "run `make generate`"


def test_schema_is_valid_json_schema() -> None:
    Draft7Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == json_schema.DIALECT
    assert "x-kubernetes" not in PATH.read_text()


def test_path_is_that_of_schema_catalogues() -> None:
    """{{.Group}}/{{.ResourceKind}}_{{.ResourceAPIVersion}}.json, as kubeconform fills it in."""
    group, version = labels.API_VERSION.split("/")
    assert PATH.relative_to(ROOT / "crds" / "schemas").as_posix() == f"{group}/{labels.KIND.lower()}_{version}.json"


def test_every_example_is_valid() -> None:
    gitops = yaml.safe_load((ROOT / "examples" / "gitops" / "services" / "chat.yaml").read_text())
    manifests = {**examples(), **engine_examples(), "gitops": gitops}
    assert {name: found for name, manifest in manifests.items() if (found := problems(manifest))} == {}


def test_boundary_values_are_valid() -> None:
    tables = [(service, VALID_EDITS), (aggregated, VALID_AGGREGATED), (adopted, VALID_ADOPTED)]
    tables.append((adopted_pair, VALID_PAIRS))
    cases = [(edits, base(**edits)) for base, table in tables for edits in table]
    assert {str(edits): found for edits, manifest in cases if (found := problems(manifest))} == {}


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("spec.slo.tftt", "1s", "'tftt' was unexpected"),
        ("spec.engine.runtime", "vlm", "'vlm' is not one of"),
        ("spec.tiers.prefill.maxReplicas", "4", "is not of type 'integer'"),
        ("apiVersion", "plimsoll.dev/v1", "'plimsoll.dev/v1' is not one of"),
        ("extra", 1, "'extra' was unexpected"),
    ],
)
def test_mistake_is_named(path: str, value: Any, expected: str) -> None:
    [message] = problems(edited(examples()["prefill-decode"], {path: value}))
    assert expected in message


def test_field_of_int_or_string_and_open_object_stay_open() -> None:
    open_object = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert "additionalProperties" not in json_schema.translate(
        {**open_object, "x-kubernetes-preserve-unknown-fields": True}
    )
    assert json_schema.translate({"x-kubernetes-int-or-string": True}) == {
        "anyOf": [{"type": "integer"}, {"type": "string"}]
    }
    values = {"type": "object", "additionalProperties": open_object}
    assert json_schema.translate(values)["additionalProperties"]["additionalProperties"] is False
