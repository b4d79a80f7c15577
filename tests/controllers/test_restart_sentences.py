"""What a status says while an engine restarts in its pod, with the walk of `test_status_sentences`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from tests.controllers.status_walk import KEY, Walk, rfc3339

Object = dict[str, Any]


def test_sentences_restart_in_the_pod_is_shorter_than_a_start() -> None:
    """The first restart has the estimate of a container's phases, the second one what the first took."""
    walk = Walk()
    walk.routable = 1

    def engine(state: str, ended_s: float | None, started_s: float) -> None:
        made = [one["metadata"]["creationTimestamp"] for one in walk.store.children("Pod", KEY)]
        last = {} if ended_s is None else {"terminated": {"exitCode": 137, "finishedAt": rfc3339(ended_s)}}
        status = {"name": "engine", "state": {"running": {"startedAt": rfc3339(started_s)}}, "lastState": last}
        placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": (made or [rfc3339(started_s)])[0]}
        walk.pod("a", state, containerStatuses=[status], conditions=[placed])
        pod = walk.store.get("Pod", ("team", "a"))
        assert pod is not None
        if made:
            walk.store.put({**pod, "metadata": {**pod["metadata"], "creationTimestamp": made[0]}})

    def restart(takes_s: int) -> tuple[float, Object]:
        """Seconds to the expected end, and the status, a second after the engine of a ready pod ended."""
        ended_s = walk.now_s
        walk.routable = 0
        engine("starting", ended_s, ended_s + 1.0)
        walk.serve(5.0, 1)
        status = walk.render()
        left_s = (
            datetime.fromisoformat(status["tiers"]["serve"]["startingPods"].partition("next at ")[2]).timestamp()
            - walk.now_s
        )
        walk.serve(5.0, takes_s - 1)
        engine("ready", ended_s, ended_s + 1.0)
        walk.routable = 1
        walk.serve(5.0, 90)
        return left_s, status

    engine("starting", None, walk.now_s)
    walk.serve(0.0, 170)
    engine("ready", None, walk.now_s - 170.0)
    walk.serve(5.0, 30)
    assert walk.render()["recovery"] == "170s"
    first_s, status = restart(85)
    assert status["recovery"] == "170s"
    assert first_s > 150.0
    second_s, status = restart(85)
    assert second_s == pytest.approx(84.0, abs=6.0)
    assert status["recovery"] == "88s"  # one restart of 85 s, and the estimate
