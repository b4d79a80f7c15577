"""`spec.tiers.*.pod`: placement, resources and volumes of a tier's pods.

The operator owns the engine container, so the overrides cover only what a platform needs to place an engine. Affinity,
spread and volumes are passed through; the API server validates them when the operator applies the Deployment.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field

from plimsoll.api import labels
from plimsoll.api.contract import engine_contract
from plimsoll.api.v1alpha1.api_model import (
    ApiModel,
    IntOrString,
    MapList,
    ValidationRule,
    ValidationRules,
    matching,
    none_of,
    not_matching,
    quote,
)
from plimsoll.core import units

# Names and mount paths of the volumes that the operator adds to every engine pod.
_PATHS = engine_contract().paths
RESERVED_VOLUMES: Final = ("scratch", "home", "shm", "model", "model-cache")
RESERVED_VOLUME_PREFIX: Final = "plimsoll-"
RESERVED_MOUNTS: Final = (
    *(_PATHS["scratch"], _PATHS["home"], f"{_PATHS['home']}/hf", _PATHS["models"], f"{_PATHS['models']}/claim"),
    "/dev/shm",
    *(_PATHS["adapters"], _PATHS["adapter_claims"], _PATHS["tls"]),
)

DEFAULT_SHARED_MEMORY: Final = "8Gi"

# Schemas of Kubernetes 1.36 for what is passed through, without descriptions, with bounds on sizes, and without the
# deprecated kinds of volumes. Unbounded fields would let one object end whatever reads it.
_POD_SCHEMAS: Final = json.loads((resources.files("plimsoll.api.v1alpha1") / "pod_schema.json").read_text())


def _add_properties(name: str) -> Callable[[dict[str, Any]], None]:
    """A hook that adds the fields of a Kubernetes schema to those that a model declares."""

    def add(schema: dict[str, Any]) -> None:
        schema["properties"] = {**_POD_SCHEMAS[name]["properties"], **schema["properties"]}

    return add


_DNS = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
DNS_SUBDOMAIN = f"^{_DNS}([.]{_DNS})*$"
_QUALIFIED_NAME = f"({_DNS}([.]{_DNS})*/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"

ObjectName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    ValidationRules(
        matching(DNS_SUBDOMAIN, "must be the name of a Kubernetes object: lower-case letters, digits, '-' and '.'")
    ),
]
LabelValue = Annotated[
    str,
    Field(max_length=63),
    ValidationRules(
        matching(
            "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$",
            "must be a label value: letters, digits, '-', '_' and '.', with a letter or digit at both ends",
        )
    ),
]

_LABEL_KEY = matching(f"^{_QUALIFIED_NAME}$", "")
_KEYS_ARE_QUALIFIED = ValidationRule[dict[str, Any]](
    f"self.all(key, key.size() <= 317 && key.matches({quote(f'^{_QUALIFIED_NAME}$')}))",
    "every key must be a name such as example.com/pool: optionally a domain and '/', then letters, digits, '-_.'",
    lambda found: all(len(key) <= 317 and _LABEL_KEY.holds is not None and _LABEL_KEY.holds(key) for key in found),
)
_RESERVED_LABELS = (labels.NAME, labels.INSTANCE, labels.COMPONENT, labels.MANAGED_BY)
_RESERVED_PREFIX = f"{labels.GROUP}/"
_NOT_RESERVED = ValidationRule[dict[str, Any]](
    f"self.all(key, !key.startsWith({quote(_RESERVED_PREFIX)}) && !(key in "
    f"[{', '.join(map(quote, _RESERVED_LABELS))}]))",
    f"keys that begin with {_RESERVED_PREFIX} and the keys {', '.join(_RESERVED_LABELS)} are set by Plimsoll",
    lambda found: not any(key.startswith(_RESERVED_PREFIX) or key in _RESERVED_LABELS for key in found),
    reason="FieldValueForbidden",
)

Quantity = Annotated[
    int | str,
    IntOrString(32, "500m, 4 or 64Gi"),
    ValidationRules(
        ValidationRule[int | str](
            "type(self) == int ? self >= 0 : isQuantity(self) && !self.startsWith('-')",
            "must be a non-negative quantity, such as 500m, 4 or 64Gi",
            lambda value: is_quantity(value) and not str(value).startswith("-"),
        )
    ),
]
ResourceAmounts = Annotated[
    dict[str, Quantity],
    Field(max_length=12),
    ValidationRules(
        ValidationRule[dict[str, Any]](
            "self.all(key, key in ['cpu', 'memory', 'ephemeral-storage'] || key.startsWith('hugepages-')"
            " || key.contains('/'))",
            "every key must be cpu, memory, ephemeral-storage, hugepages-SIZE or an extended resource such as"
            " example.com/nic",
            lambda found: all(map(is_resource_name, found)),
        )
    ),
]


def is_quantity(value: int | str) -> bool:
    """Whether a value is a valid quantity."""
    try:
        units.parse_quantity(value)
    except ValueError:
        return False
    return True


SizeLimit = Annotated[
    str,
    Field(max_length=32),
    ValidationRules(
        ValidationRule[str](
            "isQuantity(self) && quantity(self).compareTo(quantity('0')) > 0",
            "must be a quantity above zero, such as 64Gi",
            lambda text: is_quantity(text) and units.parse_quantity(text) > 0,
        )
    ),
]


def is_resource_name(key: str) -> bool:
    """Whether a key names a container resource."""
    return key in ("cpu", "memory", "ephemeral-storage") or key.startswith("hugepages-") or "/" in key


class SecretNameRef(ApiModel):
    """A Secret in the service's namespace."""

    name: ObjectName = Field(description="Name of the Secret.")


