"""What the gateways are told of one service: the very model that sizes it, and when there will be more of it.

Problem: the model moves a little at every look and starts are expected a little later at every tick, while what is
told lies in the service's status, where every write is seen by everybody.

Idea: the limits are made when the load line is, and what is told stays until a gateway would decide otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

from plimsoll.core.admission.limits import ClassPolicy, Limits, limits
from plimsoll.core.admission.published import MOST_STARTS, Published, moved
from plimsoll.core.admission.sharing import Sharing
from plimsoll.core.autoscaler.seen import Seen, Wish
from plimsoll.core.autoscaler.service import Service
from plimsoll.core.autoscaler.tier import BLOCK_TOKENS, KV_TOKENS, MAX_SEQUENCES, TOKEN_BUDGET
from plimsoll.core.knee import Tier as Sized
from plimsoll.core.latency import StepModel
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.scaling import Decision, Line, Mode
from plimsoll.core.transfer import BAND, MEMORY_S, Moved, travel_s

LEAST_S: Final = 2.0  # between two changes of what is told
MOVED_S: Final = 1e-6  # a token: less is no other fabric, a prompt of a thousand comes within a millisecond of it


@dataclass
class Gatekeeper:
    """Of one service, as long as it lives. told: what the gateways have, None where nothing is promised."""

    sharing: Sharing = field(default_factory=Sharing)
    told: Published | None = None
    told_s: float = -math.inf
    _move_token_s: float | None = None
    _known_s: float = math.inf  # when that was last known; infinity: by an earlier process
    _made: tuple[Sized, StepModel | None, tuple[ClassPolicy, ...], float | None, Limits] | None = field(
        default=None, repr=False
    )

    @classmethod
    def after(cls, told: Published | None) -> Gatekeeper:
        """Goes on from what an earlier process has told."""
        before = None if told is None or told.limits is None else told.limits.move_token_s
        return cls(Sharing(told.shares if told is not None else None), told, _move_token_s=before)

    def tell(self, service: Service, seen: Seen, wish: Wish, gateways: Collection[str], now_s: float) -> bool:
        """Bring `told` up to date; True if it has changed. gateways: those that exist."""
        self.sharing.keep(gateways)
        new = self._published(service, seen, wish, gateways, now_s)
        if new is None:
            changed, self.told = self.told is not None, None
            return changed
        if not moved(self.told, new) or 0.0 <= now_s - self.told_s < LEAST_S:
            return False
        self.told, self.told_s = new, now_s
        return True

    def _published(
        self, service: Service, seen: Seen, wish: Wish, gateways: Collection[str], now_s: float
    ) -> Published | None:
        if not wish.classes or service.last is None:
            return None
        names = tuple(one.name for one in wish.classes)
        made = self._limits(service, wish.classes, self._moving(seen.heard.moved, now_s))
        anything, there = _anything(len(names), service.answering), seen.tiers.get(service.answering)
        if made is None and self.told is not None and self.told.classes == names and self.told.limits != anything:
            made = self.told.limits  # a new process knows less than the one before, for a while
        if made is None and there is not None and not there.ready:
            made = anything
        found = Published(names, made)
        if made is not None:
            found = replace(found, shares=self.sharing.units(made.batch, gateways, now_s))
        return _expecting(found, service, seen, wish, service.last.decision, now_s)

    def _moving(self, moved: Moved, now_s: float) -> float | None:
        """`Limits.move_token_s`: what was known holds until another fabric is seen, or for so long nothing was moved.

        Then prompts are moved as if it cost nothing, and it is known again.
        """
        found, before = travel_s(moved), self._move_token_s
        self._known_s = min(self._known_s, now_s)
        if isinstance(found, float):
            self._known_s = now_s
            if before is None or abs(found - before) > max((BAND - 1.0) * before, MOVED_S):
                self._move_token_s = found
        elif now_s - self._known_s > MEMORY_S:
            self._move_token_s = None
        return self._move_token_s

    def _limits(self, service: Service, classes: tuple[ClassPolicy, ...], move_token_s: float | None) -> Limits | None:
        sized = service.tiers[service.answering].sized
        if sized is None:
            return None
        before = service.tiers.get(Role.PREFILL)
        prefill = None if before is None or before.sized is None else before.sized.model
        made = self._made
        same = made is not None and made[0] is sized and made[1] is prefill and made[2:4] == (classes, move_token_s)
        if made is None or not same:
            found = limits(sized, classes, prefill, move_token_s)
            made = self._made = sized, prefill, classes, move_token_s, found
        return made[4]


@cache
def _anything(classes: int, answering: str) -> Limits:
    """Of an engine that nobody has met yet: requests are held until it is there, and then all are let in.

    Prompts are computed by prefill engines where there are any, in no time.
    """
    return Limits(
        base_s=0.02, any_stall_s=0.0, prefill_token_s=5e-5, prefill_pair_s=0.0, sequence_s=2e-5, cached_token_s=0.0,
        post_fixed_s=0.0, post_piece_s=0.0, block_tokens=BLOCK_TOKENS if answering == Role.DECODE else 0,
        leg_base_s=1e-6, leg_token_s=0.0, leg_pair_s=0.0, token_budget=TOKEN_BUDGET,
        kv_tokens=KV_TOKENS, max_sequences=MAX_SEQUENCES, output_mean=200.0, output_variance=4e4, batch=MAX_SEQUENCES,
        step_budget_s=(math.inf,) * classes, tpot_s=(math.inf,) * classes, rho=0.5, most_spread_s=0.0, stall_s=0.02,
        alone_s=0.1, move_token_s=None,
    )  # fmt: skip


def _expecting(
    found: Published, service: Service, seen: Seen, wish: Wish, decision: Decision, now_s: float
) -> Published:
    """With when replicas are expected, and what will be carried then."""
    acts = wish.policy.mode is Mode.AUTO and not wish.policy.paused
    there, decided = seen.tiers.get(service.answering), decision.tiers.get(service.answering)
    if there is None or decided is None:
        return replace(found, starting=acts)
    tier = service.tiers[service.answering]
    ordered = max(0, decided.replicas - there.replicas) if acts else 0
    coming = there.ready + len(decided.etas_s) + ordered
    # At its line a replica may refuse what the promise allows: who is told to come back is told what it serves there.
    served = 0.0 if wish.slo is None else wish.slo.share
    each = tier.line.replica_work * served if isinstance(tier.line, Line) else 0.0
    found = replace(found, ready_work=coming * each, starting=acts or bool(there.starting))
    if not tier.starts.measured:  # nobody is sent away for a time that was never measured
        return found
    if not decided.etas_s:
        etas_s = [one.etas_s[0] for one in decision.tiers.values() if one.etas_s]  # what is short may be prefill
        etas_s += [tier.ledger.horizon_s] * bool(ordered)
        return replace(found, ready_at_s=now_s + etas_s[0]) if etas_s else found
    starts = [
        (now_s + eta_s, (there.ready + n) * each)
        for n, eta_s in enumerate(sorted([*decided.etas_s, *[tier.ledger.horizon_s] * ordered]), start=1)
    ]
    return replace(found, ready_at_s=starts[0][0], starts=_thinned(starts) if len(starts) > 1 else ())


def _thinned(starts: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The first, the last, and no more than are told: who is between two of those counts from the later one on."""
    if len(starts) <= MOST_STARTS:
        return tuple(starts)
    return tuple(starts[k * (len(starts) - 1) // (MOST_STARTS - 1)] for k in range(MOST_STARTS))
