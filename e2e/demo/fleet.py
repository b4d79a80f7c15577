"""The fleet's run: light engines at an H200's step times, real operator, gateway and pods, one of them killed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import httpx

from e2e.demo import trace
from e2e.demo.figures import Targets, TimeSpan
from e2e.demo.observer import RunObservations, ServiceObserver, observe_load
from e2e.demo.prompts import LIGHT_CHAT_TOKENS, LIGHT_TOKEN_BYTES, plan_load
from e2e.lib import stack
from e2e.lib.kube import Cluster, Object
from e2e.lib.metrics import GatewayClient
from e2e.lib.service import Service, make_manifest
from e2e.lib.wait import wait_until

FLEET_RUN: Final = "fleet"
PROFILE: Final = "h200-70b-capped"
SLOTS: Final = 32
COLD_S: Final = (30.0, 60.0)
BOUNDS: Final = {"prefill": (3, 8), "decode": (1, 4)}
TARGETS: Final = Targets(ttft_s=3.0, tpot_s=0.060)
KILL_EFFECT_S: Final = 10.0  # until the node has ended a pod that was torn away
_ARGS: Final = {
    "--profile": PROFILE,
    "--max-num-seqs": str(SLOTS),
    "--start-seconds": f"uniform:{COLD_S[0]:.0f},{COLD_S[1]:.0f}",
    "--coalesce-seconds": "0.1",  # fewer, larger pieces of a stream: times per token stay, this machine's work does not
}


@dataclass
class Kill:
    """An engine that the demo tore away: its tier, and from when to when its streams may have broken."""

    tier: str
    span: TimeSpan


def fleet_manifest() -> Object:
    """A service of two tiers; what a user would write, but for the runtime and its arguments."""
    tiers = {tier: {"minReplicas": low, "maxReplicas": high} for tier, (low, high) in BOUNDS.items()}
    engine = {"runtime": "simulated", "args": [f"{flag}={value}" for flag, value in _ARGS.items()]}
    slo = {"ttft": f"{TARGETS.ttft_s:g}s", "tpot": f"{1000 * TARGETS.tpot_s:g}ms", "percentile": TARGETS.percentile}
    return make_manifest(FLEET_RUN, tiers, model={"uri": "hf://example/sim-70b"}, engine=engine, slo=slo)


def recreate(cluster: Cluster, namespace: str) -> Service:
    """The service made anew: it knows neither its engines nor their start-up yet."""
    service = Service(cluster, namespace, FLEET_RUN, stack.GATEWAY_URL)
    if service.get():
        cluster.delete("inferenceservices", FLEET_RUN, namespace=namespace)
        wait_until("the former fleet is gone", lambda: not service.pods(), stack.DRAIN_S)
    cluster.apply(fleet_manifest(), namespace=namespace)
    return service


def run(service: Service, rows: Sequence[trace.TraceRequest]) -> tuple[RunObservations, Kill | None]:
    """Sends the rows at their moments, kills an engine, and waits until every request has ended."""
    load = plan_load(rows, LIGHT_TOKEN_BYTES, f"{time.time_ns():x}", LIGHT_CHAT_TOKENS)
    kill: list[Kill] = []

    def kill_engine(observer: ServiceObserver) -> None:
        sleep_until(observer.origin + trace.KILL_S)
        kill.extend(_kill(service, observer))

    observations = observe_load(service, FLEET_RUN, TARGETS, rows, load, kill_engine)
    return observations, next(iter(kill), None)


def _kill(service: Service, observer: ServiceObserver) -> Iterator[Kill]:
    """Tears the busiest decode engine away, or a prefill engine where decode has one only."""
    decode, prefill = service.ready_pods("decode"), service.ready_pods("prefill")
    tier, pods = ("decode", decode) if len(decode) > 1 else ("prefill", prefill)
    busy = _in_flight(service)
    pod = max(pods, key=lambda name: busy[name], default=None)
    if pod is None:
        return
    killed_s = observer.record_message(
        "Kill", f"the demo kills {tier} engine {pod} with {busy[pod]} requests under way"
    )
    argv = ("delete", "pod", pod, "-n", service.namespace, "--force", "--grace-period=0", "--wait=false")
    service.cluster.kubectl(*argv)
    yield Kill(tier, TimeSpan(round(killed_s, 2), round(killed_s + KILL_EFFECT_S, 2)))


def _in_flight(service: Service) -> Counter[str]:
    """Requests under way by pod; none where a busy gateway does not say."""
    try:
        return GatewayClient(service.cluster, stack.SYSTEM).in_flight(service.key)
    except httpx.HTTPError:
        return Counter()


def sleep_until(unix_s: float) -> None:
    """Lets time pass while the load runs."""
    time.sleep(max(0.0, unix_s - time.time()))
