"""How many replicas a rate needs, or why no number of them will do.

Problem: the answer must be the smallest fleet that keeps the promise, for a thousand tiers within a tick, and it must
say what binds and what one replica fewer would have meant. Some promises cannot be kept by any fleet, since a request
alone on an idle replica already breaks them.

Idea: the share in promise at a rate grows with the replicas, so the smallest fleet is found by doubling steps and
bisection, for all tiers at once, each tier leaving the search when it is settled. The search starts at what the
replicas could serve at all, or at the last answer. `Infeasible` is a value beside `Sizing`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plimsoll.core.gaps import LIGHT_LOAD, SHARE, gap_s
from plimsoll.core.knee import HIGHEST_RATE, Constraint, Profile, Tier, alone_s, attainment, gaps, own_s, pace, profile
from plimsoll.core.load_line import constraint, counted, slo_rate
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.queueing import Floats, checked
from plimsoll.core.slo import Slo
from plimsoll.core.whole import whole_s

MAX_REPLICAS: Final = 100_000  # beyond it no fleet is the answer
_ANY_RATE: Final = 1e-6  # requests/s that one replica carries wherever the promise can be kept
_ANY_LOAD: Final = 1e-6  # of what all slots of a replica could serve: likewise
_LOOSER: Final = 1.05  # steps in which targets are loosened in search of a feasible promise
_MOST_STEPS: Final = 120
_SHORTER_STEPS: Final = "a smaller --max-num-batched-tokens, or a prefill tier, makes the gaps shorter"


@dataclass(frozen=True, eq=False)
class Sizes:
    """The replicas of n tiers, arrays of shape (n,).

    replicas: 0 without load, infinity where none suffice. utilisation: rho, the share of their time that work takes.
    attained: share of the requests feasible alone that is in promise. one_fewer: what it would be with one replica
    fewer, which refuses what it cannot serve at all.
    """

    replicas: Floats
    utilisation: Floats
    attained: Floats
    one_fewer: Floats


@dataclass(frozen=True)
class Sizing:
    """The replicas of one tier for one rate.

    constraint: what this fleet runs into first. utilisation: rho, the share of its time that work takes.
    slo_rate_per_s: the rate up to which this fleet keeps the promise. attained, one_fewer: as in `Sizes`.
    infeasible_alone: share of the requests that
    miss alone on an idle replica; they are served behind the others and are in none of the shares.
    """

    replicas: int
    constraint: Constraint
    utilisation: float
    slo_rate_per_s: float
    attained: float
    one_fewer: float
    infeasible_alone: float


@dataclass(frozen=True)
class Infeasible:
    """No number of replicas keeps the promise.

    constraint: the target that breaks. feasible: the promise nearest to the asked one, with only the targets that must
    be loosened changed, that a replica at a tenth of its full rate keeps; None where no target helps (KV too small).
    remedy: what other than looser targets would help, in words; "" where nothing is known to.
    """

    constraint: Constraint
    feasible: Slo | None
    remedy: str = ""

    @property
    def hint(self) -> str:
        """The remedy as the end of a sentence."""
        return f"; {self.remedy}" if self.remedy else ""


def size(tier: Tier, rate_per_s: float, headroom: float = 0.0) -> Sizing | Infeasible:
    """The smallest number of replicas whose `slo_rate`, less `headroom` (a share of it), covers the tier's rate.

    rate_per_s: requests per second of the whole tier, first attempts only, never of one pod. Raises ValueError that
    names the argument.
    """
    broken = infeasible(tier)
    if broken is not None:
        return broken
    reduced = profile(tier)
    sizes = size_many(reduced, rate_per_s, headroom)
    if math.isinf(sizes.replicas[0]):
        return _infeasible(tier)
    replicas = int(sizes.replicas[0])
    at = slo_rate(reduced, max(replicas, 1))
    return Sizing(
        replicas=replicas,
        constraint=constraint(reduced, at, max(replicas, 1))[0],
        utilisation=float(sizes.utilisation[0]),
        slo_rate_per_s=float(at[0]) if replicas else 0.0,
        attained=float(sizes.attained[0]),
        one_fewer=float(sizes.one_fewer[0]),
        infeasible_alone=float(1 - reduced.feasible[0]),
    )


def infeasible(tier: Tier) -> Infeasible | None:
    """Why no number of replicas keeps the promise, however low the rate; None where some number does.

    That arrivals bunch is no reason: dealt out to enough replicas they do not.
    """
    return None if keepable(profile(tier))[0] else _infeasible(replace(tier, arrival_cv2=min(tier.arrival_cv2, 1.0)))


def keepable(tiers: Profile) -> NDArray[np.bool_]:
    """Whether some number of replicas keeps the promise of each tier at a low enough rate: not `infeasible`, (n,)."""
    calm = tiers.calm
    return np.isfinite(size_many(calm, _ANY_RATE).replicas) & _keeps(calm, _ANY_LOAD)


def size_many(
    tiers: Profile, rate_per_s: ArrayLike, headroom: ArrayLike = 0.0, start: ArrayLike | None = None
) -> Sizes:
    """`size` of n tiers in one call. start: replicas to begin the search at, such as the last answer; any will do."""
    rate = np.broadcast_to(checked("rate_per_s", rate_per_s), tiers.share.shape)
    if np.any(rate > HIGHEST_RATE):
        raise ValueError(f"rate_per_s must be at most {HIGHEST_RATE:g}: more is no load but a wrong estimate")
    spare = checked("headroom", headroom)
    if np.any(spare >= 1):
        raise ValueError(f"headroom must be below 1, not {headroom!r}")
    need = np.broadcast_to(rate / (1 - spare), rate.shape)
    with np.errstate(divide="ignore", invalid="ignore"):  # a step limit of 0: no number of replicas will do
        most = np.minimum(np.minimum(tiers.full_rate_per_s(1), tiers.step_limit_per_s), tiers.gap_limit_per_s)
        least = np.where(rate > 0, np.maximum(np.ceil(need / most * (1 - 1e-12)), 1.0), 1.0)
    first = least if start is None else np.maximum(np.where(np.isfinite(start), start, least), least)
    found = _smallest(tiers, need, least, np.minimum(np.floor(first), MAX_REPLICAS))
    replicas = np.where(rate > 0, found.replicas, 0.0)
    some = np.flatnonzero(np.isfinite(replicas) & (rate > 0))
    attained, one_fewer = np.where(rate > 0, 0.0, 1.0), np.zeros(len(tiers))
    utilisation = np.zeros(len(tiers))
    utilisation[some] = tiers.take(some).rho(rate[some], replicas[some])
    searched = need[some] == rate[some]  # with headroom the search looked at another rate
    for shares, seen, c in ((attained, found.enough, replicas), (one_fewer, found.too_few, replicas - 1)):
        shares[some] = np.where(searched, seen[some], np.nan)
        rest = some[np.isnan(shares[some])]
        shares[rest] = _attained(tiers.take(rest), rate[rest], c[rest])
    return Sizes(replicas, utilisation, attained, one_fewer)


@dataclass(frozen=True, eq=False)
class _Found:
    """Fewest replicas, and the shares attained with them and with one fewer; NaN where that was not looked at."""

    replicas: Floats
    enough: Floats
    too_few: Floats


def _smallest(tiers: Profile, need: Floats, least: Floats, first: Floats) -> _Found:
    """The fewest replicas that are enough, not under `least`, tried from `first`; infinity if MAX_REPLICAS are not."""
    good, bad, at = np.full(len(tiers), np.inf), least - 1, first.copy()
    enough, too_few = np.full(len(tiers), np.nan), np.full(len(tiers), np.nan)
    stride = 1.0
    open_ = np.flatnonzero(least <= MAX_REPLICAS)
    while open_.size:
        c, some = at[open_], tiers.take(open_)
        seen = attainment(some, need[open_], c)
        shares, kept = seen.attained, counted(some, seen, need[open_], c) <= 1 - some.share
        good[open_[kept]], enough[open_[kept]] = c[kept], shares[kept]
        bad[open_[~kept]], too_few[open_[~kept]] = c[~kept], shares[~kept]
        # Doubling steps up or down until both sides are known, then halves.
        top = np.where(np.isinf(good), 0.0, good)
        between = np.where(np.isnan(too_few), np.maximum(top - stride, bad + 1), np.floor((bad + top) / 2))
        at = np.where(np.isinf(good), np.minimum(bad + stride, MAX_REPLICAS), between)
        stride *= 2
        open_ = open_[(good[open_] - bad[open_] > 1) & (bad[open_] < MAX_REPLICAS)]
    return _Found(good, enough, too_few)


def _attained(tiers: Profile, rate: Floats, replicas: Floats) -> Floats:
    """Share in promise; what exceeds the full rate is refused at random, and no replica serves nobody."""
    c = np.maximum(replicas, 1.0)
    served = np.minimum(rate, tiers.full_rate_per_s(c))
    return np.asarray(np.where(replicas > 0, attainment(tiers, served, c).attained * served / rate, 0.0))


def _keeps(tiers: Profile, load: float) -> NDArray[np.bool_]:
    """Whether one replica at this share of what all its slots could serve keeps the promise, (n,)."""
    rate = tiers.full_rate_per_s(1, admission=False) * load
    return np.asarray(attainment(tiers, rate, 1).attained >= tiers.share)


def _infeasible(tier: Tier) -> Infeasible:
    reduced, w = profile(tier), tier.workload
    if w.quantile(w.prompt_tokens + w.output_tokens, tier.slo.share) > tier.limits.kv_tokens:
        return Infeasible(Constraint.KV, None)
    if reduced.tpot_s[0] < reduced.tpot_alone_s[0]:
        breaks = pace(tier)[1]
    elif reduced.gap_limit_per_s[0] <= 0:
        plain = tier.role is Role.DECODE or gaps(tier)[0].longer(0.0, tier.slo.itl_s or math.inf) > 1 - SHARE
        return Infeasible(Constraint.ITL, _feasible(tier, Constraint.ITL), "" if plain else _SHORTER_STEPS)
    else:
        breaks = constraint(reduced, 0.0, 1)[0] if reduced.feasible[0] > 0 else Constraint.TTFT
    return Infeasible(breaks, _feasible(tier, breaks))


def _feasible(tier: Tier, breaks: Constraint) -> Slo | None:
    """The promise that a lightly loaded replica keeps, loosened target by target in small steps."""
    slo, w = tier.slo, tier.workload
    nobody = profile(tier).weights[0, :-1].sum() <= 0
    if slo.ttft_s is not None and (nobody or breaks not in (Constraint.TPOT, Constraint.E2E, Constraint.ITL)):
        allowance = slo.ttft_per_1k_tokens_s * w.prompt_tokens / 1000
        needed_s = np.maximum(alone_s(tier) - allowance, 0.0)  # long prompts may have more than they need
        slo = replace(slo, ttft_s=max(slo.ttft_s, float(w.quantile(needed_s, slo.share))))
    for _ in range(_MOST_STEPS):
        reduced = profile(replace(tier, slo=slo))
        if reduced.gap_limit_per_s[0] <= 0:
            own, most_per_s = gaps(replace(tier, slo=slo))
            slo = replace(slo, itl_s=gap_s(own, LIGHT_LOAD * most_per_s))
            continue
        if reduced.feasible[0] > 0 and _keeps(reduced, LIGHT_LOAD)[0]:
            return slo
        light = reduced.full_rate_per_s(1, admission=False) * LIGHT_LOAD
        open_ = attainment(reduced, light, 1, admission=False)
        # Kept without admission, it is the batch that broke it, which is what TPOT leaves.
        tpot_breaks = open_.tpot[0] < slo.share or open_.attained[0] >= slo.share
        if math.isfinite(reduced.tpot_s[0]) and (tpot_breaks or slo.ttft_s is None):
            slo = _slower(replace(tier, slo=slo), float(reduced.tpot_alone_s[0]))
        elif slo.ttft_s is not None:
            slo = replace(slo, ttft_s=slo.ttft_s * _LOOSER)
    return None


def _slower(tier: Tier, alone_s: float) -> Slo:
    """The promise with the target that TPOT is held to one step looser, and not out of an idle replica's reach."""
    slo = tier.slo
    if pace(tier)[1] is Constraint.E2E and slo.e2e_s is not None:
        reached_s = whole_s(slo, tier.workload, own_s(tier), tier.model.base_s, alone_s)
        return replace(slo, e2e_s=max(slo.e2e_s * _LOOSER, reached_s))
    assert slo.tpot_s is not None
    return replace(slo, tpot_s=max(slo.tpot_s * _LOOSER, alone_s))
