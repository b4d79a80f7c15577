"""How bunched the refusals are of places that all arrivals fill by chance."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(4096)
def peakedness(budget: float, places: int) -> float:
    """Variance over mean of what overflows, where the share `budget` of Poisson arrivals does.

    places: of which about so many are taken. Of load a on c places m = a B overflows, as peaked as
    Z = 1 - m + a / (c + 1 + m - a) (Riordan; Wilkinson 1956, "Theories for toll traffic engineering in the USA"). c is
    the number of places from which the share overflows, of the load that fills `places`. 1 without any.
    """
    if places <= 0:
        return 1.0
    load = places / (1.0 - budget)
    count, lost = 0, 1.0
    while lost > budget:
        count += 1
        lost = load * lost / (count + load * lost)  # Erlang's loss, place by place
    over = load * lost
    return 1.0 - over + load / (count + 1.0 + over - load)
