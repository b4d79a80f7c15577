"""The end of queued requests whose key or token is not accepted any more.

Problem: a request is authenticated when it arrives, and may wait for minutes. Idea: each second, all that wait are
checked again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plimsoll.gateway.clock import Clock
from plimsoll.gateway.errors import Rejection
from plimsoll.gateway.request_context import RequestContext

if TYPE_CHECKING:
    from plimsoll.gateway.picker import Picker


class RevokedRequests:
    """The check for one picker."""

    def __init__(self, picker: Picker, clock: Clock) -> None:
        self._picker, self._clock = picker, clock

    def rejection(self, ctx: RequestContext) -> Rejection | None:
        """Returns why the key or token of a request is not accepted any more, None if it is."""
        renewed = self._picker.authenticator.renew(ctx.identity, self._clock.unix())
        return renewed if isinstance(renewed, Rejection) else None

    def reject(self, now: float) -> None:
        """Reject these requests of this gateway's Envoy, here and where their owner decides."""
        picker = self._picker
        for ctx in picker.queue.requests():
            if not ctx.via and (rejection := self.rejection(ctx)) is not None:
                picker.reject_queued(ctx, rejection, now)
        if picker.owners is not None:
            picker.owners.reject_revoked(now)
