"""Methods of the picker's TCP port, which the kubelet, Prometheus and the operator ask."""

from __future__ import annotations

import re

import pytest

from plimsoll.gateway.http1 import HttpRequest
from plimsoll.gateway.routes import AdminEndpoint
from tests.gateway.kube_objects import service
from tests.gateway.picker_harness import PickerHarness


def call_endpoint(method: bytes, path: bytes) -> bytes:
    endpoint = AdminEndpoint(PickerHarness(service()).picker, "gw-1", lambda: True, lambda: "")
    reply = endpoint(HttpRequest(method, path, {}, b""))
    assert isinstance(reply, bytes)
    return reply


@pytest.mark.parametrize("path", [b"/healthz", b"/readyz", b"/signals", b"/none"])
def test_head_is_get_without_its_body(path: bytes) -> None:
    got, head = call_endpoint(b"GET", path), call_endpoint(b"HEAD", path)
    assert without_length(head) == without_length(got[: got.index(b"\r\n\r\n") + 4])


def without_length(head: bytes) -> bytes:
    """Headers without the length of a body that has times in it."""
    without, number = re.subn(rb"content-length: \d+", b"content-length:", head)
    assert number == 1
    return without


def test_other_method_names_what_is_allowed() -> None:
    reply = call_endpoint(b"POST", b"/healthz")
    assert reply.startswith(b"HTTP/1.1 405 ")
    assert b"allow: GET, HEAD" in reply
