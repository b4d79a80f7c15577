"""SLO capacity: the highest rate that a tier carries within the SLO, and the constraint that limits it.

Problem: an SLO must be met window by window. A fleet that misses exactly the allowed share in the long-run mean
violates it in every second or third minute, because rejections come in clusters.

Idea: a rejection counts as several misses, by the dispersion of rejections in a window (`windowed_slo`). The SLO
capacity is the root of the counted misses less the allowed ones. Without admission control there are no rejections, and
the SLO applies to the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from plimsoll.core.capacity.attainment import Attainment, attainment
from plimsoll.core.capacity.queueing import Floats, validate_number
from plimsoll.core.capacity.tier_model import CONSTRAINTS, MAX_RATE_PER_S, Constraint, TierProfile
from plimsoll.core.capacity.windowed_slo import rejection_dispersion, rejection_weight

_MAX_SECANT_STEPS: Final = 24  # limit for the root search; about ten are needed, seldom 16
_MAX_BISECTIONS: Final = (
    40  # after the secant steps, where the excess is flat except for a step and a secant gains nothing
)
_REL_TOLERANCE: Final = 1e-11  # relative tolerance of the rate
_PROBE_FACTOR: Final = 1.02


def weighted_miss_share(
    profile: TierProfile, attained_shares: Attainment, rate_per_s: ArrayLike, replicas: ArrayLike
) -> Floats:
    """Missed share that counts against the SLO, (n,). Rejections have the weight of `windowed_slo.rejection_weight`."""
    rejected, missed_in_steps = (
        np.maximum(attained_shares.without_queueing - attained_shares.within_slo, 0.0),
        1.0 - attained_shares.without_queueing,
    )
    budget, replicas_per_gateway = 1.0 - profile.share, np.asarray(replicas, dtype=np.float64) / profile.gateways
    feasible = np.where(profile.feasible_share > 0, profile.weights[:, :-1].sum(axis=1), np.inf)
    slack_s = (profile.weights[:, :-1] * profile.slack_s[:, :-1]).sum(axis=1) / feasible
    queue_room = profile.saturation_rate_per_s(replicas_per_gateway) * slack_s
    dispersion_index = rejection_dispersion(budget, replicas_per_gateway * profile.batch, queue_room)
    return np.asarray(
        missed_in_steps + rejected * rejection_weight(budget, missed_in_steps, np.asarray(rate_per_s), dispersion_index)
    )


def slo_capacity_per_s(profile: TierProfile, replicas: ArrayLike, *, admission: bool = True) -> Floats:
    """SLO capacity: the highest rate (requests/s of the tier) within the SLO, (n,).

    With admission control, nearly every window meets the SLO (`weighted_miss_share`); without it, the long-run mean
    does. It never exceeds what the replicas serve with all slots in use, because beyond that the SLO would depend on
    permanent rejections. It never exceeds the ITL limit, which attainment does not include. 0 where not even an idle
    replica meets the SLO.
    """
    replica_counts = np.broadcast_to(validate_number("replicas", replicas, least=1), profile.share.shape)
    max_rate = profile.saturation_rate_per_s(replica_counts, admission=admission)
    max_rate = np.minimum(np.minimum(max_rate, profile.itl_limit_per_s * replica_counts), MAX_RATE_PER_S)

    def excess(rate: Floats) -> Floats:
        """log of the missed share over the allowed one: nearly straight in the rate, so that secants end soon."""
        attained_shares = attainment(profile, rate, replica_counts, admission=admission)
        miss_share = (
            weighted_miss_share(profile, attained_shares, rate, replica_counts)
            if admission
            else 1 - attained_shares.within_slo
        )
        return np.asarray(np.log(np.maximum(miss_share, 1e-300) / (1 - profile.share)))

    return highest_root(excess, max_rate)


def highest_root(excess: Callable[[Floats], Floats], max_rate: Floats) -> Floats:
    """The highest rate of each tier, (n,), up to max_rate at which its excess is not above 0; 0 where it always is.

    excess: rising with the rate. An end that stays a second time counts less, so that the next secant passes the root
    (Anderson and Bjoerck 1973). Bisection finds the roots that remain. A tier with a root keeps it while the others
    continue, so a tier's result does not depend on the others.
    """
    low = 1e-9 * max_rate
    at_low, at_max = excess(low), excess(max_rate)
    root = np.where(at_low > 0, 0.0, np.where(at_max > 0, low, max_rate))
    bracket, at_bracket, newest, at_newest = low, at_low, max_rate, at_max
    for iteration in range(_MAX_SECANT_STEPS + _MAX_BISECTIONS):
        close = _REL_TOLERANCE * np.maximum(bracket, newest)
        unsolved = (np.abs(newest - bracket) > 2 * close) & (at_low <= 0) & (at_max > 0)
        if not np.any(unsolved):
            break
        with np.errstate(divide="ignore", invalid="ignore"):
            guess = (bracket * at_newest - newest * at_bracket) / (at_newest - at_bracket)
        guess = np.where(np.isfinite(guess) & (iteration < _MAX_SECANT_STEPS), guess, (bracket + newest) / 2)
        rate = np.clip(guess, np.minimum(bracket, newest) + close, np.maximum(bracket, newest) - close)
        value = excess(rate)
        same_side = (value <= 0) == (at_newest <= 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            reduction = 1 - value / at_newest
        at_bracket = np.where(
            unsolved, np.where(same_side, at_bracket * np.where(reduction > 0, reduction, 0.5), at_newest), at_bracket
        )
        bracket = np.where(unsolved & ~same_side, newest, bracket)
        newest, at_newest = np.where(unsolved, rate, newest), np.where(unsolved, value, at_newest)
        root = np.where(unsolved & (value <= 0), np.maximum(root, rate), root)
    return root


def binding_constraint(profile: TierProfile, rate_per_s: ArrayLike, replicas: ArrayLike) -> list[Constraint]:
    """The constraint of each tier that binds first above this rate: the largest cause of misses just beyond it."""
    saturation = profile.saturation_rate_per_s(replicas)
    rate = np.maximum(validate_number("rate_per_s", rate_per_s), 1e-9 * saturation) * _PROBE_FACTOR
    attained_shares = attainment(profile, rate, replicas, admission=False)
    misses = np.stack(
        (
            1 - attained_shares.within_tpot,
            attained_shares.within_tpot - attained_shares.without_queueing,
            attained_shares.without_queueing - attained_shares.within_slo,
        )
    )
    cause = misses.argmax(axis=0)
    constraints = [CONSTRAINTS[row[at]] for row, at in zip(profile.causes, cause, strict=True)]
    itl_limit = profile.itl_limit_per_s * np.asarray(replicas, dtype=np.float64)
    itl_binds = (rate > itl_limit) & ((itl_limit <= 0) | (attained_shares.within_slo >= profile.share))
    return [Constraint.ITL if first else name for name, first in zip(constraints, itl_binds, strict=True)]
