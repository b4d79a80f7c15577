"""The cases of others, and what the plan's law says of each.

DistServe: real runs of OPT-13B on A100, with its own fitted coefficients. AIConfigurator: its packaged answers.
Recorded: prefill and decode engines beside aggregated ones on two H200s. Where figures come from stands in their files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.trust.table2 import KV_TOKENS, READING
from plimsoll.cli.plan import measured
from plimsoll.core.knee import Tier, profile
from plimsoll.core.latency import EngineLimits, KvTransfer, StepModel
from plimsoll.core.load_line import slo_rate
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.planning import mix, shapes
from plimsoll.core.planning.arrange import NVLINK_BYTES_PER_S, aggregated, pair
from plimsoll.core.planning.expect import Expected, expected, kept
from plimsoll.core.planning.machine import Machine, of_shape
from plimsoll.core.planning.plan import NoPlan, Plan, Question, plan
from plimsoll.core.roofline import ACCELERATORS
from plimsoll.core.slo import Slo
from plimsoll.core.workload import Workload, from_samples
from plimsoll.sim import profile as profiles

DATA = Path(__file__).parent / "data"
SYSTEMS = {"h200_sxm": "H200", "h100_sxm": "H100-SXM"}
EVEN = 0.03  # shares nearer than this are called even
SIGMAS = {"chat": (0.6, 0.5), "prefill": (0.4, 0.45)}  # of the recorded runs' lengths


def load(name: str) -> Any:
    """A file of `data`."""
    return json.loads((DATA / name).read_text())


# ---------------------------------------------------------------- DistServe


@dataclass(frozen=True)
class Ran:
    """A real run, and the law's answer for it. kept: share of requests within both targets."""

    engine: str
    rate_per_s: float
    gpus: int
    kept_real: float
    kept_law: float
    real_ms: tuple[float, float]  # p50 TTFT and TPOT
    law: Expected


def opt_tiers(data: Any, engine: str, slo: Slo) -> tuple[Tier, ...]:
    """OPT-13B as DistServe's profile has it, adjusted for engines of that time.

    vLLM of 2023 gave a prefill a step to itself and began it at once. The law is of today's engine, whose prefill rides
    in the second next step: 2.5 decode steps later, by which vLLM's TTFT target is longer here. DistServe's first token
    comes from the prefill engine, and waiting for the decode engine counts in TPOT: it may take what the steps leave of
    it. That engine's batch is bounded as by a gate (`_opt_kept`).
    """
    workload = lengths(data)
    limits = EngineLimits(256, KV_TOKENS, READING[engine])
    assert slo.ttft_s is not None
    assert slo.tpot_s is not None
    if engine == "vllm":
        own = _steps(data["coefficients"]["vllm 1"], data["coefficients"]["vllm 1"])
        return (Tier(Role.SERVE, own, workload, limits, replace(slo, ttft_s=slo.ttft_s + 2.5 * own.base_s)),)
    first, last = data["coefficients"]["distserve 2"], data["coefficients"]["distserve 1"]
    a = first["prefill"][0] * 1e-3
    prefill = replace(_steps(first, first), base_s=a, any_prefill_s=0.0)
    decode = _steps(last, last)
    free = KvTransfer(40, 16, post_fixed_s=0.0, post_piece_s=0.0, step_factor=1.0)
    tokens = workload.mean(workload.output_tokens)
    held = KV_TOKENS * decode.cached_token_s + decode.base_s  # a step with the cache full
    waits = replace(slo, ttft_s=max(0.0, slo.tpot_s - held) * tokens)
    return (
        Tier(Role.PREFILL, prefill, workload, limits, slo),
        Tier(Role.DECODE, decode, workload, limits, waits, transfer=free),
    )


def _opt_kept(tiers: tuple[Tier, ...], rate: float) -> float:
    """The cache bounds the decode engine's batch, and so its steps, as a gate would; nobody else is refused."""
    share = kept(tiers[:1], rate, (1,))
    return share * kept(tiers[1:], rate, (1,), admission=True) if tiers[1:] else share


