"""What to do to this machine, decided from facts alone.

Problem: the same command meets laptops with Docker and internet, and bare machines that reach package registries only;
it must never change a machine whose Docker already runs, and must refuse before it has built anything. Idea: a pure
function from `Facts` to a `Plan`, asked again after each change: while the daemon is missing nobody can tell whether
images can be pulled, so the first answer is "start it" and the second one names the source.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from e2e.cluster.settings import (
    BASE_IMAGE,
    DISK_GB_FIRST,
    DISK_GB_LATER,
    KUBERNETES,
    KUBERNETES_VARIABLE,
    PULLED_KUBERNETES,
)

TOOLS = ("kind", "kubectl", "helm")
CONTROL_PLANE = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "etcd",
    "coredns",
    "pause",
)
NODE = ("kubelet", "kubeadm", "containerd", "containerd-shim-runc-v2", "ctr")


class NodeImageSource(StrEnum):
    """Where the node image comes from."""

    PULL = "pull"
    BUILD = "build"


VERSIONS = {KUBERNETES: NodeImageSource.BUILD, PULLED_KUBERNETES: NodeImageSource.PULL}


def requested_source(version: str) -> NodeImageSource | None:
    """The source of a Kubernetes version; None for "", with which the machine decides. Raises ValueError."""
    if not version:
        return None
    source = VERSIONS.get(f"v{version.removeprefix('v')}")
    if source is None:
        raise ValueError(f"{KUBERNETES_VARIABLE}: {version!r} is not supported; use {' or '.join(VERSIONS)}")
    return source


class ClusterStep(StrEnum):
    """What happens to the node container."""

    CREATE = "create"
    RECREATE = "recreate"
    START = "start"
    KEEP = "keep"


@dataclass(frozen=True)
class Facts:
    """What was seen; nothing here is a judgement.

    `docker`: a daemon answers; `dockerd`: the program is installed. `can_pull` is None while there is no daemon to ask.
    `wanted`: the only source that has the wanted version of Kubernetes; None where any will do.
    `node_image`: the source of the node image that is already here, the wanted one if there is a wish.
    `sys_resource`: root has CAP_SYS_RESOURCE.
    `docker_data`: images lie where Docker keeps them, which cannot be looked through while no daemon answers.
    `have`: programs already built; `on_path`: tools that are installed. `foreign_ports`: held by someone else.
    """

    root: bool = False
    debian: bool = False
    systemd: bool = False
    docker: bool = False
    dockerd: bool = False
    can_pull: bool | None = None
    sys_resource: bool = True
    go: bool = False
    cached_binaries: frozenset[str] = frozenset()
    on_path: frozenset[str] = frozenset()
    missing_packages: tuple[str, ...] = ()
    requested: NodeImageSource | None = None
    node_image: NodeImageSource | None = None
    base_image: bool = False
    docker_data: bool = False
    free_gb: float = 0.0
    occupied_ports: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """`refusals` end it. `packages` and `daemon` change the machine, and then the plan is
    made again; else `source` is known. `node_image`: it is still to be pulled or made.
    `binaries` are to be built; `adopt`: installed tools that will do, on a machine that cannot build.
    """

    blockers: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    daemon: bool = False
    lenient_runc: bool = False
    source: NodeImageSource | None = None
    node_image: bool = False
    binaries: tuple[str, ...] = ()
    binaries_from_path: tuple[str, ...] = ()

    @property
    def changes_machine(self) -> bool:
        """Whether anything outside Docker and the cache is touched."""
        return bool(self.packages or self.daemon)


def decide(facts: Facts) -> Plan:
    """The one decision; pure."""
    source = _source(facts)
    missing = tuple(name for name in _required_binaries(source, facts) if name not in facts.cached_binaries)
    adopt = () if facts.go else tuple(name for name in missing if name in TOOLS and name in facts.on_path)
    binaries = tuple(name for name in missing if name not in adopt)
    blockers = (
        *_docker_blockers(facts),
        *_pull_blockers(facts),
        *_build_blockers(facts, source, binaries),
        *_resource_blockers(facts),
    )
    if blockers:
        return Plan(blockers=blockers)
    if not facts.docker:
        return Plan(packages=facts.missing_packages, daemon=True, lenient_runc=not facts.sys_resource)
    return Plan(source=source, node_image=facts.node_image is None, binaries=binaries, binaries_from_path=adopt)


def _source(facts: Facts) -> NodeImageSource | None:
    """Without CAP_SYS_RESOURCE no published node image runs, only ours with its runc wrapper."""
    if not facts.docker:
        return None
    if facts.node_image or facts.requested:
        return facts.node_image or facts.requested
    return NodeImageSource.PULL if facts.can_pull and facts.sys_resource else NodeImageSource.BUILD


def _required_binaries(source: NodeImageSource | None, facts: Facts) -> tuple[str, ...]:
    return (*TOOLS, *CONTROL_PLANE, *NODE) if source is NodeImageSource.BUILD and not facts.node_image else TOOLS


def _docker_blockers(facts: Facts) -> tuple[str, ...]:
    if facts.docker:
        return ()
    if facts.dockerd and facts.systemd:
        return ("Docker is installed but not running: start it (systemctl start docker) and try again.",)
    if not (facts.root and facts.debian):
        return ("Docker is not running. Start it, or run this as root on Debian to have it installed and started.",)
    return ()


def _pull_blockers(facts: Facts) -> tuple[str, ...]:
    """A version that is published as an image alone needs a machine that can pull it and run it."""
    if facts.requested is not NodeImageSource.PULL or facts.node_image:
        return ()
    use = f"Unset {KUBERNETES_VARIABLE}, or set it to {KUBERNETES}, which is built here."
    if not facts.sys_resource:
        return (f"The published node image of {PULLED_KUBERNETES} does not run without CAP_SYS_RESOURCE. {use}",)
    if facts.docker and not facts.can_pull:
        return (f"The node image of {PULLED_KUBERNETES} cannot be pulled here. {use}",)
    return ()


def _build_blockers(facts: Facts, source: NodeImageSource | None, binaries: tuple[str, ...]) -> tuple[str, ...]:
    lines = []
    if binaries and not facts.go:
        lines.append(f"Go 1.26 or newer is needed to build {', '.join(binaries)}.")
    if source is NodeImageSource.BUILD and not (facts.base_image or (facts.root and facts.debian)):
        lines.append(
            f"The node image is built from {BASE_IMAGE}, which is not here. Pull it, or run this as root on Debian."
        )
    return tuple(lines)


def _resource_blockers(facts: Facts) -> tuple[str, ...]:
    unknown_port = (
        facts.docker_data and not facts.docker
    )  # asked again once the daemon answers, before anything is built
    need = DISK_GB_LATER if facts.node_image or unknown_port else DISK_GB_FIRST
    lines = [f"{need} GB of free disk are needed, {facts.free_gb:.0f} GB are there."] if facts.free_gb < need else []
    lines += [f"Port {port} of 127.0.0.1 is taken by another program." for port in facts.occupied_ports]
    return tuple(lines)


def removal(facts: Facts) -> Plan:
    """What must be done to the machine before a cluster can be removed; pure.

    Containers outlive the daemon: where none answers, a cluster may lie in Docker's data, and the next daemon would
    bring it back as it was.
    """
    if facts.docker or not facts.docker_data:
        return Plan()
    if blockers := _docker_blockers(facts):
        return Plan(blockers=blockers)
    return Plan(packages=facts.missing_packages, daemon=True, lenient_runc=not facts.sys_resource)


def announce(plan: Plan) -> list[str]:
    """What will be done to the machine, for the user to read before it happens."""
    lines = []
    if plan.packages:
        lines.append(f"install Debian packages: {' '.join(plan.packages)}")
    if plan.daemon:
        lines.append("start a Docker daemon")
    if plan.lenient_runc:
        lines.append("run containers through a runc wrapper: this machine withholds CAP_SYS_RESOURCE from root")
    if plan.daemon:
        lines.append(
            "then pull the kind node image, or make it here where none can be pulled (a quarter of an hour, once)"
        )
    if plan.binaries:
        lines.append(f"build from Go modules: {' '.join(plan.binaries)}")
    if plan.node_image and plan.source is NodeImageSource.PULL:
        lines.append(f"pull the kind node image of {PULLED_KUBERNETES}")
    if plan.node_image and plan.source is NodeImageSource.BUILD:
        lines.append(f"make the kind node image of {KUBERNETES} here")
    return lines


def cluster_step(image: str | None, running: bool, requested: str) -> ClusterStep:
    """`image`: what the node container was made from, None where there is none; another image means another cluster."""
    if image is None:
        return ClusterStep.CREATE
    if image != requested:
        return ClusterStep.RECREATE
    return ClusterStep.KEEP if running else ClusterStep.START
