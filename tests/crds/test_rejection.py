"""The API server refuses what breaks a rule, names the field, and says what to write instead.

The same tables as for `parse`, through both ways of applying; each way validates a whole table in one call of kubectl.
"""

from __future__ import annotations

import re

import pytest

from tests.api.all_cases import ALL_CASES
from tests.api.cases import Case
from tests.api.manifests import examples
from tests.api.mutations import Mutation, mutations
from tests.crds.conftest import APPLY_MODES, Kubectl

pytestmark = pytest.mark.api


@pytest.mark.parametrize("way", APPLY_MODES)
def test_broken_rule_names_field_and_remedy(kubectl: Kubectl, way: str) -> None:
    said_by_case = kubectl.validate([case.manifest() for case in ALL_CASES], *APPLY_MODES[way])
    pairs = zip(ALL_CASES, said_by_case, strict=True)
    assert [(case.name, said) for case, said in pairs if not _is_explained(case, way, said)] == []


@pytest.mark.parametrize("way", APPLY_MODES)
@pytest.mark.parametrize("example", examples())
def test_wrong_type_names_field(kubectl: Kubectl, example: str, way: str) -> None:
    broken = list(mutations(example, examples()[example]))
    errors_by_way = kubectl.validate([mutation.manifest for mutation in broken], *APPLY_MODES[way])
    assert [said for mutation, said in zip(broken, errors_by_way, strict=True) if not _is_named(mutation, said)] == []


def _is_named(mutation: Mutation, error: str) -> bool:
    path, said = _without_positions(mutation.path), _without_positions(error)
    return f"{path}: " in said or f'unknown field "{path}"' in said


def _is_explained(case: Case, way: str, said: str) -> bool:
    typed = case.typed if way == "server-side" else None
    path, words = typed or (case.path, case.server_message or case.message)
    return f"{path}: " in _keys_as_fields(said) and words in said


def _keys_as_fields(said: str) -> str:
    """The API server writes a key of a mapping as `.cpu` or as `[cpu]`, after what finds fault with it."""
    return re.sub(r"\[([A-Za-z][A-Za-z0-9./-]*)\]", r".\1", said)


def _without_positions(said: str) -> str:
    """Items of lists are `[0]`, `[name="A"]`, `[="Mon"]` or `: element 0`, after what finds fault with them."""
    said = re.sub(r'\[\w*=(\[\]|"[^"]*"|[^\]]*)\]|\[\d+\]|: element \d+', "[]", said)
    return _keys_as_fields(said)
