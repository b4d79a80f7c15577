"""The reference page of InferenceService, generated from the same schema as the CRD.

python -m plimsoll.api.reference            write docs/reference/inferenceservice.md
python -m plimsoll.api.reference --check    fail if that file differs from the models
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from plimsoll.api import crd, labels
from plimsoll.api.v1alpha1.base import VALIDATIONS
from plimsoll.api.v1alpha1.tiers import ROLES

PATH: Final = Path("docs") / "reference" / f"{labels.KIND.lower()}.md"

Schema = dict[str, Any]

_TIER: Final = "TIER"  # stands for all tiers, whose fields are the same
_ROLE: Final = re.compile(rf"\.({'|'.join(ROLES)})$")

_HEAD: Final = f"""# {labels.KIND}

<!-- Made by `python -m plimsoll.api.reference` from operator/plimsoll/api/v1alpha1; edit the models instead. -->

`apiVersion: {labels.API_VERSION}`, `kind: {labels.KIND}`, namespaced. `kubectl get plim` (or `plimsoll`) lists them;
`kubectl explain plim.spec` has the same words as this page. Complete manifests are in `crds/examples/`.

{_TIER} stands for `prefill`, `decode` or `serve`. A default in the table is written into the object when it is stored.
Where the meaning says what an absent field means, nothing is written, so that a later change of the chart's or the
operator's default reaches the object.
"""


def render() -> str:
    """The page's text."""
    fields = dict(_fields("", crd.schema()))
    parts = [
        _HEAD,
        "## Spec\n",
        _table((path, node) for path, node in fields.items() if path.startswith("spec.")),
        "## Rules\n",
        "A manifest that breaks one of these is refused when it is applied, and named in the condition `Stalled` with"
        " reason `InvalidSpec` where the cluster has an older definition.\n",
        "\n".join(_rules(fields)) + "\n",
        "## Status\n",
        _table((path, node) for path, node in fields.items() if path.startswith("status.")),
        "## Columns\n",
        _columns(),
    ]
    return "\n".join(parts)


def _fields(path: str, node: Schema) -> Iterator[tuple[str, Schema]]:
    """Every field with its path, parents first; the tiers once."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        at = f"{path}.{name}".removeprefix(".")
        yield at, child
        yield from _below(_one_tier(at), child)


def _one_tier(path: str) -> str:
    return _ROLE.sub(f".{_TIER}", path)


def _below(path: str, node: Schema) -> Iterator[tuple[str, Schema]]:
    for found, child in _fields(path, node):
        if found != path:
            yield found, child
    items = node.get("items", {})
    if items:
        yield from ((f"{path}[]{found.removeprefix(path)}", child) for found, child in _fields(path, items))


def _table(rows: Iterator[tuple[str, Schema]]) -> str:
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for path, node in sorted(rows, key=lambda row: _TIER in row[0]):  # the fields of all tiers behind the tiers' names
        if path.endswith("[]"):
            continue
        shown = path.split(".", 1)[1]
        default = f"`{json.dumps(node['default'])}`" if "default" in node else ""
        lines.append(f"| `{shown}` | {_type(node)} | {default} | {_cell(node.get('description', ''))} |")
    return "\n".join(lines) + "\n"


def _type(node: Schema) -> str:
    if node.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if "enum" in node:
        return " or ".join(f"`{value}`" for value in node["enum"])
    match node.get("type"):
        case "integer" if "maximum" in node:
            return f"integer, {node['minimum']} to {node['maximum']}"
        case "array":
            return f"list of {_type(node['items'])}, at most {node['maxItems']}"
        case "object" if "additionalProperties" in node:
            return f"map to {_type(node['additionalProperties'])}, at most {node['maxProperties']}"
        case kind:
            return str(kind)


def _rules(fields: dict[str, Schema]) -> Iterator[str]:
    """One line for each rule, under the field that it blames; the tiers once."""
    seen = set()
    for path, node in fields.items():
        for at, entry in _validations(path, node):
            line = f"- `{at}`: {entry['message']}"
            if line not in seen:
                seen.add(line)
                yield line


def _validations(path: str, node: Schema) -> Iterator[tuple[str, Schema]]:
    path = _one_tier(path)
    for entry in node.get(VALIDATIONS, []):
        yield f"{path}{entry.get('fieldPath', '')}".removeprefix("."), entry
    for entry in node.get("additionalProperties", {}).get(VALIDATIONS, []):
        yield f"{path}[KEY]", entry


def _columns() -> str:
    lines = ["| column | meaning |", "|---|---|"]
    version = crd.definition()["spec"]["versions"][0]
    for column in version["additionalPrinterColumns"]:
        wide = " Only with `-o wide`." if column.get("priority") else ""
        lines.append(f"| {column['name'].upper()} | {_cell(column['description'])}{wide} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: list[str] | None = None) -> int:
    """Write or check the page below the current folder; 1 if a check found a difference."""
    parser = argparse.ArgumentParser(prog="python -m plimsoll.api.reference", description=str(__doc__).splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file is not up to date")
    return crd.publish(PATH, render(), check=parser.parse_args(arguments).check)


if __name__ == "__main__":
    sys.exit(main())
