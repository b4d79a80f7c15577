"""Makes `plimsoll/core/jumps.py` out of three published series: how often load grows by which factor in a start-up.

Problem: a service that has just been created has no history, yet how much spare it needs turns on how often its load
will leap. Other services' weeks are the only evidence.

Idea: five minute-level series out of three sources, each counted as one service and weighted alike. Growth within L
from a minute is the largest minute within L after it over the mean of the five minutes up to it; what is tabled is the
share of minutes from which growth exceeds a factor. Sums over a minute hold the chance of few requests as well as the
change of their rate; both are load that comes without notice, so neither is taken out. Minutes at less than a tenth of
the series' mean are left out: growth from nearly nothing is a start from zero. The weight of the prior at each factor,
in seconds of own history, comes from how much the five differ there (method of moments for a Gamma prior): services
differ more in how often load doubles than in how often it grows tenfold. Below a doubling it is that of a doubling:
what a minute's sum grows by there is chance as much as change, in which all five are alike.

Nothing else is in it: no other trace may be added without taking it out of every evaluation.

    python -m bench.forecast.jump_prior O365_A O365_D BURSTGPT > operator/plimsoll/core/jumps.py

Files, as csv or csv.gz with a header, one row a minute for a week; every column but the first is a series:
- O365_A, O365_D: prompt tokens of Office 365 workloads A and D (prod and dev), read from the published figures of
  SageServe (https://github.com/shashwatj07/SageServe, MIT licence); a quarter of the minutes are interpolated.
- BURSTGPT: prompt and response tokens of the first week of BurstGPT (https://github.com/HPMLL/BurstGPT, CC-BY-4.0),
  per minute as published in https://github.com/IsabellaLiu99/burstgpt_analysis.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]

HORIZONS_MIN = (1, 2, 4, 10)
FACTORS = (1.05, 1.1, 1.2, 1.35, 1.6, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)
DOUBLED = 2.0
LEVEL_MIN = 5
QUIET = 0.1  # of the mean; below it a minute is no start for growth

_TEMPLATE = '''"""How often load grows by which factor within a start-up: the prior for services without history.

Problem: spare capacity is worth what the next leap in load would cost without it, and a new service has seen none.

Idea: the share of minutes from which load grows by more than a factor, over five week-long series of other services;
generated, with method and definitions in `bench/forecast/jump_prior.py`, from these sources alone:
- Office 365 workloads A and D, prompt tokens a minute, from the figures of SageServe
  (https://github.com/shashwatj07/SageServe, MIT licence);
- BurstGPT, first week, tokens a minute (https://github.com/HPMLL/BurstGPT, CC-BY-4.0).
"""

from __future__ import annotations

from typing import Final

HORIZONS_S: Final = {horizons}
FACTORS: Final = {factors}

# EXCEEDANCE[h][k]: share of minutes from which load grows past FACTORS[k] within HORIZONS_S[h].
EXCEEDANCE: Final = (
{rows}
)

# WEIGHT_S[h][k]: seconds of a service's own history that count as much as the prior for growth past FACTORS[k].
WEIGHT_S: Final = (
{weights}
)
'''


def read(path: Path) -> list[Series]:
    """The series of one file, shape (minutes,) each. Raises OSError, or ValueError where a field is no number."""
    stored = path.read_bytes()
    text = (gzip.decompress(stored) if path.suffix == ".gz" else stored).decode()
    rows = list(csv.reader(text.splitlines()))[1:]
    table = np.array(rows, dtype=np.float64)
    return [table[:, column] for column in range(1, table.shape[1])]


def growth(series: Series, horizon_min: int) -> Series:
    """Growth within the horizon from each minute that is no quiet one; shape (starts,), dimensionless."""
    upto = np.concatenate(([0.0], np.cumsum(series)))
    starts = np.arange(LEVEL_MIN, len(series) - horizon_min + 1)
    level = (upto[starts] - upto[starts - LEVEL_MIN]) / LEVEL_MIN
    largest = np.max([series[starts + offset] for offset in range(horizon_min)], axis=0)
    loud = level > QUIET * series.mean()
    return np.asarray(largest[loud] / level[loud])


def exceedance(series: list[Series], horizon_min: int) -> Series:
    """Share of starts with growth above each factor; shape (series, factors)."""
    return np.array([[np.mean(growth(one, horizon_min) > factor) for factor in FACTORS] for one in series])


def weight_s(shares: Series, horizon_min: int) -> Series:
    """Seconds of history that the prior is worth at each factor: mean / variance of the rate over the series, which is
    a Gamma prior's rate. A factor that no series has grown past weighs what the one before it does.

    shares: each series' share of starts with growth above each factor; shape (series, factors). Shape (factors,).
    """
    mean, spread = shares.mean(axis=0), shares.var(axis=0, ddof=1)
    found = 60 * horizon_min * mean / np.where(spread > 0.0, spread, np.inf)
    doubled = FACTORS.index(DOUBLED)
    found[:doubled] = found[doubled]
    for place in range(doubled + 1, len(FACTORS)):
        found[place] = found[place] if spread[place] > 0.0 else found[place - 1]
    return np.asarray(found)


def render(series: list[Series]) -> str:
    """The text of `jumps.py`."""
    tables = [exceedance(series, horizon) for horizon in HORIZONS_MIN]
    rows = [", ".join(f"{share:.4f}" for share in table.mean(axis=0)) for table in tables]
    weights = [
        ", ".join(f"{weight:.0f}.0" for weight in np.round(weight_s(table, horizon), -1))
        for table, horizon in zip(tables, HORIZONS_MIN, strict=True)
    ]
    return _TEMPLATE.format(
        horizons=tuple(60.0 * horizon for horizon in HORIZONS_MIN),
        factors=FACTORS,
        rows="\n".join(f"    ({row})," for row in rows),
        weights="\n".join(f"    ({row})," for row in weights),
    )


def main(arguments: list[str]) -> int:
    """Print the module for the three files named in `arguments`."""
    parser = argparse.ArgumentParser(description="Print plimsoll/core/jumps.py")
    for name in ("o365_a", "o365_d", "burstgpt"):
        parser.add_argument(name, type=Path)
    files = vars(parser.parse_args(arguments))
    print(render([series for path in files.values() for series in read(path)]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