def lengths(data: Any) -> Workload:
    """The prompts and outputs of the published runs."""
    prompts, outputs = zip(*data["lengths"], strict=True)
    return from_samples(prompts, [0.0] * len(prompts), outputs)


def _steps(prefill: Any, decode: Any) -> StepModel:
    """ms = a + b sum L + c sum L^2 for prefill, a + b context + c batch for decoding."""
    a, b, c = (value * 1e-3 for value in prefill["prefill"])
    base, context, sequence = (value * 1e-3 for value in decode["decoding_smallbs"])
    return StepModel(base, a, b, 2 * c, sequence, context)


def distserve() -> Iterator[Ran]:
    """All 14 runs, at targets of 200 ms and 100 ms."""
    data = load("distserve.json")
    slo = Slo(0.9, 0.2, 0.0, 0.1)
    for run in data["runs"]:
        tiers = opt_tiers(data, run["engine"], slo)
        replicas = (1,) * len(tiers)
        rate = run["rate_per_s"]
        yield Ran(
            run["engine"],
            rate,
            run["gpus"],
            run["kept_200_100"],
            _opt_kept(tiers, rate),
            (run["p50_ttft_ms"], run["p50_tpot_ms"]),
            expected(tiers, rate, replicas),
        )


def searched() -> tuple[float, float, float]:
    """Requests a second and GPU that DistServe's simulator found for prefill on two GPUs and decode on one, what the
    law has for the same (90 % of requests in each target, those feasible alone), and for vLLM on one GPU."""
    data = load("distserve.json")
    slo = Slo(0.9, 0.2, 0.0, 0.1)
    apart = min(float(slo_rate(profile(tier), 1, admission=False)[0]) for tier in opt_tiers(data, "distserve", slo))
    together = float(slo_rate(profile(opt_tiers(data, "vllm", slo)[0]), 1, admission=False)[0])
    return data["searched"]["rate_per_gpu"], apart / 3, together


# ---------------------------------------------------------------- AIConfigurator


@dataclass(frozen=True)
class Answered:
    """Requests a second and GPU: theirs and the law's, by the roofline, aggregated and apart; None where it has none.

    even: lengths all equal, half of the requests in target, as they count; spread: lognormal lengths and 95 %.
    """

    case: Any
    theirs: tuple[float | None, float | None]
    even: tuple[float | None, float | None]
    spread: tuple[float | None, float | None]


def aiconfigurator() -> Iterator[Answered]:
    """Each case, on up to 8 GPUs."""
    for case in load("aiconfigurator.json"):
        theirs = tuple(None if case[name] is None else case[name]["seq/s/gpu"] for name in ("agg", "disagg"))
        targets = case["ttft_ms"] / 1e3, 0.0, case["tpot_ms"] / 1e3
        even = mix.lognormal(case["prompt"], case["output"], 0.0, 0.0)
        spread = mix.lognormal(case["prompt"], case["output"])
        yield Answered(
            case,
            (theirs[0], theirs[1]),
            per_gpu(case, even, Slo(0.5, *targets)),
            per_gpu(case, spread, Slo(0.95, *targets)),
        )


def machines(case: Any, token_budget: int = 8192) -> list[Machine]:
    """The roofline's replicas for a case."""
    shape, gpu = shapes.find(case["model"]), ACCELERATORS[SYSTEMS[case["system"]]]
    found = (of_shape(shape, gpu, gpus, token_budget) for gpus in (1, 2, 4, 8) if shape.heads % gpus == 0)
    return [one for one in found if one is not None]


