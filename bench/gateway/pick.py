"""What one question of Envoy costs in Python, without any I/O: `python -m bench.gateway.pick`.

Prints microseconds of CPU per question (median of several rounds) by prompt size and number of endpoints: once for a
service without a promise, parsing, picking and counting included, and once with admission; then the same for the record
of its end. A reference loop tells how fast the machine is while it runs.
"""

from __future__ import annotations

import json
import statistics
import time
from random import Random

from plimsoll.gateway.accesslog import Record
from plimsoll.gateway.endpoints import fleet
from plimsoll.gateway.picker import Picker
from tests.gateway.gated import GATEWAY, FakeClock, promised
from tests.gateway.objects import Object, pod

ROUNDS = 9


def cost(obj: Object, prompt_bytes: int, endpoints: int, count: int = 300) -> tuple[float, float]:
    """Microseconds per question and per record."""
    clock = FakeClock()
    picker = Picker(Random(1), GATEWAY, clock=clock)
    known = fleet([obj], [pod(f"10.0.{n // 250}.{n % 250 + 1}:8000") for n in range(endpoints)])
    picker.set_fleet(known.with_healthy({key: {e.address for e in s.endpoints} for key, s in known.services.items()}))
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
            ticket = reply.split(b"x-plimsoll-ticket: ")[1].split(b"\r\n")[0].decode()
            host = reply.split(b"x-plimsoll-endpoint: ")[1].split(b"\r\n")[0].split(b",")[0].decode()
            record = Record(ticket=ticket, host=host, code=200, flags="-", ttft_us=5, duration_us=9, sent=900)
            began = time.process_time()
            picker.ended(record, clock.now_s)
            ending_s += time.process_time() - began
        asked.append(1e6 * asking_s / count)
        ended.append(1e6 * ending_s / count)
    return statistics.median(asked), statistics.median(ended)


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
    print(f"reference loop {reference():.1f} us; microseconds a question + its record")
    for size in (2_000, 8_000, 100_000, 1_000_000):
        count = 300 if size < 1_000_000 else 30
        for label, obj in (("no gate", promised(model=False)), ("gate", promised(batch=50))):
            found = {n: cost(obj, size, n, count) for n in (4, 32, 128)}
            shown = "  ".join(f"{asked:7.1f} + {ended:5.1f} at {n} endpoints" for n, (asked, ended) in found.items())
            print(f"{size:>9} bytes {label:>8}: {shown}")
