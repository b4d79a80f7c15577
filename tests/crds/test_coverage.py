"""No constraint without a manifest that breaks it: the tables cover all that the definition demands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from plimsoll.api import crd
from plimsoll.api.v1alpha1 import parse
from plimsoll.core.errors import InvalidSpec
from tests.api.all_cases import ALL_CASES
from tests.api.cases import Case

# What the API server says when one of these is broken.
WORDS = {
    "minimum": "greater than or equal to",
    "maximum": "less than or equal to",
    "minLength": "at least 1 chars",
    "maxLength": "Too long",
    "maxItems": "Too many",
    "maxProperties": "Too many",
    "enum": "Unsupported value",
}


def constraints() -> Iterator[tuple[str, str, str]]:
    """Path, keyword and words of every constraint on the spec; a rule's words are its message."""
    for path, node in _nodes("spec", crd.schema()["properties"]["spec"]):
        for keyword, words in WORDS.items():
            if keyword in node:
                yield path, keyword, words
        for name in node.get("required", []):
            yield f"{path}.{name}", "required", "Required value"
        for rule in node.get("x-kubernetes-validations", []):
            if "oldSelf" not in rule["rule"]:
                at = _common(path + rule.get("fieldPath", ""))
                yield at, "rule", "" if "messageExpression" in rule else rule["message"]


def _nodes(path: str, node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema by its path; the tiers share their names, as do a list's items and a mapping's values. Kubernetes'
    own schemas, which have no descriptions, are left out."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        if "description" not in child:
            continue
        yield from _nodes(_common(f"{path}.{name}"), child)
    for below in ("items", "additionalProperties"):
        if below in node:
            yield from _nodes(f"{path}[]", node[below])


def _common(path: str) -> str:
    path = re.sub(r"^spec\.(tiers|targets)\.(prefill|decode|serve)\b", r"spec.\1.TIER", path)
    path = re.sub(r"(nodeSelector|labels|annotations|requests|limits)\.[^.]+$", r"\1[]", path)
    return re.sub(r"\[\d+\]", "[]", path)


def _error_words(case: Case) -> str:
    """The words against one case: the API server's own, and those of our rules."""
    with pytest.raises(InvalidSpec) as caught:
        parse(case.manifest())
    return " ".join([case.server_message, *caught.value.problems])


def test_every_constraint_is_broken_by_a_case() -> None:
    said: dict[str, str] = {}
    for case in ALL_CASES:
        said[_common(case.path)] = said.get(_common(case.path), "") + _error_words(case)
    missing = {f"{path}: {key} {words}" for path, key, words in constraints() if words not in said.get(path, "\0")}
    assert not missing, "\n".join(sorted(missing))
