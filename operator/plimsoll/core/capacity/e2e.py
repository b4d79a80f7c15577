"""End-to-end latency target: the TPOT target that it implies.

Problem: the end-to-end latency of a response depends on its length, which is unknown at admission. Replicas can be
sized by TPOT alone.

Idea: the SLO covers many requests, and the distribution of their lengths is known. A response takes TTFT + (n - 1)
TPOT. With n the SLO quantile of the output lengths, and the target or predicted TTFT, the rest gives a target for TPOT.
While lengths and TPOT are independent, more responses meet the target than the SLO requires, because the product of two
quantiles lies above the quantile of the product. A request longer than n may miss.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from plimsoll.core.slo import Slo
from plimsoll.core.workload import FloatArray, Workload

# Steps of the end-to-end time that are left for the wait for the first token, where no TTFT target limits that wait.
# Two are certain; the rest is for other prompts' prefills and for slots. With 12 to 24, a replica carries within
# 4 % of the maximum; with 3, one tier carries a fifth to a half of it (e2e of 4 to 60 s, 200 to 1,000 output tokens).
QUEUEING_STEPS: Final = 12.0


def tpot_for_e2e_s(slo: Slo, workload: Workload, ttft_without_wait_s: FloatArray, base_s: float) -> float:
    """TPOT that meets `slo.e2e_s`, seconds; 0 where no time is left for it, infinity without such a target.

    ttft_without_wait_s: by row of the workload, the TTFT without waiting for steps. base_s: time of an empty step.
    Without a TTFT target, TTFT is predicted for steps as long as this TPOT: E = own + w T - base + (n - 1) T, with own
    the TTFT without waiting.
    """
    if slo.e2e_s is None:
        return np.inf
    fixed_s, tokens = _fixed_and_tokens(slo, workload, ttft_without_wait_s, base_s)
    if tokens <= 0.0:  # every output is one token
        return np.inf if slo.e2e_s >= fixed_s else 0.0
    return max(0.0, (slo.e2e_s - fixed_s) / tokens)


def e2e_for_tpot_s(
    slo: Slo, workload: Workload, ttft_without_wait_s: FloatArray, base_s: float, tpot_s: float
) -> float:
    """The e2e target, in seconds, that leaves `tpot_s` for each token: the inverse of `tpot_for_e2e_s`."""
    fixed_s, tokens = _fixed_and_tokens(slo, workload, ttft_without_wait_s, base_s)
    return fixed_s + tokens * tpot_s


def first_token_deadline_s(slo: Slo, workload: Workload, tpot_s: float) -> float:
    """Deadline of the first token, seconds after the request, for a response at this TPOT to meet `slo.e2e_s`.

    Infinity without `slo.e2e_s`.
    """
    return np.inf if slo.e2e_s is None else slo.e2e_s - (_output_quantile(slo, workload) - 1.0) * tpot_s


def _fixed_and_tokens(
    slo: Slo, workload: Workload, ttft_without_wait_s: FloatArray, base_s: float
) -> tuple[float, float]:
    """The part of a response's time that does not depend on TPOT, in seconds, and the tokens that take TPOT each."""
    later_tokens = _output_quantile(slo, workload) - 1.0
    if slo.ttft_s is not None:
        return float(slo.ttft_targets_s(workload.mean(workload.prompt_tokens))), later_tokens
    return float(workload.quantile(ttft_without_wait_s, slo.share)) - base_s, later_tokens + QUEUEING_STEPS


def _output_quantile(slo: Slo, workload: Workload) -> float:
    """SLO quantile n of the output tokens, at least 1."""
    return max(1.0, float(workload.quantile(workload.output_tokens, slo.share)))
