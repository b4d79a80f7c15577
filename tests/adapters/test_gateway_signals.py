"""A gateway's document, read: what one of ours says, what older ones do not, and what nobody may say."""

from __future__ import annotations

import copy
import math
from random import Random
from typing import Any

import orjson
import pytest

from plimsoll.adapters.gateway_signals import parse_signals
from plimsoll.core import histogram
from plimsoll.core.ports import BucketCounts, GatewayConfigState, GatewayReading, ServiceReading, SloCounts
from plimsoll.core.types import MediaKind
from plimsoll.gateway.demand_counter import DemandTokens
from plimsoll.gateway.envoy.access_log import AccessRecord
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.picker import Picker
from plimsoll.gateway.signals_document import build_signals
from tests.gateway.kube_objects import build_catalog, pod, service

Json = dict[str, Any]

V2: Json = {
    "version": 2,
    "gateway": "gw-0",
    "instance_id": "a1",
    "at": 1e9,
    "synced": True,
    "services": {
        "team/chat": {
            "models": ["chat"],
            "endpoints": [
                {
                    "pod": "d",
                    "address": "10.0.0.1:1",
                    "role": "decode",
                    "revision": "r",
                    "routable": True,
                    "inflight": 7,
                },
                {
                    "pod": "p",
                    "address": "10.0.0.2:1",
                    "role": "prefill",
                    "revision": "r",
                    "routable": True,
                    "inflight": 2,
                },
            ],
            "requests": {
                "arrived": 10,
                "arrived_tokens": 5000,
                "retried": 3,
                "succeeded": 4,
                "failed": 1,
                "cancelled": 2,
                "rejected": {"model_starting": 5},
            },
            "ttft": {"sum_s": 1.5, "buckets": [70, 3], "counts": [3, 1]},
            "prefill": {"remote": 0, "local": 0},
        }
    },
}


ADMISSION: Json = {
    "queued": 4,
    "queued_work_s": 1.5,
    "reserved_work_s": 0.25,
    "in_use": 9,
    "slots": 20,
    "outcomes": {"Admitted": 7, "ShedSaturated": 2},
}


def v3(**admission: object) -> Json:
    """With admission, some of it changed."""
    document = copy.deepcopy(V2)
    document["version"] = 3
    document["services"]["team/chat"]["admission"] = ADMISSION | admission
    return document


def v1() -> Json:
    """What the release before said."""
    document = copy.deepcopy(V2)
    document["version"] = 1
    del document["instance_id"], document["at"]
    del document["services"]["team/chat"]["requests"]["arrived_tokens"], document["services"]["team/chat"]["ttft"]
    return document


def changed(path: str, value: object) -> Json:
    """The document with one value, by its path, set to another; None leaves the key out."""
    document = copy.deepcopy(V2)
    *way, last = path.split(".")
    part: Any = document
    for step in way:
        part = part[int(step)] if isinstance(part, list) else part[step]
    if value is None:
        del part[last]
    else:
        part[last] = value
    return document


def chat(document: bytes | Json) -> ServiceReading:
    return parse_signals(document, "gw-0", 5.0).reading.services["team/chat"]


# ---------------------------------------------------------------- what ours says


def test_parse_admission_is_read_from_version_3() -> None:
    reported = chat(v3())
    assert (reported.queued, reported.queued_work_s, reported.reserved_work_s) == (4, 1.5, 0.25)
    assert (reported.slot_limit, reported.slots_in_use, reported.outcomes) == (
        20,
        9,
        {"Admitted": 7, "ShedSaturated": 2},
    )
    before = chat(V2)
    assert (before.queued, before.queued_work_s, before.slot_limit, before.outcomes) == (0, 0.0, 0, {})


@pytest.mark.parametrize(
    "admission",
    [
        {"queued": -1},
        {"queued": 1.5},
        {"queued_work_s": -1.0},
        {"reserved_work_s": "1"},
        {"in_use": None},
        {"outcomes": {"A": -1}},
    ],
)
def test_parse_invalid_admission_raises(admission: Json) -> None:
    with pytest.raises(ValueError, match="admission"):
        parse_signals(v3(**admission), "gw-0", 5.0)


