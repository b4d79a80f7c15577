"""Followers: yardsticks that order what the work of a trailing window needs.

Problem: attainment alone says nothing, for enough replicas keep any promise. What counts is whether somebody who knows
the engine, but not the future, gets more for the same GPU-hours.

Idea: a follower knows the plant's coefficients, which ours has to learn, and each request's length once an idle engine
would have written it. It orders ceil(work rate over the trailing window / margin) + spare, and gives back what it has
not needed for `hold` seconds. With a trend, the rate is that of a line through the window, followed over a start-up.
With stated rates it needs no window: it knows the true rate, now or the largest of what comes within `ahead` seconds,
and the trace's mean work of a request. Nothing of the fleet comes into it: its orders follow from the arrivals alone.

Admission is the operator's model, or none (gated=0), or a plain cap on what is in flight at one engine (`sim.capped`).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from plimsoll.core.picking.endpoint import Role
from plimsoll.sim.capped import Cap
from plimsoll.sim.gateway import LONGEST_HOLD_S
from plimsoll.sim.policies.base import Look, Policy, Scene
from plimsoll.sim.policies.options import LARGEST, Options
from plimsoll.sim.visit import Asked
from plimsoll.sim.work import Work, ttft_target_s

_SLACK: Final = 1e-9  # rates are sums of floats
_WAITS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Following:
    """How one tier is followed. trend_s: seconds for which the window's trend is followed, 0 without."""

    margin: float = 0.8
    spare: int = 0
    hold_s: float = 60.0
    window_s: float = 60.0
    trend_s: float = 0.0


class Source(Protocol):
    """Of one tier's work."""

    def arrived(self, known_s: float, work_s: float) -> None:
        """A request of so many GPU seconds; known_s: when its length will be known."""
        ...

    def rate(self, now_s: float) -> float:
        """GPU seconds a second. To be called with times that do not go back."""
        ...


class Window:
    """Work that became known in the trailing window.

    The trend is the least-squares line of a stream of weights: through the window's middle c at their mean rate, with
    the slope 12 sum w (t - c) / window^3. Before the window is full there is none.
    """

    def __init__(self, window_s: float, trend_s: float = 0.0) -> None:
        self._window_s, self._trend_s = window_s, trend_s
        self._serial = 0
        self._coming: list[tuple[float, int, float]] = []
        self._known: deque[tuple[float, float]] = deque()
        self._sum = self._moment = 0.0

    def arrived(self, known_s: float, work_s: float) -> None:
        self._serial += 1
        heapq.heappush(self._coming, (known_s, self._serial, work_s))

    def rate(self, now_s: float) -> float:
        coming, known = self._coming, self._known
        while coming and coming[0][0] <= now_s:
            at_s, _, work_s = heapq.heappop(coming)
            known.append((at_s, work_s))
            self._sum += work_s
            self._moment += work_s * at_s
        while known and known[0][0] <= now_s - self._window_s:
            at_s, work_s = known.popleft()
            self._sum -= work_s
            self._moment -= work_s * at_s
        seen_s = min(self._window_s, max(now_s, 1.0))
        mean = self._sum / seen_s
        if not self._trend_s or now_s < self._window_s:
            return mean
        slope = 12.0 * (self._moment - self._sum * (now_s - seen_s / 2)) / seen_s**3
        return max(0.0, mean + slope * (seen_s / 2 + self._trend_s))


class Stated:
    """Known rates: a step at each moment, the first one at 0; the largest until `ahead_s` from now."""

    def __init__(self, steps: Sequence[tuple[float, float]], ahead_s: float, each_s: float) -> None:
        """steps: moment and requests a second. each_s: mean work of a request."""
        self._at = [at_s for at_s, _ in steps]
        self._rates, self._ahead_s, self._each_s = [rate for _, rate in steps], ahead_s, each_s

    def arrived(self, known_s: float, work_s: float) -> None:
        """Of no interest."""

    def rate(self, now_s: float) -> float:
        first, last = (bisect_right(self._at, at_s) for at_s in (now_s, now_s + self._ahead_s))
        return self._each_s * max(self._rates[first - 1 : last])


class Orders:
    """Replicas for a rate: the largest need of the last `hold` seconds."""

    def __init__(self, margin: float, spare: int, hold_s: float, bounds: tuple[int, int]) -> None:
        self._margin, self._spare, self._hold_s = margin, spare, hold_s
        self._least, self._most = bounds
        self._needs: deque[tuple[float, int]] = deque()

    def wanted(self, rate: float, now_s: float) -> int:
        need, needs = math.ceil(rate / self._margin - _SLACK) + self._spare, self._needs
        while needs and needs[-1][1] <= need:
            needs.pop()
        needs.append((now_s, need))
        while needs[0][0] < now_s - self._hold_s:
            needs.popleft()
        return min(self._most, max(self._least, needs[0][1]))


