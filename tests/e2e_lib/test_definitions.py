"""A definition that was just installed is waited for, whatever its status says yet."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from e2e.lib import definitions

ESTABLISHED = {"status": {"conditions": [{"type": "Established", "status": "True"}]}}
NEW: dict[str, Any] = {"status": {"conditions": None}}


def printing(*answers: dict[str, Any]) -> Callable[..., str]:
    """A kubectl that gives these answers, one each time."""
    left = iter(answers)
    return lambda *_: json.dumps(next(left))


def test_a_definition_without_conditions_is_waited_for() -> None:
    definitions.wait_until_established(printing(NEW, ESTABLISHED), "crd/one")


def test_of_several_definitions_the_last_is_waited_for() -> None:
    both = printing({"items": [ESTABLISHED, NEW]}, {"items": [ESTABLISHED, ESTABLISHED]})
    definitions.wait_until_established(both, "crd/one", "crd/two")


def test_a_definition_that_is_never_established_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definitions, "SERVED_S", 0)
    with pytest.raises(AssertionError, match="established: crd/one"):
        definitions.wait_until_established(printing(NEW, NEW, NEW), "crd/one")
