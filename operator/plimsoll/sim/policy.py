"""What sizes the tiers of a simulated fleet: the operator's own core, or another policy beside it.

A policy is told of every arrival and asked at every tick. Those that are no more than a yardstick may know what an
operator does not: a follower knows the plant's coefficients and each request's length once it has been written, and
nothing of the future.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from plimsoll.core.picking.endpoint import Role
from plimsoll.sim.errors import BadInput
from plimsoll.sim.plant import Plant
from plimsoll.sim.visit import Asked
from plimsoll.sim.work import Work

PLANNED: Final = (
    "hpa-queue", "hpa-concurrency", "keda-ttft", "kpa", "apa", "wva", "wva-queueing", "dynamo-throughput",
    "dynamo-load", "clairvoyant", "follower-frontier", "hindsight",
)  # fmt: skip

Bounds = Mapping[Role, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Look:
    """What any policy may see at a tick. decided: what the operator's core wants, None where it does not run."""

    now_s: float
    ordered: Mapping[Role, int]
    decided: Mapping[Role, int] | None


class Policy(Protocol):
    """operator: whether the operator's core runs, and so whether gateways let in by its model. initial: replicas that
    are ready when a run begins, None where the user says so."""

    operator: bool
    initial: Mapping[Role, int] | None

    def arrived(self, asked: Asked, now_s: float) -> None: ...

    def wanted(self, look: Look) -> Mapping[Role, int]:
        """Replicas by tier; a tier that is missing stays as it is."""
        ...


class Plimsoll:
    """The operator's own decisions."""

    operator = True
    initial: Mapping[Role, int] | None = None

    def arrived(self, asked: Asked, now_s: float) -> None:
        """Nothing: the operator hears of it from the gateways."""

    def wanted(self, look: Look) -> Mapping[Role, int]:
        return look.decided or {}


class Static:
    """Always the same."""

    def __init__(self, replicas: Mapping[Role, int], gated: bool) -> None:
        self.operator = gated
        self.initial: Mapping[Role, int] | None = replicas

    def arrived(self, asked: Asked, now_s: float) -> None:
        """Of no interest."""

    def wanted(self, look: Look) -> Mapping[Role, int]:
        return self.initial or {}


@dataclass(frozen=True, slots=True)
class Following:
    """How a follower follows: ceil(work rate over the trailing window / margin) + spare, the largest of `hold`."""

    margin: float = 0.8
    spare: int = 0
    hold_s: float = 60.0
    window_s: float = 60.0
    gated: bool = True


class Follower:
    """Orders what the work of the trailing window needs."""

    initial: Mapping[Role, int] | None = None

    def __init__(self, setting: Following, bounds: Bounds, plant: Plant) -> None:
        self.operator = setting.gated
        self._setting, self._bounds, self._work = setting, bounds, Work(plant, bounds)
        self._serial = 0
        self._coming: dict[Role, list[tuple[float, int, float]]] = {role: [] for role in bounds}
        self._known: dict[Role, deque[tuple[float, float]]] = {role: deque() for role in bounds}
        self._sum_s = dict.fromkeys(bounds, 0.0)
        self._needs: dict[Role, deque[tuple[float, int]]] = {role: deque() for role in bounds}

    def arrived(self, asked: Asked, now_s: float) -> None:
        self._serial += 1
        for role, coming in self._coming.items():
            known_s = now_s
            if role is not Role.PREFILL:
                known_s += self._work.writing_s(role, asked)
            heapq.heappush(coming, (known_s, self._serial, self._work.seconds(role, asked)))

    def wanted(self, look: Look) -> Mapping[Role, int]:
        return {role: self._tier(role, look.now_s) for role in self._bounds}

    def _tier(self, role: Role, now_s: float) -> int:
        setting, coming, known = self._setting, self._coming[role], self._known[role]
        while coming and coming[0][0] <= now_s:
            at_s, _, work = heapq.heappop(coming)
            known.append((at_s, work))
            self._sum_s[role] += work
        while known and known[0][0] <= now_s - setting.window_s:
            self._sum_s[role] -= known.popleft()[1]
        rate = self._sum_s[role] / min(setting.window_s, max(now_s, 1.0))
        need, needs = math.ceil(rate / setting.margin - 1e-9) + setting.spare, self._needs[role]
        while needs and needs[-1][1] <= need:
            needs.pop()
        needs.append((now_s, need))
        while needs[0][0] < now_s - setting.hold_s:
            needs.popleft()
        least, most = self._bounds[role]
        return min(most, max(least, needs[0][1]))


def parse(text: str, bounds: Bounds, plant: Plant) -> Policy:
    """`plimsoll`, `static:K` (or `static:P,D`), `follower`; options follow after a colon or comma as key=value.

    Static: gated=1 lets the operator's model decide about admission all the same. Follower: margin, spare, hold,
    window (seconds) and gated=0. Raises BadInput.
    """
    name, _, rest = text.partition(":")
    words = [word for word in rest.split(",") if word]
    plain, options = [word for word in words if "=" not in word], dict(w.split("=", 1) for w in words if "=" in w)
    if name == "plimsoll" and not words:
        return Plimsoll()
    if name == "static":
        gated = _flag(text, options.pop("gated", "0"))
        _none(text, options)
        return Static(replicas(plain, bounds, f"--policy {text}"), gated)
    if name == "follower" and not plain:
        return Follower(_following(text, options), bounds, plant)
    if name in PLANNED:
        raise BadInput(f"--policy {text}: {name} is not there yet; there are plimsoll, static:K and follower")
    raise BadInput(f"--policy {text!r} is none of plimsoll, static:K, follower:key=value,...")


def replicas(words: list[str], bounds: Bounds, place: str) -> Mapping[Role, int]:
    """A count for each tier, prefill before decode, from as many words. Raises BadInput."""
    if len(words) != len(bounds) or not all(word.isdecimal() for word in words):
        tiers = ",".join(str(role).upper() for role in bounds)
        raise BadInput(f"{place}: must be {tiers} as {len(bounds)} whole number{'s' if len(bounds) > 1 else ''}")
    return dict(zip(bounds, map(int, words), strict=True))


def _following(text: str, options: dict[str, str]) -> Following:
    usual = Following()
    try:
        setting = Following(
            margin=float(options.pop("margin", usual.margin)),
            spare=int(options.pop("spare", usual.spare)),
            hold_s=float(options.pop("hold", usual.hold_s)),
            window_s=float(options.pop("window", usual.window_s)),
            gated=_flag(text, options.pop("gated", "1")),
        )
    except ValueError as error:
        raise BadInput(f"--policy {text}: {error}") from None
    _none(text, options)
    spans = (setting.margin, setting.window_s)
    if not all(0.0 < one < math.inf for one in spans) or not 0.0 <= setting.hold_s < math.inf or setting.spare < 0:
        raise BadInput(f"--policy {text}: margin and window are above 0, spare and hold at least 0")
    return setting


def _flag(text: str, value: str) -> bool:
    if value not in ("0", "1"):
        raise BadInput(f"--policy {text}: gated is 0 or 1, not {value!r}")
    return value == "1"


def _none(text: str, options: Mapping[str, str]) -> None:
    if options:
        raise BadInput(f"--policy {text}: unknown {', '.join(options)}")
