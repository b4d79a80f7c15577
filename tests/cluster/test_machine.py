"""The Docker daemon of our own."""

from __future__ import annotations

from e2e.cluster.docker_daemon import daemon_environment
from e2e.cluster.settings import BIN


def test_daemon_environment_path_omits_node_containerd() -> None:
    found = daemon_environment({"PATH": f"/usr/local/bin:{BIN}:/usr/bin", "HOME": "/root"})
    assert found == {"PATH": "/usr/local/bin:/usr/bin", "HOME": "/root"}
