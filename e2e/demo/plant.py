"""The light engines' own core in virtual time, as a tier whose replicas come and go: what the followers drive.

Problem: another policy must be tried on the same arrivals without running another fleet for eleven minutes.
Idea: the light engine's schedule reads no clock (`engine-image/simulated/core.py`), so a tier of them replays in
seconds, with the same step times, spread, noise and start-up times. What is left out is named in `followers.py`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Final

from plimsoll.sim.profiles import Profile, load
from simulated.core import Core
from simulated.meters import Meters
from simulated.plant import Plant
from simulated.scheduler import Limits
from simulated.sequences import Sequence
from simulated.transfer import Leases, Wire

SPREAD: Final = 0.1
NOISE: Final = 0.02
TRANSFER_RATE: Final = 1e11
LEASE_S: Final = 30.0


def load_profile(name: str) -> Profile:
    """A profile of the light engine, by name."""
    return load(name)


@dataclass(frozen=True)
class Kind:
    """What one replica of a tier is: `factor` over the law, `most` sequences at once, cold starts in seconds."""

    profile: Profile
    factor: float
    most: int
    block_size: int
    start_s: tuple[float, float]


@dataclass(slots=True)
class Job:
    """One request as a tier sees it; `cost` in the unit of a replica's cap. Times in seconds.

    known_s: how long after its arrival its work is known; an answer's length is, once it has been written.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    work_s: float  # of GPU time, at a full batch
    cost: float
    known_s: float = 0.0
    remote: bool = False  # another engine has computed the prompt
    sequence: Sequence | None = None
    lost: bool = False

    @property
    def first_s(self) -> float | None:
        """When the first token came out; None where none did, or the stream broke later."""
        done = self.sequence is not None and not self.lost and self.sequence.outcome == "length"
        return self.sequence.first_s if done and self.sequence else None

    @property
    def last_s(self) -> float | None:
        return self.sequence.last_s if self.first_s is not None and self.sequence else None


@dataclass(eq=False)
class Replica:
    """One engine: ordered, ready, drained, gone."""

    core: Core
    ordered_s: float
    ready_s: float
    jobs: dict[Sequence, Job] = field(default_factory=dict)  # in flight
    load: float = 0.0  # what these cost
    draining: bool = False
    gone_s: float | None = None

    def advance(self, now_s: float) -> None:
        """Lets everything happen that happens by now, and lets go of what has ended."""
        self.core.advance(now_s)
        for sequence in self.core.touched:
            if sequence.outcome is not None and sequence in self.jobs:
                self.load -= self.jobs.pop(sequence).cost
        self.core.touched.clear()

    def start(self, job: Job, sequence: Sequence, now_s: float) -> None:
        """Takes a request."""
        job.sequence = sequence
        self.jobs[sequence] = job
        self.load += job.cost
        self.core.add(sequence, now_s)

    def paid_s(self, end_s: float) -> float:
        """Seconds from the order to the end."""
        return max(0.0, (end_s if self.gone_s is None else min(self.gone_s, end_s)) - self.ordered_s)


