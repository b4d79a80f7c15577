"""Aggregated or disaggregated: the tiers of either, their sizes for a rate, and whether moving KV pays at all.

Problem: engines that only decode write evenly, but prompts then queue for fewer GPUs, their KV has to travel, and two
tiers round up twice. On two H200s one prefill and one decode engine never beat two aggregated ones on a TTFT and TPOT
target down to 200 and 15 ms; they won where TPOT had to stay below what aggregated engines reach.

Idea: no rule of thumb. Both are sized for the same rate by the same law, the pair with what its hand-over takes of the
TTFT, and GPUs are counted. The pair must save a clear part of them, since it has more that can go wrong; and a fabric
over which a prompt token takes longer than computing it ends the question.

A running fleet leaves out of its share who misses alone on an idle replica, since no size helps them. A plan is asked
whether users will get what is promised, so here they count as missed: where they are more than may miss, no fleet is
the answer.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from plimsoll.core.forecast import Unknown
from plimsoll.core.gaps import LIGHT_LOAD
from plimsoll.core.goodput import knee_rate
from plimsoll.core.knee import HTTP_S, HTTP_TOKEN_S, Constraint, Profile, Tier, alone_s, attainment, pace, profile
from plimsoll.core.load_line import constraint, slo_rate
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.planning.machine import Machine
from plimsoll.core.sizing import MAX_REPLICAS, Infeasible, Sizing, infeasible, size
from plimsoll.core.slo import Slo
from plimsoll.core.transfer import Moved, Verdict, computing_s, judge
from plimsoll.core.workload import FloatArray, Workload

MARGIN: Final = 0.9  # of the aggregated engines' GPUs: a pair must do with fewer than that
NVLINK_BYTES_PER_S: Final = 100e9  # between two H200s of one host, blocks of 128 tokens, measured; no pod has it
RDMA_BYTES_PER_S: Final = 50e9  # a device of 400 Gb/s
_HALVINGS: Final = 20
_LOOSER: Final = 1.05  # steps in which targets are loosened in search of a promise that is kept
_MOST_STEPS: Final = 120
_LATENCY_S: Final = 1.9e-3  # of a transfer, beside its bytes and its posting
_STEPS: Final = (
    2.5  # of the decode engine: the rest of one before reads are posted, one to notice their end, one to decode
)


@dataclass(frozen=True, eq=False)
class Arrangement:
    """One serve tier, or a prefill tier and a decode tier, sized for a rate. Parallel tuples."""

    tiers: tuple[Tier, ...]
    machines: tuple[Machine, ...]
    sizings: tuple[Sizing, ...]  # their shares are of all requests
    load_line_per_s: float  # up to which the promise is kept with everybody let in
    too_long: float = 0.0  # share of the requests that the engine refuses for their length

    @property
    def disaggregated(self) -> bool:
        return len(self.tiers) > 1

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(one.replicas for one in self.sizings)

    @property
    def gpus(self) -> int:
        return sum(s.replicas * m.gpus for s, m in zip(self.sizings, self.machines, strict=True))

    @property
    def binding(self) -> Constraint:
        """What the tier with the lowest load line runs into."""
        return min(self.sizings, key=lambda one: one.slo_rate_per_s).constraint

    @property
    def knee_per_s(self) -> float:
        """The rate of most goodput without a gate."""
        pairs = zip(self.tiers, self.replicas, strict=True)
        return min(float(knee_rate(profile(tier), count)[0]) for tier, count in pairs)


@dataclass(frozen=True)
class Unkept(Infeasible):
    """alone: share of the requests that miss alone on an idle replica."""

    alone: float = 0.0


def aggregated(machine: Machine, workload: Workload, slo: Slo, gap_cv2: float = 1.0) -> Tier:
    """Engines that prefill and decode."""
    model = machine.serving(workload, slo.tpot_s or math.inf)
    return Tier(Role.SERVE, model, workload, machine.limits, slo, arrival_cv2=gap_cv2)


def pair(
    prefill: Machine, decode: Machine, workload: Workload, slo: Slo, bytes_per_s: float, gap_cv2: float = 1.0
) -> tuple[Tier, Tier]:
    """A prefill tier before a decode tier, each with what a mean request spends of its TTFT in the other.

    Raises ValueError where slo has no TTFT target, without which a prefill tier has none.
    """
    handover = workload.mean(handover_s(decode, workload, bytes_per_s))
    model = decode.decoding(workload, slo.tpot_s or math.inf)
    first = Tier(
        Role.PREFILL, prefill.prefilling, workload, prefill.limits, slo, arrival_cv2=gap_cv2, elsewhere_s=handover
    )
    alone = workload.mean(alone_s(replace(first, elsewhere_s=0.0)))
    last = Tier(
        Role.DECODE, model, workload, decode.limits, slo,
        transfer=decode.transfer, arrival_cv2=gap_cv2, elsewhere_s=alone + handover - 1.5 * model.base_s,
    )  # fmt: skip
    return first, last


def handover_s(decode: Machine, workload: Workload, bytes_per_s: float) -> FloatArray:
    """From the end of the prefill leg to the first token of each row, on an idle decode engine, s.

    HTTP, 2.5 steps, posting, and the bytes. Against one request at a time on two H200s of one host (128 to 8,192
    tokens, blocks of 128): 2 to 9 ms too long.
    """
    step = decode.cool.base_s * decode.transfer.step_factor
    http = HTTP_S + HTTP_TOKEN_S * workload.prompt_tokens
    return http + _STEPS * step + _moving_s(decode, workload, bytes_per_s)


def _moving_s(decode: Machine, workload: Workload, bytes_per_s: float) -> FloatArray:
    bytes_moved = workload.uncached_tokens * decode.kv_bytes_per_token
    return decode.transfer.post_s(workload.uncached_tokens) + _LATENCY_S + bytes_moved / bytes_per_s


def pays(decode: Machine, workload: Workload, bytes_per_s: float) -> Verdict | Unknown:
    """Whether moving a prompt's KV takes less than computing it where it is decoded; Unknown without a prompt token.

    The verdict that the operator reads off the engines' counters, here for what is planned.
    """
    computing = computing_s(decode.hot, workload, decode.limits.token_budget)
    if isinstance(computing, Unknown):
        return computing
    many = 1e6 / workload.mean(workload.uncached_tokens)  # requests, enough for a verdict
    posting_s = workload.mean(decode.transfer.post_s(workload.uncached_tokens))
    moved = Moved(1e6, many * workload.mean(_moving_s(decode, workload, bytes_per_s)), many * posting_s)
    return judge(moved, computing)


def arrange(
    tiers: tuple[Tier, ...],
    machines: tuple[Machine, ...],
    rate_per_s: float,
    headroom: float = 0.0,
    too_long: float = 0.0,
) -> Arrangement | Unkept:
    """The fewest replicas that keep the promise with everybody let in, all tiers together.

    too_long: share of the requests that the engine refuses for their length; the tiers' workload is of the others.

    Sizing counts on a gate that refuses who would be late, and looks at one tier. So from its answer on, the tier that
    gains most by it gets one replica more until the product of the shares is enough: a gate is then a reserve, and what
    users should expect is within the promise. Tiers' misses are taken as independent.
    """
    need = rate_per_s / (1 - headroom)
    reduced = [of_all(profile(tier), 0.0 if number else too_long) for number, tier in enumerate(tiers)]
    alone = 1 - math.prod(1 - _alone(one) for one in reduced)
    counts: list[int] = []
    for tier in tiers:
        found = size(tier, rate_per_s, headroom)
        if isinstance(found, Infeasible):
            return Unkept(found.constraint, found.feasible, found.remedy, alone)
        counts.append(found.replicas)
    best = [_open(one.calm, 0.0, 1) for one in reduced]  # that arrivals bunch is no reason: see `sizing.infeasible`
    if math.prod(best) < tiers[0].slo.share:  # not even idle replicas
        worst = best.index(min(best))
        return Unkept(constraint(reduced[worst], 0.0, 1)[0], None, alone=alone)
    many = [MAX_REPLICAS] * len(tiers)
    kept = _each(reduced, need, many)
    if math.prod(kept) < tiers[0].slo.share:
        worst = kept.index(min(kept))
        return Unkept(constraint(reduced[worst], need, MAX_REPLICAS)[0], None, alone=alone)

    def share_with(others: Sequence[int], at: int, count: int) -> float:
        return math.prod(_each(reduced, need, [*others[:at], count, *others[at + 1 :]]))

    for at, least in enumerate(tuple(counts)):  # no fewer would do if the other tier were as large as can be
        tried = range(least, MAX_REPLICAS)
        counts[at] += bisect_left(tried, tiers[0].slo.share, key=partial(share_with, many, at))
    while math.prod(_each(reduced, need, counts)) < tiers[0].slo.share:
        open_ = [at for at, count in enumerate(counts) if count < MAX_REPLICAS]
        counts[max(open_, key=lambda at: share_with(counts, at, counts[at] + 1))] += 1
    pairs = list(zip(reduced, counts, strict=True))
    sizings = tuple(_sizing(one, rate_per_s, count) for one, count in pairs)
    return Arrangement(tiers, machines, sizings, _line(pairs, tiers[0].slo.share), too_long)


def of_all(reduced: Profile, too_long: float = 0.0) -> Profile:
    """The same tier with its shares of all requests: who misses alone, or is too long, is in a class never in time."""
    served = (1 - too_long) * reduced.weights
    never, none = too_long + served[:, -1:], np.zeros((len(reduced), 1))
    return replace(
        reduced,
        slack_s=np.hstack((np.full_like(never, -math.inf), reduced.slack_s)),
        weights=np.hstack((never, served[:, :-1], none)),
    )


def _alone(every: Profile) -> float:
    """Share of all requests that misses alone on an idle replica."""
    return float(every.weights[0, 0]) if every.feasible[0] > 0 else 1.0


def nearest(build: Callable[[Slo], Tier], slo: Slo, too_long: float = 0.0) -> Slo | None:
    """The promise nearest to `slo` that a replica at a light load keeps for its share of all requests.

    build: the tier for a promise. From the nearest that sizing knows, the target that most requests miss is loosened
    step by step. None where no target helps.
    """
    for _ in range(_MOST_STEPS):
        tier = build(slo)
        broken = infeasible(tier)
        if broken is not None:
            if broken.feasible is None:
                return None
            slo = broken.feasible
            continue
        every = of_all(profile(tier), too_long)
        light = every.full_rate_per_s(1, admission=False) * LIGHT_LOAD
        seen = attainment(every, light, 1, admission=False)
        if seen.attained[0] >= slo.share:
            return slo
        paced = seen.tpot[0] - seen.attained[0] < 1 - seen.tpot[0]
        if slo.ttft_s is not None and not paced:
            slo = replace(slo, ttft_s=slo.ttft_s * _LOOSER)
        elif slo.e2e_s is not None and (slo.tpot_s is None or pace(tier)[1] is Constraint.E2E):
            slo = replace(slo, e2e_s=slo.e2e_s * _LOOSER)
        elif slo.tpot_s is not None:
            slo = replace(slo, tpot_s=slo.tpot_s * _LOOSER)
    return None


def _each(reduced: Sequence[Profile], rate_per_s: float, replicas: Sequence[int]) -> list[float]:
    return [_open(one, rate_per_s, count) for one, count in zip(reduced, replicas, strict=True)]


def _open(reduced: Profile, rate_per_s: float, replicas: int) -> float:
    """Share of the requests in promise with everybody let in; 0 where a queue never ends."""
    if replicas < 1 or rate_per_s >= reduced.full_rate_per_s(replicas, admission=False)[0]:
        return 0.0
    return float(attainment(reduced, rate_per_s, replicas, admission=False).attained[0])


def _sizing(reduced: Profile, rate_per_s: float, replicas: int) -> Sizing:
    line = slo_rate(reduced, replicas, admission=False)
    return Sizing(
        replicas,
        constraint(reduced, line, replicas)[0],
        float(reduced.rho(rate_per_s, replicas)[0]),
        float(line[0]),
        _open(reduced, rate_per_s, replicas),
        _open(reduced, rate_per_s, replicas - 1),
        _alone(reduced),
    )


def _line(pairs: list[tuple[Profile, int]], share: float) -> float:
    """The highest rate at which the tiers together keep the share."""
    low, high = 0.0, min(float(slo_rate(one, count, admission=False)[0]) for one, count in pairs)
    if len(pairs) == 1:
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if math.prod(_open(one, middle, count) for one, count in pairs) >= share:
            low = middle
        else:
            high = middle
    return low


def choose(together: Arrangement | Infeasible, apart: Arrangement | Infeasible) -> Arrangement | None:
    """The pair where it alone is feasible or saves a clear part of the GPUs, else the aggregated engines, if any."""
    if isinstance(apart, Infeasible):
        return None if isinstance(together, Infeasible) else together
    if isinstance(together, Infeasible) or apart.gpus < MARGIN * together.gpus:
        return apart
    return together
