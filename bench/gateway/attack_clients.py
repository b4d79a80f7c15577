"""The attackers of `bench.gateway.attacks`: clients of one source address, bounded in number and time.

Each attack returns how often each outcome was seen. An outcome is a status with the gateway's reason, `closed` for a
connection that the gateway ended without a response, or `open` for one that still waits at the end.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from tests.gateway.quantity_attacks import BODY_BYTES, HEAD, half_send_http2, slow_reader

SOURCE = "127.0.0.2"
MAX_BODY_BYTES = 8 << 20
PIECE_BYTES = 1 << 16
PARSER_BYTES_PER_S = 3e6
SILENT_SOCKETS = 15_000  # of the 20,000 open files of a process here
Outcomes = Counter[str]
Pieces = AsyncIterator[bytes]
NEEDS_RETRY_AFTER = ("429", "503")


def describe(headers: dict[str, str]) -> str:
    """Returns the outcome of a response with these headers, in lower case."""
    status = headers[":status"]
    outcome = f"{status} {headers.get('x-plimsoll-reason', '')}".strip()
    is_complete = status not in NEEDS_RETRY_AFTER or "retry-after" in headers
    return outcome if is_complete else f"{outcome} without Retry-After"


def describe_head(head: bytes) -> str:
    first, *lines = head.decode("latin-1").lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines if ": " in line)
    return describe({":status": first.split(" ")[1], **headers})


async def send(port: int, pieces: Pieces, end_s: float) -> str:
    """Send a request over a new connection, up to its response or the end. Returns the outcome."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(SOURCE, 0))
    except OSError:
        return "refused connection"

    async def write() -> None:
        async for piece in pieces:
            writer.write(piece)
            await writer.drain()

    writing = asyncio.create_task(write())
    try:
        async with asyncio.timeout(max(0.0, end_s - time.monotonic())):
            return describe_head(await reader.readuntil(b"\r\n\r\n"))
    except TimeoutError:
        return "open"
    except (ConnectionError, asyncio.IncompleteReadError):
        return "closed"
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        writer.transport.abort()


async def lanes(count: int, port: int, seconds: float, pieces: Callable[[], Pieces], pause_s: float = 0.5) -> Outcomes:
    """Some clients at a time, each of which sends its next request after a response."""
    found: Outcomes = Counter()
    end_s = time.monotonic() + seconds

    async def lane(number: int) -> None:
        await asyncio.sleep(number / count)
        while time.monotonic() < end_s:
            found[await send(port, pieces(), end_s)] += 1
            await asyncio.sleep(min(pause_s, max(0.0, end_s - time.monotonic())))

    await asyncio.gather(*map(lane, range(count)))
    return found


async def whole(body: bytes) -> Pieces:
    yield HEAD.format(len(body)).encode()
    for start in range(0, len(body), PIECE_BYTES):
        yield body[start : start + PIECE_BYTES]


