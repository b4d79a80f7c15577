"""In the place of Dynamo's planner: the same calls, its ticks at 5 s and 180 s, and orders that a test has written."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class Record(SimpleNamespace):
    """Any of the package's plain records."""


def traffic(duration_s: float, num_req: float, isl: float, osl: float, kv_hit_rate: float | None = None) -> Record:
    return Record(duration_s=duration_s, num_req=num_req, isl=isl, osl=osl, kv_hit_rate=kv_hit_rate)


@dataclass
class Planner:
    """orders: what it says, tick by tick; None: nothing. told: what it was given."""

    config: Any
    capabilities: Any
    orders: list[Any] = field(default_factory=list)
    received: list[Any] = field(default_factory=list)
    benchmark: dict[str, list[Any]] = field(default_factory=dict)
    slow_s: float = 180.0

    def load_benchmark_fpms(self, **records: list[Any]) -> None:
        self.benchmark = records

    def initial_tick(self, start_s: float) -> Record:
        return self._tick(start_s + 5.0)

    def on_tick(self, tick: Record, observed: Any) -> Record:
        self.received.append(observed)
        order = self.orders.pop(0) if self.orders else None
        return Record(scale_to=order, next_tick=self._tick(observed.now_s + 5.0))

    def _tick(self, at_s: float) -> Record:
        slow = self.config.enable_throughput_scaling and at_s % self.slow_s == 0.0
        only_fast = not self.config.enable_throughput_scaling
        return Record(
            at_s=at_s,
            run_throughput_scaling=slow,
            need_worker_fpm=True,
            need_traffic_metrics=slow or only_fast,
            traffic_metrics_duration_s=self.slow_s if slow else 5.0,
        )


def fake_package() -> SimpleNamespace:
    plain = (
        "PlannerConfig", "EngineCapabilities", "WorkerCapabilities", "WorkerCounts", "FpmObservations", "TickInput",
        "ForwardPassMetrics", "ScheduledRequestMetrics", "QueuedRequestMetrics",
    )  # fmt: skip
    return SimpleNamespace(PlannerStateMachine=Planner, TrafficObservation=traffic, **dict.fromkeys(plain, Record))


def make_order(prefill: int | None = None, decode: int | None = None) -> Record:
    return Record(num_prefill=prefill, num_decode=decode)
