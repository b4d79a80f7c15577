"""What no policy can do better: the least GPU-hours with which a share of a trace's requests is served in time.

Problem: a schedule that a search found says what can be done, not what cannot. Idea: prices. Give each moment t and
tier a price p(t) >= 0 of one replica-second of work. Then, with pi_r the least price while request r lives (from its
arrival until its last token is due), and w_r its least work:

    cost  >=  sum of w_r pi_r over all requests but the m dearest  -  the most that the fleet can gain at these prices

for whoever misses at most m requests. Proof: all work of a request in time is done while it lives, so replicas at work
earn at least the sum. What a replica earns less what it costs is at most the best gain of any replica: it costs from
its order, is ready a start-up later, and earns at most p(t) a second from then on. Whatever the prices, that holds;
good ones are looked for by ascent, and where they are not found the bound is only lower. With the price of 1 everywhere
it is the conservation of work; dearer peaks charge for start-ups, cheaper valleys for the least fleet.

Least work of a request. Its tokens cost at least the coefficients of a cool or hot engine, whichever are less, of the
fastest replica and of mean noise less four of its deviations. Its steps' `base` is shared with the batch, but a batch
is limited. Let s be steps, M_s the seconds that their decoding sequences cost, b the base, and each met request's mean
step at most the target tau. Weighing each request's sum of step times by its cost of a token m_r gives
sum M_s (b + M_s) <= tau sum M_s, so that by Cauchy and Schwarz there are at least sum M_s / (tau - b) steps: (O-1) m_r
/ (tau - b) for each request. In the same way slots give (O - 1) / max_num_seqs, and cached tokens (O - 1) (P + O/2) /
kv_tokens. With prices the steps are weighed by pi_r and the inequality stays. The largest of the three is taken.

What is free: blocks of a prompt that were asked before (they may be cached), everything after the load's end (runs are
paid until there), drained replicas that still work beyond a tier's most (each start-up may leave one for as long as a
request lives), and local reading of prompts where there may be no prefill replica.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from plimsoll.core.picking.choose import BLOCK_TOKENS
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.slo import Slo
from plimsoll.sim.pace import HOTTEST
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies.base import Bounds
from plimsoll.sim.profile import Coefficients
from plimsoll.sim.visit import Asked
from plimsoll.sim.work import ttft_target_s

Floats = NDArray[np.float64]
Places = NDArray[np.int64]

_SLOTS: Final = 100
_LEAST_SLOT_S: Final = 1.0
_ROUNDS: Final = 200
_NOISE: Final = 4.0 / 32.0  # deviations of the mean of the 1,024 steps that a replica's noise repeats
_SLACK: Final = 1e-9


@dataclass(frozen=True)
class Tier:
    """One tier's prices' surroundings. least, initial, most: replicas always there, ready at the start, and at work at
    once. gpus: of each. work_s: least work of each request."""

    least: int
    initial: int
    most: int
    gpus: int
    work_s: Floats


class Bound:
    """Of one trace on one plant, for every policy that begins with these ready replicas.

    Cost counts over `length_s`. slots: of time, at most so many; more are dearer and give no lower bound.
    """

    def __init__(
        self,
        asked: Sequence[Asked],
        plant: Plant,
        slo: Slo | None,
        bounds: Bounds,
        initial: Mapping[Role, int],
        length_s: float,
        slots: int = _SLOTS,
    ) -> None:
        self._count = max(1, min(slots, int(length_s / _LEAST_SLOT_S)))
        self._slot_s = length_s / self._count
        self._start_s = plant.start.shortest_s
        born = np.array([one.at_s for one in asked])
        due = np.array([_due_s(slo, one) for one in asked])
        self._first = np.minimum(self._count, (born / self._slot_s).astype(np.int64))
        self._last = np.minimum(self._count, np.minimum(due / self._slot_s, self._count).astype(np.int64))
        life_s = min(length_s, float(np.max(due - born)))
        drained = math.ceil(life_s / self._start_s) if self._start_s > 0.0 else len(asked)
        works = _works(asked, plant, slo, bounds)
        self._never = _never(asked, plant, slo, bounds)
        self._tiers = [
            Tier(least, max(least, initial[role]), most * (1 + drained), plant.gpus.get(role, 1), works[role])
            for role, (least, most) in bounds.items()
        ]
        self._found: list[tuple[Floats, float]] = []  # sorted values of requests, and the fleet's gain, at good prices

    def gpu_hours(self, attainment: float) -> float:
        """At least, where so large a share of all requests is served in time; inf: it cannot be."""
        missed = int((1.0 - attainment) * len(self._first) + _SLACK)
        self._found.append(self._ascend(missed))
        return max(self._at(missed, values, gain) for values, gain in self._found)

    def attainment(self, gpu_hours: float) -> float:
        """At most, at this cost: by the prices that were looked for so far."""
        if not self._found:
            self.gpu_hours(1.0)
        low, high = 0, len(self._first)
        while low < high:
            missed = (low + high) // 2
            if max(self._at(missed, values, gain) for values, gain in self._found) <= gpu_hours + _SLACK:
                high = missed
            else:
                low = missed + 1
        return 1.0 - low / len(self._first)

    def _at(self, missed: int, values: Floats, gain: float) -> float:
        kept = values[: len(values) - missed]
        return max(0.0, float(kept.sum()) - gain) / 3600.0

    def _ascend(self, missed: int) -> tuple[Floats, float]:
        """Prices by subgradient ascent from 1 everywhere: dearer where work that must be done exceeds what is there."""
        prices = [np.ones(self._count) for _ in self._tiers]
        best: tuple[float, Floats, float] | None = None
        for turn in range(_ROUNDS):
            values = np.where(self._never, math.inf, 0.0)
            cheapest, gain, supplies = [], 0.0, []
            for tier, price in zip(self._tiers, prices, strict=True):
                least, place = _cheapest(price, self._first, self._last)
                values += tier.gpus * tier.work_s * least
                cheapest.append(place)
                gained, supply = self._gain(tier, price)
                gain += tier.gpus * gained
                supplies.append(supply)
            order = np.argsort(values, kind="stable")
            bound = self._at(missed, values[order], gain)
            if best is None or bound > best[0]:
                best = bound, values[order], gain
            if not math.isfinite(bound):
                break
            kept = order[: len(order) - missed]
            for n, tier in enumerate(self._tiers):
                need = np.bincount(cheapest[n][kept], tier.work_s[kept], self._count + 1)[: self._count]
                uphill = need / self._slot_s - supplies[n]
                length = float(np.sqrt(np.mean(uphill**2)))
                if length > 0.0:
                    prices[n] = np.maximum(0.0, prices[n] + 0.5 / math.sqrt(turn + 1.0) * uphill / length)
        assert best is not None
        return best[1], best[2]

    def _gain(self, tier: Tier, price: Floats) -> tuple[float, Floats]:
        """The most that a tier's replicas can gain, replica-seconds, and how many are then there in each slot."""
        profit = (price - 1.0) * self._slot_s
        initial, stays = _best_path(profit, self._start_s, self._slot_s, True)
        later, comes = _best_path(profit, self._start_s, self._slot_s, False)
        kept, more = tier.initial - tier.least, max(0, tier.most - tier.initial)
        supply = tier.least + kept * stays + more * comes
        return tier.least * float(profit.sum()) + kept * initial + more * later, supply


