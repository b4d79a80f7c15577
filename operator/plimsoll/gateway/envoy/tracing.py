"""Envoy's OpenTelemetry tracer: one trace from the client through Envoy and the picker's answer to the engine.

Problem: a slow request may have waited in the queue, at an engine or on the way, and no single process sees all of it.

Idea: Envoy makes the spans of the gateway: one of the request, one of the question to the picker, which includes the
time in the queue, and one of the engine's answer. It continues the trace of the client's `traceparent` and sends its
own to the engine. The picker adds attributes by response headers of its answer. Envoy drops spans that the collector
is too slow for, and no request waits for it. Spans have no query, and client text of bounded length only.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlsplit

from plimsoll.gateway.envoy.body_filters import TYPE_URL
from plimsoll.gateway.settings import PickerSettings

Json = dict[str, Any]

SERVICE_NAME: Final = "plimsoll-gateway"
TRACES_CLUSTER: Final = "traces"
TRACES_PATH: Final = "/v1/traces"
ATTRIBUTE_PREFIX: Final = "plimsoll-trace-"  # of the headers of the picker's answer
CHECK_METADATA: Final = "envoy.filters.http.ext_authz"  # where Envoy keeps these headers

# Attributes of the request's span by the name of the header, without the prefix.
ATTRIBUTES: Final = {
    "model": "gen_ai.request.model",
    "operation": "gen_ai.operation.name",
    "tenant": "plimsoll.tenant",
    "class": "plimsoll.class",
    "key": "plimsoll.api_key",
    "service": "plimsoll.service",
    "prefill": "plimsoll.prefill_endpoint",
    "queue": "plimsoll.queue_seconds",
    "retry": "plimsoll.retry",
}


def tracing(settings: PickerSettings) -> Json:
    """Returns the connection manager's fields for traces, none if they are off."""
    if not settings.traces_endpoint:
        return {}
    # Envoy's own tags of these names have the query and text of any length.
    text = {"http.url": "%PATH(NQ:PATH):200%", "user_agent": "%REQ(USER-AGENT):100%"}
    text["guid:x-request-id"] = "%REQ(X-REQUEST-ID):80%"
    tags: list[Json] = [{"tag": tag, "value": value} for tag, value in text.items()]
    for header, attribute in ATTRIBUTES.items():
        key = {"key": CHECK_METADATA, "path": [{"key": ATTRIBUTE_PREFIX + header}]}
        tags.append({"tag": attribute, "metadata": {"kind": {"request": {}}, "metadata_key": key}})
    return {
        "tracing": {
            "max_path_tag_length": 200,
            "spawn_upstream_span": True,
            "custom_tags": tags,
            "provider": {
                "name": "envoy.tracers.opentelemetry",
                "typed_config": {
                    "@type": f"{TYPE_URL}.config.trace.v3.OpenTelemetryConfig",
                    "service_name": SERVICE_NAME,
                    "http_service": {
                        "http_uri": {
                            "uri": settings.traces_endpoint + TRACES_PATH,
                            "cluster": TRACES_CLUSTER,
                            "timeout": "5s",
                        }
                    },
                    "sampler": _sampler(settings.traces_sampling),
                },
            },
        },
        # By default Envoy changes a digit of the client's request id, and samples by it. Here the sampler decides.
        "request_id_extension": {
            "typed_config": {
                "@type": f"{TYPE_URL}.extensions.request_id.uuid.v3.UuidRequestIdConfig",
                "pack_trace_reason": False,
                "use_request_id_for_trace_sampling": False,
            }
        },
    }


def _sampler(share: float) -> Json:
    """Returns a sampler that follows the client's `traceparent`, and without one takes this share of requests."""
    samplers, types = "envoy.tracers.opentelemetry.samplers", f"{TYPE_URL}.extensions.tracers.opentelemetry.samplers.v3"
    ratio = {
        "@type": f"{types}.TraceIdRatioBasedSamplerConfig",
        "sampling_percentage": {"numerator": round(share * 1e6), "denominator": "MILLION"},
    }
    wrapped = {"name": f"{samplers}.trace_id_ratio_based", "typed_config": ratio}
    parent_based = {"@type": f"{types}.ParentBasedSamplerConfig", "wrapped_sampler": wrapped}
    return {"name": f"{samplers}.parent_based", "typed_config": parent_based}


def traces_clusters(settings: PickerSettings) -> list[Json]:
    """Returns the cluster of the collector, none if traces are off. Envoy starts without its address."""
    if not settings.traces_endpoint:
        return []
    collector = urlsplit(settings.traces_endpoint)
    address = {"address": collector.hostname, "port_value": collector.port or 80}
    endpoint = {"endpoint": {"address": {"socket_address": address}}}
    return [
        {
            "name": TRACES_CLUSTER,
            "type": "STRICT_DNS",
            "wait_for_warm_on_init": False,
            "connect_timeout": "2s",
            "load_assignment": {"cluster_name": TRACES_CLUSTER, "endpoints": [{"lb_endpoints": [endpoint]}]},
        }
    ]
