"""Overrides of a tier's pods: where they run and what is mounted.

Only what a platform needs to place an engine; the engine's own container is the operator's. What Kubernetes defines
deeply (affinity, volumes) is passed through, and the API server judges it when the Deployment is applied.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field

from plimsoll.api import labels
from plimsoll.api.contract import contract
from plimsoll.api.v1alpha1.base import IntOrString, Keyed, Model, Rule, Rules, matching, none_of, quote, refusing
from plimsoll.core import units

# What every engine pod has of its own: the names and places of the operator's volumes.
_PATHS = contract().paths
OWN_VOLUMES: Final = ("scratch", "home", "shm", "model", "model-cache")
OWN_MOUNTS: Final = (
    *(_PATHS["scratch"], _PATHS["home"], f"{_PATHS['home']}/hf", _PATHS["models"], f"{_PATHS['models']}/claim"),
    "/dev/shm",
)

_DNS = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
DNS_SUBDOMAIN = f"^{_DNS}([.]{_DNS})*$"
_QUALIFIED = f"({_DNS}([.]{_DNS})*/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"

ObjectName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Rules(matching(DNS_SUBDOMAIN, "must be the name of a Kubernetes object: lower-case letters, digits, '-' and '.'")),
]
LabelValue = Annotated[
    str,
    Field(max_length=63),
    Rules(
        matching(
            "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$",
            "must be a label value: letters, digits, '-', '_' and '.', beginning and ending with a letter or digit",
        )
    ),
]

_LABEL_KEY = matching(f"^{_QUALIFIED}$", "")
_KEYS_ARE_QUALIFIED = Rule[dict[str, Any]](
    f"self.all(key, key.size() <= 317 && key.matches({quote(f'^{_QUALIFIED}$')}))",
    "every key must be a name such as example.com/pool: optionally a domain and '/', then letters, digits, '-_.'",
    lambda found: all(len(key) <= 317 and _LABEL_KEY.holds is not None and _LABEL_KEY.holds(key) for key in found),
)
_OWN_LABELS = (labels.NAME, labels.INSTANCE, labels.COMPONENT, labels.MANAGED_BY)
_OWN_PREFIX = f"{labels.GROUP}/"
_NOT_OURS = Rule[dict[str, Any]](
    f"self.all(key, !key.startsWith({quote(_OWN_PREFIX)}) && !(key in [{', '.join(map(quote, _OWN_LABELS))}]))",
    f"keys that begin with {_OWN_PREFIX}, and {', '.join(_OWN_LABELS)}, are set by Plimsoll",
    lambda found: not any(key.startswith(_OWN_PREFIX) or key in _OWN_LABELS for key in found),
    reason="FieldValueForbidden",
)

Quantity = Annotated[
    int | str,
    IntOrString(32, "500m, 4 or 64Gi"),
    Rules(
        Rule[int | str](
            "type(self) == int ? self >= 0 : isQuantity(self) && !self.startsWith('-')",
            "must be a quantity that is not negative, such as 500m, 4 or 64Gi",
            lambda value: is_quantity(value) and not str(value).startswith("-"),
        )
    ),
]
Resources = Annotated[
    dict[str, Quantity],
    Field(max_length=12),
    Rules(
        Rule[dict[str, Any]](
            "self.all(key, key in ['cpu', 'memory', 'ephemeral-storage'] || key.startsWith('hugepages-')"
            " || key.contains('/'))",
            "every key must be cpu, memory, ephemeral-storage, hugepages-SIZE or an extended resource such as"
            " example.com/nic",
            lambda found: all(map(is_resource, found)),
        )
    ),
]


def is_quantity(value: int | str) -> bool:
    """Whether a value can be read as a quantity."""
    try:
        units.parse_quantity(value)
    except ValueError:
        return False
    return True


def is_resource(key: str) -> bool:
    """Whether a key can name a resource of a container."""
    return key in ("cpu", "memory", "ephemeral-storage") or key.startswith("hugepages-") or "/" in key


class LocalRef(Model):
    """A Secret in the service's namespace."""

    name: ObjectName = Field(description="Name of the Secret.")


class Toleration(Model):
    """Lets the tier's pods run on nodes with a taint."""

    key: str | None = Field(
        default=None, max_length=317, description="Key of the taint; absent with Exists: every taint."
    )
    operator: Literal["Exists", "Equal"] = Field(default="Equal", description="How the taint's value is compared.")
    value: str | None = Field(default=None, max_length=63, description="Value of the taint, with Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect of the taint; absent: every effect."
    )
    toleration_seconds: int | None = Field(
        default=None,
        description="With NoExecute: seconds that the pod stays after the taint was set; absent: for ever.",
    )

    rules: ClassVar[tuple[Rule[Toleration], ...]] = (
        Rule(
            "self.operator == 'Exists' || (has(self.key) && self.key != '')",
            "key is required with operator Equal; operator Exists without a key tolerates every taint",
            lambda own: own.operator == "Exists" or bool(own.key),
            field=".key",
            reason="FieldValueRequired",
        ),
        Rule(
            "self.operator == 'Equal' || !has(self.value) || self.value == ''",
            "value must be absent with operator Exists",
            lambda own: own.operator == "Equal" or not own.value,
            field=".value",
        ),
        Rule(
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            "tolerationSeconds needs effect NoExecute",
            lambda own: own.toleration_seconds is None or own.effect == "NoExecute",
            field=".tolerationSeconds",
        ),
    )


