"""`spec.engine`: image, arguments and environment of the engine container.

Plimsoll sets some flags and variables (ports, KV transfer, drain). A user's value for one of them would be ignored or
break the contract between engine and gateway, so validation rejects it by name, and also what an engine cannot do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from plimsoll.api.contract import engine_contract
from plimsoll.api.v1alpha1.adapters import LoraSpec
from plimsoll.api.v1alpha1.api_model import ApiModel, MapList, ValidationRule, ValidationRules, matching, not_matching
from plimsoll.api.v1alpha1.engine_features import needs, needs_image, reserved_args, variable_rules
from plimsoll.api.v1alpha1.pod_overrides import ObjectName
from plimsoll.api.v1alpha1.processor_rules import PROCESSOR_RULES
from plimsoll.api.v1alpha1.scalars import MAX_DURATION_CHARS, duration_rules
from plimsoll.api.v1alpha1.speculative import SpeculativeSpec
from plimsoll.core import units
from plimsoll.engines.engine import Engine, Feature, MetricMap, Signal, Source, missing_for_sizing
from plimsoll.engines.registry import engine_named

METRIC_SIGNALS: Final = {
    "running": Signal.RUNNING,
    "waiting": Signal.WAITING,
    "kvUsed": Signal.KV_USED,
    "promptTokens": Signal.LOCAL_PROMPT_TOKENS,
    "generatedTokens": Signal.GENERATED_TOKENS,
    "steps": Signal.STEPS,
    "ttft": Signal.TTFT,
    "tpot": Signal.TPOT,
    "itl": Signal.ITL,
}
DEFAULT_DRAIN_TIMEOUT = units.format_duration(engine_contract().drain["shutdown_timeout_seconds"])
_SEPARATE_VALUE = not_matching(
    "^--?[A-Za-z0-9._-]+ ",
    "has a flag and its value in one item: use two items, or --flag=value",
)


def _own(feature: Feature, field: str, is_set: Callable[[EngineSpec], bool]) -> ValidationRule[EngineSpec]:
    return needs(feature, f"has(self.{field})", is_set, field=f".{field}", engine="self")


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


_URL_PATH = matching("^/[A-Za-z0-9._~/-]*$", "must be a path, such as /health")
UrlPath = Annotated[str, Field(min_length=1, max_length=253), ValidationRules(_URL_PATH)]
Port = Annotated[int, Field(ge=1024, le=65535)]
MetricName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    ValidationRules(
        matching("^[a-zA-Z_:][a-zA-Z0-9_:]*$", "must be a metric's name: letters, digits, '_' and ':', no labels")
    ),
]


class EngineMetricsSpec(ApiModel):
    """Where the metrics of a server are, and which of them is which signal. Label sets of one metric are summed."""

    path: UrlPath = Field(default="/metrics", description="Path of the metrics page.")
    port: Port | None = Field(default=None, description="Port of the metrics page. Absent: engine.port.")
    running: MetricName | None = Field(default=None, description="Gauge: requests that run.")
    waiting: MetricName | None = Field(default=None, description="Gauge: requests that wait in the engine.")
    kv_used: MetricName | None = Field(default=None, description="Gauge: share of the KV cache in use, 0 to 1.")
    prompt_tokens: MetricName | None = Field(
        default=None, description="Counter: prompt tokens that the engine computed, without cached ones."
    )
    generated_tokens: MetricName | None = Field(default=None, description="Counter: output tokens.")
    steps: MetricName | None = Field(default=None, description="Counter: steps, each of which runs one batch.")
    ttft: MetricName | None = Field(
        default=None, description="Histogram: time to first token in seconds, named without _bucket."
    )
    tpot: MetricName | None = Field(
        default=None, description="Histogram: mean time per output token of each request in seconds."
    )
    itl: MetricName | None = Field(default=None, description="Histogram: inter-token latency in seconds.")

    rules: ClassVar[tuple[ValidationRule[EngineMetricsSpec], ...]] = (
        ValidationRule(
            " || ".join(f"has(self.{name})" for name in METRIC_SIGNALS),
            f"needs at least one of {', '.join(METRIC_SIGNALS)}",
            lambda own: bool(own.names()),
        ),
    )

    def names(self) -> dict[str, str]:
        """The metric of each signal that has one, by the signal's value."""
        given = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {signal.value: given[field] for field, signal in METRIC_SIGNALS.items() if field in given}