class Toleration(ApiModel):
    """Toleration of a node taint by the tier's pods."""

    key: str | None = Field(
        default=None, max_length=317, description="Key of the taint. Absent with Exists: every taint."
    )
    operator: Literal["Exists", "Equal"] = Field(default="Equal", description="Comparison with the value of the taint.")
    value: str | None = Field(default=None, max_length=63, description="Value of the taint, with operator Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect of the taint. Absent: every effect."
    )
    toleration_seconds: int | None = Field(
        default=None,
        description="With NoExecute, seconds that the pod stays after the taint was added. Absent: no limit.",
    )

    rules: ClassVar[tuple[ValidationRule[Toleration], ...]] = (
        ValidationRule(
            "(has(self.operator) && self.operator == 'Exists') || (has(self.key) && self.key != '')",
            "key is required with operator Equal; operator Exists without a key tolerates every taint",
            lambda own: own.operator == "Exists" or bool(own.key),
            field=".key",
            reason="FieldValueRequired",
        ),
        ValidationRule(
            "!has(self.operator) || self.operator == 'Equal' || !has(self.value) || self.value == ''",
            "value must be absent with operator Exists",
            lambda own: own.operator == "Equal" or not own.value,
            field=".value",
        ),
        ValidationRule(
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            "tolerationSeconds needs effect NoExecute",
            lambda own: own.toleration_seconds is None or own.effect == "NoExecute",
            field=".tolerationSeconds",
        ),
    )


# API servers up to 1.31 assume unbounded quantities when they estimate the cost of a rule, so few keys are compared.
_COMPARED_RESOURCES: Final = ("cpu", "memory", "ephemeral-storage")


_REQUESTS_FIT: Final = "a request must not exceed the limit of the same resource: lower the request or raise the limit"
_ABOVE_LIMIT: Final = (
    "key in self.requests && key in self.limits && quantity(string(self.requests[key])).isGreaterThan("
    "quantity(string(self.limits[key])))"
)


def _above_limit(own: ResourceRequirements) -> list[str]:
    """Return the resources whose request exceeds their limit."""
    return [
        key
        for key in _COMPARED_RESOURCES
        if key in own.requests
        and key in own.limits
        and units.parse_quantity(own.requests[key]) > units.parse_quantity(own.limits[key])
    ]