class Follower:
    """One source and its orders for each tier."""

    initial: Mapping[Role, int] | None = None

    def __init__(
        self, work: Work, sources: Mapping[Role, Source], orders: Mapping[Role, Orders], gated: bool, cap: Cap | None
    ) -> None:
        self.operator, self.cap = gated, cap
        self._work, self._sources, self._orders = work, sources, orders

    def arrived(self, asked: Asked, now_s: float) -> None:
        for role, source in self._sources.items():
            source.arrived(*known(self._work, role, asked, now_s))

    def wanted(self, look: Look) -> Mapping[Role, int]:
        now_s = look.now_s
        return {role: self._orders[role].wanted(source.rate(now_s), now_s) for role, source in self._sources.items()}


def known(work: Work, role: Role, asked: Asked, now_s: float) -> tuple[float, float]:
    """When a request that arrives now is known to a tier's follower, and its work."""
    known_s = now_s if role is Role.PREFILL else now_s + work.writing_s(role, asked)
    return known_s, work.seconds(role, asked)


def capped(requests: int, scene: Scene) -> Cap:
    """A request waits for half the time that an idle engine would leave it: one at its cap has other prompts first."""
    work, slo = Work(scene.plant, scene.bounds), scene.slo

    def patience_s(asked: Asked) -> float:
        target_s = None if slo is None else ttft_target_s(slo, asked.prompt_tokens)
        return LONGEST_HOLD_S if target_s is None else _WAITS * (target_s - work.first_s(asked.prompt_tokens))

    return Cap(requests, patience_s)


def admission(options: Options, scene: Scene, gated: bool) -> tuple[bool, Cap | None]:
    """Options gated and cap: whether the operator's model decides about admission, and the cap if that does. Raises
    BadInput."""
    requests = options.count("cap", 0)
    gated = options.flag("gated", gated and not requests)
    if gated and requests:
        raise options.bad("gated=1 and cap: the model or the cap decides about admission, not both")
    if 0 < requests < scene.gateways:
        raise options.bad(f"cap is at least {scene.gateways}, one request for each gateway, not {requests}")
    return gated, capped(requests, scene) if requests else None


def make(options: Options, scene: Scene) -> Policy:
    """Options margin, spare, hold, window (seconds) and trend=1, for each tier or as PREFILL/DECODE; gated=0, cap
    (requests in flight at an engine); rates=0@6;600@36 (from second @ requests a second) with ahead (seconds)."""
    gated, cap = admission(options, scene, True)
    rates, ahead_s = options.text("rates", ""), options.number("ahead", 0.0)
    if ahead_s and not rates:
        raise options.bad("ahead goes with rates")
    if rates and (idle := options.among(("window", "trend"))):
        raise options.bad(f"rates take the place of the window: {', '.join(idle)} would do nothing")
    work = Work(scene.plant, scene.bounds)
    parts = zip(scene.bounds, options.parts(len(scene.bounds)), strict=True)
    each = {role: following(part, scene) for role, part in parts}
    options.end()
    orders = {role: Orders(one.margin, one.spare, one.hold_s, scene.bounds[role]) for role, one in each.items()}
    sources: Mapping[Role, Source] = {role: Window(one.window_s, one.trend_s) for role, one in each.items()}
    if rates:
        if not scene.asked:
            raise options.bad("rates: the mean work of a request is the trace's, and there is none")
        steps = _steps(rates, options)
        means = {role: sum(work.seconds(role, one) for one in scene.asked) / len(scene.asked) for role in scene.bounds}
        sources = {role: Stated(steps, ahead_s, mean) for role, mean in means.items()}
    return Follower(work, sources, orders, gated, cap)


def following(options: Options, scene: Scene) -> Following:
    """Of one tier. Raises BadInput."""
    usual = Following()
    found = Following(
        margin=options.positive("margin", usual.margin),
        spare=options.count("spare", usual.spare),
        hold_s=options.number("hold", usual.hold_s),
        window_s=options.positive("window", usual.window_s),
        trend_s=scene.plant.start.mean_s if options.flag("trend", False) else 0.0,
    )
    options.end()
    return found


def _steps(text: str, options: Options) -> list[tuple[float, float]]:
    try:
        steps = [(float(at_s), float(rate)) for at_s, rate in (step.split("@") for step in text.split(";"))]
    except ValueError:
        steps = []
    moments = [at_s for at_s, _ in steps]
    in_order = moments[:1] == [0.0] and moments == sorted(set(moments)) and moments[-1] < math.inf
    if not in_order or not all(0.0 <= rate <= LARGEST for _, rate in steps):
        raise options.bad(f"rates are like 0@6;600@36, in order of time from 0 on, not {text!r}")
    return steps


def settings() -> Sequence[str]:
    """Words worth trying in a search for the best."""
    return tuple(
        f"margin={margin:g},window={window:g}" for margin in (0.5, 0.65, 0.8, 0.95) for window in (30, 60, 120)
    )
