"""Runs of the whole board, in order: a budget may end it at any point, so the most important runs come first.

A policy is given by its name and options, or by one of these words, whose policies depend on earlier runs (`full_run`):
`followers`, the reactive baselines selected on the row's own load; `fleets`, constant ones from Plimsoll's mean to the
smallest that attains as much; `peers`, each at the settings found for its machine; `found`, other settings found on the
row; `schedules`, those that know the future.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from bench.scoreboard.rows import BOARD_ROWS, OTHER_PLANTS

NOMINAL_PLANT: Final = (1.0,)


class PlanPart(NamedTuple):
    """seeds: of Plimsoll, constant fleets and peers, and of a follower that leads."""

    description: str
    rows: tuple[str, ...]
    policy_groups: tuple[str, ...]
    seeds: int = 1
    plants: tuple[float, ...] = NOMINAL_PLANT


_STEP_ROWS: Final = ("step-60", "step-0", "step-30", "step-120", "step-240")
_FOLLOWER_ROWS: Final = (*_STEP_ROWS, "ramp-120", "guide")
_PD_ROWS: Final = ("step-60-pd", "shift-60-pd")
_RETRY_ROWS: Final = ("retry-honour", "retry-ignore", "retry-mixed")
_TRACE_ROWS: Final = ("azure-code", "servegen-large", "servegen-r1")
_HALF_DAY_ROWS: Final = ("servegen-r1-half-day",)
_CONSTANT_ROWS: Final = tuple(name for name in BOARD_ROWS if name.startswith("constant-"))
_FIRST_CONSTANT_ROWS: Final = _CONSTANT_ROWS[::4] + _CONSTANT_ROWS[3::4]  # each rate once, every second one with bursts
_MISS_COST_ROWS: Final = ("step-60", "step-120", "step-240")
_MISS_COST_POLICIES: Final = tuple(f"plimsoll:sloMissCost={cost}" for cost in (0, 5, 10, 80))
_UNTUNED_ROWS: Final = ("unseen-square", "unseen-flood", "unseen-naps-pd")
_HELD_OUT_ROWS: Final = ("held-out-chat", "held-out-documents")
_TUNED_ROWS: Final = (*_FOLLOWER_ROWS, *_PD_ROWS, *_RETRY_ROWS)  # rows of half an hour

RUN_PLAN: Final = (
    PlanPart("Plimsoll on rows of half an hour", _TUNED_ROWS, ("plimsoll",)),
    PlanPart("peers on the step and on the guide", ("step-60", "guide"), ("fleets", "peers", "found")),
    PlanPart("followers", (*_FOLLOWER_ROWS, *_PD_ROWS), ("followers",)),
    PlanPart(
        "Plimsoll and followers on other machines", _FOLLOWER_ROWS, ("plimsoll", "followers"), plants=OTHER_PLANTS
    ),
    PlanPart("traces", _TRACE_ROWS, ("plimsoll", "fleets")),
    PlanPart("each constant rate once", _FIRST_CONSTANT_ROWS, ("plimsoll", "fleets")),
    PlanPart("loads that nothing was tuned for", _UNTUNED_ROWS, ("plimsoll", "fleets")),
    PlanPart("hours held out of tuning", _HELD_OUT_ROWS, ("plimsoll", "fleets"), seeds=3),
    PlanPart("starts that change", ("starts-change",), ("plimsoll", "fleets"), seeds=3),
    PlanPart("the step, starts of ten seconds", ("step-10",), ("plimsoll", "fleets"), seeds=10),
    PlanPart("peers elsewhere", (*_STEP_ROWS[1:], "ramp-120", *_PD_ROWS), ("fleets", "peers", "found")),
    PlanPart("followers on traces", _TRACE_ROWS, ("followers",)),
    PlanPart("the other constant rates", _CONSTANT_ROWS, ("plimsoll", "fleets")),
    PlanPart("three seeds", _TUNED_ROWS, ("plimsoll", "fleets"), seeds=3),
    PlanPart("the price of a miss", _MISS_COST_ROWS, _MISS_COST_POLICIES),
    PlanPart("leading followers, three seeds", (*_FOLLOWER_ROWS, *_PD_ROWS), ("followers",), seeds=3),
    PlanPart("peers on traces", _TRACE_ROWS, ("peers",)),
    PlanPart("the step, ten seeds", _STEP_ROWS, ("plimsoll", "fleets"), seeds=10),
    PlanPart("pairs on other machines", _PD_ROWS, ("plimsoll", "followers"), plants=OTHER_PLANTS),
    PlanPart("clients that come back, on other machines", _RETRY_ROWS, ("plimsoll",), plants=OTHER_PLANTS),
    PlanPart("rows of which nothing is asked", ("mooncake", "ragpulse-week"), ("plimsoll", "fleets")),
    PlanPart("schedules that know the future, on traces", _TRACE_ROWS, ("schedules",)),
    PlanPart("half a day", _HALF_DAY_ROWS, ("plimsoll", "fleets", "followers", "peers", "schedules")),
    PlanPart("half a day on other machines", _HALF_DAY_ROWS, ("plimsoll", "followers"), plants=OTHER_PLANTS),
    PlanPart("traces on other machines", _TRACE_ROWS, ("plimsoll", "followers"), plants=OTHER_PLANTS),
    PlanPart(
        "each constant rate once, on other machines", _FIRST_CONSTANT_ROWS, ("plimsoll", "fleets"), plants=OTHER_PLANTS
    ),
)
