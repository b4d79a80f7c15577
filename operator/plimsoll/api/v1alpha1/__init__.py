"""The API, version v1alpha1: the models are the only source; the CRD and its reference page are generated from them."""

from plimsoll.api.v1alpha1.adapters import AdapterSpec, LoraSpec
from plimsoll.api.v1alpha1.admission import AdmissionSpec, FallbackRef, RequestClass, Tenant, WhenFull
from plimsoll.api.v1alpha1.admission_limits import InferenceServiceAdmission
from plimsoll.api.v1alpha1.checkpoint import MAX_STATE_CHARS, InferenceServiceCheckpoint, LearnedState
from plimsoll.api.v1alpha1.cost import CostSpec
from plimsoll.api.v1alpha1.engine import EngineSpec, EnvSource, EnvVar, KeyRef
from plimsoll.api.v1alpha1.model import CacheSpec, ModelSource, SecretRef
from plimsoll.api.v1alpha1.pod_overrides import (
    PodOverrides,
    ResourceRequirements,
    SecretNameRef,
    Toleration,
    Volume,
    VolumeMount,
)
from plimsoll.api.v1alpha1.request_limits import RequestLimitsSpec
from plimsoll.api.v1alpha1.scaling import RateLimitSpec, RatioBounds, ScalingOptions
from plimsoll.api.v1alpha1.scaling_status import (
    CostStatus,
    SloStatus,
)
from plimsoll.api.v1alpha1.schedule import ScheduleEntry
from plimsoll.api.v1alpha1.service import InferenceService, InferenceServiceSpec, ObjectMeta, parse
from plimsoll.api.v1alpha1.slo import LatencyTargets, SloSpec
from plimsoll.api.v1alpha1.status import AdapterStatus, ConditionStatus, InferenceServiceStatus
from plimsoll.api.v1alpha1.targets import EngineTarget, EngineTargets, ScaleTargetRef
from plimsoll.api.v1alpha1.tier_status import (
    TiersStatus,
    TierStatus,
)
from plimsoll.api.v1alpha1.tiers import (
    DEFAULT_GPU_RESOURCE,
    ROLES,
    UNKNOWN_GPU_RESOURCE,
    EngineTier,
    EngineTiers,
    RoleName,
    RolloutSpec,
)

__all__ = [
    "DEFAULT_GPU_RESOURCE",
    "MAX_STATE_CHARS",
    "ROLES",
    "UNKNOWN_GPU_RESOURCE",
    "AdapterSpec",
    "AdapterStatus",
    "AdmissionSpec",
    "CacheSpec",
    "ConditionStatus",
    "CostSpec",
    "CostStatus",
    "EngineSpec",
    "EngineTarget",
    "EngineTargets",
    "EngineTier",
    "EngineTiers",
    "EnvSource",
    "EnvVar",
    "FallbackRef",
    "InferenceService",
    "InferenceServiceAdmission",
    "InferenceServiceCheckpoint",
    "InferenceServiceSpec",
    "InferenceServiceStatus",
    "KeyRef",
    "LatencyTargets",
    "LearnedState",
    "LoraSpec",
    "ModelSource",
    "ObjectMeta",
    "PodOverrides",
    "RateLimitSpec",
    "RatioBounds",
    "RequestClass",
    "RequestLimitsSpec",
    "ResourceRequirements",
    "RoleName",
    "RolloutSpec",
    "ScaleTargetRef",
    "ScalingOptions",
    "ScheduleEntry",
    "SecretNameRef",
    "SecretRef",
    "SloSpec",
    "SloStatus",
    "Tenant",
    "TierStatus",
    "TiersStatus",
    "Toleration",
    "Volume",
    "VolumeMount",
    "WhenFull",
    "parse",
]
