"""Each mechanism of the ablation, switched off, changes the law: a small example of each is different without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.ablation.mechanisms import MECHANISMS
from bench.ablation.switches import switched_off
from plimsoll.core.admission import first_token_reports
from plimsoll.core.admission.arrival_estimator import ArrivalEstimator
from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.prefill_queue import PrefillQueue
from plimsoll.core.admission.retry_detection import RecentRejections
from plimsoll.core.admission.retry_reservations import RetryReservations
from plimsoll.core.admission.share_controller import ShareController
from plimsoll.core.admission.token_estimator import TokenEstimator
from plimsoll.core.autoscaling import recommend, service_decision, sizing_batch, sizing_requests
from plimsoll.core.autoscaling.admission_publisher import AdmissionPublisher
from plimsoll.core.autoscaling.decide import decide
from plimsoll.core.autoscaling.decision_state import DecisionState
from plimsoll.core.autoscaling.inputs import ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.itl_limit import ItlLimit
from plimsoll.core.autoscaling.observations import LaggingSignals, ServiceObservation, TierObservation
from plimsoll.core.autoscaling.rejection_feedback import CapacityCorrection, RejectionSample
from plimsoll.core.autoscaling.scaling_policy import ScalingPolicy
from plimsoll.core.autoscaling.startup_models import UNKNOWN_VARIANT, StartupModels, record_startup
from plimsoll.core.autoscaling.startup_time import StartingPod
from plimsoll.core.autoscaling.tier_state import TierState
from plimsoll.core.autoscaling.ttft_offset import TtftOffset
from plimsoll.core.capacity.slo_capacity import slo_capacity_per_s
from plimsoll.core.capacity.tier_model import build_profile, stack_profiles
from plimsoll.core.demand import growth_stats, idle_periods, request_lengths, seasonality
from plimsoll.core.demand.idle_periods import IdleStats
from plimsoll.core.demand.request_lengths import RequestLengthEstimator
from plimsoll.core.demand.standby_value import growth_distribution
from plimsoll.core.demand.token_ratios import TokenRatioEstimator
from plimsoll.core.engine_model.calibration.counter_window import WindowSums
from plimsoll.core.engine_model.kv_transfer import TransferStats
from plimsoll.core.engine_model.measured_limits import MeasuredLimits
from plimsoll.core.engine_model.step_time import EngineLimits
from plimsoll.core.routing.prefix_index import PrefixIndex
from plimsoll.core.types import Role, Unavailable
from tests.core.scaling_fixtures import (
    FREQUENT_GROWTH,
    SLO,
    STARTUP_MODEL,
    decide_one,
    idle_status,
    make_forecast,
    observed_tier,
    replica_bounds,
    step_message,
)
from tests.core.test_admission import CHAT, SERVE, gate, make_request
from tests.core.test_autoscaler import ABOUT, mix, service_metrics
from tests.core.test_forecast import constant, demand, demand_after, forecast_of

OTHERS_GROWTH = replace(FREQUENT_GROWTH, own_growth=1.0)  # of other services alone


def states(observed: list[TierObservation], step_s: float = 1.0) -> list[Any]:
    """The tier's state after one decision each, each with the state of the one before."""
    state, made = DecisionState(), []
    for number, tier in enumerate(observed):
        service = ServiceObservation({"serve": tier}, state)
        state = decide(service, ScalingPolicy({"serve": replica_bounds()}, SLO), number * step_s).state
        made.append(state.tiers["serve"])
    return made


def retained_standby() -> list[str]:
    """Decisions about tiers with replicas to spare."""
    return [repr(decide_one(observed_tier(make_forecast(0.1 * n, FREQUENT_GROWTH), 14))) for n in range(10, 60)]


def tier_with_model() -> TierState:
    tier = TierState.for_role(Role.SERVE)
    tier.on_engine_info(ABOUT)
    return tier


def window(number: int, seconds_per_step: float, replica: str = "a", prompt: float = 4000.0) -> WindowSums:
    steps = 500.0
    output = 4 * steps
    end_s, busy_s = 10.0 * (number + 1), steps * seconds_per_step
    return WindowSums(end_s, busy_s, steps, prompt + output, output, prompt, 4.0, replica=replica)


def calibrated(*rounds: list[WindowSums]) -> str:
    tier = tier_with_model()
    for windows in rounds:
        tier.engines.update_model(windows, mix())
    return repr(tier.engines.posterior)


