"""Demand from the engines' own counters, for services whose requests do not pass a gateway.

Problem: an engine counts first tokens and completed requests. It does not count arrivals, which is the demand.

Idea: a request arrives at an engine when it joins the queue, and leaves the queue with its first token. The arrivals
between two readings are therefore the first tokens plus the growth of the queue. Each engine then reports as a gateway
does, and the sums, gaps and restarts are handled by the same code.

What this lacks: a request that leaves the queue without a first token counts as no arrival if it did so within one
interval. Retries count as arrivals, and so does a preempted request, because it queues again. Latencies begin at the
engine, without the way to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.core.histogram import total_count
from plimsoll.core.ports import EngineReading, ServiceReading


@dataclass(slots=True)
class _EngineState:
    """instance_id: of its process. entered: first tokens and queued requests. arrived: since its first reading."""

    instance_id: str
    entered: float
    arrived: float = 0.0


class EngineArrivals:
    """Arrivals at each engine of a service, by pod."""

    def __init__(self) -> None:
        self._engines: dict[str, _EngineState] = {}

    def observe(self, reading: EngineReading) -> ServiceReading | None:
        """Return the reading as that of a gateway; None for an engine that does not report first tokens and queue."""
        if reading.ttft_s is None or reading.waiting is None or reading.running is None:
            return None
        first_tokens = total_count(reading.ttft_s)
        entered = first_tokens + reading.waiting
        state = self._engines.get(reading.pod)
        if state is None or state.instance_id != reading.instance_id:
            state = self._engines[reading.pod] = _EngineState(reading.instance_id, entered)
        state.arrived += max(0.0, entered - state.entered)
        state.entered = entered
        in_engine = round(reading.running + reading.waiting)
        return ServiceReading(
            arrived=state.arrived,
            arrived_tokens=None,
            retried=0.0,
            succeeded=first_tokens,
            failed=0.0,
            cancelled=0.0,
            rejected={},
            ttft_s=reading.ttft_s,
            inflight={reading.pod: in_engine},
        )

    def retain(self, pods: set[str]) -> None:
        """Drop engines that no longer exist."""
        self._engines = {pod: state for pod, state in self._engines.items() if pod in pods}
