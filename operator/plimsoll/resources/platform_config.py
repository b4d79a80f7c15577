"""The operator's configuration file: defaults for all engines, and who may reach them."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from plimsoll.core.units import parse_quantity
from plimsoll.engines.registry import ENGINES


class _ConfigModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class EngineDefaults(_ConfigModel):
    """Default arguments, environment and CPU/memory of engines."""

    args: tuple[str, ...] = ()
    env: tuple[dict[str, Any], ...] = ()
    resources: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @field_validator("env")
    @classmethod
    def _has_no_reserved_name(cls, env: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        """Raises ValueError for a variable that services may not set either."""
        reserved = {name for engine in ENGINES.values() for name in engine.reserved_variables}
        if found := sorted(reserved.intersection(variable.get("name", "") for variable in env)):
            raise ValueError(
                f"engine.defaults.env may not set {', '.join(found)}, on which Plimsoll relies: remove it; the gateway"
                " checks API keys"
            )
        return env


class EngineRolloutSettings(_ConfigModel):
    """How services get newly rendered pod templates: those whose templates have another generation are rolled out.

    max_unavailable_services: services that are rolled out at the same time. min_ready_seconds: how long a service is
    watched after its engines were replaced.
    """

    generation: int = Field(0, ge=0, le=2**31 - 1)
    max_unavailable_services: int = Field(1, alias="maxUnavailableServices", ge=1, le=1000)
    min_ready_seconds: int = Field(120, alias="minReadySeconds", ge=0, le=86_400)
    paused: bool = False


class EngineTlsSettings(_ConfigModel):
    """Mutual TLS of engines: the Secret that each namespace of services has. Empty: plain HTTP."""

    secret_name: str = Field("", alias="secretName")


class NodeCacheSettings(_ConfigModel):
    """The folder of each node for downloaded models, "" for none. size: bytes of models in it, None for no bound."""

    path: str = ""
    size: str | None = None

    @property
    def max_bytes(self) -> int | None:
        return None if self.size is None else int(parse_quantity(self.size))


class EngineSettings(_ConfigModel):
    """The bundled engine images, and the cluster-specific settings of engine pods."""

    image: str
    simulated_image: str = Field("plimsoll/engine-simulated", alias="simulatedImage")
    image_pull_policy: str = Field("IfNotPresent", alias="imagePullPolicy")
    image_pull_secrets: tuple[dict[str, str], ...] = Field((), alias="imagePullSecrets")
    gpu_resource: str = Field("nvidia.com/gpu", alias="gpuResource")
    runtime_class_name: str | None = Field(None, alias="runtimeClassName")
    run_as_user: int | None = Field(1000, alias="runAsUser", ge=1)  # None: the platform assigns user and group
    defaults: EngineDefaults = EngineDefaults()
    rollout: EngineRolloutSettings = EngineRolloutSettings()
    tls: EngineTlsSettings = EngineTlsSettings()
    node_cache: NodeCacheSettings = Field(NodeCacheSettings(), alias="nodeCache")


class ShortModelNameSettings(_ConfigModel):
    """The namespaces whose services may claim model names other than NAMESPACE/NAME; empty for all."""

    namespaces: tuple[str, ...] = ()


_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class GatewaySettings(_ConfigModel):
    """The gateway's Service, and the labels of its pods."""

    namespace: str
    service: str = "plimsoll-gateway"
    scheme: Literal["http", "https"] = "http"
    port: int = 80
    pod_selector: dict[str, str] = Field(default_factory=dict, alias="podSelector")
    picker_port: int = Field(8081, alias="pickerPort")
    short_model_names: ShortModelNameSettings = Field(ShortModelNameSettings(), alias="shortModelNames")

    @property
    def url(self) -> str:
        port = "" if self.port == _DEFAULT_PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{self.service}.{self.namespace}.svc{port}/v1"


class ScrapeSettings(_ConfigModel):
    """NetworkPolicy peers that may scrape engines."""

    peers: tuple[dict[str, Any], ...] = Field((), alias="from")


class EngineEgressSettings(_ConfigModel):
    """Where engines may connect to besides the engines of their service. dns: peers that answer DNS, () for all."""

    dns: tuple[dict[str, Any], ...] = ()
    model_hub: bool = Field(True, alias="modelHub")
    rules: tuple[dict[str, Any], ...] = ()


class NetworkPolicySettings(_ConfigModel):
    """The NetworkPolicy of each service. egress: None for no limit."""

    enabled: bool = True
    egress: EngineEgressSettings | None = None


class WebhookSettings(_ConfigModel):
    """The admission webhook: its port, and the directory with `tls.crt` and `tls.key`."""

    port: int = 9443
    certificate_directory: str = Field("/etc/plimsoll-webhook", alias="certificateDirectory")


class InternalTlsSettings(_ConfigModel):
    """Mutual TLS with gateways and engines: the directory with `tls.crt`, `tls.key` and `ca.crt`."""

    certificate_directory: str = Field(alias="certificateDirectory")


class KedaScalerSettings(_ConfigModel):
    """The external scaler for KEDA: its gRPC port, and the directory with `tls.crt` and `tls.key`, None for plaintext.

    With `require_client_certificate` the directory also has `ca.crt`, the authority of the clients.
    """

    port: int = 8082
    certificate_directory: str | None = Field(None, alias="certificateDirectory")
    require_client_certificate: bool = Field(False, alias="requireClientCertificate")


class InferencePoolSettings(_ConfigModel):
    """The InferencePools of services in the gateway's namespace: the picker's Service, and who may send to engines."""

    picker_service: str = Field(alias="pickerService")
    picker_port: int = Field(9002, alias="pickerPort")
    peers: tuple[dict[str, Any], ...] = Field((), alias="from")


class PlatformConfig(_ConfigModel):
    """The operator's configuration file."""

    watch_namespaces: tuple[str, ...] = Field((), alias="watchNamespaces")
    engine: EngineSettings
    gateway: GatewaySettings
    metrics: ScrapeSettings = ScrapeSettings()
    network_policy: NetworkPolicySettings = Field(NetworkPolicySettings(), alias="networkPolicy")
    webhook: WebhookSettings | None = None  # None: no webhook
    keda_scaler: KedaScalerSettings | None = Field(None, alias="kedaScaler")  # None: no scaler
    internal_tls: InternalTlsSettings | None = Field(None, alias="internalTls")  # None: plain HTTP
    inference_pools: InferencePoolSettings | None = Field(None, alias="inferencePools")  # None: no pools
