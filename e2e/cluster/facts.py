"""Looking at this machine; nothing is changed here and nothing is judged (`decide` does)."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path

from e2e.cluster import binaries, node_image
from e2e.cluster.planning import TOOLS, Facts, requested_source
from e2e.cluster.settings import (
    BASE_IMAGE,
    CACHE,
    DOCKER_DATA,
    GATEWAY_PORT,
    KUBERNETES_VARIABLE,
    NODE,
    PACKAGES,
    PULLED_NODE_IMAGE,
    REGISTRY,
    REGISTRY_PORT,
)
from e2e.cluster.shell import CommandFailed, output, succeeds

CAP_SYS_RESOURCE = 24  # bit number in linux/capability.h
MIN_GO_VERSION = (1, 26)
PULL_PROBE_SECONDS = 30


def collect() -> Facts:
    """Everything `decide` wants to know. Raises CommandFailed for an unsupported version of Kubernetes."""
    try:
        requested = requested_source(os.environ.get(KUBERNETES_VARIABLE, ""))
    except ValueError as error:
        raise CommandFailed(str(error)) from None
    docker = succeeds("docker", "info")
    image = node_image.present(requested) if docker else None
    return Facts(
        root=os.geteuid() == 0,
        debian=_debian(),
        systemd=Path("/run/systemd/system").exists(),
        docker=docker,
        dockerd=shutil.which("dockerd") is not None,
        can_pull=_can_pull() if docker and image is None else None,
        sys_resource=sys_resource(Path("/proc/self/status").read_text()),
        go=_go(),
        cached_binaries=binaries.present(),
        on_path=frozenset(name for name in TOOLS if shutil.which(name)),
        missing_packages=tuple(package for program, package in PACKAGES.items() if shutil.which(program) is None),
        requested=requested,
        node_image=image,
        base_image=docker and succeeds("docker", "image", "inspect", BASE_IMAGE),
        docker_data=(DOCKER_DATA / "image").exists(),
        free_gb=_free_gb(),
        occupied_ports=_foreign_ports(docker),
    )


def _can_pull() -> bool:
    """The one probe: is the published node image's manifest to be had?"""
    return succeeds("docker", "manifest", "inspect", PULLED_NODE_IMAGE, timeout=PULL_PROBE_SECONDS)


def _debian() -> bool:
    release = Path("/etc/os-release")
    return release.exists() and "debian" in re.findall(r"^ID=\"?(\w+)", release.read_text(), re.MULTILINE)


def sys_resource(status: str) -> bool:
    """Whether a process with this /proc/PID/status can have CAP_SYS_RESOURCE."""
    bounding = re.search(r"^CapBnd:\s*([0-9a-f]+)", status, re.MULTILINE)
    return bounding is not None and bool(int(bounding[1], 16) >> CAP_SYS_RESOURCE & 1)


def _go() -> bool:
    if shutil.which("go") is None:
        return False
    version = re.search(r"go(\d+)\.(\d+)", output("go", "version"))
    return version is not None and (int(version[1]), int(version[2])) >= MIN_GO_VERSION


def _free_gb() -> float:
    folder = CACHE
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free / 1e9


def _foreign_ports(docker: bool) -> tuple[int, ...]:
    ours = {REGISTRY_PORT: REGISTRY, GATEWAY_PORT: NODE}
    return tuple(
        port for port, owner in ours.items() if _is_port_taken(port) and not (docker and _publishes_port(owner, port))
    )


def _is_port_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _publishes_port(container: str, port: int) -> bool:
    if not succeeds("docker", "inspect", container):
        return False
    return f":{port}" in output("docker", "port", container)