@pytest.mark.parametrize("document", [V2, orjson.dumps(V2)], ids=["mapping", "bytes"])
def test_parse_v2_document_reads_all_fields(document: bytes | Json) -> None:
    signals = parse_signals(document, "gw-0", 5.0)
    assert signals == (
        True,
        GatewayReading(
            "gw-0",
            5.0,
            "a1",
            {
                "team/chat": ServiceReading(
                    arrived=10,
                    arrived_tokens=5000,
                    retried=3,
                    succeeded=4,
                    failed=1,
                    cancelled=2,
                    rejected={"model_starting": 5},
                    ttft_s=histogram.from_sparse(histogram.LATENCY_EDGES_S, {70: 3, 3: 1}, 1.5),
                    inflight={"d": 7, "p": 2},
                )
            },
        ),
        {("team", "chat"): 1},
        {("team", "chat"): frozenset({"chat"})},
    )


def test_parse_gateway_without_names_has_no_models() -> None:
    assert parse_signals(changed("services.team/chat.models", None), "gw-0", 5.0).models == {}


def test_parse_picker_document_equals_its_counts() -> None:
    picker = Picker(Random(1))
    picker.set_catalog(
        build_catalog([service(), service("quiet")], [pod("10.0.0.1:8000"), pod("10.0.0.2:8000", role="prefill")])
    )
    tally = picker.stats("team/chat")
    tokens = DemandTokens(300, {MediaKind.IMAGE: 200}, "chat")
    tally.record_arrival(tokens, retry=False, demand=True)
    tally.record_arrival(tokens, retry=True, demand=True)
    tally.record_rejection(Rejection(RejectionReason.MODEL_STARTING, "It starts."))
    for ttft_us in (250_000, 250_000, 4_000_000):
        tally.record_completion(
            AccessRecord(request_id="t", upstream="h", status=200, flags="-", ttft_us=ttft_us, duration_us=3 * ttft_us)
        )
    signals = parse_signals(orjson.dumps(build_signals(picker, "gw-0", synced=True)), "gw-0", 5.0)
    assert signals.reading.instance_id == picker.instance_id
    assert signals.routable_endpoints == {("team", "chat"): 0, ("team", "quiet"): 0}
    found = signals.reading.services["team/chat"]
    assert (found.arrived, found.arrived_tokens, found.retried, found.succeeded) == (1, 300, 1, 3)
    assert found.arrived_media_tokens == {"image": 200}
    assert found.arrived_by_class == {"chat": 1}
    assert found.rejected == {"model_starting": 1}
    assert found.ttft_s is not None
    assert found.ttft_s.value_sum == 4.5
    assert histogram.quantile(found.ttft_s, 0.5) == pytest.approx(0.25, rel=0.09)
    assert histogram.quantile(found.ttft_s, 1.0) == pytest.approx(4.0, rel=0.09)
    assert found.e2e_s is not None
    assert found.e2e_s.value_sum == 13.5
    assert histogram.quantile(found.e2e_s, 1.0) == pytest.approx(12.0, rel=0.09)
    quiet = signals.reading.services["team/quiet"]
    for nothing in (quiet.ttft_s, quiet.e2e_s):
        assert nothing is not None
        assert histogram.total_count(nothing) == 0.0


def test_parse_only_answering_roles_are_routable() -> None:
    for role, count in (("decode", 1), ("serve", 1), ("prefill", 0), ("another", 0)):
        document = changed("services.team/chat.endpoints.0.role", role)
        assert parse_signals(document, "gw-0", 5.0).routable_endpoints == {("team", "chat"): count}
    document = changed("services.team/chat.endpoints.0.routable", False)
    assert parse_signals(document, "gw-0", 5.0).routable_endpoints == {("team", "chat"): 0}


def test_parse_unsynced_picker_is_marked() -> None:
    assert not parse_signals(changed("synced", False), "gw-0", 5.0).synced


# ---------------------------------------------------------------- other releases


def test_parse_v1_document_has_no_tokens_or_latencies() -> None:
    signals = parse_signals(v1(), "gw-0", 5.0)
    found = signals.reading.services["team/chat"]
    assert (signals.reading.instance_id, signals.routable_endpoints) == ("", {("team", "chat"): 1})
    assert (found.arrived, found.succeeded, found.inflight) == (10, 4, {"d": 7, "p": 2})
    assert found.arrived_tokens is None
    assert found.ttft_s is None


@pytest.mark.parametrize(
    ("path", "name"), [("requests.arrived_tokens", "arrived_tokens"), ("ttft", "ttft_s")], ids=["tokens", "ttft"]
)
def test_parse_absent_field_is_none(path: str, name: str) -> None:
    assert getattr(chat(changed(f"services.team/chat.{path}", None)), name) is None