def lengths() -> Any:
    """An estimator that knows some prompts and outputs, and no completed request."""
    estimator = RequestLengthEstimator()
    estimator._recent_output.add(0.0, request_lengths._OutputTotals(10.0, 9000.0, 10.0))
    estimator._counted_prompts.add(0.0, 10.0, request_lengths._TokenTotals(10.0, 10_000.0))
    estimator._prompt_sources.add(0.0, 10.0, request_lengths._PromptSources(50.0, 50.0))
    return estimator


def shifted_mix() -> bool:
    estimator = lengths()
    estimator._completed = SimpleNamespace(weight=100.0)
    return bool(estimator._is_mix_shift(3.0, CHAT.output_tokens, 1000.0, CHAT))


def media_ratios() -> dict[str, float]:
    estimator = TokenRatioEstimator()
    for at_s in range(0, 200, 10):
        estimator.on_estimated(float(at_s), 10.0, 10_000.0, {"image": 5000.0})
        estimator.on_counted(float(at_s), 10.0, 20_000.0)
    return dict(estimator.ratios())


def controller_after_responses(count: int = 8, ttft_s: float = 0.4, took_s: float = 8.0) -> AdmissionController:
    """A gate of one replica after requests that were later and slower than its model says."""
    controller = gate()
    for number in range(count):
        controller.submit(make_request(f"r{number}", 0.1 * number), 0.1 * number)
    for number in range(count - 1):
        controller.complete(f"r{number}", took_s + 0.1 * number, 100, ttft_s)
    return controller


def replica_of(controller: AdmissionController) -> Any:
    return controller.pool.replicas["0"]


def crowded() -> Any:
    """A replica with prompts ahead, and the cost of one more."""
    controller = gate()
    for number in range(6):
        controller.submit(make_request(f"r{number}"), 0.0)
    return replica_of(controller), controller.pool.estimate_cost(make_request("more"))


def cancelled_prefill() -> float:
    controller = gate()
    controller.submit(make_request("r", prompt_tokens=8000), 0.0)
    controller.complete("r", 0.0)
    return float(replica_of(controller).prefill_free_s)


def fast_replica() -> float:
    replica = replica_of(gate())
    replica.step_time_ratio = 0.5
    replica._update_factors()
    return float(replica.max_decoding)


def margin() -> float:
    controller = gate()
    controller.submit(make_request("r"), 0.0)
    controller._last_full_s = 0.0
    return controller._safety_margin_s(SimpleNamespace(class_index=0), 0.0)  # type: ignore[arg-type]


def reserved() -> object:
    reservations = RetryReservations()
    reservations.set_capacity_steps(10.0, 5.0)
    return reservations.reserve(make_request("r"), 1.0, 0.0, 0.0)


def detected() -> bool:
    rejections = RecentRejections()
    rejections.record("r", 0.0, 5.0)
    return rejections.is_retry(True, "r", 1.0)


def arriving_work() -> float:
    estimator = ArrivalEstimator(0.0)
    for second in range(1, 20):
        estimator.update(2.0 * second, float(second))
    return estimator.work_rate


def matched_blocks() -> int:
    index = PrefixIndex()
    index.set_endpoints({"a": 100})
    index.record("a", [1, 2, 3])
    return index.match_depth([1, 2, 3])


def late_prefill() -> float:
    queue = PrefillQueue("a", 0.0)
    first = queue.submit(1.0, 0.0, 0.0)
    queue.submit(1.0, 0.0, 0.0)
    queue.complete(first, 3.0, 0.1)
    return queue.free_s


def estimated_tokens() -> int | None:
    estimator = TokenEstimator()
    return [estimator.estimate(1000, 1, 200.0) for _ in range(30)][-1]


def dispersion() -> float:
    tier = TierState.for_role(Role.SERVE)
    tier.capacity_state.result = SimpleNamespace(request_gpu_s=0.1)  # type: ignore[assignment]
    tier.forecast_state = demand_after(np.tile([0.0, 0.0, 0.0, 8.0], 150))
    return tier.capacity_state.measured_arrival_cv2(tier.forecast_state)


def corrected() -> Any:
    observed = observed_tier(3.0, 3)
    metrics = service_metrics(30.0)
    snapshot = ServiceSnapshot(metrics=metrics, tiers={"serve": TierSnapshot(3, 3)})
    known = {"serve": observed.sizing}
    corrections = {"serve": CapacityCorrection(2.0, 0.0)}
    return service_decision.correct_sizings(
        corrections, known, {"serve": TierState.for_role(Role.SERVE)}, snapshot, SLO, 1.0
    )


