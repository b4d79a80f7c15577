"""Attainment of a tier: the share of requests within the SLO at a rate with a given number of replicas.

It sums the classes of a `TierProfile` (`tier_model`) over the waiting time for a slot, and is vectorised over tiers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plimsoll.core.capacity.queueing import (
    Floats,
    admitted_shares,
    slot_queue,
    validate_number,
    variability,
)
from plimsoll.core.capacity.tier_model import TierProfile, attainment_without_queueing

_MIN_CV2: Final = 1e-3  # of service times: no queue is entirely regular
_NEGLIGIBLE_SIGMAS: Final = 9.0  # slots this far above the mean batch are never all in use


@dataclass(frozen=True, eq=False)
class Attainment:
    """Shares of the requests that are feasible alone, arrays of shape (n,); all 0 where nothing is feasible.

    within_slo: meets all targets. without_queueing: the same if no request waited for a slot or a server. within_tpot:
    meets the TPOT target.
    """

    within_slo: Floats
    without_queueing: Floats
    within_tpot: Floats


def attainment(
    profile: TierProfile, rate_per_s: ArrayLike, replicas: ArrayLike, *, admission: bool = True
) -> Attainment:
    """Attainment of n tiers at their rates (requests/s of the whole tier) and replicas.

    admission: with admission control, a request that would wait beyond its slack is rejected and counts as missed,
    without delaying others. Without it, all requests wait. Arrays of shape (n,) or numbers.
    """
    rate = np.broadcast_to(validate_number("rate_per_s", rate_per_s), profile.share.shape)
    replica_counts = np.broadcast_to(validate_number("replicas", replicas, least=1), profile.share.shape)
    replica_cv2 = (
        1.0 + (profile.arrival_cv2 - 1.0) * profile.gateways / replica_counts
    )  # of a replica's own arrivals, dealt out to all
    share_met, tpot, step_wait = attainment_without_queueing(
        profile, rate / replica_counts, replica_cv2, admission, replica_counts
    )
    slack = np.maximum(profile.slack_s - step_wait[:, None], 0.0)
    slot_share = _share_with_slot(
        replace(profile, slots=profile.batch) if admission else profile, rate, replica_counts, slack, admission
    )
    class_weights = profile.weights[:, :-1] / np.maximum(profile.feasible_share, 1e-300)[:, None]
    class_weights = np.where(profile.feasible_share[:, None] > 0, class_weights, 0.0)
    share_without_queueing = (class_weights * share_met).sum(axis=1)
    return Attainment(
        (class_weights * share_met * slot_share[:, :-1]).sum(axis=1),
        share_without_queueing,
        np.where(profile.feasible_share > 0, tpot, 0.0),
    )


def _share_with_slot(
    profile: TierProfile, rate: Floats, replica_counts: Floats, slack_s: Floats, admission: bool
) -> Floats:
    """P(a request of each class has a slot within its slack), (n, K); 1 where the slots cannot bind."""
    slot_share = np.ones_like(slack_s)
    rows = np.flatnonzero(_slots_may_bind(profile, rate, replica_counts))
    if rows.size == 0:
        return slot_share
    selected, rate, replica_counts, slack_s = profile.select(rows), rate[rows], replica_counts[rows], slack_s[rows]
    gateways = selected.gateways  # each has its places for itself, and is slowed by what the others have there
    rate, slots = rate / gateways, np.maximum(np.floor(selected.slots / gateways), 1.0)
    sequence_s = selected.slot_sequence_s * gateways
    queue = slot_queue(
        rate, selected.steps, selected.slot_base_s, sequence_s, slots, replica_counts, peakedness=selected.peakedness
    )
    rho = rate / queue.full_per_s
    if admission:
        # Waits beyond the slack are cut off, so that what counts is how it fares near full load, whatever the load.
        spread = variability(np.ones_like(rho), selected.arrival_cv2, np.maximum(selected.service_cv2, _MIN_CV2))
        slot_share[rows] = admitted_shares(queue.log_inverse, rate, queue.full_per_s, spread, slack_s, selected.weights)
    else:
        drain = queue.drain_per_s / variability(rho, selected.arrival_cv2, selected.service_cv2)
        with np.errstate(invalid="ignore"):
            late = queue.delayed_share[:, None] * np.exp(-drain[:, None] * np.where(np.isinf(slack_s), 0.0, slack_s))
        slot_share[rows] = 1 - late
    return slot_share


def _slots_may_bind(profile: TierProfile, rate: Floats, replica_counts: Floats) -> NDArray[np.bool_]:
    """False where the mean of the running sequences (negative binomial) is many standard deviations below the slots."""
    load = rate * profile.steps / replica_counts
    free = 1 - load * profile.slot_sequence_s
    mean = load * (profile.slot_base_s + profile.slot_sequence_s) / np.maximum(free, 1e-12)
    sigma = np.sqrt(
        np.maximum(profile.peakedness, 1.0) * profile.gateways * (mean / np.maximum(free, 1e-12) + 1) / replica_counts
    )
    return np.asarray(
        (free <= 0) | (mean + _NEGLIGIBLE_SIGMAS * sigma + 3 * profile.gateways / replica_counts > profile.slots)
    )
