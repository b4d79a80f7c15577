"""The verbs: check, up, down, images, binaries, gpus."""

from __future__ import annotations

import sys
from collections.abc import Callable

from e2e.cluster import base_image, binaries, docker_daemon, images, kind, node_image, registry
from e2e.cluster.facts import collect
from e2e.cluster.planning import NodeImageSource, Plan, announce, decide, removal
from e2e.cluster.settings import KUBECONFIG, WORKERS
from e2e.cluster.shell import CommandFailed, fail, log_to, print_line


def check() -> None:
    """What stands in the way of `up`, before anything is built."""
    _confirm_plan(decide(collect()))


def up() -> None:
    """Everything that is missing, in order; nothing when nothing is."""
    facts = collect()
    plan = _confirm_plan(decide(facts))
    if plan.changes_machine:
        docker_daemon.ensure_docker(plan)
        facts = collect()  # now that there is a Docker, it can tell where images come from
        plan = _confirm_plan(decide(facts))
    if plan.source is None:
        raise CommandFailed("Docker was started and does not answer")
    binaries.adopt(plan.binaries_from_path)
    binaries.ensure(plan.binaries)
    if plan.source is NodeImageSource.BUILD:
        base_image.ensure()
    kind.ensure(node_image.ensure(plan.source, lenient_runc=not facts.sys_resource))
    registry.ensure(plan.source)
    kind.advertise_gpus()
    print_line(f"the cluster is up: export KUBECONFIG={KUBECONFIG}")


def down() -> None:
    """Cluster and registry container go; images, binaries and what was pushed stay for the next time."""
    plan = removal(collect())
    if plan.blockers:
        raise CommandFailed("\n".join(plan.blockers))
    if plan.changes_machine:
        docker_daemon.ensure_docker(plan)
    kind.delete()
    if not WORKERS:  # else the cluster of one node may use it
        registry.remove()


def _confirm_plan(plan: Plan) -> Plan:
    if plan.blockers:
        raise CommandFailed("\n".join(plan.blockers))
    if lines := announce(plan):
        print_line("to be done on this machine: " + "; ".join(lines))
    return plan


VERBS: dict[str, Callable[[list[str]], None]] = {
    "check": lambda _: check(),
    "up": lambda _: up(),
    "down": lambda _: down(),
    "images": images.ensure,
    "binaries": binaries.ensure,
    "cuda-lines": lambda _: images.check_cuda(),
    "gpus": lambda _: kind.advertise_gpus(),
}


def main(words: list[str]) -> int:
    """The exit status."""
    if not words or words[0] not in VERBS:
        return fail(f"usage: python3 -m e2e.cluster {{{','.join(VERBS)}}} [NAME ...]")
    log_to(f"cluster-{words[0]}")
    try:
        VERBS[words[0]](words[1:])
    except CommandFailed as error:
        return fail(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
