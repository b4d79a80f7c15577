"""The load line: the rate up to which a tier keeps its promise, and what stops it there.

Problem: a promise is kept window by window. A fleet that misses just the allowed share in the mean of all time breaks
it in every second or third minute, since its refusals come in clumps.

Idea: a refusal counts for as many misses as its clumps weigh in a window (`windows`); the line is the root of what is
counted less what is allowed. Nobody is refused where there is no gate: there the line is that of the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from plimsoll.core.knee import HIGHEST_RATE, NAMES, Attainment, Constraint, Profile, attainment
from plimsoll.core.queueing import Floats, checked
from plimsoll.core.windows import dispersion, weight

_SECANTS: Final = 24  # at most, for the root that is the load line; about ten are needed, seldom 16
_HALVINGS: Final = 40  # after them, where the excess is flat but for a step: there a secant gains nothing
_CLOSE: Final = 1e-11  # of the rate: how near the root is found
_JUST_BEYOND: Final = 1.02


def counted(tiers: Profile, found: Attainment, rate_per_s: ArrayLike, replicas: ArrayLike) -> Floats:
    """Missed share that is held against the promise, (n,): refusals weigh as `windows` says."""
    refused, steady = np.maximum(found.steps - found.attained, 0.0), 1.0 - found.steps
    budget, part = 1.0 - tiers.share, np.asarray(replicas, dtype=np.float64) / tiers.gateways
    feasible = np.where(tiers.feasible > 0, tiers.weights[:, :-1].sum(axis=1), np.inf)
    slack_s = (tiers.weights[:, :-1] * tiers.slack_s[:, :-1]).sum(axis=1) / feasible
    waiting = tiers.full_rate_per_s(part) * slack_s
    spread = dispersion(budget, part * tiers.batch, waiting)
    return np.asarray(steady + refused * weight(budget, steady, np.asarray(rate_per_s), spread))


def slo_rate(tiers: Profile, replicas: ArrayLike, *, admission: bool = True) -> Floats:
    """The load line: the highest rate (requests/s of the tier) at which the promise is still kept, (n,).

    With a gate it is kept in nearly every window (`counted`), without one in the mean. Never above what the replicas
    serve with all slots taken: beyond, the promise would live on refusing for ever; nor above what their gaps allow, of
    which the share says nothing. 0 where not even an idle replica keeps the promise.
    """
    c = np.broadcast_to(checked("replicas", replicas, least=1), tiers.share.shape)
    full = tiers.full_rate_per_s(c, admission=admission)
    full = np.minimum(np.minimum(full, tiers.gap_limit_per_s * c), HIGHEST_RATE)

    def excess(rate: Floats) -> Floats:
        """log of the missed share over the allowed one: nearly straight in the rate, so that secants end soon."""
        found = attainment(tiers, rate, c, admission=admission)
        missed = counted(tiers, found, rate, c) if admission else 1 - found.attained
        return np.asarray(np.log(np.maximum(missed, 1e-300) / (1 - tiers.share)))

    return highest(excess, full)


def highest(excess: Callable[[Floats], Floats], most: Floats) -> Floats:
    """The highest rate of each tier, (n,), up to `most` at which its excess is not above 0; 0 where it always is.

    excess: rising with the rate. An end that stays a second time counts less, so that the next secant goes past the
    root (Anderson and Bjoerck 1973), and what they have not found is halved. Who has a root stays there while the
    others go on: it is the same in any company.
    """
    low = 1e-9 * most
    at_low, at_most = excess(low), excess(most)
    line = np.where(at_low > 0, 0.0, np.where(at_most > 0, low, most))
    end, at_end, newest, at_newest = low, at_low, most, at_most
    for look in range(_SECANTS + _HALVINGS):
        close = _CLOSE * np.maximum(end, newest)
        open_ = (np.abs(newest - end) > 2 * close) & (at_low <= 0) & (at_most > 0)
        if not np.any(open_):
            break
        with np.errstate(divide="ignore", invalid="ignore"):
            guess = (end * at_newest - newest * at_end) / (at_newest - at_end)
        guess = np.where(np.isfinite(guess) & (look < _SECANTS), guess, (end + newest) / 2)
        rate = np.clip(guess, np.minimum(end, newest) + close, np.maximum(end, newest) - close)
        found = excess(rate)
        stays = (found <= 0) == (at_newest <= 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            left = 1 - found / at_newest
        at_end = np.where(open_, np.where(stays, at_end * np.where(left > 0, left, 0.5), at_newest), at_end)
        end = np.where(open_ & ~stays, newest, end)
        newest, at_newest = np.where(open_, rate, newest), np.where(open_, found, at_newest)
        line = np.where(open_ & (found <= 0), np.maximum(line, rate), line)
    return line


def constraint(tiers: Profile, rate_per_s: ArrayLike, replicas: ArrayLike) -> list[Constraint]:
    """What each tier runs into first when its rate rises past this one: the largest cause of missing just beyond."""
    full = tiers.full_rate_per_s(replicas)
    rate = np.maximum(checked("rate_per_s", rate_per_s), 1e-9 * full) * _JUST_BEYOND
    found = attainment(tiers, rate, replicas, admission=False)
    misses = np.stack((1 - found.tpot, found.tpot - found.steps, found.steps - found.attained))
    cause = misses.argmax(axis=0)
    named = [NAMES[row[at]] for row, at in zip(tiers.causes, cause, strict=True)]
    most = tiers.gap_limit_per_s * np.asarray(replicas, dtype=np.float64)
    gap = (rate > most) & ((most <= 0) | (found.attained >= tiers.share))
    return [Constraint.ITL if first else name for name, first in zip(named, gap, strict=True)]
