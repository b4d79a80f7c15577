"""The text of starting pods in the status, written by the operator and read by gateways and the CLI."""

from __future__ import annotations

import pytest

from plimsoll.api.starting_pods import StartingPods, parse_starting


@pytest.mark.parametrize(
    ("pods", "text"),
    [
        (StartingPods(2), "2"),
        (StartingPods(2, 1), "2, 1 overdue"),
        (StartingPods(2, 0, "2026-01-01T00:00:00Z"), "2, next at 2026-01-01T00:00:00Z"),
        (StartingPods(3, 1, "2026-01-01T00:00:00Z"), "3, 1 overdue, next at 2026-01-01T00:00:00Z"),
    ],
)
def test_starting_pods_are_read_as_written(pods: StartingPods, text: str) -> None:
    assert str(pods) == text
    assert parse_starting(text) == pods


@pytest.mark.parametrize("text", [None, 2, {}, "", "two", "2,", "2, next at ", "-1", "2, 1 overdue, and more"])
def test_other_text_is_no_starting_pods(text: object) -> None:
    assert parse_starting(text) is None
