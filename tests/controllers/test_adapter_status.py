"""What the status says of adapters: counts, bounded details, names that are not free, and silence after a restart."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from plimsoll.adapters.launcher import AdapterReport, parse_engine_info
from plimsoll.adapters.object_size import MAX_SERVICE_BYTES, measure
from plimsoll.api.v1alpha1 import InferenceService, parse
from plimsoll.controllers.object_cache import ObjectCache
from plimsoll.controllers.reconcile.adapter_status import adapter_failed, adapters_status
from plimsoll.controllers.reconcile.name_claims import grant_time
from plimsoll.controllers.reconcile.name_condition import adapter_name_rejected
from plimsoll.controllers.reconcile.observe import affected_services, name_state, related_claims
from plimsoll.core.errors import InvalidSpec
from plimsoll.core.routing.model_names import NameRules, read_claims, resolve_owners, served_names
from tests import builders
from tests.gateway.kube_objects import build_catalog

Object = dict[str, Any]

LOADED, LOADING = AdapterReport(True), AdapterReport(False)
ENTRIES = [{"name": "sql", "since": "2026-01-01T00:00:00.000001Z"}, {"name": "law"}]
RULES = NameRules()


def service(name: str, *adapters: str, namespace: str = "team", granted: tuple[str, ...] = (), **spec: Any) -> Object:
    made = builders.service(name, namespace, **{"tiers": {"serve": {}}, **spec})
    made["spec"]["adapters"] = [{"name": adapter, "uri": "hf://acme/x"} for adapter in adapters]
    since = "2026-01-02T00:00:00.000001Z"
    made["status"] = {"adapters": [{"name": a} | ({"since": since} if a in granted else {}) for a in adapters]}
    return made


def cache(*services: Object) -> ObjectCache:
    found = ObjectCache()
    for one in services:
        found.put(one)
    return found


def test_entries_count_engines_and_name_those_without() -> None:
    reports = {
        "b": {"sql": LOADED, "law": LOADING},
        "a": {"sql": LOADED, "law": AdapterReport(False, "rank 64 is above 16")},
        "c": {"sql": LOADED},
    }
    assert adapters_status(ENTRIES, reports, has_engines=True) == [
        {"name": "sql", "since": "2026-01-01T00:00:00.000001Z", "loaded": "3/3"},
        {"name": "law", "loaded": "0/3", "error": "rank 64 is above 16", "notLoadedOn": ["a", "b", "c"]},
    ]


def test_entries_stay_while_no_engine_reports() -> None:
    before = adapters_status(ENTRIES, {"a": {"sql": LOADED}}, has_engines=True)
    assert adapters_status(before, {}, has_engines=True) == before


def test_adapters_without_an_engine_are_loaded_on_none() -> None:
    """As after a scale to zero."""
    before = adapters_status(ENTRIES, {"a": {"sql": LOADED, "law": AdapterReport(False, "no file")}}, has_engines=True)
    assert [(one["loaded"], "error" in one) for one in before] == [("1/1", False), ("0/1", True)]
    after = adapters_status(before, {}, has_engines=False)
    assert [(one["loaded"], "error" in one) for one in after] == [("0/0", False), ("0/0", True)]


def test_failure_stays_while_the_only_engine_restarts() -> None:
    bad, silent, loading = {"law": AdapterReport(False, "no file")}, {}, {"law": LOADING}
    states = [{"a": bad}, silent, {"a": loading}, {"a": bad}, silent, {"b": loading}, {"b": {"law": LOADED}}]
    conditions: list[Object] = []
    entries: list[Object] = [{"name": "law"}]
    shown = []
    for reports in states:
        found = adapter_failed(["law"], reports, conditions, entries)
        conditions = [] if found is None else [{"type": "AdapterFailed", "message": found.message}]
        entries = adapters_status(entries, reports, has_engines=bool(reports))
        shown.append((found and found.message, entries[0].get("error")))
    message = "spec.adapters law is not loaded by 1 of 1 engines: a: no file"
    assert shown == [(message, "no file")] * 6 + [(None, None)]


def test_largest_status_is_bounded_and_valid() -> None:
    names = [f"{number:03}" + "n" * 125 for number in range(256)]
    reports = {f"{pod:03}" + "p" * 200: {n: AdapterReport(False, "e" * 512) for n in names} for pod in range(300)}
    entries = adapters_status(
        [{"name": name, "since": "2026-01-01T00:00:00.000001Z"} for name in names], reports, has_engines=True
    )
    assert len(json.dumps(entries)) < 96 * 1024
    found = parse(builders.service(tiers={"serve": {}}) | {"status": {"adapters": entries}})
    assert len(found.status.adapters) == 256


@pytest.mark.parametrize("name_chars", [40, 119])
def test_service_with_the_largest_adapters_is_read_whole(name_chars: int) -> None:
    """The operator's own status must not make an object that the spec allows too large."""
    names = [f"{number:03}" + "n" * (name_chars - 3) for number in range(256)]
    uri = "hf://a/" + "u" * (128 - name_chars - 7)
    raw = service("chat", *names)
    raw["spec"]["adapters"] = [{"name": name, "uri": uri} for name in names]
    assert isinstance(parse(raw), InferenceService)
    reports = {f"{pod:03}" + "p" * 200: {n: AdapterReport(False, "e" * 512) for n in names} for pod in range(300)}
    granted = [{"name": name, "since": "2026-01-01T00:00:00.000001Z"} for name in names]
    raw["status"] = {"adapters": adapters_status(granted, reports, has_engines=True)}
    assert measure(raw)[0] < 0.95 * MAX_SERVICE_BYTES
    raw["spec"]["adapters"][0]["uri"] += "u"
    with pytest.raises(InvalidSpec, match=r"spec.adapters.*at most 32768 characters"):
        parse(raw)


