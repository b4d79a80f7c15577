"""Mechanisms of the operator beyond demand, capacity and placement, and how each is switched off.

Not included: what a field of the spec requests (headroom, warm replicas, schedules, rate limits, quotas, classes,
tenants, the ratio of tiers), and what only limits how often a value is computed.
"""

from __future__ import annotations

import math
from typing import Any, Final

from bench.ablation.scaling_mechanisms import SCALE_DOWN, SCALE_UP
from bench.ablation.switches import Mechanism, Switch, constant, doing, returning, returning_argument
from plimsoll.core.admission.retry_advice import UNKNOWN_TIME
from plimsoll.core.types import Unavailable

_OFF: Final = Unavailable("switched off")
_NO_FACTOR: Final = 1e9  # larger than anything that it is compared with


def _without_phase(original: Any, model: Any, pod: Any, now_s: float) -> Any:
    """sees no phase of a starting pod."""
    return original(model, type(pod)(pod.pod, pod.created_s, None, None, pod.unschedulable_reason), now_s)


def _equal_shares(_: Any, controller: Any, cap: int, gateways: Any, now_s: float) -> dict[str, float]:
    """gives each gateway the same share."""
    return {name: cap / len(gateways) for name in gateways}


def _first_token_alone(original: Any, replica: Any, cost: Any, now: float) -> float:
    """predicts as if prefill ahead ran without decoding."""
    stretch, replica.prefill_stretch = replica.prefill_stretch, 1.0
    try:
        return float(original(replica, cost, now))
    finally:
        replica.prefill_stretch = stretch


