"""What is read off the machine."""

from __future__ import annotations

import pytest

from e2e.cluster.facts import collect, sys_resource
from e2e.cluster.shell import CommandFailed


@pytest.mark.parametrize(
    ("mask", "there"),
    [("000001ffffffffff", True), ("000001fffeffffff", False), ("0000000001000000", True), ("0000000000000000", False)],
)
def test_sys_resource_is_bit_24_of_bounding_set(mask: str, there: bool) -> None:
    assert sys_resource(f"CapEff:\t0000000000000000\nCapBnd:\t{mask}\nCapAmb:\t0000000000000000\n") is there


def test_collect_unsupported_kubernetes_version_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIMSOLL_KUBERNETES", "1.29.0")
    with pytest.raises(CommandFailed, match=r"'1\.29\.0' is not supported; use v1\.36\.3 or v1\.37\.0"):
        collect()
