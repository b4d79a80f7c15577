"""The fleet's run: light engines at an H200's step times, real operator, gateway and pods, one of them killed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import httpx

from e2e.demo import trace
from e2e.demo.asking import LIGHT_CHAT_TOKENS, LIGHT_TOKEN_BYTES, plan
from e2e.demo.figures import Span, Targets
from e2e.demo.watch import Seen, Watch, watched
from e2e.lib import stack
from e2e.lib.kube import Cluster, Object
from e2e.lib.metrics import Gateway
from e2e.lib.service import Service, manifest
from e2e.lib.wait import until

RUN: Final = "fleet"
PROFILE: Final = "h200-70b-capped"
SLOTS: Final = 32
COLD_S: Final = (30.0, 60.0)
BOUNDS: Final = {"prefill": (3, 8), "decode": (1, 4)}
TARGETS: Final = Targets(ttft_s=3.0, tpot_s=0.060)
GONE_S: Final = 10.0  # until the node has ended a pod that was torn away
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
    span: Span


def fleet_manifest() -> Object:
    """A service of two tiers; what a user would write, but for the runtime and its arguments."""
    tiers = {tier: {"minReplicas": low, "maxReplicas": high} for tier, (low, high) in BOUNDS.items()}
    engine = {"runtime": "simulated", "args": [word for pair in _ARGS.items() for word in pair]}
    slo = {"ttft": f"{TARGETS.ttft_s:g}s", "tpot": f"{1000 * TARGETS.tpot_s:g}ms", "percentile": TARGETS.percentile}
    return manifest(RUN, tiers, model={"uri": "hf://example/sim-70b"}, engine=engine, slo=slo)


def renew(cluster: Cluster, namespace: str) -> Service:
    """The service made anew: it knows neither its engines nor their start-up yet."""
    service = Service(cluster, namespace, RUN, stack.GATEWAY_URL)
    if service.get():
        cluster.delete("inferenceservices", RUN, namespace=namespace)
        until("the former fleet is gone", lambda: not service.pods(), stack.DRAIN_S)
    cluster.apply(fleet_manifest(), namespace=namespace)
    return service


def run(service: Service, rows: Sequence[trace.Asked]) -> tuple[Seen, Kill | None]:
    """Sends the rows at their moments, kills an engine, and waits until every request has ended."""
    load = plan(rows, LIGHT_TOKEN_BYTES, f"{time.time_ns():x}", LIGHT_CHAT_TOKENS)
    kill: list[Kill] = []

    def meanwhile(watch: Watch) -> None:
        sleep_until(watch.origin + trace.KILL_S)
        kill.extend(_kill(service, watch))

    seen = watched(service, RUN, TARGETS, rows, load, meanwhile)
    return seen, next(iter(kill), None)


def _kill(service: Service, watch: Watch) -> Iterator[Kill]:
    """Tears the busiest decode engine away, or a prefill engine where decode has one only."""
    decode, prefill = service.ready_pods("decode"), service.ready_pods("prefill")
    tier, pods = ("decode", decode) if len(decode) > 1 else ("prefill", prefill)
    busy = _in_flight(service)
    pod = max(pods, key=lambda name: busy[name], default=None)
    if pod is None:
        return
    at = watch.note("Kill", f"the demo kills {tier} engine {pod} with {busy[pod]} requests under way")
    argv = ("delete", "pod", pod, "-n", service.namespace, "--force", "--grace-period=0", "--wait=false")
    service.cluster.kubectl(*argv)
    yield Kill(tier, Span(round(at, 2), round(at + GONE_S, 2)))


def _in_flight(service: Service) -> Counter[str]:
    """Requests under way by pod; none where a busy gateway does not say."""
    try:
        return Gateway(service.cluster, stack.SYSTEM).in_flight(service.key)
    except httpx.HTTPError:
        return Counter()


def sleep_until(unix_s: float) -> None:
    """Lets time pass while the load runs."""
    time.sleep(max(0.0, unix_s - time.time()))
