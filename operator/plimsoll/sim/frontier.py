"""Comparisons over many runs: the Pareto frontier of reactive baselines, the best one in hindsight, and an oracle
schedule.

Problem: one setting of a baseline proves nothing. A baseline with less tuning than the system under test proves less.

Idea: a comparison expands to policies, each a text that anyone can run again. Reactive baselines: thousands of settings
are screened by work alone (`sim.screening`). The selected ones run with a plain cap on requests in flight. Those near
the frontier also run with the other caps and with the operator's admission model, whose runs cost most. Oracle: the
cheapest schedule with knowledge of the future, then repeatedly one replica less, a later order or an earlier release,
while it still reaches the required attainment. The caller runs the policies; this module has only policy texts, seeds
and means.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from plimsoll.core import units
from plimsoll.core.types import Role
from plimsoll.sim import screening
from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies import clairvoyant, registry
from plimsoll.sim.policies.base import PolicyContext
from plimsoll.sim.policies.options import PolicyOptions
from plimsoll.sim.request_cost import RequestCostModel
from plimsoll.sim.screening import SearchSpace

RunSummary = Mapping[str, Any]
RunPolicy = Callable[[str, int], RunSummary]  # policy text and seed -> summary of the run
RunMany = Callable[[Sequence[tuple[str, int]]], Sequence[RunSummary]]  # many of them, in their order

COMPARISONS: Final = registry.COMPARISONS
CAP_SHARES: Final = (0.65, 0.4, 0.5, 0.8)  # shares of the sequences with which a replica would meet the SLO
_DEFAULT_RUNS: Final = 40
_REFINED_POINTS: Final = 12  # policies near the frontier that also run with each other admission control
_TARGET_SHARE: Final = 0.99  # of windows, or of requests where there is no window
_STEP_SHIFTS_S: Final = (120.0, 30.0)  # by which a step of the schedule moves


@dataclass(frozen=True)
class FrontierPoint:
    """A policy's means over the seeds. windows_passed: share of all windows that passed, None without windows."""

    policy: str
    attainment: float
    gpu_hours: float
    windows_passed: float | None = None


class EvaluatedPolicies:
    """Policies and their runs, each once per seed."""

    def __init__(self, run_many: RunMany, seeds: Sequence[int]) -> None:
        self._run_many, self._seeds = run_many, seeds
        self._points: dict[str, FrontierPoint] = {}

    def points(self, policies: Iterable[str]) -> list[FrontierPoint]:
        distinct = list(dict.fromkeys(policies))
        new = [policy for policy in distinct if policy not in self._points]
        summaries = iter(self._run_many([(policy, seed) for policy in new for seed in self._seeds]) if new else ())
        for policy in new:
            self._points[policy] = mean_point(policy, [next(summaries) for _ in self._seeds])
        return [self._points[policy] for policy in distinct]


def runner(run_policy: RunPolicy, processes: int = 1) -> RunMany:
    """Run a function for many policies, in forked processes if processes > 1."""

    def run_many(runs: Sequence[tuple[str, int]]) -> Sequence[RunSummary]:
        if processes == 1:
            return [run_policy(*run) for run in runs]
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(processes, context, _init_worker, (run_policy,)) as pool:
            return list(pool.map(_run_in_worker, runs))

    return run_many


_worker_run: RunPolicy | None = None  # of a forked process


def _init_worker(run_policy: RunPolicy) -> None:
    global _worker_run
    _worker_run = run_policy


def _run_in_worker(run: tuple[str, int]) -> RunSummary:
    assert _worker_run is not None
    return _worker_run(*run)


def mean_point(policy: str, runs: Sequence[RunSummary]) -> FrontierPoint:
    """The means of several seeds."""
    window_count = sum(run["windows"]["n"] for run in runs)
    return FrontierPoint(
        policy,
        statistics.fmean(run["attainment_offered"] for run in runs),
        statistics.fmean(run["gpu_hours"] for run in runs),
        sum(run["windows"]["passed"] for run in runs) / window_count if window_count else None,
    )


# -------------------------------------------------------------------- judging


def pareto_front(points: Iterable[FrontierPoint]) -> list[FrontierPoint]:
    """Points that no other point beats at no higher cost, cheapest first."""
    best: list[FrontierPoint] = []
    for one in sorted(points, key=lambda one: (one.gpu_hours, -one.attainment, one.policy)):
        if not best or one.attainment > best[-1].attainment:
            best.append(one)
    return best


def best_at(points: Iterable[FrontierPoint], gpu_hours: float) -> FrontierPoint | None:
    """The point with the highest attainment at no more GPU-hours."""
    affordable = [one for one in points if one.gpu_hours <= gpu_hours]
    return max(affordable, key=lambda one: (one.attainment, -one.gpu_hours), default=None)


