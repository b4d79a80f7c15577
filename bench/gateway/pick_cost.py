"""CPU time of one picker request from Envoy, without I/O: `python -m bench.gateway.pick_cost`.

Prints microseconds of CPU per request (median of several rounds) by prompt size and number of endpoints: once for a
service without an SLO, including parsing, picking and counting, and once with admission control; then the same for the
access log record of its end. A reference loop shows the speed of the machine during the run.

Then an open loop: 500 requests per second arrive at one picker at random times, as do their access log records,
independent of completions. The CPU time of each is measured, the least of several runs of the same requests; its
completion follows from that (Lindley's recursion). So neither timers nor other load of the machine count as the
picker's time. Percentiles of the service time, and of the time from arrival to reply. The timer's own cost, some 0.7 us
on a slow machine, is included.
"""

from __future__ import annotations

import heapq
import json
import statistics
import time
from random import Random
from typing import NamedTuple

from plimsoll.adapters.kube_client import WatchEvent
from plimsoll.cli import gc_tuning
from plimsoll.gateway.envoy.access_log import AccessRecord
from plimsoll.gateway.identity import Authenticator
from plimsoll.gateway.picker import Picker
from plimsoll.gateway.settings import ApiKeyMode
from tests.gateway.api_key_secrets import bearer, key_secret
from tests.gateway.kube_objects import Object, catalog, pod, with_healthy
from tests.gateway.picker_harness import GATEWAY, FakeClock, service_with_slo

ROUNDS = 9
RATE = 500.0  # questions a second
SECONDS = 20.0  # of them the first quarter is not counted
RUNS = 4
REQUEST_S = 2.0  # mean, at an engine
FIRST_US = 200_000  # to the first token


def cost(obj: Object, prompt_bytes: int, endpoints: int, count: int = 300) -> tuple[float, float]:
    """Microseconds per question and per record."""
    clock = FakeClock()
    picker = _picker(obj, endpoints, clock)
    replies, records = [], []
    for _ in range(ROUNDS):
        bodies = [_body(prompt_bytes, n) for n in range(count)]
        pick_s = record_s = 0.0
        for body in bodies:
            clock.now_s += 20.0
            started = time.process_time()
            reply = picker.check(body, {}, clock.now_s)
            pick_s += time.process_time() - started
            assert isinstance(reply, bytes)
            request_id, host = _route_of(reply)
            record = AccessRecord(
                request_id=request_id, upstream=host, status=200, flags="-", ttft_us=5, duration_us=9, sent_bytes=900
            )
            started = time.process_time()
            picker.reports.on_access_record(record, clock.now_s)
            record_s += time.process_time() - started
        replies.append(1e6 * pick_s / count)
        records.append(1e6 * record_s / count)
    return statistics.median(replies), statistics.median(records)


def open_loop(obj: Object, endpoints: int) -> dict[str, list[float]]:
    """Microseconds that a question takes, and that it waits and takes, both in ascending order."""
    runs = [record_work(obj, endpoints) for _ in range(RUNS)]
    free_s = 0.0
    service_times, sojourn_times = [], []
    for repeats in zip(*runs, strict=True):
        took_s, (arrived_s, _, is_pick) = min(one.took_s for one in repeats), repeats[0]
        free_s = max(free_s, arrived_s) + took_s
        if is_pick and arrived_s >= SECONDS / 4:
            service_times.append(1e6 * took_s)
            sojourn_times.append(1e6 * (free_s - arrived_s))
    return {"taken": sorted(service_times), "answered": sorted(sojourn_times)}


class WorkItem(NamedTuple):
    """A question, or the record of an end: when it came, and CPU seconds that it took."""

    arrived_s: float
    took_s: float
    is_pick: bool


