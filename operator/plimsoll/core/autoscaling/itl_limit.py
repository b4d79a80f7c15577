"""Load of a replica for which a tier is sized, so that its measured inter-token latency (ITL) meets the target.

Problem: the model computes ITL from step times and from the chunks that the engine announced. Where the gaps are
longer, no request is rejected and no first token is late, so nothing else shows that the tier is short.

Idea: a settled minute whose ITL exceeds the target shows that a replica carries less than its load, by the same factor.
It holds until a minute with more load is in time, or for two hours, since without evidence it would never end. A target
that no load meets would take every replica, so a tier gets at most four times what the model computes.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

from plimsoll.core.codec import Number

_NOISE: Final = 1.05  # measured over target that a percentile of one minute reaches by chance
_STEP: Final = (1.1, 2.0)  # least and most by which one minute lowers the load
MIN_COMPLETED: Final = 20.0  # requests of a tier in the minute: the percentile of fewer is chance
MAX_CORRECTION: Final = 4.0  # of the replicas that the model computes
_MAX_AGE_S: Final = 7200.0  # of the last minute above the target


class ItlLimit(NamedTuple):
    """Limit of one tier. rate_per_s: highest requests/s of a replica within the target; 0 if no minute has exceeded it.
    itl_s, target_s, at_s: of the last minute that did, seconds, and seconds since the epoch.
    """

    rate_per_s: Annotated[float, Number(0.0, 1e9, digits=6)] = 0.0
    itl_s: Annotated[float, Number(0.0, 1e6, digits=6)] = 0.0
    target_s: Annotated[float, Number(0.0, 1e6, digits=6)] = 0.0
    at_s: Annotated[float, Number(0.0, 1e11)] = 0.0

    def is_current(self, target_s: float | None, now_s: float) -> bool:
        """Whether it is of the present target, and not too old."""
        return target_s == self.target_s and abs(now_s - self.at_s) <= _MAX_AGE_S

    def correction(self, capacity_per_s: float, target_s: float | None, now_s: float) -> float:
        """Return the SLO capacity of a replica, requests/s, over this limit; 1 to MAX_CORRECTION. target_s: the present
        target.
        """
        if self.rate_per_s <= 0.0 or not self.is_current(target_s, now_s):
            return 1.0
        return min(max(1.0, capacity_per_s / self.rate_per_s), MAX_CORRECTION)


NO_ITL_LIMIT: Final = ItlLimit()


def update_itl_limit(
    limit: ItlLimit, measured_s: float, target_s: float | None, rate_per_s: float, now_s: float
) -> ItlLimit:
    """Return the limit after a settled minute. measured_s: its ITL. rate_per_s: of one replica."""
    if not limit.is_current(target_s, now_s):
        limit = NO_ITL_LIMIT
    if target_s is None or rate_per_s <= 0.0:
        return limit
    if measured_s > _NOISE * target_s:
        carried = rate_per_s / min(max(measured_s / target_s, _STEP[0]), _STEP[1])
        carried = min(limit.rate_per_s, carried) if limit.rate_per_s else carried
        return ItlLimit(carried, measured_s, target_s, now_s)
    is_raised = 0.0 < limit.rate_per_s < rate_per_s and measured_s <= target_s
    return limit._replace(rate_per_s=rate_per_s) if is_raised else limit
