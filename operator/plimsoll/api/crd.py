"""The CustomResourceDefinition, generated from the models.

Problem: pydantic writes JSON Schema with references, titles and `anyOf: [..., null]`; the API server wants a structural
schema: everything in line, nothing nullable, list types declared.

Idea: take pydantic's schema and rewrite it, keeping only what a structural schema may have. Defaults of plain values
are kept; those of objects and lists are not written, so that stored objects hold what the user wrote and little more.

    python -m plimsoll.api.crd            write crds/plimsoll.dev_inferenceservices.yaml
    python -m plimsoll.api.crd --check    fail if that file differs from the models
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from plimsoll.api import labels
from plimsoll.api.v1alpha1.base import VALIDATIONS
from plimsoll.api.v1alpha1.names import NAME_RULES
from plimsoll.api.v1alpha1.service import InferenceService

PATH: Final = Path("crds") / f"{labels.GROUP}_{labels.PLURAL}.yaml"

Schema = dict[str, Any]

_KEPT: Final = (
    "description",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-list-type",
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
    VALIDATIONS,
)


class _Column(NamedTuple):
    """A column of `kubectl get`; wide: only with `-o wide`."""

    name: str
    path: str
    about: str
    kind: str = "string"
    wide: bool = False

    def entry(self) -> dict[str, Any]:
        said = {"name": self.name, "type": self.kind, "jsonPath": self.path, "description": self.about}
        return {**said, "priority": 1} if self.wide else said


_CONDITION: Final = '.status.conditions[?(@.type=="Ready")]'
_COLUMNS: Final = (
    _Column("Model", ".status.modelNames[0]", "Name that clients send as model."),
    _Column("Ready", f"{_CONDITION}.status", "Whether clients get answers."),
    _Column("Prefill", ".status.tiers.prefill.summary", "Prefill engines, ready/desired."),
    _Column("Decode", ".status.tiers.decode.summary", "Decode engines, ready/desired."),
    _Column("Serve", ".status.tiers.serve.summary", "Aggregated engines, ready/desired."),
    _Column("TTFT", ".status.slo.ttft", "Time to the first token, at the promise's percentile."),
    _Column("TPOT", ".status.slo.tpot", "Time per output token, at the promise's percentile."),
    _Column("Limited-By", ".status.limitedBy", "The tier nearest to its load line, and what breaks first."),
    _Column("Reason", f"{_CONDITION}.reason", "Why it is ready or not."),
    _Column("Age", ".metadata.creationTimestamp", "Time since it was made.", kind="date"),
    _Column("Offered", ".status.slo.offered", "Requests that arrive.", wide=True),
    _Column("Attainment", ".status.slo.attainment", "Share of the answers that kept all targets, at least.", wide=True),
    _Column("Per-Mtok", ".status.cost.perMillionTokens", "Price of a million output tokens.", wide=True),
    _Column("URL", ".status.url", "Base URL for clients inside the cluster.", wide=True),
)


def schema() -> Schema:
    """The structural schema of an InferenceService."""
    made = InferenceService.model_json_schema(by_alias=True)
    root = _structural(made, made.get("$defs", {}))
    fields = root["properties"]
    for name in ("apiVersion", "kind"):
        fields[name] = {"type": "string"}
    fields["metadata"] = {"type": "object", "properties": {"name": {"type": "string"}}}
    fields["status"] = _without_defaults(fields["status"])
    root["required"] = ["spec"]
    root[VALIDATIONS] = [*(rule.below(".metadata.name").schema() for rule in NAME_RULES), *root[VALIDATIONS]]
    return root


def definition() -> dict[str, Any]:
    """The whole CustomResourceDefinition."""
    version = {
        "name": labels.VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [column.entry() for column in _COLUMNS],
        "schema": {"openAPIV3Schema": schema()},
    }
    names = {
        "kind": labels.KIND,
        "listKind": f"{labels.KIND}List",
        "plural": labels.PLURAL,
        "singular": labels.KIND.lower(),
        "shortNames": ["plim"],
        "categories": ["plimsoll"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{labels.PLURAL}.{labels.GROUP}"},
        "spec": {"group": labels.GROUP, "names": names, "scope": "Namespaced", "versions": [version]},
    }


def render() -> str:
    """The file's text."""
    head = "# Made by `python -m plimsoll.api.crd` from operator/plimsoll/api/v1alpha1; edit the models instead.\n"
    return head + yaml.dump(definition(), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def _structural(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """One node without references, null and everything that a structural schema has no place for."""
    node = _plain(node, definitions)
    out = {key: node[key] for key in _KEPT if key in node}
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
    """The status is stored as the operator writes it: a default filled in would look like a change."""
    out = {key: value for key, value in node.items() if key != "default"}
    if "items" in out:
        out["items"] = _without_defaults(out["items"])
    if "properties" in out:
        out["properties"] = {name: _without_defaults(child) for name, child in out["properties"].items()}
    return out


def _plain(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """The node without reference and null, which an absent field says too; what stands beside them wins."""
    if "$ref" in node:
        below = definitions[node["$ref"].rsplit("/", 1)[1]]
    elif "anyOf" in node:
        (below,) = (branch for branch in node["anyOf"] if branch.get("type") != "null")
    else:
        return node
    beside = {key: value for key, value in node.items() if key not in ("$ref", "anyOf")}
    return {**_plain(below, definitions), **beside}


class _Dumper(yaml.SafeDumper):
    """Readable YAML: lists indented, no anchors, expressions as they are."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "'" in data else None)


_Dumper.add_representer(str, _Dumper.text)


def main(arguments: list[str] | None = None) -> int:
    """Write or check the file below the current folder; 1 if a check found a difference."""
    parser = argparse.ArgumentParser(prog="python -m plimsoll.api.crd", description=str(__doc__).splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file is not up to date")
    return publish(PATH, render(), check=parser.parse_args(arguments).check)


def publish(path: Path, text: str, *, check: bool) -> int:
    """Write a generated file, or compare it: 0 if all is well, 1 if it differs."""
    if not check:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return 0
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return 0
    print(f"{path} is not what the models say: run `make generate`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
