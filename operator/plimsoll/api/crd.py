"""The CustomResourceDefinitions, generated from the models.

Problem: pydantic writes JSON Schema with references, titles and `anyOf: [..., null]`. The API server requires a
structural schema: no references, no nullable fields, list types declared.

Idea: rewrite pydantic's schema and keep only the keys of a structural schema. Defaults of scalars are kept. Defaults of
objects and lists are omitted, so that stored objects contain little more than the user wrote.

    python -m plimsoll.api.crd            write crds/plimsoll.dev_*.yaml
    python -m plimsoll.api.crd --check    fail if a file differs from the models
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml
from pydantic import BaseModel

from plimsoll.api import labels
from plimsoll.api.v1alpha1.admission_limits import InferenceServiceAdmission
from plimsoll.api.v1alpha1.api_model import VALIDATIONS_KEY
from plimsoll.api.v1alpha1.checkpoint import InferenceServiceCheckpoint
from plimsoll.api.v1alpha1.service import InferenceService
from plimsoll.api.v1alpha1.service_name import NAME_RULES

Schema = dict[str, Any]

_STRUCTURAL_KEYS: Final = (
    "description",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-list-type",
    "x-kubernetes-map-type",
    "x-kubernetes-preserve-unknown-fields",
    "type",
    "format",
    "default",
    "enum",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "maxItems",
    "maxProperties",
    "required",
    "properties",
    "items",
    "additionalProperties",
    VALIDATIONS_KEY,
)


class _PrinterColumn(NamedTuple):
    """A column of `kubectl get`; wide: only with `-o wide`."""

    name: str
    json_path: str
    description: str
    value_type: str = "string"
    wide: bool = False

    def manifest(self) -> dict[str, Any]:
        column = {
            "name": self.name,
            "type": self.value_type,
            "jsonPath": self.json_path,
            "description": self.description,
        }
        return {**column, "priority": 1} if self.wide else column


_READY_CONDITION: Final = '.status.conditions[?(@.type=="Ready")]'
_COLUMNS: Final = (
    _PrinterColumn("Model", ".status.modelNames[0]", "Name that clients send as model."),
    _PrinterColumn("Ready", f"{_READY_CONDITION}.status", "Whether clients can reach the service."),
    _PrinterColumn("Prefill", ".status.tiers.prefill.summary", "Ready and desired prefill engines."),
    _PrinterColumn("Decode", ".status.tiers.decode.summary", "Ready and desired decode engines."),
    _PrinterColumn("Serve", ".status.tiers.serve.summary", "Ready and desired aggregated engines."),
    _PrinterColumn("TTFT", ".status.slo.ttft", "Time to first token at the SLO's percentile."),
    _PrinterColumn("TPOT", ".status.slo.tpot", "Time per output token at the SLO's percentile."),
    _PrinterColumn("Limited-By", ".status.limitedBy", "Tier nearest to its SLO capacity, and its tightest constraint."),
    _PrinterColumn("Reason", f"{_READY_CONDITION}.reason", "Reason of the condition Ready."),
    _PrinterColumn("Age", ".metadata.creationTimestamp", "Time since creation.", value_type="date"),
    _PrinterColumn("Offered", ".status.slo.offered", "Arrival rate of requests.", wide=True),
    _PrinterColumn(
        "Attainment",
        ".status.slo.attainment",
        "Share of the responses that met all targets (a lower bound).",
        wide=True,
    ),
    _PrinterColumn("Per-Mtok", ".status.cost.perMillionTokens", "Price of a million served output tokens.", wide=True),
    _PrinterColumn("URL", ".status.url", "Base URL for clients inside the cluster.", wide=True),
)


_CHECKPOINT_COLUMNS: Final = (
    _PrinterColumn("Written", ".state.time", "Time of the learned state.", value_type="date"),
    _PrinterColumn("Age", ".metadata.creationTimestamp", "Time since creation.", value_type="date"),
)


_ADMISSION_COLUMNS: Final = (
    _PrinterColumn(
        "Batch",
        ".limits.costModel.batch",
        "Sequences that one engine may run at once.",
        value_type="integer",
    ),
    _PrinterColumn("Age", ".metadata.creationTimestamp", "Time since creation.", value_type="date"),
)


def path_of(plural: str) -> Path:
    """Return the file of a definition, relative to the repository."""
    return Path("crds") / f"{labels.GROUP}_{plural}.yaml"


def schema() -> Schema:
    """Return the structural schema of an InferenceService."""
    structural = _object_schema(InferenceService)
    fields = structural["properties"]
    fields["status"] = _without_defaults(fields["status"])  # they would look like a change by the operator
    fields["spec"] = _described_defaults(fields["spec"])
    structural["required"] = ["spec"]
    structural[VALIDATIONS_KEY] = [
        *(rule.at_path(".metadata.name").schema() for rule in NAME_RULES),
        *structural[VALIDATIONS_KEY],
    ]
    return structural


def definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition of InferenceService."""
    names = {"kind": labels.KIND, "plural": labels.PLURAL, "shortNames": ["plim"], "categories": ["plimsoll"]}
    return _definition(names, schema(), _COLUMNS, {"subresources": {"status": {}}})