def retries() -> object:
    snapshot: Any = SimpleNamespace(metrics=SimpleNamespace(reserved_work_s=50.0, is_measured_at_engines=False))
    spec: Any = SimpleNamespace(slo=None)
    capacity: Any = SimpleNamespace(request_gpu_s=0.1)
    tiers, forecast = {"serve": TierState.for_role(Role.SERVE)}, make_forecast(1.0).forecast
    return sizing_requests._retry_backlog(
        tiers, None, "serve", TierSnapshot(1, 1), capacity, forecast, snapshot, spec, 0.0
    )


def retained() -> float:
    forecast = make_forecast(3.0, level_error=0.3).forecast
    request: Any = SimpleNamespace(scheduled_gpu_s=0.0, forecast=forecast, capacity=SimpleNamespace(request_gpu_s=0.1))
    return sizing_batch._retained_rate(request, 30.0)


def seasonal() -> float:
    rising = b"".join(
        seasonality._DOUBLE.pack(float(1 + (n + 12) % seasonality.BINS_PER_DAY))
        for n in range(seasonality.BINS_PER_DAY)
    )
    profile = seasonality.SeasonalProfile(rising, 2 * seasonality.BINS_PER_DAY, 0.0, 1.0)
    state = constant(6.0, 100)._replace(closed_season=seasonality.SeasonState(day=profile))
    return forecast_of(state, horizon_s=3600.0).season


def burst() -> float:
    shares = ((0.5,) * 11,) * 4
    grown = growth_stats.GrowthStats(confident_shares=shares, highest=100.0)
    return forecast_of(constant(6.0, 100)._replace(closed_growth=grown)).burst


def ttft_offset() -> float:
    return TtftOffset(0.2, (-1e4,) * 20 + (0.0,) + (-1e4,) * 30).seconds


def kept_by_late_load() -> str:
    return step_message(decide_one(observed_tier(1.0, 3, carried_per_s=4.0)), "sizing").reason


def overdue() -> int:
    pods = tuple(StartingPod(f"p{n}", -1e5) for n in range(2))
    return decide_one(observed_tier(4.0, 4, ready=2, starting=pods)).replicas


def changed_starts() -> StartupModels:
    models = StartupModels(STARTUP_MODEL)
    for seconds in (240.0, 240.0, 240.0, 30.0):
        models = record_startup(models, UNKNOWN_VARIANT, [("pull", seconds)])
    return models


def starting() -> tuple[float, ...]:
    pod = StartingPod("p", -25.0, "load", -1.0)
    return decide_one(observed_tier(4.0, 4, ready=3, starting=(pod,))).etas_s


def tail_scales() -> list[float]:
    tier = observed_tier(3.0, 3, lagging=LaggingSignals(tpot_s=0.08))
    assert not isinstance(tier.sizing, Unavailable)
    settled = replace(tier, sizing=replace(tier.sizing, model_tpot_s=0.04))
    return [state.tpot_tail_scale for state in states([settled] * 3)]


def pressed() -> int:
    unknown = Unavailable("no gateway answers")
    return decide_one(observed_tier(unknown, 2, lagging=LaggingSignals(waiting=50.0))).replicas


def ramped() -> float:
    return forecast_of(demand_after(np.linspace(1.0, 10.0, 400))).trend


def shifted() -> float:
    return forecast_of(demand_after(demand(np.repeat([2.0, 20.0], [300, 20]), 1.0, 1))).level


def learned_idle_periods() -> tuple[float, ...]:
    stats = idle_periods.update_idle(IdleStats(), 0.0, True, 0.0, 60.0)
    return idle_periods.update_idle(stats, 100.0, False, 1.0, 60.0).ended


