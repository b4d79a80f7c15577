"""Fleets of light engines for scenarios: slowed down until a load that two cores can send is one for several replicas.

Engines start in two seconds, so that what a scenario waits for is the fleet's law and not its engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from e2e.lib.client import Prompt
from e2e.lib.kube import Object
from e2e.lib.ledger import Outcome, Record
from e2e.lib.load import Load, Plan, unique_text
from e2e.lib.service import Service, manifest
from e2e.lib.wait import pause, until

START_S = 2
SCALE = 8.0  # of the profile's step times: about 40 ms a step
TTFT_S, TPOT_S = 2.0, 0.08
TELLS_S = 120.0  # a minute's figures, a tick, and a busy machine


def args(**flags: object) -> list[str]:
    """Of light engines that are all alike; `flags` come on top, `max_num_seqs=8` as `--max-num-seqs 8`."""
    usual = {"profile": "h200-8b-cool", "profile_scale": SCALE, "spread": 0, "start_seconds": START_S}
    found = usual | flags
    return [str(word) for name, value in found.items() for word in (f"--{name.replace('_', '-')}", value)]


def fleet(name: str, tiers: Object, **flags: object) -> Object:
    """An InferenceService whose tiers need no GPU."""
    slo = {"ttft": f"{TTFT_S:g}s", "tpot": f"{TPOT_S * 1e3:g}ms"}
    engine = {"runtime": "simulated", "args": args(**flags)}
    made = {role: {"gpus": 0, **tier} for role, tier in tiers.items()}
    return manifest(name, made, model={"uri": "hf://example/sim-8b"}, engine=engine, slo=slo)


def bounds(least: int, most: int, **rest: object) -> Object:
    """A tier's replicas."""
    return {"minReplicas": least, "maxReplicas": most, **rest}


def prompts(name: str, words: int, tokens: int) -> Callable[[int], Prompt]:
    """Texts that no cache has, each with an answer of so many tokens."""
    start = time.time()
    return lambda n: Prompt(unique_text(words, f"{name} {start} {n}"), max_tokens=tokens)


def desired(service: Service, tier: str = "serve") -> int:
    """The replicas that a tier should have."""
    return int(service.status()["tiers"][tier]["desired"])


def kept(record: Record) -> bool:
    """Whether the promise to this request was kept."""
    on_time = record.ttft_s is not None and record.ttft_s <= TTFT_S
    return record.ok and on_time and (record.tpot_s is None or record.tpot_s <= TPOT_S)


def lost(records: list[Record]) -> list[Record]:
    """Failures of any other kind than a refusal that says whether and when to come back."""
    told = {429, 503}
    return [
        r
        for r in records
        if not r.ok and (r.outcome is not Outcome.REFUSED or r.status not in told or "retry=None" in r.detail)
    ]


def lines(records: list[Record]) -> str:
    """Some of them, for an assertion's message."""
    origin = min((r.sent_at for r in records), default=0.0)
    return "\n".join(r.line(origin) for r in records[:20])


def learned(service: Service, load: Plan) -> None:
    """Under this load, waits until all tiers know their load lines and the gateways what they may let in."""

    with Load(service.target, load) as light:
        knows(service)
    assert not light.ledger.failures, light.ledger.explain()


def knows(service: Service) -> None:
    """Waits for that, under a load that somebody else sends."""

    def known() -> bool:
        status = service.status()
        lines = all("knee" in tier for tier in status["tiers"].values())
        return lines and bool((status.get("admission") or {}).get("limits"))

    until(f"{service.key} knows its tiers", known, TELLS_S)


def counts(service: Service, seconds: float, tier: str = "serve") -> list[int]:
    """The replicas that a tier should have, once a second."""
    seen = []
    for _ in range(round(seconds)):
        seen.append(desired(service, tier))
        pause(1.0)
    return seen
