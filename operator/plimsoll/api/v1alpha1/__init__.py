"""The API, version v1alpha1: the models are the only source; the CRD and its reference page are generated from them."""

from plimsoll.api.v1alpha1.admission import Admission, Fallback, RequestClass, Tenant, WhenFull
from plimsoll.api.v1alpha1.cost import Cost
from plimsoll.api.v1alpha1.engine import Engine, EnvSource, EnvVar, KeyRef
from plimsoll.api.v1alpha1.model import Cache, ModelSource, SecretRef
from plimsoll.api.v1alpha1.pod import LocalRef, Pod, ResourceRequirements, Toleration, Volume, VolumeMount
from plimsoll.api.v1alpha1.scaling import RateLimit, RatioBounds, Scaling
from plimsoll.api.v1alpha1.scaling_status import (
    CostStatus,
    DecisionStatus,
    MetStatus,
    SloStatus,
    TierChangesStatus,
    TierChangeStatus,
)
from plimsoll.api.v1alpha1.schedule import ScheduleEntry
from plimsoll.api.v1alpha1.service import InferenceService, Meta, Spec, parse
from plimsoll.api.v1alpha1.slo import Slo, Targets
from plimsoll.api.v1alpha1.status import KEPT_DECISIONS, ConditionStatus, FormerNameStatus, Status
from plimsoll.api.v1alpha1.tier_status import (
    ColdStartsStatus,
    ColdStartStatus,
    LatencyStatus,
    PhaseStatus,
    StartupStatus,
    TiersStatus,
    TierStatus,
)
from plimsoll.api.v1alpha1.tiers import ROLES, Role, Rollout, Tier, Tiers

__all__ = [
    "KEPT_DECISIONS",
    "ROLES",
    "Admission",
    "Cache",
    "ColdStartStatus",
    "ColdStartsStatus",
    "ConditionStatus",
    "Cost",
    "CostStatus",
    "DecisionStatus",
    "Engine",
    "EnvSource",
    "EnvVar",
    "Fallback",
    "FormerNameStatus",
    "InferenceService",
    "KeyRef",
    "LatencyStatus",
    "LocalRef",
    "MetStatus",
    "Meta",
    "ModelSource",
    "PhaseStatus",
    "Pod",
    "RateLimit",
    "RatioBounds",
    "RequestClass",
    "ResourceRequirements",
    "Role",
    "Rollout",
    "Scaling",
    "ScheduleEntry",
    "SecretRef",
    "Slo",
    "SloStatus",
    "Spec",
    "StartupStatus",
    "Status",
    "Targets",
    "Tenant",
    "Tier",
    "TierChangeStatus",
    "TierChangesStatus",
    "TierStatus",
    "Tiers",
    "TiersStatus",
    "Toleration",
    "Volume",
    "VolumeMount",
    "WhenFull",
    "parse",
]
