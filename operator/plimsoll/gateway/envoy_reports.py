"""What Envoy reports of the requests that the picker sent: their ends, their first tokens, and how many there are.

Problem: responses do not pass the picker. What it knows of them is late, and may be lost.

Idea: each end frees what the request occupies, and corrects the estimates. A first token corrects them while the
response still runs, if Envoy reports it before. Envoy's own counts drop requests whose end was never reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from plimsoll.gateway.api_routes import route_of
from plimsoll.gateway.clock import Clock
from plimsoll.gateway.envoy.access_log import AccessRecord
from plimsoll.gateway.inflight import InFlightRequest
from plimsoll.gateway.served_stats import ServedRequest
from plimsoll.gateway.service_admission import ForwardedRequest

if TYPE_CHECKING:
    from plimsoll.gateway.picker import Picker


class EnvoyReports:
    """The reports for one picker. Times are monotonic seconds."""

    def __init__(self, picker: Picker, clock: Clock) -> None:
        self._picker, self._clock = picker, clock

    def on_envoy_stats(self, active: Mapping[str, int]) -> None:
        """Reconcile in-flight counts with Envoy's active requests by address."""
        picker, now = self._picker, self._clock.now()
        picker.inflight.expire_suspects(now)
        lost = picker.inflight.reconcile(active, now)
        for request_id, in_flight in lost:
            picker.admission.complete(request_id, None, now)
            if picker.owners is not None:
                picker.owners.on_end(request_id, in_flight, None)
        if picker.owners is not None:
            picker.owners.on_external(picker.inflight.external())
        changed = picker.admission.update_replicas(now)
        picker.release(list(picker.admission.services) if lost else changed, now)

    def mark_suspect(self, address: str) -> None:
        """Record that an endpoint refused a connection."""
        picker, now = self._picker, self._clock.now()
        picker.inflight.mark_suspect(address, now)
        picker.refresh(now)

    def on_access_record(self, record: AccessRecord, now: float) -> bool:
        """Process one access-log record, of this gateway or of another. Returns whether the request is known."""
        picker, request_id = self._picker, record.request_id or ""
        in_flight = picker.inflight.complete(request_id, record.upstream or "", now)
        if in_flight is None:
            if request_id in picker.queue:
                picker.on_client_disconnect(request_id, now)
            elif picker.owners is not None:
                picker.owners.withdraw(request_id)
            return False
        if picker.owners is not None:
            picker.owners.on_end(request_id, in_flight, record)
        if record.reset_before_first_byte:
            picker.inflight.mark_suspect(record.upstream or in_flight.endpoint, now)
        if in_flight.is_booked:
            self._complete_booked(request_id, in_flight, record, now)
        if record.reset_before_first_byte or (record.upstream and record.upstream != in_flight.endpoint):
            picker.refresh(now)
        picker.release((in_flight.service,), now)
        return True

    def on_running_record(self, record: AccessRecord, now: float) -> None:
        """Process one record of a response that still runs, of this gateway or of another."""
        picker, request_id = self._picker, record.request_id or ""
        in_flight = picker.inflight.get(request_id)
        if in_flight is None or not in_flight.is_booked or record.ttft_s is None:
            return
        if not picker.admission.record_first_token(request_id, record, now):
            return
        if not in_flight.via:
            picker.stats(in_flight.service).early_first_tokens += 1
        if picker.owners is not None:
            picker.owners.on_first_token(request_id, in_flight, record)

    def _complete_booked(self, request_id: str, in_flight: InFlightRequest, record: AccessRecord, now: float) -> None:
        picker = self._picker
        forwarded = picker.admission.complete(request_id, record, now)
        if forwarded is not None:
            picker.attributes.set_output(request_id, forwarded.output_tokens)
        # Only the client's retry header counts here: a client can retry before this record arrives.
        if record.status is not None and record.status >= 500:
            picker.recent_rejections.record(in_flight.retry_key, now, 0.0)
        if in_flight.service in picker.catalog.services and not in_flight.via:
            stats = picker.stats(in_flight.service)
            stats.record_completion(record, in_flight.deadlines)
            if forwarded is not None and (served := self._served(forwarded, record, in_flight)) is not None:
                stats.served.record(served)
        if record.rejected_by_engine:
            for key in in_flight.demand.keys() & picker.catalog.services.keys():
                picker.stats(key).demand.withdraw(in_flight.demand[key])

    def _served(
        self, forwarded: ForwardedRequest, record: AccessRecord, in_flight: InFlightRequest
    ) -> ServedRequest | None:
        """Returns what a successful response has served, None of another."""
        request, ttft_s, e2e_s = forwarded.request, record.ttft_s, record.e2e_s
        if ttft_s is None or e2e_s is None:
            return None
        output_tokens, is_known = forwarded.output_tokens, forwarded.output_tokens is not None
        if output_tokens is None:
            is_generated = not route_of(forwarded.path.encode()).is_prefill_only
            mean_tokens = self._picker.admission.mean_output_tokens(forwarded.target_service)
            output_tokens = round(mean_tokens * request.sequences) if is_generated else 0
        deadlines = in_flight.deadlines
        return ServedRequest(
            request.tenant, request.prompt_tokens, request.sequences, output_tokens, is_known, forwarded.work_s,
            forwarded.queued_s, ttft_s, e2e_s, forwarded.stream,
            deadlines is not None and ttft_s <= deadlines.ttft_s and e2e_s <= deadlines.e2e_s,
        )  # fmt: skip
