"""Every metric of the operator, with its unit and labels.

Label values are bounded: `service` is NAMESPACE/NAME of an existing InferenceService, the others are closed sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from plimsoll.telemetry.service_gauge import ServiceGauge

OPERATOR = CollectorRegistry()

OPERATOR_LEADING = Gauge(
    "plimsoll_operator_leading",
    "1 while this process holds the lease, 0 while it is a standby.",
    registry=OPERATOR,
)
OPERATOR_FOREIGN_NAMESPACES = Gauge(
    "plimsoll_operator_foreign_namespaces",
    "Namespaces with services that another release of Plimsoll manages.",
    registry=OPERATOR,
)
OPERATOR_ADMISSION_REVIEWS = Counter(
    "plimsoll_operator_admission_reviews",
    "Changes of InferenceServices that the webhook reviewed (result: allowed, warned, refused, failed, which allows).",
    ["result"],
    registry=OPERATOR,
)
OPERATOR_KEDA_ANSWERS = Counter(
    "plimsoll_operator_keda_answers",
    "Answers of the KEDA scaler (code: OK, INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION, UNAVAILABLE,"
    " RESOURCE_EXHAUSTED).",
    ["code"],
    registry=OPERATOR,
)
OPERATOR_WEBHOOK_CERTIFICATE_EXPIRY = Gauge(
    "plimsoll_operator_webhook_certificate_expiry_seconds",
    "Time at which the webhook's certificate expires, seconds since the epoch; 0 without one.",
    registry=OPERATOR,
)
OPERATOR_CERTIFICATE_EXPIRY = Gauge(
    "plimsoll_operator_certificate_expiry_seconds",
    "Time at which a certificate of the operator expires, seconds since the epoch: `internal` by which gateways and "
    "engines know it, `keda-scaler` for KEDA.",
    ["certificate"],
    registry=OPERATOR,
)
OPERATOR_CERTIFICATE_INVALID = Gauge(
    "plimsoll_operator_certificate_invalid",
    "1 while the Secret of internalTls.secretName (`internal`) or operator.kedaScaler.tls.secretName (`keda-scaler`) "
    "cannot be used, else 0.",
    ["certificate"],
    registry=OPERATOR,
)
OPERATOR_RECONCILES = Counter(
    "plimsoll_operator_reconciles",
    "Reconciles of a service (outcome: done, retry, unexpected).",
    ["outcome"],
    registry=OPERATOR,
)
OPERATOR_RECONCILE_SECONDS = Histogram(
    "plimsoll_operator_reconcile_seconds",
    "Duration of a reconcile.",
    buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    registry=OPERATOR,
)
OPERATOR_QUEUE = Gauge(
    "plimsoll_operator_queue_keys",
    "Services that wait for a reconcile.",
    registry=OPERATOR,
)
OPERATOR_QUEUE_AGE = Gauge(
    "plimsoll_operator_queue_age_seconds",
    "How long the oldest service has been waiting for a reconcile or in one; 0 without any, and in a standby.",
    registry=OPERATOR,
)
OPERATOR_UNSYNCED = Gauge(
    "plimsoll_operator_unsynced_lists",
    "Lists of objects that a leader waits for; it reconciles nothing before it has all.",
    registry=OPERATOR,
)
OPERATOR_WATCH_FAILURES = Counter(
    "plimsoll_operator_watch_failures",
    "Lists and watches that the API server refused or cut; each is tried again (resource: plural name of the kind).",
    ["resource"],
    registry=OPERATOR,
)
OPERATOR_INTERNAL_ERRORS = Counter(
    "plimsoll_operator_internal_errors",
    "Unexpected errors of the operator, each contained to one object or component (stage: watch,"
    " pod_ending, engine_list, engine_metrics, engine_about, gateway, target, scaling, reconcile, rollout, part).",
    ["stage"],
    registry=OPERATOR,
)
OPERATOR_ENGINE_POLLS_WAITING = Gauge(
    "plimsoll_operator_engine_polls_waiting",
    "Polls of engines that wait for a slot (pool: answering, failing, of pods whose last poll failed).",
    ["pool"],
    registry=OPERATOR,
)
OPERATOR_ENGINE_POLLS_PUT_OFF = Gauge(
    "plimsoll_operator_engine_polls_put_off",
    "Polls of engines that are due and put off, because their namespace and node has its share under way or waiting "
    "(pool as above).",
    ["pool"],
    registry=OPERATOR,
)
OPERATOR_CONNECTIONS_CUT = Counter(
    "plimsoll_operator_connections_cut",
    "Connections to the ports of probes, metrics, recommendations and the webhook that were cut (reason: slow_request, "
    "without a whole request for 5 seconds, too_many, above 512 at one port, slow_reader, a response unread for "
    "30 seconds, or beyond 8 such).",
    ["reason"],
    registry=OPERATOR,
)
OPERATOR_WRITES = Counter(
    "plimsoll_operator_writes",
    "Writes to the API server (verb: PATCH, POST, PUT, DELETE), without lease renewals.",
    ["verb"],
    registry=OPERATOR,
)
OPERATOR_WRITE_FAILURES = Counter(
    "plimsoll_operator_write_failures",
    "Writes that failed (verb as above; reason: conflict, rejected, forbidden, not_found, unavailable, other).",
    ["verb", "reason"],
    registry=OPERATOR,
)
OPERATOR_SCALE_WRITES_PENDING = Gauge(
    "plimsoll_operator_scale_writes_pending",
    "Replica counts that are being written to the API server, or wait for it.",
    registry=OPERATOR,
)
OPERATOR_SCALE_CHANGES = Counter(
    "plimsoll_operator_scale_changes",
    "Changes of a tier's replica count by the autoscaler (tier: prefill, decode, serve; direction: up, down).",
    ["tier", "direction"],
    registry=OPERATOR,
)

OPERATOR_ENGINE_ROLLOUT = Gauge(
    "plimsoll_operator_engine_rollout_services",
    "Services by phase of the platform's rollout (phase: updated, updating, waiting, failed).",
    ["phase"],
    registry=OPERATOR,
)

_TIER_LABELS = ["service", "tier"]

OPERATOR_ENGINE_TUNING = ServiceGauge(
    "plimsoll_operator_engine_tuning",
    "Value of an argument that the operator has set on a tier's engines from the SLO; of several values, the largest "
    "(argument: max-num-batched-tokens, cudagraph-capture-sizes).",
    [*_TIER_LABELS, "argument"],
    registry=OPERATOR,
)
OPERATOR_ENGINE_RETUNINGS = Counter(
    "plimsoll_operator_engine_retunings",
    "Rollouts of another chunk of prompt tokens, from measurements (outcome: changed, undone).",
    ["service", "outcome"],
    registry=OPERATOR,
)
OPERATOR_DRAINS_TIMED_OUT = Counter(
    "plimsoll_operator_drains_timed_out",
    "Pods that ended before all their requests were complete.",
    _TIER_LABELS,
    registry=OPERATOR,
)
OPERATOR_REQUESTS_ABORTED = Counter(
    "plimsoll_operator_requests_aborted",
    "Requests aborted because the pod's drain timed out.",
    _TIER_LABELS,
    registry=OPERATOR,
)


AUTOSCALER_DESIRED = ServiceGauge(
    "plimsoll_autoscaler_desired_replicas",
    "Desired replicas of a tier after all limits; in mode Recommend they are not applied.",
    _TIER_LABELS,
    registry=OPERATOR,
)
AUTOSCALER_NEEDED = ServiceGauge(
    "plimsoll_autoscaler_needed_replicas",
    "Replicas that a tier needs to serve its forecast within the SLO, before limits and standby replicas.",
    _TIER_LABELS,
    registry=OPERATOR,
)
AUTOSCALER_REPLICA_CAPACITY = ServiceGauge(
    "plimsoll_autoscaler_replica_capacity_requests_per_second",
    "SLO capacity of one replica of a tier.",
    _TIER_LABELS,
    registry=OPERATOR,
)
AUTOSCALER_LOAD = ServiceGauge(
    "plimsoll_autoscaler_load_requests_per_second",
    "Arrival rate of a tier, first attempts only, including rejected requests.",
    _TIER_LABELS,
    registry=OPERATOR,
)
AUTOSCALER_FORECAST = ServiceGauge(
    "plimsoll_autoscaler_forecast_requests_per_second",
    "Arrival rate that a tier is sized for: upper quantile of the peak within its start-up time.",
    _TIER_LABELS,
    registry=OPERATOR,
)
AUTOSCALER_UTILIZATION = ServiceGauge(
    "plimsoll_autoscaler_utilization_ratio",
    "Load of a tier over the SLO capacity of its ready replicas.",
    _TIER_LABELS,
    registry=OPERATOR,
)
AUTOSCALER_REJECTED_SHARE = ServiceGauge(
    "plimsoll_autoscaler_rejected_ratio",
    "Share of the last minute's first attempts that the gateway rejected.",
    ["service"],
    registry=OPERATOR,
)

AUTOSCALER_TTFT_OFFSET = ServiceGauge(
    "plimsoll_autoscaler_ttft_offset_seconds",
    "TTFT beyond the latency model, estimated from the share of late first tokens. Sizing includes it.",
    ["service"],
    registry=OPERATOR,
)
AUTOSCALER_TOKEN_RATIO = ServiceGauge(
    "plimsoll_autoscaler_prompt_token_ratio",
    "Prompt tokens that engines count over those that gateways estimate at first, learned by kind of content; no "
    "series for text close to its estimate (kind: text, image, audio, video).",
    ["service", "kind"],
    registry=OPERATOR,
)
AUTOSCALER_DRAFT_ACCEPTANCE = ServiceGauge(
    "plimsoll_autoscaler_draft_acceptance_ratio",
    "Share of the last minute's drafted tokens that a tier's engines accepted; no series without any.",
    _TIER_LABELS,
    registry=OPERATOR,
)
AUTOSCALER_READY = ServiceGauge(
    "plimsoll_autoscaler_ready_replicas",
    "Ready replicas of a tier.",
    _TIER_LABELS,
    registry=OPERATOR,
)
AUTOSCALER_OVERDUE = ServiceGauge(
    "plimsoll_autoscaler_overdue_replicas",
    "Replicas of a tier whose start-up takes longer than earlier ones explain.",
    _TIER_LABELS,
    registry=OPERATOR,
)
AUTOSCALER_STARTUP = ServiceGauge(
    "plimsoll_autoscaler_startup_seconds",
    "Expected start-up time of the next replica of a tier, from observed start-ups (quantile: 0.5, 0.9).",
    [*_TIER_LABELS, "quantile"],
    registry=OPERATOR,
)
SLO_OBJECTIVE = ServiceGauge(
    "plimsoll_slo_objective_ratio",
    "Share of requests that must meet all targets of the SLO; no series without an SLO.",
    ["service"],
    registry=OPERATOR,
)
SLO_TTFT_TARGET = ServiceGauge(
    "plimsoll_slo_ttft_target_seconds",
    "TTFT target, for a prompt of the last minute's mean length.",
    ["service"],
    registry=OPERATOR,
)
SLO_TPOT_TARGET = ServiceGauge(
    "plimsoll_slo_tpot_target_seconds",
    "TPOT target.",
    ["service"],
    registry=OPERATOR,
)
SLO_E2E_TARGET = ServiceGauge(
    "plimsoll_slo_e2e_target_seconds",
    "End-to-end latency target; no series without one.",
    ["service"],
    registry=OPERATOR,
)
SLO_E2E_MEASURED = ServiceGauge(
    "plimsoll_slo_e2e_measured_seconds",
    "End-to-end latency of the last minute's responses at the SLO's percentile; no series without a target.",
    ["service"],
    registry=OPERATOR,
)
SLO_ITL_TARGET = ServiceGauge(
    "plimsoll_slo_itl_target_seconds",
    "Target for the 99th percentile of the inter-token latency; no series without one.",
    ["service"],
    registry=OPERATOR,
)
SLO_ITL_MEASURED = ServiceGauge(
    "plimsoll_slo_itl_measured_seconds",
    "99th percentile of the last minute's inter-token latency; no series without a target or a measurement.",
    ["service"],
    registry=OPERATOR,
)
SLO_TARGET_ATTAINMENT = ServiceGauge(
    "plimsoll_slo_target_attainment_ratio",
    "Share of the last minute's responses that met one target (target: ttft, tpot, e2e); no series without it.",
    ["service", "target"],
    registry=OPERATOR,
)
SLO_ATTAINMENT = ServiceGauge(
    "plimsoll_slo_attainment_ratio",
    "Lower bound of the share of the last minute's responses that met all targets; no series while a target is not "
    "measured.",
    ["service"],
    registry=OPERATOR,
)
SLO_ERROR = ServiceGauge(
    "plimsoll_slo_error_ratio",
    "Upper bound of the share of the last minute's requests that were rejected or missed a target; a target that is "
    "not measured counts as met.",
    ["service"],
    registry=OPERATOR,
)
SERVICE_CONDITION = ServiceGauge(
    "plimsoll_service_condition",
    "Status of a service's conditions (1: True, 0: False, -1: Unknown), by type and current reason.",
    ["service", "type", "reason"],
    registry=OPERATOR,
)

SERVICE_GPUS = ServiceGauge(
    "plimsoll_service_gpus",
    "GPUs of the ordered replicas of a tier, ready or not.",
    _TIER_LABELS,
    registry=OPERATOR,
)
SERVICE_COST = ServiceGauge(
    "plimsoll_service_cost_per_hour",
    "Price of a service's GPUs for one hour by spec.cost; no series without it. `model` is its model name.",
    ["service", "model", "currency"],
    registry=OPERATOR,
)

_SCALING_GAUGES = (
    AUTOSCALER_DESIRED,
    AUTOSCALER_NEEDED,
    AUTOSCALER_REPLICA_CAPACITY,
    AUTOSCALER_LOAD,
    AUTOSCALER_FORECAST,
    AUTOSCALER_UTILIZATION,
    AUTOSCALER_REJECTED_SHARE,
    AUTOSCALER_TTFT_OFFSET,
    AUTOSCALER_TOKEN_RATIO,
    AUTOSCALER_DRAFT_ACCEPTANCE,
    AUTOSCALER_READY,
    AUTOSCALER_OVERDUE,
    AUTOSCALER_STARTUP,
    SLO_OBJECTIVE,
    SLO_TTFT_TARGET,
    SLO_TPOT_TARGET,
    SLO_E2E_TARGET,
    SLO_E2E_MEASURED,
    SLO_ITL_TARGET,
    SLO_ITL_MEASURED,
    SLO_TARGET_ATTAINMENT,
    SLO_ATTAINMENT,
    SLO_ERROR,
)

# A standby does not update these, and queries take the maximum or the sum over the operator's pods.
_LEADER_METRICS = (
    *_SCALING_GAUGES,
    OPERATOR_ENGINE_RETUNINGS,
    OPERATOR_ENGINE_TUNING,
    OPERATOR_ENGINE_POLLS_WAITING,
    OPERATOR_ENGINE_POLLS_PUT_OFF,
    SERVICE_CONDITION,
    SERVICE_GPUS,
    SERVICE_COST,
)


@contextmanager
def leading() -> Iterator[None]:
    """While this process leads. Afterwards its metrics about services have no series, and its queue has no keys."""
    with OPERATOR_LEADING.track_inprogress():
        try:
            yield
        finally:
            for metric in _LEADER_METRICS:
                metric.clear()
            OPERATOR_QUEUE.set(0)


def remove_scaling_series(service: str) -> None:
    """Remove every scaling series of a service."""
    for gauge in _SCALING_GAUGES:
        gauge.remove_service(service)
    OPERATOR_ENGINE_RETUNINGS.remove_by_labels({"service": service})


def remove_drain_series(service: str) -> None:
    """Remove the drain counters of a deleted service."""
    for counter in (OPERATOR_DRAINS_TIMED_OUT, OPERATOR_REQUESTS_ABORTED):
        counter.remove_by_labels({"service": service})


for _result in ("allowed", "warned", "refused", "failed"):
    OPERATOR_ADMISSION_REVIEWS.labels(_result)
for _code in ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "UNAVAILABLE", "RESOURCE_EXHAUSTED"):
    OPERATOR_KEDA_ANSWERS.labels(_code)
for _outcome in ("done", "retry", "unexpected"):
    OPERATOR_RECONCILES.labels(_outcome)
for _verb in ("PATCH", "POST", "PUT", "DELETE"):
    OPERATOR_WRITES.labels(_verb)
for _reason in ("slow_request", "too_many", "slow_reader"):
    OPERATOR_CONNECTIONS_CUT.labels(_reason)