def checkpoint_definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition of InferenceServiceCheckpoint."""
    names = {"kind": labels.CHECKPOINT_KIND, "plural": labels.CHECKPOINT_PLURAL}
    return _definition(names, _object_schema(InferenceServiceCheckpoint), _CHECKPOINT_COLUMNS, {})


def admission_definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition of InferenceServiceAdmission."""
    names = {"kind": labels.ADMISSION_KIND, "plural": labels.ADMISSION_PLURAL}
    return _definition(names, _object_schema(InferenceServiceAdmission), _ADMISSION_COLUMNS, {})


def definitions() -> dict[str, dict[str, Any]]:
    """Return every CustomResourceDefinition, by plural name."""
    return {
        labels.PLURAL: definition(),
        labels.ADMISSION_PLURAL: admission_definition(),
        labels.CHECKPOINT_PLURAL: checkpoint_definition(),
    }


def render(crd: dict[str, Any]) -> str:
    """Return the text of a definition's file."""
    head = "# Generated by `python -m plimsoll.api.crd` from operator/plimsoll/api/v1alpha1. Edit the models.\n"
    return head + yaml.dump(crd, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def _definition(
    names: dict[str, Any], object_schema: Schema, columns: tuple[_PrinterColumn, ...], version_options: dict[str, Any]
) -> dict[str, Any]:
    version = {
        "name": labels.VERSION,
        "served": True,
        "storage": True,
        **version_options,
        "additionalPrinterColumns": [column.manifest() for column in columns],
        "schema": {"openAPIV3Schema": object_schema},
    }
    kind, plural = names["kind"], names["plural"]
    own_names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower(), **names}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{labels.GROUP}"},
        "spec": {"group": labels.GROUP, "names": own_names, "scope": "Namespaced", "versions": [version]},
    }


def _object_schema(model: type[BaseModel]) -> Schema:
    """Return the structural schema of a whole object."""
    raw_schema = model.model_json_schema(by_alias=True)
    structural = _structural(raw_schema, raw_schema.get("$defs", {}))
    fields = structural["properties"]
    for name in ("apiVersion", "kind"):
        fields[name] = {"type": "string"}
    fields["metadata"] = {"type": "object", "properties": {"name": {"type": "string"}}}
    return structural


def _structural(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """Return one node without references, null and keys that a structural schema does not allow."""
    node = _resolve(node, definitions)
    out = {key: node[key] for key in _STRUCTURAL_KEYS if key in node}
    if isinstance(out.get("default"), dict | list | None):
        out.pop("default", None)
    if "description" in out:
        out["description"] = " ".join(out["description"].split())
    if "properties" in out:
        out["properties"] = {name: _structural(child, definitions) for name, child in node["properties"].items()}
        out.pop("additionalProperties", None)
    if "items" in out:
        out["items"] = _structural(node["items"], definitions)
    _structural_map(out, definitions)
    return out


def _structural_map(out: Schema, definitions: dict[str, Schema]) -> None:
    values = out.get("additionalProperties")
    if isinstance(values, dict):
        out["additionalProperties"] = _structural(values, definitions)
    else:
        out.pop("additionalProperties", None)


def _without_defaults(node: Schema) -> Schema:
    """Return the node without defaults, at any depth."""
    out = {key: value for key, value in node.items() if key != "default"}
    if "items" in out:
        out["items"] = _without_defaults(out["items"])
    if "properties" in out:
        out["properties"] = {name: _without_defaults(child) for name, child in out["properties"].items()}
    return out


def _described_defaults(node: Schema) -> Schema:
    """Return the node with its defaults in the descriptions instead, at any depth.

    A stored default differs from the user's manifest, and is a line of `kubectl describe`. The operator applies it when
    it reads.
    """
    out = {key: value for key, value in node.items() if key != "default"}
    if "default" in node and "Absent:" not in node.get("description", ""):
        out["description"] = f"{node['description']} Absent: {_default_text(node['default'])}."
    if "items" in out:
        out["items"] = _described_defaults(out["items"])
    if "properties" in out:
        out["properties"] = {name: _described_defaults(child) for name, child in out["properties"].items()}
    return out


def _default_text(default: Any) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


def _resolve(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """Return the node without reference and null (an absent field means null); its own keys override the target's."""
    if "$ref" in node:
        target = definitions[node["$ref"].rsplit("/", 1)[1]]
    elif "anyOf" in node:
        (target,) = (branch for branch in node["anyOf"] if branch.get("type") != "null")
    else:
        return node
    overrides = {key: value for key, value in node.items() if key not in ("$ref", "anyOf")}
    return {**_resolve(target, definitions), **overrides}


class _Dumper(yaml.SafeDumper):
    """YAML dumper with indented lists, no anchors, and block scalars for expressions."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "'" in data else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def main(arguments: list[str] | None = None) -> int:
    """Write or check the files below the working directory. Returns 1 if a check finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m plimsoll.api.crd", description=str(__doc__).splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file is out of date")
    check = parser.parse_args(arguments).check
    return max(write_or_check(path_of(plural), render(crd), check=check) for plural, crd in definitions().items())


def write_or_check(path: Path, text: str, *, check: bool) -> int:
    """Write a generated file, or with `check` compare it. Returns 1 if it differs, else 0."""
    if not check:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return 0
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return 0
    print(f"{path} is out of date: run `make generate`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
