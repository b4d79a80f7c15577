"""The settings of a gateway pod, from its environment variables, and the paths of its files.

All times are in seconds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from plimsoll.core.admission.request import MAX_QUEUE_S
from plimsoll.gateway.jwt_issuers import JwtIssuer, parse_issuers

SOURCE_GROUPS = 8  # of source addresses; each takes 1 MB of Envoy, and fetches the keys of JWT issuers for itself


class ApiKeyMode(StrEnum):
    """Whether requests need an API key. Optional: a request without one is anonymous, one with a wrong one rejected."""

    DISABLED = "Disabled"
    OPTIONAL = "Optional"
    REQUIRED = "Required"


class TlsVersion(StrEnum):
    """A TLS version that the gateway may require."""

    TLS_1_2 = "TLSv1.2"
    TLS_1_3 = "TLSv1.3"


class Plaintext(StrEnum):
    """What a client gets that speaks plain HTTP to a gateway with TLS: an error that says so, or the API."""

    REFUSE = "Refuse"
    ALLOW = "Allow"


class TrustedHeaders(NamedTuple):
    """The headers, in lower case, by which a trusted proxy names class and tenant."""

    request_class: bytes = b"x-gateway-inference-objective"
    tenant: bytes = b"x-gateway-inference-fairness-id"


@dataclass(frozen=True)
class PickerSettings:
    """The settings of one gateway pod. Envoy and the picker share `directory`."""

    directory: Path = Path("/run/plimsoll")
    address: str = "0.0.0.0"
    port: int = 8080
    picker_port: int = 8081
    probe_port: int | None = None  # for the kubelet, without TLS: a certificate must not end the pod; None: picker_port
    namespaces: tuple[str, ...] = ()  # namespaces to watch; empty means all
    max_body_bytes: int = 8 << 20
    envoy_memory_bytes: int = 1 << 30  # memory limit of Envoy's container
    drain_seconds: float = 600.0  # from SIGTERM to the end, at most
    drain_quiet_seconds: float = 5.0  # without a request: all nodes have stopped using the pod's address
    drain_idle_seconds: float = 20.0  # without a request, while clients keep idle connections; SDKs keep them 4 to 15 s
    successor_seconds: float = 15.0  # until another gateway pod exists, if one will be created at all
    pod: str = "plimsoll-gateway"
    namespace: str = ""  # of the gateway pods
    pod_selector: str = ""  # label selector of the gateway pods; empty: unknown
    headers_timeout_seconds: float = 10.0
    body_timeout_seconds: float = 60.0  # 8 MiB at 1.1 Mbit/s
    idle_timeout_seconds: float = 600.0  # without a byte in either direction; the longest generation
    pick_timeout_seconds: float = MAX_QUEUE_S + 30.0  # the health check detects a hung picker sooner
    poll_seconds: float = 2.0  # between two polls of Envoy's state
    api_keys: ApiKeyMode = ApiKeyMode.DISABLED
    trust_identity_headers: bool = False  # a trusted proxy sets the next two headers, or removes them
    class_header: str = TrustedHeaders().request_class.decode()
    tenant_header: str = TrustedHeaders().tenant.decode()
    access_log: bool = False  # one line for each request on standard output
    traces_endpoint: str = ""  # http://HOST:PORT of an OTLP receiver; empty: no traces
    traces_sampling: float = 0.01  # share of the requests without a traceparent that have a trace
    cors_origins: tuple[str, ...] = ()  # origins whose scripts may use this gateway; "*" is all
    tls_directory: Path | None = None  # the mounted Secret with the certificate; None: no TLS
    tls_min_version: TlsVersion = TlsVersion.TLS_1_2
    plaintext: Plaintext = Plaintext.REFUSE  # on the port with TLS
    jwt_issuers_json: str = "[]"
    peer_secret: Path | None = None  # the file with the secret of all gateways; None: each decides by itself
    peer_port: int = 8082  # for the other gateways
    owner_ack_seconds: float = 0.05  # until the owner of a service must acknowledge a question
    endpoint_picker_port: int | None = None  # for gateways of other products; None: not served
    inference_objectives: bool = False  # InferenceObjectives of the namespace are names of classes
    connections_per_source: int = 0  # of one source address; 0: as many as the memory limit allows
    internal_tls: Path | None = None  # the mounted Secret for engines, operator and other gateways; None: plain
    endpoint_picker_tls: Path | None = None  # the mounted Secret with the certificate for it; None: no TLS

    @property
    def jwt_issuers(self) -> tuple[JwtIssuer, ...]:
        """The issuers whose tokens count. Raises InvalidIssuers."""
        return parse_issuers(self.jwt_issuers_json)

    @property
    def requires_credentials(self) -> bool:
        """Whether every request needs an API key or a token. Issuers without API keys require tokens."""
        if self.api_keys is ApiKeyMode.DISABLED:
            return bool(self.jwt_issuers)
        return self.api_keys is ApiKeyMode.REQUIRED

    @property
    def trusted_headers(self) -> TrustedHeaders | None:
        """The headers that name class and tenant, None if they are not trusted."""
        names = TrustedHeaders(self.class_header.encode(), self.tenant_header.encode())
        return names if self.trust_identity_headers else None

    @property
    def max_heap_bytes(self) -> int:
        """The size at which Envoy's heap is full. The rest of the limit is code, stacks and sockets."""
        return self.envoy_memory_bytes * 85 // 100

    @property
    def body_budget_bytes(self) -> int:
        """Sum of the request bodies that Envoy may hold, each of them up to three times."""
        return max(self.envoy_memory_bytes // 8, self.max_body_bytes)

    @property
    def source_body_budget_bytes(self) -> int:
        """The same for one group of sources and transport protocol, while the picker does not answer: an equal part."""
        protocols = 2 if self.tls_directory is not None and self.plaintext is Plaintext.ALLOW else 1
        return self.body_budget_bytes // (SOURCE_GROUPS * protocols)

    @property
    def endpoint_picker_body_bytes(self) -> int:
        """Sum of the request bodies that the picker itself may hold for gateways of other products."""
        return max(64 << 20, self.max_body_bytes)

    @property
    def max_connections(self) -> int:
        """Connections of all clients. One that is silent or idle takes 12 to 18 KB."""
        return max(1, self.envoy_memory_bytes >> 15)

    @property
    def max_connections_per_source(self) -> int:
        """Connections of one source address. One that streams takes some 0.1 MB."""
        return self.connections_per_source or max(1, self.envoy_memory_bytes >> 18)

    @property
    def fifo(self) -> Path:
        return self.directory / "access.fifo"

    @property
    def picker_socket(self) -> Path:
        return self.directory / "picker.sock"

    @property
    def admin_socket(self) -> Path:
        return self.directory / "admin.sock"

    @property
    def bootstrap(self) -> Path:
        return self.directory / "envoy.json"

    @property
    def ads_socket(self) -> Path:
        return self.directory / "ads.sock"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> PickerSettings:
        """Returns the settings of this pod. Raises ValueError for an invalid value."""
        api_keys = ApiKeyMode(environ.get("PLIMSOLL_API_KEYS", ApiKeyMode.DISABLED))
        namespace = environ.get("POD_NAMESPACE", "")
        if api_keys is not ApiKeyMode.DISABLED and not namespace:
            raise ValueError(
                f"POD_NAMESPACE is empty, but PLIMSOLL_API_KEYS is {api_keys}: set it to the namespace of this pod,"
                " whose Secrets declare the API keys"
            )
        return cls(
            directory=Path(environ.get("PLIMSOLL_GATEWAY_DIR", "/run/plimsoll")),
            port=int(environ.get("PLIMSOLL_GATEWAY_PORT", "8080")),
            picker_port=int(environ.get("PLIMSOLL_PICKER_PORT", "8081")),
            probe_port=int(port) if (port := environ.get("PLIMSOLL_PROBE_PORT", "")) else None,
            namespaces=_list(environ.get("PLIMSOLL_WATCH_NAMESPACES", "")),
            max_body_bytes=int(environ.get("PLIMSOLL_MAX_BODY_BYTES", str(8 << 20))),
            envoy_memory_bytes=int(environ.get("PLIMSOLL_ENVOY_MEMORY_BYTES", str(1 << 30))),
            drain_seconds=float(environ.get("PLIMSOLL_DRAIN_SECONDS", "600")),
            pod=environ.get("POD_NAME", "plimsoll-gateway"),
            namespace=namespace,
            pod_selector=environ.get("PLIMSOLL_GATEWAY_SELECTOR", ""),
            api_keys=api_keys,
            trust_identity_headers=_bool(environ.get("PLIMSOLL_TRUST_IDENTITY_HEADERS", "false")),
            class_header=environ.get("PLIMSOLL_CLASS_HEADER", cls.class_header).lower(),
            tenant_header=environ.get("PLIMSOLL_TENANT_HEADER", cls.tenant_header).lower(),
            access_log=_bool(environ.get("PLIMSOLL_ACCESS_LOG", "false")),
            traces_endpoint=environ.get("PLIMSOLL_TRACES_ENDPOINT", "").rstrip("/"),
            traces_sampling=float(environ.get("PLIMSOLL_TRACES_SAMPLING", "0.01")),
            cors_origins=_list(environ.get("PLIMSOLL_CORS_ALLOWED_ORIGINS", "")),
            tls_directory=Path(tls_directory) if (tls_directory := environ.get("PLIMSOLL_TLS_DIR", "")) else None,
            tls_min_version=TlsVersion(environ.get("PLIMSOLL_TLS_MIN_VERSION", cls.tls_min_version)),
            jwt_issuers_json=_issuers(environ.get("PLIMSOLL_JWT_ISSUERS", "[]")),
            peer_secret=Path(peer_secret) if (peer_secret := environ.get("PLIMSOLL_PEER_SECRET_FILE", "")) else None,
            peer_port=int(environ.get("PLIMSOLL_PEER_PORT", "8082")),
            endpoint_picker_port=int(port) if (port := environ.get("PLIMSOLL_ENDPOINT_PICKER_PORT", "")) else None,
            connections_per_source=_count(environ.get("PLIMSOLL_CONNECTIONS_PER_SOURCE", "0")),
            inference_objectives=_bool(environ.get("PLIMSOLL_INFERENCE_OBJECTIVES", "false")),
            internal_tls=Path(internal_tls) if (internal_tls := environ.get("PLIMSOLL_INTERNAL_TLS_DIR", "")) else None,
            endpoint_picker_tls=Path(tls) if (tls := environ.get("PLIMSOLL_ENDPOINT_PICKER_TLS_DIR", "")) else None,
            plaintext=Plaintext(environ.get("PLIMSOLL_TLS_PLAINTEXT", cls.plaintext)),
        )


def _issuers(text: str) -> str:
    """Returns the text if it declares issuers. Raises InvalidIssuers."""
    parse_issuers(text)
    return text


def _count(text: str) -> int:
    """Returns the count. Raises ValueError for a negative one."""
    if (count := int(text)) < 0:
        raise ValueError(f"{count} is negative: use 0 for the default, or a positive number")
    return count


def _bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text == "true"


def _list(text: str) -> tuple[str, ...]:
    """Returns the non-blank parts of a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
