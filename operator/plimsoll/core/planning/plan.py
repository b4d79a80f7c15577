"""A plan: the cheapest arrangement for a question, why it and not the other one, and what to expect of it.

Problem: replicas, GPUs a replica, roles, chunk budget and slots hang together: each changes what the others should be.
Idea: the question brings the machines that there are (per number of GPUs, one at each chunk budget). For each number
the aggregated budget is chosen by its rule; every number of GPUs is sized, alone and for pairs; the fewest GPUs win,
then the smaller replicas. Everything said about the answer is read off the same tiers that were sized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from plimsoll.core.forecast import Unknown
from plimsoll.core.knee import HIGHEST_RATE, Constraint, Tier, profile
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.planning import settings
from plimsoll.core.planning.arrange import (
    MARGIN,
    RDMA_BYTES_PER_S,
    Arrangement,
    Unkept,
    aggregated,
    arrange,
    choose,
    nearest,
    pair,
    pays,
)
from plimsoll.core.planning.expect import Expected, expected, mean_batch, share_kept, work_of
from plimsoll.core.planning.machine import Machine
from plimsoll.core.planning.settings import (
    ACCEPTED,
    DRAFTED,
    Graphs,
    Speculation,
    graphs,
    longest_gap_s,
    max_sequences,
    speculation,
)
from plimsoll.core.sizing import Infeasible
from plimsoll.core.slo import Slo
from plimsoll.core.transfer import RDMA
from plimsoll.core.workload import Workload, from_samples

CURVE_POINTS = 61
CURVE_END = 1.6  # times the load line


@dataclass(frozen=True, eq=False)
class Question:
    """machines: for each number of GPUs a replica may have, the machine at each chunk budget, ascending.

    rate_per_s: of the whole service, above 0. gap_cv2: of arrivals, see `knee.Tier`. headroom: share of the load line
    kept free. gap_s: no usual gap between two tokens longer than this. bytes_per_s: of the fabric between engines.
    accepted: tokens a step with drafts. max_model_len: tokens of prompt and answer together; the engine refuses longer
    requests, and the others are planned for as if they came at the whole rate. Raises ValueError that names the
    argument.
    """

    workload: Workload
    slo: Slo
    rate_per_s: float
    machines: Sequence[Sequence[Machine]]
    gap_cv2: float = 1.0
    headroom: float = 0.0
    gap_s: float | None = None
    bytes_per_s: float = RDMA_BYTES_PER_S
    accepted: float = ACCEPTED
    max_model_len: float = math.inf

    def __post_init__(self) -> None:
        for name in ("rate_per_s", "bytes_per_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be finite and above 0, not {getattr(self, name)}")
        if self.rate_per_s > HIGHEST_RATE:
            raise ValueError(f"rate_per_s must be at most {HIGHEST_RATE:g}, not {self.rate_per_s}")
        if not 0 <= self.gap_cv2 < float("inf"):
            raise ValueError(f"gap_cv2 must be finite and at least 0, not {self.gap_cv2}")
        if not 0 <= self.headroom < 1:
            raise ValueError(f"headroom must be at least 0 and below 1, not {self.headroom}")
        if not 1 <= self.accepted <= DRAFTED + 1:
            raise ValueError(f"accepted must lie between 1 and {DRAFTED + 1}, not {self.accepted}")
        if self.gap_s is not None and not 0 < self.gap_s < float("inf"):
            raise ValueError(f"gap_s must be finite and above 0, not {self.gap_s}")
        if not self.machines or not all(self.machines):
            raise ValueError("machines are needed: no replica has room for the weights")

    @cached_property
    def too_long(self) -> float:
        """Share of the requests that the engine refuses for their length."""
        w = self.workload
        return w.mean((w.prompt_tokens + w.output_tokens > self.max_model_len).astype(float))

    @cached_property
    def served(self) -> Workload:
        """The others; not where all are too long."""
        w = self.workload
        fits = w.prompt_tokens + w.output_tokens <= self.max_model_len
        if fits.all():
            return w
        return from_samples(w.uncached_tokens[fits], w.cached_tokens[fits], w.output_tokens[fits], w.weights[fits])


@dataclass(frozen=True)
class Settings:
    """Of one tier's engine. longest_gap_s: the longest usual gap between tokens, None of a prefill tier. graphs: None
    where the engine's own do."""

    max_num_seqs: int
    max_num_batched_tokens: int
    longest_gap_s: float | None
    speculation: Speculation | None
    mean_batch: float | None
    graphs: Graphs | None


@dataclass(frozen=True)
class Point:
    """Goodput, requests in promise per second, at a rate: with nobody refused, and behind a gate.

    gated_per_s: the running maximum of both up to this rate, what a gate reaches that refuses all beyond the best rate.
    """

    rate_per_s: float
    open_per_s: float
    gated_per_s: float


