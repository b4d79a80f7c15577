"""A status in which every field says something."""

from __future__ import annotations

from plimsoll.api.v1alpha1 import (
    ColdStartsStatus,
    ColdStartStatus,
    ConditionStatus,
    CostStatus,
    DecisionStatus,
    FormerNameStatus,
    InferenceServiceStatus,
    SloStatus,
    StartupStatus,
    StepTimeStatus,
    TargetAttainmentStatus,
    TierChangesStatus,
    TierChangeStatus,
    TiersStatus,
    TierStatus,
)

TIER = TierStatus(
    replicas=3,
    ready=2,
    desired=3,
    needed=4,
    summary="2/3",
    revision="abc",
    selector="a=b",
    utilization="71%",
    capacity_per_replica="9.1 req/s",
    model=StepTimeStatus(
        base_seconds="0.0072", work_seconds="0.109", calibrated=True, summary="measured over 4,100 requests"
    ),
    startup=StartupStatus(p50="41s", p90="63s"),
)
STARTS = ColdStartStatus(phases="schedule 1s to 3s, load 20s to 31s")
CHANGE = TierChangeStatus(from_=3, to=5, why="forecast 41 req/s in 95 s needs 5 (knee 9.1 req/s each)")
CHANGES = TierChangesStatus(prefill=CHANGE, decode=CHANGE, serve=CHANGE)
DECISION = DecisionStatus(time="2026-01-01T00:00:00Z", tiers=CHANGES, binding="decode")
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
            observed_generation=2,
        ),
    ),
    tiers=TiersStatus(prefill=TIER, decode=TIER, serve=TIER),
    slo=SloStatus(
        ttft="412ms",
        tpot="38ms",
        attainment_by_target=TargetAttainmentStatus(ttft="99%", tpot="98%", e2e="98%"),
        attainment="97%",
        attainment_including_rejected="95%",
        unavailable_reason="TPOT is not known: the engines do not tell",
        offered="41.2 req/s",
        window="1m",
        e2e="9.4s",
        itl="31ms",
    ),
    limited_by="decode TPOT",
    cold_start=ColdStartsStatus(prefill=STARTS, decode=STARTS, serve=STARTS),
    last_decision=DECISION,
    decisions=(DECISION,) * 2,
    cost=CostStatus(per_hour="12.50 USD", per_million_tokens="0.0731 USD"),
)
