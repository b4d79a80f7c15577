"""Results of a run, aggregated as requests end, so that a day takes no more memory than an hour.

Every request is offered load, warm-up and tail included. Unfinished, rejected, failed and late requests count as
missed. Further attempts of a rejected request are no new requests. `recovered`, `retries` and `retry_reservations`
count them, and `itl_p99_s` includes them, because engines measure ITL without knowledge of attempts. TTFT counts from
the gateway's receipt, queueing included; percentiles are accurate to a quarter of a percent. Replicas cost from their
order to their end, but nothing while they wait for a GPU that the cluster lacks. Cost counts until the load has ended
and engines have worked on the last attempt, so a fleet that finishes late pays for it. Windows hold 500 requests by
arrival. A window passes if it meets the SLO share, or the share that an idle fleet could meet, if that is less.
Requests that go to a fallback are downgraded and count as missed, because that service is not simulated. Clients never
disconnect; the count of disconnected requests is always 0.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, TextIO

from plimsoll.core.admission.cost_model import ClassPolicy, default_class
from plimsoll.core.autoscaling.scaling_decision import TierDecision
from plimsoll.core.engine_model.inter_token import ITL_SHARE
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.sim.attempt import Attempt, AttemptOutcome, TraceRequest
from plimsoll.sim.clients import RetryStats
from plimsoll.sim.engine.quantile_sketch import QuantileSketch
from plimsoll.sim.load_phases import OfferedWork, reversals
from plimsoll.sim.plant import Plant
from plimsoll.sim.request_cost import RequestCostModel
from plimsoll.sim.simulator import Simulator

WINDOW_REQUESTS: Final = 500  # requests
_STATUS: Final = {AttemptOutcome.OK: 200, AttemptOutcome.REFUSED: 400}
_STATUS_OVERLOADED, _STATUS_UNAVAILABLE = 429, 503
_USES_ENGINE: Final = (AttemptOutcome.OK, AttemptOutcome.FAILED, AttemptOutcome.UNFINISHED)
_DIGITS: Final = 5


@dataclass
class RequestWindow:
    """Consecutive requests by arrival: their number, the first and last arrival, how many met the SLO, and how many
    could meet it on an idle fleet.
    """

    n: int
    from_s: float
    to_s: float
    ended: int = 0
    met: int = 0
    feasible: int = 0


class RunResult:
    """Result of one run; pass `add` to the simulator. slo: None without an SLO; every successful request then counts as
    met.

    requests, windows: files for a JSON line of each; None for no output. classes: each with its own targets, that of
    unknown names as in gateways; () if `slo` applies to all.
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
        self.first_attempts = 0
        self.retry_stats = RetryStats()
        self.outcomes: Counter[AttemptOutcome] = Counter()
        roles = tuple(roles)
        self._plant, self._cost_model, self._slo = plant, RequestCostModel(plant, roles), slo
        classes = tuple(classes)
        self._slo_by_class = {one.name: one.slo for one in classes}
        default = default_class(classes)
        self._default_slo = slo if default is None else default.slo
        self._offered = {role: OfferedWork() for role in roles}
        self._requests, self._windows = requests, windows
        self._ttft, self._tpot, self._e2e = QuantileSketch(), QuantileSketch(), QuantileSketch()
        self._within_slo = self._queued = self._infeasible_alone = 0
        self._offered_tokens = self._tokens_within_slo = self._output_within_slo = 0
        self._offered_work_s = self._shed_work_s = 0.0
        self._open_windows: dict[int, RequestWindow] = {}
        self._windows_complete = self._windows_passed = 0
        self._last_answer_s = 0.0

    def add(self, attempt: Attempt) -> None:
        """Add an attempt that has ended."""
        assert attempt.outcome is not None
        if self._requests is not None:
            self._requests.write(json.dumps(request_row(attempt)) + "\n")
        if attempt.outcome in _USES_ENGINE and attempt.end_s is not None:
            self._last_answer_s = max(self._last_answer_s, attempt.end_s)
        if attempt.attempt > 1:
            self.retry_stats.record_retry(attempt)
            return
        request, within_slo = attempt.trace_request, self.is_within_slo(attempt)
        if attempt.outcome is AttemptOutcome.SHED:
            self.retry_stats.record_rejection(attempt)
        self.first_attempts += 1
        self.outcomes[attempt.outcome] += 1
        self._queued += attempt.was_queued
        tokens = request.prompt_tokens + request.output_tokens
        self._offered_tokens += tokens
        work = 0.0
        for role, offered in self._offered.items():
            tier_work = self._cost_model.cost_s(role, request)
            offered.add(request.at_s, tier_work)
            work += tier_work
        self._offered_work_s += work
        if attempt.outcome is AttemptOutcome.SHED:
            self._shed_work_s += work
        if within_slo:
            self._within_slo += 1
            self._tokens_within_slo += tokens
            self._output_within_slo += request.output_tokens
        slo = self._slo_of(request)
        feasible = slo is None or self._cost_model.feasible_alone(slo, request)
        self._infeasible_alone += not feasible
        for times, took_s in ((self._ttft, attempt.ttft_s), (self._tpot, attempt.tpot_s), (self._e2e, attempt.e2e_s)):
            if took_s is not None:
                times.observe(took_s)
        self._add_to_window(attempt, within_slo, feasible)

    def is_within_slo(self, attempt: Attempt) -> bool:
        """Whether it succeeded within its targets."""
        slo = self._slo_of(attempt.trace_request)
        if attempt.outcome is not AttemptOutcome.OK or attempt.ttft_s is None or slo is None:
            return attempt.outcome is AttemptOutcome.OK
        in_time = attempt.ttft_s <= slo.ttft_target_s(attempt.trace_request.prompt_tokens)
        if slo.e2e_s is not None and (attempt.e2e_s is None or attempt.e2e_s > slo.e2e_s):
            return False
        return in_time and (slo.tpot_s is None or (attempt.tpot_s or 0.0) <= slo.tpot_s)

    def _slo_of(self, request: TraceRequest) -> Slo | None:
        """Return the targets of the request's class; None without an SLO."""
        return self._slo_by_class.get(request.request_class, self._default_slo)

    def summary(self, simulator: Simulator, policy: str, seed: int, length_s: float, wall_s: float) -> dict[str, Any]:
        """The figures of the run as JSON values. length_s: length of the load."""
        offered, outcomes = self.first_attempts, self.outcomes
        admitted = (
            offered
            - outcomes[AttemptOutcome.SHED]
            - outcomes[AttemptOutcome.REFUSED]
            - outcomes[AttemptOutcome.DOWNGRADED]
        )
        paid_until_s = max(length_s, self._last_answer_s)
        paid_s = {role: tier.replica_seconds(paid_until_s) for role, tier in simulator.tiers.items()}
        gpus = {role: self._plant.gpus.get(role, 1) for role in paid_s}

        def per_s(amount: float, seconds: float) -> float | None:
            """The amount per second; None without any time."""
            return _round(amount / seconds) if seconds > 0 else None

        return {
            "policy": policy,
            "seed": seed,
            "length_s": _round(length_s),
            "paid_until_s": _round(paid_until_s),
            "slo": None if self._slo is None else asdict(self._slo),
            "offered": offered,
            "admitted": admitted,
            "queued": self._queued,
            "downgraded": outcomes[AttemptOutcome.DOWNGRADED],
            "shed": outcomes[AttemptOutcome.SHED],
            "refused": outcomes[AttemptOutcome.REFUSED],
            "completed": outcomes[AttemptOutcome.OK],
            "failed": outcomes[AttemptOutcome.FAILED],
            "client_gone": 0,
            "unfinished": outcomes[AttemptOutcome.UNFINISHED],
            "recovered": self.retry_stats.recovered,
            "retries": self.retry_stats.retries,
            "infeasible_alone": self._infeasible_alone,
            "attainment_offered": _share(self._within_slo, offered),
            "attainment_admitted": _share(self._within_slo, admitted),
            "windows_met": _share(self._windows_passed, self._windows_complete),
            "shed_share": _share(outcomes[AttemptOutcome.SHED], offered),
            "shed_work_ratio": self._shed_work_ratio(),
            "offered_tokens": self._offered_tokens,
            "attainment_tokens": _share(self._tokens_within_slo, self._offered_tokens),
            **{f"p{q}_ttft_s": _round(self._ttft.quantile_s(q / 100)) for q in (50, 95, 99)},
            **{f"p{q}_tpot_s": _round(self._tpot.quantile_s(q / 100)) for q in (50, 95, 99)},
            **{f"p{q}_e2e_s": _round(self._e2e.quantile_s(q / 100)) for q in self._e2e_percentiles},
            "itl_p99_s": _round(simulator.itl.quantile_s(ITL_SHARE)),
            **self._itl_summary(simulator),
            "goodput_rps": per_s(self._within_slo, length_s),
            "goodput_tokens_per_s": per_s(self._output_within_slo, length_s),
            "gpu_hours": _round(sum(paid_s[role] * gpus[role] for role in paid_s) / 3600),
            "mean_replicas": {str(role): per_s(paid, paid_until_s) for role, paid in paid_s.items()},
            "replica_seconds": {str(role): _round(paid) for role, paid in paid_s.items()},
            "changes": len(simulator.log.changes),
            "reversals": self._reversals(simulator, length_s),
            "retry_reservations": self.retry_stats.summary(),
            "windows": {"requests": WINDOW_REQUESTS, "n": self._windows_complete, "passed": self._windows_passed},
            "wall_s": round(wall_s, 2),
        }

    def _itl_summary(self, simulator: Simulator) -> dict[str, Any]:
        """Return the inter-token latency and its target; None without values."""
        if self._slo is None or self._slo.itl_s is None:
            return {}
        itl_s = simulator.itl.quantile_s(ITL_SHARE)
        return {"itl_met": None if itl_s is None else itl_s <= self._slo.itl_s}

    @property
    def _e2e_percentiles(self) -> tuple[int, ...]:
        """Return the percentiles of end-to-end latency; empty without an e2e target."""
        return (50, 95, 99) if self._slo is not None and self._slo.e2e_s is not None else ()

    def _reversals(self, simulator: Simulator, length_s: float) -> dict[str, list[int]]:
        """Return the reversals of each tier in each phase of its load."""
        reversals_by_tier = {}
        for role, offered in self._offered.items():
            wanted = ((at_s, desired) for at_s, tier, desired, *_ in simulator.log.replicas if tier is role)
            reversals_by_tier[str(role)] = reversals(wanted, offered.phases(), length_s)
        return reversals_by_tier

    def _shed_work_ratio(self) -> float | None:
        """Return the mean work of shed requests over that of offered ones; None if none was shed."""
        shed = self.outcomes[AttemptOutcome.SHED]
        return None if not shed else _round(self._shed_work_s / shed / (self._offered_work_s / self.first_attempts))

    def _add_to_window(self, attempt: Attempt, within_slo: bool, feasible: bool) -> None:
        """Add a request to its window, and assess the window when all its requests have ended."""
        at_s, window_number = attempt.trace_request.at_s, (attempt.id - 1) // WINDOW_REQUESTS
        window = self._open_windows.get(window_number)
        if window is None:
            window = self._open_windows[window_number] = RequestWindow(window_number, at_s, at_s)
        window.from_s, window.to_s = min(window.from_s, at_s), max(window.to_s, at_s)
        window.ended += 1
        window.met += within_slo
        window.feasible += feasible
        if window.ended < WINDOW_REQUESTS:
            return
        del self._open_windows[window_number]
        share = 0.0 if self._slo is None else min(self._slo.share, window.feasible / WINDOW_REQUESTS)
        passed = window.met / WINDOW_REQUESTS >= share
        self._windows_complete += 1
        self._windows_passed += passed
        if self._windows is not None:
            window_row = {**asdict(window), "attainment": window.met / WINDOW_REQUESTS, "passed": passed}
            self._windows.write(json.dumps(window_row) + "\n")


