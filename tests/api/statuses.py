"""A status in which every field says something."""

from __future__ import annotations

from plimsoll.api.v1alpha1 import (
    ConditionStatus,
    CostStatus,
    DecisionStatus,
    FormerNameStatus,
    InferenceServiceStatus,
    SloStatus,
    TiersStatus,
    TierStatus,
)

TIER = TierStatus(
    ready=2,
    desired=3,
    needed=4,
    summary="2/3",
    utilization="71%",
    capacity_per_replica="9.1 req/s",
    startup_p50="41s",
    restart_p50="21s",
)
CHANGE = "3 -> 5: forecast 41 req/s in 95 s needs 5 (SLO capacity 9.1 req/s each)"
DECISION = DecisionStatus(time="2026-01-01T00:00:00Z", prefill=CHANGE, decode=CHANGE, serve=CHANGE)
STATUS = InferenceServiceStatus(
    observed_generation=2,
    url="http://gateway/v1",
    model_names=("chat", "old"),
    former_model_names=(FormerNameStatus(name="old", until="2026-01-01T00:00:00Z"),),
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
    last_decision=DECISION,
    cost=CostStatus(per_hour="12.50 USD", per_million_tokens="0.0731 USD"),
)
