"""What the page says beyond its runs: mechanisms that were deleted, and cases that no row has.

Problem: a mechanism that was deleted has no switch, and a row of half an hour shows no day. Idea: both are written
down here, with the figures that decided.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Deletion(NamedTuple):
    """A mechanism that is gone. lines: of `core`, with all that only it used. shown: without it, less with it."""

    name: str
    did: str
    lines: int
    shown: str


class NamedCase(NamedTuple):
    """A case that shows what a mechanism earns where the rows do not. shown: without it, less with it."""

    name: str
    case: str
    shown: str


DELETIONS: Final = (
    Deletion(
        "risk-control",
        "Moved the quantile to size for by the share of missed requests, once per start-up time.",
        140,
        "12 runs on 5 rows: attainment +0.00 (11 of them) and -0.05, GPU-hours -1.66 to +0.43 %. On autoregressive "
        "demand it spent the error budget on a smaller margin: 5.0 % of the work was above the forecast, 1.4 % without",
    ),
)
NAMED_CASES: Final = (
    NamedCase(
        "season",
        "days that rise tenfold from seven to nine, engines start in 15 minutes (`demand_series`)",
        "work above the forecast 1.90 % instead of 0.50 %; with starts of 60 s 0.36 instead of 0.33 %; on days "
        "without a pattern nothing changes",
    ),
    NamedCase(
        "own-growth-burst",
        "bursts of three minutes every twenty, engines start in 4 minutes (`demand_series`)",
        "work above the forecast 22.7 % instead of 6.0 %, for half of what is held",
    ),
    NamedCase(
        "trend",
        "half an hour of rise and half an hour of fall, engines start in 60 s (`demand_series`)",
        "7 % more is held, with 0.1 points less work above the forecast",
    ),
    NamedCase(
        "uncertainty-price",
        "the same",
        "3.5 % more is held, with 0.5 points less work above the forecast",
    ),
    NamedCase("partial-lengths", "`unseen-flood`", "attainment -5.59 points"),
    NamedCase("recent-outputs", "`outputs-grow`", "attainment -1.38, +0.00 and -1.04 points"),
    NamedCase("mix-shift", "`prompts-grow`", "GPU-hours +4, +6 and +17 %; attainment +0.99, +0.22 and +0.17 points"),
    NamedCase("level-uncertainty", "`short`, `retry-mixed`", "attainment -0.51 (seed 2 of `short`) and -0.25 points"),
    NamedCase(
        "downscale-regret",
        "`unseen-square`",
        "78 changes instead of 24, attainment -0.22 points; GPU-hours -22 %: it pays for fewer starts",
    ),
    NamedCase(
        "kv-transfer",
        "`slow-fabric`, its first 600 s",
        "attainment -0.13 points; the first prompts on a slow fabric are computed at decode engines",
    ),
    NamedCase(
        "media-ratios",
        "prompts with pictures (`tests/core/test_token_ratios.py`)",
        "the tokens of a picture stay those of the estimate; no row has pictures",
    ),
)