def record_work(obj: Object, endpoints: int) -> list[WorkItem]:
    """What one picker does in SECONDS, in order; the same questions each time."""
    random, clock = Random(2), FakeClock()
    picker = _picker(obj, endpoints, clock)
    completions: list[tuple[float, str, AccessRecord]] = []
    items = []
    arrival_s = last_tick_s = 0.0
    number = 0
    while arrival_s < SECONDS:
        arrival_s += random.expovariate(RATE)
        while completions and completions[0][0] <= arrival_s:
            clock.now_s, _, record = heapq.heappop(completions)
            started = time.thread_time()
            picker.reports.on_access_record(record, clock.now_s)
            items.append(WorkItem(clock.now_s, time.thread_time() - started, False))
        clock.now_s = arrival_s
        if arrival_s >= last_tick_s + 1.0:
            last_tick_s = arrival_s
            picker.tick()
        number += 1
        body = _body(2_000, number)
        started = time.thread_time()
        reply = picker.check(body, {}, arrival_s)
        items.append(WorkItem(arrival_s, time.thread_time() - started, True))
        assert isinstance(reply, bytes)
        request_id, host = _route_of(reply)
        request_s = random.expovariate(1.0 / REQUEST_S)
        completed = AccessRecord(
            request_id=request_id,
            upstream=host,
            status=200,
            flags="-",
            ttft_us=FIRST_US,
            duration_us=int(1e6 * request_s),
        )
        heapq.heappush(completions, (arrival_s + request_s, f"{number:09}", completed))
    return items


def _picker(obj: Object, endpoints: int, clock: FakeClock) -> Picker:
    picker = Picker(Random(1), GATEWAY, clock=clock)
    found = catalog([obj], [pod(f"10.0.{n // 250}.{n % 250 + 1}:8000") for n in range(endpoints)])
    picker.set_catalog(
        with_healthy(found, {key: {e.address for e in s.endpoints} for key, s in found.services.items()})
    )
    return picker


def percentiles(ordered: list[float]) -> str:
    return "  ".join(f"p{q} {ordered[int(q / 100 * (len(ordered) - 1))]:6.0f}" for q in (50, 95, 99))


def _route_of(reply: bytes) -> tuple[str, str]:
    """Ticket and engine of a request that was let in."""
    request_id = reply.split(b"x-plimsoll-request-id: ")[1].split(b"\r\n")[0].decode()
    return request_id, reply.split(b"x-plimsoll-endpoint: ")[1].split(b"\r\n")[0].split(b",")[0].decode()


def _body(prompt_bytes: int, number: int) -> bytes:
    content = f"{number} " + "x" * prompt_bytes
    return json.dumps({"model": "chat", "stream": True, "messages": [{"role": "user", "content": content}]}).encode()


def authentication_us(keys: int = 10_000, count: int = 20_000) -> float:
    """Microseconds to find and check the key of a request."""
    authenticator = Authenticator(ApiKeyMode.REQUIRED)
    authenticator.keys.apply(WatchEvent("SYNC", objects=tuple(key_secret(f"key-{n}") for n in range(keys))))
    requests = [{b"authorization": bearer(f"key-{n % keys}")["authorization"].encode()} for n in range(count)]
    rounds = []
    for _ in range(ROUNDS):
        started = time.process_time()
        for headers in requests:
            authenticator.authenticate(headers, 0.0)
        rounds.append(1e6 * (time.process_time() - started) / count)
    return statistics.median(rounds)


def reference_us() -> float:
    """Microseconds of a fixed piece of Python, by which machines and moments can be compared."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.process_time()
        for _ in range(200):
            sum(range(1000))
        rounds.append(1e6 * (time.process_time() - started) / 200)
    return statistics.median(rounds)


if __name__ == "__main__":
    gc_tuning.reduce_full_collections()  # as the gateway does
    print(f"reference loop {reference_us():.1f} us; {authentication_us():.1f} us to check one of 10,000 API keys")
    print("microseconds a question + its record")
    for size in (2_000, 8_000, 100_000, 1_000_000):
        count = 300 if size < 1_000_000 else 30
        for label, obj in (("no gate", service_with_slo(model=False)), ("gate", service_with_slo(batch=50))):
            found = {n: cost(obj, size, n, count) for n in (4, 32, 128)}
            shown = "  ".join(f"{pick:7.1f} + {record:5.1f} at {n} endpoints" for n, (pick, record) in found.items())
            print(f"{size:>9} bytes {label:>8}: {shown}")
    print(f"open loop, {RATE:.0f} questions/s of 2,000 bytes for {SECONDS:.0f} s, microseconds of CPU")
    for label, obj in (("no gate", service_with_slo(model=False)), ("gate", service_with_slo(batch=100))):
        for n in (32, 128):
            found = open_loop(obj, n)
            shown = "; ".join(f"{name} {percentiles(values)}" for name, values in found.items())
            print(f"{label:>8} at {n} endpoints: {shown}")
