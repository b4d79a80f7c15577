"""Requests to an engine from inside its pod, past the gateway."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from e2e.lib.kube import Object
from e2e.lib.metrics import Samples
from e2e.lib.service import API_PORT, LAUNCHER_PORT, Service
from plimsoll.adapters import engine_metrics
from plimsoll.api.contract import engine_contract
from plimsoll.core.ports import EngineReading
from plimsoll.engines import launched

Request = tuple[str, str, Object, str | None]  # method, path, headers, body
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

# Batches of requests, one batch after the other; those of a batch at once.
CLIENT_SCRIPT = """
import http.client, json, sys, time
from concurrent.futures import ThreadPoolExecutor
port, batches = int(sys.argv[1]), json.load(sys.stdin)
def ask(request):
    method, path, headers, body = request
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, {"content-type": "application/json", **headers})
    answer = connection.getresponse()
    said = answer.read().decode()
    connection.close()
    return answer.status, answer.getheader("content-type"), said, time.perf_counter() - began
with ThreadPoolExecutor(max(map(len, batches))) as pool:
    print(json.dumps([list(pool.map(ask, batch)) for batch in batches]))
"""


@dataclass(frozen=True)
class EngineResponse:
    """One answer; `seconds` until its last byte."""

    status: int
    kind: str | None
    said: str
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.said)

    @property
    def events(self) -> list[str]:
        """The data of a stream's events."""
        return [part.removeprefix("data: ") for part in self.said.split("\n\n") if part]


@dataclass(frozen=True)
class Engine:
    """The one engine of a tier, reached from inside its pod."""

    service: Service
    role: str = "serve"

    @property
    def pod(self) -> str:
        return self.service.ready_pods(self.role)[0]

    def send(self, *batches: list[Request]) -> list[list[EngineResponse]]:
        """Batches of requests, one after another, each all at once."""
        run = ["exec", "-i", "-n", self.service.namespace, self.pod, "-c", "engine", "--"]
        argv = [*run, "python3", "-c", CLIENT_SCRIPT, str(API_PORT)]
        said = self.service.cluster.kubectl(*argv, stdin=json.dumps(batches), timeout_s=120)
        return [[EngineResponse(*one) for one in batch] for batch in json.loads(said)]

    def request(self, body: Object, path: str = COMPLETIONS, headers: Object | None = None) -> Request:
        """A body for this engine's model, unless it names one."""
        return "POST", path, headers or {}, json.dumps({"model": self.service.name, **body})

    def post(self, *bodies: Object, path: str = COMPLETIONS, headers: Object | None = None) -> list[EngineResponse]:
        """One after another."""
        return [got for (got,) in self.send(*([self.request(body, path, headers)] for body in bodies))]

    def about(self) -> Any:
        return json.loads(self._page(engine_contract().paths["about"]))

    def metrics(self) -> Samples:
        return Samples.parse(self._page(engine_contract().paths["metrics"]))

    def reading(self) -> EngineReading:
        """As the operator reads it."""
        page = self._page(engine_contract().paths["metrics"]).encode()
        return engine_metrics.parse_metrics(page, self.pod, 0.0, launched.METRICS)

    def _page(self, path: str) -> str:
        return self.service.cluster.in_pod(self.service.namespace, self.pod, LAUNCHER_PORT, path)