# Older API servers (1.31) see no bound on a quantity's length when they estimate a rule's cost: few are compared.
_COMPARED: Final = ("cpu", "memory", "ephemeral-storage")


class ResourceRequirements(Model):
    """CPU, memory and other resources of the engine container. GPUs are the tier's `gpus`."""

    requests: Resources = Field(default={}, description="What the scheduler sets aside.")
    limits: Resources = Field(default={}, description="What the container may take at most.")

    rules: ClassVar[tuple[Rule[ResourceRequirements], ...]] = (
        Rule(
            f"!has(self.requests) || !has(self.limits) || {list(_COMPARED)}.all(key, !(key in self.requests) ||"
            " !(key in self.limits) || quantity(string(self.requests[key])).compareTo("
            "quantity(string(self.limits[key]))) <= 0)",
            "a request must not exceed the limit of the same resource",
            lambda own: all(
                units.parse_quantity(own.requests[key]) <= units.parse_quantity(own.limits[key])
                for key in own.requests.keys() & own.limits.keys() & set(_COMPARED)
            ),
            field=".requests",
        ),
    )


class Volume(Model):
    """A volume as in a pod; the API server judges its source when the Deployment is applied."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})

    name: Annotated[
        str,
        Field(min_length=1, max_length=63),
        Rules(
            matching(f"^{_DNS}$", "must be a volume name: lower-case letters, digits and '-'"),
            none_of(OWN_VOLUMES, f"is a volume of Plimsoll's own ({', '.join(OWN_VOLUMES)})"),
        ),
    ] = Field(description="Name that volumeMounts refer to.")


class VolumeMount(Model):
    """Where a volume appears in the engine container."""

    name: str = Field(min_length=1, max_length=63, description="Name of one of the tier's volumes.")
    mount_path: Annotated[
        str,
        Field(max_length=512),
        Rules(
            matching("^/[^:]*$", "must be an absolute path without ':'"),
            none_of(OWN_MOUNTS, f"is a mount of Plimsoll's own ({', '.join(OWN_MOUNTS)}); mount below it or elsewhere"),
        ),
    ] = Field(description="Absolute path in the container.")
    sub_path: (
        Annotated[
            str,
            Field(max_length=512),
            Rules(
                matching("^[^/]", "must be a relative path"),
                refusing("(^|/)[.][.](/|$)", "must not contain '..'"),
            ),
        ]
        | None
    ) = Field(default=None, description="Folder of the volume that is mounted; absent: its root.")
    read_only: bool = Field(default=False, description="Whether the engine may only read it.")
    mount_propagation: Literal["None", "HostToContainer", "Bidirectional"] | None = Field(
        default=None, description="How mounts made later travel between host and container."
    )


class Pod(Model):
    """Overrides of the tier's pods."""

    node_selector: Annotated[dict[str, LabelValue], Field(max_length=32), Rules(_KEYS_ARE_QUALIFIED)] = Field(
        default={}, description="Labels a node must have."
    )
    tolerations: tuple[Toleration, ...] = Field(
        default=(),
        max_length=32,
        strict=False,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Taints that are tolerated, beside that of the tier's GPUs.",
    )
    affinity: dict[str, Any] | None = Field(
        default=None,
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
        description="Affinity as in a pod; the API server judges it when the Deployment is applied.",
    )
    runtime_class_name: ObjectName | None = Field(
        default=None, description="RuntimeClass; absent: the chart's default."
    )
    priority_class_name: ObjectName | None = Field(
        default=None, description="PriorityClass; absent: the cluster's default."
    )
    scheduler_name: ObjectName | None = Field(default=None, description="Scheduler; absent: the cluster's default.")
    image_pull_secrets: Annotated[tuple[LocalRef, ...], Field(max_length=16, strict=False), Keyed()] = Field(
        default=(), description="Secrets to pull the engine image with, beside the chart's."
    )
    service_account_name: ObjectName | None = Field(
        default=None, description="ServiceAccount of the engines; absent: one without any right, made by the operator."
    )
    annotations: Annotated[
        dict[str, Annotated[str, Field(max_length=16384)]],
        Field(max_length=64),
        Rules(_KEYS_ARE_QUALIFIED, _NOT_OURS),
    ] = Field(default={}, description="Annotations added to the pods.")
    labels: Annotated[dict[str, LabelValue], Field(max_length=64), Rules(_KEYS_ARE_QUALIFIED, _NOT_OURS)] = Field(
        default={}, description="Labels added to the pods."
    )
    resources: ResourceRequirements = Field(
        default=ResourceRequirements(),
        description="Resources of the engine container; absent keys: the chart's defaults.",
    )
    volumes: Annotated[tuple[Volume, ...], Field(max_length=32, strict=False), Keyed()] = Field(
        default=(), description="More volumes of the pods."
    )
    volume_mounts: Annotated[tuple[VolumeMount, ...], Field(max_length=32, strict=False), Keyed(("mountPath",))] = (
        Field(default=(), description="Where those volumes appear in the engine container.")
    )

    rules: ClassVar[tuple[Rule[Pod], ...]] = (
        Rule(
            "!has(self.volumeMounts) || self.volumeMounts.all(mount, has(self.volumes) &&"
            " self.volumes.exists(volume, volume.name == mount.name))",
            "every volumeMount must name one of pod.volumes",
            lambda own: {mount.name for mount in own.volume_mounts} <= {volume.name for volume in own.volumes},
            field=".volumeMounts",
        ),
    )
