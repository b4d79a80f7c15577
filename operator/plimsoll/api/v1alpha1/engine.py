"""`spec.engine`: image, arguments and environment of the engine container.

The launcher sets some flags and variables (ports, KV transfer, drain). A user's value for one of them would be ignored
or break the contract between engine and gateway, so validation rejects it by name.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from plimsoll.api.contract import engine_contract
from plimsoll.api.v1alpha1.adapters import LoraSpec
from plimsoll.api.v1alpha1.api_model import ApiModel, MapList, ValidationRule, ValidationRules, matching, not_matching
from plimsoll.api.v1alpha1.pod_overrides import ObjectName
from plimsoll.api.v1alpha1.scalars import MAX_DURATION_CHARS, duration_rules
from plimsoll.core import units
from plimsoll.engines import vllm


def _flag_pattern(flags: tuple[str, ...]) -> str:
    """Return a pattern for flags as vLLM parses them: `-` or `_` between words, `=value`, `.key` of a JSON value."""
    names = "|".join(flag.removeprefix("--").replace("-", "[-_]") for flag in flags)
    return f"^--({names})([=. ]|$)"


DEFAULT_DRAIN_TIMEOUT = units.format_duration(engine_contract().drain["shutdown_timeout_seconds"])
_RESERVED_ARG = not_matching(
    _flag_pattern(vllm.RESERVED_FLAGS),
    f"is set by Plimsoll ({', '.join(vllm.RESERVED_FLAGS)} are reserved)",
)
_SEPARATE_VALUE = not_matching(
    "^--?[A-Za-z0-9._-]+ ",
    "has a flag and its value in one item: use two items, or --flag=value",
)


class KeyRef(ApiModel):
    """A key of a Secret or a ConfigMap in the service's namespace."""

    name: ObjectName = Field(description="Name of the object.")
    key: Annotated[
        str,
        Field(min_length=1, max_length=253),
        ValidationRules(matching("^[-._a-zA-Z0-9]+$", "must be a key: letters, digits, '-', '_' and '.'")),
    ] = Field(description="Key in the object.")
    optional: bool = Field(default=False, description="Whether the engine starts if the key does not exist.")


class EnvSource(ApiModel):
    """Source of a variable's value: exactly one of the fields."""

    secret_key_ref: KeyRef | None = Field(default=None, description="Key of a Secret.")
    config_map_key_ref: KeyRef | None = Field(default=None, description="Key of a ConfigMap.")

    rules: ClassVar[tuple[ValidationRule[EnvSource], ...]] = (
        ValidationRule(
            "has(self.secretKeyRef) != has(self.configMapKeyRef)",
            "needs exactly one of secretKeyRef and configMapKeyRef",
            lambda own: (own.secret_key_ref is None) != (own.config_map_key_ref is None),
        ),
    )


class EnvVar(ApiModel):
    """An environment variable of the engine container."""

    name: Annotated[
        str,
        Field(min_length=1, max_length=253),
        ValidationRules(
            matching(
                "^[-._a-zA-Z][-._a-zA-Z0-9]*$",
                "must be the name of an environment variable: letters, digits, '_', '-' and '.'",
            ),
            not_matching("^PLIMSOLL_", "is reserved: names that begin with PLIMSOLL_ are set by Plimsoll"),
        ),
    ] = Field(description="Name of the variable.")
    value: str | None = Field(default=None, max_length=32768, description="Value of the variable.")
    value_from: EnvSource | None = Field(default=None, description="Source of the value.")

    rules: ClassVar[tuple[ValidationRule[EnvVar], ...]] = (
        ValidationRule(
            "has(self.value) != has(self.valueFrom)",
            "needs exactly one of value and valueFrom",
            lambda own: (own.value is None) != (own.value_from is None),
        ),
    )


class EngineSpec(ApiModel):
    """The engine that serves the model; absent fields have the chart's defaults."""

    runtime: Literal["vllm", "simulated"] = Field(
        default="vllm",
        description="vllm: vLLM on GPUs. simulated: an engine simulator that needs no GPUs and no weights. It responds "
        "with the timing of an engine and with meaningless text, to try out a fleet.",
    )
    image: (
        Annotated[
            str,
            Field(min_length=1, max_length=512),
            ValidationRules(
                matching(
                    "^[a-zA-Z0-9][a-zA-Z0-9._:/-]*(@sha256:[0-9a-f]{64})?$",
                    "must be an image reference, such as registry.example.com/team/engine:1.0",
                )
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="Engine image, derived from the bundled one. Absent: the chart's image for the runtime.",
    )
    version: (
        Annotated[
            str,
            Field(min_length=1, max_length=128),
            ValidationRules(
                matching("^[A-Za-z0-9_][A-Za-z0-9_.-]*$", "must be an image tag: letters, digits, '_', '.' and '-'")
            ),
        ]
        | None
    ) = Field(default=None, description="Tag that replaces the tag of the chart's engine image for the runtime.")
    args: tuple[
        Annotated[str, Field(min_length=1, max_length=4096), ValidationRules(_RESERVED_ARG, _SEPARATE_VALUE)], ...
    ] = Field(
        default=(),
        max_length=128,
        strict=False,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Arguments of `vllm serve`. They override the defaults of the role and the chart.",
    )
    env: Annotated[tuple[EnvVar, ...], Field(max_length=128, strict=False), MapList()] = Field(
        default=(), description="Environment variables. They override the chart's defaults."
    )
    drain_timeout: (
        Annotated[
            str,
            Field(max_length=MAX_DURATION_CHARS),
            duration_rules("5s", "24h", "must be from 5 seconds to 24 hours"),
            ValidationRules(not_matching("[mun]s|[.]", "must be in whole seconds, such as 90s or 1h30m")),
        ]
        | None
    ) = Field(
        default=None,
        description="Time that a terminating engine has to finish running requests: 5s to 24h. Requests that exceed it "
        f"are aborted and counted in the Event DrainTimedOut. Absent: {DEFAULT_DRAIN_TIMEOUT}.",
    )
    lora: LoraSpec | None = Field(
        default=None,
        description="Bounds on LoRA adapters. With it an engine starts with LoRA enabled, so that even the first entry "
        "of spec.adapters restarts no engine. Absent: LoRA is enabled while spec.adapters has an entry.",
    )

    rules: ClassVar[tuple[ValidationRule[EngineSpec], ...]] = (
        ValidationRule(
            "!has(self.image) || !has(self.version)",
            "image and version are mutually exclusive: put the tag into image, or omit image",
            lambda own: own.image is None or own.version is None,
            field=".version",
            reason="FieldValueForbidden",
        ),
    )

    @property
    def drain_seconds(self) -> int:
        """Drain timeout of a terminating engine, in seconds."""
        return round(units.parse_duration(self.drain_timeout or DEFAULT_DRAIN_TIMEOUT))

    @property
    def is_simulated(self) -> bool:
        """Whether the engine is the simulator, which uses no weights and no GPU."""
        return self.runtime == "simulated"
