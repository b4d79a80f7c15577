"""Lower bound: the fewest GPU-hours with which any policy serves a share of a trace's requests in time.

Problem: a schedule that a search found shows what is possible, not what is impossible. Idea: prices. Give each time t
and tier a price p(t) >= 0 of one replica-second of work. Let pi_r be the lowest price during the life of request r
(from its arrival until its last token is due), and w_r its least work. Then:

    cost  >=  sum of w_r pi_r over all requests but the m most expensive  -  the highest gain of a fleet at these prices

for every policy that misses at most m requests. Proof: all work of a request in time is done during its life, so
working replicas earn at least the sum. A replica's earnings less its cost are at most the best gain of any replica: it
costs from its order, is ready a start-up later, and earns at most p(t) per second from then on. This holds for any
prices. Ascent searches for good ones; without them the bound is only lower. With the price of 1 everywhere it is the
conservation of work; higher prices at peaks charge for start-ups, lower ones in valleys for the minimum fleet.

Least work of a request. Its tokens cost at least the coefficients of a cool or hot engine, whichever are lower, of the
fastest replica and of mean noise less four of its deviations. Its steps' `base` is shared with the batch, but a batch
is limited. Let s be steps, M_s the seconds that their decoding sequences cost, b the base, and each request's mean step
at most the target tau. Weighing each request's sum of step times by its cost of a token m_r gives sum M_s (b + M_s) <=
tau sum M_s, so that by Cauchy and Schwarz there are at least sum M_s / (tau - b) steps: (O-1) m_r / (tau - b) for each
request. In the same way slots give (O - 1) / max_num_seqs, and cached tokens (O - 1) (P + O/2) / kv_tokens. With prices
the steps are weighed by pi_r and the inequality holds. The largest of the three applies.

Not charged: blocks of a prompt that occurred before (they may be cached), everything after the load's end (runs cost
until there), drained replicas that still work beyond a tier's maximum (each start-up may leave one for the life of a
request), and local prefill where there may be no prefill replica.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from plimsoll.core.slo import Slo
from plimsoll.core.types import KV_BLOCK_TOKENS, Role
from plimsoll.sim.attempt import TraceRequest
from plimsoll.sim.engine.step_timing import MAX_HEAT
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies.base import Bounds
from plimsoll.sim.profile import StepCoefficients

Floats = NDArray[np.float64]
IndexArray = NDArray[np.int64]

_SLOTS: Final = 100
_MIN_SLOT_S: Final = 1.0
_ASCENT_ROUNDS: Final = 200
_NOISE: Final = 4.0 / 32.0  # deviations of the mean of the 1,024 steps that a replica's noise repeats
_SLACK: Final = 1e-9


@dataclass(frozen=True)
class BoundTier:
    """One tier. min_replicas, initial_replicas, max_replicas: replicas that always exist, that are ready at the start,
    and that can work at once. gpus: of a replica. work_s: least work of each request.
    """

    min_replicas: int
    initial_replicas: int
    max_replicas: int
    gpus: int
    work_s: Floats


class CostLowerBound:
    """Lower bound of one trace on one plant, for every policy that begins with these ready replicas.

    Cost counts over `length_s`. slots: largest number of time slots; more are slower to compute and give no tighter
    bound.
    """

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        plant: Plant,
        slo: Slo | None,
        bounds: Bounds,
        initial: Mapping[Role, int],
        length_s: float,
        slots: int = _SLOTS,
    ) -> None:
        self._slot_count = max(1, min(slots, int(length_s / _MIN_SLOT_S)))
        self._slot_s = length_s / self._slot_count
        self._startup_s = plant.startup.min_s
        arrivals_s = np.array([one.at_s for one in requests])
        deadlines_s = np.array([_deadline_s(slo, one) for one in requests])
        self._first_slot = np.minimum(self._slot_count, (arrivals_s / self._slot_s).astype(np.int64))
        self._last_slot = np.minimum(
            self._slot_count, np.minimum(deadlines_s / self._slot_s, self._slot_count).astype(np.int64)
        )
        life_s = min(length_s, float(np.max(deadlines_s - arrivals_s)))
        draining = math.ceil(life_s / self._startup_s) if self._startup_s > 0.0 else len(requests)
        min_work = _min_work(requests, plant, slo, bounds)
        self._infeasible = _infeasible_alone(requests, plant, slo, bounds)
        self._tiers = [
            BoundTier(least, max(least, initial[role]), most * (1 + draining), plant.gpus.get(role, 1), min_work[role])
            for role, (least, most) in bounds.items()
        ]
        self._price_solutions: list[
            tuple[Floats, float]
        ] = []  # sorted values of requests, and the fleet's gain, at good prices

    def gpu_hours(self, attainment: float) -> float:
        """Return a lower bound of GPU-hours for serving this share of all requests in time; infinite if infeasible."""
        missed = int((1.0 - attainment) * len(self._first_slot) + _SLACK)
        self._price_solutions.append(self._optimise_prices(missed))
        return max(self._bound_at(missed, values, gain) for values, gain in self._price_solutions)

    def attainment(self, gpu_hours: float) -> float:
        """Return an upper bound of attainment at this cost, by the prices found so far."""
        if not self._price_solutions:
            self.gpu_hours(1.0)
        low, high = 0, len(self._first_slot)
        while low < high:
            missed = (low + high) // 2
            if (
                max(self._bound_at(missed, values, gain) for values, gain in self._price_solutions)
                <= gpu_hours + _SLACK
            ):
                high = missed
            else:
                low = missed + 1
        return 1.0 - low / len(self._first_slot)

    def _bound_at(self, missed: int, values: Floats, gain: float) -> float:
        served_values = values[: len(values) - missed]
        return max(0.0, float(served_values.sum()) - gain) / 3600.0

    def _optimise_prices(self, missed: int) -> tuple[Floats, float]:
        """Return prices by subgradient ascent from 1 everywhere: higher where required work exceeds the replicas."""
        prices = [np.ones(self._slot_count) for _ in self._tiers]
        best: tuple[float, Floats, float] | None = None
        for iteration in range(_ASCENT_ROUNDS):
            values = np.where(self._infeasible, math.inf, 0.0)
            cheapest, gain, supplies = [], 0.0, []
            for tier, price in zip(self._tiers, prices, strict=True):
                least, cheapest_slot = _min_price(price, self._first_slot, self._last_slot)
                values += tier.gpus * tier.work_s * least
                cheapest.append(cheapest_slot)
                tier_gain, supply = self._fleet_gain(tier, price)
                gain += tier.gpus * tier_gain
                supplies.append(supply)
            order = np.argsort(values, kind="stable")
            bound = self._bound_at(missed, values[order], gain)
            if best is None or bound > best[0]:
                best = bound, values[order], gain
            if not math.isfinite(bound):
                break
            served = order[: len(order) - missed]
            for n, tier in enumerate(self._tiers):
                work_needed = np.bincount(cheapest[n][served], tier.work_s[served], self._slot_count + 1)[
                    : self._slot_count
                ]
                gradient = work_needed / self._slot_s - supplies[n]
                length = float(np.sqrt(np.mean(gradient**2)))
                if length > 0.0:
                    prices[n] = np.maximum(0.0, prices[n] + 0.5 / math.sqrt(iteration + 1.0) * gradient / length)
        assert best is not None
        return best[1], best[2]

    def _fleet_gain(self, tier: BoundTier, price: Floats) -> tuple[float, Floats]:
        """Return the highest gain of a tier's replicas, replica-seconds, and their number in each slot."""
        profit = (price - 1.0) * self._slot_s
        initial_gain, initial_present = _best_replica_path(profit, self._startup_s, self._slot_s, True)
        later_gain, later_present = _best_replica_path(profit, self._startup_s, self._slot_s, False)
        removable, addable = (
            tier.initial_replicas - tier.min_replicas,
            max(0, tier.max_replicas - tier.initial_replicas),
        )
        supply = tier.min_replicas + removable * initial_present + addable * later_present
        return tier.min_replicas * float(profit.sum()) + removable * initial_gain + addable * later_gain, supply


