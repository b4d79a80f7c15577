"""What the API allows to be null, absent or of another type is absent for every reader."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from plimsoll.adapters import kube_client
from plimsoll.adapters.kube_client import PODS, KubeClient
from plimsoll.adapters.lease import RenewalLeaseLock
from plimsoll.adapters.normalize import MAX_DEPTH, epoch_s, normalize, value_at
from plimsoll.telemetry import operator_metrics

Object = dict[str, Any]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
POD: Object = {
    "kind": "Pod",
    "metadata": {
        "name": "p",
        "labels": None,
        "annotations": {"a": None, "b": "c"},
        "newField": {"x": None, "y": [None]},
    },
    "status": {"conditions": [None, "odd", {"type": "Ready", "status": 1}], "phase": ["Running"]},
}
CLEAN: Object = {
    "kind": "Pod",
    "metadata": {"name": "p", "annotations": {"b": "c"}, "newField": {"y": []}},
    "spec": {},
    "status": {"conditions": [{"type": "Ready"}]},
}


def has_null(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(map(has_null, parts))


def test_normalize_nulls_and_other_types_are_absent() -> None:
    assert normalize(POD) == CLEAN


def test_normalize_does_not_change_the_object_given() -> None:
    before = json.dumps(POD)
    normalize(POD)
    assert json.dumps(POD) == before


def test_normalize_a_flag_is_no_number() -> None:
    found = normalize({"kind": "Deployment", "spec": {"replicas": True}, "status": {"readyReplicas": 2}})
    assert (found["spec"], found["status"]) == ({}, {"readyReplicas": 2})


def test_normalize_keeps_the_spec_of_a_service() -> None:
    spec = {"model": {"name": 5}, "tiers": "wrong"}
    assert normalize({"kind": "InferenceService", "spec": spec})["spec"] == spec


@given(
    st.dictionaries(st.sampled_from(["kind", "metadata", "spec", "status", "data"]), JSON), st.sampled_from(["Pod", ""])
)
def test_normalize_any_json_has_no_null(obj: Object, kind: str) -> None:
    found = normalize(obj | ({"kind": kind} if kind else {}))
    assert not has_null(found)
    assert normalize(found) == found
    assert isinstance(found["metadata"], dict)


@pytest.mark.parametrize("text", [None, "", 5, "soon"])
def test_epoch_s_of_no_time_is_none(text: object) -> None:
    assert epoch_s(text) is None


def test_epoch_s_without_a_zone_is_utc() -> None:
    assert epoch_s("1970-01-01T00:00:10") == epoch_s("1970-01-01T00:00:10.000000Z") == 10.0


def test_value_at_a_path_through_no_mapping_is_none() -> None:
    assert value_at({"spec": {"model": "tiny"}}, "spec", "model", "name") is None
    assert value_at({"spec": {"model": {"name": "n"}}}, "spec", "model", "name") == "n"


class Answering(KubeClient):
    """A server that answers every request with one document."""

    def __init__(self, document: Object) -> None:
        self.document = document

    async def _json(self, *_: Any) -> Object:
        return self.document

    async def _page(self, *_: Any, **__: Any) -> Object:
        return self.document

    async def _send(self, *_: Any, **__: Any) -> Any:
        return type("Answer", (), {"response": None})()


async def test_kube_answers_are_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Answering({**POD, "items": [POD]})
    assert (await server.get(PODS, "n", "p"))["metadata"] == CLEAN["metadata"]
    assert (await server.list(PODS))[0] == [{**CLEAN, "apiVersion": "v1"}]
    assert (await server.apply(POD, "m"))["metadata"] == CLEAN["metadata"]
    assert (await server.create(POD))["metadata"] == CLEAN["metadata"]

    async def lines(_: Any) -> AsyncIterator[bytes]:
        versioned = {**POD, "metadata": {**POD["metadata"], "resourceVersion": "7"}}
        yield json.dumps({"type": "MODIFIED", "object": versioned}).encode()
        yield b"not JSON"

    monkeypatch.setattr(kube_client, "read_lines", lines)
    following = server._follow(PODS, None, None, "1")
    assert (await anext(following)).object["status"] == CLEAN["status"]  # type: ignore[call-overload]


@pytest.mark.parametrize("line", [b'{"type": "ADDED"}', b'{"a": ' * 9000 + b"1" + b"}" * 9000], ids=["short", "deep"])
async def test_kube_watch_lists_again_after_a_broken_line(monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    async def lines(_: Any) -> AsyncIterator[bytes]:
        yield line

    async def no_delay(_: float) -> None:
        return None

    monkeypatch.setattr(kube_client, "read_lines", lines)
    monkeypatch.setattr(kube_client.asyncio, "sleep", no_delay)
    watching = Answering({"items": []}).watch(PODS)
    assert [(await anext(watching)).type for _ in range(2)] == ["SYNC", "SYNC"]


@pytest.mark.parametrize(("code", "failures"), [(410, 0), (500, 1), (None, 1)])
async def test_watch_lists_again_after_an_error_event(
    monkeypatch: pytest.MonkeyPatch, code: int | None, failures: int
) -> None:
    """An expired version is ordinary. Any other error is a failure of the watch."""

    async def lines(_: Any) -> AsyncIterator[bytes]:
        status = {"kind": "Status", "code": code, "message": "etcd event received with PrevKv=nil"}
        yield json.dumps({"type": "ERROR", "object": status}).encode()

    async def no_delay(_: float) -> None:
        return None

    monkeypatch.setattr(kube_client, "read_lines", lines)
    monkeypatch.setattr(kube_client.asyncio, "sleep", no_delay)
    counter = operator_metrics.OPERATOR_WATCH_FAILURES.labels("pods")
    before = counter._value.get()
    watching = Answering({"items": []}).watch(PODS)
    assert [(await anext(watching)).type for _ in range(2)] == ["SYNC", "SYNC"]
    assert counter._value.get() - before == failures


async def test_lease_that_cannot_be_read_is_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> Any:
        raise ValueError("renewTime is no time")

    monkeypatch.setattr(LeaseLock, "get", broken)
    lock = RenewalLeaseLock("n", "ns", "me", None, 1.0)
    found, error = await lock.get("n", "ns")
    assert (found, error.reason) == (False, "ValueError: renewTime is no time")


def test_normalize_cuts_what_is_nested_too_deep() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = {"a": [deep]}
    found: Any = normalize({"kind": "InferenceService", "spec": {"deep": deep, "kept": {"a": 1}}})
    assert found["spec"]["kept"] == {"a": 1}
    levels, value = 0, found["spec"]["deep"]
    while value:
        levels, value = levels + 1, value.get("a") if isinstance(value, dict) else value[0]
    assert 50 < levels < MAX_DEPTH