PROBES: dict[str, Callable[[], object]] = {
    "standby": lambda: decide_one(observed_tier(make_forecast(3.0, FREQUENT_GROWTH), 3)).replicas,
    "standby-own-growth": lambda: decide_one(observed_tier(make_forecast(3.0, OTHERS_GROWTH), 3)).replicas,
    "standby-retention": retained_standby,
    "standby-certain-level": lambda: (
        decide_one(observed_tier(make_forecast(3.0, FREQUENT_GROWTH, level_error=1.0), 3)).replicas
    ),
    "growth-prior": lambda: growth_distribution(constant(6.0, 100), 60.0).exceedance,
    "own-growth-burst": burst,
    "trend": ramped,
    "level-shift": shifted,
    "season": seasonal,
    "level-uncertainty": lambda: forecast_of(constant(300.0, 60), retries_due=True).uncertainty,
    "retry-backlog": retries,
    "rejection-feedback": corrected,
    "rejection-significance": lambda: RejectionSample(0.1, 60.0, 0.05, 10.0).insignificant_rejections(60.0),
    "lagging-signals": pressed,
    "ttft-offset": ttft_offset,
    "kept-by-late-load": kept_by_late_load,
    "overdue": overdue,
    "one-replacement": overdue,
    "standby-base": lambda: recommend._standby_base(
        3,
        SimpleNamespace(
            rate_per_s=3.2, request_gpu_s=1.0, capacity_correction=1.0, replica_work=1.0, headroom=0.0, replicas=4
        ),
    ),
    "measured-limits": lambda: MeasuredLimits(32.0, 8.0, 8.0).apply(EngineLimits(256, 100_000, 8192)),
    "stabilization-window": lambda: decide_one(observed_tier(make_forecast(1.0, OTHERS_GROWTH), 6)).replicas,
    "idle-learning": learned_idle_periods,
    "downscale-regret": lambda: [state.downscale_regret for state in states([observed_tier(4.0, 4)] * 2)],
    "scale-down-margin": retained,
    "idle-cost": lambda: decide_one(observed_tier(0.0, 1), replica_bounds(0), pause=idle_status(1e5)).replicas,
    "step-calibration": lambda: calibrated([window(0, 0.02)]),
    "calibration-shift": lambda: calibrated(*[[window(n, 0.018 if n < 20 else 0.03)] for n in range(40)]),
    "replica-speed": lambda: calibrated(*[[window(n, 0.018, "a"), window(n, 0.022, "b", 9000.0)] for n in range(5)]),
    "pessimism": lambda: tier_with_model().engines.model,
    "tpot-tail": tail_scales,
    "arrival-dispersion": dispersion,
    "itl-limit": lambda: ItlLimit(2.0, 0.06, 0.05, 100.0).correction(4.0, 0.05, 101.0),
    "windowed-slo": lambda: slo_capacity_per_s(stack_profiles([build_profile(SERVE)]), 2.0).tolist(),
    "recent-outputs": lambda: lengths()._recent_output_factor(1.0, CHAT),
    "mix-shift": shifted_mix,
    "partial-lengths": lambda: repr(lengths()._partial_lengths(1.0)),
    "prompt-correction": lambda: request_lengths._correction_ratio(
        request_lengths._TokenTotals(100.0, 1e4), request_lengths._TokenTotals(100.0, 2e4)
    ),
    "media-ratios": media_ratios,
    "prefix-share": lambda: lengths().cached_share,
    "startup-learning": lambda: record_startup(StartupModels(STARTUP_MODEL), UNKNOWN_VARIANT, [("pull", 90.0)]),
    "startup-change": changed_starts,
    "startup-phases": starting,
    "ttft-margin": margin,
    "ttft-margin-learning": lambda: controller_after_responses()._margins[0].margin_s,
    "early-first-tokens": lambda: first_token_reports.report_age_s(0.1),
    "ttft-residual": lambda: replica_of(controller_after_responses()).ttft_residual_s,
    "step-time-ratio": lambda: replica_of(controller_after_responses()).step_time_ratio,
    "fast-replica-slots": fast_replica,
    "chunk-interference": lambda: (lambda replica, cost: replica.predict_ttft_s(cost, 0.0))(*crowded()),
    "prefill-pacing": lambda: crowded()[0].max_prefill_ahead_s,
    "kv-projection": lambda: (lambda replica, cost: replica._kv_room_at_s(cost, replica.kv_tokens, 0.0))(*crowded()),
    "prefill-cancel": cancelled_prefill,
    "output-estimate": estimated_tokens,
    "retry-reservations": reserved,
    "retry-detection": detected,
    "gateway-arrivals": arriving_work,
    "prefix-affinity": matched_blocks,
    "kv-transfer": lambda: AdmissionPublisher()._updated_kv_transfer_token_s(TransferStats(1e5, 10.0, 1.0), 0.0),
    "prefill-lateness": late_prefill,
    "gateway-shares": lambda: dict(ShareController({"a": 90, "b": 10}).allocate(100, ["a", "b"], 20.0)),
}


def test_every_mechanism_has_an_example() -> None:
    assert PROBES.keys() == MECHANISMS.keys()


@pytest.mark.parametrize("name", MECHANISMS)
def test_law_differs_without_mechanism(name: str) -> None:
    whole = PROBES[name]()
    with switched_off(MECHANISMS[name]):
        without = PROBES[name]()
    assert without != whole
    assert PROBES[name]() == whole  # and it is switched on again