def attainment_gap(own: FrontierPoint, points: Iterable[FrontierPoint], at_cost: float = 1.0) -> float:
    """How much higher the best attainment at `at_cost` times our GPU-hours is; -inf: no point is that cheap.

    Within x points and y % means that `attainment_gap(own, points, 1 / (1 + y))` is at most x.
    """
    best = best_at(points, own.gpu_hours * at_cost)
    return -math.inf if best is None else best.attainment - own.attainment


def cheapest(
    points: Iterable[FrontierPoint], attainment: float = 0.0, windows_passed: float = 0.0
) -> FrontierPoint | None:
    """The cheapest point with this attainment and this share of passed windows, if there are any."""
    feasible = [
        one
        for one in points
        if one.attainment >= attainment and (one.windows_passed is None or one.windows_passed >= windows_passed)
    ]
    return min(feasible, key=lambda one: (one.gpu_hours, -one.attainment), default=None)


# -------------------------------------------------------------------- comparing


def is_comparison(text: str) -> bool:
    """Whether a policy text names a comparison."""
    name, _, rest = text.partition(":")
    planned = name == "clairvoyant" and any(word.startswith("plan=") for word in rest.split(","))
    return name in COMPARISONS and not planned


def may_expand(text: str) -> bool:
    """Whether a policy text may expand to several policies."""
    return is_comparison(text) and text.partition(":")[0] == "follower-frontier"


def expand(text: str, space: SearchSpace, run_many: RunMany, seeds: Sequence[int] = (0,)) -> list[str]:
    """Return the policies of a comparison; any other policy expands to itself.

    `follower-frontier` is the frontier of reactive baselines, with the operator's admission model. `hindsight` is the
    cheapest reactive baseline with any admission control that meets the SLO over all requests and passes the share
    `windows` (0.99) of the windows; with `gpu-hours`, the one with the highest attainment at no more. `clairvoyant` is
    the cheapest schedule found with `attainment` (0.99), with `cap` or `gated` as for a follower; `runs` is the number
    of runs of the first pass (40). If no policy reaches that, the result is the one with the highest attainment. Raises
    BadInput, also if no policy is as cheap as `gpu-hours`.
    """
    name, _, rest = text.partition(":")
    if not is_comparison(text):
        return [text]
    options, evaluated = PolicyOptions(f"--policy {text}", rest), EvaluatedPolicies(run_many, seeds)
    runs = options.count("runs", _DEFAULT_RUNS, minimum=1)
    if name == "clairvoyant":
        attainment = options.number("attainment", _TARGET_SHARE, maximum=1.0)
        admission = options.text("cap", ""), options.text("gated", "")
        options.finish()
        suffix = "".join(f",{key}={value}" for key, value in zip(("cap", "gated"), admission, strict=True) if value)
        return [best_schedule(space, evaluated, attainment, runs, suffix).policy]
    if name == "follower-frontier":
        options.finish()
        return [
            one.policy
            for one in pareto_front(
                one for one in evaluate_followers(space, evaluated, runs) if "cap=" not in one.policy
            )
        ]
    windows_passed, gpu_hours = options.number("windows", _TARGET_SHARE, maximum=1.0), options.number("gpu-hours", 0.0)
    options.finish()
    points = evaluate_followers(space, evaluated, runs)
    if gpu_hours:
        return [_best_affordable(text, points, gpu_hours).policy]
    best = cheapest(points, _required_attainment(space.context), windows_passed)
    return [(best or max(points, key=lambda one: one.attainment)).policy]


def _best_affordable(text: str, points: Sequence[FrontierPoint], gpu_hours: float) -> FrontierPoint:
    best = best_at(points, gpu_hours)
    if best is None:
        min_gpu_hours = min(one.gpu_hours for one in points)
        raise BadInput(
            f"--policy {text}: the cheapest follower that was run costs "
            f"{units.format_figure(min_gpu_hours, 4)} GPU-hours"
        )
    return best


def evaluate_followers(space: SearchSpace, evaluated: EvaluatedPolicies, runs: int) -> list[FrontierPoint]:
    """Reactive baselines with a cap, and those near their frontier with each other admission control."""
    caps = [_scaled_cap(share, space.context) for share in CAP_SHARES]
    screened = screening.screen_followers(space, runs)
    points = evaluated.points(f"{policy},cap={caps[0]}" for policy in screened)
    policies = [one.policy.rpartition(",")[0] for one in _near_front(points)]
    admissions = [*(f"cap={cap}" for cap in dict.fromkeys(caps[1:])), "gated=1"]
    return points + evaluated.points(
        f"{policy},{admission_option}" for admission_option in admissions for policy in policies
    )


