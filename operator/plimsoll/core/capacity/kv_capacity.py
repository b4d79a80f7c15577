"""KV capacity: how many sequences fit into the KV cache of a replica."""

from __future__ import annotations

import math
from typing import Final

from plimsoll.core.workload import Workload

KV_Z_SCORE: Final = 2.326  # normal quantile of 99 %, for the tokens of all residents of a replica together
SYNCHRONIZED_KV_LOSS: Final = (
    0.08  # measured at the SLO capacity of two shapes, step by step (docs/design/0007-admission.md)
)
DESYNCHRONIZED_CV: Final = 0.3  # coefficient of variation of outputs from which on this loss hardly occurred


def kv_sequences(workload: Workload, kv_tokens: int, gateways: int = 1) -> float:
    """Sequences whose tokens rarely exceed the KV cache, with a share of the cache for each gateway.

    Running sequences are found in proportion to their stay, at a uniform point of it: their tokens lie evenly between
    P, the prompt, and P + L, with L the output. They are independent, and their mean and variance must fit. Outputs of
    equal length are not independent: sequences that arrived together stay together, which costs SYNCHRONIZED_KV_LOSS of
    the number. The result is at least what fits with each at its end, which can be more for few sequences of very
    unequal lengths.
    """
    prompt, output, gateway_tokens = workload.prompt_tokens, workload.output_tokens, kv_tokens / gateways
    mean_steps = workload.mean(output)
    mean_tokens = resident_tokens(workload)
    mean_square = workload.mean(output * (prompt**2 + prompt * output + output**2 / 3)) / mean_steps
    spread = KV_Z_SCORE * math.sqrt(max(0.0, mean_square - mean_tokens**2))
    root = (math.sqrt(spread**2 + 4 * mean_tokens * gateway_tokens) - spread) / (2 * mean_tokens)
    uniformity = max(0.0, 1.0 - math.sqrt(workload.scv(output) or 0.0) / DESYNCHRONIZED_CV)
    return max((1.0 - SYNCHRONIZED_KV_LOSS * uniformity) * gateways * root**2, kv_sequences_at_end(workload, kv_tokens))


def resident_tokens(workload: Workload) -> float:
    """Mean tokens of a running sequence: sequences are found in proportion to their stay."""
    prompt, output = workload.prompt_tokens, workload.output_tokens
    return workload.mean(output * (prompt + output / 2)) / workload.mean(output)


def kv_sequences_at_end(workload: Workload, kv_tokens: int) -> float:
    """Sequences that the KV cache holds with room for the final tokens of each."""
    return (
        kv_tokens
        * workload.mean(workload.output_tokens)
        / workload.mean(workload.output_tokens * (workload.prompt_tokens + workload.output_tokens))
    )