def _best_path(profit: Floats, start_s: float, slot_s: float, ready: bool) -> tuple[float, Floats]:
    """The most one replica gains in being there or not, each start costing `start_s`, and when it is there then.

    ready: whether it is at the beginning; else it is a start-up later at the soonest.
    """
    soonest = int(start_s / slot_s)
    off, on = 0.0, 0.0 if ready else -math.inf
    began, stayed = [], []
    for slot, gained in enumerate(profit.tolist()):
        fresh = off - start_s if slot >= soonest else -math.inf
        stopped = on > off
        began.append(fresh > on)
        stayed.append(stopped)
        off, on = max(off, on), max(on, fresh) + gained
    there = np.zeros(len(profit))
    is_on = on > off
    best = max(on, off)
    for slot in range(len(profit) - 1, -1, -1):
        there[slot] = is_on
        is_on = not began[slot] if is_on else stayed[slot]
    return best, there


def _cheapest(price: Floats, first: Places, last: Places) -> tuple[Floats, Places]:
    """The least price from slot `first` to `last` of each request, and where; after the last slot all is free."""
    values = np.append(price, 0.0)
    places = np.arange(len(values))
    table = [places]
    width = 1
    while 2 * width <= len(values):
        before = table[-1]
        left, right = before[: len(before) - width], before[width:]
        table.append(np.where(values[left] <= values[right], left, right))
        width *= 2
    level = np.frexp(last - first + 1)[1] - 1
    found = np.empty(len(first), dtype=np.int64)
    for step, row in enumerate(table):
        of = np.flatnonzero(level == step)
        left, right = row[first[of]], row[last[of] - (1 << step) + 1]
        found[of] = np.where(values[left] <= values[right], left, right)
    return values[found], found


