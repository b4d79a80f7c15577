"""The decision about this machine: what is done where, and what is refused before anything is built."""

from __future__ import annotations

from dataclasses import replace

import pytest

from e2e.cluster.planning import (
    CONTROL_PLANE,
    NODE,
    TOOLS,
    ClusterStep,
    Facts,
    NodeImageSource,
    Plan,
    announce,
    cluster_step,
    decide,
    removal,
    requested_source,
)

FREE_GB = 100.0
LAPTOP = Facts(docker=True, dockerd=True, systemd=True, can_pull=True, go=True, free_gb=FREE_GB)
BARE = Facts(root=True, debian=True, go=True, sys_resource=False, missing_packages=("docker.io", "jq"), free_gb=FREE_GB)
BARE_WITH_DOCKER = replace(BARE, docker=True, dockerd=True, can_pull=False, missing_packages=())


def test_decide_laptop_pulls_image_and_builds_only_tools() -> None:
    assert decide(LAPTOP) == Plan(source=NodeImageSource.PULL, node_image=True, binaries=TOOLS)


def test_decide_bare_machine_installs_packages_and_daemon() -> None:
    plan = decide(BARE)
    assert plan == Plan(packages=("docker.io", "jq"), daemon=True, lenient_runc=True, binaries=())
    assert plan.changes_machine


def test_decide_without_registry_builds_everything() -> None:
    plan = decide(BARE_WITH_DOCKER)
    assert plan.source is NodeImageSource.BUILD
    assert set(plan.binaries) == {*TOOLS, *CONTROL_PLANE, *NODE}
    assert not plan.changes_machine


def test_decide_built_binaries_are_not_built_again() -> None:
    plan = decide(replace(BARE_WITH_DOCKER, cached_binaries=frozenset({*TOOLS, *CONTROL_PLANE, *NODE} - {"etcd"})))
    assert plan.binaries == ("etcd",)


def test_decide_existing_node_image_needs_no_parts() -> None:
    plan = decide(replace(BARE_WITH_DOCKER, node_image=NodeImageSource.BUILD, can_pull=None, free_gb=10))
    assert plan == Plan(source=NodeImageSource.BUILD, node_image=False, binaries=TOOLS)


def test_decide_stopped_docker_images_need_no_extra_space() -> None:
    stopped = replace(BARE, docker_data=True, free_gb=23)
    assert decide(stopped).daemon
    assert decide(replace(stopped, docker=True, node_image=NodeImageSource.BUILD)).source is NodeImageSource.BUILD


def test_removal_includes_cluster_of_stopped_docker() -> None:
    assert removal(replace(BARE, docker_data=True)) == Plan(
        packages=("docker.io", "jq"), daemon=True, lenient_runc=True
    )
    assert not removal(replace(LAPTOP, docker=False, docker_data=True)).changes_machine
    assert removal(replace(LAPTOP, docker=False, docker_data=True)).blockers


@pytest.mark.parametrize("facts", [LAPTOP, BARE, BARE_WITH_DOCKER, replace(LAPTOP, docker_data=True)])
def test_removal_changes_nothing_if_docker_runs_or_never_did(facts: Facts) -> None:
    assert removal(facts) == Plan()


def test_decide_missing_images_require_full_disk_space() -> None:
    plan = decide(replace(BARE_WITH_DOCKER, docker_data=True, free_gb=23))
    assert plan.blockers == ("25 GB of free disk are needed, 23 GB are there.",)


@pytest.mark.parametrize(
    ("version", "source"),
    [("1.36.3", NodeImageSource.BUILD), ("v1.37.0", NodeImageSource.PULL), ("", None)],
)
def test_wanted_version_has_one_source(version: str, source: NodeImageSource | None) -> None:
    assert requested_source(version) is source


@pytest.mark.parametrize("version", ["1.35.0", "1.36", "v", "latest"])
def test_wanted_version_unsupported_names_the_supported_ones(version: str) -> None:
    with pytest.raises(ValueError, match=f"PLIMSOLL_KUBERNETES: '{version}' is not supported; use v1.36.3 or v1.37.0"):
        requested_source(version)


def test_decide_wanted_version_overrides_the_machine() -> None:
    built = replace(LAPTOP, base_image=True, requested=NodeImageSource.BUILD)
    assert decide(LAPTOP).source is NodeImageSource.PULL
    assert decide(built).source is NodeImageSource.BUILD
    assert set(decide(built).binaries) == {*TOOLS, *CONTROL_PLANE, *NODE}
    assert decide(replace(LAPTOP, requested=NodeImageSource.PULL)).source is NodeImageSource.PULL


