"""TLS at Envoy's listener, and mutual TLS to engines.

The certificate is a resource that the picker delivers with the clusters. Envoy uses a new one for new connections, and
connections that are open go on. While the picker is away, Envoy keeps the certificate that it has.

A pod's label says whether its engine requires TLS, so engines of both kinds may serve one service while it is rolled
out. The certificate of an engine must have the name of its namespace: no namespace can answer for another one.
"""

from __future__ import annotations

from typing import Any, Final

from plimsoll.api.contract import engine_tls_name
from plimsoll.gateway.envoy.body_filters import TYPE_URL
from plimsoll.gateway.settings import PickerSettings, TlsVersion

Json = dict[str, Any]

ADS: Final[Json] = {"resource_api_version": "V3", "ads": {}}  # the config source of all that the picker delivers
CERTIFICATE: Final = "gateway-certificate"  # the name of the resource
ENGINE_CERTIFICATE: Final = "engine-client-certificate"  # Envoy's own, by which engines know it
ENGINE_AUTHORITY: Final = "engine-authority"
SOCKET_MATCH: Final = "envoy.transport_socket_match"  # metadata of endpoints
TLS_MATCH: Final[Json] = {"tls": True}
# Until Envoy opens its port without a certificate, which its liveness probe waits for. Clients then get no handshake.
FIRST_CERTIFICATE_SECONDS: Final = 5
ALPN: Final = ("h2", "http/1.1")
_VERSIONS: Final = {TlsVersion.TLS_1_2: "TLSv1_2", TlsVersion.TLS_1_3: "TLSv1_3"}


def tls_inspector() -> Json:
    """The listener filter that tells a TLS handshake from plain HTTP."""
    return {
        "name": "envoy.filters.listener.tls_inspector",
        "typed_config": {"@type": f"{TYPE_URL}.extensions.filters.listener.tls_inspector.v3.TlsInspector"},
    }


def tls_chain(network_filter: Json, settings: PickerSettings, handshake_timeout: str) -> Json:
    """Returns the filter chain of connections with TLS."""
    return {
        "filters": [network_filter],
        "transport_socket_connect_timeout": handshake_timeout,
        "transport_socket": {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": f"{TYPE_URL}.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
                "common_tls_context": {
                    "alpn_protocols": list(ALPN),
                    "tls_params": {"tls_minimum_protocol_version": _VERSIONS[settings.tls_min_version]},
                    "tls_certificate_sds_secret_configs": [
                        {
                            "name": CERTIFICATE,
                            "sds_config": {**ADS, "initial_fetch_timeout": f"{FIRST_CERTIFICATE_SECONDS}s"},
                        }
                    ],
                },
            },
        },
    }


def engine_socket_matches(namespace: str) -> list[Json]:
    """Returns the transport sockets of a cluster: mutual TLS for endpoints with TLS_MATCH, else none."""
    name = engine_tls_name(namespace)
    context = {
        "@type": f"{TYPE_URL}.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        "sni": name,
        "common_tls_context": {
            "tls_params": {"tls_minimum_protocol_version": "TLSv1_2", "tls_maximum_protocol_version": "TLSv1_3"},
            "tls_certificate_sds_secret_configs": [{"name": ENGINE_CERTIFICATE, "sds_config": ADS}],
            "combined_validation_context": {
                "default_validation_context": {
                    "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": name}}]
                },
                "validation_context_sds_secret_config": {"name": ENGINE_AUTHORITY, "sds_config": ADS},
            },
        },
    }
    tls = {"name": "envoy.transport_sockets.tls", "typed_config": context}
    plain = {
        "name": "envoy.transport_sockets.raw_buffer",
        "typed_config": {"@type": f"{TYPE_URL}.extensions.transport_sockets.raw_buffer.v3.RawBuffer"},
    }
    return [
        {"name": "tls", "match": TLS_MATCH, "transport_socket": tls},
        {"name": "plain", "match": {}, "transport_socket": plain},
    ]
