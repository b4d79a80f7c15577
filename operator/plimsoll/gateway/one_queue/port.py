"""What the picker needs of the gateways that own services."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Mapping
from typing import Protocol

from plimsoll.gateway.envoy.access_log import AccessRecord
from plimsoll.gateway.inflight import InFlightRequest
from plimsoll.gateway.request_context import RequestContext
from plimsoll.gateway.service_catalog import ServiceCatalog, ServiceEntry


class Owners(Protocol):
    """The owners of services and API keys among the gateways. Times are monotonic seconds."""

    def set_catalog(self, catalog: ServiceCatalog) -> None:
        """Set the services."""

    def ask(self, service: ServiceEntry, ctx: RequestContext, now: float) -> Future[bytes] | None:
        """Returns the reply to a request that another gateway decides about, None if this picker is to decide."""

    def withdraw(self, request_id: str) -> None:
        """The client of a request without a reply has left."""

    def reject_revoked(self, now: float) -> None:
        """Reject the requests without a reply whose keys are not accepted any more."""

    def on_sent(self, request_id: str, now: float) -> None:
        """This picker has sent a request to an engine."""

    def on_first_token(self, request_id: str, in_flight: InFlightRequest, record: AccessRecord) -> None:
        """A running response has begun."""

    def on_end(self, request_id: str, in_flight: InFlightRequest, record: AccessRecord | None) -> None:
        """A request at an engine has ended. `record` is None if it is lost."""

    def on_external(self, counts: Mapping[str, int]) -> None:
        """Envoy carries so many requests that no picker sent, by the address of the engine."""
