"""A queue before places that are filled request by request, first come first served: what formulas are held against."""

import heapq
import math

import numpy as np


def simulate_waits(
    load: float, servers: int, gap_cv2: float, stay_cv2: float, patience: float, count: int, seed: int
) -> np.ndarray:
    """What each of `count` arrivals waits, in mean stays; NaN where it would be more than `patience` and is refused.

    gap_cv2, stay_cv2: squared coefficients of variation of gamma gaps and lognormal stays.
    """
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.gamma(1 / gap_cv2, gap_cv2 / (load * servers), count))
    sigma = math.sqrt(math.log1p(stay_cv2))
    stays = rng.lognormal(-sigma * sigma / 2, sigma, count)
    free, found = [0.0] * servers, np.full(count, math.nan)
    for i, (now, stay) in enumerate(zip(at.tolist(), stays.tolist(), strict=True)):
        begin = max(now, free[0])
        if begin - now <= patience:
            found[i] = begin - now
            heapq.heapreplace(free, begin + stay)
    return found
