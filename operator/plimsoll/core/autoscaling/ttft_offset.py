"""TTFT offset: what each first token takes beyond the model, estimated from the measured share of late first tokens.

Problem: the host, the network or the engine's API server can add to each TTFT what no step time explains. Requests are
then late although the replicas are not full, so nothing is rejected, and the sizing sees no reason for another replica.

Idea: Bayes on a grid of offsets. The model predicts the share of late first tokens for each offset, at the measured
rate and number of replicas. The observed counts weigh the offsets by their binomial likelihood, with a smaller weight
because late requests come in clusters. The prior is that there is no offset. Evidence decays towards it, so an offset
that is gone is forgotten. A high quantile of the posterior is part of the TTFT for which the tiers are sized.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plimsoll.core.capacity.tier_model import TierProfile, attainment_without_queueing
from plimsoll.core.codec import Length, Number

_MEMORY: Final = 30.0  # minutes after which evidence has decayed to 1/e
_POINTS: Final = 51
_MAX_OFFSET: Final = 1.25  # of the target; a larger offset is as infeasible
_NONE_PROBABILITY: Final = 0.95  # of no offset, before any observation
_PRIOR_MEAN: Final = 0.2  # of the target: of an offset, if there is one
_QUANTILE: Final = 0.9  # of the posterior
_IMPOSSIBLE: Final = -1e4  # log weight; a smaller one is no different
_SIGNIFICANT: Final = 0.01  # of the target
_CLUSTER: Final = 5.0  # requests that count as one observation
_MIN_SHARE: Final = 1e-3  # no prediction is more certain than this

_GRID: Final[NDArray[np.float64]] = np.linspace(0.0, _MAX_OFFSET, _POINTS)


def _log_prior() -> NDArray[np.float64]:
    """Return the prior of the grid: no offset is most probable, others are exponential."""
    some = np.exp(-_GRID[1:] / _PRIOR_MEAN)
    return np.log(np.concatenate(([_NONE_PROBABILITY], (1.0 - _NONE_PROBABILITY) * some / some.sum())))


_LOG_PRIOR: Final = _log_prior()


class TtftOffset(NamedTuple):
    """Offset of one service. target_s: TTFT target; log_weights: of the grid, relative to its prior, at most 0."""

    target_s: Annotated[float, Number(0.0, 1e6, digits=6)]
    log_weights: Annotated[tuple[Annotated[float, Number(_IMPOSSIBLE, 0.0, digits=5)], ...], Length(_POINTS, _POINTS)]

    @property
    def seconds(self) -> float:
        """Offset to size for, s: the posterior's _QUANTILE. 0 while nothing contradicts the model."""
        log_posterior = _LOG_PRIOR + np.array(self.log_weights)
        weights = np.exp(log_posterior - log_posterior.max())
        at_most = np.cumsum(weights) / weights.sum()
        return 0.0 if at_most[0] >= _QUANTILE else float(self.target_s * np.interp(_QUANTILE, at_most, _GRID))

    @property
    def is_significant(self) -> bool:
        """Whether the offset changes a sizing."""
        return self.seconds > _SIGNIFICANT * self.target_s


def no_offset(target_s: float) -> TtftOffset:
    """Return the offset before any observation."""
    return TtftOffset(target_s, (0.0,) * _POINTS)


def update_offset(
    offset: TtftOffset, profile: TierProfile, replica_rate_per_s: float, late: float, responses: float
) -> TtftOffset:
    """Return the offset after a minute in which `late` of `responses` first tokens missed the target.

    profile: of the one tier that computes first tokens, without an offset. replica_rate_per_s: requests/s per replica.
    """
    predicted = np.clip(late_shares(profile, replica_rate_per_s, _GRID * offset.target_s), _MIN_SHARE, 1.0 - _MIN_SHARE)
    log_likelihood = (late * np.log(predicted) + (responses - late) * np.log1p(-predicted)) / _CLUSTER
    log_weights = (1.0 - 1.0 / _MEMORY) * np.array(offset.log_weights) + log_likelihood
    return offset._replace(log_weights=tuple(np.maximum(log_weights - log_weights.max(), _IMPOSSIBLE).tolist()))


def late_shares(profile: TierProfile, replica_rate_per_s: float, offsets_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of first tokens after their target for each offset, shape (n,), without waits for a slot."""
    tiled = profile.select(np.zeros(offsets_s.size, dtype=np.intp))
    slack_s = tiled.slack_s.copy()
    slack_s[:, :-1] -= offsets_s[:, None]
    tiled = replace(tiled, slack_s=slack_s)
    share_met, within_tpot, _ = attainment_without_queueing(
        tiled, np.full(offsets_s.size, replica_rate_per_s), tiled.arrival_cv2, True
    )
    met = (share_met * tiled.weights[:, :-1]).sum(axis=1) / np.maximum(within_tpot, 1e-12)
    return np.asarray(1.0 - met)
