"""Large bodies of many clients in one worker process: turns, bounds, and the life of the process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import pickle
import re
import select
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from plimsoll.adapters.kube_client import WatchEvent
from plimsoll.gateway import parse_worker
from plimsoll.gateway.api_routes import CHAT_ROUTE, ApiRoute
from plimsoll.gateway.body_budget import BodyBudget
from plimsoll.gateway.errors import Rejection, RejectionReason, to_response
from plimsoll.gateway.gateway_limit import GatewayLimit
from plimsoll.gateway.http1 import HttpRequest
from plimsoll.gateway.identity import Authenticator
from plimsoll.gateway.parse_worker import ParseWorker
from plimsoll.gateway.request_body import Body
from plimsoll.gateway.request_parser import ParsedRequest, parse_body
from plimsoll.gateway.routes import EnvoyEndpoint
from plimsoll.gateway.settings import ApiKeyMode
from plimsoll.telemetry import gateway_metrics
from tests.gateway.api_key_secrets import key_of, key_secret
from tests.gateway.kube_objects import service
from tests.gateway.picker_harness import PickerHarness

MIB = 1 << 20


def body(size: int = 600 << 10) -> bytes:
    head, tail = b'{"model":"chat","messages":[{"role":"user","content":"', b'"}]}'
    return head + b"a" * (size - len(head) - len(tail)) + tail


@pytest.fixture
async def worker() -> AsyncIterator[ParseWorker]:
    made = ParseWorker()
    yield made
    made.close()


class Order:
    """The clients of the bodies that were parsed, in order."""

    def __init__(self, worker: ParseWorker) -> None:
        self.clients: list[str] = []
        self._worker = worker

    def send(self, client: str, sent: bytes) -> asyncio.Task[ParsedRequest | Rejection]:
        async def parse() -> ParsedRequest | Rejection:
            result = await self._worker.parse(sent, CHAT_ROUTE, client)
            self.clients.append(client)
            return result

        return asyncio.create_task(parse())


def waiting_bytes() -> float | None:
    return gateway_metrics.GATEWAY.get_sample_value("plimsoll_gateway_parse_bytes")


async def test_clients_take_turns_in_the_worker(worker: ParseWorker) -> None:
    order = Order(worker)
    tasks = [order.send("hostile", body()) for _ in range(6)]
    await asyncio.sleep(0)
    tasks += [order.send("good", body()), order.send("other", body())]
    assert all(isinstance(result, ParsedRequest) for result in await asyncio.gather(*tasks))
    assert {order.clients.index("good"), order.clients.index("other")} <= {1, 2, 3}
    assert waiting_bytes() == 0


async def test_bodies_of_one_client_are_bounded_with_429(worker: ParseWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse_worker, "MAX_CLIENT_BYTES", 4 * MIB)
    order = Order(worker)
    tasks = [order.send("hostile", body(MIB)) for _ in range(7)]
    await asyncio.sleep(0)
    assert waiting_bytes() == parse_worker.MAX_CLIENT_BYTES
    tasks.append(order.send("good", body(MIB)))
    results = await asyncio.gather(*tasks)
    rejections = [result for result in results if isinstance(result, Rejection)]
    assert [rejection.limit for rejection in rejections] == [GatewayLimit.CLIENT_PARSE_BYTES] * 3
    assert isinstance(results[-1], ParsedRequest)
    reply = to_response(rejections[0], Random(0))
    assert (reply.status, reply.error["code"], "retry-after" in reply.headers) == (429, "gateway_full", True)


async def test_bodies_of_all_clients_are_bounded(worker: ParseWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse_worker, "MAX_BYTES", 2 * MIB)
    order = Order(worker)
    results = await asyncio.gather(*(order.send(f"client-{n}", body(MIB)) for n in range(3)))
    rejections = [(r.reason, r.limit) for r in results if isinstance(r, Rejection)]
    assert rejections == [(RejectionReason.GATEWAY_BUSY, GatewayLimit.PARSE_BYTES)]


async def test_single_body_above_the_clients_bound_is_parsed(
    worker: ParseWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parse_worker, "MAX_CLIENT_BYTES", 1)
    assert isinstance(await worker.parse(body(), CHAT_ROUTE, "a"), ParsedRequest)


async def test_body_of_a_client_that_left_is_not_parsed(worker: ParseWorker) -> None:
    order = Order(worker)
    first, gone, last = (order.send("a", body()) for _ in range(3))
    await asyncio.sleep(0)
    gone.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await gone
    assert waiting_bytes() == 3 * len(body())  # the queue holds it until its turn
    await asyncio.gather(first, last)
    assert (order.clients, waiting_bytes()) == (["a", "a"], 0)


def processes() -> set[int | None]:
    return {process.pid for process in multiprocessing.active_children()}


async def test_killed_process_is_replaced(worker: ParseWorker) -> None:
    before = processes()
    assert isinstance(await worker.parse(body(), CHAT_ROUTE, "a"), ParsedRequest)
    (process,) = (one for one in multiprocessing.active_children() if one.pid not in before)
    process.kill()
    process.join()
    await worker.parse(body(), CHAT_ROUTE, "a")  # it may find the broken pool
    assert isinstance(await worker.parse(body(), CHAT_ROUTE, "a"), ParsedRequest)


async def test_process_that_cannot_start_is_logged_once(
    worker: ParseWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the picker's start, before a client's body needs it."""
    monkeypatch.setattr(parse_worker, "_end_with_parent", partial(os._exit, 1))
    logged, met, log_end = threading.Event(), threading.Event(), worker._log_end

    def wait(_: logging.LogRecord) -> bool:
        """The event loop meets the broken pool while a thread of the pool logs its end."""
        logged.set()
        return met.wait(60.0)

    def meet() -> None:
        if logged.is_set():
            met.set()
        log_end()

    monkeypatch.setattr(parse_worker.log, "filters", [wait])
    monkeypatch.setattr(worker, "_log_end", meet)
    worker.start()
    assert await asyncio.to_thread(logged.wait, 60.0)
    result = await worker.parse(body(), CHAT_ROUTE, "a")
    assert isinstance(result, Rejection)
    assert result.reason is RejectionReason.GATEWAY_BUSY
    assert [message.partition(" ended")[0] for message in caplog.messages] == [
        "The process that parses request bodies above 64 KiB"
    ]


