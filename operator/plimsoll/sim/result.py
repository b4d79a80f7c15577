"""What a run came to: counted as requests end, so that a day takes no more memory than an hour.

Offered is every request, warm-up and tail included; unfinished, refused, failed and late count as missed. A further
attempt of a refused one is no new request: `recovered`, `retries` and `tickets` count it, and `itl_p99_s`, whose gaps
engines count, who know no attempts. Times to first token are from the gateway's receipt, hold included; percentiles are
right to a quarter of a hundredth. Replicas cost from their order to their end, but nothing while they wait for a GPU
that a cluster has not left. Windows hold 500 requests by arrival; one passes where the promised share, less a point,
was kept in it, or the share that an idle fleet could keep, where that is less. What goes to a fallback is downgraded,
and missed here: that service is not simulated. Clients do not leave, and are counted all the same: 0 are gone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, TextIO

from plimsoll.core.admission import ClassPolicy
from plimsoll.core.gaps import SHARE
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.scaling import TierDecision
from plimsoll.core.slo import Slo
from plimsoll.sim.clients import Returns
from plimsoll.sim.gateway import default_class
from plimsoll.sim.phases import Offered, reversals
from plimsoll.sim.plant import Plant
from plimsoll.sim.times import Times
from plimsoll.sim.visit import Asked, End, Visit
from plimsoll.sim.work import Work, ttft_target_s
from plimsoll.sim.world import World

WINDOW: Final = 500  # requests
_POINT: Final = 0.01
_STATUS: Final = {End.OK: 200, End.REFUSED: 400}
_BUSY, _AWAY = 429, 503
_PRECISION: Final = 5


@dataclass
class Window:
    """Requests that arrived one after another: their number, when the first and the last came, how many were kept, and
    to how many an idle fleet would have kept the promise."""

    n: int
    from_s: float
    to_s: float
    ended: int = 0
    met: int = 0
    feasible: int = 0


class Result:
    """Of one run. Pass `take` to the world; `slo`: None where nothing is promised, then all that ends well is met.

    requests, windows: where a JSON line of each is written; None for nowhere. classes: each with its own targets, that
    of unknown names as gateways have it; () where `slo` is everybody's.
    """

    def __init__(
        self,
        plant: Plant,
        roles: Iterable[Role],
        slo: Slo | None,
        requests: TextIO | None = None,
        windows: TextIO | None = None,
        classes: Iterable[ClassPolicy] = (),
    ) -> None:
        self.taken = 0
        self.returns = Returns()
        self.ends: Counter[End] = Counter()
        roles = tuple(roles)
        self._plant, self._work, self._slo = plant, Work(plant, roles), slo
        classes = tuple(classes)
        self._of = {one.name: one.slo for one in classes}
        self._usual = self._of.get(default_class(classes), slo)
        self._offered = {role: Offered() for role in roles}
        self._requests, self._windows = requests, windows
        self._ttft, self._tpot, self._e2e = Times(), Times(), Times()
        self._met = self._held = self._infeasible = 0
        self._offered_tokens = self._met_tokens = self._met_output = 0
        self._offered_work_s = self._shed_work_s = 0.0
        self._open: dict[int, Window] = {}
        self._judged = self._passed = 0

    def take(self, visit: Visit) -> None:
        """An attempt has ended."""
        assert visit.end is not None
        if self._requests is not None:
            self._requests.write(json.dumps(row(visit)) + "\n")
        if visit.attempt > 1:
            self.returns.again(visit)
            return
        asked, met = visit.asked, self.met(visit)
        if visit.end is End.SHED:
            self.returns.first(visit)
        self.taken += 1
        self.ends[visit.end] += 1
        self._held += visit.waited
        tokens = asked.prompt_tokens + asked.output_tokens
        self._offered_tokens += tokens
        work = 0.0
        for role, offered in self._offered.items():
            part = self._work.seconds(role, asked)
            offered.add(asked.at_s, part)
            work += part
        self._offered_work_s += work
        if visit.end is End.SHED:
            self._shed_work_s += work
        if met:
            self._met += 1
            self._met_tokens += tokens
            self._met_output += asked.output_tokens
        slo = self._promised(asked)
        feasible = slo is None or self._work.feasible_alone(slo, asked)
        self._infeasible += not feasible
        for times, took_s in ((self._ttft, visit.ttft_s), (self._tpot, visit.tpot_s), (self._e2e, visit.e2e_s)):
            if took_s is not None:
                times.observe(took_s)
        self._count(visit, met, feasible)

    def met(self, visit: Visit) -> bool:
        """Whether it ended well and within its targets."""
        slo = self._promised(visit.asked)
        if visit.end is not End.OK or visit.ttft_s is None or slo is None:
            return visit.end is End.OK
        target_s = ttft_target_s(slo, visit.asked.prompt_tokens)
        in_time = target_s is None or visit.ttft_s <= target_s
        if slo.e2e_s is not None and (visit.e2e_s is None or visit.e2e_s > slo.e2e_s):
            return False
        return in_time and (slo.tpot_s is None or (visit.tpot_s or 0.0) <= slo.tpot_s)

    def _promised(self, asked: Asked) -> Slo | None:
        """The targets of its class; None where nothing is promised."""
        return self._of.get(asked.klass, self._usual)

    def summary(self, world: World, policy: str, seed: int, length_s: float, wall_s: float) -> dict[str, Any]:
        """The figures of the run, which JSON can hold. length_s: of the load."""
        offered, ends = self.taken, self.ends
        admitted = offered - ends[End.SHED] - ends[End.REFUSED] - ends[End.DOWNGRADED]
        paid_s = {role: tier.paid_s(length_s) for role, tier in world.tiers.items()}
        gpus = {role: self._plant.gpus.get(role, 1) for role in paid_s}

        def each_s(amount: float) -> float | None:
            """A second of the load; None where all of it came at one moment."""
            return _rounded(amount / length_s) if length_s > 0 else None

        return {
            "policy": policy,
            "seed": seed,
            "length_s": _rounded(length_s),
            "slo": None if self._slo is None else asdict(self._slo),
            "offered": offered,
            "admitted": admitted,
            "held": self._held,
            "downgraded": ends[End.DOWNGRADED],
            "shed": ends[End.SHED],
            "refused": ends[End.REFUSED],
            "completed": ends[End.OK],
            "failed": ends[End.FAILED],
            "client_gone": 0,
            "unfinished": ends[End.UNFINISHED],
            "recovered": self.returns.recovered,
            "retries": self.returns.retries,
            "infeasible_alone": self._infeasible,
            "attainment_offered": _share(self._met, offered),
            "attainment_admitted": _share(self._met, admitted),
            "windows_met": _share(self._passed, self._judged),
            "shed_share": _share(ends[End.SHED], offered),
            "shed_work_ratio": self._shed_work_ratio(),
            "offered_tokens": self._offered_tokens,
            "attainment_tokens": _share(self._met_tokens, self._offered_tokens),
            **{f"p{q}_ttft_s": _rounded(self._ttft.quantile_s(q / 100)) for q in (50, 95, 99)},
            **{f"p{q}_tpot_s": _rounded(self._tpot.quantile_s(q / 100)) for q in (50, 95, 99)},
            **{f"p{q}_e2e_s": _rounded(self._e2e.quantile_s(q / 100)) for q in self._asked_of_whole},
            "itl_p99_s": _rounded(world.gaps.quantile_s(SHARE)),
            **self._gaps(world),
            "goodput_rps": each_s(self._met),
            "goodput_tokens_per_s": each_s(self._met_output),
            "gpu_hours": _rounded(sum(paid_s[role] * gpus[role] for role in paid_s) / 3600),
            "mean_replicas": {str(role): each_s(paid) for role, paid in paid_s.items()},
            "replica_seconds": {str(role): _rounded(paid) for role, paid in paid_s.items()},
            "changes": len(world.log.changes),
            "reversals": self._reversals(world, length_s),
            "tickets": self.returns.summary(),
            "windows": {"requests": WINDOW, "n": self._judged, "passed": self._passed},
            "wall_s": round(wall_s, 2),
        }

    def _gaps(self, world: World) -> dict[str, Any]:
        """Whether the gaps kept their target, where they have one; None where there were none."""
        if self._slo is None or self._slo.itl_s is None:
            return {}
        found_s = world.gaps.quantile_s(SHARE)
        return {"itl_met": None if found_s is None else found_s <= self._slo.itl_s}

    @property
    def _asked_of_whole(self) -> tuple[int, ...]:
        """Percentiles of whole answers: where they are promised."""
        return (50, 95, 99) if self._slo is not None and self._slo.e2e_s is not None else ()

    def _reversals(self, world: World, length_s: float) -> dict[str, list[int]]:
        """Of each tier in each phase of its load."""
        found = {}
        for role, offered in self._offered.items():
            wanted = ((at_s, desired) for at_s, tier, desired, *_ in world.log.replicas if tier is role)
            found[str(role)] = reversals(wanted, offered.phases(), length_s)
        return found

    def _shed_work_ratio(self) -> float | None:
        """Mean work of what was shed over that of what was offered; None where nothing was shed."""
        shed = self.ends[End.SHED]
        return None if not shed else _rounded(self._shed_work_s / shed / (self._offered_work_s / self.taken))

    def _count(self, visit: Visit, met: bool, feasible: bool) -> None:
        """Takes a request into its window, and judges it when all of it has ended."""
        at_s, number = visit.asked.at_s, (visit.id - 1) // WINDOW
        window = self._open.get(number)
        if window is None:
            window = self._open[number] = Window(number, at_s, at_s)
        window.from_s, window.to_s = min(window.from_s, at_s), max(window.to_s, at_s)
        window.ended += 1
        window.met += met
        window.feasible += feasible
        if window.ended < WINDOW:
            return
        del self._open[number]
        share = 0.0 if self._slo is None else min(self._slo.share, window.feasible / WINDOW)
        passed = window.met / WINDOW >= share - _POINT
        self._judged += 1
        self._passed += passed
        if self._windows is not None:
            line = {**asdict(window), "attainment": window.met / WINDOW, "passed": passed}
            self._windows.write(json.dumps(line) + "\n")


def row(visit: Visit) -> dict[str, Any]:
    """An attempt as a line of requests.jsonl, a further one with its number; times in seconds after the run's start."""
    ok, shed = visit.end is End.OK, visit.end is End.SHED
    status = (_BUSY if visit.reason == "overloaded" else _AWAY) if shed else _STATUS.get(visit.end or End.FAILED)
    return {
        "id": str(visit.id),
        "run": "simulated",
        "class": visit.asked.klass,
        "tenant": visit.asked.tenant,
        "sent_s": _rounded(visit.asked.at_s),
        "ended_s": _rounded(visit.end_s),
        "prompt_tokens": visit.asked.prompt_tokens,
        "output_tokens_asked": visit.asked.output_tokens,
        "status": status,
        "outcome": str(visit.end),
        "reason": visit.reason,
        "retry_after_s": visit.retry_after_s,
        "ttft_s": _rounded(visit.ttft_s),
        "tpot_s": _rounded(visit.tpot_s),
        "output_tokens": visit.asked.output_tokens if ok else 0,
        "finish_reason": "length" if ok else None,
        **({"attempt": visit.attempt} if visit.attempt > 1 else {}),
    }


def replica_rows(world: World) -> Iterable[Mapping[str, Any]]:
    """The lines of replicas.jsonl: one where a tier's counts changed; each holds until the next."""
    for at_s, role, desired, ready, starting, draining in world.log.replicas:
        yield {
            "run": "simulated",
            "t_s": _rounded(at_s),
            "tier": str(role),
            "desired": desired,
            "ready": ready,
            "starting": starting,
            "draining": draining,
        }


def decision_rows(world: World) -> Iterable[Mapping[str, Any]]:
    """The lines of decisions.jsonl: one for each change of a tier's wanted replicas; why: None of a policy that does
    not say."""
    for at_s, role, before, decided in world.log.changes:
        told = decided if isinstance(decided, TierDecision) else None
        yield {
            "run": "simulated",
            "t_s": _rounded(at_s),
            "tier": str(role),
            "from": before,
            "to": decided if told is None else told.replicas,
            "why": None if told is None else told.why,
            "steps": []
            if told is None
            else [{"name": s.name, "replicas": s.replicas, "why": s.why} for s in told.steps],
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _PRECISION)


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, _PRECISION) if whole else None
