"""Generates the JSON schema of InferenceService for editors, schema catalogues and tools such as kubeconform.

Problem: these tools read JSON Schema, and look for it under the path that catalogues of CRDs use. The schema in a CRD
is of another dialect. It accepts unknown fields, because the API server removes them.

Idea: translate the CRD's schema. Objects accept the fields that they name only, so that a misspelt field is an error.
The rules in CEL have no counterpart: the API server alone checks them.

    python crds/json_schema.py            writes what differs
    python crds/json_schema.py --check    writes nothing, names what differs and exits 1
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from plimsoll.api import crd

ROOT = Path(__file__).resolve().parents[1]
DIALECT = "http://json-schema.org/draft-07/schema#"
_EXTENSION = "x-kubernetes-"

Schema = dict[str, Any]


def path_of(definition: Schema) -> Path:
    """Return the file of a definition's schema, relative to the repository: GROUP/KIND_VERSION.json in lower case."""
    spec = definition["spec"]
    name = f"{spec['names']['kind'].lower()}_{spec['versions'][0]['name']}.json"
    return Path("crds") / "schemas" / str(spec["group"]) / name


def json_schema(definition: Schema) -> Schema:
    """Return the JSON schema of the objects of a definition."""
    spec = definition["spec"]
    version = spec["versions"][0]
    root = translate(version["schema"]["openAPIV3Schema"])
    root["properties"] |= {
        "apiVersion": {"type": "string", "enum": [f"{spec['group']}/{version['name']}"]},
        "kind": {"type": "string", "enum": [spec["names"]["kind"]]},
        "metadata": {"type": "object"},
    }
    root["required"] = ["apiVersion", "kind", "metadata", *root["required"]]
    return {"$schema": DIALECT, **root}


def translate(node: Schema) -> Schema:
    """Return one node of a structural schema, and all below it, as JSON Schema."""
    out = {key: value for key, value in node.items() if not key.startswith(_EXTENSION)}
    if node.get(f"{_EXTENSION}int-or-string"):
        out["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in node:
        out["properties"] = {name: translate(child) for name, child in node["properties"].items()}
        if not node.get(f"{_EXTENSION}preserve-unknown-fields"):
            out["additionalProperties"] = False
    elif isinstance(node.get("additionalProperties"), dict):
        out["additionalProperties"] = translate(node["additionalProperties"])
    if "items" in node:
        out["items"] = translate(node["items"])
    return out


def main(arguments: list[str]) -> int:
    definition = crd.definition()
    path, text = ROOT / path_of(definition), json.dumps(json_schema(definition), indent=1) + "\n"
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return 0
    if "--check" in arguments:
        print(f"{path.relative_to(ROOT)} is out of date: run `make generate`", file=sys.stderr)
        return 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
