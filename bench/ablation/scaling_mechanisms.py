"""Mechanisms that decide how many replicas there are, and how each is switched off."""

from __future__ import annotations

import math
from typing import Any, Final

from bench.ablation.switches import Mechanism, Replacement, Switch, constant, doing, returning, returning_argument
from plimsoll.core.autoscaling.retry_backlog import NO_BACKLOG


def _no_other_services(original: Any, horizon_s: float) -> Any:
    """returns no growth, with the weights as they are."""
    shares, weights_s = original(horizon_s)
    return (0.0,) * len(shares), weights_s


def _all_hang(_: Any, _context: Any, late: list[Any], _now_s: float) -> int:
    """takes every overdue pod for one that hangs."""
    return len(late)


def _last_replica_stays(_: Any, context: Any, *_others: Any) -> str:
    """keeps the last replica."""
    context.scale_up_target, context.scale_down_target = (
        max(context.scale_up_target, 1),
        max(context.scale_down_target, 1),
    )
    return "the last replica stays"


def _need_as_base(_previous: int, sizing: Any) -> int:
    return int(sizing.replicas)


SCALE_UP: Final = (
    Mechanism(
        "standby",
        "Keeps replicas beyond the need while the misses that they would avoid are worth more than their GPU time.",
        (Switch("autoscaling.recommend", "apply_standby", returning(None)),),
        (
            "autoscaling/standby_sizing.py",
            "autoscaling/recommend.py:apply_standby",
            "demand/standby_value.py:standby_replicas",
            "demand/standby_value.py:standby_pays_off",
            "demand/standby_value.py:standby_cost_benefit",
        ),
    ),
    Mechanism(
        "standby-own-growth",
        "Growth of other services buys one standby replica and one for every ten needed; more takes own growth.",
        (Switch("autoscaling.standby_sizing", "_replicas_by_prior", returning(1_000_000)),),
        ("autoscaling/standby_sizing.py:_replicas_by_prior",),
    ),
    Mechanism(
        "standby-retention",
        "Keeps a standby replica that is there until it costs 1.25 times its value.",
        (Switch("autoscaling.recommend", "STANDBY_RETENTION_MARGIN", constant(1.0)),),
        (),
    ),
    Mechanism(
        "standby-certain-level",
        "Orders no standby replica while the level is known to less than 5.5 %.",
        (Switch("autoscaling.standby_sizing", "MAX_LEVEL_ERROR", constant(math.inf)),),
        (),
    ),
    Mechanism(
        "standby-base",
        "Orders no further standby replica where the need grew by less than half a replica.",
        (
            Switch(
                "autoscaling.recommend",
                "_standby_base",
                Replacement("returns the need", lambda _: _need_as_base, value=_need_as_base),
            ),
        ),
        ("autoscaling/recommend.py:_standby_base",),
    ),
    Mechanism(
        "growth-prior",
        "Assumes for a new service that load grows as often as that of other services.",
        (Switch("demand.standby_value", "_growth_prior", doing(_no_other_services)),),
        ("demand/growth_prior.py",),
    ),
    Mechanism(
        "own-growth-burst",
        "Raises the forecast by the factor by which the service's own load has exceeded predictions.",
        (Switch("demand.growth_stats", "quantile_growth_factor", returning(1.0)),),
        ("demand/growth_stats.py:quantile_growth_factor", "demand/growth_stats.py:growth_bound"),
    ),
    Mechanism(
        "trend",
        "Draws the level towards two straight lines, and extrapolates their slope.",
        (
            Switch("demand.level_model", "_blend", returning_argument(0, "current")),
            Switch("demand.batched_observe", "_blend", returning_argument(0, "estimate")),
        ),
        (
            "demand/level_model.py:_blend",
            "demand/level_model.py:_add_to_line",
            "demand/level_model.py:add_to_lines",
            "demand/level_model.py:reset_lines",
            "demand/batched_observe.py:_blend",
        ),
    ),
    Mechanism(
        "level-shift",
        "Restarts the level where a change of the rate is certain.",
        (Switch("demand.level_model", "detect_shift", returning(None)),),
        ("demand/level_model.py:run_tests", "demand/level_model.py:detect_shift"),
    ),
    Mechanism(
        "season",
        "Adds the growth of the profile of the day and of the week to the forecast.",
        (Switch("demand.seasonality", "predicted_growth", returning(0.0)),),
        ("demand/seasonality.py",),
    ),
    Mechanism(
        "level-uncertainty",
        "Sizes for the error of the level while retries are due.",
        (Switch("demand.forecasting", "_level_uncertainty", returning(0.0)),),
        ("demand/forecasting.py:_level_uncertainty",),
    ),
    Mechanism(
        "retry-backlog",
        "Sizes for the work of rejected requests that were told when to come back.",
        (Switch("autoscaling.sizing_requests", "_retry_backlog", returning(NO_BACKLOG, "returns no backlog")),),
        ("autoscaling/retry_backlog.py", "autoscaling/sizing_requests.py:_retry_backlog"),
    ),
    Mechanism(
        "rejection-feedback",
        "Raises the need where requests are rejected although all replicas have been ready for a minute.",
        (Switch("autoscaling.rejection_feedback", "CapacityCorrection.is_negligible", returning(True)),),
        ("autoscaling/rejection_feedback.py", "autoscaling/capacity_correction.py"),
    ),
    Mechanism(
        "ttft-offset",
        "Sizes for the TTFT target less what late first tokens show beyond the model.",
        (Switch("autoscaling.ttft_offset", "TtftOffset.seconds", returning(0.0)),),
        ("autoscaling/ttft_offset.py", "autoscaling/ttft_feedback.py"),
    ),
    Mechanism(
        "kept-by-late-load",
        "Keeps as many replicas that none carries a load at which first tokens were late.",
        (Switch("autoscaling.recommend", "_keep_while_late", returning("")),),
        ("autoscaling/recommend.py:_keep_while_late",),
    ),
    Mechanism(
        "rejection-significance",
        "Counts only rejections and retries beyond random variation.",
        (
            Switch("autoscaling.rejection_feedback", "insignificant_rejections", returning(0.0)),
            Switch("autoscaling.retry_backlog", "insignificant_rejections", returning(0.0)),
        ),
        ("autoscaling/rejection_significance.py",),
    ),
    Mechanism(
        "lagging-signals",
        "While demand is unknown, latency, queues, KV use and preemptions can add replicas.",
        (Switch("autoscaling.recommend", "_pressure", returning((0.0, "switched off"))),),
        ("autoscaling/recommend.py:_pressure",),
    ),
    Mechanism(
        "overdue",
        "Orders a replacement for a pod that starts for too long.",
        (Switch("autoscaling.startup_time", "StartupModel.overdue_s", returning(math.inf)),),
        ("autoscaling/startup_time.py:StartupModel.overdue_s",),
    ),
    Mechanism(
        "one-replacement",
        "Replaces one of several overdue pods until a start in time shows that they hang.",
        (Switch("autoscaling.pending_replicas", "_hanging", doing(_all_hang)),),
        ("autoscaling/pending_replicas.py:_hanging",),
    ),
)
SCALE_DOWN: Final = (
    Mechanism(
        "stabilization-window",
        "Scales down when the lower count has been enough for a while.",
        (Switch("autoscaling.stabilize", "stabilization_window_s", returning(0.0)),),
        ("autoscaling/stabilize.py:stabilization_window_s", "autoscaling/stabilize.py:_growth_probability"),
    ),
    Mechanism(
        "downscale-regret",
        "Learns how often load returns soon after a replica became idle, and waits longer.",
        (Switch("autoscaling.downscale_regret", "record_trials", returning_argument(0, "regret")),),
        ("autoscaling/downscale_regret.py",),
    ),
    Mechanism(
        "scale-down-margin",
        "Keeps replicas for what the level may yet move by.",
        (Switch("autoscaling.sizing_batch", "scale_down_margin", returning(1.0)),),
        ("autoscaling/sizing_batch.py:scale_down_margin",),
    ),
    Mechanism(
        "idle-cost",
        "Compares the cost of a wait with that of a cold start before the last replica goes.",
        (Switch("autoscaling.scale_to_zero", "_compare_idle_cost", doing(_last_replica_stays)),),
        ("autoscaling/scale_to_zero.py:_compare_idle_cost", "demand/idle_periods.py"),
    ),
    Mechanism(
        "idle-learning",
        "Learns how long idle periods last; without it the last replica waits as long as a cold start costs.",
        (Switch("demand.idle_periods", "_record_idle", returning_argument(0, "stats")),),
        ("demand/idle_periods.py:_record_idle", "demand/idle_periods.py:_powers"),
    ),
)
