"""A second service of lower priority that holds the other GPU, and one short request a second to it.

Problem: whether a service that needs a GPU takes it from one that matters less is the scheduler's matter as much as the
operator's: preemption, drain, the wait for a GPU, and the way back.
Idea: both services name a PriorityClass. The rival's replica is preempted when the first service scales up, and returns
when that one scales down; its requests show what its clients see meanwhile.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from bench.hardware import client
from e2e.gpu.settings import GATEWAY_URL, NAMESPACE
from e2e.lib.background import BackgroundThread

RIVAL: Final = "n"
HIGH: Final = "gpu-high"
LOW: Final = "gpu-low"
_EVERY_S: Final = 1.0
_TIMEOUT_S: Final = 40.0
_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def classes() -> dict[str, Any]:
    """The PriorityClasses of both services."""
    items = [
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": name},
            "value": value,
            "description": "an engine's",
        }
        for name, value in ((HIGH, 1000), (LOW, 10))
    ]
    return {"apiVersion": "v1", "kind": "List", "items": items}


def manifest_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The rival, which has one replica, from the manifest of the first service."""
    tier = manifest["spec"]["tiers"]["serve"]
    lower = {**tier, "minReplicas": 1, "maxReplicas": 1, "pod": {**tier["pod"], "priorityClassName": LOW}}
    spec = {**manifest["spec"], "tiers": {"serve": lower}}
    return {**manifest, "metadata": {"name": RIVAL, "namespace": NAMESPACE}, "spec": spec}


class Probe(BackgroundThread):
    """A context manager; `results` has the time, the status and the seconds of each request to the rival."""

    def __init__(self) -> None:
        super().__init__(self._send_all)
        self.results: list[dict[str, Any]] = []
        self._pool = ThreadPoolExecutor(int(_TIMEOUT_S / _EVERY_S) + 2)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._pool.shutdown(cancel_futures=True)

    def _send_all(self) -> None:
        while not self._stop.wait(_EVERY_S):
            self._pool.submit(self._send)

    def _send(self) -> None:
        began = time.time()
        status, text = _ask()
        self.results.append(
            {"at": round(began, 2), "seconds": round(time.time() - began, 3), "status": status, "text": text}
        )


def _ask() -> tuple[int, str]:
    """The status of one short request and, of an error, the beginning of its text; 0 without a response."""
    document = {**client.request_body(client.prompt((2,), 64), 8, stream=False), "model": RIVAL}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(GATEWAY_URL + client.COMPLETIONS, json.dumps(document).encode(), headers)
    try:
        with _DIRECT.open(request, timeout=_TIMEOUT_S) as response:
            response.read()
            return int(response.status), ""
    except urllib.error.HTTPError as error:
        return error.code, error.read()[:300].decode(errors="replace")
    except OSError as error:
        return 0, str(error)
