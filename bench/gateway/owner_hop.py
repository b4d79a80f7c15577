"""Cost of asking the owner gateway: `python -m bench.gateway.owner_hop`.

Two pickers in two processes on 127.0.0.1, without Envoy. The same requests, one after the other, go to a service that
the receiving picker owns, and to one that the other owns. Prints percentiles of the time to the reply in both cases,
the difference, and CPU of both processes per request with 32 requests at a time. On a busy machine the tenth percentile
is the least disturbed.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from plimsoll.gateway.one_queue.ownership import Ownership
from tests.gateway.kube_objects import pod
from tests.gateway.one_queue_harness import SECRET, Gateway, make_catalog
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.stack import wait_until
from tests.ports import free_port

NAMES = ("gateway-0", "gateway-1")
LINE = "{:14} p10 {:6.0f} us   p50 {:6.0f} us   p99 {:6.0f} us   CPU {:5.0f} us"
REQUESTS = 640
AT_ONCE = 32
PROMPT = "a prompt of some length. " * 80  # 2 KB: four blocks of a prefix


def model_owned_by(name: str) -> str:
    """Returns the name of a service that a gateway owns."""
    table = Ownership(NAMES[0])
    table.set_candidates(NAMES)
    return next(f"model-{n}" for n in range(100) if table.owner_of(f"team/model-{n}") == name)


async def start(number: int, port: int, secret: Path) -> Gateway:
    """Returns one gateway that serves a service of each owner."""
    gateway = Gateway(number, port, secret, ack_seconds=1.0, authenticator=None)
    models = [model_owned_by(name) for name in NAMES]
    services = tuple(service_with_slo(model, batch=500) for model in models)
    pods = tuple(pod(f"10.0.{n}.{m}:8000", service=model) for n, model in enumerate(models) for m in range(4))
    gateway.picker.set_catalog(make_catalog(services, pods))
    await gateway.queue.start()
    gateway.queue.set_pods({name: f"127.0.0.{n + 1}" for n, name in enumerate(NAMES)}, NAMES)
    return gateway


def serve(port: int, secret: Path, control: Connection) -> None:
    """Run the other gateway, and report its CPU time in seconds on each line of input."""

    async def run() -> None:
        await start(1, port, secret)
        while await asyncio.to_thread(control.recv):
            control.send(time.process_time())

    uvloop.run(run())


async def latencies(gateway: Gateway, model: str) -> list[float]:
    """Microseconds from a request to its reply, in ascending order, of one request at a time."""
    found = []
    for number in range(REQUESTS):
        started = time.perf_counter()
        reply = await gateway.ask(f"{PROMPT}{number}", model)
        found.append(1e6 * (time.perf_counter() - started))
        gateway.complete(reply)
    return sorted(found[REQUESTS // 10 :])


async def cpu_us(gateway: Gateway, model: str, control: Connection) -> float:
    """Microseconds of CPU of both processes per request and record, with many requests at a time."""

    def spent_s() -> float:
        control.send(True)
        return time.process_time() + float(control.recv())

    async def client(number: int) -> None:
        for turn in range(REQUESTS // AT_ONCE):
            gateway.complete(await gateway.ask(f"{PROMPT}{number} {turn}", model))

    before = spent_s()
    await asyncio.gather(*map(client, range(AT_ONCE)))
    await asyncio.sleep(0.1)
    return 1e6 * (spent_s() - before) / (REQUESTS // AT_ONCE * AT_ONCE)


async def measure(port: int, secret: Path, control: Connection) -> None:
    gateway = await start(0, port, secret)
    await wait_until(lambda: all(link.is_ready for link in gateway.queue._links.values()), "both are connected")
    rows = {}
    for name, owner in (("decided here", NAMES[0]), ("by the owner", NAMES[1])):
        model = model_owned_by(owner)
        found = await latencies(gateway, model)
        tenth, last = found[len(found) // 10], found[len(found) * 99 // 100]
        rows[name] = tenth, statistics.median(found), last, await cpu_us(gateway, model, control)
        print(LINE.format(name, *rows[name]))
    here, owner = rows["decided here"], rows["by the owner"]
    print(LINE.format("the hop", *(b - a for a, b in zip(here, owner, strict=True))))
    gateway.queue.close()


def run() -> None:
    with tempfile.TemporaryDirectory() as directory:
        secret, port = Path(directory) / "secret", free_port()
        secret.write_bytes(SECRET)
        ours, theirs = multiprocessing.Pipe()
        other = multiprocessing.get_context("spawn").Process(target=serve, args=(port, secret, theirs), daemon=True)
        other.start()
        try:
            uvloop.run(measure(port, secret, ours))
        finally:
            other.terminate()
            other.join()


if __name__ == "__main__":
    run()
