"""A stored checkpoint is restored completely, and written again as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.state_checkpoint import dump_service_state, restore_service_state

STORED: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "checkpoint" / "service.json").read_text())


def restored(stored: Any) -> dict[str, Any]:
    service = ServiceState.for_roles(["serve"])
    restore_service_state(service, stored)
    return json.loads(json.dumps(dump_service_state(service), allow_nan=False))  # type: ignore[no-any-return]


def test_stored_checkpoint_is_restored_completely() -> None:
    assert restored(STORED) == STORED


def test_earlier_checkpoint_without_itl_limit_keeps_the_rest() -> None:
    earlier = {name: part for name, part in STORED["tiers"]["serve"].items() if name != "itl_limit"}
    no_limit = restored(None)["tiers"]["serve"]["itl_limit"]
    assert restored(STORED | {"tiers": {"serve": earlier}}) == STORED | {
        "tiers": {"serve": earlier | {"itl_limit": no_limit}}
    }
    assert len(earlier["limits"]["measured"]) == 11


@pytest.mark.parametrize("part", ["scaling", "ttft_offset", "pauses", "retuning", "lengths", "noticed_classes"])
def test_invalid_service_part_is_reset_alone(part: str) -> None:
    empty = restored(None)
    assert STORED[part] != empty[part]
    assert restored(STORED | {part: "garbage"}) == STORED | {part: empty[part]}


@pytest.mark.parametrize("part", ["starts", "demand", "speed", "limits", "itl_limit"])
def test_invalid_tier_part_is_reset_alone(part: str) -> None:
    tier, empty = STORED["tiers"]["serve"], restored(None)["tiers"]["serve"]
    assert tier[part] != empty[part]
    damaged = STORED | {"tiers": {"serve": tier | {part: "garbage"}}}
    assert restored(damaged) == STORED | {"tiers": {"serve": tier | {part: empty[part]}}}
