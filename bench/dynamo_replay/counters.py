"""Counters that the engines and the frontend of Dynamo's replay would export, computed from the replay's state.

Problem: the operator's core reads counters of gateways and engines. The replay shows each engine's newest step, and
sums over all requests that completed since the last observation. Idea: an observation at least once per shortest step
sees every step. Requests that complete between two observations are few, nearly always one, so their means are exact.
The replay shows neither the decode nor the prefill engine of a request: the first one whose step ended then is assumed.
Arrivals come from the trace.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from plimsoll.core import histogram
from plimsoll.core.ports import BucketCounts, EngineReading, ServiceReading
from plimsoll.core.types import Role
from plimsoll.sim.attempt import TraceRequest
from plimsoll.sim.engine.engine_metrics import EngineMetrics
from plimsoll.sim.engine_reading import reading
from plimsoll.sim.plant import Plant

GROUPS: Final = {Role.SERVE: "decode", Role.PREFILL: "prefill", Role.DECODE: "decode"}  # what their replay calls them
_IDLE_S: Final = 1.0  # without a step, longer than any takes


def pod_name(role: Role, worker: int) -> str:
    """An engine's name by its number in their replay."""
    return f"{role}-{worker}"


class ReplayCounters:
    """Of one run. Times in seconds after its start."""

    def __init__(self, roles: Collection[Role], requests: Sequence[TraceRequest], plant: Plant) -> None:
        self._roles, self._profile, self._wire = tuple(roles), plant.profile, plant.kv_link()
        self._at_s = [request.at_s for request in requests]
        self._tokens = [0, *accumulate(request.prompt_tokens for request in requests)]
        self._arrived = self._ended = 0
        self._meters: dict[str, EngineMetrics] = {}
        self._newest: dict[str, tuple[float, Mapping[str, Any]]] = {}
        self._last: dict[Role, str] = {}  # whose step ended last
        self._ttft, self._ttft_s = [0.0] * len(histogram.LATENCY_EDGES_S), 0.0

    def observe(self, shown: Mapping[str, Any]) -> None:
        """One look at their replay."""
        now_s = shown["now_ms"] / 1000.0
        while self._arrived < len(self._at_s) and self._at_s[self._arrived] <= now_s:
            self._arrived += 1
        for role in self._roles:
            for step in reversed(shown[f"{GROUPS[role]}_fpm_snapshots"]):
                name = self._last[role] = pod_name(role, step["worker_id"])
                counters = self._counters(name)
                counters.steps += 1
                counters.local_prompt_tokens += step["sum_prefill_tokens"]
                counters.generated_tokens += step["num_decode_requests"]
                self._newest[name] = now_s, step
        self._complete(shown["traffic"])

    def engine(self, name: str, now_s: float, epoch_s: float) -> EngineReading:
        """As it would be scraped now."""
        observed_s, step = self._newest.get(name, (now_s, None))
        if step is None or now_s - observed_s > _IDLE_S:
            return reading(self._counters(name), name, epoch_s + now_s, 0, 0, 0.0)
        kv_used = step["sum_decode_kv_tokens"] + step["sum_prefill_tokens"] + step["sum_prefill_kv_tokens"]
        share = min(1.0, kv_used / self._profile.kv_tokens)
        return reading(self._counters(name), name, epoch_s + now_s, _running(step), _waiting(step), share)

    def gateway(self, ready: Collection[str], now_s: float) -> ServiceReading:
        """As a gateway without a gate would tell it."""
        newest = {name: self._newest[name] for name in ready if name in self._newest}
        return ServiceReading(
            arrived=self._arrived,
            arrived_tokens=self._tokens[self._arrived],
            retried=0.0,
            succeeded=self._ended,
            failed=0.0,
            cancelled=0.0,
            rejected={},
            ttft_s=BucketCounts(histogram.LATENCY_EDGES_S, tuple(self._ttft), self._ttft_s),
            inflight={
                name: _running(step) + _waiting(step) if now_s - observed_s <= _IDLE_S else 0
                for name, (observed_s, step) in newest.items()
            },
        )

    def _counters(self, name: str) -> EngineMetrics:
        return self._meters.setdefault(name, EngineMetrics(self._profile.max_model_len))

    def _complete(self, ended: Mapping[str, Any]) -> None:
        if not ended["shape_count"] or len(self._last) < len(self._roles):
            return
        ttft_s, prompt, output = ended["avg_ttft_ms"] / 1000.0, round(ended["avg_isl"]), round(ended["avg_osl"])
        for _ in range(ended["shape_count"]):
            self._ended += 1
            self._ttft[histogram.bucket_index(histogram.LATENCY_EDGES_S, ttft_s)] += 1
            self._ttft_s += ttft_s
            for role, name in self._last.items():
                counters, transferred = self._counters(name), prompt if role is Role.DECODE else 0
                counters.record_first_token(transferred, 0, transferred, ttft_s)  # what was computed, steps have shown
                counters.generated_tokens += 1  # the first token, which no step shows
                if transferred:
                    counters.transfer_s += self._wire.transfer_s(transferred)
                if role is Role.PREFILL:
                    counters.record_completion(prompt, 1, 0.0)
                else:
                    counters.record_completion(prompt, output, ended["avg_itl_ms"] / 1000.0 * (output - 1))


def _running(step: Mapping[str, Any]) -> int:
    return int(step["num_prefill_requests"] + step["num_decode_requests"])


def _waiting(step: Mapping[str, Any]) -> int:
    return int(step["num_queued_prefill"] + step["num_queued_decode"])
