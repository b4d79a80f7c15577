"""Time from a request to the first decision that includes it, one request at a time to a service without recent
requests.

The gateway's counter is polled, so its time is accurate to some 20 ms. `explain` gives the times of the operator's
reading and of its decision, to the millisecond. All clocks are this machine's.
"""

from __future__ import annotations

import random
import time

import httpx

from e2e.lib import simulated_fleet, stack
from e2e.lib.kube import Cluster, Object
from e2e.lib.load import Arrival, Load, OpenLoop
from e2e.lib.metrics import GatewayClient
from e2e.lib.operator import OperatorClient, gateways_read_at, metric_value, observed_at
from e2e.lib.service import Service
from e2e.lib.wait import sleep, wait_until

NAMESPACE = "bench-decision"
REQUESTS = 40
IDLE_RANGE_S = (2.0, 8.0)  # between two: with and without the rest that an idle service is given


def measure(cluster: Cluster) -> dict[str, object]:
    """Milliseconds since the request was sent, each part by its median and its longest."""
    operator, gateway = OperatorClient(cluster, stack.SYSTEM), GatewayClient(cluster, stack.SYSTEM)
    rng, parts = random.Random(1), []
    stack.make_namespace(cluster, NAMESPACE)
    try:
        cluster.apply(
            simulated_fleet.fleet_manifest("asked", {"serve": simulated_fleet.replica_bounds(1, 2)}),
            namespace=NAMESPACE,
        )
        service = Service(cluster, NAMESPACE, "asked", stack.GATEWAY_URL)
        service.wait_ready()
        wait_until("its gateways are heard", lambda: "metrics" in operator.explain(service.key))
        for n in range(REQUESTS):
            sleep(rng.uniform(*IDLE_RANGE_S))
            parts.append(_parts(service, gateway, operator, n))
    finally:
        stack.drop_namespace(cluster, NAMESPACE)
    names = ("counted by the gateway", "read by the operator", "decided")
    samples = {name: sorted(1e3 * sample[position] for sample in parts) for position, name in enumerate(names)}
    return {f"{name} ms": f"median {ms[len(ms) // 2]:.0f}, longest {ms[-1]:.0f}" for name, ms in samples.items()}


def _parts(service: Service, gateway: GatewayClient, operator: OperatorClient, n: int) -> tuple[float, float, float]:
    before = _arrivals(gateway, service)
    with Load(service.target, OpenLoop([Arrival(0.0, simulated_fleet.prompts(f"decision {n}", 60, 8)(n))])) as load:
        wait_until("the gateway has counted it", lambda: _arrivals(gateway, service) > before, every_s=0.0)
        counted_at = time.time()
        document = wait_until("the operator has heard of it", lambda: _knows_request(operator, service), every_s=0.05)
    (sent,) = load.wait().records
    assert sent.ok, sent.detail
    return counted_at - sent.sent_at, gateways_read_at(document) - sent.sent_at, observed_at(document) - sent.sent_at


def _arrivals(gateway: GatewayClient, service: Service) -> int:
    return sum(document["requests"]["arrived"] for document in gateway.services(service.key))


def _knows_request(operator: OperatorClient, service: Service) -> Object | None:
    try:
        document = operator.explain(service.key)
    except httpx.HTTPError:
        return None
    return document if metric_value(document, "rate_per_s") > 0.0 else None
