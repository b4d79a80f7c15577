"""Reactive baselines (`follower`): they order what the work of a trailing window needs.

Problem: attainment alone says nothing, because enough replicas meet any SLO. The question is whether a policy that
knows the engine, but not the future, gets more for the same GPU-hours.

Idea: a reactive baseline knows the plant's coefficients, which the operator must learn, and each request's length once
an idle engine would have generated it. It orders ceil(work rate over the trailing window / margin) + spare, and removes
replicas that it has not needed for `hold` seconds. With a trend, the rate is that of a line through the window,
extrapolated over a start-up. With stated rates it needs no window: it knows the true rate, now or the largest within
`ahead` seconds, and the trace's mean work of a request. The state of the fleet has no effect: its orders follow from
the arrivals alone.

Admission is the operator's model, or none (gated=0), or a plain cap on requests in flight at one engine
(`sim.concurrency_cap`).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from plimsoll.core.admission.request import MAX_QUEUE_S
from plimsoll.core.types import Role
from plimsoll.core.units import format_number
from plimsoll.sim.attempt import TraceRequest
from plimsoll.sim.concurrency_cap import ConcurrencyCap
from plimsoll.sim.policies.base import Observation, PolicyContext, SimulatedPolicy
from plimsoll.sim.policies.options import MAX_NUMBER, PolicyOptions
from plimsoll.sim.request_cost import RequestCostModel

_SLACK: Final = 1e-9  # rates are sums of floats
_PATIENCE_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True)
class ReactiveSettings:
    """Settings of one tier. trend_s: seconds for which the window's trend is extrapolated, 0 without."""

    margin: float = 0.8
    standby: int = 0
    hold_s: float = 60.0
    window_s: float = 60.0
    trend_s: float = 0.0


class DemandSource(Protocol):
    """Work rate of one tier."""

    def add(self, known_s: float, work_s: float) -> None:
        """Add a request of `work_s` GPU-seconds. known_s: when its length will be known."""
        ...

    def rate(self, now_s: float) -> float:
        """Return GPU-seconds per second. Call it with times that do not go back."""
        ...


class TrailingWindow:
    """Work that became known in the trailing window.

    The trend is the least-squares line of a stream of weights: through the window's middle c at their mean rate, with
    the slope 12 sum w (t - c) / window^3. Before the window is full there is none.
    """

    def __init__(self, window_s: float, trend_s: float = 0.0) -> None:
        self._window_s, self._trend_s = window_s, trend_s
        self._serial = 0
        self._pending: list[tuple[float, int, float]] = []
        self._known: deque[tuple[float, float]] = deque()
        self._sum = self._moment = 0.0

    def add(self, known_s: float, work_s: float) -> None:
        self._serial += 1
        heapq.heappush(self._pending, (known_s, self._serial, work_s))

    def rate(self, now_s: float) -> float:
        pending, known = self._pending, self._known
        while pending and pending[0][0] <= now_s:
            at_s, _, work_s = heapq.heappop(pending)
            known.append((at_s, work_s))
            self._sum += work_s
            self._moment += work_s * at_s
        while known and known[0][0] <= now_s - self._window_s:
            at_s, work_s = known.popleft()
            self._sum -= work_s
            self._moment -= work_s * at_s
        window_s = min(self._window_s, max(now_s, 1.0))
        mean = self._sum / window_s
        if not self._trend_s or now_s < self._window_s:
            return mean
        slope = 12.0 * (self._moment - self._sum * (now_s - window_s / 2)) / window_s**3
        return max(0.0, mean + slope * (window_s / 2 + self._trend_s))


class StatedRates:
    """Known rates: one per step, the first at time 0; `rate` returns the largest of the next `ahead_s` seconds."""

    def __init__(self, steps: Sequence[tuple[float, float]], ahead_s: float, work_per_request_s: float) -> None:
        """steps: times (s) and rates (requests/s). work_per_request_s: mean work of a request."""
        self._step_times_s = [at_s for at_s, _ in steps]
        self._rates, self._ahead_s, self._work_per_request_s = [rate for _, rate in steps], ahead_s, work_per_request_s

    def add(self, known_s: float, work_s: float) -> None:
        """Ignore the measurement."""

    def rate(self, now_s: float) -> float:
        first, last = (bisect_right(self._step_times_s, at_s) for at_s in (now_s, now_s + self._ahead_s))
        return self._work_per_request_s * max(self._rates[first - 1 : last])


class ReplicaOrders:
    """Replicas for a rate: the largest need of the last `hold` seconds."""

    def __init__(self, margin: float, standby: int, hold_s: float, bounds: tuple[int, int]) -> None:
        self._margin, self._standby, self._hold_s = margin, standby, hold_s
        self._least, self._most = bounds
        self._needs: deque[tuple[float, int]] = deque()

    def replicas_for(self, rate: float, now_s: float) -> int:
        required, recent = math.ceil(rate / self._margin - _SLACK) + self._standby, self._needs
        while recent and recent[-1][1] <= required:
            recent.pop()
        recent.append((now_s, required))
        while recent[0][0] < now_s - self._hold_s:
            recent.popleft()
        return min(self._most, max(self._least, recent[0][1]))


