"""What one replica holds, as the gateway knows it: enough to say what one more request would do to it.

Problem: the gateway sees a request leave and its end, seldom more, while engines differ from their model: another
card, a hot one, a noisy neighbour. Counts that drift apart from the truth fill a replica too far or leave it empty.

Idea: sums over the residents, added when a request is let in and taken away when it ends, each with the very numbers
that were added. Prefill is a first-come-first-served server whose end of work is a time. How fast the replica really
is comes from every request that ends: the time that its tokens took over the time the model gives for them. That ratio,
the pace, scales all predictions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from plimsoll.core.admission.growth import Growth
from plimsoll.core.admission.limits import LEAST_SPREAD, Limits, Need
from plimsoll.core.admission.line import Leg
from plimsoll.core.admission.unseen import Unseen

PACE_MEMORY: Final = 60.0  # seconds of streams' time, per running sequence, that the measured pace remembers
PACE_PRIOR_S: Final = 60.0  # stream seconds for which the model is believed against the measurement
PACE_RANGE: Final = (0.5, 4.0)
BURST: Final = 0.03  # of a mean answer's time in full steps: how far prefills may run ahead of their share
BURST_STALLS: Final = 3.0  # mean prefills that may at least
SOON_S: Final = 1e-3  # a replica is not asked again within so short a time
_LEAST_PREFILL_SHARE: Final = 0.05


@dataclass(slots=True, eq=False)
class Resident:
    """One request on a replica. predicted_s: from admission to its first token, negative for one that came to run there
    so long ago. leg: where its prompt is computed elsewhere. full, unseen_s: how full the replica was, and what of
    predicted_s the model does not say. read_s: when its prompt will have been read. stall_s, turn_s, share_s: what it
    added to free_s, tat_s and stalled_s. The rest: the replica's then."""

    need: Need
    klass: int
    tenant: str
    admitted_s: float
    predicted_s: float
    leg: Leg | None = None
    full: float = 0.0
    unseen_s: float = 0.0
    there: float = 1.0  # share of its stay, since its admission, in which it has a place in the batch
    step_s: float = 0.0  # what it adds to the mean step
    began: float = 0.0  # the replica's step then
    stalled_s: float = 0.0
    area: float = 0.0
    read_s: float = -math.inf
    stall_s: float = 0.0
    turn_s: float = 0.0
    share_s: float = 0.0


