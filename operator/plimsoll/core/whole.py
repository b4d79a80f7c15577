"""What the promise of a whole answer leaves for each of its tokens.

Problem: the time of an answer depends on its length, which nobody knows when the request is let in, and replicas can be
counted by the pace of tokens alone.

Idea: the promise is over many requests, and how their lengths are spread is known. An answer takes TTFT + (n - 1) TPOT;
with n the promised quantile of the output lengths, and the TTFT that is promised or predicted, the rest is a target for
TPOT. As long as lengths and paces have nothing to do with each other, more answers come in time than are promised: the
product of two quantiles lies above the quantile of the product. A request that is longer than n may miss.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from plimsoll.core.slo import Slo
from plimsoll.core.workload import FloatArray, Workload

# Steps in the time of an answer that are left for its first token to be waited for, where no TTFT says how long that
# may be: two are certain, the rest is for other prompts' prefills and for slots. With 12 to 24 a replica carries within
# 4 % of the most, with 3 of one tier a fifth to a half of it (e2e of 4 to 60 s, answers of 200 to 1,000 tokens).
WAITED_STEPS: Final = 12.0


def pace_s(slo: Slo, workload: Workload, own_s: FloatArray, base_s: float) -> float:
    """TPOT that keeps `slo.e2e_s`, s; 0 where nothing is left for it, infinity without such a target.

    own_s: of each row of the workload, what its first token takes beside waiting for steps. base_s: of an empty step.
    Where no TTFT is promised, it is predicted for steps as long as this pace: E = own + w T - base + (n - 1) T.
    """
    if slo.e2e_s is None:
        return np.inf
    fixed_s, tokens = _parts(slo, workload, own_s, base_s)
    if tokens <= 0.0:  # every answer is one token
        return np.inf if slo.e2e_s >= fixed_s else 0.0
    return max(0.0, (slo.e2e_s - fixed_s) / tokens)


def whole_s(slo: Slo, workload: Workload, own_s: FloatArray, base_s: float, tpot_s: float) -> float:
    """The e2e target that leaves so much for each token, s: the inverse of `pace_s`; TTFT as `slo` has it."""
    fixed_s, tokens = _parts(slo, workload, own_s, base_s)
    return fixed_s + tokens * tpot_s


def first_s(slo: Slo, workload: Workload, tpot_s: float) -> float:
    """When the first token must be there, s after the request, for an answer of n tokens at this pace to be whole in
    time; infinity without `slo.e2e_s`."""
    return np.inf if slo.e2e_s is None else slo.e2e_s - (_tokens(slo, workload) - 1.0) * tpot_s


def _parts(slo: Slo, workload: Workload, own_s: FloatArray, base_s: float) -> tuple[float, float]:
    """What an answer takes whatever the pace, s, and the tokens that it takes the pace for."""
    after = _tokens(slo, workload) - 1.0
    if slo.ttft_s is not None:
        return float(slo.ttft_targets_s(workload.mean(workload.prompt_tokens))), after
    return float(workload.quantile(own_s, slo.share)) - base_s, after + WAITED_STEPS


def _tokens(slo: Slo, workload: Workload) -> float:
    """n, at least 1."""
    return max(1.0, float(workload.quantile(workload.output_tokens, slo.share)))
