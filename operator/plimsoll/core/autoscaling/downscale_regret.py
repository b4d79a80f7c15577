"""Downscale regret: how often the load needs an idle replica again too soon for its removal to pay off.

Problem: the distribution of level shifts covers all hours. Load that was present a moment ago returns more often than
other load grows by as much. A series of bursts would find the replicas removed between the bursts.

Idea: each replica that has been needed and becomes idle is one trial, whether it is removed or not, so the statistics
do not depend on the decisions. The trial succeeds if the load needs the replica again within two start-up times. The
growth probability is the prior, with the weight of one trial (mean of a Beta posterior), and the lower bound. Standby
replicas and replicas that were ordered too early are no trials, because the load never needed them.
"""

from __future__ import annotations

from typing import Final

from plimsoll.core.autoscaling.decision_state import MAX_MARKS, DownscaleRegret, TimedReplicas

REGRET_STARTUPS: Final = 2.0  # start-ups within which a return counts; also the longest window
TRIAL_RETENTION: Final = 31.0 / 32.0  # discount of the statistics at each update


def return_probability(regret: DownscaleRegret, prior: float) -> float:
    """Return the probability that the load returns. prior: probability of such a growth."""
    return max(prior, (prior + regret.needed_again) / (1.0 + regret.trials))


def observed_return_share(regret: DownscaleRegret) -> float:
    """Return the observed part of the probability; standby replicas cover the prior's part."""
    return regret.needed_again / (1.0 + regret.trials)


def record_trials(
    regret: DownscaleRegret,
    ordered: int,
    ready: int,
    required: int,
    scale_down_target: int,
    minimum: int,
    startup_s: float,
    now_s: float,
) -> DownscaleRegret:
    """Return the statistics after one more observation of a tier with known demand.

    ordered, ready: replica counts. required: fewest replicas that carry the forecast. scale_down_target: count that is
    sufficient with the margin. minimum: lower bound; the last replica is no trial. startup_s: start-up time, s.
    """
    served = max(min(regret.served, ordered), min(required, ready))
    low = max(scale_down_target, minimum, 1)
    if not regret.idle and low >= served:  # the common case
        return regret if served == regret.served else regret._replace(served=served)
    idle, needed_again = _settle_needed_again(regret.idle, required, now_s)
    idle, expired, served = _settle_expired(idle, now_s - REGRET_STARTUPS * startup_s, served)
    if low < (idle[-1].replicas if idle else served):
        idle = [*(idle or [TimedReplicas(served, now_s)]), TimedReplicas(low, now_s)][-MAX_MARKS:]
    retention = TRIAL_RETENTION if needed_again or expired else 1.0
    return DownscaleRegret(
        tuple(idle),
        served,
        retention * regret.trials + needed_again + expired,
        retention * regret.needed_again + needed_again,
    )


def _settle_needed_again(
    idle: tuple[TimedReplicas, ...], required: int, now_s: float
) -> tuple[list[TimedReplicas], int]:
    """Return the counts that are still idle, and the number of replicas that are needed again."""
    remaining, needed_again = (
        [TimedReplicas(entry.replicas, min(entry.since_s, now_s)) for entry in idle],
        0,
    )  # the clock may have been set back
    while len(remaining) > 1 and remaining[-1].replicas < required:
        low = remaining.pop()
        reached = min(required, remaining[-1].replicas)
        needed_again += reached - low.replicas
        if reached < remaining[-1].replicas:
            remaining.append(TimedReplicas(reached, low.since_s))
    return (remaining if len(remaining) > 1 else []), needed_again


def _settle_expired(idle: list[TimedReplicas], expiry_s: float, served: int) -> tuple[list[TimedReplicas], int, int]:
    """Return the counts idle since `expiry_s` or later, the number of expired replicas, and `served` without them."""
    expired = 0
    while len(idle) > 1 and idle[1].since_s < expiry_s:
        expired += idle[0].replicas - idle[1].replicas
        served = min(served, idle[1].replicas)
        idle = idle[1:]
    return (idle if len(idle) > 1 else []), expired, served
