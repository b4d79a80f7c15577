"""The clairvoyant: replicas by the clock, from a schedule that was made for this very trace.

Problem: what could have been done, had one known the load? A bound (`sim.bound`) says what nobody can do; between it
and the best that anybody has found lies the truth.

Idea: a schedule is part of the policy's word, so that whoever has the word can run it again. Searching for one runs
many of them on the plant (`sim.frontier`); this module only follows it. Ready replicas at the start are those of the
setting, as for every policy: the first step is ordered then.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from plimsoll.core.picking.endpoint import Role
from plimsoll.sim.capped import Cap
from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies.base import Look, Policy, Scene
from plimsoll.sim.policies.follower import admission
from plimsoll.sim.policies.options import Options, whole
from plimsoll.sim.visit import Asked

Plan = tuple[tuple[float, tuple[int, ...]], ...]  # moments from 0 on, and replicas of each tier from then on


class Clairvoyant:
    """Follows a plan."""

    initial: Mapping[Role, int] | None = None

    def __init__(self, plan: Plan, roles: Sequence[Role], gated: bool, cap: Cap | None) -> None:
        self.operator, self.cap = gated, cap
        self._at = [at_s for at_s, _ in plan]
        self._wanted = [dict(zip(roles, counts, strict=True)) for _, counts in plan]

    def arrived(self, asked: Asked, now_s: float) -> None:
        """It was known."""

    def wanted(self, look: Look) -> Mapping[Role, int]:
        return self._wanted[bisect_right(self._at, look.now_s) - 1]


def make(options: Options, scene: Scene) -> Policy:
    """plan=0@1;290@3 (from second @ replicas, prefill/decode where there are two tiers); gated=1 or cap as a follower.

    Raises BadInput.
    """
    gated, cap = admission(options, scene, False)
    text = options.text("plan", "")
    options.end()
    plan = read(text, len(scene.bounds))
    if plan is None:
        raise options.bad(f"plan is like {'0@1;290@3' if len(scene.bounds) == 1 else '0@1/2;290@3/2'}, not {text!r}")
    for _, counts in plan:
        for count, (least, most) in zip(counts, scene.bounds.values(), strict=True):
            if not least <= count <= most:
                raise BadInput(f"{options.place}: {count} replicas are not from {least} to {most}")
    return Clairvoyant(plan, list(scene.bounds), gated, cap)


def read(text: str, tiers: int) -> Plan | None:
    """A plan from its text; None: it is none."""
    steps = []
    for step in text.split(";"):
        at, _, counts = step.partition("@")
        found = [whole(word) for word in counts.split("/")]
        known = tuple(count for count in found if count is not None)
        if len(found) != tiers or len(known) != tiers:
            return None
        try:
            steps.append((float(at), known))
        except ValueError:
            return None
    moments = [at_s for at_s, _ in steps]
    in_order = moments == sorted(set(moments)) and moments[0] == 0.0 and moments[-1] < math.inf
    return tuple(steps) if in_order else None


def written(plan: Plan) -> str:
    """The text of a plan."""
    return ";".join(f"{at_s:.10g}@{'/'.join(map(str, counts))}" for at_s, counts in plan)


def together(texts: Sequence[str]) -> str:
    """The option of one plan for all tiers, from one of each."""
    plans = [read(text.removeprefix("plan="), 1) or () for text in texts]
    moments = sorted({at_s for plan in plans for at_s, _ in plan})
    starts = [[at_s for at_s, _ in plan] for plan in plans]
    steps = (
        (at_s, tuple(plan[bisect_right(at, at_s) - 1][1][0] for plan, at in zip(plans, starts, strict=True)))
        for at_s in moments
    )
    return f"plan={written(tuple(steps))}"
