"""Requests seen, by clients or by a simulator, as the figures that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plimsoll.core.slo import Slo


@dataclass(frozen=True)
class Seen:
    """One request: when it was sent, its output tokens, and what came of it; None where there is no such time."""

    sent_s: float
    output: int
    ttft_s: float | None
    tpot_s: float | None
    longest_gap_s: float | None
    ok: bool


def kept(one: Seen, slo: Slo) -> bool:
    """Whether a request met all targets together; one of a single token has no TPOT to miss."""
    in_time = one.ttft_s is not None and (slo.ttft_s is None or one.ttft_s <= slo.ttft_s)
    even = slo.tpot_s is None or one.output < 2 or (one.tpot_s is not None and one.tpot_s <= slo.tpot_s)
    return one.ok and in_time and even


def summary(seen: Sequence[Seen], slo: Slo, seconds: float) -> dict[str, Any]:
    """Share in promise over all that were sent, goodput, and quantiles over those that have the time."""
    met = sum(kept(one, slo) for one in seen)
    first = [one.ttft_s for one in seen if one.ttft_s is not None]
    each = [one.tpot_s for one in seen if one.ok and one.tpot_s is not None and one.output > 1]
    return {
        "sent": len(seen),
        "rate_rps": len(seen) / seconds,
        "ok": sum(one.ok for one in seen),
        "in_promise": met / len(seen) if seen else None,
        "goodput_rps": met / seconds,
        "ttft_s": _quantiles(first),
        "tpot_s": _quantiles(each),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{share}": float(np.percentile(values, share)) for share in (50, 95, 99)} if values else {}


def shown(quantiles: Mapping[str, float]) -> str:
    """Median and 95th percentile of seconds in milliseconds, for a table."""
    return f"{milliseconds(quantiles.get('p50'))} / {milliseconds(quantiles.get('p95'))}"


def milliseconds(seconds: float | None) -> str:
    """To three digits or so; "-" for None."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"
