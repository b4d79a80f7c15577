"""Replicas of a run: ordered, placed, ready, draining, ended or killed.

Problem: what a replica does changes what gateways may use, which GPUs are free, and which requests are lost.

Idea: one place follows each replica from its order to its end, tells the gateways of the available engines, and records
the counts of its tier. A drained replica ends with its last request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plimsoll.core.autoscaling.scale_down_candidates import ReplicaLoad
from plimsoll.core.types import Role
from plimsoll.sim.attempt import AttemptOutcome
from plimsoll.sim.engine.quantile_sketch import QuantileSketch
from plimsoll.sim.event_queue import RANK_DRAIN, RANK_READY, EventQueue
from plimsoll.sim.fleet import FleetTier, SimulatedReplica
from plimsoll.sim.plant import min_drain_s
from plimsoll.sim.request_path import RequestPath
from plimsoll.sim.run_log import RunLog


class ReplicaLifecycle:
    """The replicas of one run.

    replicas: of all tiers, by name, without those that have ended; the lifecycle keeps it. itl: inter-token latencies
    of the replicas that have ended. replica_load: load of a replica by its name, as the operator knows it, by which
    scale-down candidates are chosen. on_replica_ready: called with every replica that has become ready.
    """

    def __init__(
        self,
        tiers: Mapping[Role, FleetTier],
        replicas: dict[str, SimulatedReplica],
        requests: RequestPath,
        *,
        events: EventQueue,
        log: RunLog,
        itl: QuantileSketch,
        replica_load: Callable[[str], ReplicaLoad] | None,
        on_replica_ready: Callable[[SimulatedReplica, float], None],
    ) -> None:
        self._tiers, self._replicas, self._requests = tiers, replicas, requests
        self._schedule, self._log, self._itl = events.schedule, log, itl
        self._replica_load, self._on_replica_ready = replica_load, on_replica_ready

    def start_initial(self, counts: Mapping[Role, int]) -> list[SimulatedReplica]:
        """Start the replicas that are ready from the beginning. Returns them."""
        started = []
        for role, tier in self._tiers.items():
            for replica in tier.start_initial(counts[role]):
                self._replicas[replica.name] = replica
                started.append(replica)
        return started

    def update_endpoints(self, now_s: float) -> None:
        """Publish the available engines to the gateways."""
        self._requests.set_endpoints([one for tier in self._tiers.values() for one in tier.endpoints()], now_s)

    def set_desired(self, role: Role, desired: int, now_s: float) -> None:
        created, drained = self._tiers[role].scale(desired, now_s, self._replica_load)
        for replica in created:
            self._replicas[replica.name] = replica
        self._place_pending(now_s)
        for replica in drained:
            self._schedule(now_s + min_drain_s(), RANK_DRAIN, self.end_if_drained, replica)
        for name in [name for name, one in self._replicas.items() if one.ended_s is not None]:
            del self._replicas[name]
        if drained:
            self.update_endpoints(now_s)
        self._log.record(self._tiers, now_s)

    def _place_pending(self, now_s: float) -> None:
        """Place pending pods on nodes, oldest first, while there are GPUs."""
        waiting = [replica for tier in self._tiers.values() for replica in tier.pending.values()]
        for replica in sorted(waiting, key=lambda one: one.ordered_s):
            if self._tiers[replica.role].schedule(replica, now_s):
                self._schedule(replica.ready_s, RANK_READY, self._on_ready, replica)

    def _on_ready(self, now_s: float, replica: SimulatedReplica) -> None:
        if replica.ended_s is not None:
            return
        replica.ready = True
        self._on_replica_ready(replica, now_s)
        self.update_endpoints(now_s)
        self._log.record(self._tiers, now_s)

    def end_if_drained(self, now_s: float, replica: SimulatedReplica) -> None:
        """End a draining replica that has no request left."""
        tier = self._tiers[replica.role]
        if tier.is_drained(replica, now_s):
            tier.end(replica, now_s)
            self.remove(replica)
            self._place_pending(now_s)
            self._log.record(self._tiers, now_s)

    def kill(self, now_s: float, role: Role) -> None:
        """Kill the busiest replica of a tier with its streams; the Deployment replaces it."""
        tier = self._tiers[role]
        live = [one for one in tier.replicas.values() if one.is_serving]
        if not live:
            return
        replica = max(live, key=lambda one: len(one.attempts))
        tier.end(replica, now_s)
        self.remove(replica)
        lost_attempts, replica.attempts = list(replica.attempts.values()), {}
        for attempt in lost_attempts:
            if attempt.address == replica.name:
                self._requests.fail_attempt(attempt, AttemptOutcome.FAILED, "", now_s)
            elif attempt.sequence is not None:  # the decode engine prefills the prompt itself
                attempt.sequence.remote = False
                self._requests.enqueue_sequence(now_s, attempt)
        self.set_desired(role, tier.desired, now_s)
        self.update_endpoints(now_s)

    def remove(self, replica: SimulatedReplica) -> None:
        del self._replicas[replica.name]
        self._itl.merge(replica.engine.metrics.itl)
