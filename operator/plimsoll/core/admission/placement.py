"""The replicas of one tier as one gateway sees them, and the placement of a request on one of them.

Problem: the SLO check must hold on the replica that the request goes to. A prompt that is cached there costs less than
elsewhere. Checking a hundred replicas must not take longer than a decision may.

Idea: check only a few candidates, with precomputed values: the least loaded replicas (an incremental sort), the one
that recently received most of this prompt, and the one where other gateways would send it. Each candidate uses the
request's cost there. Among those that keep all requests within the SLO, choose the earliest first token, with a penalty
per second of prefill for later requests. If transferring the KV takes longer than computing it, compare remote and
local prefill and choose the cheaper one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from plimsoll.core.admission.adapter_slots import AdapterSlots
from plimsoll.core.admission.cost_model import EngineCostModel, RequestCost
from plimsoll.core.admission.first_token_reports import reported_at_s
from plimsoll.core.admission.prefill_choice import STALL_COST_FACTOR, PrefillChoice, choose_prefill
from plimsoll.core.admission.prefill_queue import PrefillQueue
from plimsoll.core.admission.prefix_tokens import PrefixTokens, prefix_tokens
from plimsoll.core.admission.replica import MIN_RETRY_S, ReplicaState, RunningRequest
from plimsoll.core.admission.request import AdmissionRequest
from plimsoll.core.routing.prefix_index import PrefixIndex
from plimsoll.core.types import KV_BLOCK_TOKENS

CANDIDATES: Final = 4  # least loaded replicas to check per request
TRANSFER_PROBE_INTERVAL: Final = 50  # requests between KV transfers: only a transfer shows that the network is faster
MIN_REMOTE_SHARE: Final = 0.1  # lets a single gateway use hash homes, which survive its restart
PREFILL_RATE_WINDOW_S: Final = 10.0  # window of the prefill rate: longer than a burst, shorter than a start-up
_load: Final = attrgetter("load")


class Placement(NamedTuple):
    """A possible placement of a request. `replica` is None if no replica can take it now.

    - `first_token_s`: predicted time from now to its first token. Without a replica: infinity if none has room, else
      the best among those with room, which would be late.
    - `retry_at_s`: when to check again a replica that has too much prefill ahead or gradually frees KV.
    - `cost`: the request's cost there.
    - `prefill`: address of the prefill replica, None for local prefill.
    - `needs_place`: no replica can take it now, but more could if its adapter had a place there.
    """

    replica: ReplicaState | None
    first_token_s: float
    retry_at_s: float
    cost: RequestCost
    prefill: str | None = None
    needs_place: bool = False


class ReplicaPool:
    """The replicas of one serve or decode tier, and its prefill replicas, if any."""

    def __init__(self, cost_model: EngineCostModel) -> None:
        self.cost_model = cost_model
        self.replicas: dict[str, ReplicaState] = {}
        self.prefill_queues: dict[str, PrefillQueue] = {}
        self.adapters = AdapterSlots()
        self._prefix_tokens = PrefixTokens()
        self.drain_rate = 0.0  # GPU-seconds of modelled work per second that full replicas complete
        self._depth_memo = ("", 0)  # request and prefix depth of the last `estimate_cost`
        self._replica_of: dict[str, ReplicaState] = {}
        self._by_load: list[ReplicaState] = []
        self._prefix_index = PrefixIndex()
        self._prefill_prefix_index = PrefixIndex()
        self._other_gateways_share = MIN_REMOTE_SHARE  # share of requests that arrive at other gateways
        self._inverse_share = 1.0  # one over this gateway's share of the replicas
        self._since_transfer = 0  # requests since the last remote prefill
        self._recent_prefill_s, self._decayed_at_s = 0.0, 0.0  # decaying sum of prefill time, and its last update

    def __len__(self) -> int:
        return len(self._replica_of)

    def __contains__(self, id: str) -> bool:
        return id in self._replica_of

    @property
    def min_step_s(self) -> float:
        """The mean step of the replica with the shortest one, in seconds; of an idle one while none is ready."""
        return min((replica.step_s for replica in self.replicas.values()), default=self.cost_model.base_s)

    def set_cost_model(self, cost_model: EngineCostModel) -> None:
        """Set a new cost model for all replicas."""
        self.cost_model = cost_model
        for replica in self.replicas.values():
            replica.set_cost_model(cost_model)
        self._resize_prefix_indexes()
        self._recompute_drain_rate()

    def set_replicas(self, caps: Mapping[str, int], now: float) -> None:
        """Set the ready replicas with this gateway's slots on each. Requests on removed replicas are dropped."""
        for address in [address for address in self.replicas if address not in caps]:
            for id in self.replicas.pop(address).running:
                del self._replica_of[id]
        for address, cap in caps.items():
            replica = self.replicas.get(address)
            if replica is None:
                replica = self.replicas[address] = ReplicaState(address, self.cost_model, now)
            replica.set_share(cap, self.cost_model.batch)
        self._by_load = list(self.replicas.values())
        self.adapters.set_engines(self.replicas.keys())
        self._resize_prefix_indexes()
        self._recompute_drain_rate()

    def set_prefills(self, addresses: set[str], now: float) -> None:
        """Set the ready prefill replicas. Without any, decode replicas prefill locally."""
        self.prefill_queues = {
            address: self.prefill_queues.get(address) or PrefillQueue(address, now) for address in sorted(addresses)
        }
        self._resize_prefix_indexes()

    def estimate_cost(self, request: AdmissionRequest) -> RequestCost:
        """Returns the request's cost on the replica that caches most of it, with remote prefill if possible.

        A prompt of less than one block, or of several sequences, is prefilled locally (see `core.routing.picker`).
        """
        blocks = request.block_hashes
        remote = bool(self.prefill_queues) and request.prompt_tokens >= KV_BLOCK_TOKENS and request.sequences == 1
        cached = prefill_cached = 0
        if blocks:
            depth = self._prefix_index.match_depth(blocks)
            self._depth_memo = request.id, depth
            cached = prefix_tokens(request, depth)
            prefill_cached = prefix_tokens(request, self._prefill_prefix_index.match_depth(blocks)) if remote else 0
        cost = self.cost_model.request_cost(request, remote, cached, prefill_cached)
        if request.adapter and not self.adapters.is_loaded(request.adapter):
            cost = cost._replace(idle_ttft_s=cost.idle_ttft_s + self.adapters.load_s)
        local_cost = self._local_cost_if_cheaper(request, cost, cached) if remote else None
        return cost if local_cost is None else cost._replace(idle_ttft_s=min(cost.idle_ttft_s, local_cost.idle_ttft_s))

    def can_ever_fit(self, cost: RequestCost) -> bool:
        """Whether an empty replica of this tier can serve the request.

        Each prompt must fit; its sequences may run one after another. An output ends at the engine's context length,
        which fits into its KV cache.
        """
        return cost.prompt_tokens < self.cost_model.kv_tokens

    def place(
        self,
        request: AdmissionRequest,
        cost: RequestCost,
        class_index: int,
        max_utilization: float,
        within_s: float,
        now: float,
    ) -> Placement:
        """Returns the best placement that keeps all requests within the SLO and its first token within `within_s`.

        `cost` is the result of `estimate_cost`. `max_utilization` (0 to 1) limits the replicas' utilization.
        """
        if request.adapter and self.adapters.max_adapters:
            return self._place_adapter(request, cost, class_index, max_utilization, within_s, now)
        prefill, index = None, self._prefill_prefix_index
        if self.prefill_queues and cost.remote_prefill_s:
            share = self._other_gateways_share
            prefill = choose_prefill(self.prefill_queues, index, self.cost_model, share, request, now)
        if prefill is None or self.cost_model.kv_transfer_token_s is None:
            return self._best_placement(request, cost, prefill, class_index, max_utilization, within_s, now)
        blocks = request.block_hashes
        local_cost = self._local_cost_if_cheaper(
            request, cost, prefix_tokens(request, self._prefix_index.match_depth(blocks)) if blocks else 0
        )
        if local_cost is None:
            return self._best_placement(request, cost, prefill, class_index, max_utilization, within_s, now)
        # Remote prefill is too slow even without a queue.
        if cost.stall_s + self.cost_model.base_s + cost.network_s + cost.remote_prefill_s > within_s:
            return self._best_placement(request, local_cost, None, class_index, max_utilization, within_s, now)
        remote_placement = self._best_placement(request, cost, prefill, class_index, max_utilization, within_s, now)
        if remote_placement.replica is not None and self._since_transfer >= TRANSFER_PROBE_INTERVAL:
            return remote_placement
        local_placement = self._best_placement(request, local_cost, None, class_index, max_utilization, within_s, now)
        if local_placement.replica is None:
            return remote_placement._replace(retry_at_s=min(remote_placement.retry_at_s, local_placement.retry_at_s))
        return (
            remote_placement
            if remote_placement.replica is not None
            and _placement_score(remote_placement) <= _placement_score(local_placement)
            else local_placement
        )

    def _place_adapter(
        self,
        request: AdmissionRequest,
        cost: RequestCost,
        class_index: int,
        max_utilization: float,
        within_s: float,
        now: float,
    ) -> Placement:
        """Returns the best placement of a request with an adapter, among the replicas where it has or gets a place."""
        choices = self.adapters.choices(request.adapter)
        needs_place = len(choices[0]) + len(choices[1]) < len(self.replicas)
        late_s = retry_at_s = math.inf
        for addresses in filter(None, choices):
            among = [self.replicas[address] for address in addresses]
            found = self._best_placement(request, cost, None, class_index, max_utilization, within_s, now, among)
            if found.replica is not None:
                return found
            late_s, retry_at_s = min(late_s, found.first_token_s), min(retry_at_s, found.retry_at_s)
        return Placement(None, math.inf if needs_place else late_s, retry_at_s, cost, needs_place=needs_place)

    def _best_placement(
        self,
        request: AdmissionRequest,
        cost: RequestCost,
        prefill: PrefillChoice | None,
        class_index: int,
        max_utilization: float,
        within_s: float,
        now: float,
        among: Sequence[ReplicaState] | None = None,
    ) -> Placement:
        """Returns the best placement with this prefill replica, or with local prefill if None.

        `among` are the replicas that may take a request with an adapter, None for all.
        """
        best, best_replica_cost, best_score, best_first_token_s, earliest_late_s, retry_at_s = (
            None,
            cost,
            math.inf,
            0.0,
            math.inf,
            math.inf,
        )
        budget_s = self.cost_model.step_budget_s[class_index]
        candidates, costs, hash_home = self._candidates(request, cost, prefill, among)
        for replica, replica_cost in zip(candidates, costs, strict=True):
            first_token_s = replica.predict_ttft_s(replica_cost, now)
            if prefill is not None:
                first_token_s += prefill.wait_s + replica_cost.remote_prefill_s
            score = first_token_s + STALL_COST_FACTOR * replica_cost.stall_s
            if replica is hash_home:
                saved_s = self._other_gateways_share * replica_cost.stall_s
                score = first_token_s - saved_s + STALL_COST_FACTOR * (replica_cost.stall_s - saved_s)
            score += replica.silence_s(now)
            over_prefill_share = replica.prefill_tat_s - now > replica.max_prefill_ahead_s and replica.sequences
            if best is not None and not over_prefill_share and (score >= best_score or first_token_s > within_s):
                continue  # cannot become the best, so its room does not matter
            room_at_s = replica.room_at_s(replica_cost, budget_s, max_utilization, now)
            if room_at_s:
                retry_at_s = room_at_s if room_at_s < retry_at_s else retry_at_s
                continue
            if over_prefill_share:
                retry_at_s = min(
                    retry_at_s, max(replica.prefill_tat_s - replica.max_prefill_ahead_s, now + MIN_RETRY_S)
                )
            elif first_token_s > within_s:
                earliest_late_s = min(earliest_late_s, first_token_s)
            elif score < best_score:
                best, best_replica_cost, best_score, best_first_token_s = replica, replica_cost, score, first_token_s
        if best is None:
            return Placement(None, earliest_late_s, retry_at_s, cost)
        return Placement(
            best, best_first_token_s, retry_at_s, best_replica_cost, None if prefill is None else prefill.address
        )

    def add(self, request: AdmissionRequest, class_index: int, placement: Placement, now: float) -> None:
        """Record that the request is sent to its placement."""
        replica, cost = placement.replica, placement.cost
        assert replica is not None
        running = RunningRequest(cost, class_index, request.tenant, now, placement.first_token_s)
        if request.is_stream and placement.prefill is None and placement.first_token_s > 0.0:
            running.reported_at_s = reported_at_s(request.arrived_s, now + placement.first_token_s)
        if request.adapter:
            running.adapter = request.adapter
            is_load = self.adapters.add(replica.address, request.adapter, now)
            running.adapter_load_s = self.adapters.load_s if is_load else None
        self._since_transfer += 1
        if placement.prefill is not None:
            self._since_transfer = 0
            queue = self.prefill_queues[placement.prefill]
            remaining_s = placement.first_token_s - cost.remote_prefill_s - max(0.0, queue.free_s - now)
            running.remote_prefill = queue.submit(cost.remote_prefill_s * self._prefill_slowdown(now), remaining_s, now)
            self._recent_prefill_s += cost.remote_prefill_s
        replica.add(request.id, running, now)
        self._replica_of[request.id] = replica
        self._prefix_tokens.prompt += request.prompt_tokens
        if request.block_hashes:
            self._count_prefix(request, replica.address)
            self._prefix_index.record(replica.address, request.block_hashes)
            if placement.prefill is not None:
                self._prefill_prefix_index.record(placement.prefill, request.block_hashes)

    def take_prefix_tokens(self) -> PrefixTokens:
        """Returns the prompt tokens counted since the last call."""
        counted, self._prefix_tokens = self._prefix_tokens, PrefixTokens()
        return counted

    def _count_prefix(self, request: AdmissionRequest, address: str) -> None:
        """Count the known part of a prompt, before it is recorded. The first look-up repeats that of the placement."""
        if depth := self._prefix_index.match_depth(request.block_hashes):
            counted = self._prefix_tokens
            counted.ideal += prefix_tokens(request, depth)
            counted.routed += prefix_tokens(
                request, self._prefix_index.match_depth_at(address, request.block_hashes, depth)
            )

    def record_first_token(self, id: str, ttft_s: float, now: float) -> RunningRequest | None:
        """Record a first token. Returns None if the request is unknown. See `ReplicaState.record_first_token`."""
        replica = self._replica_of.get(id)
        running = None if replica is None else replica.record_first_token(id, ttft_s, now)
        if running is not None and running.adapter_load_s is not None:
            self.adapters.observe_load(running.adapter_load_s + ttft_s - running.predicted_ttft_s)
        return running

    def remove(
        self, id: str, now: float, output_tokens: int | None = None, ttft_s: float | None = None
    ) -> RunningRequest | None:
        """Remove a request that ended. Returns None if it is unknown. See `ReplicaState.remove`."""
        replica = self._replica_of.pop(id, None)
        if replica is None:
            return None
        running = replica.remove(id, now, output_tokens, ttft_s)
        if running is not None and running.adapter:
            self.adapters.remove(replica.address, running.adapter)
        return running

    def update_drain_rate(self) -> None:
        """Recompute the drain rate from the measured step-time ratios. Call this at each tick."""
        self._recompute_drain_rate()

    def _candidates(
        self,
        request: AdmissionRequest,
        cost: RequestCost,
        prefill: PrefillChoice | None,
        among: Sequence[ReplicaState] | None,
    ) -> tuple[list[ReplicaState], list[RequestCost], ReplicaState | None]:
        """Returns the candidate replicas, the request's cost on each, and its hash home among them.

        Other gateways would have sent an earlier request of this conversation to the hash home. There all full blocks
        are expected to be cached.
        """
        if among is not None:
            candidates = heapq.nsmallest(CANDIDATES, among, key=_load)
        else:
            if len(self._by_load) > CANDIDATES:
                self._by_load.sort(key=_load)
            candidates = self._by_load[:CANDIDATES]
        blocks = request.block_hashes
        if not blocks:
            costs = [cost] * len(candidates)
            return candidates, self._with_loads(costs, request, candidates) if request.adapter else costs, None
        prefix_index = self._prefix_index
        max_depth = prefix_index.match_depth(blocks)
        hash_home = None
        for address in (
            prefix_index.cached_on(blocks, max_depth) if max_depth else None,
            prefix_index.hash_home(blocks, max_depth),
        ):
            hash_home = None if address is None else self.replicas[address]
            if hash_home is not None and hash_home not in candidates and (among is None or hash_home in among):
                candidates.append(hash_home)
        cost_by_depth = {max_depth: cost} if self._depth_memo == (request.id, max_depth) and prefill is None else {}
        remote, prefill_cached = (False, 0) if prefill is None else (True, prefill.cached_tokens)
        depths = (
            [prefix_index.match_depth_at(replica.address, blocks, max_depth) for replica in candidates]
            if max_depth
            else [0] * len(candidates)
        )
        for depth in depths:
            if depth not in cost_by_depth:
                cost_by_depth[depth] = self.cost_model.request_cost(
                    request, remote, prefix_tokens(request, depth), prefill_cached
                )
        costs = [cost_by_depth[depth] for depth in depths]
        return candidates, self._with_loads(costs, request, candidates) if request.adapter else costs, hash_home

    def _with_loads(
        self, costs: list[RequestCost], request: AdmissionRequest, candidates: Sequence[ReplicaState]
    ) -> list[RequestCost]:
        """Returns the costs with the load of the adapter where it is missing, which stalls the whole batch."""
        adapters = self.adapters
        if not adapters.max_adapters:
            return costs
        return [
            cost
            if adapters.is_loaded(request.adapter, replica.address)
            else cost._replace(stall_s=cost.stall_s + adapters.load_s / replica.step_time_ratio)
            for cost, replica in zip(costs, candidates, strict=True)
        ]

    def _local_cost_if_cheaper(
        self, request: AdmissionRequest, remote_cost: RequestCost, cached: int
    ) -> RequestCost | None:
        """Returns the cost with local prefill, or None if the KV transfer is faster or its speed is unknown.

        `remote_cost` is the cost with remote prefill. A queue at the prefill replicas alone is no reason for local
        prefill, because decode replicas are not sized for it.
        """
        cost_model = self.cost_model
        if cost_model.kv_transfer_token_s is None:
            return None
        local_cost = cost_model.request_cost(request, remote=False, cached=cached)
        computing_s = local_cost.stall_s + local_cost.prefill_chunks * cost_model.base_s + local_cost.network_s
        return local_cost if remote_cost.stall_s + remote_cost.network_s > computing_s else None

    def _prefill_slowdown(self, now: float) -> float:
        """Returns the factor by which the load of other gateways slows a prompt at a prefill replica.

        Other gateways send their usual load during this gateway's burst. So the queue drains at one minus their
        utilization, which is this gateway's times the ratio of their share to its own. The factor is at most one over
        this gateway's share.
        """
        self._recent_prefill_s *= math.exp(-max(0.0, now - self._decayed_at_s) / PREFILL_RATE_WINDOW_S)
        self._decayed_at_s = now
        utilization = self._recent_prefill_s / (PREFILL_RATE_WINDOW_S * len(self.prefill_queues))
        return 1.0 / max(1.0 - utilization * (self._inverse_share - 1.0), 1.0 / self._inverse_share)

    def _resize_prefix_indexes(self) -> None:
        """Set how much of this gateway's prompts the replicas can cache."""
        replicas = self.replicas.values()
        self._prefix_index.set_endpoints({r.address: max(1, int(r.kv_tokens) // KV_BLOCK_TOKENS) for r in replicas})
        share = max((1.0 / replica.inverse_share for replica in replicas), default=1.0)
        self._inverse_share = 1.0 / max(share, 1.0 / self.cost_model.batch)
        self._other_gateways_share = max(1.0 - share, MIN_REMOTE_SHARE)
        prefill_blocks = max(1, int(share * self.cost_model.kv_tokens) // KV_BLOCK_TOKENS)
        self._prefill_prefix_index.set_endpoints(dict.fromkeys(self.prefill_queues, prefill_blocks))

    def _recompute_drain_rate(self) -> None:
        rho = self.cost_model.full_utilization
        self.drain_rate = sum(rho / (r.step_time_ratio * r.inverse_share) for r in self.replicas.values())


def _placement_score(placement: Placement) -> float:
    """Returns the score of a placement in seconds, to compare remote with local prefill. Lower is better.

    It adds the TTFT, the cost of the stall for later requests, and the stall of all running streams. The last is
    weighted by the replica's utilization, because a full replica loses more (see docs/design/0007-admission.md).
    """
    replica, cost = placement.replica, placement.cost
    assert replica is not None
    room_s, used_s = replica.min_step_budget_s - replica.idle_step_s, replica.step_s - replica.idle_step_s
    utilization = used_s / room_s if used_s < room_s else 1.0
    return (
        placement.first_token_s
        + (STALL_COST_FACTOR + utilization * replica.sequences * replica.inverse_share) * cost.stall_s
    )