def test_parse_other_reservation_unit_is_ignored() -> None:
    document = v3()
    reported = document["services"]["team/chat"]["admission"]
    reported["ticket_work"] = reported.pop("reserved_work_s")  # GPU-seconds a second
    assert (chat(document).reserved_work_s, chat(document).queued_work_s) == (0.0, 1.5)


def test_parse_e2e_histogram_is_optional_and_validated() -> None:
    assert chat(v3()).e2e_s is None
    document = v3()
    document["services"]["team/chat"]["e2e"] = {"sum_s": 9.0, "buckets": [90, 88], "counts": [2, 1]}
    found = chat(document).e2e_s
    assert found == histogram.from_sparse(histogram.LATENCY_EDGES_S, {90: 2, 88: 1}, 9.0)
    for broken in ({"sum_s": -1.0, "buckets": [1], "counts": [1]}, {"sum_s": 1.0, "buckets": [1], "counts": [1, 2]}):
        document["services"]["team/chat"]["e2e"] = broken
        with pytest.raises(ValueError, match=r"sum_s|each bucket of the e2e of team/chat"):
            chat(document)


def test_parse_slo_counts_are_optional_and_validated() -> None:
    assert chat(v3()).slo_counts is None
    reported = {"assessed": 9, "missed": 4, "missed_ttft": 3, "missed_e2e": 2}
    document = v3()
    document["services"]["team/chat"]["slo"] = reported
    assert chat(document).slo_counts == SloCounts(9.0, 4.0, 3.0, 2.0)
    for broken in ({"missed": 10}, {"missed": 2}, {"assessed": -1}, {"missed_e2e": 1.5}, {"missed_ttft": None}):
        document["services"]["team/chat"]["slo"] = reported | broken
        with pytest.raises(ValueError, match=r"assessed|missed"):
            chat(document)


def test_parse_tpot_targets_are_optional_and_validated() -> None:
    slo_counts = {"assessed": 9, "missed": 4, "missed_ttft": 3, "missed_e2e": 2}
    document = v3()
    document["services"]["team/chat"]["slo"] = slo_counts
    assert chat(document).by_tpot_target is None
    reported = {"targets_s": [0.03, 0.2], "counts": [5, 4]}
    document["services"]["team/chat"]["slo"] = slo_counts | {"tpot": reported}
    assert chat(document).by_tpot_target == {0.03: 5.0, 0.2: 4.0}
    for broken in (
        {"counts": [5, 5]},
        {"counts": [5]},
        {"counts": [-1, 3]},
        {"targets_s": [0.2, 0.2]},
        {"targets_s": [0.0, 0.2]},
    ):
        document["services"]["team/chat"]["slo"] = slo_counts | {"tpot": reported | broken}
        with pytest.raises(ValueError, match=r"TPOT|tpot"):
            chat(document)


def test_parse_applied_object_is_optional_and_validated() -> None:
    document = v3()
    assert chat(document).config_state is None
    reported = {
        "version": "812",
        "admission_active": False,
        "parse_error": "InferenceServiceAdmission: version 9 is not supported; expected 4",
    }
    document["services"]["team/chat"]["object"] = reported
    assert chat(document).config_state == GatewayConfigState("812", False, reported["parse_error"])
    document["services"]["team/chat"]["object"] = reported | {"limits_version": "815"}
    assert chat(document).config_state == GatewayConfigState("812", False, reported["parse_error"], "815")
    for broken in (
        {"version": 812},
        {"admission_active": "no"},
        {"parse_error": "x" * 400},
        {"version": None},
        {"limits_version": 815},
    ):
        document["services"]["team/chat"]["object"] = reported | broken
        with pytest.raises(ValueError, match="object"):
            chat(document)


def test_parse_unknown_keys_are_ignored() -> None:
    assert chat(changed("services.team/chat.waiting", 3)) == chat(V2)


# ---------------------------------------------------------------- restarts and clocks


def test_picker_restart_changes_instance_id() -> None:
    first, second = Picker(Random(1)), Picker(Random(1))
    assert first.instance_id != second.instance_id


def test_parse_ignores_gateway_clock() -> None:
    backwards = parse_signals(changed("at", -1e9), "gw-0", 6.0).reading
    assert (backwards.at_s, backwards.services) == (6.0, parse_signals(V2, "gw-0", 5.0).reading.services)


