"""What the parts of the forecast earn, on series of demand alone: days and bursts that no row of half an hour holds.

    python -m bench.ablation.demand_series

Problem: a daily profile counts from the third day on, and a simulation of days takes hours. Idea: the forecast needs no
engines. Poisson requests at a known rate are observed, and each forecast is compared with the rate that follows:

- lost: share of the work that arrives one horizon later and is above the forecast;
- held: the forecasts over the highest rates within the horizon (1: what knowing them would hold).

One horizon is one start-up time. Prints the forecast with all its parts, and what changes without one of them: the mean
over the seeds, and the range. Rare requests, each alone, show what the last replica of a tier costs that scales to
zero, with the lengths of idle periods learned and without. Nothing here passes or fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from bench.ablation.mechanisms import MECHANISMS
from bench.ablation.switches import Mechanism, switched_off
from bench.forecast.replay import REQUEST_GPU_S, Floats, poisson_work
from plimsoll.core.demand import idle_periods
from plimsoll.core.demand.demand_state import DemandState, observe
from plimsoll.core.demand.forecasting import Forecast, forecast
from plimsoll.core.demand.idle_periods import IdleStats
from plimsoll.core.demand.standby_value import MISS_COST

SEEDS: Final = (1, 2, 3)
QUANTILE: Final = 0.95


@dataclass(frozen=True)
class DemandSeries:
    """rates: requests/s in each tick, given a generator. warm_up: ticks before the first forecast counts. every: ticks
    from one forecast to the next. horizons_s: start-up times."""

    name: str
    rates: Callable[[np.random.Generator], Floats]
    mechanisms: tuple[str, ...]
    horizons_s: tuple[float, ...] = (60.0, 240.0)
    tick_s: float = 5.0
    warm_up: int = 720
    every: int = 6


def measure(series: DemandSeries, seed: int, without: Mechanism | None) -> Floats:
    """Return the lost share of work in percent, and the held share; shape (horizons, 2)."""
    rates = series.rates(np.random.default_rng(seed))
    works, due = poisson_work(rates, series.tick_s, seed), rates * REQUEST_GPU_S
    ahead = [math.ceil(horizon_s / series.tick_s) for horizon_s in series.horizons_s]
    state, sums = DemandState(), np.zeros((len(ahead), 4))  # lost, due, held, highest
    with switched_off(without):
        for number in range(1, len(works) - max(ahead)):
            state = observe(state, number * series.tick_s, works[number - 1])
            if number < series.warm_up or number % series.every:
                continue
            for row, (horizon_s, ticks) in enumerate(zip(series.horizons_s, ahead, strict=True)):
                found = forecast(state, number * series.tick_s, horizon_s, QUANTILE)
                assert isinstance(found, Forecast)
                work, highest = due[number + ticks], due[number : number + ticks + 1].max()
                sums[row] += (max(0.0, work - found.work), work, found.work, highest)
    return np.stack([100.0 * sums[:, 0] / sums[:, 1], sums[:, 2] / sums[:, 3]], axis=1)


def _ramp(_: np.random.Generator) -> Floats:
    return np.asarray(5.0 + 31.0 * np.abs(np.sin(np.pi * np.arange(4320) / 720.0)))


def _regular_bursts(_: np.random.Generator) -> Floats:
    return np.where(np.arange(4320) % 240 < 36, 15.0, 5.0)


def _random_bursts(rng: np.random.Generator) -> Floats:
    rates = np.full(4320, 5.0)
    for start in np.cumsum(rng.exponential(120, 60)).astype(int):
        rates[start : start + int(rng.exponential(20)) + 1] = 5.0 * rng.uniform(2, 5)
    return rates


def _square(_: np.random.Generator) -> Floats:
    return np.where(np.arange(4320) % 24 < 12, 10.0, 70.0)


def _days(hours: tuple[float, ...], rates: tuple[float, ...]) -> Callable[[np.random.Generator], Floats]:
    return lambda _: np.interp(np.arange(6 * 1440) % 1440 / 60.0, hours, rates)


def _half_hours(rng: np.random.Generator) -> Floats:
    return np.repeat(rng.lognormal(2.1, 0.7, 6 * 48), 30)


_BURSTS: Final = ("own-growth-burst",)
_DAYS: Final = (60.0, 240.0, 900.0)
SERIES: Final = (
    DemandSeries("a rise and a fall of half an hour each, by turns", _ramp, ("trend", *_BURSTS)),
    DemandSeries("bursts of three minutes every twenty", _regular_bursts, _BURSTS),
    DemandSeries("bursts at random", _random_bursts, _BURSTS),
    DemandSeries("10 and 70 requests/s by turns of a minute", _square, _BURSTS),
    *(
        DemandSeries(name, rates, ("season",), _DAYS, tick_s=60.0, warm_up=3 * 1440, every=5)
        for name, rates in (
            ("days, tenfold in half an hour from nine", _days((0, 9, 9.5, 18, 18.5, 24), (3, 3, 30, 30, 3, 3))),
            ("days, tenfold in two hours from seven", _days((0, 7, 9, 18, 20, 24), (3, 3, 30, 30, 3, 3))),
            ("days without a pattern", _half_hours),
        )
    ),
)


IDLE_TICK_S: Final = 10.0
IDLE_SERIES: Final[dict[str, Callable[[np.random.Generator], Floats]]] = {
    "a request every five minutes": lambda rng: rng.normal(300.0, 6.0, 600),
    "a request every fifteen minutes": lambda rng: rng.normal(900.0, 18.0, 400),
    "requests at random, ten minutes apart": lambda rng: rng.exponential(600.0, 600),
}


def idle_cost(gaps_s: Floats, startup_s: float, without: Mechanism | None) -> Floats:
    """Return the replica-seconds of idle and starting replicas, with the price of late requests, and late requests.

    gaps_s: idle periods; each ends with one request.
    """
    stats, at_s, late, cold_s = IdleStats(), 0.0, 0, startup_s + MISS_COST * REQUEST_GPU_S
    replica_s = 0.0
    with switched_off(without):
        for gap_s in gaps_s:
            stats = idle_periods.update_idle(stats, at_s, True, 0.0, startup_s)
            kept_s = startup_s
            while kept_s < gap_s and _waits(stats, at_s + kept_s, cold_s):
                kept_s += IDLE_TICK_S
            replica_s += min(gap_s, kept_s)
            late += gap_s > kept_s
            at_s += gap_s
            stats = idle_periods.update_idle(stats, at_s, False, 1.0, startup_s)
    return np.array([replica_s + late * cold_s, late])


def _waits(stats: IdleStats, now_s: float, cold_s: float) -> bool:
    return idle_periods.current_idle(stats, now_s).optimal_wait(cold_s).net_saving_s(cold_s) > 0.0


def main() -> None:
    """Print every figure."""
    for name, gaps in IDLE_SERIES.items():
        for startup_s in (60.0, 240.0):
            (whole, late), (without, late_without) = (
                np.mean([idle_cost(gaps(np.random.default_rng(seed)), startup_s, one) for seed in SEEDS], axis=0)
                for one in (None, MECHANISMS["idle-learning"])
            )
            print(
                f"{name}, start-up {startup_s:.0f} s: {whole:.0f} replica-s, {late:.0f} late; without idle-learning "
                f"{without / whole - 1.0:+.1%}, {late_without:.0f} late",
                flush=True,
            )
    for series in SERIES:
        whole = _over_seeds(series, None)
        without = {name: _over_seeds(series, MECHANISMS[name]) - whole for name in series.mechanisms}
        for row, horizon_s in enumerate(series.horizons_s):
            lost, held = whole[:, row].mean(axis=0)
            print(f"{series.name}, start-up {horizon_s:.0f} s: lost {lost:.2f} %, held {held:.3f}")
            for name, found in without.items():
                (lost, held), low, high = (reduce(found[:, row], axis=0) for reduce in (np.mean, np.min, np.max))
                print(
                    f"  without {name}: lost {lost:+.2f} ({low[0]:+.2f} to {high[0]:+.2f}), "
                    f"held {held:+.3f} ({low[1]:+.3f} to {high[1]:+.3f})",
                    flush=True,
                )


def _over_seeds(series: DemandSeries, without: Mechanism | None) -> Floats:
    """Shape (seeds, horizons, 2)."""
    return np.array([measure(series, seed, without) for seed in SEEDS])


if __name__ == "__main__":
    main()