class Replica:
    """One serve or decode replica; all times of the gate's clock.

    scale: one over this gateway's share of it: what the others send is taken as like ours. cap: sequences that this
    gateway may have there. full: how full it is, 0 to 1. unseen_s: what the model does not say of a first token's time.
    """

    __slots__ = (
        "_alike",
        "_amortised_s",
        "_asked_s",
        "_at_s",
        "_chunk_s",
        "_growth",
        "_lasting",
        "_steps",
        "_took_s",
        "_turn",
        "_unseen",
        "address",
        "ahead_s",
        "area",
        "cap",
        "counts",
        "decode_s",
        "factor",
        "free_s",
        "full",
        "idle_s",
        "kv_mean",
        "kv_tokens",
        "limits",
        "load",
        "most",
        "pace",
        "prefill_share",
        "present",
        "residents",
        "scale",
        "sequence_tokens",
        "sequences",
        "stalled_s",
        "step_s",
        "stretch",
        "tat_s",
        "tightest_s",
        "unseen_s",
    )

    def __init__(self, address: str, limits: Limits, now: float) -> None:
        self.address = address
        self.limits = limits
        self.residents: dict[str, Resident] = {}
        self.counts = [0] * len(limits.tpot_s)
        self.sequences = 0
        self.present = 0.0  # of them, those in the batch, in the mean: the others' prompts are computed elsewhere
        self.sequence_tokens = 0.0
        self.kv_mean = 0.0
        self._amortised_s = 0.0
        self.pace = 1.0
        self._unseen = Unseen()
        self._took_s = self._asked_s = PACE_PRIOR_S
        self.free_s = self.tat_s = now  # prefill work is done; its share of steps is paid back
        self.stalled_s = 0.0  # all stalls ever let in
        self.area = 0.0  # integral of the decode step over time
        self._at_s = now
        self._steps = 0.0  # that it has made
        self._turn = 0.0  # the step from which on room of the KV that only others' ends will make is given again
        self._growth: Growth | None = None  # while the KV would not hold all at their ends
        self.decode_s = 0.0
        self.step_s = math.inf
        self.set_share(limits.batch, limits.batch)

    def set_share(self, cap: int, whole: int) -> None:
        """This gateway may use `cap` of the replica's `whole` sequences, both as published for all gateways."""
        share = min(1.0, max(cap, 0) / max(whole, 1))
        self.cap = max(cap, 0)
        self.scale = 1.0 / share if share > 0 else math.inf
        self.kv_tokens = self.limits.kv_tokens * share
        self._tighten()
        self._rescale()
        self._settle()

    def set_limits(self, limits: Limits) -> None:
        """A new model from now on; what residents have added stays as it was."""
        share = 1.0 / self.scale
        self._growth = None
        self.limits = limits
        self.kv_tokens = limits.kv_tokens * share
        self._tighten()
        self._rescale()
        self._settle()

    def add(self, id: str, resident: Resident, now: float) -> None:
        """The request goes there now."""
        self._run(now)
        need = resident.need
        resident.full, resident.unseen_s = self.full, self.unseen_s
        self.residents[id] = resident
        self.counts[resident.klass] += 1
        if self.counts[resident.klass] == 1:
            self._tighten()
        self.sequences += need.sequences
        self.kv_mean += need.kv_mean_tokens
        # It is there from its admission on, and decodes only after its first token.
        tokens = need.output_tokens / need.sequences
        if tokens < LEAST_SPREAD:
            tokens = LEAST_SPREAD
        waited_s = resident.predicted_s
        there = tokens / (tokens + waited_s / self.tightest_s) if waited_s > 0 else 1.0
        resident.step_s = need.step_s * there
        if resident.leg is not None:
            resident.there = there
        self.present += need.sequences * resident.there
        self.sequence_tokens += need.sequence_tokens * resident.there
        self._amortised_s += resident.step_s
        resident.began = self._steps
        if self._growth is not None:
            self._grow(self._growth, id, resident)
            if self._growth.ends() > self.kv_tokens:
                self._turn = max(self._turn, self._steps) + self._takes(need)
        resident.stall_s = stall_s = need.stall_s * self.factor
        resident.turn_s = turn_s = stall_s / self.prefill_share
        resident.share_s = share_s = need.stall_s * self.scale
        resident.read_s = self.free_s = (self.free_s if self.free_s > now else now) + stall_s
        self.tat_s = (self.tat_s if self.tat_s > now else now) + turn_s
        self.stalled_s += share_s
        resident.stalled_s = self.stalled_s
        resident.area = self.area
        self._settle()

    def remove(
        self, id: str, now: float, output_tokens: int | None = None, ttft_s: float | None = None
    ) -> Resident | None:
        """The request has ended or was withdrawn; None if it is not there.

        output_tokens: of all its sequences, and ttft_s: from its admission. Where both are known the pace is learned;
        without a first token what is left of its prompt is not read.
        """
        resident = self.residents.pop(id, None)
        if resident is None:
            return None
        self._run(now)
        need = resident.need
        self.counts[resident.klass] -= 1
        if not self.counts[resident.klass]:
            self._tighten()
        self.sequences -= need.sequences
        if self._growth is not None:
            self._growth.remove(id)
        if not self.residents:  # so that rounding never adds up
            self._growth = None
            self.present = self.sequence_tokens = self.kv_mean = self._amortised_s = 0.0
        else:
            self.present = max(0.0, self.present - need.sequences * resident.there)
            self.sequence_tokens = max(0.0, self.sequence_tokens - need.sequence_tokens * resident.there)
            self.kv_mean = max(0.0, self.kv_mean - need.kv_mean_tokens)
            self._amortised_s = max(0.0, self._amortised_s - resident.step_s)
        if ttft_s is None:
            self._spare(resident, now)
        elif output_tokens is not None:
            self._measure(resident, output_tokens, ttft_s, now)
        if ttft_s is not None and resident.leg is None:  # what is late at a prefill replica its line follows
            self._unseen.observe(ttft_s - resident.predicted_s + resident.unseen_s, resident.full, now)
        self._settle()
        return resident

    def _spare(self, gone: Resident, now: float) -> None:
        """What the model has left of its prompt is not read, and who is behind it comes sooner."""
        left_s = min(gone.stall_s, gone.read_s - now)
        if left_s <= 0.0:
            return
        part = left_s / gone.stall_s
        self.free_s -= left_s
        self.tat_s -= part * gone.turn_s
        self.stalled_s -= part * gone.share_s
        for one in self.residents.values():
            if one.stalled_s >= gone.stalled_s:  # behind it
                one.read_s -= left_s
                one.stalled_s -= part * gone.share_s

    def _measure(self, resident: Resident, output_tokens: int, ttft_s: float, now: float) -> None:
        """Learn the pace from a request that has just ended and is no resident any more.

        The model's time for its tokens is that of their steps at the mean batch while it was there, and the stalls let
        in meanwhile.
        """
        tokens = output_tokens / resident.need.sequences - 1
        stay_s = now - resident.admitted_s
        took_s = stay_s - ttft_s
        if not (tokens >= 1 and 0 <= ttft_s < stay_s and took_s > 0):
            return
        share = took_s / stay_s
        asked_s = share * (self.stalled_s - resident.stalled_s)
        asked_s += tokens * (self.area - resident.area) / stay_s
        if not 0 < asked_s < math.inf:
            return
        memory_s = PACE_MEMORY * max(self.sequences, 1) * self.scale
        keep = max(0.0, 1.0 - took_s / memory_s)
        self._took_s = keep * self._took_s + took_s
        self._asked_s = keep * self._asked_s + asked_s
        low, high = PACE_RANGE
        self.pace = min(max(self._took_s / self._asked_s, low), high)
        self._rescale()

    def room_s(self, need: Need, budget_s: float, fill: float, now: float) -> float:
        """When there is room for this one more: 0 for now, infinity for not before one has ended.

        With it all must stay within targets, and KV hold all until they end, at a quantile of the sum. budget_s: of its
        class. fill: how full, 0 to 1, the replica may be for it. Where nothing runs anything goes that fits: waiting
        would find no better place.
        """
        if not self.cap:
            return math.inf
        if not self.sequences:
            return 0.0 if need.prompt_tokens < self.kv_tokens else math.inf
        if self.present + need.sequences > self.most * fill:
            return math.inf
        allowed_s = self.tightest_s if self.tightest_s < budget_s else budget_s
        step_s = self.step_s + need.step_s * self.factor
        if fill < 1.0:
            step_s += (1.0 - fill) * (allowed_s - self.idle_s)
        if step_s > allowed_s:
            return math.inf
        room = self.kv_tokens * fill
        if self._growth is None and (self.kv_mean + need.kv_mean_tokens) * self._lasting <= room:
            return 0.0
        return self._kv_room_s(need, room, now)

    def _kv_room_s(self, need: Need, room: float, now: float) -> float:
        """The same for a KV of so many tokens: room for all at their ends at once, or until each has ended.

        Room of the second kind is given at the pace at which residents in their mean give it back, a request's tokens
        times its steps: those let in together end together, and until then there would be none.
        """
        step = self._steps + max(0.0, now - self._at_s) / self.step_s
        growth = self._growth
        if growth is None:
            growth = self._growth = Growth(self.limits)
            for id, resident in self.residents.items():
                self._grow(growth, id, resident)
        growth.pass_to(step)
        if growth.ends(need) <= room:
            return 0.0
        if need.kv_mean_tokens > room:
            return math.inf
        steps = self._turn - step
        if steps <= 0.0:
            if growth.most(need) <= room:
                return 0.0
            steps = self._takes(need)
        return max(now + steps * self.step_s, now + SOON_S)

    def _grow(self, growth: Growth, id: str, resident: Resident) -> None:
        """Follow what it will hold until it ends."""
        growth.add(id, resident.need, resident.began + resident.predicted_s / self.step_s, self._steps)

    def _takes(self, need: Need) -> float:
        """Steps of the whole KV that a request takes up: what it holds in the mean, for as long as it does."""
        return need.output_tokens / need.sequences * (need.kv_mean_tokens - need.output_tokens / 2) / self.kv_tokens

    def first_token_s(self, need: Need, now: float) -> float:
        """Predicted time from now to the first token of a request let in now.

        The rest of the step under way and the whole of the next (two are in flight), then all prefill ahead and its
        own, in steps that also decode.
        """
        ahead_s = self.free_s - now
        wait_s = ahead_s * self.stretch if ahead_s > 0 else 0.0
        steps = 0.5 + need.chunks
        return wait_s + steps * self.decode_s + need.stall_s * self.pace + need.outside_s + self.unseen_s

    def _run(self, now: float) -> None:
        if now > self._at_s:
            self.area += (now - self._at_s) * self.decode_s / self.pace
            self._steps += (now - self._at_s) / self.step_s
            self._at_s = now

    def _rescale(self) -> None:
        """What follows from pace and share alone; `_settle` is to be called next."""
        limits, pace, cap = self.limits, self.pace, self.cap
        self._alike = self.scale if cap else 1.0  # what one of ours stands for; without a share there will be none
        self.factor = pace * self._alike
        self.idle_s = pace * limits.base_s
        # The cap comes from the model: a replica that is faster than it holds more within the same step.
        self.most = min(cap * self._more(), limits.max_sequences / self._alike) if cap else 0.0
        self._chunk_s = limits.chunk_s * pace
        # In equilibrium those that run are met in proportion to their lengths, and so are longer than those that come.
        self._lasting = 1.0 + limits.output_variance / limits.output_mean**2 if limits.output_mean > 0.0 else 1.0

    def _more(self) -> float:
        """Times as many sequences as the model says within the same step, for a replica that is faster, at least 1."""
        budget_s, base_s = max(self.limits.step_budget_s), self.limits.base_s
        if self.pace >= 1.0:
            return 1.0
        if not base_s < budget_s < math.inf:
            return 1.0 / self.pace
        return (budget_s / self.pace - base_s) / (budget_s - base_s)

    def _settle(self) -> None:
        """What checks read, from what is held."""
        limits = self.limits
        held_s = limits.sequence_s * self.present + limits.cached_token_s * self.sequence_tokens
        self.decode_s = decode_s = self.pace * (limits.base_s + self._alike * held_s)
        self.step_s = self.idle_s + self.factor * self._amortised_s
        self.load = self.step_s if self.cap else math.inf
        self.stretch = 1.0 + decode_s / self._chunk_s
        share = 1.0 - decode_s / self.tightest_s
        self.prefill_share = share if share > _LEAST_PREFILL_SHARE else _LEAST_PREFILL_SHARE
        self.full = min(1.0, self.present / self.most) if self.most > 0.0 else 0.0
        self.unseen_s = self._unseen.seconds(self.full)

    def _tighten(self) -> None:
        """The tightest targets of the classes that are there."""
        limits = self.limits
        there = [budget_s for budget_s, count in zip(limits.step_budget_s, self.counts, strict=True) if count]
        self.tightest_s = min(there) if there else math.inf
        # Of several gateways each may burst by more than its part, by the square root: they seldom do so together.
        burst_s = max(BURST * limits.output_mean * self.tightest_s, BURST_STALLS * limits.stall_s)
        self.ahead_s = burst_s * (math.sqrt(self.scale) if self.scale < math.inf else 1.0)