class EngineSpec(ApiModel):
    """The engine that serves the model; absent fields have the chart's defaults."""

    runtime: Literal["vllm", "simulated", "llama-cpp", "sglang", "tensorrt-llm", "tgi", "openai"] = Field(
        default="vllm",
        description="vllm: vLLM on GPUs. simulated: an engine simulator without GPUs and weights, which responds with "
        "meaningless text. llama-cpp, sglang, tensorrt-llm, tgi: that server in your image. openai: any server with an "
        "OpenAI-compatible API.",
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
        description="Engine image. With vllm and simulated: derived from the bundled one; absent: the chart's image. "
        "With other runtimes: that of the server, and required.",
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
    args: tuple[Annotated[str, Field(min_length=1, max_length=4096), ValidationRules(_SEPARATE_VALUE)], ...] = Field(
        default=(),
        max_length=128,
        strict=False,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Arguments of the engine, such as those of `vllm serve`. They override the defaults of the role "
        "and the chart.",
    )
    command: tuple[Annotated[str, Field(min_length=1, max_length=4096)], ...] = Field(
        default=(),
        max_length=32,
        strict=False,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Entry point of an `openai` server; args follow it. Absent: that of the image. $(PLIMSOLL_MODEL) "
        "in it and in args is the location of the model.",
    )
    port: Port | None = Field(
        default=None, description=f"Port of the API of an `openai` server. Absent: {engine_contract().ports['api']}."
    )
    health_path: UrlPath | None = Field(
        default=None,
        description="Path of an `openai` server that answers 200 when it can serve, and not before. Absent: /health.",
    )
    metrics: EngineMetricsSpec | None = Field(
        default=None,
        description="Metrics of an `openai` server. Absent: its engines report nothing, and their load is unknown.",
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
    tuning: Literal["Auto", "Off"] | None = Field(
        default=None,
        description="Auto: vLLM gets arguments that follow from the tightest targets of spec.slo and its classes, the "
        "model and the GPU type, where these are known; args and the chart's arguments override them. Off: it gets "
        "none. A change takes effect at once. With Auto, measurements can roll out another chunk of the tier serve. "
        "Absent: Auto, from the next rollout, without measurements.",
    )
    speculative: SpeculativeSpec | None = Field(
        default=None,
        description="Speculative decoding of vLLM. Absent: none.",
    )
    prefix_cache: Literal["Shared", "PerTenant"] | None = Field(
        default=None,
        description="PerTenant: a request uses only KV blocks that requests of its own tenant left, so that no tenant "
        "learns another one's prompts from its TTFT. Not with task transcribe. Restarts no engine. Absent: "
        "Shared.",
    )
    lora: LoraSpec | None = Field(
        default=None,
        description="Bounds on LoRA adapters. With it an engine starts with LoRA enabled, so that even the first entry "
        "of spec.adapters restarts no engine. Absent: LoRA is enabled while spec.adapters has an entry.",
    )

    rules: ClassVar[tuple[ValidationRule[EngineSpec], ...]] = (
        *reserved_args(),
        *variable_rules(),
        *PROCESSOR_RULES,
        needs_image(),
        _own(Feature.OWN_SERVER, "command", lambda own: "command" in own.model_fields_set),
        _own(Feature.OWN_SERVER, "port", lambda own: own.port is not None),
        _own(Feature.OWN_SERVER, "healthPath", lambda own: own.health_path is not None),
        _own(Feature.OWN_SERVER, "metrics", lambda own: own.metrics is not None),
        _own(Feature.TUNING, "tuning", lambda own: own.tuning is not None),
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
    def contract(self) -> Engine:
        """The contract of the engine."""
        return engine_named(self.runtime)

    @property
    def missing_for_sizing(self) -> tuple[str, ...]:
        """What sizing needs and the engine's metrics do not have. One with a launcher has a benchmark."""
        if self.contract.launched:
            return ()
        names = {} if self.metrics is None else self.metrics.names()
        named = MetricMap("", tuple((Signal(signal), (Source(metric),)) for signal, metric in names.items()))
        return missing_for_sizing(self.contract.metrics or named)

    @property
    def api_port(self) -> int:
        """Port of the engine's API."""
        return self.port or engine_contract().ports["api"]

    @property
    def is_simulated(self) -> bool:
        """Whether the engine is the simulator, which uses no weights and no GPU."""
        return self.runtime == "simulated"
