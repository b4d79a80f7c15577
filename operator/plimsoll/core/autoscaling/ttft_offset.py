"""TTFT offset: what each first token takes beyond the model, estimated from the measured share of late first tokens.

Problem: the host, the network or the engine's API server can add to each TTFT what no step time explains. Requests are
then late although the replicas are not full, so nothing is rejected, and the sizing sees no reason for another replica.

Idea: Bayes on a grid of offsets. The model predicts the share of late first tokens for each offset, at the measured
rate and number of replicas. The observed counts weigh the offsets by their binomial likelihood, with a smaller weight
because late requests come in clusters. The prior is that there is no offset. Evidence decays, so an offset that is
gone is forgotten. A high quantile of the posterior is part of the TTFT for which the tiers are sized.

The counts are kept by load per replica and compared with the present model. An offset that was found with a former
model would not explain them any more once that is calibrated, and a replica would go although one fewer was late.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plimsoll.core.capacity.tier_model import TierProfile, attainment_without_queueing
from plimsoll.core.codec import Length, Number, stored_as

_MEMORY: Final = 30.0  # minutes after which evidence has decayed to 1/e
_DECAY: Final = 1.0 - 1.0 / _MEMORY
_POINTS: Final = 51
_MAX_OFFSET: Final = 1.25  # of the target; a larger offset is as infeasible
_NONE_PROBABILITY: Final = 0.95  # of no offset, before any observation
_PRIOR_MEAN: Final = 0.2  # of the target: of an offset, if there is one
_QUANTILE: Final = 0.9  # of the posterior
_IMPOSSIBLE: Final = -1e4  # log weight; a smaller one is no different
_SIGNIFICANT: Final = 0.01  # of the target
_CLUSTER: Final = 5.0  # requests that count as one observation
_MIN_SHARE: Final = 1e-3  # no prediction is more certain than this
_SAME_LOAD: Final = 0.05  # relative difference of loads whose counts are added
_MAX_SAMPLES: Final = 12
_MIN_SAMPLE: Final = 100.0  # responses that show which share of them is late
_LATE_LOAD_SHARE: Final = 0.9  # of a load with late first tokens: the level of arrivals moves by as much

_GRID: Final[NDArray[np.float64]] = np.linspace(0.0, _MAX_OFFSET, _POINTS)


def _log_prior() -> NDArray[np.float64]:
    """Return the prior of the grid: no offset is most probable, others are exponential."""
    some = np.exp(-_GRID[1:] / _PRIOR_MEAN)
    return np.log(np.concatenate(([_NONE_PROBABILITY], (1.0 - _NONE_PROBABILITY) * some / some.sum())))


_LOG_PRIOR: Final = _log_prior()


class LateSample(NamedTuple):
    """Late first tokens and all responses at about one load, decaying.

    rate_per_s: requests/s per replica. replicas: in the mean.
    """

    rate_per_s: Annotated[float, Number(1e-6, 1e9, digits=6)]  # above 0: demand is divided by it
    late: Annotated[float, Number(0.0, 1e12, digits=6)]
    responses: Annotated[float, Number(0.0, 1e12, digits=6)]
    replicas: Annotated[float, Number(1.0, 1e6, digits=6)] = 1.0


@stored_as("a TTFT offset", target_s="target", log_weights="weights")
class TtftOffset(NamedTuple):
    """Offset of one service. target_s: TTFT target; log_weights: of the grid, relative to its prior, at most 0.

    samples: what the weights are computed from.
    """

    target_s: Annotated[float, Number(0.0, 1e6, digits=6)]
    log_weights: Annotated[tuple[Annotated[float, Number(_IMPOSSIBLE, 0.0, digits=5)], ...], Length(_POINTS, _POINTS)]
    samples: Annotated[tuple[LateSample, ...], Length(0, _MAX_SAMPLES)] = ()

    @property
    def seconds(self) -> float:
        """Offset to size for, s: the posterior's _QUANTILE. 0 while nothing contradicts the model."""
        log_posterior = _LOG_PRIOR + np.array(self.log_weights)
        weights = np.exp(log_posterior - log_posterior.max())
        at_most = np.cumsum(weights) / weights.sum()
        return 0.0 if at_most[0] >= _QUANTILE else float(self.target_s * np.interp(_QUANTILE, at_most, _GRID))

    def carried_per_s(self, share: float) -> float:
        """Return the load per replica, requests/s, below which not too many first tokens were late; infinite if none.

        share: of first tokens that must be in time.
        """
        known = [one for one in self.samples if one.responses >= _MIN_SAMPLE]
        late = [one.rate_per_s for one in known if one.late > (1.0 - share) * one.responses]
        if not late:
            return math.inf
        in_time = [one.rate_per_s for one in known if one.rate_per_s < min(late)]
        return max([_LATE_LOAD_SHARE * min(late), *in_time])

    @property
    def is_significant(self) -> bool:
        """Whether the offset changes a sizing."""
        return self.seconds > _SIGNIFICANT * self.target_s