def test_failure_has_engines_words_and_ends_with_them() -> None:
    bad = AdapterReport(False, "rank 64 is above 16")
    failed = adapter_failed(["sql", "law"], {"a": {"sql": LOADED, "law": bad}, "b": {"law": bad}})
    assert failed is not None
    assert failed.message == "spec.adapters law is not loaded by 2 of 2 engines: a: rank 64 is above 16"
    stored = [{"type": "AdapterFailed", "message": failed.message}]
    kept = adapter_failed(["sql", "law"], {}, stored)
    assert kept is not None
    assert kept.message == failed.message
    assert adapter_failed(["sql", "law"], {"a": {"sql": LOADED, "law": LOADED}}, stored) is None
    assert adapter_failed([], {}, stored) is None


def test_engine_report_of_adapters_is_bounded() -> None:
    adapters: list[Any] = [{"name": "sql", "loaded": True, "error": None}, {"name": "law", "error": "e" * 9999}]
    document = {"version": 1, "adapters": [*adapters, 7, {"name": 3}, {}]}
    _, progress = parse_engine_info(json.dumps(document).encode())
    assert progress.adapters == {"sql": LOADED, "law": AdapterReport(False, "e" * 512)}
    for other in (None, {}, "x"):
        assert parse_engine_info(json.dumps({"version": 1, "adapters": other}).encode())[1].adapters is None


def test_adapters_claim_names_like_services() -> None:
    chat, sql, law = read_claims(service("chat", "sql", "law", granted=("sql",)))
    assert [one.qualified_name for one in (chat, sql, law)] == ["team/chat", "team/chat/sql", "team/chat/law"]
    assert [one.is_granted for one in (sql, law)] == [True, False]
    assert (sql.service, sql.adapter) == (("team", "chat"), "sql")
    owners = resolve_owners([chat, sql, law])
    assert served_names(sql, owners) == ("sql", "team/chat/sql")
    assert served_names(law, owners) == ("team/chat/law",)


def test_taken_adapter_name_is_a_condition_and_no_grant() -> None:
    other = service("other", namespace="prod", model={"uri": "hf://a/b", "name": "sql"})
    other["status"] = {"nameClaim": "sql since 2026-01-01T00:00:00.000001Z"}
    objects = cache(other, chat := service("chat", "sql", "law"))
    states = [name_state(claim, related_claims(objects, claim), RULES) for claim in read_claims(chat)[1:]]
    rejected = adapter_name_rejected(states)
    assert rejected is not None
    assert rejected.message == (
        "spec.adapters sql: service prod/other holds the name since 2026-01-01T00:00:00Z; clients reach this adapter as"
        " team/chat/sql. Change its name to get a name of its own."
    )
    now = datetime(2026, 1, 3, tzinfo=UTC)
    records = [grant_time(state.claim, related_claims(objects, state.claim), RULES, now) for state in states]
    assert records == [None, "2026-01-03T00:00:00.000000Z"]


def test_model_name_of_an_adapter_is_taken_for_services() -> None:
    chat = service("chat", "sql", granted=("sql",))
    other = service("other", namespace="prod", model={"uri": "hf://a/b", "name": "sql"})
    objects = cache(chat, other)
    (claim,) = read_claims(other)
    state = name_state(claim, related_claims(objects, claim), RULES)
    assert state.holder is not None
    assert state.holder.holder_text == "adapter sql of service team/chat"


def test_removed_adapter_concerns_those_who_want_its_name() -> None:
    chat, other = service("chat", "sql", granted=("sql",)), service("other", "sql", namespace="prod")
    objects = cache(chat, other)
    assert ("prod", "other") in affected_services(objects, chat, service("chat"))
    assert affected_services(objects, chat, chat) == []


def test_gateway_serves_granted_adapter_names_only() -> None:
    catalog = build_catalog([service("chat", "sql", "law", granted=("sql",))], [])
    entry = catalog.services["team/chat"]
    assert catalog.by_name.keys() == {"team/chat", "sql", "team/chat/sql", "team/chat/law"}
    assert all(found is entry for found in catalog.by_name.values())
    assert entry.adapters["sql"] is entry.adapters["team/chat/sql"]
    assert entry.names == ("team/chat",)


def test_hostile_adapters_are_ignored() -> None:
    for adapters in (7, "x", [None, 3, {"name": 4}, {"uri": "x"}], {"name": "a"}):
        made = service("chat")
        made["spec"]["adapters"] = made["status"]["adapters"] = adapters
        assert len(read_claims(made)) == 1
        assert build_catalog([made], []).services["team/chat"].adapters == {}
