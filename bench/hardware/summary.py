"""Summary of requests, observed by clients or by a simulator, for comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plimsoll.core.slo import Slo


@dataclass(frozen=True)
class ObservedRequest:
    """One request: when it was sent, its output tokens, and what came of it; None where there is no such time."""

    sent_s: float
    output: int
    ttft_s: float | None
    tpot_s: float | None
    max_itl_s: float | None
    ok: bool


def within_slo(request: ObservedRequest, slo: Slo) -> bool:
    """Whether a request met all targets together; one of a single token has no TPOT to miss."""
    in_time = request.ttft_s is not None and (slo.ttft_s is None or request.ttft_s <= slo.ttft_s)
    tpot_met = slo.tpot_s is None or request.output < 2 or (request.tpot_s is not None and request.tpot_s <= slo.tpot_s)
    return request.ok and in_time and tpot_met


def summary(requests: Sequence[ObservedRequest], slo: Slo, seconds: float) -> dict[str, Any]:
    """Share in promise over all that were sent, goodput, and quantiles over those that have the time."""
    within = sum(within_slo(request, slo) for request in requests)
    first = [request.ttft_s for request in requests if request.ttft_s is not None]
    each = [request.tpot_s for request in requests if request.ok and request.tpot_s is not None and request.output > 1]
    return {
        "sent": len(requests),
        "rate_rps": len(requests) / seconds,
        "ok": sum(request.ok for request in requests),
        "in_promise": within / len(requests) if requests else None,
        "goodput_rps": within / seconds,
        "ttft_s": _quantiles(first),
        "tpot_s": _quantiles(each),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{share}": float(np.percentile(values, share)) for share in (50, 95, 99)} if values else {}


def format_ms(quantiles: Mapping[str, float]) -> str:
    """Median and 95th percentile of seconds in milliseconds, for a table."""
    return f"{milliseconds(quantiles.get('p50'))} / {milliseconds(quantiles.get('p95'))}"


def milliseconds(seconds: float | None) -> str:
    """To three digits or so; "-" for None."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"