def no_offset(target_s: float) -> TtftOffset:
    """Return the offset before any observation."""
    return TtftOffset(target_s, (0.0,) * _POINTS)


def update_offset(
    offset: TtftOffset, profile: TierProfile, replicas: int, replica_rate_per_s: float, late: float, responses: float
) -> TtftOffset:
    """Return the offset after a minute in which `late` of `responses` first tokens missed the target.

    profile: of the one tier that computes first tokens, without an offset. replicas: the ready ones.
    replica_rate_per_s: requests/s of each.
    """
    samples = _add_sample(offset.samples, LateSample(replica_rate_per_s, late, responses, replicas))
    rates_per_s, late_counts, counts, replica_counts = np.repeat(np.array(samples).T, _POINTS, axis=1)
    offsets_s = np.tile(_GRID, len(samples)) * offset.target_s
    predicted = np.clip(late_shares(profile, rates_per_s, replica_counts, offsets_s), _MIN_SHARE, 1.0 - _MIN_SHARE)
    log_likelihoods = (late_counts * np.log(predicted) + (counts - late_counts) * np.log1p(-predicted)) / _CLUSTER
    log_weights = log_likelihoods.reshape(len(samples), _POINTS).sum(axis=0)
    return TtftOffset(
        offset.target_s, tuple(np.maximum(log_weights - log_weights.max(), _IMPOSSIBLE).tolist()), samples
    )


def _add_sample(samples: tuple[LateSample, ...], added: LateSample) -> tuple[LateSample, ...]:
    """Return the decayed samples with one more; of too many, the smallest is dropped."""
    kept: list[LateSample] = []
    for one in samples:
        late, responses = _DECAY * one.late, _DECAY * one.responses
        if abs(one.rate_per_s - added.rate_per_s) <= _SAME_LOAD * added.rate_per_s:
            total = added.responses + responses
            mean_per_s, mean_replicas = (
                (new * added.responses + old * responses) / total
                for new, old in ((added.rate_per_s, one.rate_per_s), (added.replicas, one.replicas))
            )
            added = LateSample(mean_per_s, added.late + late, total, mean_replicas)
        else:
            kept.append(one._replace(late=late, responses=responses))
    kept.append(added)
    return tuple(sorted(kept, key=lambda one: -one.responses)[:_MAX_SAMPLES])


def late_shares(
    profile: TierProfile,
    replica_rate_per_s: float | NDArray[np.float64],
    replicas: float | NDArray[np.float64],
    offsets_s: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the share of first tokens after their target for each offset, shape (n,), without waits for a slot."""
    tiled = profile.select(np.zeros(offsets_s.size, dtype=np.intp))
    slack_s = tiled.slack_s.copy()
    slack_s[:, :-1] -= offsets_s[:, None]
    tiled = replace(tiled, slack_s=slack_s)
    share_met, within_tpot, _ = attainment_without_queueing(
        tiled, np.broadcast_to(replica_rate_per_s, offsets_s.shape), tiled.arrival_cv2, True, replicas
    )
    met = (share_met * tiled.weights[:, :-1]).sum(axis=1) / np.maximum(within_tpot, 1e-12)
    return np.asarray(1.0 - met)
