"""What bounds the memory that clients can make a gateway pod hold, each with its own name and count.

Problem: several bounds answer with the same error code, because a client does the same about each. The operator of the
gateway does not: another setting cures each.

Idea: a rejection names its bound. The name is the label of one metric, and a row of the alert's page.
"""

from __future__ import annotations

from enum import StrEnum

from plimsoll.telemetry import gateway_metrics


class GatewayLimit(StrEnum):
    """The value is the label of `plimsoll_gateway_limit_reached_total`."""

    # Of Envoy.
    CONNECTIONS = "connections"  # of all clients
    SOURCE_CONNECTIONS = "source_connections"  # of one source address
    FIRST_BYTE_TIME = "first_byte_time"
    HEADERS_TIME = "headers_time"
    BODY_TIME = "body_time"
    HEAP_REQUESTS = "heap_requests"  # requests refused because the heap is full
    HEAP_CONNECTIONS = "heap_connections"
    HEAP_STREAMS = "heap_streams"  # streams ended because the heap is full
    BODY_BYTES_WITHOUT_PICKER = "body_bytes_without_picker"  # of request bodies, while the picker does not respond

    # Of the picker. Those of one client leave room for others.
    BODY_BYTES = "body_bytes"  # of the request bodies that Envoy holds
    CLIENT_BODY_BYTES = "client_body_bytes"
    PARSE_BYTES = "parse_bytes"  # of large request bodies that wait for the parser
    CLIENT_PARSE_BYTES = "client_parse_bytes"
    TOKEN_REQUESTS = "token_requests"  # at an engine
    CLIENT_TOKEN_REQUESTS = "client_token_requests"
    PROGRESS_STREAMS = "progress_streams"
    MODEL_PROGRESS_STREAMS = "model_progress_streams"
    CLIENT_PROGRESS_STREAMS = "client_progress_streams"

    # Of the endpoint picker, which gateways of other products ask.
    ENDPOINT_PICKER_STREAMS = "endpoint_picker_streams"
    ENDPOINT_PICKER_BODY_BYTES = "endpoint_picker_body_bytes"
    ENDPOINT_PICKER_CLIENT_BODY_BYTES = "endpoint_picker_client_body_bytes"

    def count_reached(self, times: int = 1) -> None:
        """Count what was refused or ended at this limit."""
        gateway_metrics.GATEWAY_LIMIT_REACHED.labels(self.value).inc(times)


for _limit in GatewayLimit:
    _limit.count_reached(0)  # a rate needs the series before the first time
