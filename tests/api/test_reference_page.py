"""The generated page of InferenceService."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.api import reference

PAGE = Path(__file__).parents[2] / reference.PATH


def test_reference_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference.render()


@pytest.mark.parametrize(
    "line",
    [
        "| `tiers.TIER.gpus` | integer, 0 to 64 | `1` | GPUs of each engine. |",
        "| `engine.env[].valueFrom.secretKeyRef.name` | string |  | Name of the object. |",
        "- `spec.tiers.TIER.maxReplicas`: maxReplicas must not be below minReplicas",
        "| `tiers.TIER.summary` | string |  | ready/desired. |",
        "| `scaling.warmReplicas` | integer, 0 to 1000 | `0` | Replicas of each tier kept beyond its need, up to"
        " maxReplicas. |",
        "| `coldStart.TIER.phases[].name` | string |  | Name of the phase, such as pull or load. |",
        "| `decisions[].tiers.TIER.to` | integer |  | Replicas decided on. |",
        "- `spec.scaling.prefillPerDecode`: prefillPerDecode is only for prefill and decode tiers, not for serve",
        "| URL | Base URL for clients inside the cluster. Only with `-o wide`. |",
        "| MODEL | Name that clients send as model. |",
    ],
)
def test_reference_page_has_line_per_field_rule_and_column(line: str) -> None:
    assert reference.render().splitlines().count(line) == 1
