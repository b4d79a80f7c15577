"""The verbs: check, up, down, images, binaries, gpus."""

from __future__ import annotations

import sys
from collections.abc import Callable

from e2e.cluster import base, binaries, images, kind, machine, node, registry
from e2e.cluster.decide import Plan, Source, announce, decide, removal
from e2e.cluster.facts import look
from e2e.cluster.settings import KUBECONFIG
from e2e.cluster.shell import Failed, fail, log_to, say


def check() -> None:
    """What stands in the way of `up`, before anything is built."""
    _accepted(decide(look()))


def up() -> None:
    """Everything that is missing, in order; nothing when nothing is."""
    facts = look()
    plan = _accepted(decide(facts))
    if plan.changes_machine:
        machine.prepare(plan)
        facts = look()  # now that there is a Docker, it can tell where images come from
        plan = _accepted(decide(facts))
    if plan.source is None:
        raise Failed("Docker was started and does not answer")
    binaries.adopt(plan.adopt)
    binaries.ensure(plan.binaries)
    if plan.source is Source.BUILD:
        base.ensure()
    kind.ensure(node.ensure(plan.source, lenient_runc=not facts.sys_resource))
    registry.ensure(plan.source)
    kind.advertise_gpus()
    say(f"the cluster is up: export KUBECONFIG={KUBECONFIG}")


def down() -> None:
    """Cluster and registry container go; images, binaries and what was pushed stay for the next time."""
    plan = removal(look())
    if plan.refusals:
        raise Failed("\n".join(plan.refusals))
    if plan.changes_machine:
        machine.prepare(plan)
    kind.delete()
    registry.remove()


def _accepted(plan: Plan) -> Plan:
    if plan.refusals:
        raise Failed("\n".join(plan.refusals))
    if lines := announce(plan):
        say("to be done on this machine: " + "; ".join(lines))
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
    except Failed as error:
        return fail(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