@pytest.mark.parametrize("packages", [(), ("jq",), ("docker.io", "iptables")])
@pytest.mark.parametrize("facts", [LAPTOP, BARE_WITH_DOCKER, replace(LAPTOP, root=True, debian=True, can_pull=False)])
def test_decide_running_docker_machine_is_never_changed(facts: Facts, packages: tuple[str, ...]) -> None:
    plan = decide(replace(facts, missing_packages=packages))
    assert not plan.blockers
    assert not plan.changes_machine
    assert not plan.lenient_runc


def test_decide_runc_wrapper_only_without_sys_resource() -> None:
    assert not decide(replace(BARE, sys_resource=True)).lenient_runc


def test_decide_without_sys_resource_builds_node_image() -> None:
    assert decide(replace(BARE_WITH_DOCKER, can_pull=True)).source is NodeImageSource.BUILD


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (replace(BARE, root=False), "Docker is not running. Start it, or run this as root on Debian"),
        (replace(BARE, debian=False), "Docker is not running. Start it, or run this as root on Debian"),
        (replace(BARE, dockerd=True, systemd=True), "Docker is installed but not running"),
        (
            replace(LAPTOP, can_pull=False),
            "The node image is built from debian:bookworm-slim, which is not here. Pull it, or run this as root",
        ),
        (
            replace(LAPTOP, requested=NodeImageSource.PULL, can_pull=False),
            "The node image of v1.37.0 cannot be pulled here. Unset PLIMSOLL_KUBERNETES, or set it to v1.36.3",
        ),
        (
            replace(BARE, requested=NodeImageSource.PULL),
            "The published node image of v1.37.0 does not run without CAP_SYS_RESOURCE.",
        ),
        (replace(LAPTOP, go=False), "Go 1.26 or newer is needed to build kind, kubectl, helm."),
        (replace(LAPTOP, free_gb=12), "25 GB of free disk are needed, 12 GB are there."),
        (replace(LAPTOP, occupied_ports=(8088,)), "Port 8088 of 127.0.0.1 is taken by another program."),
    ],
)
def test_decide_missing_precondition_is_one_line_and_no_action(facts: Facts, words: str) -> None:
    plan = decide(facts)
    assert [line for line in plan.blockers if words in line] == list(plan.blockers)
    assert len(plan.blockers) == 1
    assert plan == Plan(blockers=plan.blockers)


def test_decide_reports_all_missing_preconditions_at_once() -> None:
    plan = decide(Facts(free_gb=1, occupied_ports=(5001, 8088)))
    assert len(plan.blockers) == 5


def test_decide_tools_on_path_are_adopted_without_go() -> None:
    plan = decide(replace(LAPTOP, go=False, on_path=frozenset(TOOLS)))
    assert plan == Plan(source=NodeImageSource.PULL, node_image=True, binaries_from_path=TOOLS)


def test_decide_with_go_builds_pinned_tools() -> None:
    assert decide(replace(LAPTOP, on_path=frozenset(TOOLS))).binaries == TOOLS


def test_decide_control_plane_is_never_taken_from_path() -> None:
    everything = frozenset({*TOOLS, *CONTROL_PLANE, *NODE})
    assert decide(replace(BARE_WITH_DOCKER, go=False, on_path=everything)).blockers


def test_announce_lists_planned_actions() -> None:
    assert announce(decide(BARE)) == [
        "install Debian packages: docker.io jq",
        "start a Docker daemon",
        "run containers through a runc wrapper: this machine withholds CAP_SYS_RESOURCE from root",
        "then pull the kind node image, or make it here where none can be pulled (a quarter of an hour, once)",
    ]
    assert announce(decide(LAPTOP)) == [
        "build from Go modules: kind kubectl helm",
        "pull the kind node image of v1.37.0",
    ]
    assert announce(decide(replace(LAPTOP, cached_binaries=frozenset(TOOLS), node_image=NodeImageSource.PULL))) == []


@pytest.mark.parametrize(
    ("image", "running", "step"),
    [
        (None, False, ClusterStep.CREATE),
        ("plimsoll/node:old", True, ClusterStep.RECREATE),
        ("plimsoll/node:old", False, ClusterStep.RECREATE),
        ("plimsoll/node:new", True, ClusterStep.KEEP),
        ("plimsoll/node:new", False, ClusterStep.START),
    ],
)
def test_cluster_step_keeps_cluster_while_image_matches(image: str | None, running: bool, step: ClusterStep) -> None:
    assert cluster_step(image, running, requested="plimsoll/node:new") is step