async def test_pieces_of_a_body_are_sent_one_by_one(worker: ParseWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """To copy a whole body at once would keep the event loop from running."""
    sizes: list[int] = []
    submit = ProcessPoolExecutor.submit

    def record(pool: ProcessPoolExecutor, call: Any, *args: Any, **named: Any) -> Any:
        sizes.append(len(pickle.dumps((args, named))))
        return submit(pool, call, *args, **named)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", record)
    text = body(4 * MIB)
    pieces = tuple(text[start : start + 200_000] for start in range(0, len(text), 200_000))
    found = await worker.parse(pieces, CHAT_ROUTE, "a")
    assert isinstance(found, ParsedRequest)
    assert found == await worker.parse(text, CHAT_ROUTE, "a") == parse_body(text)
    assert max(sizes) < parse_worker.SEND_BYTES + 300_000


async def test_body_after_one_that_was_sent_in_part_is_whole(worker: ParseWorker) -> None:
    worker.start()
    assert worker._pool is not None
    await asyncio.wrap_future(worker._pool.submit(parse_worker._receive, (b"half of a body",), is_first=True))
    assert isinstance(await worker.parse(body(), CHAT_ROUTE, "a"), ParsedRequest)


async def test_large_form_is_parsed_in_the_worker() -> None:
    clients = Clients()
    endpoint = EnvoyEndpoint(PickerHarness(service("chat")).picker, clients, BodyBudget(MIB * 16, MIB * 8))
    request = HttpRequest(b"POST", b"/check/v1/audio/transcriptions", {}, (b"a" * MIB, b"a" * MIB))
    reply = endpoint(request)
    assert not isinstance(reply, bytes | AsyncIterator)
    await reply
    assert len(clients.clients) == 1


async def test_grown_process_is_replaced(worker: ParseWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse_worker, "MAX_PROCESS_BYTES", 0)
    before = processes()
    for _ in range(2):
        assert isinstance(await worker.parse(body(), CHAT_ROUTE, "a"), ParsedRequest)
    assert len(processes() - before) >= 2


async def test_failure_of_one_body_affects_no_other(worker: ParseWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(parse_worker, "_parse", lambda route, content_type: None)  # cannot be sent to the process
        result = await worker.parse(body(), CHAT_ROUTE, "a")
    assert isinstance(result, Rejection)
    assert isinstance(await worker.parse(body(), CHAT_ROUTE, "b"), ParsedRequest)
    assert waiting_bytes() == 0


async def test_process_starts_before_the_first_body(worker: ParseWorker) -> None:
    before = processes()
    worker.start()
    assert len(processes() - before) == 1


class Clients(ParseWorker):
    """Records who sends large bodies."""

    def __init__(self) -> None:
        super().__init__()
        self.clients: list[str] = []

    async def parse(
        self, body: Body, route: ApiRoute, client: str, content_type: bytes = b""
    ) -> ParsedRequest | Rejection:
        self.clients.append(client)
        return parse_worker.BUSY_REJECTION


async def test_envoy_endpoint_tells_the_worker_the_client() -> None:
    made = Authenticator(ApiKeyMode.OPTIONAL)
    made.keys.apply(WatchEvent("SYNC", objects=(key_secret("ci"),)))
    clients = Clients()
    endpoint = EnvoyEndpoint(
        PickerHarness(service("chat"), authenticator=made).picker, clients, BodyBudget(MIB * 16, MIB * 8)
    )
    for sent in ({b"x-api-key": key_of("ci").encode()}, {b"x-forwarded-for": b"10.9.9.9, 2001:db8::7"}):
        reply = endpoint(HttpRequest(b"POST", b"/check/v1/chat/completions", sent, body()))
        assert not isinstance(reply, bytes | AsyncIterator)
        await reply
    assert clients.clients == ["key ci", "source 2001:db8::/64"]


PICKER = """
import signal
from plimsoll.gateway.parse_worker import ParseWorker, _nothing
if __name__ == "__main__":
    worker = ParseWorker()
    worker.start()
    worker._pool.submit(_nothing).result()
    print(*worker._pool._processes, flush=True)
    signal.pause()
"""


def test_killed_picker_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "picker.py"
    script.write_text(PICKER)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE) as picker:
        assert picker.stdout is not None
        process = os.pidfd_open(int(picker.stdout.readline()))
        assert not select.select([process], [], [], 0.0)[0], "it runs while its picker does"
        picker.kill()
    ended, _, _ = select.select([process], [], [], 60.0)
    os.close(process)
    assert ended


def test_image_program_does_nothing_in_a_child_process(tmp_path: Path) -> None:
    dockerfile = Path(__file__).resolve().parents[2] / "operator" / "Dockerfile"
    [text] = re.findall(r"printf '(#!/opt/plimsoll/bin/python.*?)'", dockerfile.read_text(), re.DOTALL)
    program = tmp_path / "plimsoll"
    program.write_text(text.encode().decode("unicode_escape"))
    as_main = subprocess.run([sys.executable, program, "--help"], capture_output=True, text=True, check=True)
    assert "usage: plimsoll" in as_main.stdout
    as_child = f"import runpy; runpy.run_path({str(program)!r}, run_name='__mp_main__')"
    assert subprocess.run([sys.executable, "-c", as_child, "--help"], capture_output=True, check=True).stdout == b""


async def test_body_is_rejected_when_no_process_can_be_started(
    worker: ParseWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("Cannot allocate memory")

    with monkeypatch.context() as broken:
        broken.setattr(worker, "start", fail)
        assert await worker.parse(body(), CHAT_ROUTE, "a") == parse_worker.BUSY_REJECTION
    assert isinstance(await worker.parse(body(), CHAT_ROUTE, "a"), ParsedRequest)
