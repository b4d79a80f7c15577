"""How the forecast does: on loads made here with fixed seeds, and on given series; and what it costs.

    python -m bench.forecast.replay [--horizon 120] [FILE ...]

FILE: csv or csv.gz with a header, one row a minute, every column but the first a series (tokens, requests: any work).
A series is scaled to a mean of one GPU-second per second; nothing is fitted to it. Per series and quantile:

- missed: share of horizons in which the largest minute was above the forecast;
- lost: share of all work that was above the forecast of its horizon;
- held: mean forecast over the mean of the largest minute (1: what knowing it would hold).

The largest minute holds chance as well as rate; the forecast is of the rate, so a low quantile misses about half.

Figures of one run on one machine; nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.forecast.growth_prior import read
from plimsoll.core.demand.demand_state import DemandState, observe
from plimsoll.core.demand.forecasting import Forecast, forecast
from plimsoll.core.demand.standby_value import MISS_COST, growth_distribution, standby_replicas

Floats = NDArray[np.float64]
REQUEST_GPU_S = 0.08
SIZE_SIGMA = 0.6  # of the lognormal request sizes
REPLICA_WORK = 0.96  # 12 such requests a second
MISS_COSTS = (5.0, 10.0, MISS_COST, 50.0, 100.0)


def poisson_work(rates: Floats, tick_s: float, seed: int) -> list[float]:
    """Work per second in each tick of Poisson requests at `rates`; shape (ticks,)."""
    rng = np.random.default_rng(seed)
    counts = rng.poisson(rates * tick_s)
    sizes = rng.lognormal(math.log(REQUEST_GPU_S) - SIZE_SIGMA**2 / 2, SIZE_SIGMA, counts.sum())
    work = np.zeros(len(rates))
    np.add.at(work, np.repeat(np.arange(len(rates)), counts), sizes)
    return [float(size) for size in work / tick_s]


def update_all(works: Iterable[float], tick_s: float, state: DemandState | None = None) -> DemandState:
    """The state after samples every `tick_s`."""
    state = state or DemandState()
    start_s = state.last_sample_s or 0.0
    for number, work in enumerate(works, start=1):
        state = observe(state, start_s + number * tick_s, work)
    return state


def _forecast(state: DemandState, horizon_s: float, quantile: float) -> Forecast:
    result = forecast(state, state.last_sample_s or 0.0, horizon_s, quantile)
    assert isinstance(result, Forecast)
    return result


def cost(tiers: int = 50, ticks: int = 120) -> None:
    """Microseconds of process time per tier and tick, over many tiers."""
    for tick_s in (1.0, 15.0):
        works = [poisson_work(np.full(ticks + 600, 6.0), tick_s, seed) for seed in range(tiers)]
        states = [update_all(series[:600], tick_s) for series in works]
        cpu_s = {"observe": 0.0, "forecast": 0.0}
        for tick in range(600, 600 + ticks):
            started = time.process_time()
            states = [observe(s, (tick + 1) * tick_s, series[tick]) for s, series in zip(states, works, strict=True)]
            seen = time.process_time()
            for state in states:
                forecast(state, (tick + 1) * tick_s, 120.0, 0.95)
            cpu_s["observe"] += seen - started
            cpu_s["forecast"] += time.process_time() - seen
        figures = ", ".join(f"{name} {1e6 * s / tiers / ticks:.1f} us" for name, s in cpu_s.items())
        print(f"  tick {tick_s:4.0f} s, {tiers} tiers: {figures} a tier")


def constant() -> None:
    """Range of the answer, and false alarms, under constant Poisson load, from the second hour on."""
    for tick_s, rate, hours in ((1.0, 1.0, 12), (1.0, 6.0, 12), (1.0, 50.0, 12), (15.0, 1.0, 96), (15.0, 50.0, 96)):
        per_hour = int(3600 / tick_s)
        works = poisson_work(np.full(hours * per_hour, rate), tick_s, seed=1)
        state, forecasts, alarms = update_all(works[:per_hour], tick_s), [], set()
        for number, work in enumerate(works[per_hour:], start=per_hour + 1):
            state = observe(state, number * tick_s, work)
            alarms.add(state.level_shift_s)
            if number % max(1, round(60 / tick_s)) == 0:
                forecasts.append(_forecast(state, 120.0, 0.95).work / (rate * REQUEST_GPU_S))
        print(
            f"  tick {tick_s:4.0f} s, {rate:4.0f} req/s, {hours} h: {len(alarms) - 1} false alarms, answer over truth"
            f" {min(forecasts):.3f} to {max(forecasts):.3f}, mean {np.mean(forecasts):.3f}"
        )


def level_shift_and_ramp() -> None:
    """What is told in the seconds after a leap, and along a ramp, in requests a second."""
    for name, tick_s in (("6 to 36 req/s", 1.0), ("6 to 36 req/s", 15.0)):
        works = poisson_work(np.concatenate([np.full(int(600 / tick_s), 6.0), np.full(600, 36.0)]), tick_s, seed=1)
        state, history = update_all(works[: int(600 / tick_s)], tick_s), []
        for after in range(5):
            state = update_all([works[int(600 / tick_s) + after]], tick_s, state)
            history.append(f"{_forecast(state, 120.0, 0.95).work / REQUEST_GPU_S:.0f}")
        print(f"  {name}, tick {tick_s:.0f} s, after each of the first ticks: {' '.join(history)}")
    rates = 5 + 31 * np.sin(np.pi * np.arange(1800) / 1800)
    works = poisson_work(rates, 1.0, seed=1)
    forecast = (
        f"{now}: {_forecast(update_all(works[:now], 1.0), 120.0, 0.5).work / REQUEST_GPU_S:.1f}"
        f" ({rates[now : now + 120].max():.1f})"
        for now in (120, 240, 360, 480, 600, 900, 1200)
    )
    print(f"  5 + 31 sin(pi t / 1800), told at t (largest in 120 s): {', '.join(forecast)}")


def standby_table() -> None:
    """Spare over start-up time and sloMissCost, for 6 req/s on replicas of 12."""
    for name, seconds in (("7.5 minutes", 450), ("2 hours", 7200)):
        state = update_all(poisson_work(np.full(seconds, 6.0), 1.0, seed=1), 1.0)
        baseline = _forecast(state, 60.0, 0.5).baseline
        for horizon_s in (10.0, 30.0, 60.0, 120.0, 240.0, 600.0):
            growth = growth_distribution(state, horizon_s)
            standby = (
                f"{miss_cost:.0f}: {standby_replicas(growth, baseline, REPLICA_WORK, 1, 8, miss_cost)}"
                for miss_cost in MISS_COSTS
            )
            print(f"  after {name}, start-up {horizon_s:3.0f} s, spare at sloMissCost {', '.join(standby)}")


def replay_series(name: str, minutes: Floats, horizon_s: float) -> None:
    """Misses and holding on one series of minutes; shape (minutes,)."""
    works = [float(work) for work in minutes / minutes.mean()]
    ahead = math.ceil(horizon_s / 60.0)
    fixed: dict[float, list[tuple[float, float]]] = {0.5: [], 0.9: [], 0.95: [], 0.99: []}
    state = DemandState()
    for number, work in enumerate(works[:-ahead], start=1):
        state = observe(state, 60.0 * number, work)
        if number < 60 or number % ahead:
            continue
        actual = np.array(works[number : number + ahead])
        for quantile, losses in fixed.items():
            losses.append(_losses(actual, _forecast(state, horizon_s, quantile).work))
    largest = sum(max(works[index : index + ahead]) for index in range(60, len(works) - ahead) if index % ahead == 0)
    total = sum(works[60:])
    rows = [f"{quantile}: {_print_row(forecast, largest, total)}" for quantile, forecast in fixed.items()]
    print(f"  {name}: {'; '.join(rows)}")


def _losses(due: Floats, sized: float) -> tuple[float, float]:
    return float(np.maximum(0.0, due - sized).sum()), sized


def _print_row(metrics: list[tuple[float, float]], largest: float, total: float) -> str:
    missed, sized = np.array(metrics).T
    return f"missed {np.mean(missed > 0):.3f} lost {missed.sum() / total:.3f} held {sized.sum() / largest:.2f}"


def main(arguments: list[str]) -> int:
    """Print every figure."""
    parser = argparse.ArgumentParser(description="How the forecast does")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--horizon", type=float, default=120.0, help="seconds")
    given = parser.parse_args(arguments)
    for title, measure in (
        ("cost", cost),
        ("constant load, 0.95 over 120 s", constant),
        ("leap and ramp", level_shift_and_ramp),
        ("spare replicas", standby_table),
    ):
        print(title)
        measure()
    for path in given.files:
        print(f"{path.name}, {given.horizon:.0f} s ahead")
        for number, minutes in enumerate(read(path), start=1):
            replay_series(f"column {number}", minutes, given.horizon)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
