"""What the installation says about every engine: defaults of the chart, and who may reach an engine."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class EngineDefaults(_Settings):
    """Arguments, environment and CPU/memory of engines whose spec does not say otherwise."""

    args: tuple[str, ...] = ()
    env: tuple[dict[str, Any], ...] = ()
    resources: dict[str, dict[str, Any]] = Field(default_factory=dict)


class EngineSettings(_Settings):
    """The bundled engine images and what their pods need on this cluster."""

    image: str
    simulated_image: str = Field("plimsoll/engine-simulated", alias="simulatedImage")
    image_pull_policy: str = Field("IfNotPresent", alias="imagePullPolicy")
    image_pull_secrets: tuple[dict[str, str], ...] = Field((), alias="imagePullSecrets")
    gpu_resource: str = Field("nvidia.com/gpu", alias="gpuResource")
    runtime_class_name: str | None = Field(None, alias="runtimeClassName")
    defaults: EngineDefaults = EngineDefaults()


class GatewaySettings(_Settings):
    """Where the gateway is: its Service and the labels of its pods."""

    namespace: str
    service: str = "plimsoll-gateway"
    port: int = 80
    pod_selector: dict[str, str] = Field(default_factory=dict, alias="podSelector")
    picker_port: int = Field(8081, alias="pickerPort")

    @property
    def url(self) -> str:
        port = "" if self.port == 80 else f":{self.port}"
        return f"http://{self.service}.{self.namespace}.svc{port}/v1"


class MetricsSettings(_Settings):
    """NetworkPolicy peers that may scrape engines."""

    peers: tuple[dict[str, Any], ...] = Field((), alias="from")


class NetworkPolicySettings(_Settings):
    enabled: bool = True


class Platform(_Settings):
    """The operator's configuration file."""

    watch_namespaces: tuple[str, ...] = Field((), alias="watchNamespaces")
    engine: EngineSettings
    gateway: GatewaySettings
    metrics: MetricsSettings = MetricsSettings()
    network_policy: NetworkPolicySettings = Field(NetworkPolicySettings(), alias="networkPolicy")