class ReactivePolicy:
    """One source and its orders for each tier."""

    initial_replicas: Mapping[Role, int] | None = None

    def __init__(
        self,
        cost_model: RequestCostModel,
        sources: Mapping[Role, DemandSource],
        orders: Mapping[Role, ReplicaOrders],
        runs_operator: bool,
        cap: ConcurrencyCap | None,
    ) -> None:
        self.runs_operator, self.cap = runs_operator, cap
        self._cost_model, self._sources, self._orders = cost_model, sources, orders

    def on_arrival(self, request: TraceRequest, now_s: float) -> None:
        for role, source in self._sources.items():
            source.add(*known_demand(self._cost_model, role, request, now_s))

    def desired_replicas(self, observation: Observation) -> Mapping[Role, int]:
        now_s = observation.now_s
        return {
            role: self._orders[role].replicas_for(source.rate(now_s), now_s) for role, source in self._sources.items()
        }


def known_demand(cost_model: RequestCostModel, role: Role, request: TraceRequest, now_s: float) -> tuple[float, float]:
    """Return when a request that arrives now is known to a tier's policy, and its work."""
    known_s = now_s if role is Role.PREFILL else now_s + cost_model.decode_s(role, request)
    return known_s, cost_model.cost_s(role, request)


def concurrency_cap(requests: int, context: PolicyContext) -> ConcurrencyCap:
    """Return the cap. A request waits for half the slack on an idle engine, because other prompts run
    first at the cap.
    """
    cost_model, slo = RequestCostModel(context.plant, context.bounds), context.slo

    def patience_s(request: TraceRequest) -> float:
        if slo is None or slo.ttft_s is None:
            return MAX_QUEUE_S
        target_s = slo.ttft_target_s(request.prompt_tokens)
        return _PATIENCE_SHARE * (target_s - cost_model.unloaded_ttft_s(request.prompt_tokens))

    return ConcurrencyCap(requests, patience_s)


def admission(options: PolicyOptions, context: PolicyContext, gated: bool) -> tuple[bool, ConcurrencyCap | None]:
    """Options gated and cap: whether the operator's model decides about admission, and the cap if there is one. Raises
    BadInput.
    """
    requests = options.count("cap", 0)
    gated = options.flag("gated", gated and not requests)
    if gated and requests:
        raise options.error("gated=1 and cap: the model or the cap decides about admission, not both")
    return gated, concurrency_cap(requests, context) if requests else None


def make(options: PolicyOptions, context: PolicyContext) -> SimulatedPolicy:
    """Options margin, spare, hold, window (seconds) and trend=1, for each tier or as PREFILL/DECODE; gated=0, cap
    (requests in flight at an engine); rates=0@6;600@36 (from second @ requests a second) with ahead (seconds)."""
    gated, cap = admission(options, context, True)
    rates, ahead_s = options.text("rates", ""), options.number("ahead", 0.0)
    if ahead_s and not rates:
        raise options.error("ahead goes with rates")
    if rates and (unused := options.remaining_of(("window", "trend"))):
        raise options.error(f"rates take the place of the window: {', '.join(unused)} would do nothing")
    cost_model = RequestCostModel(context.plant, context.bounds)
    parts = zip(context.bounds, options.split(len(context.bounds)), strict=True)
    settings_by_role = {role: reactive_settings(part, context) for role, part in parts}
    options.finish()
    orders = {
        role: ReplicaOrders(one.margin, one.standby, one.hold_s, context.bounds[role])
        for role, one in settings_by_role.items()
    }
    sources: Mapping[Role, DemandSource] = {
        role: TrailingWindow(one.window_s, one.trend_s) for role, one in settings_by_role.items()
    }
    if rates:
        if not context.requests:
            raise options.error("rates: the mean work of a request is the trace's, and there is none")
        steps = _steps(rates, options)
        means = {
            role: sum(cost_model.cost_s(role, one) for one in context.requests) / len(context.requests)
            for role in context.bounds
        }
        sources = {role: StatedRates(steps, ahead_s, mean) for role, mean in means.items()}
    return ReactivePolicy(cost_model, sources, orders, gated, cap)


def reactive_settings(options: PolicyOptions, context: PolicyContext) -> ReactiveSettings:
    """Return the settings of one tier. Raises BadInput."""
    defaults = ReactiveSettings()
    found = ReactiveSettings(
        margin=options.positive("margin", defaults.margin),
        standby=options.count("spare", defaults.standby),
        hold_s=options.number("hold", defaults.hold_s),
        window_s=options.positive("window", defaults.window_s),
        trend_s=context.plant.startup.mean_s if options.flag("trend", False) else 0.0,
    )
    options.finish()
    return found


def _steps(text: str, options: PolicyOptions) -> list[tuple[float, float]]:
    try:
        steps = [(float(at_s), float(rate)) for at_s, rate in (step.split("@") for step in text.split(";"))]
    except ValueError:
        steps = []
    moments = [at_s for at_s, _ in steps]
    in_order = moments[:1] == [0.0] and moments == sorted(set(moments)) and moments[-1] < math.inf
    if not in_order or not all(0.0 <= rate <= MAX_NUMBER for _, rate in steps):
        raise options.error(f"rates are like 0@6;600@36, in order of time from 0 on, not {text!r}")
    return steps


def settings() -> Sequence[str]:
    """Options for a search for the best setting."""
    return tuple(
        f"margin={format_number(margin)},window={format_number(window)}"
        for margin in (0.5, 0.65, 0.8, 0.95)
        for window in (30, 60, 120)
    )
