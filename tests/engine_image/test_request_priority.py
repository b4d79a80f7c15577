"""The priority of a request's class, from the gateway's header into the body of engines that schedule by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.request_body import with_priority, without_priority
from launcher.vllm import schedules_by_priority
from tests.engine_image.middleware_harness import CHAT_PATH, completion_engine, make_harness

HEADER = {"x-plimsoll-priority": "-100"}
REMOTE_PREFILL = {"x-plimsoll-remote-prefill": "prefill"}


async def test_class_priority_replaces_the_clients(tmp_path: Path) -> None:
    async with make_harness(completion_engine(), "serve", tmp_path, by_priority=True) as one:
        for body in ({"model": "a"}, {"model": "a", "priority": -(10**9)}):
            await one.send(body, CHAT_PATH, HEADER)
        await one.send({"model": "a", "priority": -3}, CHAT_PATH)
        await one.send({"model": "a"}, CHAT_PATH)
        counted = one.count("prioritized_requests")
    assert [request.get("priority") for request in one.engine.requests] == [-100, -100, 0, None]
    assert counted == 2


async def test_prefill_engine_keeps_the_priority_of_the_decode_engine(tmp_path: Path) -> None:
    async with make_harness(completion_engine(), "prefill", tmp_path, by_priority=True) as one:
        await one.send({"model": "a", "priority": -100}, CHAT_PATH, REMOTE_PREFILL)
        await one.send({"model": "a", "priority": -100}, CHAT_PATH)
    assert [request["priority"] for request in one.engine.requests] == [-100, 0]


async def test_engine_without_the_policy_gets_no_priority(tmp_path: Path) -> None:
    async with make_harness(completion_engine(), "serve", tmp_path) as one:
        await one.send({"model": "a"}, CHAT_PATH, HEADER)
    assert one.engine.requests == [{"model": "a"}]


@pytest.mark.parametrize("body", [b'{"prompt":"\\u0061"}', b'{"prompt":"priority"}', b'["priority"]'])
def test_body_without_a_priority_stays_as_it_is(body: bytes) -> None:
    assert without_priority(body) is body


@pytest.mark.parametrize("body", [b"[]", b"no json", b""])
def test_priority_of_no_object_is_left_to_the_engine(body: bytes) -> None:
    assert with_priority(body, 1) is body


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--scheduling-policy", "priority"], True),
        (["--scheduling_policy=priority"], True),
        (["--scheduling-policy=fcfs"], False),
        ([], False),
    ],
)
def test_scheduling_policy_is_read_from_arguments(args: list[str], expected: bool) -> None:
    assert schedules_by_priority(args) is expected
