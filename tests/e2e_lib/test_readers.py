"""Metrics, audit log and dumps: what they make of text."""

from __future__ import annotations

import json

from e2e.lib.metrics import Samples, prompt_sources
from e2e.lib.node import WRITES, parse_audit
from e2e.lib.operator import gateways_read_at, last_minute_bounds, metric_value, observed_at
from e2e.lib.request_log import RequestRecord, RequestResult
from e2e.lib.resource_dump import difference

PAGE = """# HELP vllm:prompt_tokens_by_source_total x
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} %d
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} %d
"""


def test_samples_support_difference_and_sum() -> None:
    before, after = Samples.parse(PAGE % (10, 0)), Samples.parse(PAGE % (10, 500))
    both = Samples.sum([after - before, after - before])
    assert prompt_sources(both) == {"local_compute": 0, "external_kv_transfer": 1000}
    assert both.total("vllm:prompt_tokens_by_source_total", source="external_kv_transfer", engine="0") == 1000
    assert both.total("nobody") == 0


def test_samples_new_counter_counts_from_zero() -> None:
    assert (Samples.parse(PAGE % (3, 4)) - Samples.parse("")).total("vllm:prompt_tokens_by_source_total") == 7


def _audit(stage: str, verb: str, **ref: str) -> str:
    return json.dumps(
        {
            "stage": stage,
            "verb": verb,
            "user": {"username": "system:serviceaccount:plimsoll-system:plimsoll-operator"},
            "objectRef": ref,
            "responseStatus": {"code": 200},
            "requestReceivedTimestamp": "2026-01-01T00:00:01.500000Z",
        }
    )


def test_audit_log_yields_completed_calls() -> None:
    lines = [
        _audit("RequestReceived", "patch", resource="pods"),
        _audit(
            "ResponseComplete", "patch", resource="inferenceservices", subresource="status", namespace="a", name="b"
        ),
        _audit("ResponseComplete", "list", resource="pods"),
        '{"cut by a rota',
    ]
    calls = list(parse_audit(lines))
    assert [(c.verb, c.resource, c.namespace, c.name) for c in calls] == [
        ("patch", "inferenceservices/status", "a", "b"),
        ("list", "pods", "", ""),
    ]
    assert [c.verb for c in calls if c.verb in WRITES] == ["patch"]
    assert calls[0].at % 60 == 1.5


def test_difference_names_remaining_removed_and_changed() -> None:
    lines = difference({"Pod a/x": "1", "Pod a/y": "1"}, {"Pod a/y": "2", "Secret a/z": "1"})
    assert [line.split("\n")[0] for line in lines] == ["left behind: Secret a/z", "gone: Pod a/x", "changed: Pod a/y"]
    assert not difference({"Pod a/x": "1"}, {"Pod a/x": "1"})


def test_explain_document_yields_read_and_metrics_times() -> None:
    gateways = {"age_s": 0.25, "rate_per_s": 3.5, "ttft_s": {"unknown": "no response in the last minute"}}
    document = {"metrics": {"at": "1970-01-01T00:01:40.500Z", "gateways": gateways}}
    assert (gateways_read_at(document), observed_at(document)) == (100.25, 100.5)
    assert (metric_value(document, "rate_per_s"), metric_value(document, "ttft_s")) == (3.5, 0.0)


def _record(sent_at: float, ended_at: float) -> RequestRecord:
    named = {"id": "", "source": "", "model": "", "status": 200, "outcome": RequestResult.OK}
    rest = {"finish_reason": None, "events": 0, "text": "", "detail": "", "ttft_s": None}
    counts = {"asked_tokens": 1, "prompt_tokens": 1, "output_tokens": 1}
    return RequestRecord(**named, **rest, **counts, sent_at=sent_at, ended_at=ended_at)  # type: ignore[arg-type]


def test_last_minute_bounds_are_by_what_was_before_what() -> None:
    """Read at 1000.0 by gateways and 1000.5 by the operator: the minute begins with the slot at 940."""
    metrics = {"at": "1970-01-01T00:16:40.500Z", "gateways": {"age_s": 0.5}}
    before, earlier = _record(934.0, 939.0), _record(936.0, 941.0)
    within, running, later = _record(941.0, 950.0), _record(999.0, 1003.0), _record(1001.0, 1002.0)
    records = [before, earlier, within, running, later]
    assert last_minute_bounds(records, records, {"metrics": metrics}) == (1, 3)
