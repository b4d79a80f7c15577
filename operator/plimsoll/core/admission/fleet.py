"""The replicas of one tier as one gateway sees them, and the place of one more request among them.

Problem: the check must hold on the very replica that the request goes to, a prompt that is cached there costs less than
elsewhere, and looking at a hundred replicas must not cost more than the decision may.

Idea: only finished numbers are read, of the few replicas with the least load, kept in that order by a sort that finds
it almost done, of the one that lately got the most of this prompt, and of the one where other gateways would send it.
On each the request is counted at what it costs there. Of those that would keep everyone's promise, the one with the
earliest first token is taken, each second of prefill counting again for those that come behind it. A prompt whose KV
would be longer on its way than computing it takes is looked at both ways, and goes the cheaper one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import attrgetter
from typing import Final, NamedTuple

from plimsoll.core.admission.limits import Limits, Need
from plimsoll.core.admission.line import Line
from plimsoll.core.admission.outcome import Request
from plimsoll.core.admission.replica import SOON_S, Replica, Resident
from plimsoll.core.picking.affinity import Held

LOOKS: Final = 4  # replicas with the least load that are looked at for one request
PROBE: Final = 50  # requests after which a prompt is moved that could be: only transfers tell of a better fabric
BEHIND: Final = 3.0  # seconds that a second of prefill costs those that come behind it; from replays, see bench.picking
LEAST_ELSEWHERE: Final = 0.1  # a gateway alone spreads conversations so, and finds them after a restart
LATELY_S: Final = 10.0  # of what is sent to prefill replicas: longer than a burst, shorter than a start
BLOCK_TOKENS: Final = 128  # of a prompt's block, where it has as many
_load: Final = attrgetter("load")
_free_s: Final = attrgetter("free_s")


class Place(NamedTuple):
    """Where a request could go. replica None: nowhere now.

    first_token_s: predicted time from now to its first token; where replica is None, infinity if no replica has room,
    else that of the best of those which have. again_s: when a replica that only has too much prefill ahead of its
    share, or whose KV is given on by and by, may be asked again. need: what it costs there. prefill: where its prompt
    is computed, None: in the same place.
    """

    replica: Replica | None
    first_token_s: float
    again_s: float
    need: Need
    prefill: str | None = None


class _Leg(NamedTuple):
    """The prefill replica of a request: tokens cached there, and seconds from now until it begins."""

    address: str
    cached: int
    wait_s: float


class Fleet:
    """Replicas of one serve or decode tier, with the prefill replicas before it where there are any."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.replicas: dict[str, Replica] = {}
        self.prefills: dict[str, Line] = {}
        self.drain = 0.0  # GPU seconds of work, by the model, that leave in a second while all are full
        self._asked = ("", 0)  # the request that `need` was asked for last, and the depth found
        self._where: dict[str, Replica] = {}
        self._order: list[Replica] = []
        self._held = Held()
        self._prefill_held = Held()
        self._elsewhere = LEAST_ELSEWHERE  # share of the requests that other gateways see
        self._scale = 1.0  # one over this gateway's share of the replicas
        self._in_place = 0  # requests sent since a prompt was last moved
        self._sent_s, self._faded_s = 0.0, 0.0  # prefill time sent of late, and when that was last faded

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, id: str) -> bool:
        return id in self._where

    def set_limits(self, limits: Limits) -> None:
        """A new model for all of them."""
        self.limits = limits
        for replica in self.replicas.values():
            replica.set_limits(limits)
        self._remember()
        self._drained()

    def set_replicas(self, caps: Mapping[str, int], now: float) -> None:
        """The ready ones, each with the sequences that this gateway may have there; what the others hold is lost."""
        for address in [address for address in self.replicas if address not in caps]:
            for id in self.replicas.pop(address).residents:
                del self._where[id]
        for address, cap in caps.items():
            replica = self.replicas.get(address)
            if replica is None:
                replica = self.replicas[address] = Replica(address, self.limits, now)
            replica.set_share(cap, self.limits.batch)
        self._order = list(self.replicas.values())
        self._remember()
        self._drained()

    def set_prefills(self, addresses: set[str], now: float) -> None:
        """The ready prefill replicas; with none, decode replicas compute prompts themselves."""
        self.prefills = {address: self.prefills.get(address) or Line(address, now) for address in sorted(addresses)}
        self._remember()

    def need(self, request: Request) -> Need:
        """What the request asks of the replicas that hold most of it, with remote prefill where there is one.

        Less than a block, and several sequences, are read where they are decoded (see `core.picking.choose`).
        """
        blocks = request.blocks
        remote = bool(self.prefills) and request.prompt_tokens >= BLOCK_TOKENS and request.sequences == 1
        cached = there = 0
        if blocks:
            depth = self._held.depth(blocks)
            self._asked = request.id, depth
            cached = _tokens(request, depth)
            there = _tokens(request, self._prefill_held.depth(blocks)) if remote else 0
        need = self.limits.need(request, remote, cached, there)
        near = self._near(request, need, cached) if remote else None
        return need if near is None else need._replace(alone_s=min(need.alone_s, near.alone_s))

    def could_hold(self, need: Need) -> bool:
        """Whether an empty replica of this tier could serve it: its sequences may run in turns, each prompt must fit.

        An answer ends at the latest where the engine's context does, and that fits into its cache.
        """
        return need.prompt_tokens < self.limits.kv_tokens

    def place(self, request: Request, need: Need, klass: int, fill: float, within_s: float, now: float) -> Place:
        """The replica on which all stay in promise and its first token comes within so many seconds from now.

        need: as `need` gave it. fill: how full, 0 to 1, replicas may be for it.
        """
        leg = self._leg(request, now) if self.prefills and need.prefill_s else None
        if leg is None or self.limits.move_token_s is None:
            return self._among(request, need, leg, klass, fill, within_s, now)
        blocks = request.blocks
        near = self._near(request, need, _tokens(request, self._held.depth(blocks)) if blocks else 0)
        if near is None:
            return self._among(request, need, leg, klass, fill, within_s, now)
        if need.stall_s + self.limits.base_s + need.outside_s + need.prefill_s > within_s:  # not even without a line
            return self._among(request, near, None, klass, fill, within_s, now)
        moved = self._among(request, need, leg, klass, fill, within_s, now)
        if moved.replica is not None and self._in_place >= PROBE:
            return moved
        read = self._among(request, near, None, klass, fill, within_s, now)
        if read.replica is None:
            return moved._replace(again_s=min(moved.again_s, read.again_s))
        return moved if moved.replica is not None and _dearness(moved) <= _dearness(read) else read

    def _among(
        self, request: Request, need: Need, leg: _Leg | None, klass: int, fill: float, within_s: float, now: float
    ) -> Place:
        """The same, with the prompt computed by this prefill replica, or, without one, in place."""
        best, best_need, best_cost, best_s, late_s, again_s = None, need, math.inf, 0.0, math.inf, math.inf
        budget_s = self.limits.step_budget_s[klass]
        looks, needs, home = self._looks(request, need, leg)
        for replica, there in zip(looks, needs, strict=True):
            first_s = replica.first_token_s(there, now)
            if leg is not None:
                first_s += leg.wait_s + there.prefill_s
            cost = first_s + BEHIND * there.stall_s
            if replica is home:
                saved_s = self._elsewhere * there.stall_s
                cost = first_s - saved_s + BEHIND * (there.stall_s - saved_s)
            behind = replica.tat_s - now > replica.ahead_s and replica.sequences
            if best is not None and not behind and (cost >= best_cost or first_s > within_s):
                continue  # whether it has room does not matter any more
            room_s = replica.room_s(there, budget_s, fill, now)
            if room_s:
                again_s = room_s if room_s < again_s else again_s
                continue
            if behind:
                again_s = min(again_s, max(replica.tat_s - replica.ahead_s, now + SOON_S))
            elif first_s > within_s:
                late_s = min(late_s, first_s)
            elif cost < best_cost:
                best, best_need, best_cost, best_s = replica, there, cost, first_s
        if best is None:
            return Place(None, late_s, again_s, need)
        return Place(best, best_s, again_s, best_need, None if leg is None else leg.address)

    def add(self, request: Request, klass: int, place: Place, now: float) -> None:
        """The request goes to its place."""
        replica, need = place.replica, place.need
        assert replica is not None
        resident = Resident(need, klass, request.tenant, now, place.first_token_s)
        self._in_place += 1
        if place.prefill is not None:
            self._in_place = 0
            line = self.prefills[place.prefill]
            rest_s = place.first_token_s - need.prefill_s - max(0.0, line.free_s - now)
            resident.leg = line.send(need.prefill_s * self._slower(now), rest_s, now)
            self._sent_s += need.prefill_s
        replica.add(request.id, resident, now)
        self._where[request.id] = replica
        if request.blocks:
            self._held.sent(replica.address, request.blocks)
            if place.prefill is not None:
                self._prefill_held.sent(place.prefill, request.blocks)

    def remove(
        self, id: str, now: float, output_tokens: int | None = None, ttft_s: float | None = None
    ) -> Resident | None:
        """The request has ended; None if it is nowhere. The last two, where known, tell of its replica's pace."""
        replica = self._where.pop(id, None)
        return None if replica is None else replica.remove(id, now, output_tokens, ttft_s)

    def settle(self) -> None:
        """To be called at each tick: what follows from the paces measured meanwhile."""
        self._drained()

    def _looks(
        self, request: Request, need: Need, leg: _Leg | None
    ) -> tuple[list[Replica], list[Need], Replica | None]:
        """The replicas that are looked at, what the request needs at each, and the one of them where other gateways
        would have sent it: there all of its prefill but what follows the last whole block is expected to be saved."""
        if len(self._order) > LOOKS:
            self._order.sort(key=_load)
        blocks, least = request.blocks, self._order[:LOOKS]
        if not blocks:
            return least, [need] * len(least), None
        held = self._held
        deepest = held.depth(blocks)
        home = None
        for address in (held.holder(blocks, deepest) if deepest else None, held.home(blocks, deepest)):
            home = None if address is None else self.replicas[address]
            if home is not None and home not in least:
                least.append(home)
        needs = {deepest: need} if self._asked == (request.id, deepest) and leg is None else {}
        remote, prefill_cached = (False, 0) if leg is None else (True, leg.cached)
        depths = [held.depth_at(replica.address, blocks, deepest) for replica in least] if deepest else [0] * len(least)
        for depth in depths:
            if depth not in needs:
                needs[depth] = self.limits.need(request, remote, _tokens(request, depth), prefill_cached)
        return least, [needs[depth] for depth in depths], home

    def _near(self, request: Request, need: Need, cached: int) -> Need | None:
        """What it needs if its prompt is computed in place; None where moving it takes less, or nobody knows.

        need: with its prompt computed elsewhere. A line at the prefill replicas alone is no reason to compute in place,
        for which decode replicas are not sized.
        """
        limits = self.limits
        if limits.move_token_s is None:
            return None
        near = limits.need(request, remote=False, cached=cached)
        computing_s = near.stall_s + near.chunks * limits.base_s + near.outside_s
        return near if need.stall_s + need.outside_s > computing_s else None

    def _slower(self, now: float) -> float:
        """How much longer a prompt takes for what other gateways send to its replica meanwhile.

        They send beside this gateway's burst what they usually send: a queue that is not ours all the time drains at
        one less their utilisation, which is ours times what their share is of ours; at most one over our share.
        """
        self._sent_s *= math.exp(-max(0.0, now - self._faded_s) / LATELY_S)
        self._faded_s = now
        ours = self._sent_s / (LATELY_S * len(self.prefills))
        return 1.0 / max(1.0 - ours * (self._scale - 1.0), 1.0 / self._scale)

    def _leg(self, request: Request, now: float) -> _Leg:
        """The prefill replica that is done with the prompt first, by what each holds of it."""
        lines, blocks, held = self.prefills, request.blocks, self._prefill_held
        soonest = min(lines.values(), key=_free_s)
        if not blocks:
            return _Leg(soonest.address, 0, max(0.0, soonest.free_s - now))
        deepest = held.depth(blocks)
        home = held.home(blocks, deepest)
        best, best_s = None, math.inf
        for address in dict.fromkeys((soonest.address, held.holder(blocks, deepest) if deepest else None, home)):
            if address is None:
                continue
            cached = _tokens(request, held.depth_at(address, blocks, deepest))
            wait_s, leg_s = max(0.0, lines[address].free_s - now), self.limits.leg_s(request, cached)
            saved_s = 0.0
            if address == home:
                saved_s = self._elsewhere * (leg_s - self.limits.leg_s(request, _tokens(request, len(blocks))))
            cost = wait_s + leg_s - saved_s + BEHIND * (leg_s - saved_s)
            if cost < best_s:
                best, best_s = _Leg(address, cached, wait_s), cost
        assert best is not None
        return best

    def _remember(self) -> None:
        """What can be cached on the replicas of what is sent from here."""
        replicas = self.replicas.values()
        self._held.set_endpoints({r.address: max(1, int(r.kv_tokens) // BLOCK_TOKENS) for r in replicas})
        share = max((1.0 / replica.scale for replica in replicas), default=1.0)
        self._scale = 1.0 / max(share, 1.0 / self.limits.batch)
        self._elsewhere = max(1.0 - share, LEAST_ELSEWHERE)
        whole = max(1, int(share * self.limits.kv_tokens) // BLOCK_TOKENS)
        self._prefill_held.set_endpoints(dict.fromkeys(self.prefills, whole))

    def _drained(self) -> None:
        rho = self.limits.rho
        self.drain = sum(rho / (r.pace * r.scale) for r in self.replicas.values())


def _dearness(place: Place) -> float:
    """Seconds of a place, by which moving a prompt and computing it in place are weighed against each other.

    The first token's own, those that a stall costs who comes behind it, and those of all who stand still meanwhile: the
    more of the replica's room is taken, the more is lost with them. (All of them at any load, or none, was tried; see
    docs/design/0007-admission.md.)
    """
    replica, need = place.replica, place.need
    assert replica is not None
    room_s, taken_s = replica.tightest_s - replica.idle_s, replica.step_s - replica.idle_s
    full = taken_s / room_s if taken_s < room_s else 1.0
    return place.first_token_s + (BEHIND + full * replica.sequences * replica.scale) * need.stall_s


def _tokens(request: Request, depth: int) -> int:
    """Tokens in the prompt's first blocks: 128 each, or less where text has fewer tokens than its bytes suggest."""
    if not depth:
        return 0
    return min(depth * BLOCK_TOKENS, depth * request.prompt_tokens // len(request.blocks))
