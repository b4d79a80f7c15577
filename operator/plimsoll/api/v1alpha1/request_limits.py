"""`requestLimits`: what one request may take at most, for a service and for its classes."""

from __future__ import annotations

from typing import Annotated, Final, Literal, get_args

from pydantic import Field

from plimsoll.api.v1alpha1.api_model import ApiModel
from plimsoll.api.v1alpha1.scalars import MAX_DURATION_CHARS, duration_rules
from plimsoll.core import units
from plimsoll.core.admission import request_limits as core
from plimsoll.core.admission.request import MAX_REQUEST_TOKENS

# Envoy has a route for each, because it takes no idle timeout from a header.
IdleTimeout = Literal["5s", "10s", "15s", "30s", "60s", "120s", "300s", "600s"]
IDLE_TIMEOUTS_S: Final = tuple(int(units.parse_duration(text)) for text in get_args(IdleTimeout))
MAX_DURATION_S: Final = 7200.0  # of any request with a deadline


class RequestLimitsSpec(ApiModel):
    """Limits of one request."""

    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_REQUEST_TOKENS)] | None = Field(
        default=None,
        description="Most output tokens of one sequence, only with task generate: 1 to "
        f"{MAX_REQUEST_TOKENS}. A request that asks for more gets 400 request_too_large. One that asks for no number "
        "gets this one. Absent: no limit but the engine's.",
    )
    max_duration: (
        Annotated[
            str,
            Field(max_length=MAX_DURATION_CHARS),
            duration_rules("1s", f"{MAX_DURATION_S:.0f}s", "must be from 1 second to 2 hours"),
        ]
        | None
    ) = Field(
        default=None,
        description="Longest time from the arrival of a request to the end of its response, time in the queue "
        "included: 1s to 2h. A shorter deadline of the client still applies. Absent: only the client's.",
    )
    idle_timeout: IdleTimeout | None = Field(
        default=None,
        description="Longest time in which the engine of a streamed response sends no byte, before the first token "
        "too. Then the request ends. Absent: 600s.",
    )

    def to_core(self, service: core.RequestLimits = core.NO_LIMITS) -> core.RequestLimits:
        """Convert to the core type. Limits that are absent here are those of `service`."""
        return core.RequestLimits(
            self.max_output_tokens or service.max_output_tokens,
            service.max_duration_s if self.max_duration is None else units.parse_duration(self.max_duration),
            service.idle_timeout_s if self.idle_timeout is None else int(units.parse_duration(self.idle_timeout)),
        )
