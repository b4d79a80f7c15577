"""Peakedness of the rejections by a limited number of slots under random arrivals."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(4096)
def overflow_peakedness(budget: float, slots: int) -> float:
    """Peakedness (variance over mean) of the overflow, where a share `budget` of Poisson arrivals overflows.

    slots: about this many are in use. Load a on c slots overflows m = a B with the peakedness Z = 1 - m + a / (c + 1 +
    m - a) (Riordan; Wilkinson 1956, "Theories for toll traffic engineering in the USA"). c is the number of slots from
    which the share overflows, for the load that fills `slots`. Returns 1 without any.
    """
    if slots <= 0:
        return 1.0
    load = slots / (1.0 - budget)
    count, loss = 0, 1.0
    while loss > budget:
        count += 1
        loss = load * loss / (count + load * loss)  # Erlang's loss formula, slot by slot
    overflow = load * loss
    return 1.0 - overflow + load / (count + 1.0 + overflow - load)
