"""Generate `plimsoll/core/demand/growth_prior.py` from three published series.

The table says how often load grows by which factor within a start-up time.

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

    python -m bench.forecast.growth_prior O365_A O365_D BURSTGPT > operator/plimsoll/core/demand/growth_prior.py

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
GROWTH_FACTORS = (1.05, 1.1, 1.2, 1.35, 1.6, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)
DOUBLING_FACTOR = 2.0
LEVEL_WINDOW_MIN = 5
QUIET_SHARE = 0.1  # of the mean; below it a minute is no start for growth

_TEMPLATE = '''"""Prior for services without history: how often load grows by which factor within a start-up time.

Problem: standby replicas are worth what the next level shift would cost without them, and a new service has seen none.

Idea: the share of minutes from which load grows by more than a factor, over five week-long series of other services.
`bench/forecast/growth_prior.py` generates this module, and has method and definitions. The only sources are:
- Office 365 workloads A and D, prompt tokens a minute, from the figures of SageServe
  (https://github.com/shashwatj07/SageServe, MIT licence);
- BurstGPT, first week, tokens a minute (https://github.com/HPMLL/BurstGPT, CC-BY-4.0).
"""

from __future__ import annotations

from typing import Final

GROWTH_HORIZONS_S: Final = {horizons}
GROWTH_FACTORS: Final = {factors}

# PRIOR_EXCEEDANCE[h][k]: share of minutes from which load grows past GROWTH_FACTORS[k] within GROWTH_HORIZONS_S[h].
PRIOR_EXCEEDANCE: Final = (
{rows}
)

# PRIOR_WEIGHT_S[h][k]: seconds of own history that weigh as much as the prior for growth past GROWTH_FACTORS[k].
PRIOR_WEIGHT_S: Final = (
{weights}
)
'''


def read(path: Path) -> list[Series]:
    """The series of one file, shape (minutes,) each. Raises OSError, or ValueError where a field is no number."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    rows = list(csv.reader(text.splitlines()))[1:]
    table = np.array(rows, dtype=np.float64)
    return [table[:, column] for column in range(1, table.shape[1])]


def growth_ratios(series: Series, horizon_min: int) -> Series:
    """Growth within the horizon from each minute that is no quiet one; shape (starts,), dimensionless."""
    cumulative = np.concatenate(([0.0], np.cumsum(series)))
    starts = np.arange(LEVEL_WINDOW_MIN, len(series) - horizon_min + 1)
    level = (cumulative[starts] - cumulative[starts - LEVEL_WINDOW_MIN]) / LEVEL_WINDOW_MIN
    largest = np.max([series[starts + offset] for offset in range(horizon_min)], axis=0)
    is_active = level > QUIET_SHARE * series.mean()
    return np.asarray(largest[is_active] / level[is_active])


def exceedance(series: list[Series], horizon_min: int) -> Series:
    """Share of starts with growth above each factor; shape (series, factors)."""
    return np.array(
        [[np.mean(growth_ratios(ratios, horizon_min) > factor) for factor in GROWTH_FACTORS] for ratios in series]
    )


def prior_weight_s(shares: Series, horizon_min: int) -> Series:
    """Seconds of history that the prior is worth at each factor: mean / variance of the rate over the series, which is
    a Gamma prior's rate. A factor that no series has grown past weighs what the one before it does.

    shares: each series' share of starts with growth above each factor; shape (series, factors). Shape (factors,).
    """
    mean, spread = shares.mean(axis=0), shares.var(axis=0, ddof=1)
    weights = 60 * horizon_min * mean / np.where(spread > 0.0, spread, np.inf)
    doubled = GROWTH_FACTORS.index(DOUBLING_FACTOR)
    weights[:doubled] = weights[doubled]
    for doubling_index in range(doubled + 1, len(GROWTH_FACTORS)):
        weights[doubling_index] = (
            weights[doubling_index] if spread[doubling_index] > 0.0 else weights[doubling_index - 1]
        )
    return np.asarray(weights)


def render(series: list[Series]) -> str:
    """Return the text of `growth_prior.py`."""
    tables = [exceedance(series, horizon) for horizon in HORIZONS_MIN]
    rows = [", ".join(f"{share:.4f}" for share in table.mean(axis=0)) for table in tables]
    weights = [
        ", ".join(f"{weight:.0f}.0" for weight in np.round(prior_weight_s(table, horizon), -1))
        for table, horizon in zip(tables, HORIZONS_MIN, strict=True)
    ]
    return _TEMPLATE.format(
        horizons=tuple(60.0 * horizon for horizon in HORIZONS_MIN),
        factors=GROWTH_FACTORS,
        rows="\n".join(f"    ({row})," for row in rows),
        weights="\n".join(f"    ({row})," for row in weights),
    )


def main(arguments: list[str]) -> int:
    """Print the module for the three files named in `arguments`."""
    parser = argparse.ArgumentParser(description="Print plimsoll/core/demand/growth_prior.py")
    for name in ("o365_a", "o365_d", "burstgpt"):
        parser.add_argument(name, type=Path)
    files = vars(parser.parse_args(arguments))
    print(render([series for path in files.values() for series in read(path)]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
