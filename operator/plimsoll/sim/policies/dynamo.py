"""NVIDIA Dynamo's planner, the unmodified package, in virtual time.

Problem: a peer's planner that was written anew proves little; the package expects a cluster, a clock, a Prometheus and
engines with an instrumented scheduler around it.

Idea: its decisions are a state machine without I/O (`dynamo.planner.core.state_machine`, ai-dynamo 1.2.1, the newest
release whose planner runs in all modes from PyPI alone). Here it is given at its own ticks what its own adapters give
it: requests that ended and their mean lengths over its interval, ready replicas, each engine's newest step and queue,
and before the first tick the workers' own benchmark (`dynamo_profile`). What it orders is done as its Kubernetes
connector does it: an order is dropped while any replica of the deployment is still starting.

`dynamo-throughput` is its slow loop in SLA mode; `dynamo-load` its fast loop, with the target `throughput`, which is
the product's default, `latency`, or `sla`, and with `floor=1` both loops together. Defaults are the package's own; the
GPU budget is what the service's bounds allow, and the latency targets are the service's.

The planner sees a little more than in a cluster: no scrape delays its figures.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import EngineReading
from plimsoll.sim.errors import BadInput
from plimsoll.sim.iteration import Iteration
from plimsoll.sim.policies import dynamo_profile
from plimsoll.sim.policies.base import Look, Policy, Scene
from plimsoll.sim.policies.options import Options
from plimsoll.sim.visit import Asked

VERSION: Final = "1.2.1"
INSTALL: Final = (
    "in a checkout of Plimsoll, pip install '.[dynamo]' and then "
    f"pip install --no-deps ai-dynamo=={VERSION} ai-dynamo-runtime=={VERSION}"
)
SLOW_S: Final = 180
FAST_S: Final = 5
PREDICTOR: Final = "arima"
SENSITIVITY: Final = 80
TTFT_S: Final = 0.5  # where the service promises none
ITL_S: Final = 0.05
_MODULES: Final = (
    "dynamo.common.forward_pass_metrics",
    "dynamo.planner.config.planner_config",
    "dynamo.planner.core.state_machine",
    "dynamo.planner.core.types",
)
_PREDICTORS: Final = ("constant", "arima", "kalman", "prophet")
_TARGETS: Final = ("throughput", "latency", "sla")


@dataclass(frozen=True, slots=True)
class Planning:
    """How the planner is set up, after its configuration.

    target: of its fast loop. slow, fast: which loops scale. sensitivity: percent of the targets down to which it may
    give back. full_profile: whether an engine that does both is benchmarked with prompts too; the package asks it for
    decoding alone.
    """

    target: str
    slow: bool
    fast: bool
    ttft_s: float
    itl_s: float
    slow_s: int
    fast_s: int
    predictor: str
    sensitivity: int
    full_profile: bool
    gated: bool


class Counted:
    """What requests that ended were like since the last time, from the counters of gateways and engines."""

    def __init__(self) -> None:
        self._answered = 0.0
        self._before: dict[str, tuple[float, ...]] = {}
        self._sums = [0.0] * 6

    def hear(self, answered: float, ending: Sequence[EngineReading], reading: Sequence[EngineReading]) -> None:
        """answered: requests that ended since the start. ending: engines that write answers; reading: that read
        prompts."""
        self._sums[0] += answered - self._answered
        self._answered = answered
        for one in ending:
            prompts, outputs = one.prompt_tokens, one.output_tokens
            if prompts is not None and outputs is not None:
                now = (sum(prompts.counts), prompts.total, outputs.total)
                self._add(1, f"ended {one.pod}", now)
        for one in reading:
            self._add(4, f"read {one.pod}", (one.cached_prompt_tokens or 0.0, one.local_prompt_tokens or 0.0))

    def take(self) -> tuple[float, float, float, float | None]:
        """Requests, mean prompt, mean output, share of prompt tokens found in caches (None without prompts)."""
        answered, ended, prompts, outputs, cached, local = self._sums
        self._sums = [0.0] * 6
        hits = cached / (cached + local) if cached + local else None
        return answered, prompts / ended if ended else 0.0, outputs / ended if ended else 0.0, hits

    def _add(self, first: int, key: str, now: tuple[float, ...]) -> None:
        before = self._before.get(key, (0.0,) * len(now))
        for place, (new, old) in enumerate(zip(now, before, strict=True)):
            self._sums[first + place] += new - old
        self._before[key] = now


class Dynamo:
    """One planner and the fleet that it sees. package: what `load` found."""

    initial: Mapping[Role, int] | None = None

    def __init__(self, planning: Planning, scene: Scene, package: SimpleNamespace) -> None:
        self.operator = planning.gated
        self._planning, self._scene, self._package = planning, scene, package
        self._reads = Role.PREFILL if Role.PREFILL in scene.bounds else None
        self._writes = next(role for role in scene.bounds if role is not Role.PREFILL)
        self._counted = Counted()
        self._planner = package.PlannerStateMachine(self._config(), self._capabilities())
        self._benchmark()
        self._tick: Any = None

    def arrived(self, asked: Asked, now_s: float) -> None:
        """Nothing: the planner counts requests that have ended."""

    def wanted(self, look: Look) -> Mapping[Role, int]:
        if self._tick is None:
            self._tick = self._planner.initial_tick(look.now_s)
        if look.now_s < self._tick.at_s:
            return {}
        effects = self._planner.on_tick(self._tick, self._seen(look))
        self._tick = effects.next_tick
        if effects.scale_to is None or not self._settled(look):
            return {}
        orders = {self._reads: effects.scale_to.num_prefill, self._writes: effects.scale_to.num_decode}
        return {role: self._within(role, n) for role, n in orders.items() if role is not None and n is not None}

    def _within(self, role: Role, replicas: int) -> int:
        least, most = self._scene.bounds[role]
        return min(most, max(least, replicas))

    def _settled(self, look: Look) -> bool:
        """Whether the deployment is Ready: every replica that was ordered is."""
        return all(look.ready[role] == look.ordered[role] for role in self._scene.bounds)

    def _seen(self, look: Look) -> Any:
        make, tick = self._package, self._tick
        traffic = None
        if tick.need_traffic_metrics or self._planning.slow:
            self._hear(look)
        if tick.need_traffic_metrics:
            number, prompt, output, hits = self._counted.take()
            if tick.run_throughput_scaling:
                traffic = make.TrafficObservation(float(self._planning.slow_s), number, prompt, output, hits)
            elif hits is not None:
                traffic = make.TrafficObservation(tick.traffic_metrics_duration_s, 0.0, 0.0, 0.0, hits)
        prefill, decode = (None if role is None else look.ready[role] for role in (self._reads, self._writes))
        settled = self._settled(look)
        counts = make.WorkerCounts(
            ready_num_prefill=prefill,
            ready_num_decode=decode,
            expected_num_prefill=prefill if settled else None,
            expected_num_decode=decode if settled else None,
        )
        steps = None
        if tick.need_worker_fpm:
            steps = make.FpmObservations(prefill=self._steps(look, self._reads), decode=self._steps(look, self._writes))
        return make.TickInput(now_s=look.now_s, traffic=traffic, worker_counts=counts, fpm_observations=steps)

    def _hear(self, look: Look) -> None:
        ending = look.engines[self._writes]
        reading = ending if self._reads is None else look.engines[self._reads]
        self._counted.hear(sum(one.answered for one in look.gateways), ending, reading)

    def _steps(self, look: Look, role: Role | None) -> dict[tuple[str, int], Any] | None:
        if role is None:
            return None
        return {(one.pod, 0): self._step(one) for one in look.iterations[role]} or None

    def _step(self, one: Iteration) -> Any:
        make, did, queued = self._package, one.did, one.queued
        return make.ForwardPassMetrics(
            worker_id=one.pod,
            wall_time=one.took_s,
            scheduled_requests=make.ScheduledRequestMetrics(
                num_prefill_requests=did.prefills,
                sum_prefill_tokens=did.tokens,
                sum_prefill_kv_tokens=did.cached,
                num_decode_requests=did.decodes,
                sum_decode_kv_tokens=did.context,
            ),
            queued_requests=make.QueuedRequestMetrics(
                num_prefill_requests=queued.prefills,
                sum_prefill_tokens=queued.tokens,
                num_decode_requests=queued.decodes,
                sum_decode_kv_tokens=queued.context,
            ),
        )

    # ---------------------------------------------------------------- set-up

    def _config(self) -> Any:
        planning, gpus = self._planning, self._scene.gpus
        return self._package.PlannerConfig(
            environment="virtual",
            backend="vllm",
            mode="agg" if self._reads is None else "disagg",
            optimization_target=planning.target,
            prefill_engine_num_gpu=None if self._reads is None else gpus.get(self._reads, 1),
            decode_engine_num_gpu=gpus.get(self._writes, 1),
            max_gpu_budget=sum(most * gpus.get(role, 1) for role, (_, most) in self._scene.bounds.items()),
            ttft_ms=1000.0 * planning.ttft_s,
            itl_ms=1000.0 * planning.itl_s,
            enable_throughput_scaling=planning.slow,
            enable_load_scaling=planning.fast,
            throughput_adjustment_interval_seconds=planning.slow_s,
            load_adjustment_interval_seconds=planning.fast_s,
            load_predictor=planning.predictor,
            load_scaling_down_sensitivity=planning.sensitivity,
            pre_deployment_sweeping_mode="thorough",
            report_interval_hours=None,
            live_dashboard_port=0,
        )

    def _capabilities(self) -> Any:
        def of(role: Role | None) -> Any:
            if role is None:
                return None
            about = self._scene.plant.about(role)
            return self._package.EngineCapabilities(
                num_gpu=self._scene.gpus.get(role, 1),
                max_num_batched_tokens=about.token_budget,
                max_num_seqs=about.max_sequences,
                context_length=about.max_model_len,
                max_kv_tokens=about.kv_tokens,
            )

        return self._package.WorkerCapabilities(prefill=of(self._reads), decode=of(self._writes))

    def _benchmark(self) -> None:
        plant, writes = self._scene.plant, self._writes
        decode = dynamo_profile.decode(plant, writes)
        if self._reads is not None:
            prefill = dynamo_profile.prefill(plant, self._reads)
            self._planner.load_benchmark_fpms(prefill_fpms=self._records(prefill), decode_fpms=self._records(decode))
            return
        prompts = dynamo_profile.prefill(plant, writes) if self._planning.full_profile else ()
        self._planner.load_benchmark_fpms(agg_fpms=self._records([*prompts, *decode]))

    def _records(self, samples: Sequence[dynamo_profile.Sample]) -> list[Any]:
        return [self._step(Iteration("", took_s, did)) for took_s, did in samples]


def load() -> SimpleNamespace:
    """The planner's classes by their names, from whichever module has them. Raises BadInput without the package."""
    logging.getLogger("prophet").setLevel(logging.CRITICAL)  # it warns that it cannot draw
    try:
        modules = [importlib.import_module(name) for name in _MODULES]
    except ImportError as error:
        raise BadInput(f"the planner of ai-dynamo {VERSION} cannot be imported ({error}); {INSTALL}") from None
    logging.getLogger("dynamo").setLevel(logging.CRITICAL)
    return SimpleNamespace(**{name: value for one in modules for name, value in vars(one).items()})


