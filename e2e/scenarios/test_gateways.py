"""Three gateways are one: shares sum to the whole, an overload is cut to what can be kept, also when one dies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from e2e.lib import light, stack
from e2e.lib.kube import Cluster, Object, is_true
from e2e.lib.ledger import Outcome, Record
from e2e.lib.load import Load, OpenLoop, poisson
from e2e.lib.metrics import Gateway
from e2e.lib.prober import Prober
from e2e.lib.service import Service
from e2e.lib.wait import pause, until
from plimsoll.core.admission.replica import PACE_RANGE

GATEWAYS = 3
DEPLOYMENT = "plimsoll-gateway"
SELECTOR = "app.kubernetes.io/component=gateway"
LOW, OVERLOAD = 0.5, 11.0  # requests/s; the replica carries about 6
SETTLED_S = 20.0  # after a step in load: the gates have learned what comes
WATCHED_S = 25.0
GONE_S = 5.0  # connections go to a gateway that is no more until the node has heard of it


def _steady(rate: float, name: str, seed: int) -> OpenLoop:
    return poisson(rate, 300, light.prompts(name, 300, 48), seed)


def _pods(cluster: Cluster) -> list[Object]:
    found = cluster.list("pods", stack.SYSTEM, SELECTOR)
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def _scale(cluster: Cluster, replicas: int) -> None:
    cluster.kubectl("scale", f"deployment/{DEPLOYMENT}", "-n", stack.SYSTEM, f"--replicas={replicas}")
    _whole(cluster, replicas)


def _whole(cluster: Cluster, replicas: int) -> None:
    def whole() -> bool:
        pods = _pods(cluster)
        return len(pods) == replicas and all(is_true(pod, "Ready") for pod in pods)

    until(f"there are {replicas} gateways", whole, 120)


@pytest.fixture(scope="module")
def three(cluster: Cluster) -> Iterator[None]:
    before = len(_pods(cluster))
    _scale(cluster, GATEWAYS)
    yield
    _scale(cluster, before)


@pytest.fixture(scope="module")
def gate(cluster: Cluster, namespace: str, three: None) -> Iterator[Service]:
    """One replica behind three gateways, all of which know what it carries."""
    cluster.apply(light.fleet("gate", {"serve": light.bounds(1, 1)}), namespace=namespace)
    found = Service(cluster, namespace, "gate", stack.GATEWAY_URL)
    found.wait_ready()
    light.learned(found, _steady(LOW, "learn", seed=1))
    yield found
    cluster.kubectl("delete", "plim", "gate", "-n", namespace)


def _shares(service: Service) -> tuple[int, dict[str, int]]:
    """The sequences that a replica may have, and how the gateways were told to share them."""
    told = service.status()["admission"]
    return told["limits"]["batch"], told["shares"]


def _held(gateway: Gateway, service: Service) -> tuple[int, int, int]:
    """What the gateways take themselves to have, the most that each had at the replica, and what is there now."""
    try:
        told = [found["admission"] for found in gateway.services(service.key)]
    except httpx.HTTPError:  # one of them comes or goes
        return 0, 0, 0
    running = gateway.in_flight(service.key).total()
    return sum(one["units"] for one in told), sum(one["in_use"] for one in told), running


def _watch(gateway: Gateway, service: Service, seconds: float) -> list[tuple[int, int, int, int, int]]:
    """Once a second: the whole, the sum of the shares in the status, and what the gateways hold."""
    seen = []
    for _ in range(round(seconds)):
        batch, shares = _shares(service)
        seen.append((batch, sum(shares.values()), *_held(gateway, service)))
        pause(1.0)
    return seen


def _judged(records: list[Record]) -> tuple[list[Record], int]:
    """Those that were let in, and how many of them had the promise."""
    admitted = [r for r in records if r.outcome is not Outcome.REFUSED]
    return admitted, sum(map(light.kept, admitted))


def _shared(service: Service, cluster: Cluster) -> Callable[[], bool]:
    """Whether the shares are those of the gateways that exist, and sum to the whole."""

    def shared() -> bool:
        batch, shares = _shares(service)
        return shares.keys() == {pod["metadata"]["name"] for pod in _pods(cluster)} and sum(shares.values()) == batch

    return shared


def test_shares_sum_to_the_whole_and_an_overload_is_cut(
    gate: Service, cluster: Cluster, gateway: Gateway, prober: Prober
) -> None:
    """Under three, and under those that are left when one dies: what it carried is cut, and the others take over."""
    until("each gateway has its share", _shared(gate, cluster), 60)
    with Load(gate.target, _steady(OVERLOAD, "overload", seed=2)) as load:
        pause(SETTLED_S)
        begin = time.time()
        seen = _watch(gateway, gate, WATCHED_S)
        struck_at = time.time()
        gone = _pods(cluster)[0]["metadata"]["name"]
        prober.excuse(struck_at, struck_at + GONE_S)
        cluster.kubectl("delete", "pod", gone, "-n", stack.SYSTEM, "--force", "--grace-period=0", "--wait=false")
        _whole(cluster, GATEWAYS)
        until("the shares are of those that are there", _shared(gate, cluster), 60)
        shared_s = time.time() - struck_at
        pause(WATCHED_S - min(WATCHED_S, shared_s))
    records = load.ledger.records
    cut = [r for r in light.lost(records) if r.overlaps(struck_at, struck_at + GONE_S)]  # whoever was at the dead one
    rest = [r for r in records if r not in cut]
    lost = light.lost(rest)
    calm = [r for r in rest if begin <= r.sent_at < struck_at]
    after = [r for r in rest if r.sent_at >= struck_at + GONE_S]
    print(f"{load.ledger.summary()}\nwhole, shares, units, most in use, running: {seen}")
    print(f"one of three gone: {len(cut)} cut, shared anew after {shared_s:.0f} s: {_shares(gate)}")
    for name, some in (("settled", calm), ("after", after)):
        admitted, kept = _judged(some)
        print(f"{name}: {len(some)} offered, {len(admitted)} let in, {kept} of these within the promise")
        assert 0 < len(admitted) < len(some), "that was no overload"
        assert kept >= 0.95 * len(admitted), name
    assert not lost, light.lines(lost)
    assert any(units == batch for batch, _, units, *_ in seen), "nobody has taken up what was told"
    for batch, shares, units, _, running in seen:
        assert shares <= batch
        assert units <= batch
        assert running <= batch / PACE_RANGE[0], "a replica faster than the model holds more, but not the whole thrice"
