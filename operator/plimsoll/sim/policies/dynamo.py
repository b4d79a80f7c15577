"""NVIDIA Dynamo's planner, the unmodified package, in virtual time.

Problem: a reimplemented peer proves little. The package expects a cluster, a clock, a Prometheus and engines with an
instrumented scheduler.

Idea: its decisions are a state machine without I/O (`dynamo.planner.core.state_machine`, ai-dynamo 1.2.1, the newest
release whose planner runs in all modes from PyPI alone). At its own ticks it gets here what its own adapters provide:
completed requests and their mean lengths over its interval, ready replicas, each engine's newest step and queue, and
before the first tick the workers' own benchmark (`dynamo_profile`). Its orders are applied as by its Kubernetes
connector: an order is dropped while any replica of the deployment is still starting.

`dynamo-throughput` is its throughput loop in SLA mode. `dynamo-load` is its load loop, with the target `throughput`,
which is the product's default, `latency`, or `sla`, and with `floor=1` both loops together. Defaults are the package's
own. The GPU budget is what the service's bounds allow, and the latency targets are the service's.

The planner has slightly better data than in a cluster: no scrape delays its metrics.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from plimsoll.core.ports import EngineReading
from plimsoll.core.types import Role
from plimsoll.sim.attempt import TraceRequest
from plimsoll.sim.engine.iteration import Iteration
from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies import dynamo_profile
from plimsoll.sim.policies.base import Observation, PolicyContext, SimulatedPolicy
from plimsoll.sim.policies.options import PolicyOptions

VERSION: Final = "1.2.1"
INSTALL_HINT: Final = (
    "in a checkout of Plimsoll, pip install '.[dynamo]' and then "
    f"pip install --no-deps ai-dynamo=={VERSION} ai-dynamo-runtime=={VERSION}"
)
THROUGHPUT_INTERVAL_S: Final = 180
LOAD_INTERVAL_S: Final = 5
PREDICTOR: Final = "arima"
SENSITIVITY: Final = 80
DEFAULT_TTFT_S: Final = 0.5  # if the service has none
DEFAULT_ITL_S: Final = 0.05
_MODULES: Final = (
    "dynamo.common.forward_pass_metrics",
    "dynamo.planner.config.planner_config",
    "dynamo.planner.core.state_machine",
    "dynamo.planner.core.types",
)
_PREDICTORS: Final = ("constant", "arima", "kalman", "prophet")
_TARGETS: Final = ("throughput", "latency", "sla")


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """Settings of the planner, after its configuration.

    target: of its load loop. throughput_scaling, load_scaling: which loops scale; each has its interval. sensitivity:
    percent of the targets below which it may scale down. full_profile: whether the profile of an engine that does both
    includes prefill; the package asks for decode only.
    """

    target: str
    throughput_scaling: bool
    load_scaling: bool
    ttft_s: float
    itl_s: float
    throughput_interval_s: int
    load_interval_s: int
    predictor: str
    sensitivity: int
    full_profile: bool
    gated: bool


class TrafficCounters:
    """Completed requests and their mean lengths since the last call, from the counters of gateways and engines."""

    def __init__(self) -> None:
        self._succeeded = 0.0
        self._previous: dict[str, tuple[float, ...]] = {}
        self._sums = [0.0] * 6

    def update(
        self, succeeded: float, decode_readings: Sequence[EngineReading], prefill_readings: Sequence[EngineReading]
    ) -> None:
        """Process one reading. succeeded: completed requests since the start. decode_readings, prefill_readings: by
        engine.
        """
        self._sums[0] += succeeded - self._succeeded
        self._succeeded = succeeded
        for one in decode_readings:
            prompts, outputs = one.prompt_tokens, one.output_tokens
            if prompts is not None and outputs is not None:
                counters = (sum(prompts.counts), prompts.value_sum, outputs.value_sum)
                self._add(1, f"ended {one.pod}", counters)
        for one in prefill_readings:
            self._add(4, f"read {one.pod}", (one.cached_prompt_tokens or 0.0, one.local_prompt_tokens or 0.0))

    def take(self) -> tuple[float, float, float, float | None]:
        """Return requests, mean prompt, mean output, share of cached prompt tokens (None without prompts)."""
        succeeded, completed, prompts, outputs, cached, local = self._sums
        self._sums = [0.0] * 6
        hits = cached / (cached + local) if cached + local else None
        return succeeded, prompts / completed if completed else 0.0, outputs / completed if completed else 0.0, hits

    def _add(self, first: int, key: str, counters: tuple[float, ...]) -> None:
        previous = self._previous.get(key, (0.0,) * len(counters))
        for place, (current, last) in enumerate(zip(counters, previous, strict=True)):
            self._sums[first + place] += current - last
        self._previous[key] = counters


class DynamoPolicy:
    """One planner and its fleet. package: the result of `load`."""

    initial_replicas: Mapping[Role, int] | None = None

    def __init__(self, planner_settings: PlannerSettings, context: PolicyContext, package: SimpleNamespace) -> None:
        self.runs_operator = planner_settings.gated
        self._settings, self._context, self._package = planner_settings, context, package
        self._prefill_role = Role.PREFILL if Role.PREFILL in context.bounds else None
        self._decode_role = next(role for role in context.bounds if role is not Role.PREFILL)
        self._traffic = TrafficCounters()
        self._planner = package.PlannerStateMachine(self._config(), self._capabilities())
        self._benchmark()
        self._tick: Any = None

    def on_arrival(self, request: TraceRequest, now_s: float) -> None:
        """Do nothing: the planner counts completed requests."""

    def desired_replicas(self, observation: Observation) -> Mapping[Role, int]:
        if self._tick is None:
            self._tick = self._planner.initial_tick(observation.now_s)
        if observation.now_s < self._tick.at_s:
            return {}
        effects = self._planner.on_tick(self._tick, self._tick_input(observation))
        self._tick = effects.next_tick
        if effects.scale_to is None or not self._is_settled(observation):
            return {}
        orders = {self._prefill_role: effects.scale_to.num_prefill, self._decode_role: effects.scale_to.num_decode}
        return {role: self._clamped(role, n) for role, n in orders.items() if role is not None and n is not None}

    def _clamped(self, role: Role, replicas: int) -> int:
        minimum, maximum = self._context.bounds[role]
        return min(maximum, max(minimum, replicas))

    def _is_settled(self, observation: Observation) -> bool:
        """Whether the deployment is Ready: all ordered replicas are."""
        return all(observation.ready[role] == observation.desired[role] for role in self._context.bounds)

    def _tick_input(self, observation: Observation) -> Any:
        package, tick = self._package, self._tick
        traffic = None
        if tick.need_traffic_metrics or self._settings.throughput_scaling:
            self._update_traffic(observation)
        if tick.need_traffic_metrics:
            requests, prompt, output, cache_hit_share = self._traffic.take()
            if tick.run_throughput_scaling:
                traffic = package.TrafficObservation(
                    float(self._settings.throughput_interval_s), requests, prompt, output, cache_hit_share
                )
            elif cache_hit_share is not None:
                traffic = package.TrafficObservation(tick.traffic_metrics_duration_s, 0.0, 0.0, 0.0, cache_hit_share)
        prefill, decode = (
            None if role is None else observation.ready[role] for role in (self._prefill_role, self._decode_role)
        )
        settled = self._is_settled(observation)
        counts = package.WorkerCounts(
            ready_num_prefill=prefill,
            ready_num_decode=decode,
            expected_num_prefill=prefill if settled else None,
            expected_num_decode=decode if settled else None,
        )
        steps = None
        if tick.need_worker_fpm:
            steps = package.FpmObservations(
                prefill=self._step_metrics(observation, self._prefill_role),
                decode=self._step_metrics(observation, self._decode_role),
            )
        return package.TickInput(now_s=observation.now_s, traffic=traffic, worker_counts=counts, fpm_observations=steps)

    def _update_traffic(self, observation: Observation) -> None:
        decode_readings = observation.engine_readings[self._decode_role]
        prefill_readings = (
            decode_readings if self._prefill_role is None else observation.engine_readings[self._prefill_role]
        )
        self._traffic.update(
            sum(one.succeeded for one in observation.gateway_readings), decode_readings, prefill_readings
        )

    def _step_metrics(self, observation: Observation, role: Role | None) -> dict[tuple[str, int], Any] | None:
        if role is None:
            return None
        return {(one.pod, 0): self._forward_pass_metrics(one) for one in observation.iterations[role]} or None

    def _forward_pass_metrics(self, one: Iteration) -> Any:
        package, work, queued = self._package, one.work, one.queued
        return package.ForwardPassMetrics(
            worker_id=one.pod,
            wall_time=one.duration_s,
            scheduled_requests=package.ScheduledRequestMetrics(
                num_prefill_requests=work.prefills,
                sum_prefill_tokens=work.tokens,
                sum_prefill_kv_tokens=work.cached,
                num_decode_requests=work.decodes,
                sum_decode_kv_tokens=work.context,
            ),
            queued_requests=package.QueuedRequestMetrics(
                num_prefill_requests=queued.prefills,
                sum_prefill_tokens=queued.tokens,
                num_decode_requests=queued.decodes,
                sum_decode_kv_tokens=queued.context,
            ),
        )

    # ---------------------------------------------------------------- set-up

    def _config(self) -> Any:
        planner_settings, gpus = self._settings, self._context.gpus
        return self._package.PlannerConfig(
            environment="virtual",
            backend="vllm",
            mode="agg" if self._prefill_role is None else "disagg",
            optimization_target=planner_settings.target,
            prefill_engine_num_gpu=None if self._prefill_role is None else gpus.get(self._prefill_role, 1),
            decode_engine_num_gpu=gpus.get(self._decode_role, 1),
            max_gpu_budget=sum(most * gpus.get(role, 1) for role, (_, most) in self._context.bounds.items()),
            ttft_ms=1000.0 * planner_settings.ttft_s,
            itl_ms=1000.0 * planner_settings.itl_s,
            enable_throughput_scaling=planner_settings.throughput_scaling,
            enable_load_scaling=planner_settings.load_scaling,
            throughput_adjustment_interval_seconds=planner_settings.throughput_interval_s,
            load_adjustment_interval_seconds=planner_settings.load_interval_s,
            load_predictor=planner_settings.predictor,
            load_scaling_down_sensitivity=planner_settings.sensitivity,
            pre_deployment_sweeping_mode="thorough",
            report_interval_hours=None,
            live_dashboard_port=0,
        )

    def _capabilities(self) -> Any:
        def capabilities_of(role: Role | None) -> Any:
            if role is None:
                return None
            engine_info = self._context.plant.engine_info(role)
            return self._package.EngineCapabilities(
                num_gpu=self._context.gpus.get(role, 1),
                max_num_batched_tokens=engine_info.token_budget,
                max_num_seqs=engine_info.max_sequences,
                context_length=engine_info.max_model_len,
                max_kv_tokens=engine_info.kv_tokens,
            )

        return self._package.WorkerCapabilities(
            prefill=capabilities_of(self._prefill_role), decode=capabilities_of(self._decode_role)
        )

    def _benchmark(self) -> None:
        plant, decode_role = self._context.plant, self._decode_role
        decode = dynamo_profile.decode(plant, decode_role)
        if self._prefill_role is not None:
            prefill = dynamo_profile.prefill(plant, self._prefill_role)
            self._planner.load_benchmark_fpms(prefill_fpms=self._records(prefill), decode_fpms=self._records(decode))
            return
        prompts = dynamo_profile.prefill(plant, decode_role) if self._settings.full_profile else ()
        self._planner.load_benchmark_fpms(agg_fpms=self._records([*prompts, *decode]))

    def _records(self, samples: Sequence[dynamo_profile.BenchmarkSample]) -> list[Any]:
        return [self._forward_pass_metrics(Iteration("", step_s, work)) for step_s, work in samples]


def load() -> SimpleNamespace:
    """Return the planner's classes by name, from the modules that have them. Raises BadInput without the package."""
    logging.getLogger("prophet").setLevel(logging.CRITICAL)  # it warns that it cannot draw
    try:
        modules = [importlib.import_module(name) for name in _MODULES]
    except ImportError as error:
        raise BadInput(f"the planner of ai-dynamo {VERSION} cannot be imported ({error}); {INSTALL_HINT}") from None
    logging.getLogger("dynamo").setLevel(logging.CRITICAL)
    return SimpleNamespace(**{name: value for one in modules for name, value in vars(one).items()})


