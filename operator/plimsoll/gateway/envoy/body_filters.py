"""The HTTP filters that bound the request bodies in Envoy's memory, with and without the picker.

Problem: Envoy reads a whole body before it asks the picker, so somebody must count bodies before they are read.

Idea: for a body that is large or of unknown length, Envoy first asks the picker for room, by headers alone. While the
picker does not answer, a token bucket stands in. It holds half of the budget, and refills the other half within the
time T that an unfinished body may last. So within any T it admits the budget at most, and unfinished bodies never hold
more. Complete bodies stay until their requests end: without a picker, only Envoy's heap limit bounds those. A client
with a body of unknown length pays for the largest one.
"""

from __future__ import annotations

from typing import Any

from plimsoll.gateway.settings import PickerSettings

Json = dict[str, Any]

TYPE_URL = "type.googleapis.com/envoy"
RESERVE_PREFIX = "/reserve"  # prefix of the client's path in the question for room
RESERVE_FILTER = "plimsoll.reserve_body"
RESERVE_SECONDS = 5.0  # until the token bucket decides in place of a picker that hangs
RATE_FILTER = "envoy.filters.http.local_ratelimit"
LARGE_BODY_BYTES = 16 << 10  # smaller bodies are read without a question
BODY_BYTES_HEADER = "x-plimsoll-body-bytes"  # the length that the client announces
NO_ANSWER_HEADER = "x-envoy-auth-failure-mode-allowed"
RATE_STAT = "bodies"
_MAX_TOKENS = (1 << 32) - 1
_DESCRIPTOR = {"key": "body", "value": "unreserved"}


def duration(value: float) -> str:
    """Returns seconds in the JSON format of a protobuf duration."""
    return f"{value:.3f}s"


def rate_filter() -> Json:
    return without_answer({"name": RATE_FILTER, "typed_config": _rate_limit({})})


def without_answer(http_filter: Json) -> Json:
    """Returns the filter, skipped for requests that the picker has answered, which are nearly all."""
    header = {
        "name": "no_answer",
        "typed_config": {
            "@type": f"{TYPE_URL}.type.matcher.v3.HttpRequestHeaderMatchInput",
            "header_name": NO_ANSWER_HEADER,
        },
    }
    has_no_answer = {"single_predicate": {"input": header, "value_match": {"exact": "true"}}}
    skip = {
        "name": "skip",
        "typed_config": {"@type": f"{TYPE_URL}.extensions.filters.common.matcher.action.v3.SkipFilter"},
    }
    matchers = [{"predicate": {"not_matcher": has_no_answer}, "on_match": {"action": skip}}]
    return {
        "name": http_filter["name"],
        "typed_config": {
            "@type": f"{TYPE_URL}.extensions.common.matching.v3.ExtensionWithMatcher",
            "extension_config": http_filter,
            "xds_matcher": {"matcher_list": {"matchers": matchers}},
        },
    }


def rate_policy(settings: PickerSettings) -> Json:
    """Returns the token bucket, for the virtual host. Requests that the picker answered take nothing from it.

    Each group of sources has a virtual host of its own, and so a bucket. Together they admit the body budget.
    """
    budget, seconds = min(settings.source_body_budget_bytes, _MAX_TOKENS), settings.body_timeout_seconds
    burst = budget // 2
    bucket = {"max_tokens": burst, "tokens_per_fill": max(1, int((budget - burst) / seconds)), "fill_interval": "1s"}
    number = {"name": BODY_BYTES_HEADER, "string_match": {"safe_regex": {"regex": "[0-9]{1,9}"}}}
    return _rate_limit(
        {
            "filter_enabled": _ALWAYS,
            "filter_enforced": _ALWAYS,
            "always_consume_default_token_bucket": False,
            "descriptors": [{"entries": [_DESCRIPTOR], "token_bucket": bucket}],
            "rate_limits": [
                _rate_limit_entry([number], {"format": f"%REQ({BODY_BYTES_HEADER.upper()})%"}),
                _rate_limit_entry([number | {"invert_match": True}], {"number": settings.max_body_bytes}),
            ],
        }
    )


def clear_no_answer() -> Json:
    """Remove the mark of the first question: only that of the second one says that the picker did not choose."""
    return without_answer(
        {
            "name": "envoy.filters.http.header_mutation",
            "typed_config": {
                "@type": f"{TYPE_URL}.extensions.filters.http.header_mutation.v3.HeaderMutation",
                "mutations": {"request_mutations": [{"remove": NO_ANSWER_HEADER}]},
            },
        }
    )


_ALWAYS = {"default_value": {"numerator": 100}, "runtime_key": "plimsoll.bodies"}


def _rate_limit(fields: Json) -> Json:
    unlimited = {"max_tokens": _MAX_TOKENS, "tokens_per_fill": _MAX_TOKENS, "fill_interval": "1s"}
    return {
        "@type": f"{TYPE_URL}.extensions.filters.http.local_ratelimit.v3.LocalRateLimit",
        "stat_prefix": RATE_STAT,
        "token_bucket": unlimited,
        **fields,
    }


def _rate_limit_entry(headers: list[Json], tokens: Json) -> Json:
    """Returns what a request without the picker's answer takes from the bucket."""
    no_answer = {"name": NO_ANSWER_HEADER, "present_match": True}
    match = {
        "descriptor_key": _DESCRIPTOR["key"],
        "descriptor_value": _DESCRIPTOR["value"],
        "headers": [no_answer, *headers],
    }
    return {"actions": [{"header_value_match": match}], "hits_addend": tokens}