class ResourceRequirements(ApiModel):
    """CPU, memory and other resources of the engine container. GPUs are the tier's `gpus`."""

    requests: ResourceAmounts = Field(default={}, description="Resources that the scheduler reserves.")
    limits: ResourceAmounts = Field(default={}, description="Most resources that the container may use.")

    rules: ClassVar[tuple[ValidationRule[ResourceRequirements], ...]] = (
        ValidationRule(
            f"!has(self.requests) || !has(self.limits) || !{list(_COMPARED_RESOURCES)}.exists(key, {_ABOVE_LIMIT})",
            _REQUESTS_FIT,
            lambda own: not _above_limit(own),
            field=".requests",
            format_message=lambda own: f"{_REQUESTS_FIT} of {', '.join(_above_limit(own))}",
        ),
    )


_SOURCES: Final = tuple(sorted(_POD_SCHEMAS["volume"]["properties"]))


class Volume(ApiModel):
    """A pod volume; the API server validates its source when the operator applies the Deployment."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_add_properties("volume"))
    rules: ClassVar[tuple[ValidationRule[Volume], ...]] = (
        ValidationRule(
            f"[{', '.join(f'has(self.{source})' for source in _SOURCES)}].filter(has, has).size() == 1",
            f"needs exactly one source of {', '.join(_SOURCES)}; Kubernetes' deprecated kinds are not supported",
            lambda own: len((own.model_extra or {}).keys() & set(_SOURCES)) == 1,
        ),
    )

    name: Annotated[
        str,
        Field(min_length=1, max_length=63),
        ValidationRules(
            matching(f"^{_DNS}$", "must be a volume name: lower-case letters, digits and '-'"),
            none_of(RESERVED_VOLUMES, f"is reserved for Plimsoll's volumes ({', '.join(RESERVED_VOLUMES)})"),
            not_matching(
                f"^{RESERVED_VOLUME_PREFIX}",
                f"is reserved: names that begin with {RESERVED_VOLUME_PREFIX} are Plimsoll's",
            ),
        ),
    ] = Field(description="Name that volumeMounts refers to.")


class VolumeMount(ApiModel):
    """Mount of a volume in the engine container."""

    name: str = Field(min_length=1, max_length=63, description="Name of one of the tier's volumes.")
    mount_path: Annotated[
        str,
        Field(max_length=512),
        ValidationRules(
            matching("^/[^:]*$", "must be an absolute path without ':'"),
            none_of(
                RESERVED_MOUNTS,
                f"is reserved for Plimsoll's mounts ({', '.join(RESERVED_MOUNTS)}); use a path below it or elsewhere",
            ),
        ),
    ] = Field(description="Absolute path in the container.")
    sub_path: (
        Annotated[
            str,
            Field(max_length=512),
            ValidationRules(
                matching("^[^/]", "must be a relative path"),
                not_matching("(^|/)[.][.](/|$)", "must not contain '..'"),
            ),
        ]
        | None
    ) = Field(default=None, description="Directory of the volume to mount. Absent: the root of the volume.")
    read_only: bool = Field(default=False, description="Whether the mount is read-only.")
    mount_propagation: Literal["None", "HostToContainer", "Bidirectional"] | None = Field(
        default=None, description="Propagation of later mounts between host and container."
    )


class TopologySpreadConstraint(ApiModel):
    """A topology spread constraint; the API server validates other fields when the operator applies the Deployment."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_add_properties("topologySpreadConstraint"))

    max_skew: int = Field(default=1, ge=1, description="Largest difference of the number of pods in two domains.")
    topology_key: str = Field(
        min_length=1, max_length=317, description="Label of nodes whose values are the domains, such as a zone's."
    )
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = Field(
        default="ScheduleAnyway", description="Whether a pod waits that would exceed maxSkew."
    )
    label_selector: dict[str, Any] | None = Field(
        default=None,
        json_schema_extra=_POD_SCHEMAS["labelSelector"],
        description="Pods that are counted. Absent: the tier's pods.",
    )


