"""A status in which every field says something."""

from __future__ import annotations

from plimsoll.api.v1alpha1 import (
    ConditionStatus,
    CostStatus,
    InferenceServiceStatus,
    SloStatus,
    TiersStatus,
    TierStatus,
)

TIER = TierStatus(
    needed=4,
    summary="2/3",
    capacity_per_replica="9.1 req/s, 71% used",
)
STATUS = InferenceServiceStatus(
    observed_generation=2,
    url="http://gateway/v1",
    model_names=("chat", "old"),
    former_names=("old until 2026-01-01T00:00:00Z",),
    conditions=(
        ConditionStatus(
            type="Ready",
            status="True",
            reason="Serving",
            message="m",
            last_transition_time="2026-01-01T00:00:00Z",
        ),
    ),
    tiers=TiersStatus(prefill=TIER, decode=TIER, serve=TIER),
    slo=SloStatus(
        ttft="412ms",
        tpot="38ms",
        attainment="97%",
        attainment_including_rejected="95%",
        unavailable_reason="TPOT is not known: the engines do not tell",
        offered="41.2 req/s",
        e2e="9.4s",
        itl="31ms",
    ),
    limited_by="decode TPOT",
    recovery="21s",
    cost=CostStatus(per_hour="12.50 USD", per_million_tokens="0.0731 USD", per_successful_request="0.000731 USD"),
)