def test_histogram_difference_handles_gateway_restart() -> None:
    """Each source's own difference first, then the sum: a restart adds what the new process has counted."""
    edges = histogram.LATENCY_EDGES_S

    def ttft(instance_id: str, counts: list[int]) -> BucketCounts:
        document = changed("services.team/chat.ttft", {"sum_s": 1.0 * sum(counts), "buckets": [5, 6], "counts": counts})
        found = chat(document | {"instance_id": instance_id}).ttft_s
        assert found is not None
        return found

    kept = histogram.difference(ttft("a", [4, 4]), ttft("a", [1, 4]))
    restarted = histogram.difference(ttft("c", [1, 2]), ttft("b", [40, 40]))
    assert histogram.merge([kept, restarted]) == histogram.from_sparse(edges, {5: 4, 6: 2}, 6.0)


# ---------------------------------------------------------------- hostile and broken

TTFT = "services.team/chat.ttft"
REQUESTS = "services.team/chat.requests"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (b"", "truncated"),
        (b"[]", "Expected `object`"),
        (b"<html>", "malformed"),
        (orjson.dumps(V2)[:-1], "truncated"),
        (orjson.dumps(V2).replace(b'"arrived":10', b'"arrived":NaN'), "malformed"),
        (orjson.dumps(V2).replace(b'"sum_s":1.5', b'"sum_s":1e999'), "out of range"),
        (orjson.dumps(V2).replace(b'"arrived":10', b'"arrived":' + b"9" * 400), "arrived"),
        (b'{"x":' + b"[" * 100_000, "nested too deep"),
        ({}, "version"),
        (changed("version", None), "version"),
        (changed("version", 0), "version"),
        (changed("version", 4), "version"),
        (changed("version", "2"), "version"),
        (changed("gateway", "gw-1"), "'gw-1', not from 'gw-0'"),
        (changed("gateway", None), "gateway"),
        (changed("synced", None), "synced"),
        (changed("synced", "yes"), "synced"),
        (changed("services", []), "services"),
        (changed("services", None), "services"),
        (changed("services.chat", V2["services"]["team/chat"]), "NAMESPACE/NAME, not 'chat'"),
        (changed("services./chat", V2["services"]["team/chat"]), "NAMESPACE/NAME"),
        (changed("services.a/b/c", V2["services"]["team/chat"]), "NAMESPACE/NAME"),
        (changed("services.team/", V2["services"]["team/chat"]), "NAMESPACE/NAME"),
        (changed(REQUESTS, None), "requests"),
        (changed(f"{REQUESTS}.arrived", None), "arrived"),
        (changed(f"{REQUESTS}.arrived", -1), "arrived"),
        (changed(f"{REQUESTS}.arrived", 1.5), "arrived"),
        (changed(f"{REQUESTS}.arrived", math.nan), "arrived"),
        (changed(f"{REQUESTS}.arrived", 2**53 + 1), "arrived"),
        (changed(f"{REQUESTS}.arrived", True), "arrived"),
        (changed(f"{REQUESTS}.arrived_tokens", -1), "arrived_tokens"),
        (changed(f"{REQUESTS}.arrived_tokens", 10**30), "arrived_tokens"),
        (changed(f"{REQUESTS}.rejected", {"busy": -1}), "rejected"),
        (changed(f"{REQUESTS}.rejected", {"busy": math.inf}), "rejected"),
        (changed("services.team/chat.endpoints.0.inflight", -1), "inflight"),
        (changed("services.team/chat.endpoints.0.pod", 7), "pod"),
        (changed("services.team/chat.endpoints.0.routable", None), "routable"),
        (changed(f"{TTFT}.sum_s", -0.1), "sum_s"),
        (changed(f"{TTFT}.sum_s", math.nan), "sum_s"),
        (changed(f"{TTFT}.sum_s", math.inf), "sum_s"),
        (changed(f"{TTFT}.counts", [1, -1]), "counts"),
        (changed(f"{TTFT}.counts", [1]), "TTFT of team/chat must have one count"),
        (changed(f"{TTFT}.counts", None), "counts"),
        (changed(f"{TTFT}.buckets", [3, 3]), "TTFT of team/chat must have one count"),
        (changed(f"{TTFT}.buckets", [3, -1]), "buckets"),
        (changed(f"{TTFT}.buckets", [3, 162]), "bucket 162, the last is 161"),
        (changed(f"{TTFT}.buckets", [3, 2**53]), "the last is 161"),
    ],
)
def test_parse_invalid_document_raises_with_reason(document: bytes | Json, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_signals(document, "gw-0", 5.0)


def test_parse_infinite_bucket_count_is_accepted() -> None:
    found = chat(changed(TTFT, {"sum_s": 5000.0, "buckets": [161], "counts": [1]})).ttft_s
    assert found is not None
    assert found.counts[-1] == 1
