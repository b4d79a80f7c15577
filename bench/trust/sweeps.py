"""Recorded runs of one H200 replayed: the same arrivals and lengths through the plant's engine.

Judged as the clients judged: the same requests, and who had not ended when the clients gave up is a miss on both sides.
Quantiles are over those that ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from bench.trust.check import Check
from bench.trust.drive import Got, Sent, alone, plant
from bench.trust.records import Seen, Sweep
from plimsoll.sim import profile
from plimsoll.sim.profile import Profile

TTFT_S: Final = 0.5  # the promise at scale 1
TPOT_S: Final = 0.05
SCALES: Final = tuple(round(0.2 * n, 1) for n in range(1, 11))
POINTS: Final = 2.0
KNEE: Final = 95.0
KNEE_PERCENT: Final = 3.0

_SERVERS: Final = {"8b": ("h200-8b", 919_824), "70b": ("h200-70b-capped", 191_440)}  # profile, KV tokens as logged


def server(model: str, budget: int) -> Profile:
    """The engine that was recorded: vLLM's defaults, the cache that it logged."""
    name, kv_tokens = _SERVERS[model]
    return replace(profile.load(name), kv_tokens=kv_tokens, max_num_seqs=1024, budget=budget)


@dataclass(frozen=True)
class Replay:
    """A record and what the plant makes of it: judged requests only. both: attained shares at each scale."""

    sweep: Sweep
    seen: Sequence[Seen]
    got: Sequence[Got]
    ended: Sequence[bool]  # of the plant's, before the clients gave up

    def quantile(self, percent: float, of_tpot: bool) -> tuple[float, float]:
        """Recorded and simulated, seconds."""
        if not of_tpot:
            real = [one.ttft_s for one in self.seen if one.ttft_s == one.ttft_s]
            return float(np.percentile(real, percent)), float(np.percentile([g.first_s for g in self.got], percent))
        real = [one.tpot_s for one in self.seen if one.ok and one.sent.output > 1]
        ours = [
            got.tpot_s(one.sent.output)
            for one, got, ended in zip(self.seen, self.got, self.ended, strict=True)
            if ended and one.sent.output > 1
        ]
        return float(np.percentile(real, percent)), float(np.percentile(ours, percent))

    def attained(self, scale: float) -> tuple[float, float]:
        """Percent that kept the promise times `scale`, recorded and simulated."""
        real = sum(one.within(TTFT_S * scale, TPOT_S * scale) for one in self.seen)
        ours = sum(
            ended and within(got, one.sent, TTFT_S * scale, TPOT_S * scale)
            for one, got, ended in zip(self.seen, self.got, self.ended, strict=True)
        )
        return 100.0 * real / len(self.seen), 100.0 * ours / len(self.seen)

    def off(self, percent: float, of_tpot: bool) -> float:
        """Percent by which the plant's quantile is above the recorded one."""
        real, ours = self.quantile(percent, of_tpot)
        return 100.0 * (ours / real - 1.0)


def within(got: Got, sent: Sent, ttft_s: float, tpot_s: float) -> bool:
    """Whether a simulated request kept a promise."""
    return got.first_s <= ttft_s and (sent.output < 2 or got.tpot_s(sent.output) <= tpot_s)


def replay(sweep: Sweep, own: Profile | None = None) -> Replay:
    """own: the engine, where it is not the one that was recorded on the GPU."""
    sent = [one.sent for one in sweep.requests]
    got = alone(plant(own or server(sweep.model, sweep.budget)), sent)
    until_s = sent[-1].at_s + sweep.patience_s
    ended = [one.at_s + each.last_s <= until_s for one, each in zip(sent, got, strict=True)]
    first = len(sent) - sweep.judged
    return Replay(sweep, sweep.requests[first:], got[first:], ended[first:])