def make_throughput(options: Options, scene: Scene) -> Policy:
    """Its slow loop alone."""
    planning = Planning(
        target="sla",
        slow=True,
        fast=False,
        slow_s=options.count("interval", SLOW_S, 1),
        fast_s=FAST_S,
        sensitivity=SENSITIVITY,
        **_common(options, scene),
    )
    options.end()
    return Dynamo(planning, scene, load())


def make_load(options: Options, scene: Scene) -> Policy:
    """Its fast loop; floor=1 (with target=sla) lets the slow one say what is needed at least."""
    target, floor = options.choice("target", "throughput", _TARGETS), options.flag("floor", False)
    if floor and target != "sla":
        raise options.bad("floor=1 goes with target=sla: the slow loop has no other")
    planning = Planning(
        target=target,
        slow=floor,
        fast=True,
        slow_s=options.count("floor_interval", SLOW_S, 1),
        fast_s=options.count("interval", FAST_S, 1),
        sensitivity=_percent(options),
        **_common(options, scene),
    )
    if floor and planning.fast_s >= planning.slow_s:
        raise options.bad("interval must be shorter than floor_interval")
    options.end()
    return Dynamo(planning, scene, load())


def settings_throughput() -> Sequence[str]:
    """Words worth trying: predictors, intervals, and a profile that has prompts."""
    words = ["", "profile=full"]
    for interval in (60, 180):
        for predictor in ("constant", "arima", "kalman"):
            if (interval, predictor) != (180, "arima"):
                words.append(f"interval={interval},predictor={predictor},profile=full")
    return words


def settings_load() -> Sequence[str]:
    """Words worth trying: every target, sensitivities, and both loops together."""
    words = ["", "interval=10", "target=latency", "target=latency,interval=10"]
    words += [f"target=sla,profile=full,sensitivity={percent}" for percent in (70, 80, 90)]
    words += [f"target=sla,profile=full,floor=1,floor_interval={s},predictor=constant" for s in (60, 180)]
    return words


def _common(options: Options, scene: Scene) -> Any:
    slo = scene.slo
    ttft_s, itl_s = (None, None) if slo is None else (slo.ttft_s, slo.tpot_s)
    return {
        "ttft_s": options.positive("ttft", TTFT_S if ttft_s is None else ttft_s),
        "itl_s": options.positive("itl", ITL_S if itl_s is None else itl_s),
        "predictor": options.choice("predictor", PREDICTOR, _PREDICTORS),
        "full_profile": options.choice("profile", "own", ("own", "full")) == "full",
        "gated": options.flag("gated", False),
    }


def _percent(options: Options) -> int:
    percent = options.count("sensitivity", SENSITIVITY)
    if percent > 100:
        raise options.bad("sensitivity is a percentage")
    return percent