@dataclass(frozen=True, eq=False)
class Plan:
    """chosen: the arrangement. other: the one that lost, or why there is none. why: sentences for people."""

    question: Question
    chosen: Arrangement
    other: Arrangement | Unkept | None
    why: tuple[str, ...]

    @cached_property
    def settings(self) -> tuple[Settings, ...]:
        """Of each tier's engine."""
        tiers = zip(self.chosen.tiers, self.chosen.machines, self.chosen.replicas, strict=True)
        return tuple(_settings(self.question, *each) for each in tiers)

    @cached_property
    def expected(self) -> Expected:
        """At the rate that was asked for."""
        return expected(self.chosen.tiers, self.question.rate_per_s, self.chosen.replicas)

    @cached_property
    def expected_at_line(self) -> Expected:
        """At the load line."""
        return expected(self.chosen.tiers, self.chosen.load_line_per_s, self.chosen.replicas)

    @cached_property
    def curve(self) -> tuple[Point, ...]:
        """Goodput against load."""
        return curve(self.chosen)

    @property
    def mean_tokens(self) -> tuple[float, float]:
        """Prompt and output tokens of a mean request that is served."""
        w = self.question.served
        return w.mean(w.prompt_tokens), w.mean(w.output_tokens)

    def cost_per_million(self, gpu_hour: float, rate_per_s: float, output_only: bool) -> float:
        """What a million tokens cost at a rate, in the unit of gpu_hour, all GPUs of the plan running."""
        prompt, output = self.mean_tokens
        tokens = rate_per_s * 3600 * (output if output_only else prompt + output)
        return gpu_hour * self.chosen.gpus / tokens * 1e6


@dataclass(frozen=True)
class NoPlan:
    """No number of replicas keeps the promise. found: what sizing says of the aggregated engines, the nearest promise
    in it; None where no chunk budget keeps the gap, or where no looser target helps."""

    found: Infeasible | None
    why: tuple[str, ...]


def plan(question: Question) -> Plan | NoPlan:
    """The answer, in about a second."""
    if question.too_long > 1 - question.slo.share:
        return NoPlan(None, (_cut_off(question),))
    together, budgets_fail = _together(question)
    apart, no_pair = _apart(question)
    best = choose(together, apart) if together is not None and apart is not None else None
    if best is None:
        found = [one for one in (together, apart) if isinstance(one, Arrangement)]
        best = found[0] if found else None
    if best is None:
        reasons = budgets_fail or _broken(question, together), no_pair or _broken(question, apart)
        why = tuple(f"{_name(number == 1)} is out: {reason}" for number, reason in enumerate(reasons))
        return NoPlan(replace(together, feasible=_nearest(question)) if isinstance(together, Unkept) else None, why)
    other = apart if not best.disaggregated else together
    return Plan(question, best, other, _reasons(question, best, other, budgets_fail, no_pair))


def _together(question: Question) -> tuple[Arrangement | Unkept | None, str]:
    """The best aggregated arrangement, or why no chunk budget will do."""
    found: list[Arrangement | Unkept] = []
    for machines in question.machines:
        chosen = _budgeted(question, machines)
        if chosen is not None:
            tier, machine = chosen
            found.append(arrange((tier,), (machine,), question.rate_per_s, question.headroom, question.too_long))
    if found:
        return _cheapest(found), ""
    return None, (
        f"a step of {question.machines[0][0].limits.token_budget} prompt tokens, the smallest budget looked at, "
        f"takes longer than the gap of {question.gap_s:g} s"
    )


def _budgeted(question: Question, machines: Sequence[Machine]) -> tuple[Tier, Machine] | None:
    """Aggregated engines at the chunk budget to take, if any keeps the gap."""
    tiers = [aggregated(m, question.served, question.slo, question.gap_cv2) for m in machines]
    chosen = settings.budget(tiers, question.gap_s)
    return None if chosen is None else (chosen, machines[tiers.index(chosen)])


def _nearest(question: Question) -> Slo | None:
    """The nearest promise that aggregated engines keep, of the largest replicas that keep the gap."""
    found = [one for machines in question.machines if (one := _budgeted(question, machines)) is not None]
    machine = found[-1][1]
    return nearest(lambda slo: aggregated(machine, question.served, slo), question.slo, question.too_long)


def _apart(question: Question) -> tuple[Arrangement | Unkept | None, str]:
    """The best pair, or why there is none. Prefill engines keep the largest budget: nobody decodes beside them.

    A decode engine has at least its prefill engine's GPUs: KV is read from fewer ranks by more.
    """
    if question.slo.ttft_s is None:
        return None, "a prefill tier is sized for a TTFT target, and there is none"
    verdict = pays(question.machines[0][-1], question.served, question.bytes_per_s)
    if isinstance(verdict, Unknown):
        return None, verdict.why
    if not verdict.pays:
        there = question.bytes_per_s >= RDMA_BYTES_PER_S
        return None, verdict.words.removesuffix(f": {RDMA}") if there else verdict.words
    found: list[Arrangement | Unkept] = []
    for first in question.machines:
        for last in question.machines:
            prefill, decode = first[-1], last[0]
            if prefill.gpus > decode.gpus:
                continue
            tiers = pair(prefill, decode, question.served, question.slo, question.bytes_per_s, question.gap_cv2)
            if question.gap_s is not None and longest_gap_s(tiers[1]) > question.gap_s:
                continue
            found.append(arrange(tiers, (prefill, decode), question.rate_per_s, question.headroom, question.too_long))
    if not found:
        return None, f"a decode engine's step at its full batch takes longer than the gap of {question.gap_s:g} s"
    return _cheapest(found), ""


