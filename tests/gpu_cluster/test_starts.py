"""Engines that start again and again, each after the pod before it was deleted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import pytest

from e2e.gpu import run, summarise
from e2e.gpu.observer import Observer
from e2e.gpu.processes import StepFailed

PHASES = [["launch", 0.0], ["import", 12.5], ["init", 15.0]]


class Marks:
    def __init__(self) -> None:
        self.found: list[tuple[str, dict[str, Any]]] = []

    def mark(self, what: str, **more: Any) -> None:
        self.found.append((what, more))


def _pod(number: int) -> dict[str, Any]:
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "podIP": "10.0.0.1"}
    return {"metadata": {"name": f"m-serve-{number}", "creationTimestamp": "2026-11-29T10:00:00Z"}, "status": ready}


class Cluster:
    """One pod at a time; a deleted one has a successor at once."""

    def __init__(self) -> None:
        self.pods = [_pod(0)]
        self.deleted: list[str] = []

    def kubectl(self, *words: str) -> str:
        self.deleted.append(words[2])
        self.pods = [_pod(len(self.deleted))]
        return ""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(run, "engine_pods", lambda: made.pods)
    monkeypatch.setattr(run, "kubectl", made.kubectl)
    monkeypatch.setattr(run, "fetch_from_engine", lambda pod, path: json.dumps({"phases": PHASES}))
    monkeypatch.setattr(run, "_first_answer", lambda observer, seconds: 0.1)
    return made


def test_each_start_has_its_pod_and_phases(cluster: Cluster) -> None:
    result: dict[str, Any] = {}
    run._start_again(3, cast("Observer", Marks()), result)
    assert cluster.deleted == ["m-serve-0", "m-serve-1", "m-serve-2"]
    assert [one["pod"] for one in result["starts"]] == ["m-serve-1", "m-serve-2", "m-serve-3"]
    assert all(one["phases"] == PHASES and one["first_answer_s"] == 0.1 for one in result["starts"])


def test_starts_before_a_failed_one_are_kept(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(_observer: object, _seconds: float) -> float:
        if len(cluster.deleted) == 2:
            raise StepFailed("no answer")
        return 0.1

    monkeypatch.setattr(run, "_first_answer", answer)
    result: dict[str, Any] = {}
    with pytest.raises(StepFailed):
        run._start_again(3, cast("Observer", Marks()), result)
    assert len(result["starts"]) == 1


def test_busy_cores_are_counted_without_those_that_wait(tmp_path: Path) -> None:
    tick = os.sysconf("SC_CLK_TCK")
    (tmp_path / "stat").write_text(f"cpu  {tick} {tick} {2 * tick} {50 * tick} {9 * tick} 0 {tick} 0 0 0\ncpu0 1\n")
    assert run.cpu_busy_s(tmp_path / "stat") == 5.0


@pytest.mark.parametrize("admission", [{"items": [{"limits": {}}]}, {"items": []}, None])
def test_starts_are_kept_whatever_the_api_server_does_not_say(admission: Any) -> None:
    starts = [{"pod": "m-serve-1", "until_ready_s": 40.0, "phases": PHASES}]
    final = {"scrapes": {}, "events": [], "service": None, "admission": admission}
    one = {"scenario": "starts", "began": 0.0, "samples": [], "marks": [], "final": final, "starts": starts}
    assert summarise._summary(one)["starts"] == starts
