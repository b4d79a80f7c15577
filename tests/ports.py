"""Ports for servers that tests start, each given once.

Problem: a port that the kernel picks for a moment (bind to 0, close) can be picked again for another test's server or
for an outgoing connection before the server binds it. Idea: ports below the kernel's own range, from an offset of this
process on, so that test workers do not meet. A port is tried before it is given, because others may listen there.
"""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

_LOWEST = 10_000
_HIGHEST = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]) - 1
_STRIDE = 1_009  # between processes whose ids follow one another
_offsets = itertools.count(os.getpid() * _STRIDE)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody holds, and that this process has not given before.

    Raises OSError where all are held.
    """
    count = _HIGHEST - _LOWEST + 1
    for offset in itertools.islice(_offsets, count):
        port = _LOWEST + offset % count
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port from {_LOWEST} to {_HIGHEST}")


def free_ports(count: int) -> list[int]:
    """Several of them."""
    return [free_port() for _ in range(count)]
