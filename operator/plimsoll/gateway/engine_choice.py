"""Which engine serves an admitted request, and which engines follow if it fails."""

from __future__ import annotations

from plimsoll.core.admission.request import AdmissionDecision
from plimsoll.core.routing.picker import EndpointIndex, Pick
from plimsoll.gateway.adapters import prefer_loaded
from plimsoll.gateway.endpoint_subset import within_subset
from plimsoll.gateway.inflight import InFlightTracker
from plimsoll.gateway.prefill_policy import deadline_s, with_required_prefill
from plimsoll.gateway.request_context import RequestContext
from plimsoll.gateway.service_catalog import ServiceEntry


class EngineChoice:
    """Chooses engines by the requests in flight. Keeps an index for each service until the catalog changes."""

    def __init__(self, inflight: InFlightTracker) -> None:
        self._inflight = inflight
        self._indexes: dict[str, EndpointIndex] = {}  # built on demand after each catalog change

    def clear(self) -> None:
        """The catalog has changed."""
        self._indexes.clear()

    def choose(self, service: ServiceEntry, ctx: RequestContext, decision: AdmissionDecision | None) -> Pick | None:
        """Returns the admitted engine and its fallbacks, or without admission those with the fewest in flight.

        Engines that have loaded the request's adapter come first. None if the service has no usable engine, or no
        prefill engine for a prompt that needs one.
        """
        pick = self._choose_by_load(service, ctx, decision)
        if pick is None:
            return None
        if ctx.adapter is not None:
            # The adapter may have been loaded while the request waited.
            adapter = service.adapters.get(ctx.adapter.name, ctx.adapter)
            pick = prefer_loaded(pick, adapter, service.endpoints, self._inflight.rank)
        if ctx.foreign is None or ctx.foreign.subset is None:
            return pick
        allowed = within_subset(pick, ctx.foreign.subset, service.endpoints, self._inflight.rank)
        index = self._indexes[ctx.target_service]
        return None if allowed is None else with_required_prefill(allowed, index, service, ctx, may_move=False)

    def _choose_by_load(
        self, service: ServiceEntry, ctx: RequestContext, decision: AdmissionDecision | None
    ) -> Pick | None:
        index = self._indexes.get(ctx.target_service)
        if index is None:
            index = self._indexes[ctx.target_service] = self._inflight.endpoint_index(service.endpoints)
        if decision is not None and decision.address is not None:
            ctx.prefill_deadline_s = deadline_s(decision)
            pick = index.pick_at(decision.address, decision.prefill, ctx.prompt)
            if pick is not None:
                return with_required_prefill(pick, index, service, ctx)
        pick = index.pick(ctx.prompt)
        return None if pick is None else with_required_prefill(pick, index, service, ctx)
