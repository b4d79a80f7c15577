"""Sentences and figures about starting pods, paused rollouts and rejected requests agree with the objects."""

from __future__ import annotations

import pytest

from plimsoll.controllers.autoscale import scaling_conditions
from tests.controllers.test_status_sentences import Walk


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.004, "less than 1%"), (0.05, "5%"), (0.986, "99%"), (0.997, "99%"), (1.0, "100%")],
)
def test_sentences_shedding_is_never_none_or_all(share: float, expected: str) -> None:
    """The condition lasts until a minute has passed without a rejection, so also with one in a thousand."""
    assert scaling_conditions.format_rejected(share) == expected


def test_sentences_overdue_are_at_most_the_starting() -> None:
    """The report is older than the pods: what became ready or left meanwhile is not overdue."""
    walk = Walk()
    walk.order(2)
    for name in ("a", "b"):
        walk.pod(name, "starting")
    walk.now_s += 86_400.0
    walk.serve(0.0, 2)
    assert walk.render()["tiers"]["serve"]["starting"]["overdue"] == 2
    walk.pod("a", "ready")
    assert walk.render()["tiers"]["serve"]["starting"] == {"count": 1, "overdue": 1}


def test_sentences_paused_rollout_is_named() -> None:
    """Somebody ran `kubectl rollout pause`: Kubernetes begins no change before they resume it."""
    walk = Walk()
    walk.routable = 1
    walk.pod("a", "ready")
    walk.order(1, updatedReplicas=0)
    walk.store.put({**walk.deployment, "spec": {**walk.deployment["spec"], "paused": True}})
    message = walk.condition("Reconciling", walk.render())["message"]
    assert message == (
        "serve: 1 of 1 ready; the rollout of Deployment chat-serve is paused: resume it with kubectl -n team rollout"
        " resume deployment chat-serve"
    )
    walk.order(1)
    walk.store.put({**walk.deployment, "spec": {**walk.deployment["spec"], "paused": True}})
    assert "Reconciling" not in walk.kinds(walk.render())