def _best_replica_path(profit: Floats, startup_s: float, slot_s: float, ready: bool) -> tuple[float, Floats]:
    """Return the highest gain of one replica, with a cost of `startup_s` per start, and the slots in which it exists.

    ready: whether it is ready at the beginning; else it is ready a start-up later at the earliest.
    """
    first_possible = int(startup_s / slot_s)
    off, on = 0.0, 0.0 if ready else -math.inf
    started, stayed = [], []
    for slot, slot_profit in enumerate(profit.tolist()):
        after_start = off - startup_s if slot >= first_possible else -math.inf
        stopped = on > off
        started.append(after_start > on)
        stayed.append(stopped)
        off, on = max(off, on), max(on, after_start) + slot_profit
    present = np.zeros(len(profit))
    is_on = on > off
    best = max(on, off)
    for slot in range(len(profit) - 1, -1, -1):
        present[slot] = is_on
        is_on = not started[slot] if is_on else stayed[slot]
    return best, present


def _min_price(price: Floats, first: IndexArray, last: IndexArray) -> tuple[Floats, IndexArray]:
    """Return the lowest price from slot `first` to `last` of each request, and its slot; after the
    last slot it is 0.
    """
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
    slots = np.empty(len(first), dtype=np.int64)
    for step, row in enumerate(table):
        rows_at_level = np.flatnonzero(level == step)
        left, right = row[first[rows_at_level]], row[last[rows_at_level] - (1 << step) + 1]
        slots[rows_at_level] = np.where(values[left] <= values[right], left, right)
    return values[slots], slots


