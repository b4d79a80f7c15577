"""What a look at a tier counts."""

from __future__ import annotations

from e2e.demo.observer import count_pods
from e2e.lib.kube import Object
from plimsoll.api import labels


def pod(tier: str, ready: bool = True, leaving: bool = False, phase: str = "Running") -> Object:
    metadata: Object = {"name": "p", "labels": {labels.ROLE: tier}}
    if leaving:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    status = {"phase": phase, "conditions": [{"type": "Ready", "status": str(ready)}]}
    return {"metadata": metadata, "status": status}


def test_counted_pods_are_ready_starting_or_draining() -> None:
    pods = [pod("decode"), pod("decode", ready=False), pod("decode", leaving=True), pod("prefill")]
    observed = count_pods("fleet", 1.234, "decode", {"summary": "1/2"}, pods)
    assert (observed.t_s, observed.desired, observed.ready, observed.starting, observed.draining, observed.billed) == (
        1.23,
        2,
        1,
        1,
        1,
        3,
    )


def test_counted_desired_replica_without_pod_is_starting() -> None:
    observed = count_pods("fleet", 0, "decode", {"summary": "1/4"}, [pod("decode")])
    assert (observed.ready, observed.starting) == (1, 3)


def test_counted_finished_pods_cost_nothing() -> None:
    over = [pod("decode", ready=False, phase="Failed"), pod("decode", ready=False, leaving=True, phase="Succeeded")]
    assert count_pods("fleet", 0, "decode", {"summary": "0/0"}, over).billed == 0
