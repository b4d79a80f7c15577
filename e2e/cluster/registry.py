"""A registry beside the cluster: an edited image travels as its last layer instead of whole.

Docker pushes to localhost:5001; containerd on the node finds the same name through its hosts.toml.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request

from e2e.cluster import base_image
from e2e.cluster.docker import build, container, image_exists
from e2e.cluster.planning import NodeImageSource
from e2e.cluster.settings import HERE, PULLED_REGISTRY_IMAGE, REGISTRY, REGISTRY_PORT
from e2e.cluster.shell import CommandFailed, run, stage, succeeds, wait_for

_NETWORK = "kind"  # kind makes it with its first cluster
_BUILT_IMAGE = "plimsoll/registry:1"
_GARBAGE_COLLECT = (
    "$(command -v docker-registry || command -v registry) garbage-collect -m /etc/docker/registry/config.yml"
)
_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
START_SECONDS = 30
PAUSE_SECONDS = 0.5


def ensure(source: NodeImageSource) -> None:
    """Running, on the cluster's network, answering; what was pushed earlier is still there."""
    state = container(REGISTRY)
    if state is None:
        with stage("starting the registry"):
            run(
                "docker",
                "run",
                "-d",
                "--name",
                REGISTRY,
                "--restart",
                "unless-stopped",
                "--network",
                _NETWORK,
                "-p",
                f"127.0.0.1:{REGISTRY_PORT}:5000",
                "-v",
                f"{REGISTRY}:/var/lib/registry",
                _image(source),
            )
    else:
        if _NETWORK not in state["NetworkSettings"]["Networks"]:
            run("docker", "network", "connect", _NETWORK, REGISTRY)
        if not state["State"]["Running"]:
            run("docker", "start", REGISTRY)
    wait_for(_is_up, "the registry", START_SECONDS)


def manifest(repository: str, tag: str) -> bytes | None:
    """None without such a tag. Soon after the machine's start the registry answers once and then resets connections, so
    a request that fails is repeated; raises CommandFailed when none is answered within START_SECONDS.
    """
    url = f"http://127.0.0.1:{REGISTRY_PORT}/v2/{repository}/manifests/{tag}"
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": _MANIFEST}), timeout=5) as reply:
                return bytes(reply.read())
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            problem: Exception = error
        except OSError as error:
            problem = error
        if time.monotonic() > deadline:
            raise CommandFailed(f"the registry does not answer ({problem}): run e2e/cluster/up first") from problem
        time.sleep(PAUSE_SECONDS)


def remove() -> None:
    """The container goes; its volume stays, less what no tag names any more (each push of an edit leaves one)."""
    if container(REGISTRY) is not None:
        succeeds("docker", "exec", REGISTRY, "sh", "-c", _GARBAGE_COLLECT)
        run("docker", "rm", "-f", REGISTRY)


def _image(source: NodeImageSource) -> str:
    if source is NodeImageSource.PULL:
        return PULLED_REGISTRY_IMAGE
    if not image_exists(_BUILT_IMAGE):
        base_image.ensure()
        build(_BUILT_IMAGE, HERE / "registry", network="host")
    return _BUILT_IMAGE


def _is_up() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{REGISTRY_PORT}/v2/", timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
