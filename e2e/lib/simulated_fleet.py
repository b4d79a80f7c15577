"""Fleets of light engines for scenarios: slowed down until a load that two cores can send is one for several replicas.

Engines start in two seconds, so that what a scenario waits for is the fleet's law and not its engines.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from e2e.lib.client import Prompt
from e2e.lib.kube import Object
from e2e.lib.load import Load, Plan, unique_text
from e2e.lib.request_log import RequestRecord, RequestResult
from e2e.lib.service import Service, make_manifest
from e2e.lib.wait import sleep, wait_until

START_S = 2
SCALE = 8.0  # of the profile's step times: about 40 ms a step
TTFT_S, TPOT_S = 2.0, 0.08
FORECAST_SHARE = 0.8  # of a Poisson load: what a forecast from its last seconds may be
PUBLISH_TIMEOUT_S = 240.0  # a minute's figures, a tick, and a busy machine


def engine_args(**flags: object) -> list[str]:
    """Of light engines that are all alike; `flags` come on top, `max_num_seqs=8` as `--max-num-seqs 8`."""
    defaults = {"profile": "h200-8b-cool", "profile_scale": SCALE, "spread": 0, "start_seconds": START_S}
    arguments = defaults | flags
    return [str(word) for name, value in arguments.items() for word in (f"--{name.replace('_', '-')}", value)]


def fleet_manifest(name: str, tiers: Object, **flags: object) -> Object:
    """An InferenceService whose tiers need no GPU."""
    slo = {"ttft": f"{TTFT_S:g}s", "tpot": f"{TPOT_S * 1e3:g}ms"}
    engine = {"runtime": "simulated", "args": engine_args(**flags)}
    manifest_built = {role: {"gpus": 0, **tier} for role, tier in tiers.items()}
    return make_manifest(name, manifest_built, model={"uri": "hf://example/sim-8b"}, engine=engine, slo=slo)


def replica_bounds(min_replicas: int, max_replicas: int, **rest: object) -> Object:
    """A tier's replicas."""
    return {"minReplicas": min_replicas, "maxReplicas": max_replicas, **rest}


def prompts(name: str, words: int, tokens: int) -> Callable[[int], Prompt]:
    """Texts that no cache has, each with an answer of so many tokens."""
    start = time.time()
    return lambda n: Prompt(unique_text(words, f"{name} {start} {n}"), max_tokens=tokens)


def desired_replicas(service: Service, tier: str = "serve") -> int:
    """The replicas that a tier should have."""
    return int(service.status()["tiers"][tier]["summary"].partition("/")[2])


def replica_capacity(service: Service, tier: str = "serve") -> float:
    """The requests/s that one replica of a tier carries within the SLO, by the status."""
    return float(service.status()["tiers"][tier]["capacityPerReplica"].partition(" req/s")[0])


def scale_down_rates(service: Service) -> list[float]:
    """The load, requests/s, for which each step down was taken, oldest first; 0 where its Event names none."""
    found = [event for event in service.events() if event["reason"] == "ScaledDown"]
    reported = sorted(found, key=lambda event: str(event["metadata"]["creationTimestamp"]))
    rates = (re.search(r"forecast ([0-9.e+-]+) req/s", event["message"]) for event in reported)
    return [float(rate[1]) if rate else 0.0 for rate in rates]


def within_slo(record: RequestRecord) -> bool:
    """Whether the promise to this request was kept."""
    on_time = record.ttft_s is not None and record.ttft_s <= TTFT_S
    return record.ok and on_time and (record.tpot_s is None or record.tpot_s <= TPOT_S)


def unexpected_failures(records: list[RequestRecord]) -> list[RequestRecord]:
    """Failures of any other kind than a refusal that says whether and when to come back."""
    is_valid_rejection = {429, 503}
    return [
        r
        for r in records
        if not r.ok
        and (r.outcome is not RequestResult.REJECTED or r.status not in is_valid_rejection or "retry=None" in r.detail)
    ]


def format_records(records: list[RequestRecord]) -> str:
    """Some of them, for an assertion's message."""
    origin = min((r.sent_at for r in records), default=0.0)
    return "\n".join(r.line(origin) for r in records[:20])


def wait_calibrated(service: Service, load: Plan) -> None:
    """Under this load, waits until all tiers know their load lines and the gateways what they may let in."""

    with Load(service.target, load) as load_run:
        wait_limits_published(service)
    assert not load_run.ledger.failures, load_run.ledger.explain()


def wait_limits_published(service: Service) -> None:
    """Waits for that, under a load that somebody else sends."""

    def is_calibrated() -> bool:
        status = service.status()
        lines = all("capacityPerReplica" in tier for tier in status["tiers"].values())
        return lines and "costModel" in service.limits()

    wait_until(f"{service.key} knows its tiers", is_calibrated, PUBLISH_TIMEOUT_S)


def sample_desired(service: Service, seconds: float, tier: str = "serve") -> list[int]:
    """The replicas that a tier should have, once a second."""
    samples = []
    for _ in range(round(seconds)):
        samples.append(desired_replicas(service, tier))
        sleep(1.0)
    return samples
