"""What the engines and the front of their replay would export: counters, summed up from what the replay shows.

Problem: the operator's core reads counters of gateways and engines; their replay shows each engine's newest step, and
sums over all requests that ended since the last look.

Idea: whoever looks more often than the shortest step takes sees every step. Requests that ended between two such looks
are few, nearly always one, so that their means are theirs. Which engine answered is not shown, nor which one read the
prompt: the first one whose step ended then is taken for it. What came is known from the trace.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from plimsoll.core import buckets
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import Buckets, EngineReading, ServiceReading
from plimsoll.sim.meters import Meters
from plimsoll.sim.plant import Plant
from plimsoll.sim.visit import Asked

GROUPS: Final = {Role.SERVE: "decode", Role.PREFILL: "prefill", Role.DECODE: "decode"}  # what their replay calls them
_IDLE_S: Final = 1.0  # without a step, longer than any takes


def pod(role: Role, worker: int) -> str:
    """An engine's name by its number in their replay."""
    return f"{role}-{worker}"


class Watch:
    """Of one run. Times in seconds after its start."""

    def __init__(self, roles: Collection[Role], asked: Sequence[Asked], plant: Plant) -> None:
        self._roles, self._profile, self._wire = tuple(roles), plant.profile, plant.wire()
        self._at_s = [one.at_s for one in asked]
        self._tokens = [0, *accumulate(one.prompt_tokens for one in asked)]
        self._came = self._ended = 0
        self._meters: dict[str, Meters] = {}
        self._newest: dict[str, tuple[float, Mapping[str, Any]]] = {}
        self._last: dict[Role, str] = {}  # whose step ended last
        self._ttft, self._ttft_s = [0.0] * len(buckets.LATENCY_EDGES_S), 0.0

    def take(self, shown: Mapping[str, Any]) -> None:
        """One look at their replay."""
        now_s = shown["now_ms"] / 1000.0
        while self._came < len(self._at_s) and self._at_s[self._came] <= now_s:
            self._came += 1
        for role in self._roles:
            for step in reversed(shown[f"{GROUPS[role]}_fpm_snapshots"]):
                name = self._last[role] = pod(role, step["worker_id"])
                meters = self._of(name)
                meters.steps += 1
                meters.local += step["sum_prefill_tokens"]
                meters.generated += step["num_decode_requests"]
                self._newest[name] = now_s, step
        self._end(shown["traffic"])

    def engine(self, name: str, now_s: float, epoch_s: float) -> EngineReading:
        """As it would be scraped now."""
        seen_s, step = self._newest.get(name, (now_s, None))
        if step is None or now_s - seen_s > _IDLE_S:
            return self._of(name).reading(name, epoch_s + now_s, 0, 0, 0.0)
        used = step["sum_decode_kv_tokens"] + step["sum_prefill_tokens"] + step["sum_prefill_kv_tokens"]
        share = min(1.0, used / self._profile.kv_tokens)
        return self._of(name).reading(name, epoch_s + now_s, _running(step), _waiting(step), share)

    def gateway(self, ready: Collection[str], now_s: float) -> ServiceReading:
        """As a gateway without a gate would tell it."""
        newest = {name: self._newest[name] for name in ready if name in self._newest}
        return ServiceReading(
            arrived=self._came,
            arrived_tokens=self._tokens[self._came],
            retried=0.0,
            answered=self._ended,
            failed=0.0,
            cancelled=0.0,
            refused={},
            ttft_s=Buckets(buckets.LATENCY_EDGES_S, tuple(self._ttft), self._ttft_s),
            inflight={
                name: _running(step) + _waiting(step) if now_s - seen_s <= _IDLE_S else 0
                for name, (seen_s, step) in newest.items()
            },
        )

    def _of(self, name: str) -> Meters:
        return self._meters.setdefault(name, Meters(self._profile.max_model_len))

    def _end(self, ended: Mapping[str, Any]) -> None:
        if not ended["shape_count"] or len(self._last) < len(self._roles):
            return
        ttft_s, prompt, output = ended["avg_ttft_ms"] / 1000.0, round(ended["avg_isl"]), round(ended["avg_osl"])
        for _ in range(ended["shape_count"]):
            self._ended += 1
            self._ttft[buckets.index(buckets.LATENCY_EDGES_S, ttft_s)] += 1
            self._ttft_s += ttft_s
            for role, name in self._last.items():
                meters, moved = self._of(name), prompt if role is Role.DECODE else 0
                meters.first(moved, 0, moved, ttft_s)  # what was computed, steps have shown
                meters.generated += 1  # the first token, which no step shows
                if moved:
                    meters.transfer_s += self._wire.travel_s(moved)
                if role is Role.PREFILL:
                    meters.ended(prompt, 1, 0.0)
                else:
                    meters.ended(prompt, output, ended["avg_itl_ms"] / 1000.0 * (output - 1))


def _running(step: Mapping[str, Any]) -> int:
    return int(step["num_prefill_requests"] + step["num_decode_requests"])


def _waiting(step: Mapping[str, Any]) -> int:
    return int(step["num_queued_prefill"] + step["num_queued_decode"])