class PodOverrides(ApiModel):
    """Overrides of the tier's pods."""

    node_selector: Annotated[dict[str, LabelValue], Field(max_length=32), ValidationRules(_KEYS_ARE_QUALIFIED)] = Field(
        default={}, description="Labels that a node must have."
    )
    tolerations: tuple[Toleration, ...] = Field(
        default=(),
        max_length=32,
        strict=False,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Tolerations in addition to the one for the tier's GPUs.",
    )
    affinity: dict[str, Any] | None = Field(
        default=None,
        json_schema_extra=_POD_SCHEMAS["affinity"],
        description="Affinity as in a pod. The API server validates it when the operator applies the Deployment.",
    )
    topology_spread_constraints: tuple[TopologySpreadConstraint, ...] | None = Field(
        default=None,
        max_length=8,
        strict=False,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="How to spread the tier's pods. Absent: over nodes and, for serve, over zones, where possible. "
        "An empty list: not at all.",
    )
    runtime_class_name: ObjectName | None = Field(
        default=None, description="RuntimeClass. Absent: the chart's default."
    )
    priority_class_name: ObjectName | None = Field(
        default=None, description="PriorityClass. Absent: the cluster's default."
    )
    scheduler_name: ObjectName | None = Field(default=None, description="Scheduler. Absent: the cluster's default.")
    image_pull_secrets: Annotated[tuple[SecretNameRef, ...], Field(max_length=16, strict=False), MapList()] = Field(
        default=(), description="Pull secrets of the engine image, in addition to the chart's."
    )
    service_account_name: ObjectName | None = Field(
        default=None,
        description="ServiceAccount of the engines. Absent: one without permissions, which the operator creates.",
    )
    annotations: Annotated[
        dict[str, Annotated[str, Field(max_length=16384)]],
        Field(max_length=64),
        ValidationRules(_KEYS_ARE_QUALIFIED, _NOT_RESERVED),
    ] = Field(default={}, description="Annotations to add to the pods.")
    labels: Annotated[
        dict[str, LabelValue], Field(max_length=64), ValidationRules(_KEYS_ARE_QUALIFIED, _NOT_RESERVED)
    ] = Field(default={}, description="Labels to add to the pods.")
    resources: ResourceRequirements = Field(
        default=ResourceRequirements(),
        description="Resources of the engine container. Absent keys: the chart's defaults.",
    )
    shared_memory: SizeLimit | None = Field(
        default=None,
        description=f"Size limit of /dev/shm, which counts towards the memory limit. Absent: {DEFAULT_SHARED_MEMORY}.",
    )
    ipc_lock: bool = Field(
        default=False,
        description="Whether the engine has the capability IPC_LOCK, with which RDMA drivers pin memory, "
        "in an image that runs as root or gives its program the capability. The namespace and the chart's "
        "serviceLimits.ipcLock must admit it.",
    )
    volumes: Annotated[tuple[Volume, ...], Field(max_length=32, strict=False), MapList()] = Field(
        default=(), description="Volumes to add to the pods."
    )
    volume_mounts: Annotated[tuple[VolumeMount, ...], Field(max_length=32, strict=False), MapList(("mountPath",))] = (
        Field(default=(), description="Mounts of these volumes in the engine container.")
    )

    rules: ClassVar[tuple[ValidationRule[PodOverrides], ...]] = (
        ValidationRule(
            "!has(self.volumeMounts) || self.volumeMounts.all(mount, has(self.volumes) &&"
            " self.volumes.exists(volume, volume.name == mount.name))",
            "every volumeMount must name one of pod.volumes",
            lambda own: {mount.name for mount in own.volume_mounts} <= {volume.name for volume in own.volumes},
            field=".volumeMounts",
        ),
    )
