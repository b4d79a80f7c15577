"""Ports of tests: outside the kernel's range, each given once, and none that is held."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path

import pytest

from tests import ports


def test_free_ports_are_distinct_and_below_the_kernels() -> None:
    found = ports.free_ports(50)
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(found)) == 50
    assert all(port < lowest for port in found)


def test_free_port_that_is_held_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    held = ports.free_port()
    with socket.socket() as other:
        other.bind(("127.0.0.1", held))
        monkeypatch.setattr(ports, "_offsets", itertools.count(held - 10_000))
        assert ports.free_port() > held