def per_gpu(case: Any, workload: Workload, slo: Slo) -> tuple[float | None, float | None]:
    """The best load line for each GPU, aggregated and apart. Pairs are mixed as their load lines ask for, in up to
    8 GPUs."""
    each = machines(case)
    together = [float(slo_rate(profile(aggregated(m, workload, slo)), 1, admission=False)[0]) / m.gpus for m in each]
    apart = [0.0]
    for first in each:
        for last in each:
            if first.gpus <= last.gpus:
                apart.append(_mixed(first, last, workload, slo))
    return max(together) or None, max(apart) or None


def _mixed(first: Machine, last: Machine, workload: Workload, slo: Slo, most: int = 8) -> float:
    tiers = pair(first, last, workload, slo, NVLINK_BYTES_PER_S)
    best = 0.0
    reduced = [profile(tier) for tier in tiers]
    for p in range(1, most // first.gpus + 1):
        for d in range(1, (most - p * first.gpus) // last.gpus + 1):
            line = min(
                float(slo_rate(reduced[0], p, admission=False)[0]), float(slo_rate(reduced[1], d, admission=False)[0])
            )
            best = max(best, line / (p * first.gpus + d * last.gpus))
    return best


# ---------------------------------------------------------------- recorded


@dataclass(frozen=True)
class Recorded:
    """One mix and rate on two H200s with one pair of targets (ms): shares kept, measured and by the law."""

    mix: str
    rate_per_s: float
    block_tokens: int
    targets_ms: tuple[float, float]
    real: tuple[float, float]  # two aggregated engines, one and one
    law: tuple[float, float]

    @property
    def winners(self) -> tuple[str, str]:
        """Measured and by the law."""
        return _winner(*self.real), _winner(*self.law)


def _winner(together: float, apart: float) -> str:
    if abs(together - apart) < EVEN:
        return "even"
    return "aggregated" if together > apart else "apart"


def h200() -> Machine:
    """One of the two cards, at the chunk budget of the runs."""
    return next(one for one in measured(profiles.load("h200-8b"), 1) if one.limits.token_budget == 8192)


def recorded() -> Iterator[Recorded]:
    """Every pair of runs at one rate, at each pair of targets that the runs tell apart."""
    rows = load("h200_pairs.json")["rows"]
    for row in rows:
        if row["engines"] == "agg":
            continue
        [other] = [one for one in rows if one["engines"] == "agg" and _same(one, row)]
        block = 128 if row["engines"] == "pd128" else 16
        for name, share in row["kept"].items():
            if "/" not in name:
                continue
            ttft, tpot = (float(part) for part in name.split("/"))
            tiers = recorded_tiers(row, Slo(0.95, ttft / 1e3, 0.0, tpot / 1e3), block)
            law = tuple(kept(one, row["seen_per_s"], n) for one, n in zip(tiers, ((2,), (1, 1)), strict=True))
            yield Recorded(
                row["mix"], row["rate_per_s"], block, (ttft, tpot), (other["kept"][name], share), (law[0], law[1])
            )


def _same(one: Any, other: Any) -> bool:
    return (one["mix"], one["rate_per_s"]) == (other["mix"], other["rate_per_s"])


def recorded_tiers(row: Any, slo: Slo, block: int) -> tuple[tuple[Tier, ...], tuple[Tier, ...]]:
    """Two aggregated engines, and a pair, for a run's lengths."""
    workload = mix.lognormal(row["prompt_tokens"], row["output_tokens"], *SIGMAS[row["mix"]])
    machine = h200()
    machine = replace(machine, transfer=replace(machine.transfer, block_tokens=block))
    return (aggregated(machine, workload, slo),), pair(machine, machine, workload, slo, NVLINK_BYTES_PER_S)


def planned(row: Any, slo: Slo) -> Plan | NoPlan:
    """What `plimsoll plan --hardware h200-8b` answers for a recorded run."""
    workload = mix.lognormal(row["prompt_tokens"], row["output_tokens"], *SIGMAS[row["mix"]])
    return plan(Question(workload, slo, row["seen_per_s"], [measured(profiles.load("h200-8b"), 1)]))
