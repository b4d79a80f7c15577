"""The decision about this machine: what is done where, and what is refused before anything is built."""

from __future__ import annotations

from dataclasses import replace

import pytest

from e2e.cluster.decide import (
    CONTROL_PLANE,
    NODE,
    TOOLS,
    ClusterStep,
    Facts,
    Plan,
    Source,
    announce,
    cluster_step,
    decide,
    removal,
)

ROOM = 100.0
LAPTOP = Facts(docker=True, dockerd=True, systemd=True, can_pull=True, go=True, free_gb=ROOM)
BARE = Facts(root=True, debian=True, go=True, sys_resource=False, missing_packages=("docker.io", "jq"), free_gb=ROOM)
BARE_WITH_DOCKER = replace(BARE, docker=True, dockerd=True, can_pull=False, missing_packages=())


def test_a_laptop_pulls_and_builds_only_the_tools() -> None:
    assert decide(LAPTOP) == Plan(source=Source.PULL, node_image=True, binaries=TOOLS)


def test_a_bare_machine_gets_packages_and_a_daemon_first() -> None:
    plan = decide(BARE)
    assert plan == Plan(packages=("docker.io", "jq"), daemon=True, lenient_runc=True, binaries=())
    assert plan.changes_machine


def test_then_everything_is_built_where_nothing_can_be_pulled() -> None:
    plan = decide(BARE_WITH_DOCKER)
    assert plan.source is Source.BUILD
    assert set(plan.binaries) == {*TOOLS, *CONTROL_PLANE, *NODE}
    assert not plan.changes_machine


def test_what_is_built_is_not_built_again() -> None:
    plan = decide(replace(BARE_WITH_DOCKER, have=frozenset({*TOOLS, *CONTROL_PLANE, *NODE} - {"etcd"})))
    assert plan.binaries == ("etcd",)


def test_a_node_image_that_is_here_is_used_without_its_parts() -> None:
    plan = decide(replace(BARE_WITH_DOCKER, node_image=Source.BUILD, can_pull=None, free_gb=10))
    assert plan == Plan(source=Source.BUILD, node_image=False, binaries=TOOLS)


def test_images_that_a_stopped_docker_keeps_are_not_asked_room_for_again() -> None:
    stopped = replace(BARE, docker_data=True, free_gb=23)
    assert decide(stopped).daemon
    assert decide(replace(stopped, docker=True, node_image=Source.BUILD)).source is Source.BUILD


def test_a_cluster_that_a_stopped_docker_keeps_is_removed_too() -> None:
    assert removal(replace(BARE, docker_data=True)) == Plan(
        packages=("docker.io", "jq"), daemon=True, lenient_runc=True
    )
    assert not removal(replace(LAPTOP, docker=False, docker_data=True)).changes_machine
    assert removal(replace(LAPTOP, docker=False, docker_data=True)).refusals


@pytest.mark.parametrize("facts", [LAPTOP, BARE, BARE_WITH_DOCKER, replace(LAPTOP, docker_data=True)])
def test_removing_changes_no_machine_where_docker_answers_or_never_was(facts: Facts) -> None:
    assert removal(facts) == Plan()


def test_room_for_everything_is_asked_once_docker_tells_that_nothing_is_there() -> None:
    plan = decide(replace(BARE_WITH_DOCKER, docker_data=True, free_gb=23))
    assert plan.refusals == ("25 GB of free disk are needed, 23 GB are there.",)


@pytest.mark.parametrize("packages", [(), ("jq",), ("docker.io", "iptables")])
@pytest.mark.parametrize("facts", [LAPTOP, BARE_WITH_DOCKER, replace(LAPTOP, root=True, debian=True, can_pull=False)])
def test_a_machine_whose_docker_runs_is_never_changed(facts: Facts, packages: tuple[str, ...]) -> None:
    plan = decide(replace(facts, missing_packages=packages))
    assert not plan.refusals
    assert not plan.changes_machine
    assert not plan.lenient_runc


def test_the_runc_wrapper_is_only_for_machines_that_withhold_the_capability() -> None:
    assert not decide(replace(BARE, sys_resource=True)).lenient_runc


def test_without_the_capability_a_published_node_image_would_not_run() -> None:
    assert decide(replace(BARE_WITH_DOCKER, can_pull=True)).source is Source.BUILD


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (replace(BARE, root=False), "Docker is not running. Start it, or run this as root on Debian"),
        (replace(BARE, debian=False), "Docker is not running. Start it, or run this as root on Debian"),
        (replace(BARE, dockerd=True, systemd=True), "Docker is installed but not running"),
        (
            replace(LAPTOP, can_pull=False),
            "Images cannot be pulled here, and making the base image needs root on Debian.",
        ),
        (replace(LAPTOP, go=False), "Go 1.26 or newer is needed to build kind, kubectl, helm."),
        (replace(LAPTOP, free_gb=12), "25 GB of free disk are needed, 12 GB are there."),
        (replace(LAPTOP, foreign_ports=(8088,)), "Port 8088 of 127.0.0.1 is taken by another program."),
    ],
)
def test_a_missing_precondition_is_one_line_and_nothing_is_done(facts: Facts, words: str) -> None:
    plan = decide(facts)
    assert [line for line in plan.refusals if words in line] == list(plan.refusals)
    assert len(plan.refusals) == 1
    assert plan == Plan(refusals=plan.refusals)


def test_all_that_is_missing_is_told_at_once() -> None:
    plan = decide(Facts(free_gb=1, foreign_ports=(5001, 8088)))
    assert len(plan.refusals) == 5


def test_tools_on_the_path_do_without_go() -> None:
    plan = decide(replace(LAPTOP, go=False, on_path=frozenset(TOOLS)))
    assert plan == Plan(source=Source.PULL, node_image=True, adopt=TOOLS)


def test_where_go_is_the_tools_are_the_pinned_ones() -> None:
    assert decide(replace(LAPTOP, on_path=frozenset(TOOLS))).binaries == TOOLS


def test_a_control_plane_is_never_taken_from_the_path() -> None:
    everything = frozenset({*TOOLS, *CONTROL_PLANE, *NODE})
    assert decide(replace(BARE_WITH_DOCKER, go=False, on_path=everything)).refusals


def test_what_will_happen_is_told() -> None:
    assert announce(decide(BARE)) == [
        "install Debian packages: docker.io jq",
        "start a Docker daemon",
        "run containers through a runc wrapper: this machine withholds CAP_SYS_RESOURCE from root",
        "then pull the kind node image, or make it here where none can be pulled (a quarter of an hour, once)",
    ]
    assert announce(decide(LAPTOP)) == ["build from Go modules: kind kubectl helm", "pull the kind node image"]
    assert announce(decide(replace(LAPTOP, have=frozenset(TOOLS), node_image=Source.PULL))) == []


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
def test_a_cluster_is_kept_while_its_image_fits(image: str | None, running: bool, step: ClusterStep) -> None:
    assert cluster_step(image, running, wanted="plimsoll/node:new") is step