class Tier:
    """Replicas that come and go. With a cap, what fits nowhere waits up to `patience_s` and is refused after it."""

    def __init__(self, kind: Kind, replicas: int, cap: float | None, patience_s: float, seed: int) -> None:
        self._kind, self._cap, self._patience_s = kind, cap, patience_s
        self._random = random.Random(seed)
        self._names: Iterator[int] = itertools.count()
        self._held: deque[Job] = deque()
        self.replicas = [self._made(0.0, ready_s=0.0) for _ in range(replicas)]

    @property
    def ordered(self) -> int:
        """Replicas that are there to stay."""
        return sum(1 for one in self.replicas if one.gone_s is None and not one.draining)

    def take(self, job: Job, now_s: float) -> None:
        """A request has come."""
        self.advance(now_s)
        self._held.append(job)
        self._release(now_s)

    def advance(self, now_s: float) -> None:
        """Lets everything happen that happens by now."""
        for one in self._live():
            one.advance(now_s)
            if one.draining and not one.jobs:
                one.gone_s = max(one.ready_s, now_s)
        self._release(now_s)

    def set(self, wanted: int, now_s: float) -> None:
        """Orders replicas, or gives the newest back: those still starting first, others when they are empty."""
        for _ in range(wanted - self.ordered):
            low, high = self._kind.start_s
            self.replicas.append(self._made(now_s, now_s + self._random.uniform(low, high)))
        if wanted < self.ordered:
            staying = [one for one in self._live() if not one.draining]
            for one in heapq.nlargest(self.ordered - wanted, staying, key=lambda r: (r.ready_s > now_s, -r.load)):
                self._give_back(one, now_s)

    def kill(self, now_s: float) -> None:
        """The busiest replica is gone at once, its streams with it; another is ordered in its place."""
        ready = [one for one in self._live() if one.ready_s <= now_s and not one.draining]
        if not ready:
            return
        one = max(ready, key=_in_flight)
        for job in one.jobs.values():
            job.lost = True
        wanted = self.ordered
        one.gone_s = now_s
        self.set(wanted, now_s)

    def paid_s(self, end_s: float) -> float:
        """Replica-seconds until then."""
        return sum(one.paid_s(end_s) for one in self.replicas)

    def _live(self) -> list[Replica]:
        return [one for one in self.replicas if one.gone_s is None]

    def _give_back(self, one: Replica, now_s: float) -> None:
        one.draining = True
        if one.ready_s > now_s or not one.jobs:
            one.gone_s = now_s

    def _release(self, now_s: float) -> None:
        while self._held:
            if self._cap is not None and now_s - self._held[0].at_s > self._patience_s:
                self._held.popleft()
                continue
            ready = [one for one in self._live() if one.ready_s <= now_s and not one.draining]
            best = min(ready, key=_in_flight, default=None)
            if best is None or (self._cap is not None and best.jobs and best.load + self._held[0].cost > self._cap):
                return
            self._start(self._held.popleft(), best, now_s)

    def _start(self, job: Job, replica: Replica, now_s: float) -> None:
        sequence = Sequence(
            request_id=str(next(self._names)),
            prompt=bytes(4 * job.prompt_tokens),
            max_tokens=job.output_tokens,
            arrived_s=now_s,
            remote=job.remote,
        )
        replica.start(job, sequence, now_s)

    def _made(self, ordered_s: float, ready_s: float) -> Replica:
        kind, profile = self._kind, self._kind.profile
        seed = self._random.getrandbits(32)
        factor = kind.factor * (1.0 + SPREAD * self._random.uniform(-1.0, 1.0))
        limits = Limits(kind.most, profile.budget, kind.block_size, prefix_caching=False)
        wire = Wire(profile.layers, kind.block_size, profile.kv_bytes_per_token, TRANSFER_RATE)
        plant = Plant(profile, factor, NOISE, seed)
        blocks = profile.kv_tokens // kind.block_size
        core = Core(limits, blocks, plant, wire, Leases(LEASE_S), Meters(profile.max_model_len))
        return Replica(core, ordered_s, ready_s)


def _in_flight(replica: Replica) -> int:
    return len(replica.jobs)  # the gateway picks by it


def replay(
    tier: Tier, jobs: Many[Job], end_s: float, wanted: Callable[[float], int], kill_s: float | None, tick_s: float = 1.0
) -> None:
    """Runs the jobs, in order of arrival, through a tier that is told `wanted(now)` at every tick until `end_s`.

    What is under way then comes to its end.
    """
    moments = sorted([(job.at_s, 1, n) for n, job in enumerate(jobs)] + _ticks(end_s, tick_s))
    for now_s, is_job, n in moments:
        if is_job:
            tier.take(jobs[n], now_s)
            continue
        tier.advance(now_s)
        if kill_s is not None and now_s >= kill_s:
            tier.kill(now_s)
            kill_s = None
        tier.set(wanted(now_s), now_s)
    last_s = end_s
    while any(job.sequence is None or job.sequence.outcome is None for job in jobs) and last_s < 2 * end_s + 100:
        last_s += tick_s
        tier.advance(last_s)


def _ticks(end_s: float, tick_s: float) -> list[tuple[float, int, int]]:
    return [(n * tick_s, 0, n) for n in range(int(end_s / tick_s))]