def _near_front(points: Sequence[FrontierPoint]) -> Sequence[FrontierPoint]:
    """Return points evenly over the front; if it has too few, also those that are least behind it."""
    best = pareto_front(points)
    if len(best) >= _REFINED_POINTS:
        return [best[n * (len(best) - 1) // (_REFINED_POINTS - 1)] for n in range(_REFINED_POINTS)]
    others = sorted(
        (one for one in points if one not in best), key=lambda one: (attainment_gap(one, points), one.gpu_hours)
    )
    return (*best, *others[: _REFINED_POINTS - len(best)])


def _scaled_cap(share: float, context: PolicyContext) -> int:
    """Return a share of the largest cap, at least 1."""
    return max(1, round(share * max_resident_sequences(context)))


def max_resident_sequences(scene: PolicyContext) -> float:
    """Sequences with which a mean replica that also prefills their prompts just meets the TPOT target.

    With n residents that stay for O target seconds, it prefills n / (O target) prompts of w_p seconds per second. A
    token takes (base + n s) / (1 - n w_p / (O target)), so n = (target - base) / (s + w_p / O). Slots and cache limit
    it too.
    """
    profile = scene.plant.profile
    role = next(role for role in scene.bounds if role is not Role.PREFILL)
    requests, c = scene.requests or (), scene.plant.profile_for(role).coefficients
    if not requests:
        return float(profile.max_num_seqs)
    prompt, output = (
        statistics.fmean(getattr(one, name) for one in requests) for name in ("prompt_tokens", "output_tokens")
    )
    context = prompt + output / 2
    limit = min(profile.max_num_seqs, profile.kv_tokens / context)
    if scene.slo is None or scene.slo.tpot_s is None:
        return limit
    cost_model = RequestCostModel(scene.plant, scene.bounds)
    work_per_token_s = statistics.fmean(cost_model.cost_s(role, one) for one in requests) / output
    return max(1.0, min(limit, (scene.slo.tpot_s - c.base) / work_per_token_s))


def best_schedule(
    space: SearchSpace, evaluated: EvaluatedPolicies, attainment: float, runs: int, admission: str = ""
) -> FrontierPoint:
    """The cheapest schedule found with this attainment, else the one with the highest; half of the runs refine it."""
    cap = f",cap={_scaled_cap(CAP_SHARES[0], space.context)}"
    suffix = admission or cap
    points = evaluated.points(policy + suffix for policy in screening.screen_plans(space, max(1, runs // 2)))
    best = cheapest(points, attainment)
    if best is None:
        return max(points, key=lambda one: (one.attainment, -one.gpu_hours))
    rejected: set[str] = set()
    for _ in range(runs - len(points)):
        policy = next((one for one in _cheaper_schedules(best.policy, suffix, space) if one not in rejected), None)
        if policy is None:
            break
        [one] = evaluated.points([policy])
        if one.attainment >= attainment and one.gpu_hours < best.gpu_hours:
            best = one
        else:
            rejected.add(policy)
    return best


def _cheaper_schedules(policy: str, suffix: str, space: SearchSpace) -> Iterator[str]:
    """Yield the schedule with one step removed, delayed or shortened, largest saving first."""
    text = policy.removesuffix(suffix).partition("plan=")[2]
    plan = clairvoyant.parse_plan(text, len(space.context.bounds))
    assert plan is not None
    min_counts = [bounds[0] for bounds in space.context.bounds.values()]
    ends_s = [*(at_s for at_s, _ in plan[1:]), space.length_s]
    candidates: list[tuple[float, str]] = []
    for n, ((at_s, counts), end_s) in enumerate(zip(plan, ends_s, strict=True)):
        for tier, count in enumerate(counts):
            if count > min_counts[tier]:
                fewer = (*counts[:tier], count - 1, *counts[tier + 1 :])
                candidates.append((end_s - at_s, _policy_text((*plan[:n], (at_s, fewer), *plan[n + 1 :]), suffix)))
        for shift_s in _STEP_SHIFTS_S if n else ():
            before = plan[n - 1][1]
            saved = sum(counts) - sum(before)
            shifted_s = at_s + shift_s if saved > 0 else at_s - shift_s
            if saved and plan[n - 1][0] < shifted_s < end_s:
                shifted = (*plan[:n], (shifted_s, counts), *plan[n + 1 :])
                candidates.append((abs(saved) * shift_s, _policy_text(shifted, suffix)))
    for _, one in sorted(candidates, key=lambda one: (-one[0], one[1])):
        yield one


def _policy_text(plan: clairvoyant.ReplicaPlan, suffix: str) -> str:
    steps = [step for n, step in enumerate(plan) if not n or step[1] != plan[n - 1][1]]
    return f"clairvoyant:plan={clairvoyant.format_plan(tuple(steps))}{suffix}"


def _required_attainment(context: PolicyContext) -> float:
    return 0.0 if context.slo is None else context.slo.share