def _deadline_s(slo: Slo | None, one: TraceRequest) -> float:
    """Return when the last token is due; infinite without a deadline."""
    if slo is None:
        return math.inf
    ttft_s, e2e_s, tpot_s = slo.deadlines(one.prompt_tokens)
    decode_s = (one.output_tokens - 1) * tpot_s if one.output_tokens > 1 else 0.0
    return min(one.at_s + e2e_s, one.at_s + ttft_s + decode_s)


def _infeasible_alone(
    requests: Sequence[TraceRequest], plant: Plant, slo: Slo | None, bounds: Bounds
) -> NDArray[np.bool_]:
    """Return whether even the fastest replica, alone with the request, misses its TPOT target."""
    prompt = np.array([one.prompt_tokens for one in requests], dtype=float)
    multi_token = np.array([one.output_tokens > 1 for one in requests])
    c = _fastest_coefficients(plant, next(role for role in bounds if role is not Role.PREFILL))
    tpot_s = math.inf if slo is None or slo.tpot_s is None else slo.tpot_s
    infeasible: NDArray[np.bool_] = multi_token & (min(c.base, c.base + c.anypre) + c.dec + c.ctx * prompt > tpot_s)
    return infeasible


def _min_work(requests: Sequence[TraceRequest], plant: Plant, slo: Slo | None, bounds: Bounds) -> Mapping[Role, Floats]:
    """Return the least work of each request in each tier, seconds of one replica."""
    prompt = np.array([one.prompt_tokens for one in requests], dtype=float)
    steps = np.array([one.output_tokens for one in requests], dtype=float) - 1.0
    uncached_tokens = prompt - np.array(_cached_prompt_tokens(requests, plant.hash_block_tokens), dtype=float)
    work_by_role: dict[Role, Floats] = {}
    for role, (least, _) in bounds.items():
        c = _fastest_coefficients(plant, role)
        work_by_role[role] = np.zeros(len(requests))
        if role is not Role.DECODE:
            prefill_work = uncached_tokens * (c.pretok + c.preattn * uncached_tokens / 2.0)
            step_s = c.anypre if role is Role.SERVE else c.base + c.anypre
            prefill_work += max(0.0, step_s) * uncached_tokens / plant.profile.budget
            if role is Role.PREFILL:
                prefill_work[prompt < KV_BLOCK_TOKENS] = 0.0
                prefill_work *= least > 0
            work_by_role[role] += prefill_work
        if role is not Role.PREFILL:
            work_by_role[role] += _min_decode_work(c, plant, slo, prompt, steps, any(one.block_ids for one in requests))
    return work_by_role


def _min_decode_work(
    c: StepCoefficients, plant: Plant, slo: Slo | None, prompt: Floats, steps: Floats, shared: bool
) -> Floats:
    """Return the least work of the steps after the first token. shared: whether prompts may share cached tokens."""
    context = prompt + (steps - 1.0) / 2.0
    tokens = steps * (c.dec + c.ctx * context)
    base = min(c.base, c.base + c.anypre)
    shares = [steps / plant.profile.max_num_seqs]
    if not shared:
        shares.append(steps * context / plant.profile.kv_tokens)
    if slo is not None and slo.tpot_s is not None:
        step_slack_s = slo.tpot_s - base
        if step_slack_s > 0.0:
            shares.append(steps * (c.dec + c.ctx * prompt) / step_slack_s)
    return tokens + base * max(shares, key=lambda one: float(one.sum()))


def _fastest_coefficients(plant: Plant, role: Role) -> StepCoefficients:
    """Return the coefficients of the fastest replica at its best."""
    profile = plant.profile_for(role).scaled((1.0 - plant.spread) * (1.0 - _NOISE * plant.noise))
    if profile.hot is None:
        return profile.coefficients
    hottest = profile.coefficients.interpolate(profile.hot, MAX_HEAT)
    names = ("base", "anypre", "pretok", "preattn", "dec", "ctx")
    return StepCoefficients(*(min(getattr(profile.coefficients, name), getattr(hottest, name)) for name in names))


def _cached_prompt_tokens(requests: Sequence[TraceRequest], hash_block_tokens: int) -> list[int]:
    """Return the tokens of each prompt that occurred in earlier ones."""
    known_blocks: set[int] = set()
    cached_tokens = []
    for one in requests:
        cached_blocks = sum(name in known_blocks for name in one.block_ids)
        known_blocks.update(one.block_ids)
        cached_tokens.append(min(one.prompt_tokens - 1, cached_blocks * hash_block_tokens))
    return cached_tokens
