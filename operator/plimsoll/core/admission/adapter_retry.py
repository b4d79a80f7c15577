"""When a client should come back whose adapter found no place at any engine."""

from __future__ import annotations

import math

from plimsoll.core.admission.placement import ReplicaPool
from plimsoll.core.admission.retry_advice import RetryAdvice, advise_retry


def advise_adapter_retry(pool: ReplicaPool, adapter: str, now: float) -> RetryAdvice:
    """Returns the advice for the client, and lets the adapter wait until then.

    The place is free when the last response of its holder ends. Of several responses the longest counts, so a long one
    is expected, and a mean one if those that run are longer already. Without a claim, the end of the holder's turn
    comes first.
    """
    model = pool.cost_model
    longest = model.output_quantiles[-1] if model.output_quantiles else model.output_mean
    claim = pool.adapters.claim_of(adapter)
    if claim is None:
        free_s = max(now, pool.adapters.next_turn_s(adapter)) + longest * pool.min_step_s
    else:
        replica = pool.replicas[claim.address]
        holding = [running for running in replica.running.values() if running.adapter == claim.holder]
        outputs = (min(longest, running.cost.max_output_tokens) for running in holding)
        ends_s = (one.admitted_s + tokens * replica.step_s for one, tokens in zip(holding, outputs, strict=True))
        free_s = max(now + model.output_mean * replica.step_s, max(ends_s, default=now))
    advice = advise_retry(max(0.0, free_s - now), sdk_limit_s=math.inf)
    pool.adapters.wait(adapter, now + (advice.retry_after_s or 0), now)
    return advice
