"""From a request to the first decision that knows of it, one request at a time to a service that has had none lately.

The gateway's count is polled, so that it is known to some 20 ms; when the operator read it and when it decided is told
by `explain`, to the millisecond. All clocks are this machine's.
"""

from __future__ import annotations

import random
import time

import httpx

from e2e.lib import light, stack
from e2e.lib.kube import Cluster, Object
from e2e.lib.load import Arrival, Load, OpenLoop
from e2e.lib.metrics import Gateway
from e2e.lib.operator import Operator, figure, heard_at, read_at
from e2e.lib.service import Service
from e2e.lib.wait import pause, until

NAMESPACE = "bench-decision"
REQUESTS = 40
QUIET_S = (2.0, 8.0)  # between two: with and without the rest that an idle service is given


def measure(cluster: Cluster) -> dict[str, object]:
    """Milliseconds since the request was sent, each part by its median and its longest."""
    operator, gateway = Operator(cluster, stack.SYSTEM), Gateway(cluster, stack.SYSTEM)
    draw, parts = random.Random(1), []
    stack.make_namespace(cluster, NAMESPACE)
    try:
        cluster.apply(light.fleet("asked", {"serve": light.bounds(1, 2)}), namespace=NAMESPACE)
        asked = Service(cluster, NAMESPACE, "asked", stack.GATEWAY_URL)
        asked.wait_ready()
        until("its gateways are heard", lambda: "heard" in operator.explain(asked.key))
        for n in range(REQUESTS):
            pause(draw.uniform(*QUIET_S))
            parts.append(_parts(asked, gateway, operator, n))
    finally:
        stack.drop_namespace(cluster, NAMESPACE)
    names = ("counted by the gateway", "read by the operator", "decided")
    found = {name: sorted(1e3 * one[place] for one in parts) for place, name in enumerate(names)}
    return {f"{name} ms": f"median {ms[len(ms) // 2]:.0f}, longest {ms[-1]:.0f}" for name, ms in found.items()}


def _parts(service: Service, gateway: Gateway, operator: Operator, n: int) -> tuple[float, float, float]:
    before = _arrived(gateway, service)
    with Load(service.target, OpenLoop([Arrival(0.0, light.prompts(f"decision {n}", 60, 8)(n))])) as load:
        until("the gateway has counted it", lambda: _arrived(gateway, service) > before, every_s=0.0)
        counted_at = time.time()
        document = until("the operator has heard of it", lambda: _knows(operator, service), every_s=0.05)
    (sent,) = load.wait().records
    assert sent.ok, sent.detail
    return counted_at - sent.sent_at, read_at(document) - sent.sent_at, heard_at(document) - sent.sent_at


def _arrived(gateway: Gateway, service: Service) -> int:
    return sum(told["requests"]["arrived"] for told in gateway.services(service.key))


def _knows(operator: Operator, service: Service) -> Object | None:
    try:
        document = operator.explain(service.key)
    except httpx.HTTPError:
        return None
    return document if figure(document, "rate_per_s") > 0.0 else None