def _cheapest(found: Sequence[Arrangement | Unkept]) -> Arrangement | Unkept:
    feasible = [one for one in found if isinstance(one, Arrangement)]
    if not feasible:
        return found[-1]  # of the largest replicas: they come nearest
    return min(feasible, key=lambda one: (one.gpus, sum(m.gpus for m in one.machines)))


def _settings(question: Question, tier: Tier, machine: Machine, replicas: int) -> Settings:
    budget = tier.limits.token_budget
    if tier.role is Role.PREFILL:
        return Settings(max_sequences(tier), budget, None, None, None, graphs(budget, machine.mixture))
    batch = mean_batch(tier, question.rate_per_s, replicas)
    advice = speculation(tier.model, batch, question.accepted, machine.mixture)
    slots = max_sequences(tier)
    most = slots if tier.role is Role.DECODE else budget  # tokens of a step; prompts come to a decode engine computed
    return Settings(slots, budget, longest_gap_s(tier), advice, batch, graphs(most, machine.mixture))


def curve(best: Arrangement, points: int = CURVE_POINTS) -> tuple[Point, ...]:
    """Goodput from no load to well past the line.

    Of a pair both tiers must keep their part; their shares are taken as independent.
    """
    reduced = [profile(tier) for tier in best.tiers]
    found, most = [Point(0.0, 0.0, 0.0)], 0.0
    for number in range(1, points):
        rate = best.load_line_per_s * CURVE_END * number / (points - 1)
        served = rate * (1 - best.too_long)
        gated, alone = (served * share_kept(reduced, rate, best.replicas, admission=gate) for gate in (True, False))
        most = max(most, gated, alone)
        found.append(Point(rate, alone, most))
    return tuple(found)


def _reasons(
    question: Question,
    best: Arrangement,
    other: Arrangement | Unkept | None,
    budgets_fail: str,
    no_pair: str,
) -> tuple[str, ...]:
    """Why this arrangement and not the other one."""
    if other is None:
        missing = budgets_fail if best.disaggregated else no_pair
        return (f"{_name(not best.disaggregated)} is out: {missing}",)
    if isinstance(other, Unkept):
        return (f"{_name(not best.disaggregated)} is out: {_broken(question, other)}",)
    reasons = [f"{_name(other.disaggregated)} would take {_gpus(other)} for the same rate, this takes {_gpus(best)}"]
    if not best.disaggregated and other.gpus < best.gpus:
        reasons.append(f"the pair would have to do with less than {MARGIN:.0%} of the GPUs to be worth its parts")
    binds = other.binding
    target_s = {name: target for name, target in question.slo.targets if name != Constraint.TTFT}.get(binds)
    if best.disaggregated and target_s is not None:
        work = work_of(other.tiers[0])
        stall_s = work.workload.mean(work.stall_s)
        reasons.append(
            f"an aggregated engine stands still for {stall_s * 1e3:.1f} ms at each prompt, which its {binds} of "
            f"{target_s * 1e3:g} ms leaves little room for; a decode engine only posts reads"
        )
    return tuple(reasons)


def _name(disaggregated: bool) -> str:
    return "a prefill and a decode tier" if disaggregated else "one aggregated tier"


def _gpus(found: Arrangement) -> str:
    parts = [f"{n} x {m.gpus}" for n, m in zip(found.replicas, found.machines, strict=True)]
    return f"{found.gpus} GPUs ({' + '.join(parts)})"


def _broken(question: Question, found: Arrangement | Unkept | None) -> str:
    if not isinstance(found, Unkept):
        return ""
    words = f"no number of replicas keeps the promise, {found.constraint} breaks it"
    may = 1 - question.slo.share
    if found.alone > may:
        words += f": {found.alone:.1%} of the requests miss alone on an idle replica, and {may:.0%} may"
    return f"{words}{found.hint}"


def _cut_off(question: Question) -> str:
    most = math.floor(100 * (1 - question.too_long))
    fewer = f", --percentile {most} or less may" if most else ""
    return (
        f"{question.too_long:.1%} of the requests, prompt and answer together, are longer than the engine's "
        f"max_model_len of {question.max_model_len:g} tokens, and {1 - question.slo.share:.0%} may miss: no "
        f"looser target helps, an engine with a longer one does{fewer}"
    )
