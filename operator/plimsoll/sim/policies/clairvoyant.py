"""Clairvoyant policy (oracle): replicas by the clock, from a schedule made for this trace.

Problem: what is possible with knowledge of the load? A lower bound (`sim.lower_bound`) limits every policy. The optimum
lies between it and the best schedule found.

Idea: the schedule is part of the policy text, so that anyone with the text can run it again. The search runs many of
them on the plant (`sim.frontier`); this module only follows one. The run configuration gives the ready replicas at the
start, as for every policy; the first step is ordered then.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from plimsoll.core import units
from plimsoll.core.types import Role
from plimsoll.sim.attempt import TraceRequest
from plimsoll.sim.concurrency_cap import ConcurrencyCap
from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies.base import Observation, PolicyContext, SimulatedPolicy
from plimsoll.sim.policies.options import PolicyOptions, parse_count
from plimsoll.sim.policies.reactive import admission

ReplicaPlan = tuple[tuple[float, tuple[int, ...]], ...]  # moments from 0 on, and replicas of each tier from then on


class ClairvoyantPolicy:
    """Follows a schedule."""

    initial_replicas: Mapping[Role, int] | None = None

    def __init__(
        self, plan: ReplicaPlan, roles: Sequence[Role], runs_operator: bool, cap: ConcurrencyCap | None
    ) -> None:
        self.runs_operator, self.cap = runs_operator, cap
        self._step_times_s = [at_s for at_s, _ in plan]
        self._step_replicas = [dict(zip(roles, counts, strict=True)) for _, counts in plan]

    def on_arrival(self, request: TraceRequest, now_s: float) -> None:
        """Do nothing: the schedule is fixed."""

    def desired_replicas(self, observation: Observation) -> Mapping[Role, int]:
        return self._step_replicas[bisect_right(self._step_times_s, observation.now_s) - 1]


def make(options: PolicyOptions, context: PolicyContext) -> SimulatedPolicy:
    """Options plan=0@1;290@3 (from second @ replicas, prefill/decode for two tiers); gated=1 or cap as in `reactive`.

    Raises BadInput.
    """
    gated, cap = admission(options, context, False)
    text = options.text("plan", "")
    options.finish()
    plan = parse_plan(text, len(context.bounds))
    if plan is None:
        raise options.error(
            f"plan is like {'0@1;290@3' if len(context.bounds) == 1 else '0@1/2;290@3/2'}, not {text!r}"
        )
    for _, counts in plan:
        for count, (minimum, maximum) in zip(counts, context.bounds.values(), strict=True):
            if not minimum <= count <= maximum:
                raise BadInput(f"{options.origin}: {count} replicas are not from {minimum} to {maximum}")
    return ClairvoyantPolicy(plan, list(context.bounds), gated, cap)


def parse_plan(text: str, tiers: int) -> ReplicaPlan | None:
    """Return a plan from its text; None if it is invalid."""
    steps = []
    for step in text.split(";"):
        at, _, counts = step.partition("@")
        counts_or_none = [parse_count(word) for word in counts.split("/")]
        valid_counts = tuple(count for count in counts_or_none if count is not None)
        if len(counts_or_none) != tiers or len(valid_counts) != tiers:
            return None
        try:
            steps.append((float(at), valid_counts))
        except ValueError:
            return None
    moments = [at_s for at_s, _ in steps]
    in_order = moments == sorted(set(moments)) and moments[0] == 0.0 and moments[-1] < math.inf
    return tuple(steps) if in_order else None


def format_plan(plan: ReplicaPlan) -> str:
    """The text of a plan."""
    return ";".join(f"{units.format_figure(at_s, 10)}@{'/'.join(map(str, counts))}" for at_s, counts in plan)


def join_plans(texts: Sequence[str]) -> str:
    """The option of one plan for all tiers, from one of each."""
    plans = [parse_plan(text.removeprefix("plan="), 1) or () for text in texts]
    moments = sorted({at_s for plan in plans for at_s, _ in plan})
    starts = [[at_s for at_s, _ in plan] for plan in plans]
    steps = (
        (at_s, tuple(plan[bisect_right(at, at_s) - 1][1][0] for plan, at in zip(plans, starts, strict=True)))
        for at_s in moments
    )
    return f"plan={format_plan(tuple(steps))}"
