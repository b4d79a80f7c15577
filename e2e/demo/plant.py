"""The light engines' own core in virtual time, as a tier whose replicas come and go: what the followers drive.

Problem: another policy must be tried on the same arrivals without running another fleet for eleven minutes.
Idea: the light engine's schedule reads no clock (`engine-image/simulated/engine_core.py`), so a tier of them replays in
seconds, with the same step times, spread, noise and start-up times. What is left out is named in `followers.py`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import Final

from plimsoll.sim.engine.kv_link import KvLink
from plimsoll.sim.profiles import HardwareProfile, load
from simulated.engine_core import EngineCore
from simulated.kv_leases import LeaseTable
from simulated.sequence import ServedSequence
from simulated.served_metrics import ServedMetrics
from simulated.step_noise import draw_step_noise

SPREAD: Final = 0.1
NOISE: Final = 0.02
TRANSFER_RATE: Final = 1e11
LEASE_S: Final = 30.0


def load_profile(name: str) -> HardwareProfile:
    """A profile of the light engine, by name."""
    return load(name)


@dataclass(frozen=True)
class ReplicaKind:
    """What one replica of a tier is: `factor` over the law, `most` sequences at once, cold starts in seconds."""

    profile: HardwareProfile
    factor: float
    max_sequences: int
    block_size: int
    start_s: tuple[float, float]


@dataclass(slots=True)
class SimulatedRequest:
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
    engine_sequence: ServedSequence | None = None
    lost: bool = False

    @property
    def first_token_s(self) -> float | None:
        """When the first token came out; None where none did, or the stream broke later."""
        done = self.engine_sequence is not None and not self.lost and self.engine_sequence.outcome == "length"
        return self.engine_sequence.first_token_s if done and self.engine_sequence else None

    @property
    def last_token_s(self) -> float | None:
        return self.engine_sequence.last_token_s if self.first_token_s is not None and self.engine_sequence else None


@dataclass(eq=False)
class EngineReplica:
    """One engine: ordered, ready, drained, gone."""

    core: EngineCore
    ordered_s: float
    ready_s: float
    jobs: dict[ServedSequence, SimulatedRequest] = field(default_factory=dict)  # in flight
    cap_in_use: float = 0.0  # what these cost
    draining: bool = False
    gone_s: float | None = None

    def advance(self, now_s: float) -> None:
        """Lets everything happen that happens by now, and lets go of what has ended."""
        self.core.advance(now_s)
        for sequence in self.core.updated:
            if sequence.outcome is not None and sequence in self.jobs:
                self.cap_in_use -= self.jobs.pop(sequence).cost
        self.core.updated.clear()

    def start(self, job: SimulatedRequest, sequence: ServedSequence, now_s: float) -> None:
        """Takes a request."""
        job.engine_sequence = sequence
        self.jobs[sequence] = job
        self.cap_in_use += job.cost
        self.core.add(sequence, now_s)

    def paid_s(self, end_s: float) -> float:
        """Seconds from the order to the end."""
        return max(0.0, (end_s if self.gone_s is None else min(self.gone_s, end_s)) - self.ordered_s)


class TierSimulation:
    """Replicas that come and go. With a cap, what fits nowhere waits up to `patience_s` and is refused after it."""

    def __init__(self, kind: ReplicaKind, replicas: int, cap: float | None, patience_s: float, seed: int) -> None:
        self._kind, self._cap, self._patience_s = kind, cap, patience_s
        self._random = random.Random(seed)
        self._names: Iterator[int] = itertools.count()
        self._held: deque[SimulatedRequest] = deque()
        self.replicas = [self._make_replica(0.0, ready_s=0.0) for _ in range(replicas)]

    @property
    def staying(self) -> int:
        """Replicas that are there to stay."""
        return sum(1 for replica in self.replicas if replica.gone_s is None and not replica.draining)

    def submit(self, job: SimulatedRequest, now_s: float) -> None:
        """A request has come."""
        self.advance(now_s)
        self._held.append(job)
        self._dispatch_queued(now_s)

    def advance(self, now_s: float) -> None:
        """Lets everything happen that happens by now."""
        for replica in self._live():
            replica.advance(now_s)
            if replica.draining and not replica.jobs:
                replica.gone_s = max(replica.ready_s, now_s)
        self._dispatch_queued(now_s)

    def scale(self, replicas: int, now_s: float) -> None:
        """Orders replicas, or gives the newest back: those still starting first, others when they are empty."""
        for _ in range(replicas - self.staying):
            low, high = self._kind.start_s
            self.replicas.append(self._make_replica(now_s, now_s + self._random.uniform(low, high)))
        if replicas < self.staying:
            kept_replicas = [replica for replica in self._live() if not replica.draining]
            for replica in heapq.nlargest(
                self.staying - replicas, kept_replicas, key=lambda r: (r.ready_s > now_s, -r.cap_in_use)
            ):
                self._remove(replica, now_s)

    def kill(self, now_s: float) -> None:
        """The busiest replica is gone at once, its streams with it; another is ordered in its place."""
        ready = [replica for replica in self._live() if replica.ready_s <= now_s and not replica.draining]
        if not ready:
            return
        replica = max(ready, key=_in_flight)
        for job in replica.jobs.values():
            job.lost = True
        target = self.staying
        replica.gone_s = now_s
        self.scale(target, now_s)

    def paid_s(self, end_s: float) -> float:
        """Replica-seconds until then."""
        return sum(replica.paid_s(end_s) for replica in self.replicas)

    def _live(self) -> list[EngineReplica]:
        return [replica for replica in self.replicas if replica.gone_s is None]

    def _remove(self, replica: EngineReplica, now_s: float) -> None:
        replica.draining = True
        if replica.ready_s > now_s or not replica.jobs:
            replica.gone_s = now_s

    def _dispatch_queued(self, now_s: float) -> None:
        while self._held:
            if self._cap is not None and now_s - self._held[0].at_s > self._patience_s:
                self._held.popleft()
                continue
            ready = [replica for replica in self._live() if replica.ready_s <= now_s and not replica.draining]
            best = min(ready, key=_in_flight, default=None)
            if best is None or (
                self._cap is not None and best.jobs and best.cap_in_use + self._held[0].cost > self._cap
            ):
                return
            self._start(self._held.popleft(), best, now_s)

    def _start(self, job: SimulatedRequest, replica: EngineReplica, now_s: float) -> None:
        sequence = ServedSequence(
            request_id=str(next(self._names)),
            prompt=bytes(4 * job.prompt_tokens),
            max_tokens=job.output_tokens,
            arrived_s=now_s,
            remote=job.remote,
        )
        replica.start(job, sequence, now_s)

    def _make_replica(self, ordered_s: float, ready_s: float) -> EngineReplica:
        kind, profile = self._kind, self._kind.profile
        seed = self._random.getrandbits(32)
        factor = kind.factor * (1.0 + SPREAD * self._random.uniform(-1.0, 1.0))
        core = EngineCore(
            replace(profile.scaled(factor), max_num_seqs=kind.max_sequences, block_size=kind.block_size),
            KvLink(profile.layers, kind.block_size, profile.kv_bytes_per_token, TRANSFER_RATE),
            LeaseTable(LEASE_S),
            ServedMetrics(profile.max_model_len),
            prefix_caching=False,
            noise=draw_step_noise(NOISE, seed),
        )
        return EngineReplica(core, ordered_s, ready_s)


def _in_flight(replica: EngineReplica) -> int:
    return len(replica.jobs)  # the gateway picks by it


def replay(
    tier: TierSimulation,
    jobs: Many[SimulatedRequest],
    end_s: float,
    desired_at: Callable[[float], int],
    kill_s: float | None,
    tick_s: float = 1.0,
) -> None:
    """Runs the jobs, in order of arrival, through a tier that is told `wanted(now)` at every tick until `end_s`.

    What is under way then comes to its end.
    """
    moments = sorted([(request.at_s, 1, n) for n, request in enumerate(jobs)] + _ticks(end_s, tick_s))
    for now_s, is_job, n in moments:
        if is_job:
            tier.submit(jobs[n], now_s)
            continue
        tier.advance(now_s)
        if kill_s is not None and now_s >= kill_s:
            tier.kill(now_s)
            kill_s = None
        tier.scale(desired_at(now_s), now_s)
    last_s = end_s
    while (
        any(request.engine_sequence is None or request.engine_sequence.outcome is None for request in jobs)
        and last_s < 2 * end_s + 100
    ):
        last_s += tick_s
        tier.advance(last_s)


def _ticks(end_s: float, tick_s: float) -> list[tuple[float, int, int]]:
    return [(n * tick_s, 0, n) for n in range(int(end_s / tick_s))]