def checks(records: Iterable[Sweep]) -> list[Check]:
    """Of all runs whose prompts were computed; those that came from the prefix cache are `cached`."""
    found, replays = [], []
    for sweep in records:
        if sweep.name in ("earlier 2048", "earlier 8192"):
            continue
        one = replay(sweep)
        replays.append(one)
        found += of_run(one)
    for model, name in (("8b", "8B"), ("70b", "70B fp8")):
        rates = [one for one in replays if one.sweep.model == model and one.sweep.name.endswith("/s")]
        found.append(_knee(name, [one for one in rates if "short" not in one.sweep.name]))
    return found


def of_run(one: Replay) -> list[Check]:
    """Attained shares, and quantiles: TPOT's are bound as far as rho allows."""
    sweep = one.sweep
    group = f"recorded {sweep.name}, rho {sweep.rho:.2f}, {sweep.judged} requests"
    bound = 5.0 if sweep.rho <= 0.65 else 12.0 if sweep.rho <= 0.85 else None
    return compared(one, group, bound)


def compared(one: Replay, group: str, tpot_bound: float | None) -> list[Check]:
    """The worst share of ten scales, p50 and p95 of TPOT (bound: percent) and TTFT (none)."""
    shares = {f"{scale:g}": one.attained(scale) for scale in SCALES}
    worst = max((ours - real for real, ours in shares.values()), key=abs)
    told = {scale: [round(real, 2), round(ours, 2)] for scale, (real, ours) in shares.items()}
    found = [Check(group, "attainment, worst of ten scales", worst, POINTS, "pt", told)]
    for of_tpot, name, most in ((True, "TPOT", tpot_bound), (False, "TTFT", None)):
        for percent in (50.0, 95.0):
            real, ours = one.quantile(percent, of_tpot)
            told_s = {"recorded_s": round(real, 5), "simulated_s": round(ours, 5)}
            found.append(Check(group, f"{name} p{percent:.0f}", one.off(percent, of_tpot), most, "%", told_s))
    return found


def crossing(points: Sequence[tuple[float, float]]) -> float:
    """The rate at which the attained share falls to 95 %, on a line between neighbours; points: by rate."""
    for (rate, share), (later, lower) in itertools.pairwise(points):
        if share >= KNEE > lower:
            return rate + (later - rate) * (share - KNEE) / (share - lower)
    raise ValueError("the share does not fall to 95 % in these runs")


def _knee(name: str, rates: Sequence[Replay]) -> Check:
    rates = sorted(rates, key=lambda one: one.sweep.seen_per_s)
    at = [(one.sweep.seen_per_s, *one.attained(1.0)) for one in rates]
    real, ours = (crossing([(row[0], row[side]) for row in at]) for side in (1, 2))
    told = {"recorded_per_s": round(real, 3), "simulated_per_s": round(ours, 3)}
    return Check("the 95 % knee of the recorded rates", name, 100.0 * (ours / real - 1.0), KNEE_PERCENT, "%", told)


def cached(records: Sequence[Sweep]) -> list[Check]:
    """Two runs whose prompts were those of the run before, and still in the prefix cache."""
    runs = [one for one in records if one.name.startswith("earlier")]
    own, sent, places = plant(server("8b", 8192), 16), [], []
    for turn, sweep in enumerate(runs):
        for number, one in enumerate(sweep.requests):
            ids = tuple(range(number * 1024, number * 1024 + one.sent.prompt // 16))
            sent.append(Sent(100.0 * turn + one.sent.at_s, one.sent.prompt, one.sent.output, ids))
            places.append(turn)
    got = alone(own, sent)
    found = []
    for turn, sweep in enumerate(runs[1:], 1):
        mine = [each for each, place in zip(got, places, strict=True) if place == turn][-sweep.judged :]
        ended = [True] * len(mine)
        replayed = Replay(sweep, sweep.requests[-sweep.judged :], mine, ended)
        for of_tpot, name in ((False, "TTFT"), (True, "TPOT")):
            off = replayed.off(50.0, of_tpot)
            real, ours = replayed.quantile(50.0, of_tpot)
            told = {"recorded_s": round(real, 5), "simulated_s": round(ours, 5)}
            found.append(
                Check("prompts from the prefix cache", f"budget {sweep.budget}, {name} p50", off, None, "%", told)
            )
    return found
