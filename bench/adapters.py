"""LoRA adapters beyond `maxLoras`, simulated: `python -m bench.adapters`.

Six adapters and their model on H200 engines that run four adapters at once. Each engine schedules as vLLM does. The
gateway first ignores the limit (its service has no adapters in the spec), then it respects it. Prints the share of the
offered requests within the SLO: of all, of the adapter that is served worst, and of the model itself; a request counts
if one of its attempts was within the SLO. Takes about two minutes of one core.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from plimsoll.api.v1alpha1 import parse
from plimsoll.core.types import Role
from plimsoll.sim import profile
from plimsoll.sim.attempt import Attempt, AttemptOutcome, TraceRequest
from plimsoll.sim.clients import RetryBehavior
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies.base import PlimsollPolicy
from plimsoll.sim.run_config import RunConfig
from plimsoll.sim.simulator import Simulator
from plimsoll.sim.startup import StartupDistribution

ADAPTERS: Final = "abcdef"
MAX_LORAS: Final = 4
TTFT_S, TPOT_S = 0.5, 0.05
BUSY: Final = {"": 2.0} | dict.fromkeys(ADAPTERS, 2.0)  # requests/s
HOT_AND_COLD: Final = {"": 1.0} | dict.fromkeys("abcd", 3.0) | dict.fromkeys("ef", 0.1)
SECONDS: Final = 240.0
LINE: Final = "{:14} {:>8} {:10} {:8} {:>8} {:>8.1%} {:>8.1%} {:>8.1%}"


def make_requests(rates: Mapping[str, float], seconds: float) -> list[TraceRequest]:
    """Returns requests that arrive at random, with the lengths of chats: on average 1,200 and 220 tokens."""
    requests = []
    for adapter, per_s in rates.items():
        random, now_s = Random(f"adapter {adapter}"), 0.0
        while (now_s := now_s + random.expovariate(per_s)) < seconds:
            prompt, output = 1200 * random.lognormvariate(-0.18, 0.6), 220 * random.lognormvariate(-0.125, 0.5)
            requests.append(TraceRequest(now_s, max(1, int(prompt)), max(1, int(output)), adapter=adapter))
    return sorted(requests, key=lambda request: request.at_s)


@dataclass(frozen=True)
class Shares:
    """Requests within the SLO, of those that were offered, by adapter; "" is the model itself."""

    offered: Counter[str]
    within: Counter[str]

    def of(self, adapter: str) -> float:
        return self.within[adapter] / self.offered[adapter]

    @property
    def worst(self) -> float:
        """The share of the adapter that is served worst."""
        return min(self.of(adapter) for adapter in self.offered if adapter)

    @property
    def all(self) -> float:
        return self.within.total() / self.offered.total()


def run(
    rates: Mapping[str, float],
    replicas: tuple[int, int],
    *,
    respects: bool,
    retries: RetryBehavior = RetryBehavior.NONE,
    seconds: float = SECONDS,
) -> Shares:
    """Simulate a service of at least and at most so many replicas. `respects`: whether the gateway knows the limit."""
    spec = {
        "model": {"uri": "hf://Qwen/Qwen3-8B"},
        "slo": {"ttft": f"{TTFT_S * 1000:.0f}ms", "tpot": f"{TPOT_S * 1000:.0f}ms"},
        "tiers": {"serve": {"minReplicas": replicas[0], "maxReplicas": replicas[1], "gpus": 1}},
    }
    if respects:
        spec |= {"adapters": [{"name": name, "uri": f"hf://team/{name}"} for name in rates if name]}
        spec |= {"engine": {"lora": {"maxLoras": MAX_LORAS}}}
    metadata = {"name": "chat", "namespace": "team"}
    service = parse(
        {"apiVersion": "plimsoll.dev/v1alpha1", "kind": "InferenceService", "metadata": metadata, "spec": spec}
    )
    hardware = replace(profile.load("h200-8b"), hot=None)
    plant = Plant(hardware, StartupDistribution(60.0, 60.0), max_adapters=MAX_LORAS)
    attempts: list[Attempt] = []
    config = RunConfig({Role.SERVE: replicas[0]}, seconds, retry_behavior=retries)
    Simulator(service, plant, PlimsollPolicy(), config, attempts.append).run(make_requests(rates, seconds))
    first = Counter(one.trace_request.adapter for one in attempts if one.attempt == 1)
    return Shares(first, Counter(one.trace_request.adapter for one in attempts if _is_within(one)))


def _is_within(attempt: Attempt) -> bool:
    is_ok = attempt.outcome is AttemptOutcome.OK and attempt.ttft_s is not None and attempt.ttft_s <= TTFT_S
    return is_ok and (attempt.tpot_s is None or attempt.tpot_s <= TPOT_S)


def main() -> None:
    print(
        LINE.replace(":>8.1%", ":>8").format(
            "load", "replicas", "gateway", "retries", "offered", "all", "worst", "model"
        )
    )
    cases = [(BUSY, (1, 1)), (BUSY, (2, 2)), (BUSY, (1, 4)), (HOT_AND_COLD, (1, 1)), (HOT_AND_COLD, (2, 2))]
    for rates, replicas in cases:
        for retries in (RetryBehavior.NONE, RetryBehavior.HONOUR):
            for respects in (False, True):
                shares = run(rates, replicas, respects=respects, retries=retries)
                name, count = "busy" if rates is BUSY else "hot and cold", "{}..{}".format(*replicas)
                gateway = "respects" if respects else "ignores"
                offered = shares.offered.total()
                print(LINE.format(name, count, gateway, retries, offered, shares.all, shares.worst, shares.of("")))


if __name__ == "__main__":
    main()
