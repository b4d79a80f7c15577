"""The few things asked of Docker: does an image exist, build one, what is a container's state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from e2e.cluster.shell import output, run, succeeds

# the plain builder is everywhere, buildx is not
_PLAIN_BUILDER = {"DOCKER_BUILDKIT": "0"}


def image_exists(image: str) -> bool:
    """Whether the image is here."""
    return succeeds("docker", "image", "inspect", image)


def image_id(image: str) -> str:
    """The image's content digest; raises Failed where there is none."""
    return output("docker", "image", "inspect", "-f", "{{.Id}}", image)


def container(name: str) -> dict[str, Any] | None:
    """What `docker inspect` tells of a container, or None."""
    if not succeeds("docker", "container", "inspect", name):
        return None
    found: dict[str, Any] = json.loads(output("docker", "container", "inspect", name))[0]
    return found


def build(
    image: str,
    context: Path,
    *,
    file: str = "Dockerfile",
    args: Mapping[str, str] | None = None,
    target: str = "",
    network: str = "none",
) -> None:
    """Build and tag; raises Failed with the builder's last words. network: `host` for builds that install packages."""
    words = [word for name, value in (args or {}).items() for word in ("--build-arg", f"{name}={value}")]
    words += ["--target", target] if target else []
    run("docker", "build", "--network", network, "-t", image, "-f", context / file, *words, context, env=_PLAIN_BUILDER)
