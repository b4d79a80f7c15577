"""Another autoscaler in Plimsoll's place: a policy of the scoreboard sets the replicas of the engines' Deployment.

Problem: what other autoscalers would have done on the same machine was only simulated.
Idea: the simulator's policies read what engines export, at their own periods, so they need no simulator. Here the
observations are those of a real node, and orders go through the scale subresource, as an HPA's do.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Self

from bench.hardware.client import START_S
from e2e.gpu.observer import Observer, fetch_from_engine, is_ready
from e2e.gpu.processes import StepFailed, get, kubectl, tail
from e2e.gpu.scenarios import PERCENTILE, SERVICE, Scenario
from e2e.gpu.settings import IMAGES, LOGS, NAMESPACE
from e2e.lib.background import BackgroundThread

_TICK_S: Final = 5.0  # divides the periods of the policies: 5 s and 15 s
_PYTHON: Final = "/opt/plimsoll/bin/python"  # in the operator's image
_WORKLOAD: Final = f"{SERVICE}-serve"
_LOG: Final = "policy"
_END_S: Final = 60.0  # for the last tick


class Follower(BackgroundThread):
    """A context manager around a load, whose first instant is the policy's too. Entering it raises StepFailed.

    `samples`: what the policy saw and ordered at each tick. `error`: why it ended early, or "".
    """

    def __init__(self, scenario: Scenario, observer: Observer) -> None:
        super().__init__(self._run, _END_S)
        self._scenario, self._observer = scenario, observer
        self.samples: list[dict[str, Any]] = []
        self.error = ""

    def __enter__(self) -> Self:
        with (LOGS / f"{_LOG}.log").open("ab") as log:
            self._process = subprocess.Popen(
                _command(self._scenario), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env={"PATH": os.environ["PATH"]},
            )  # fmt: skip
        self._answer()  # the policy is there
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._thread.is_alive():  # it waits for a process that hangs
            self._process.kill()
            self._thread.join(_END_S)
        self._process.communicate()  # which ends it

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            raise StepFailed("the policy's process ended\n" + tail(_LOG))
        return dict(json.loads(line))

    def _run(self) -> None:
        try:
            self._follow()
        except (StepFailed, OSError, ValueError, LookupError) as error:
            self.error = f"{self._scenario.policy}: {error}"
            self._observer.mark("follower failed", error=self.error[-500:])

    def _follow(self) -> None:
        assert self._process.stdin
        begin_s = time.monotonic() + START_S
        next_s = begin_s
        while not self._stop.wait(max(0.0, next_s - time.monotonic())):
            next_s += _TICK_S
            objects = get("deployments,pods", "-n", NAMESPACE)
            if objects is None:
                continue
            seen = observe(time.monotonic() - begin_s, objects["items"], fetch_from_engine)
            self._process.stdin.write(json.dumps(seen) + "\n")
            self._process.stdin.flush()
            answer = self._answer()
            before, replicas = seen["desired"], answer["replicas"]
            if replicas is not None and replicas != before:
                kubectl("scale", f"deployment/{_WORKLOAD}", f"--replicas={replicas}", "-n", NAMESPACE)
                self._observer.mark("scaled", before=before, after=replicas)
            counts = {key: seen[key] for key in ("desired", "ready", "starting")}
            self.samples.append({"at": round(time.time(), 2), **counts, **answer})


def observe(
    now_s: float, objects: Iterable[Mapping[str, Any]], fetch: Callable[[Mapping[str, Any]], str]
) -> dict[str, Any]:
    """What a policy sees: see `policy_process.decide`. Raises LookupError without the Deployment.

    objects: Deployments and pods of the namespace. fetch: the page of metrics of a pod.
    """
    by_kind: dict[str, list[Mapping[str, Any]]] = {"Deployment": [], "Pod": []}
    for one in objects:
        if one["metadata"]["name"].startswith(_WORKLOAD) and "deletionTimestamp" not in one["metadata"]:
            by_kind[one["kind"]].append(one)
    if not by_kind["Deployment"]:
        raise LookupError(f"no Deployment {_WORKLOAD}")
    ready = [pod for pod in by_kind["Pod"] if is_ready(pod)]
    return {
        "now_s": now_s,
        "desired": by_kind["Deployment"][0]["spec"]["replicas"],
        "ready": len(ready),
        "starting": len(by_kind["Pod"]) - len(ready),
        "pages": {pod["metadata"]["name"]: fetch(pod) for pod in ready},
    }


def _command(scenario: Scenario) -> list[str]:
    """The policy in the files of the operator's image, which have its packages."""
    slo = {"share": PERCENTILE / 100, "ttft_s": scenario.ttft_s, "tpot_s": scenario.tpot_s}
    code = Path(__file__).with_name("policy_process.py").read_text()
    words = [scenario.policy, str(scenario.low), str(scenario.high), json.dumps(slo)]
    return ["chroot", str(IMAGES / "operator"), _PYTHON, "-c", code, *words]
