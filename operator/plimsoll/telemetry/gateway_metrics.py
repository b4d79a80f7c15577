"""Every metric of the gateway, with its unit and labels.

Label values are bounded: `service` is NAMESPACE/NAME of an existing InferenceService, the others are closed sets.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

GATEWAY = CollectorRegistry()

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 30, 60, 120, 300, 600)

GATEWAY_ARRIVED = Counter(
    "plimsoll_gateway_requests_arrived",
    "Completion requests for a known model (attempt: first, or retry of a rejected one).",
    ["service", "attempt"],
    registry=GATEWAY,
)
GATEWAY_DEMAND = Counter(
    "plimsoll_gateway_demand_requests",
    "First attempts that count as demand: without those over a quota, too large, or rejected by the engine itself.",
    ["service"],
    registry=GATEWAY,
)
GATEWAY_COMPLETED = Counter(
    "plimsoll_gateway_requests_completed",
    "Requests sent to an engine that have ended (outcome: succeeded, rejected, which is a 4xx of the engine, failed,"
    " cancelled, deadline_exceeded, idle_timeout).",
    ["service", "outcome"],
    registry=GATEWAY,
)
GATEWAY_REJECTED = Counter(
    "plimsoll_gateway_requests_rejected",
    "Requests that the gateway rejected; `service` is empty if the request named no known model.",
    ["service", "reason"],
    registry=GATEWAY,
)
GATEWAY_ADMISSION_DECISIONS = Counter(
    "plimsoll_gateway_admission_decisions",
    "Admission decisions (outcome: Admitted, Queued, Downgraded, ShedSaturated, ShedAdapters, ShedStarting, ShedQuota,"
    " ShedDeadline, ShedNoCapacity, ClientGone); a queued request has a second decision later.",
    ["service", "outcome"],
    registry=GATEWAY,
)
GATEWAY_TENANT_DECISIONS = Counter(
    "plimsoll_gateway_tenant_decisions",
    "Decisions about requests that take capacity, by tenant: the first 50 of a service at a gateway by name, all others"
    " as `other tenants` (decision: sent to an engine, or the reason of the rejection).",
    ["service", "tenant", "decision"],
    registry=GATEWAY,
)
GATEWAY_CONNECTIONS_CUT = Counter(
    "plimsoll_gateway_connections_cut",
    "Connections to the picker's ports of probes, metrics and signals that were cut (reason: slow_request, without a "
    "whole request for 5 seconds, too_many, above 512 at one port, slow_reader, a response unread for 30 seconds, or "
    "beyond 8 such).",
    ["reason"],
    registry=GATEWAY,
)
GATEWAY_QUEUED = Gauge(
    "plimsoll_gateway_queued_requests",
    "Requests queued at the gateway until an engine has capacity or becomes ready.",
    ["service"],
    registry=GATEWAY,
)
GATEWAY_STEP_TIME_RATIO = Gauge(
    "plimsoll_gateway_step_time_ratio",
    "Step time of the slowest engine over the step time that the engine model predicts.",
    ["service"],
    registry=GATEWAY,
)
GATEWAY_TTFT_RESIDUAL = Gauge(
    "plimsoll_gateway_ttft_residual_seconds",
    "Largest measured TTFT in excess of the engine model's prediction: time in engine front ends, hosts and the"
    " network.",
    ["service"],
    registry=GATEWAY,
)
GATEWAY_ADAPTERS = Gauge(
    "plimsoll_gateway_adapters",
    "LoRA adapters (state: active, the most that have requests at one engine, which is at most `engine.lora.maxLoras`;"
    " waiting, those without a place at any engine); services with an SLO.",
    ["service", "state"],
    registry=GATEWAY,
)
GATEWAY_ADAPTER_LOAD = Gauge(
    "plimsoll_gateway_adapter_load_seconds",
    "Learned time by which the load of a LoRA adapter into GPU memory delays a first token; services with an SLO.",
    ["service"],
    registry=GATEWAY,
)
GATEWAY_PREFILLS = Counter(
    "plimsoll_gateway_prefills",
    "Requests to a decode tier, by where their prompt is computed (where: remote, local).",
    ["service", "where"],
    registry=GATEWAY,
)
GATEWAY_PREFIX_TOKENS = Counter(
    "plimsoll_gateway_prefix_tokens",
    "Estimated prompt tokens sent to engines (kind: prompt), those in a prefix that any engine received recently"
    " (ideal), and those that the chosen engine received (routed); services with an SLO.",
    ["service", "kind"],
    registry=GATEWAY,
)
GATEWAY_EARLY_FIRST_TOKENS = Counter(
    "plimsoll_gateway_early_first_tokens",
    "First tokens that admission control knew while their responses still ran.",
    ["service"],
    registry=GATEWAY,
)
GATEWAY_TTFT = Histogram(
    "plimsoll_gateway_time_to_first_byte_seconds",
    "Time from a request's first byte to the first byte of the engine's response body, without errors.",
    ["service"],
    buckets=_LATENCY_BUCKETS_S,
    registry=GATEWAY,
)
GATEWAY_DURATION = Histogram(
    "plimsoll_gateway_request_seconds",
    "Time from a request's first byte to the last byte of its response.",
    ["service"],
    buckets=_LATENCY_BUCKETS_S,
    registry=GATEWAY,
)
GATEWAY_QUEUE_TIME = Histogram(
    "plimsoll_gateway_queue_seconds",
    "Time for which a served request waited at the gateway; services with an SLO.",
    ["service"],
    buckets=_LATENCY_BUCKETS_S,
    registry=GATEWAY,
)
GATEWAY_TTFT_BY_PROMPT = Histogram(
    "plimsoll_gateway_ttft_by_prompt_seconds",
    "TTFT of streams from a request's first byte, by estimated prompt tokens (prompt: 0-1k, 1k-8k, 8k-32k, 32k+);"
    " services with an SLO.",
    ["service", "prompt"],
    buckets=_LATENCY_BUCKETS_S,
    registry=GATEWAY,
)
GATEWAY_TPOT_BY_OUTPUT = Histogram(
    "plimsoll_gateway_tpot_by_output_seconds",
    "TPOT of streams, by output tokens of a sequence, estimated from bytes (output: 0-64, 64-256, 256-1k, 1k+);"
    " services with an SLO.",
    ["service", "output"],
    buckets=(0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5),
    registry=GATEWAY,
)
GATEWAY_SERVED_REQUESTS = Counter(
    "plimsoll_gateway_served_requests",
    "Successful responses, by tenant: the first 50 of a service at a gateway by name, all others as `other tenants`;"
    " services with an SLO.",
    ["service", "tenant"],
    registry=GATEWAY,
)
GATEWAY_SERVED_TOKENS = Counter(
    "plimsoll_gateway_served_tokens",
    "Estimated tokens of successful responses, by tenant (kind: prompt, output).",
    ["service", "tenant", "kind"],
    registry=GATEWAY,
)
GATEWAY_SERVED_WORK = Counter(
    "plimsoll_gateway_served_work_seconds",
    "Engine time of successful responses by the latency model, by tenant: the key by which tenants share the cost.",
    ["service", "tenant"],
    registry=GATEWAY,
)
GATEWAY_GOODPUT_TOKENS = Counter(
    "plimsoll_gateway_goodput_tokens",
    "Estimated output tokens of responses that met all targets of the SLO.",
    ["service"],
    registry=GATEWAY,
)
GATEWAY_INFLIGHT = Gauge(
    "plimsoll_gateway_inflight_requests",
    "Requests in flight at the endpoints of a role, as counted by the picker.",
    ["service", "role"],
    registry=GATEWAY,
)
GATEWAY_ENDPOINTS = Gauge(
    "plimsoll_gateway_endpoints",
    "Engine pods by role and state (state: usable, waiting).",
    ["service", "role", "state"],
    registry=GATEWAY,
)
GATEWAY_FAILED_OPEN = Counter(
    "plimsoll_gateway_failed_open",
    "Requests that Envoy routed without an answer of the picker.",
    registry=GATEWAY,
)
GATEWAY_LIMIT_REACHED = Counter(
    "plimsoll_gateway_limit_reached",
    "What a gateway pod rejected or ended at a limit (limit: of Envoy: connections, source_connections,"
    " first_byte_time, headers_time, body_time, heap_requests, heap_connections, heap_streams,"
    " body_bytes_without_picker; of the picker: body_bytes, client_body_bytes, parse_bytes, client_parse_bytes,"
    " token_requests, client_token_requests,"
    " progress_streams, model_progress_streams, client_progress_streams; of the endpoint picker:"
    " endpoint_picker_streams, endpoint_picker_body_bytes, endpoint_picker_client_body_bytes).",
    ["limit"],
    registry=GATEWAY,
)
GATEWAY_HEAP = Gauge(
    "plimsoll_gateway_heap_ratio",
    "Envoy's heap as a share of its limit.",
    registry=GATEWAY,
)
GATEWAY_BODY_BYTES = Gauge(
    "plimsoll_gateway_body_bytes",
    "Bytes of the request bodies that Envoy holds or is about to read.",
    registry=GATEWAY,
)
GATEWAY_BODY_BYTES_LIMIT = Gauge(
    "plimsoll_gateway_body_bytes_limit",
    "Limit of plimsoll_gateway_body_bytes.",
    registry=GATEWAY,
)
GATEWAY_PARSE_BYTES = Gauge(
    "plimsoll_gateway_parse_bytes",
    "Bytes of the large request bodies that wait for the picker's worker process, or that it parses; at most 128 MiB.",
    registry=GATEWAY,
)
GATEWAY_CONNECTIONS = Gauge(
    "plimsoll_gateway_connections",
    "Open connections of clients.",
    registry=GATEWAY,
)
GATEWAY_CONNECTIONS_LIMIT = Gauge(
    "plimsoll_gateway_connections_limit",
    "Limit of plimsoll_gateway_connections.",
    registry=GATEWAY,
)
GATEWAY_BAD_RECORDS = Counter(
    "plimsoll_gateway_bad_log_records",
    "Lines of Envoy's access log that could not be parsed.",
    registry=GATEWAY,
)
GATEWAY_ACCESS_LINES_DROPPED = Counter(
    "plimsoll_gateway_access_log_lines_dropped",
    "Lines of the access log that were dropped, because standard output is read too slowly.",
    registry=GATEWAY,
)
GATEWAY_TRACE_EXPORTS_FAILED = Counter(
    "plimsoll_gateway_trace_exports_failed",
    "Batches of spans that Envoy lost, because the collector did not take them.",
    registry=GATEWAY,
)
GATEWAY_API_KEYS = Gauge(
    "plimsoll_gateway_api_keys",
    "Secrets labelled as API keys: accepted, invalid (the picker's log says why), or excess (beyond 10,000 keys).",
    ["state"],
    registry=GATEWAY,
)
GATEWAY_JWKS_FAILURES = Counter(
    "plimsoll_gateway_jwks_fetch_failures",
    "Fetches of the keys of JWT issuers that failed.",
    registry=GATEWAY,
)
GATEWAY_CERTIFICATE_EXPIRY = Gauge(
    "plimsoll_gateway_certificate_expiry_seconds",
    "Time at which a certificate of the gateway expires, seconds since the epoch: `listener` for clients, `internal` "
    "for engines, operator and other gateways, `endpoint-picker` for gateways of other products.",
    ["certificate"],
    registry=GATEWAY,
)
GATEWAY_CERTIFICATE_INVALID = Gauge(
    "plimsoll_gateway_certificate_invalid",
    "1 while the Secret of gateway.tls.secretName (`listener`), internalTls.secretName (`internal`) or "
    "gateway.endpointPicker.tls.secretName (`endpoint-picker`) cannot be used, else 0.",
    ["certificate"],
    registry=GATEWAY,
)
GATEWAY_KEY_REQUESTS = Counter(
    "plimsoll_gateway_api_key_requests",
    "Requests with a valid API key, by key: the first 200 that are used by name, all others as `other keys`.",
    ["key"],
    registry=GATEWAY,
)
GATEWAY_ADAPTER_REQUESTS = Counter(
    "plimsoll_gateway_adapter_requests",
    "Requests that were sent to an engine for a LoRA adapter.",
    ["service", "adapter"],
    registry=GATEWAY,
)
GATEWAY_UNREADABLE = Counter(
    "plimsoll_gateway_unreadable_objects",
    "Objects of the API server that were ignored because they could not be parsed (kind: InferenceService, Pod).",
    ["kind"],
    registry=GATEWAY,
)
GATEWAY_RESOURCES_ENCODED = Counter(
    "plimsoll_gateway_config_resources_encoded",
    "Cluster and endpoint resources that changed and were encoded for Envoy.",
    registry=GATEWAY,
)
GATEWAY_CONFIG_REJECTED = Counter(
    "plimsoll_gateway_config_rejected",
    "Configuration updates that Envoy did not accept in full; its log and the picker's have the reason.",
    registry=GATEWAY,
)
GATEWAY_PICK_SECONDS = Counter(
    "plimsoll_gateway_pick_seconds",
    "Total time spent on endpoint picks; divided by requests it is the time per pick.",
    registry=GATEWAY,
)
GATEWAY_OWNER_ANSWERS = Counter(
    "plimsoll_gateway_owner_answers",
    "Requests of this gateway that the owner of their service decided about.",
    registry=GATEWAY,
)
GATEWAY_OWNER_ANSWERS_DELAYED = Counter(
    "plimsoll_gateway_owner_answers_delayed",
    "Answers of owners that waited, 5 s at most, until this gateway's Envoy had the engine's address.",
    registry=GATEWAY,
)
GATEWAY_OWNER_FALLBACKS = Counter(
    "plimsoll_gateway_owner_fallbacks",
    "Requests that this gateway decided about, because the owner of their service or API key did not (reason:"
    " disconnected, timeout, busy, refused).",
    ["reason"],
    registry=GATEWAY,
)
GATEWAY_OWNED_SERVICES = Gauge(
    "plimsoll_gateway_owned_services",
    "Services with an SLO that this gateway decides about, for all gateways.",
    registry=GATEWAY,
)
GATEWAY_PEERS = Gauge(
    "plimsoll_gateway_peers",
    "Other gateways that are ready.",
    registry=GATEWAY,
)
GATEWAY_PEERS_CONNECTED = Gauge(
    "plimsoll_gateway_peers_connected",
    "Other gateways that this one can ask.",
    registry=GATEWAY,
)
GATEWAY_PEER_CONNECTIONS_REJECTED = Counter(
    "plimsoll_gateway_peer_connections_rejected",
    "Connections to the port for other gateways that were rejected (reason: unproven, the secret was wrong or not"
    " proved in time; surplus, too many had not proved it; limit, too many gateways).",
    ["reason"],
    registry=GATEWAY,
)
GATEWAY_VIEWS_DIFFER = Gauge(
    "plimsoll_gateway_peer_views_differ",
    "1 while a connected gateway knows another list of gateways or fallbacks; each then decides with an equal share.",
    registry=GATEWAY,
)
GATEWAY_PEER_SECRET_INVALID = Gauge(
    "plimsoll_gateway_peer_secret_invalid",
    "1 while the mounted Secret holds no secret that gateways can use; the one before is used.",
    registry=GATEWAY,
)
GATEWAY_LOOP_LAG = Gauge(
    "plimsoll_gateway_loop_lag_seconds",
    "Delay of the last timer in the picker's event loop.",
    registry=GATEWAY,
)

GATEWAY_ENDPOINT_PICKER_REQUESTS = Counter(
    "plimsoll_gateway_endpoint_picker_requests",
    "Requests by the endpoint-picker protocol (outcome: sent to an engine, answered by the picker, left by the client"
    " before, invalid, full).",
    ["outcome"],
    registry=GATEWAY,
)
GATEWAY_INFERENCE_OBJECTIVES = Gauge(
    "plimsoll_gateway_inference_objectives",
    "InferenceObjectives: used, or ignored (see the picker's log).",
    ["state"],
    registry=GATEWAY,
)
GATEWAY_INFERENCE_OBJECTIVES_WATCHED = Gauge(
    "plimsoll_gateway_inference_objectives_watched",
    "1 while InferenceObjectives are read, else 0.",
    registry=GATEWAY,
)
GATEWAY_UNKNOWN_CLASSES = Counter(
    "plimsoll_gateway_unknown_classes",
    "Requests of a class that their service lacks; they have the default class.",
    ["service"],
    registry=GATEWAY,
)
GATEWAY_ENDPOINT_PICKER_STREAMS = Gauge(
    "plimsoll_gateway_endpoint_picker_streams",
    "Open requests by the endpoint-picker protocol.",
    registry=GATEWAY,
)
GATEWAY_PROGRESS_STREAMS = Gauge(
    "plimsoll_gateway_progress_streams",
    "Open event streams that show the progress of a model until it is ready; at most 256.",
    registry=GATEWAY,
)

_GATEWAY_SERVICE_METRICS = (
    GATEWAY_ARRIVED,
    GATEWAY_DEMAND,
    GATEWAY_COMPLETED,
    GATEWAY_REJECTED,
    GATEWAY_ADMISSION_DECISIONS,
    GATEWAY_TENANT_DECISIONS,
    GATEWAY_QUEUED,
    GATEWAY_STEP_TIME_RATIO,
    GATEWAY_TTFT_RESIDUAL,
    GATEWAY_ADAPTERS,
    GATEWAY_ADAPTER_LOAD,
    GATEWAY_PREFILLS,
    GATEWAY_PREFIX_TOKENS,
    GATEWAY_EARLY_FIRST_TOKENS,
    GATEWAY_TTFT,
    GATEWAY_DURATION,
    GATEWAY_QUEUE_TIME,
    GATEWAY_TTFT_BY_PROMPT,
    GATEWAY_TPOT_BY_OUTPUT,
    GATEWAY_SERVED_REQUESTS,
    GATEWAY_SERVED_TOKENS,
    GATEWAY_SERVED_WORK,
    GATEWAY_GOODPUT_TOKENS,
    GATEWAY_INFLIGHT,
    GATEWAY_ENDPOINTS,
    GATEWAY_ADAPTER_REQUESTS,
    GATEWAY_UNKNOWN_CLASSES,
)


def remove_gateway_series(service: str) -> None:
    """Remove every series of a deleted service."""
    for metric in _GATEWAY_SERVICE_METRICS:
        metric.remove_by_labels({"service": service})


for _kind in ("InferenceService", "Pod"):
    GATEWAY_UNREADABLE.labels(_kind)
for _outcome in ("sent", "answered", "left", "invalid", "full"):
    GATEWAY_ENDPOINT_PICKER_REQUESTS.labels(_outcome)
for _state in ("used", "ignored"):
    GATEWAY_INFERENCE_OBJECTIVES.labels(_state)
for _state in ("accepted", "invalid", "excess"):
    GATEWAY_API_KEYS.labels(_state)
for _reason in ("slow_request", "too_many", "slow_reader"):
    GATEWAY_CONNECTIONS_CUT.labels(_reason)
