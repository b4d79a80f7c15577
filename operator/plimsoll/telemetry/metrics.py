"""Every metric of Plimsoll's own processes, with its unit and its labels.

Labels are bounded: `service` is NAMESPACE/NAME of an InferenceService that exists, the others are members of closed
sets.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# ---------------------------------------------------------------- gateway

GATEWAY = CollectorRegistry()

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 30, 60, 120, 300, 600)

GATEWAY_ARRIVED = Counter(
    "plimsoll_gateway_requests_arrived",
    "Completion requests for a known model, first attempts and retries of the client apart (attempt: first, retry).",
    ["service", "attempt"],
    registry=GATEWAY,
)
GATEWAY_ENDED = Counter(
    "plimsoll_gateway_requests_ended",
    "Requests sent to an engine, by how they ended (outcome: answered, failed, cancelled).",
    ["service", "outcome"],
    registry=GATEWAY,
)
GATEWAY_REFUSED = Counter(
    "plimsoll_gateway_requests_refused",
    "Requests the gateway refused itself, by reason; `service` is empty where no known model was named.",
    ["service", "reason"],
    registry=GATEWAY,
)
GATEWAY_OUTCOMES = Counter(
    "plimsoll_gateway_outcomes",
    "Decisions of admission (outcome: Admitted, Held, Downgraded, ShedSaturated, ShedStarting, ShedQuota,"
    " ShedDeadline, ShedNoCapacity, ClientGone); a request that is held has another one later.",
    ["service", "outcome"],
    registry=GATEWAY,
)
GATEWAY_HELD = Gauge(
    "plimsoll_gateway_held",
    "Requests that wait at the gateway until an engine has room, or until one is there.",
    ["service"],
    registry=GATEWAY,
)
GATEWAY_PACE = Gauge(
    "plimsoll_gateway_engine_pace_ratio",
    "How many times as long as the model says the slowest engine's steps take, as learned from answers that ended.",
    ["service"],
    registry=GATEWAY,
)
GATEWAY_UNSEEN = Gauge(
    "plimsoll_gateway_unseen_first_token_seconds",
    "How much later than the model says first tokens are expected where that is the most, as learned from those that"
    " came: the engines' host and front end, the network.",
    ["service"],
    registry=GATEWAY,
)
GATEWAY_PREFILLS = Counter(
    "plimsoll_gateway_prefills",
    "Requests to a decode tier, by where their prompt was to be computed (where: remote, local).",
    ["service", "where"],
    registry=GATEWAY,
)
GATEWAY_TTFT = Histogram(
    "plimsoll_gateway_time_to_first_byte_seconds",
    "From a request's first byte to the first byte of the engine's answer body, errors left out.",
    ["service"],
    buckets=_SECONDS,
    registry=GATEWAY,
)
GATEWAY_DURATION = Histogram(
    "plimsoll_gateway_request_seconds",
    "From a request's first byte to the last byte of its answer.",
    ["service"],
    buckets=_SECONDS,
    registry=GATEWAY,
)
GATEWAY_INFLIGHT = Gauge(
    "plimsoll_gateway_inflight_requests",
    "Requests that endpoints of a role work on now, as the picker counts them.",
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
    "Requests that Envoy let through without an answer of the picker: above zero, it died or hangs.",
    registry=GATEWAY,
)
GATEWAY_BAD_RECORDS = Counter(
    "plimsoll_gateway_bad_log_records",
    "Lines of Envoy's access log that could not be read; a restart may cut one.",
    registry=GATEWAY,
)
GATEWAY_UNREADABLE = Counter(
    "plimsoll_gateway_unreadable_objects",
    "Times that an object of the API server could not be read and was left out (kind: InferenceService, Pod).",
    ["kind"],
    registry=GATEWAY,
)
GATEWAY_FILES_WRITTEN = Counter(
    "plimsoll_gateway_config_files_written",
    "Cluster and endpoint files written for Envoy.",
    registry=GATEWAY,
)
GATEWAY_PICK_SECONDS = Counter(
    "plimsoll_gateway_pick_seconds",
    "Time spent in answering Envoy, in all: divided by requests, what a pick costs.",
    registry=GATEWAY,
)
GATEWAY_LOOP_LAG = Gauge(
    "plimsoll_gateway_loop_lag_seconds",
    "How late the picker's event loop last ran a timer.",
    registry=GATEWAY,
)

_OF_SERVICE = (
    GATEWAY_ARRIVED,
    GATEWAY_ENDED,
    GATEWAY_REFUSED,
    GATEWAY_OUTCOMES,
    GATEWAY_HELD,
    GATEWAY_PACE,
    GATEWAY_UNSEEN,
    GATEWAY_PREFILLS,
    GATEWAY_TTFT,
    GATEWAY_DURATION,
    GATEWAY_INFLIGHT,
    GATEWAY_ENDPOINTS,
)


def forget_gateway_service(service: str) -> None:
    """Drop every series of a service that is gone."""
    for metric in _OF_SERVICE:
        metric.remove_by_labels({"service": service})


# ---------------------------------------------------------------- operator

OPERATOR = CollectorRegistry()

OPERATOR_LEADING = Gauge(
    "plimsoll_operator_leading",
    "1 while this process holds the lease and works, 0 while it stands by.",
    registry=OPERATOR,
)
OPERATOR_RECONCILES = Counter(
    "plimsoll_operator_reconciles",
    "Rounds of work on a service, by how they ended (outcome: done, retry, unexpected).",
    ["outcome"],
    registry=OPERATOR,
)
OPERATOR_RECONCILE_SECONDS = Histogram(
    "plimsoll_operator_reconcile_seconds",
    "How long a round of work on a service took.",
    buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    registry=OPERATOR,
)
OPERATOR_QUEUE = Gauge(
    "plimsoll_operator_queue_keys",
    "Services that wait for a round of work.",
    registry=OPERATOR,
)
OPERATOR_INTERNAL_ERRORS = Counter(
    "plimsoll_operator_internal_errors",
    "Unexpected errors of the operator, each contained to one object or one part of the process (stage: watch,"
    " pod_ending, engine_list, engine_metrics, engine_about, gateway, scaling, reconcile, part).",
    ["stage"],
    registry=OPERATOR,
)
OPERATOR_WRITES = Counter(
    "plimsoll_operator_writes",
    "Writes to the API server by verb (verb: PATCH, POST, PUT, DELETE), the lease's own not counted.",
    ["verb"],
    registry=OPERATOR,
)
OPERATOR_SCALED = Counter(
    "plimsoll_operator_scaled",
    "Changes of a tier's replicas by the scaler (tier: prefill, decode, serve; direction: up, down).",
    ["tier", "direction"],
    registry=OPERATOR,
)

_TIER = ["service", "tier"]

OPERATOR_DRAINS_TIMED_OUT = Counter(
    "plimsoll_operator_drains_timed_out",
    "Pods that ended before all their requests had their answers.",
    _TIER,
    registry=OPERATOR,
)
OPERATOR_CUT_OFF = Counter(
    "plimsoll_operator_requests_cut_off",
    "Requests that a pod's drain had no time for, as the pod said in its last words.",
    _TIER,
    registry=OPERATOR,
)


SCALING_DESIRED = Gauge(
    "plimsoll_scaling_desired_replicas",
    "Replicas decided on for a tier, after all limits; in mode Recommend what would be set.",
    _TIER,
    registry=OPERATOR,
)
SCALING_NEEDED = Gauge(
    "plimsoll_scaling_needed_replicas",
    "Replicas that the forecast load of a tier needs within the promise, before limits and spare.",
    _TIER,
    registry=OPERATOR,
)
SCALING_KNEE = Gauge(
    "plimsoll_scaling_knee_requests_per_second",
    "Load that one replica of a tier carries within the promise.",
    _TIER,
    registry=OPERATOR,
)
SCALING_LOAD = Gauge(
    "plimsoll_scaling_load_requests_per_second",
    "Requests that arrive for a tier now, first attempts only, refused ones included.",
    _TIER,
    registry=OPERATOR,
)
SCALING_FORECAST = Gauge(
    "plimsoll_scaling_forecast_requests_per_second",
    "Load of a tier that is sized for: the upper quantile of the most that comes within its start-up time.",
    _TIER,
    registry=OPERATOR,
)
SCALING_UTILISATION = Gauge(
    "plimsoll_scaling_utilisation_ratio",
    "Load of a tier over what its ready replicas carry within the promise.",
    _TIER,
    registry=OPERATOR,
)
SCALING_SHED = Gauge(
    "plimsoll_scaling_shed_ratio",
    "Share of the last minute's first attempts that the gateway refused.",
    ["service"],
    registry=OPERATOR,
)

SCALING_READY = Gauge(
    "plimsoll_scaling_ready_replicas",
    "Replicas of a tier that are ready.",
    _TIER,
    registry=OPERATOR,
)
SCALING_OVERDUE = Gauge(
    "plimsoll_scaling_overdue_replicas",
    "Replicas of a tier whose start takes longer than its earlier starts explain; they are not counted on.",
    _TIER,
    registry=OPERATOR,
)
SCALING_STARTUP = Gauge(
    "plimsoll_scaling_startup_seconds",
    "Time that the next start of a tier is expected to take (quantile: 0.5, 0.9), from what its starts took.",
    [*_TIER, "quantile"],
    registry=OPERATOR,
)
SLO_PROMISED = Gauge(
    "plimsoll_slo_promised_ratio",
    "Share of requests that a service promises to answer within its targets; no series without a promise.",
    ["service"],
    registry=OPERATOR,
)
SLO_TTFT = Gauge(
    "plimsoll_slo_ttft_seconds",
    "Promised time to the first token, for a prompt of the last minute's mean length.",
    ["service"],
    registry=OPERATOR,
)
SLO_TPOT = Gauge(
    "plimsoll_slo_tpot_seconds",
    "Promised time for each further token.",
    ["service"],
    registry=OPERATOR,
)
SLO_E2E = Gauge(
    "plimsoll_slo_e2e_seconds",
    "Promised time to the last token; no series where it is not promised.",
    ["service"],
    registry=OPERATOR,
)
SLO_E2E_MEASURED = Gauge(
    "plimsoll_slo_e2e_measured_seconds",
    "Time to the last byte of the last minute's answers at the promised percentile, as clients saw it; no series where "
    "it is not promised.",
    ["service"],
    registry=OPERATOR,
)
SLO_ITL = Gauge(
    "plimsoll_slo_itl_seconds",
    "Promised 99th percentile of the gaps between two tokens of an answer; no series where it is not promised.",
    ["service"],
    registry=OPERATOR,
)
SLO_ITL_MEASURED = Gauge(
    "plimsoll_slo_itl_measured_seconds",
    "99th percentile of the last minute's gaps between tokens, as the engines' histograms tell; no series where it is "
    "not promised or not known.",
    ["service"],
    registry=OPERATOR,
)
SLO_MET = Gauge(
    "plimsoll_slo_met_ratio",
    "Share of the last minute's answers within one target of a request (target: ttft, tpot, e2e); no series where it "
    "is not promised or not known.",
    ["service", "target"],
    registry=OPERATOR,
)
SLO_ATTAINMENT = Gauge(
    "plimsoll_slo_attainment_ratio",
    "Share of the last minute's answers that were, at least, within all targets of a request; no series while one is "
    "not known.",
    ["service"],
    registry=OPERATOR,
)
SLO_MISSED = Gauge(
    "plimsoll_slo_missed_ratio",
    "Share of the last minute's requests that were refused or, at most, answered beyond a target; what is not known of "
    "a target counts as no miss.",
    ["service"],
    registry=OPERATOR,
)
SERVICE_CONDITION = Gauge(
    "plimsoll_service_condition",
    "Conditions of a service's status (1: True, 0: False, -1: Unknown), by type, with the present reason.",
    ["service", "type", "reason"],
    registry=OPERATOR,
)

_OF_SCALED = (
    SCALING_DESIRED,
    SCALING_NEEDED,
    SCALING_KNEE,
    SCALING_LOAD,
    SCALING_FORECAST,
    SCALING_UTILISATION,
    SCALING_SHED,
    SCALING_READY,
    SCALING_OVERDUE,
    SCALING_STARTUP,
    SLO_PROMISED,
    SLO_TTFT,
    SLO_TPOT,
    SLO_E2E,
    SLO_E2E_MEASURED,
    SLO_ITL,
    SLO_ITL_MEASURED,
    SLO_MET,
    SLO_ATTAINMENT,
    SLO_MISSED,
)


def forget_scaled_service(service: str) -> None:
    """Drop every series of a service that is gone, or of what is not known of it any more."""
    for metric in _OF_SCALED:
        metric.remove_by_labels({"service": service})


def forget_drained_service(service: str) -> None:
    """Drop what was counted of the pods of a service that is gone."""
    for counter in (OPERATOR_DRAINS_TIMED_OUT, OPERATOR_CUT_OFF):
        counter.remove_by_labels({"service": service})


for _kind in ("InferenceService", "Pod"):
    GATEWAY_UNREADABLE.labels(_kind)
for _outcome in ("done", "retry", "unexpected"):
    OPERATOR_RECONCILES.labels(_outcome)
for _verb in ("PATCH", "POST", "PUT", "DELETE"):
    OPERATOR_WRITES.labels(_verb)
