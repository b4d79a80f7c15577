"""What is read off the machine."""

from __future__ import annotations

import pytest

from e2e.cluster.facts import sys_resource


@pytest.mark.parametrize(
    ("mask", "there"),
    [("000001ffffffffff", True), ("000001fffeffffff", False), ("0000000001000000", True), ("0000000000000000", False)],
)
def test_sys_resource_is_bit_24_of_bounding_set(mask: str, there: bool) -> None:
    assert sys_resource(f"CapEff:\t0000000000000000\nCapBnd:\t{mask}\nCapAmb:\t0000000000000000\n") is there