_MODEL: Final = (
    Mechanism(
        "step-calibration",
        "Learns the times of steps (and so TPOT and TTFT) from the engines' counters.",
        (Switch("autoscaling.tier_engines", "update_all", returning_argument(0, "posterior")),),
        (
            "engine_model/calibration/posterior_update.py",
            "engine_model/calibration/counter_window.py",
            "engine_model/calibration/posterior_model.py",
        ),
    ),
    Mechanism(
        "calibration-shift",
        "Forgets what was learned of steps when surprises persist.",
        (Switch("engine_model.calibration.posterior_update", "_CUSUM_LIMIT", constant(math.inf)),),
        (),
    ),
    Mechanism(
        "replica-speed",
        "Takes the speed of each replica out of the windows that the model learns from.",
        (
            Switch(
                "engine_model.calibration.replica_speed",
                "ReplicaSpeeds.normalize",
                returning_argument(3, "ratios"),
            ),
        ),
        ("engine_model/calibration/replica_speed.py",),
    ),
    Mechanism(
        "pessimism",
        "Sizes on the upper quartile of the step time while little is known.",
        (Switch("autoscaling.tier_engines", "PESSIMISM", constant(0.5)),),
        ("engine_model/calibration/estimates.py:quantile_model",),
    ),
    Mechanism(
        "tpot-tail",
        "Scales the tail of TPOT by measured over modelled TPOT.",
        (Switch("autoscaling.recommend", "updated_tail_scale", returning_argument(0, "tpot_tail_scale")),),
        ("autoscaling/recommend.py:_integrate_tail", "autoscaling/recommend.py:updated_tail_scale"),
    ),
    Mechanism(
        "arrival-dispersion",
        "Learns how far arrivals bunch, and sizes for it.",
        (Switch("autoscaling.capacity_state", "arrival_dispersion", returning(1.0)),),
        (
            "demand/noise_model.py:arrival_dispersion",
            "autoscaling/capacity_state.py:CapacityState.measured_arrival_cv2",
        ),
    ),
    Mechanism(
        "windowed-slo",
        "Counts a rejection as several misses, so that nearly every window meets the SLO.",
        (Switch("capacity.slo_capacity", "rejection_weight", returning(1.0)),),
        ("capacity/windowed_slo.py", "capacity/peakedness.py"),
    ),
)
_LENGTHS: Final = (
    Mechanism(
        "recent-outputs",
        "Scales outputs up to the tokens generated in the last half minute.",
        (Switch("demand.request_lengths", "RequestLengthEstimator._recent_output_factor", returning((1.0, 0.0))),),
        (
            "demand/completion_estimator.py",
            "demand/request_lengths.py:RequestLengthEstimator._recent_output_factor",
        ),
    ),
    Mechanism(
        "mix-shift",
        "Forgets completed requests where arrivals or outputs show a new mix.",
        (Switch("demand.request_lengths", "RequestLengthEstimator._is_mix_shift", returning(False)),),
        (
            "demand/request_lengths.py:RequestLengthEstimator._is_mix_shift",
            "demand/request_lengths.py:RequestLengthEstimator._discard_older",
        ),
    ),
    Mechanism(
        "partial-lengths",
        "Takes outputs so far for lengths before requests have completed.",
        (
            Switch(
                "demand.request_lengths",
                "RequestLengthEstimator._partial_lengths",
                returning(_OFF, "says that lengths are unknown"),
            ),
        ),
        ("demand/request_lengths.py:RequestLengthEstimator._partial_lengths",),
    ),
    Mechanism(
        "prompt-correction",
        "Corrects the tokens that gateways estimate by those that engines count.",
        (Switch("demand.request_lengths", "_correction_ratio", returning(1.0)),),
        ("demand/request_lengths.py:_correction_ratio",),
    ),
    Mechanism(
        "media-ratios",
        "Estimates the tokens of pictures, sound and video.",
        (Switch("demand.token_ratios", "TokenRatioEstimator.ratios", returning({})),),
        ("demand/token_ratios.py",),
    ),
    Mechanism(
        "prefix-share",
        "Learns the share of prompt tokens that the prefix cache saves.",
        (Switch("demand.request_lengths", "RequestLengthEstimator.cached_share", returning(0.0)),),
        (
            "demand/request_lengths.py:RequestLengthEstimator.cached_share",
            "demand/request_lengths.py:RequestLengthEstimator.on_prefill",
        ),
    ),
)
_LIMITS: Final = (
    Mechanism(
        "measured-limits",
        "Lowers the announced slots and KV tokens of an engine to what its readings show that it holds.",
        (Switch("engine_model.measured_limits", "MeasuredLimits.apply", returning_argument(1, "announced")),),
        ("engine_model/measured_limits.py",),
    ),
    Mechanism(
        "itl-limit",
        "Sizes for less load per replica where its measured ITL exceeds the target.",
        (Switch("autoscaling.itl_limit", "ItlLimit.correction", returning(1.0)),),
        ("autoscaling/itl_limit.py",),
    ),
)
_STARTUP: Final = (
    Mechanism(
        "startup-learning",
        "Learns start-up times from the pods that became ready.",
        (Switch("autoscaling.startup_models", "record", returning_argument(0, "model")),),
        (
            "autoscaling/startup_time.py:record",
            "autoscaling/startup_time.py:_update_phase",
            "autoscaling/startup_models.py",
        ),
    ),
    Mechanism(
        "startup-change",
        "Makes earlier starts a prior where a start shows that starts have changed.",
        (Switch("autoscaling.startup_time", "_compare", returning((0, False), "sees no change")),),
        ("autoscaling/startup_time.py:_compare", "autoscaling/startup_time.py:PhaseEstimate.outlier_bounds"),
    ),
    Mechanism(
        "startup-phases",
        "Predicts the end of a start by the phase that it is in.",
        (
            Switch("autoscaling.pending_replicas", "eta", doing(_without_phase)),
            Switch("autoscaling.retry_backlog", "eta", doing(_without_phase)),
        ),
        ("autoscaling/startup_time.py:_order_phases",),
    ),
)
_ADMISSION: Final = (
    Mechanism(
        "ttft-margin",
        "Keeps a part of the TTFT target free while requests compete for slots.",
        (Switch("admission.controller", "AdmissionController._safety_margin_s", returning(0.0)),),
        ("admission/ttft_margin.py", "admission/controller.py:AdmissionController._safety_margin_s"),
    ),
    Mechanism(
        "ttft-margin-learning",
        "Moves that margin with each first token, from 30 % of the target.",
        (Switch("admission.ttft_margin", "TtftMargin.observe", returning(None)),),
        ("admission/ttft_margin.py:TtftMargin.observe",),
    ),
    Mechanism(
        "early-first-tokens",
        "Learns of first tokens while their responses run.",
        (Switch("admission.first_token_reports", "report_ages_s", returning(())),),
        ("admission/first_token_reports.py",),
    ),
    Mechanism(
        "ttft-residual",
        "Learns how much later than predicted first tokens of a replica are.",
        (Switch("admission.ttft_residual", "TtftResidual.expected_s", returning(0.0)),),
        ("admission/ttft_residual.py",),
    ),
    Mechanism(
        "step-time-ratio",
        "Learns how fast each replica is from the requests that end.",
        (Switch("admission.replica", "ReplicaState._update_step_time", returning(None)),),
        ("admission/replica.py:ReplicaState._update_step_time",),
    ),
    Mechanism(
        "fast-replica-slots",
        "A replica that is faster than the model holds more sequences.",
        (Switch("admission.replica", "ReplicaState._extra_capacity", returning(1.0)),),
        ("admission/replica.py:ReplicaState._extra_capacity",),
    ),
    Mechanism(
        "chunk-interference",
        "Prefill that is ahead takes longer in steps that also decode.",
        (Switch("admission.replica", "ReplicaState.predict_ttft_s", doing(_first_token_alone)),),
        (),
    ),
    Mechanism(
        "prefill-pacing",
        "Prefill may run ahead of its share of the steps only by a short burst.",
        (Switch("admission.replica", "PREFILL_BURST_SHARE", constant(_NO_FACTOR)),),
        ("admission/replica.py:ReplicaState._update_budgets",),
    ),
    Mechanism(
        "kv-projection",
        "Projects the KV cache until running requests have ended, before it is called full.",
        (Switch("admission.replica", "ReplicaState._kv_room_at_s", returning(math.inf)),),
        ("admission/kv_projection.py", "admission/replica.py:ReplicaState._kv_room_at_s"),
    ),
    Mechanism(
        "prefill-cancel",
        "Gives booked prefill back when its request ends early or was smaller.",
        (Switch("admission.replica", "ReplicaState._cancel_prefill", returning(None)),),
        ("admission/replica.py:ReplicaState._cancel_prefill",),
    ),
    Mechanism(
        "output-estimate",
        "Estimates the tokens of a response from its bytes.",
        (Switch("admission.token_estimator", "TokenEstimator.estimate", returning(None)),),
        ("admission/token_estimator.py",),
    ),
    Mechanism(
        "retry-reservations",
        "Gives rejected clients a time with capacity for them.",
        (
            Switch(
                "admission.retry_reservations",
                "RetryReservations.reserve",
                returning(UNKNOWN_TIME, "gives no reservation"),
            ),
        ),
        ("admission/retry_reservations.py", "admission/arrival_estimator.py"),
    ),
    Mechanism(
        "retry-detection",
        "Does not count the retry of a rejected request as new demand.",
        (Switch("admission.retry_detection", "RecentRejections.is_retry", returning(False)),),
        ("admission/retry_detection.py",),
    ),
    Mechanism(
        "gateway-arrivals",
        "Keeps capacity for new arrivals free of retry reservations.",
        (Switch("admission.arrival_estimator", "ArrivalEstimator.work_rate", returning(0.0)),),
        ("admission/arrival_estimator.py",),
    ),
    Mechanism(
        "prefix-affinity",
        "Sends a prompt to the replica that has its prefix.",
        (Switch("routing.prefix_index", "PrefixIndex.match_depth", returning(0)),),
        ("routing/prefix_index.py",),
    ),
    Mechanism(
        "kv-transfer",
        "Learns what a KV transfer takes, and prefills at decode engines where that is faster.",
        (
            Switch(
                "autoscaling.admission_publisher", "transit_s", returning(_OFF, "says that no transfer was measured")
            ),
        ),
        ("engine_model/kv_transfer.py", "admission/placement.py:ReplicaPool._local_cost_if_cheaper"),
    ),
    Mechanism(
        "prefill-lateness",
        "Corrects the queue of a prefill engine by prompts that are done.",
        (Switch("admission.prefill_queue", "PrefillQueue.complete", returning(None)),),
        ("admission/prefill_queue.py:PrefillQueue.complete",),
    ),
    Mechanism(
        "gateway-shares",
        "Divides slots among gateways by their demand.",
        (Switch("admission.share_controller", "ShareController._demand_weights", doing(_equal_shares)),),
        ("admission/share_controller.py:ShareController._demand_weights",),
    ),
)
MECHANISMS: Final[dict[str, Mechanism]] = {
    one.name: one for one in (*SCALE_UP, *SCALE_DOWN, *_MODEL, *_LENGTHS, *_LIMITS, *_STARTUP, *_ADMISSION)
}