def make_throughput(options: PolicyOptions, context: PolicyContext) -> SimulatedPolicy:
    """Its throughput loop alone."""
    planner_settings = PlannerSettings(
        target="sla",
        throughput_scaling=True,
        load_scaling=False,
        throughput_interval_s=options.count("interval", THROUGHPUT_INTERVAL_S, 1),
        load_interval_s=LOAD_INTERVAL_S,
        sensitivity=SENSITIVITY,
        **_common(options, context),
    )
    options.finish()
    return DynamoPolicy(planner_settings, context, load())


def make_load(options: PolicyOptions, context: PolicyContext) -> SimulatedPolicy:
    """Its load loop; floor=1 (with target=sla) takes the throughput loop's count as the minimum."""
    target, floor = options.choice("target", "throughput", _TARGETS), options.flag("floor", False)
    if floor and target != "sla":
        raise options.error("floor=1 goes with target=sla: the slow loop has no other")
    planner_settings = PlannerSettings(
        target=target,
        throughput_scaling=floor,
        load_scaling=True,
        throughput_interval_s=options.count("floor_interval", THROUGHPUT_INTERVAL_S, 1),
        load_interval_s=options.count("interval", LOAD_INTERVAL_S, 1),
        sensitivity=_percent(options),
        **_common(options, context),
    )
    if floor and planner_settings.load_interval_s >= planner_settings.throughput_interval_s:
        raise options.error("interval must be shorter than floor_interval")
    options.finish()
    return DynamoPolicy(planner_settings, context, load())