def request_row(attempt: Attempt) -> dict[str, Any]:
    """Return an attempt as a line of requests.jsonl, a retry with its number; times in seconds after
    the run's start.
    """
    ok, shed = attempt.outcome is AttemptOutcome.OK, attempt.outcome is AttemptOutcome.SHED
    status = (
        (_STATUS_OVERLOADED if attempt.reason in ("overloaded", "adapters_busy") else _STATUS_UNAVAILABLE)
        if shed
        else _STATUS.get(attempt.outcome or AttemptOutcome.FAILED)
    )
    return {
        "id": str(attempt.id),
        "run": "simulated",
        "class": attempt.trace_request.request_class,
        "tenant": attempt.trace_request.tenant,
        "sent_s": _round(attempt.trace_request.at_s),
        "ended_s": _round(attempt.end_s),
        "prompt_tokens": attempt.trace_request.prompt_tokens,
        "output_tokens_asked": attempt.trace_request.output_tokens,
        "status": status,
        "outcome": str(attempt.outcome),
        "reason": attempt.reason,
        "retry_after_s": attempt.retry_after_s,
        "ttft_s": _round(attempt.ttft_s),
        "tpot_s": _round(attempt.tpot_s),
        "output_tokens": attempt.trace_request.output_tokens if ok else 0,
        "finish_reason": "length" if ok else None,
        **({"attempt": attempt.attempt} if attempt.attempt > 1 else {}),
    }


def replica_rows(simulator: Simulator) -> Iterable[Mapping[str, Any]]:
    """Return the lines of replicas.jsonl: one per change of a tier's counts; each applies until the next."""
    for at_s, role, desired, ready, starting, draining in simulator.log.replicas:
        yield {
            "run": "simulated",
            "t_s": _round(at_s),
            "tier": str(role),
            "desired": desired,
            "ready": ready,
            "starting": starting,
            "draining": draining,
        }


def decision_rows(simulator: Simulator) -> Iterable[Mapping[str, Any]]:
    """Return the lines of decisions.jsonl: one per change of a tier's desired replicas. `why` is None for a policy
    without reasons.
    """
    for at_s, role, before, decided in simulator.log.changes:
        decision = decided if isinstance(decided, TierDecision) else None
        yield {
            "run": "simulated",
            "t_s": _round(at_s),
            "tier": str(role),
            "from": before,
            "to": decided if decision is None else decision.replicas,
            "reason": None if decision is None else decision.summary,
            "steps": []
            if decision is None
            else [{"name": s.name, "replicas": s.replicas, "reason": s.reason} for s in decision.steps],
        }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)


def _share(part: int, total: int) -> float | None:
    return round(part / total, _DIGITS) if total else None
