"""What one question of Envoy costs in Python, without any I/O: `python -m bench.gateway.pick`.

Prints microseconds of CPU per question (median of several rounds) by prompt size and number of endpoints: once for a
service without a promise, parsing, picking and counting included, and once with admission; then the same for the record
of its end. A reference loop tells how fast the machine is while it runs.

Then an open loop: 500 questions a second come to one picker at random times, as do the records of their ends, whether
it is done with those before or not. What each takes is measured, in CPU time, the least of several runs of the same
questions; when it is done follows from that (Lindley's recursion). So neither timers nor what else the machine does are
taken for the picker's. Percentiles of what a question takes, and of the time from its coming to its answer. The timer's
own cost, some 0.7 us on a slow machine, is in the figures.
"""

from __future__ import annotations

import heapq
import json
import statistics
import time
from random import Random
from typing import NamedTuple

from plimsoll.cli import garbage
from plimsoll.gateway.accesslog import Record
from plimsoll.gateway.endpoints import fleet
from plimsoll.gateway.picker import Picker
from tests.gateway.gated import GATEWAY, FakeClock, promised
from tests.gateway.objects import Object, pod

ROUNDS = 9
RATE = 500.0  # questions a second
SECONDS = 20.0  # of them the first quarter is not counted
RUNS = 4
STAY_S = 2.0  # mean, at an engine
FIRST_US = 200_000  # to the first token


def cost(obj: Object, prompt_bytes: int, endpoints: int, count: int = 300) -> tuple[float, float]:
    """Microseconds per question and per record."""
    clock = FakeClock()
    picker = _picker(obj, endpoints, clock)
    asked, ended = [], []
    for _ in range(ROUNDS):
        bodies = [_body(prompt_bytes, n) for n in range(count)]
        asking_s = ending_s = 0.0
        for body in bodies:
            clock.now_s += 20.0
            began = time.process_time()
            reply = picker.check(body, {}, clock.now_s)
            asking_s += time.process_time() - began
            assert isinstance(reply, bytes)
            ticket, host = _sent_to(reply)
            record = Record(ticket=ticket, host=host, code=200, flags="-", ttft_us=5, duration_us=9, sent=900)
            began = time.process_time()
            picker.ended(record, clock.now_s)
            ending_s += time.process_time() - began
        asked.append(1e6 * asking_s / count)
        ended.append(1e6 * ending_s / count)
    return statistics.median(asked), statistics.median(ended)


def open_loop(obj: Object, endpoints: int) -> dict[str, list[float]]:
    """Microseconds that a question takes, and that it waits and takes, both in ascending order."""
    runs = [work(obj, endpoints) for _ in range(RUNS)]
    free_s = 0.0
    taken, answered = [], []
    for same in zip(*runs, strict=True):
        took_s, (come_s, _, asks) = min(one.took_s for one in same), same[0]
        free_s = max(free_s, come_s) + took_s
        if asks and come_s >= SECONDS / 4:
            taken.append(1e6 * took_s)
            answered.append(1e6 * (free_s - come_s))
    return {"taken": sorted(taken), "answered": sorted(answered)}


class Work(NamedTuple):
    """A question, or the record of an end: when it came, and CPU seconds that it took."""

    come_s: float
    took_s: float
    asks: bool


def work(obj: Object, endpoints: int) -> list[Work]:
    """What one picker does in SECONDS, in order; the same questions each time."""
    random, clock = Random(2), FakeClock()
    picker = _picker(obj, endpoints, clock)
    ends: list[tuple[float, str, Record]] = []
    done = []
    due_s = ticked_s = 0.0
    number = 0
    while due_s < SECONDS:
        due_s += random.expovariate(RATE)
        while ends and ends[0][0] <= due_s:
            clock.now_s, _, record = heapq.heappop(ends)
            began = time.thread_time()
            picker.ended(record, clock.now_s)
            done.append(Work(clock.now_s, time.thread_time() - began, False))
        clock.now_s = due_s
        if due_s >= ticked_s + 1.0:
            ticked_s = due_s
            picker.tick()
        number += 1
        body = _body(2_000, number)
        began = time.thread_time()
        reply = picker.check(body, {}, due_s)
        done.append(Work(due_s, time.thread_time() - began, True))
        assert isinstance(reply, bytes)
        ticket, host = _sent_to(reply)
        stay_s = random.expovariate(1.0 / STAY_S)
        ended = Record(ticket=ticket, host=host, code=200, flags="-", ttft_us=FIRST_US, duration_us=int(1e6 * stay_s))
        heapq.heappush(ends, (due_s + stay_s, f"{number:09}", ended))
    return done


def _picker(obj: Object, endpoints: int, clock: FakeClock) -> Picker:
    picker = Picker(Random(1), GATEWAY, clock=clock)
    known = fleet([obj], [pod(f"10.0.{n // 250}.{n % 250 + 1}:8000") for n in range(endpoints)])
    picker.set_fleet(known.with_healthy({key: {e.address for e in s.endpoints} for key, s in known.services.items()}))
    return picker


def percentiles(ordered: list[float]) -> str:
    return "  ".join(f"p{q} {ordered[int(q / 100 * (len(ordered) - 1))]:6.0f}" for q in (50, 95, 99))


def _sent_to(reply: bytes) -> tuple[str, str]:
    """Ticket and engine of a request that was let in."""
    ticket = reply.split(b"x-plimsoll-ticket: ")[1].split(b"\r\n")[0].decode()
    return ticket, reply.split(b"x-plimsoll-endpoint: ")[1].split(b"\r\n")[0].split(b",")[0].decode()


def _body(prompt_bytes: int, number: int) -> bytes:
    content = f"{number} " + "x" * prompt_bytes
    return json.dumps({"model": "chat", "stream": True, "messages": [{"role": "user", "content": content}]}).encode()


def reference() -> float:
    """Microseconds of a fixed piece of Python, by which machines and moments can be compared."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(200):
            sum(range(1000))
        rounds.append(1e6 * (time.process_time() - began) / 200)
    return statistics.median(rounds)


if __name__ == "__main__":
    garbage.look_seldom()  # as the gateway does
    print(f"reference loop {reference():.1f} us; microseconds a question + its record")
    for size in (2_000, 8_000, 100_000, 1_000_000):
        count = 300 if size < 1_000_000 else 30
        for label, obj in (("no gate", promised(model=False)), ("gate", promised(batch=50))):
            found = {n: cost(obj, size, n, count) for n in (4, 32, 128)}
            shown = "  ".join(f"{asked:7.1f} + {ended:5.1f} at {n} endpoints" for n, (asked, ended) in found.items())
            print(f"{size:>9} bytes {label:>8}: {shown}")
    print(f"open loop, {RATE:.0f} questions/s of 2,000 bytes for {SECONDS:.0f} s, microseconds of CPU")
    for label, obj in (("no gate", promised(model=False)), ("gate", promised(batch=100))):
        for n in (32, 128):
            found = open_loop(obj, n)
            shown = "; ".join(f"{name} {percentiles(values)}" for name, values in found.items())
            print(f"{label:>8} at {n} endpoints: {shown}")
