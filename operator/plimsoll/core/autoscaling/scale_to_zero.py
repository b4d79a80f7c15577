"""Scale to zero: whether the last replica of a tier with minReplicas 0 stays, is removed or returns.

Problem: any load needs one replica, and the forecast of a service with rare requests fades over many minutes. Sizing
alone almost never removes the last one. A fixed time-out removes it just before the next request of a regular client.

Idea: an optimal stopping rule on the next request (`demand.idle_periods`). Without a replica, a request costs the GPU
time of a start and sloMissCost times the work of the requests that arrive during it. The last replica stays while
waiting is cheaper than the expected cost. It always stays for one start-up time after the last request, and while
requests are queued, running or expected as retries, or metrics are missing. Only a request brings it back. A started
replica completes its start, and then stays until the clients with a Retry-After have had the time to retry.
"""

from __future__ import annotations

from typing import Final

from plimsoll.core import units
from plimsoll.core.autoscaling.observations import SizingResult
from plimsoll.core.autoscaling.tier_context import TierContext
from plimsoll.core.demand.idle_periods import IdlePeriod
from plimsoll.core.types import Unavailable

DEFAULT_REQUEST_GPU_S: Final = 1.0  # used while the request mix is unknown
RETURN_WINDOW_S: Final = 120.0  # rejected clients return within twice the `Retry-After` that SDKs honour
MAX_WAKE_S: Final = 3600.0  # a start that takes longer after the last request is given up


def apply_scale_to_zero(context: TierContext, idle_period: IdlePeriod | Unavailable, miss_cost: float) -> str | None:
    """Set both targets if the choice is between one replica and none. Returns the reason, or None otherwise.

    If the demand is unknown, the replicas scale to zero together or stay.
    """
    if context.bounds[0] > 0 or (context.hold_reason is None and context.scale_up_target > 1):
        return None
    if context.observation.replicas == 0:
        return _wake_up(context, idle_period)
    if isinstance(idle_period, Unavailable):
        _at_least_one(context)
        return f"the last replica stays: {idle_period.reason}"
    backlog_gpu_s = context.observation.backlog_gpu_s
    if (
        idle_period.active
        or isinstance(backlog_gpu_s, Unavailable)
        or backlog_gpu_s > 0.0
        or context.observation.coverage < 1.0
    ):
        _at_least_one(context)
        return None
    if context.policy.warm_replicas:
        return None
    return _compare_idle_cost(context, idle_period, miss_cost)


def _wake_up(context: TierContext, idle_period: IdlePeriod | Unavailable) -> str | None:
    backlog_gpu_s = context.observation.backlog_gpu_s
    if not isinstance(backlog_gpu_s, Unavailable) and backlog_gpu_s > 0.0:
        _at_least_one(context)
        return "requests are waiting and no replica runs: start 1"
    if not isinstance(idle_period, Unavailable) and idle_period.active:
        _at_least_one(context)
        return "requests arrive and no replica runs: start 1"
    if context.policy.warm_replicas:
        return None
    context.scale_up_target = context.scale_down_target = 0
    return "no replica until a request arrives"


def _compare_idle_cost(context: TierContext, idle_period: IdlePeriod, miss_cost: float) -> str:
    sizing, start_s = context.observation.sizing, context.observation.horizon_s
    request_gpu_s = sizing.request_gpu_s if isinstance(sizing, SizingResult) else DEFAULT_REQUEST_GPU_S
    cold_start_cost_s = start_s + miss_cost * request_gpu_s * idle_period.burst_size
    wait = idle_period.optimal_wait(cold_start_cost_s)
    idle_text = f"no request for {units.format_wait(idle_period.idle_s)}"
    serving_s, return_s = context.observation.serving_s, max(start_s, RETURN_WINDOW_S)
    is_wake_up = serving_s < min(idle_period.idle_s, return_s)
    if is_wake_up and (serving_s > 0.0 or idle_period.idle_s < MAX_WAKE_S):
        _at_least_one(context)
        state = f"ready for {units.format_wait(serving_s)}" if serving_s > 0.0 else "starting"
        return f"the last replica stays: {idle_text}, but it is {state}, and rejected clients may return"
    explanation = (
        f"{idle_text}; {idle_period.arrival_probability(start_s):.0%} chance of one within "
        f"{units.format_wait(start_s)}, which would cost {units.format_figure(cold_start_cost_s)} GPU-s "
        "without a replica"
    )
    if idle_period.idle_s < start_s or wait.net_saving_s(cold_start_cost_s) > 0.0:
        _at_least_one(context)
        return f"the last replica stays: {explanation}"
    context.scale_up_target = context.scale_down_target = 0
    context.scaled_to_zero = True
    return f"scale to zero: {explanation}"


def _at_least_one(context: TierContext) -> None:
    context.scale_up_target, context.scale_down_target = (
        max(context.scale_up_target, 1),
        max(context.scale_down_target, 1),
    )