def _due_s(slo: Slo | None, one: Asked) -> float:
    """When its last token is due; inf: never."""
    ttft_s = None if slo is None else ttft_target_s(slo, one.prompt_tokens)
    tpot_s = None if slo is None else slo.tpot_s
    due_s = math.inf if slo is None or slo.e2e_s is None else one.at_s + slo.e2e_s
    if ttft_s is None or (tpot_s is None and one.output_tokens > 1):
        return due_s
    return min(due_s, one.at_s + ttft_s + (one.output_tokens - 1) * (tpot_s or 0.0))


def _never(asked: Sequence[Asked], plant: Plant, slo: Slo | None, bounds: Bounds) -> NDArray[np.bool_]:
    """Whether not even the fastest replica, for it alone, takes the time that is promised for each token."""
    prompt = np.array([one.prompt_tokens for one in asked], dtype=float)
    several = np.array([one.output_tokens > 1 for one in asked])
    c = _least(plant, next(role for role in bounds if role is not Role.PREFILL))
    tpot_s = math.inf if slo is None or slo.tpot_s is None else slo.tpot_s
    found: NDArray[np.bool_] = several & (min(c.base, c.base + c.anypre) + c.dec + c.ctx * prompt > tpot_s)
    return found


def _works(asked: Sequence[Asked], plant: Plant, slo: Slo | None, bounds: Bounds) -> Mapping[Role, Floats]:
    """Least work of each request in each tier, seconds of one replica."""
    prompt = np.array([one.prompt_tokens for one in asked], dtype=float)
    steps = np.array([one.output_tokens for one in asked], dtype=float) - 1.0
    fresh = prompt - np.array(_cached(asked, plant.chunk), dtype=float)
    found: dict[Role, Floats] = {}
    for role, (least, _) in bounds.items():
        c = _least(plant, role)
        found[role] = np.zeros(len(asked))
        if role is not Role.DECODE:
            reads = fresh * (c.pretok + c.preattn * fresh / 2.0)
            step_s = c.anypre if role is Role.SERVE else c.base + c.anypre
            reads += max(0.0, step_s) * fresh / plant.profile.budget
            if role is Role.PREFILL:
                reads[prompt < BLOCK_TOKENS] = 0.0
                reads *= least > 0
            found[role] += reads
        if role is not Role.PREFILL:
            found[role] += _written(c, plant, slo, prompt, steps, any(one.ids for one in asked))
    return found


def _written(c: Coefficients, plant: Plant, slo: Slo | None, prompt: Floats, steps: Floats, shared: bool) -> Floats:
    """Least work of the steps after the first token. shared: whether prompts may share cached tokens."""
    context = prompt + (steps - 1.0) / 2.0
    tokens = steps * (c.dec + c.ctx * context)
    base = min(c.base, c.base + c.anypre)
    shares = [steps / plant.profile.max_num_seqs]
    if not shared:
        shares.append(steps * context / plant.profile.kv_tokens)
    if slo is not None and slo.tpot_s is not None:
        room = slo.tpot_s - base
        if room > 0.0:
            shares.append(steps * (c.dec + c.ctx * prompt) / room)
    return tokens + base * max(shares, key=lambda one: float(one.sum()))


def _least(plant: Plant, role: Role) -> Coefficients:
    """Of the fastest replica at its best."""
    own = plant.of_role(role).scaled((1.0 - plant.spread) * (1.0 - _NOISE * plant.noise))
    if own.hot is None:
        return own.coefficients
    hottest = own.coefficients.towards(own.hot, HOTTEST)
    names = ("base", "anypre", "pretok", "preattn", "dec", "ctx")
    return Coefficients(*(min(getattr(own.coefficients, name), getattr(hottest, name)) for name in names))


def _cached(asked: Sequence[Asked], chunk: int) -> list[int]:
    """Tokens of each prompt that were asked before."""
    seen: set[int] = set()
    found = []
    for one in asked:
        known = sum(name in seen for name in one.ids)
        seen.update(one.ids)
        found.append(min(one.prompt_tokens - 1, known * chunk))
    return found