def settings_throughput() -> Sequence[str]:
    """Options for a search: predictors, intervals, and a profile that includes prefill."""
    option_texts = ["", "profile=full"]
    for interval in (60, 180):
        for predictor in ("constant", "arima", "kalman"):
            if (interval, predictor) != (180, "arima"):
                option_texts.append(f"interval={interval},predictor={predictor},profile=full")
    return option_texts


def settings_load() -> Sequence[str]:
    """Options for a search: every target, sensitivities, and both loops together."""
    option_texts = ["", "interval=10", "target=latency", "target=latency,interval=10"]
    option_texts += [f"target=sla,profile=full,sensitivity={percent}" for percent in (70, 80, 90)]
    option_texts += [f"target=sla,profile=full,floor=1,floor_interval={s},predictor=constant" for s in (60, 180)]
    return option_texts


def _common(options: PolicyOptions, context: PolicyContext) -> Any:
    slo = context.slo
    ttft_s, itl_s = (None, None) if slo is None else (slo.ttft_s, slo.tpot_s)
    return {
        "ttft_s": options.positive("ttft", DEFAULT_TTFT_S if ttft_s is None else ttft_s),
        "itl_s": options.positive("itl", DEFAULT_ITL_S if itl_s is None else itl_s),
        "predictor": options.choice("predictor", PREDICTOR, _PREDICTORS),
        "full_profile": options.choice("profile", "own", ("own", "full")) == "full",
        "gated": options.flag("gated", False),
    }


def _percent(options: PolicyOptions) -> int:
    percent = options.count("sensitivity", SENSITIVITY)
    if percent > 100:
        raise options.error("sensitivity is a percentage")
    return percent
