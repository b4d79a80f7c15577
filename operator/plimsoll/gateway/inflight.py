"""In-flight requests per endpoint, as the picker counts them.

Envoy gives each request an ID on arrival. The ID is in the ext_authz check and in the access-log record of the
request's end. Client request IDs do not work, because two requests may carry the same one. Envoy's active-request
counts correct what these IDs miss: requests that started before this process or bypassed it, retries on another
endpoint, and lost records.
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from plimsoll.core.routing.endpoint import Endpoint, EndpointLoad
from plimsoll.core.routing.inflight_reconciliation import reconcile_inflight
from plimsoll.core.routing.picker import EndpointIndex, Pick
from plimsoll.core.slo import Deadlines
from plimsoll.gateway.demand_counter import DemandTokens
from plimsoll.gateway.unbooked import UnbookedRequests

SUSPECT_SECONDS = 5.0
MAX_REQUEST_AGE_SECONDS = 7200.0  # an older request has lost its access-log record


class InFlightRequest(msgspec.Struct, frozen=True):
    """A request at an engine.

    `service` is NAMESPACE/NAME, `retry_key` identifies the client's retries, and `deadlines` are those of its SLO, None
    without one. `demand` is what it added to the demand of services, by their keys: prompt tokens. `is_booked` is false
    if it takes no capacity: it counts neither as demand nor for the SLO. `via` is the gateway whose Envoy carries it,
    "" for this one. `is_foreign`: a gateway of another product carries it. `client` tells the clients of requests that
    take no capacity apart.
    """

    service: str
    endpoint: str
    prefill: str | None
    picked_s: float
    retry_key: Hashable = None
    deadlines: Deadlines | None = None
    demand: Mapping[str, DemandTokens] = {}
    is_booked: bool = True
    via: str = ""
    is_foreign: bool = False
    client: str = ""


class InFlightTracker:
    """In-flight requests and the endpoint `loads` that picks read. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.loads: dict[str, EndpointLoad] = {}
        self._id_prefix = secrets.token_hex(4)  # distinguishes IDs of an earlier process
        self.unbooked = UnbookedRequests()
        self._pick_number = 0
        self._requests: dict[str, InFlightRequest] = {}
        self._last_drift: dict[str, int] = {}
        self._external: dict[str, int] = {}
        self._own_counts: dict[str, int] = {}
        self._peer_counts: dict[str, int] = {}  # those of `_own_counts` that other gateways carry
        self._foreign_counts: dict[str, int] = {}  # those of `_own_counts` that gateways of other products carry
        self._peer_external: dict[str, Mapping[str, int]] = {}  # by gateway and address
        self._suspect_until: dict[str, float] = {}
        self._envoy_active: dict[str, int] = {}  # Envoy's counts at the last `reconcile`
        self._reconciled_s = float("-inf")

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def get(self, request_id: str) -> InFlightRequest | None:
        """Returns a request at an engine, None if it is unknown."""
        return self._requests.get(request_id)

    def requests(self) -> Iterable[tuple[str, InFlightRequest]]:
        """Returns the requests at engines with their IDs."""
        return self._requests.items()

    def carried(self, address: str) -> int:
        """Returns the requests at an endpoint that this gateway's Envoy carries, or a gateway of another product."""
        own = self._own_counts.get(address, 0) - self._peer_counts.get(address, 0)
        return max(0, own + self._external.get(address, 0))

    def new_request_id(self) -> str:
        """Returns an ID for a request that has none."""
        self._pick_number += 1
        return f"{self._id_prefix}-{self._pick_number:x}"

    def endpoint_index(self, endpoints: Sequence[Endpoint]) -> EndpointIndex:
        """Returns an index of these endpoints, valid until the next `keep_only`."""
        for endpoint in endpoints:
            self._load_of(endpoint.address)
        return EndpointIndex(endpoints, self.loads)

    def begin(
        self,
        service: str,
        pick: Pick,
        request_id: str,
        now: float,
        retry_key: Hashable = None,
        deadlines: Deadlines | None = None,
        demand: Mapping[str, DemandTokens] = MappingProxyType({}),
        is_booked: bool = True,
        via: str = "",
        is_foreign: bool = False,
        client: str = "",
    ) -> None:
        """Record a pick under its request ID."""
        address, prefill = pick.endpoint.address, pick.prefill.address if pick.prefill else None
        self.add(
            request_id,
            InFlightRequest(
                service, address, prefill, now, retry_key, deadlines, demand, is_booked, via, is_foreign, client
            ),
        )

    def add(self, request_id: str, request: InFlightRequest) -> None:
        """Record a request at an engine, picked here or by another gateway."""
        if not request.is_booked:
            self.unbooked.add(request.service, request.client, 1)
        self._pick_number += 1
        self._requests[request_id] = request
        self._add_own(request.endpoint, 1, request, self._pick_number)
        if request.prefill is not None:
            self._add_own(request.prefill, 1, request, self._pick_number)

    def complete(self, request_id: str, upstream: str, now: float) -> InFlightRequest | None:
        """Record the end of a request. Returns None if this process did not pick it.

        If another endpoint served the request, the picked endpoint refused it and becomes suspect.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            if self._external.get(upstream, 0) > 0:
                self._external[upstream] -= 1
                self._update_load(upstream)
            return None
        self._release(request)
        if upstream and upstream != request.endpoint:
            self.mark_suspect(request.endpoint, now)
        return request

    def mark_suspect(self, address: str, now: float) -> None:
        """Avoid an endpoint for `SUSPECT_SECONDS`."""
        self._suspect_until[address] = now + SUSPECT_SECONDS
        self._load_of(address).suspect = True

    def expire_suspects(self, now: float) -> bool:
        """Clear the suspect state of endpoints whose time is over. Returns whether there were any."""
        if not self._suspect_until:
            return False
        expired = [address for address, until in self._suspect_until.items() if until <= now]
        for address in expired:
            del self._suspect_until[address]
            self._load_of(address).suspect = False
        return bool(expired)

    def external_inflight(self, address: str) -> int:
        """Returns the requests at an endpoint that the Envoys carry and that no picker sent, as far as is known."""
        own = max(0, self._external.get(address, 0))
        if not self._peer_external:
            return own
        return own + sum(counts.get(address, 0) for counts in self._peer_external.values())

    def external(self) -> dict[str, int]:
        """Returns the requests that this gateway's Envoy carries and that no picker sent, by address."""
        return {address: count for address, count in self._external.items() if count > 0}

    def set_peer_external(self, gateway: str, counts: Mapping[str, int]) -> bool:
        """Set what `external` is at another gateway. Returns whether it changed."""
        before = self._peer_external.pop(gateway, {})
        if counts:
            self._peer_external[gateway] = counts
        for address in before.keys() | counts.keys():
            if address in self.loads:
                self._update_load(address)
        return before != counts

    def reconcile(self, envoy_active: Mapping[str, int], now: float) -> list[tuple[str, InFlightRequest]]:
        """Correct the counts with Envoy's active requests by address. Call this every few seconds with all of them.

        Returns the requests that were dropped, with their IDs.
        """
        lost = self._drop_lost(envoy_active, now)
        for address, count in envoy_active.items():
            elsewhere = self._peer_counts.get(address, 0) + self._foreign_counts.get(address, 0)
            own = self._own_counts.get(address, 0) - elsewhere
            if not count and not own and self._last_drift.get(address) == 0 and not self._external.get(address):
                continue  # idle, as before
            drift = count - own
            self._external[address] = reconcile_inflight(self._last_drift.get(address), drift)
            self._last_drift[address] = drift
            self._update_load(address)
        for address in [a for a in self._external if a not in envoy_active]:
            del self._external[address]
            self._last_drift.pop(address, None)
            self._update_load(address)
        self._envoy_active = dict(envoy_active)
        self._reconciled_s = now
        return lost

    def rank(self, endpoint: Endpoint) -> int:
        """Returns a number that is lower for an endpoint with less load; suspect ones come last."""
        load = self.loads.get(endpoint.address)
        return 0 if load is None else load.rank

    def keep_only(self, addresses: set[str]) -> None:
        """Drop the loads of removed endpoints without requests in flight."""
        for address in [a for a, load in self.loads.items() if a not in addresses and not load.inflight]:
            del self.loads[address]
            self._suspect_until.pop(address, None)
            self._own_counts.pop(address, None)
            self._peer_counts.pop(address, None)
            self._foreign_counts.pop(address, None)

    def _drop_lost(self, envoy_active: Mapping[str, int], now: float) -> list[tuple[str, InFlightRequest]]:
        """Drop requests whose record is lost: very old ones, and those at an endpoint that is idle in Envoy."""
        lost = [
            (request_id, request)
            for request_id, request in self._requests.items()
            if now - request.picked_s > MAX_REQUEST_AGE_SECONDS
            or (
                not request.via
                and not request.is_foreign
                and request.picked_s < self._reconciled_s
                and envoy_active.get(request.endpoint) == 0 == self._envoy_active.get(request.endpoint)
            )
        ]
        for request_id, request in lost:
            del self._requests[request_id]
            self._release(request)
        for address in {request.endpoint for _, request in lost}:
            self._last_drift.pop(address, None)
        return lost

    def _release(self, request: InFlightRequest) -> None:
        if not request.is_booked:
            self.unbooked.add(request.service, request.client, -1)
        self._add_own(request.endpoint, -1, request)
        if request.prefill is not None:
            self._add_own(request.prefill, -1, request)

    def _add_own(self, address: str, delta: int, request: InFlightRequest, pick_number: int | None = None) -> None:
        self._own_counts[address] = self._own_counts.get(address, 0) + delta
        if request.via:
            self._peer_counts[address] = self._peer_counts.get(address, 0) + delta
        elif request.is_foreign:
            self._foreign_counts[address] = self._foreign_counts.get(address, 0) + delta
        self._update_load(address, pick_number)

    def _load_of(self, address: str) -> EndpointLoad:
        load = self.loads.get(address)
        if load is None:
            load = self.loads[address] = EndpointLoad()
        return load

    def _update_load(self, address: str, pick_number: int | None = None) -> None:
        """`pick_number` is that of the pick that chose this endpoint now."""
        load = self.loads.get(address) or self._load_of(address)
        inflight = max(0, self._own_counts.get(address, 0) + self._external.get(address, 0))
        if self._peer_external:
            inflight += sum(counts.get(address, 0) for counts in self._peer_external.values())
        load.update(inflight, load.last_pick if pick_number is None else pick_number)
