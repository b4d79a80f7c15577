"""What Envoy writes to the picker's FIFO: a record of each request's end, and short ones of responses that run longer.

Problem: Envoy can report running requests only at a fixed interval. A response of ten minutes would cost 600 records,
of which the first one with its first token says all.

Idea: a filter lets pass the reports at the ages of `report_ages_s`, which double. Envoy reports at each multiple of the
interval, or a little later. So the filter accepts ages from a quarter of an interval early to three quarters late.
"""

from __future__ import annotations

from typing import Any, Final

from plimsoll.core.admission.first_token_reports import REPORT_INTERVAL_S, report_ages_s
from plimsoll.gateway.envoy.body_filters import TYPE_URL, duration
from plimsoll.gateway.settings import PickerSettings

Json = dict[str, Any]

ACCESS_LOG_OPTIONS: Final = {"access_log_flush_interval": duration(REPORT_INTERVAL_S)}
_TTFT: Final = "%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%"
_RECEIVED: Final = "%COMMON_DURATION(DS_RX_BEG:DS_RX_END:us)%"
_RUNNING_FORMAT: Final = {
    "request_id": "%REQ(X-PLIMSOLL-REQUEST-ID)%",
    "upstream": "%UPSTREAM_HOST%",
    "status": "%RESPONSE_CODE%",
    "flags": "%RESPONSE_FLAGS%",
    "ttft_us": _TTFT,
    "received_us": _RECEIVED,
    "is_running": "true",
}
_END_FORMAT: Final = {
    "request_id": "%REQ(X-PLIMSOLL-REQUEST-ID)%",
    "upstream": "%UPSTREAM_HOST%",
    "status": "%RESPONSE_CODE%",
    "flags": "%RESPONSE_FLAGS%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "ttft_us": _TTFT,
    "duration_us": "%COMMON_DURATION(DS_RX_BEG:DS_TX_END:us)%",
    "received_us": _RECEIVED,
    "sent_bytes": "%BYTES_SENT%",
    "client_request_id": "%REQ(X-REQUEST-ID):80%",
}
# What only the gateway's own access log needs.
_DETAILS: Final = {
    "cluster": "%UPSTREAM_CLUSTER%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "method": "%REQ(:METHOD):20%",
    "path": "%PATH(NQ:PATH):200%",
    "reason": "%RESP(X-PLIMSOLL-REASON):64%",
    "received_bytes": "%BYTES_RECEIVED%",
    "trace_id": "%TRACE_ID%",
    "output_tokens": "%DYNAMIC_METADATA(plimsoll:output_tokens)%",  # of `usage.lua`
    "total_ms": "%DURATION%",
}


def end_log(settings: PickerSettings) -> Json:
    """The log of requests that have ended."""
    log_format = _END_FORMAT | (_DETAILS if settings.access_log else {})
    return _file_log(settings, log_format, _of_type("DownstreamEnd"))


def running_log(settings: PickerSettings) -> Json:
    """The log of responses that still run."""
    ages = [
        _all_of(_age("GE", age_s - REPORT_INTERVAL_S / 4), _age("LE", age_s + 3 * REPORT_INTERVAL_S / 4 - 0.001))
        for age_s in report_ages_s()
    ]
    is_due = {"or_filter": {"filters": ages}}
    return _file_log(settings, _RUNNING_FORMAT, _all_of(_of_type("DownstreamPeriodic"), is_due))


def _file_log(settings: PickerSettings, log_format: Json, log_filter: Json) -> Json:
    return {
        "name": "envoy.access_loggers.file",
        "filter": log_filter,
        "typed_config": {
            "@type": f"{TYPE_URL}.extensions.access_loggers.file.v3.FileAccessLog",
            "path": str(settings.fifo),
            "log_format": {"json_format": log_format},
        },
    }


def _of_type(name: str) -> Json:
    return {"log_type_filter": {"types": [name]}}


def _all_of(*filters: Json) -> Json:
    return {"and_filter": {"filters": list(filters)}}


def _age(op: str, age_s: float) -> Json:
    """A filter on the time since the request arrived."""
    value = {"default_value": round(1000 * age_s), "runtime_key": "plimsoll.unused"}
    return {"duration_filter": {"comparison": {"op": op, "value": value}}}