async def half() -> Pieces:
    piece = b"a" * PIECE_BYTES
    yield HEAD.format(BODY_BYTES).encode()
    for _ in range(BODY_BYTES // PIECE_BYTES):
        yield piece


async def slowly(body: bytes, size: int, pause_s: float) -> Pieces:
    for start in range(0, len(body), size):
        yield body[start : start + size]
        await asyncio.sleep(pause_s)


def chat(model: str, size: int) -> bytes:
    """A body of this many bytes."""
    start, end = b'{"model":"%b","messages":[{"role":"user","content":"' % model.encode(), b'"}]}'
    return start + b"a" * (size - len(start) - len(end)) + end


async def nothing(port: int, seconds: float) -> Outcomes:
    """The control: shows what the machine itself does meanwhile."""
    await asyncio.sleep(seconds)
    return Counter()


async def half_sent(port: int, seconds: float) -> Outcomes:
    return await lanes(200, port, seconds, half)


async def half_sent_http2(port: int, seconds: float) -> Outcomes:
    found: Outcomes = Counter()
    end_s = time.monotonic() + seconds

    async def connection() -> None:
        while time.monotonic() < end_s:
            try:
                responses = await asyncio.to_thread(half_send_http2, port, 120)
            except OSError:
                found["closed"] += 1
                continue
            found.update(describe({k.decode(): v.decode() for k, v in headers.items()}) for headers in responses)

    await asyncio.gather(*(connection() for _ in range(3)))
    return found


async def slow_bodies(port: int, seconds: float) -> Outcomes:
    body = HEAD.format(MAX_BODY_BYTES).encode() + chat("vision", MAX_BODY_BYTES)
    return await lanes(300, port, seconds, lambda: slowly(body, 4096, 0.2))


async def largest_bodies(port: int, seconds: float) -> Outcomes:
    body = chat("vision", MAX_BODY_BYTES)
    return await lanes(60, port, seconds, lambda: whole(body), 2.0)


async def held_requests(port: int, seconds: float) -> Outcomes:
    body = chat("busy", 256 << 10)
    return await lanes(500, port, seconds, lambda: whole(body), 2.0)


async def silent_sockets(port: int, seconds: float) -> Outcomes:
    end_s = time.monotonic() + seconds
    sockets = await asyncio.to_thread(lambda: [silent_socket(port) for _ in range(SILENT_SOCKETS)])
    await asyncio.sleep(max(0.0, end_s - time.monotonic()))
    return Counter(map(state_of, sockets))


def silent_socket(port: int) -> socket.socket:
    client = socket.socket()
    client.bind((SOURCE, 0))
    client.connect(("127.0.0.1", port))
    client.setblocking(False)
    return client


def state_of(client: socket.socket) -> str:
    with client:
        try:
            return describe_head(data) if (data := client.recv(4096)) else "closed"
        except BlockingIOError:
            return "open"
        except ConnectionError:
            return "closed"


async def slow_headers(port: int, seconds: float) -> Outcomes:
    head = HEAD.format(10).encode()
    return await lanes(2000, port, seconds, lambda: slowly(head, 1, 2.0))


async def slow_readers(port: int, seconds: float) -> Outcomes:
    """The responses of this model never end; its readers take nothing."""
    body = json.dumps({"model": "flood", "messages": [], "stream": True})
    request = (HEAD.format(len(body)) + body).encode()
    clients = await asyncio.to_thread(lambda: [slow_reader(port, request) for _ in range(300)])
    await asyncio.sleep(seconds)
    for client in clients:
        client.setblocking(False)
    return Counter(map(state_of, clients))


def parser_attack(*bodies: bytes) -> Callable[[int, float], Awaitable[Outcomes]]:
    """Bodies one after the other at 3 MB/s."""

    async def attack(port: int, seconds: float) -> Outcomes:
        found: Outcomes = Counter()
        end_s = due_s = time.monotonic() + seconds
        due_s -= seconds
        sending: list[asyncio.Task[str]] = []
        for number in range(1 << 30):
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if time.monotonic() >= end_s:
                break
            body = bodies[number % len(bodies)]
            due_s += len(body) / PARSER_BYTES_PER_S
            sending.append(asyncio.create_task(send(port, whole(body), end_s)))
        found.update(await asyncio.gather(*sending))
        return found

    return attack


def field(name: str, value: bytes) -> bytes:
    return b'{"model":"vision","messages":[],"%b":%b}' % (name.encode(), value)


def filled(unit: bytes, separator: bytes = b",") -> bytes:
    """A unit as often as the largest body takes."""
    return separator.join([unit] * ((MAX_BODY_BYTES - 200) // (len(unit) + len(separator))))


def bodies_by_attack() -> Iterator[tuple[str, tuple[bytes, ...]]]:
    depth = (MAX_BODY_BYTES - 200) // 2
    lists = b"[" * depth + b"]" * depth, b"[" + filled(b"[]") + b"]"
    yield "nested lists of 8 MiB", tuple(field(name, value) for name in ("prompt", "stop") for value in lists)
    message = b'{"role":"user","content":"a"}'
    yield "100,000 messages", (b'{"model":"vision","messages":[' + b",".join([message] * 100_000) + b"]}",)
    numbers = b"9" * (MAX_BODY_BYTES - 200), b"[" + filled(b"9" * 4000) + b"]", b"[" + filled(b"1e308") + b"]"
    yield "huge numbers", tuple(field(name, value) for name in ("max_tokens", "prompt") for value in numbers)
    schema = b'{"properties":{"a":' * 60 + b"{}" + b"}}" * 60
    schemas = b"[" + filled(schema) + b"]", b'{"properties":{"a":' * 300_000 + b"{}" + b"}}" * 300_000
    yield "deep schemas", tuple(field(name, value) for name in ("tools", "response_format") for value in schemas)
    yield "escaped text", (field("prompt", b'"' + filled(rb"\u0061", b"") + b'"'),)
    keys = b",".join(b'"%d":0' % number for number in range(700_000))
    yield "700,000 keys", (field("metadata", b"{" + keys + b"}"),)


def attacks() -> dict[str, Callable[[int, float], Awaitable[Outcomes]]]:
    """Returns all attacks by name: functions of the gateway's port and a time in seconds."""
    return {
        "none (control)": nothing,
        "half-sent bodies, 200 connections": half_sent,
        "half-sent bodies, 360 HTTP/2 streams": half_sent_http2,
        "slow bodies, 300 connections": slow_bodies,
        "bodies of 8 MiB, 60 connections": largest_bodies,
        "held requests of 256 KiB, 500 connections": held_requests,
        f"silent sockets, {SILENT_SOCKETS:,}": silent_sockets,
        "slow headers, 2,000 connections": slow_headers,
        "slow readers, 300 streams": slow_readers,
        **{f"{name}, 3 MB/s": parser_attack(*bodies) for name, bodies in bodies_by_attack()},
    }


def selected(pattern: str) -> dict[str, Callable[[int, float], Awaitable[Outcomes]]]:
    return {name: attack for name, attack in attacks().items() if re.search(pattern, name)}
