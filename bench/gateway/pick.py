"""What one question of Envoy costs in Python, without any I/O: `python -m bench.gateway.pick`.

Prints microseconds of CPU per question (median of several rounds) by prompt size and number of endpoints, parsing,
picking, counting and the record of its end included.
"""

from __future__ import annotations

import json
import statistics
import time
from random import Random

from plimsoll.gateway.accesslog import Record
from plimsoll.gateway.endpoints import fleet
from plimsoll.gateway.picker import Picker
from tests.gateway.objects import pod, service

ROUNDS = 9


def cost(prompt_bytes: int, endpoints: int, count: int = 300) -> float:
    """Microseconds per question and record."""
    picker = Picker(Random(1))
    known = fleet([service()], [pod(f"10.0.{n // 250}.{n % 250 + 1}:8000") for n in range(endpoints)])
    picker.set_fleet(known.with_healthy({key: {e.address for e in s.endpoints} for key, s in known.services.items()}))
    body = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "x" * prompt_bytes}]}).encode()
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(count):
            reply = picker.check(body, None, 0.0)
            ticket = reply.split(b"x-plimsoll-ticket: ")[1].split(b"\r\n")[0].decode()
            picker.ended(
                Record(ticket=ticket, host="10.0.0.1:8000", code=200, flags="-", ttft_us=5, duration_us=9), 0.0
            )
        rounds.append(1e6 * (time.process_time() - began) / count)
    return statistics.median(rounds)


if __name__ == "__main__":
    for size in (2_000, 8_000, 100_000, 1_000_000):
        found = {n: round(cost(size, n, 300 if size < 1_000_000 else 30), 1) for n in (4, 32, 128)}
        print(f"{size:>9} bytes: " + "  ".join(f"{us:8.1f} us at {n} endpoints" for n, us in found.items()))
