"""The API, version v1alpha1: the models are the only source; the CRD and its reference page are generated from them."""

from plimsoll.api.v1alpha1.engine import Engine, EnvSource, EnvVar, KeyRef
from plimsoll.api.v1alpha1.model import Cache, ModelSource, SecretRef
from plimsoll.api.v1alpha1.pod import LocalRef, Pod, ResourceRequirements, Toleration, Volume, VolumeMount
from plimsoll.api.v1alpha1.service import InferenceService, Meta, Spec, parse
from plimsoll.api.v1alpha1.slo import Slo
from plimsoll.api.v1alpha1.status import ConditionStatus, Status, TiersStatus, TierStatus
from plimsoll.api.v1alpha1.tiers import ROLES, Role, Rollout, Tier, Tiers

__all__ = [
    "ROLES",
    "Cache",
    "ConditionStatus",
    "Engine",
    "EnvSource",
    "EnvVar",
    "InferenceService",
    "KeyRef",
    "LocalRef",
    "Meta",
    "ModelSource",
    "Pod",
    "ResourceRequirements",
    "Role",
    "Rollout",
    "SecretRef",
    "Slo",
    "Spec",
    "Status",
    "Tier",
    "TierStatus",
    "Tiers",
    "TiersStatus",
    "Toleration",
    "Volume",
    "VolumeMount",
    "parse",
]
