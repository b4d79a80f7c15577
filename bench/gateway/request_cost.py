"""What the gateway adds to a request at 50 and 500 requests/s, what authentication costs, and what the owner hop costs:
`python -m bench.gateway.request_cost [OPTIONS] [TREE...]`.

Problem: an engine's own latency is a hundred times what the gateway adds, and on a busy machine two runs cannot be
compared.

Idea: constant engines in a process of their own, asked directly and through a gateway in turns, in an open loop with
kept-alive connections. All ways run at once and are measured one after the other in each round: a gateway for a service
with an SLO, the same with API keys, and two gateways of which either the asked one or the other owns the service. A
TREE is a work tree of another commit, whose gateway is measured in the same rounds. What is added is percentile less
percentile of the same turns. CPU is that of all gateway processes, from /proc, less what they use at rest. Ratios are
taken within a round. Prints two tables, and writes all rounds as JSON to the file of `--out`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import uvloop

from bench.gateway.latency import WARM_UP, Route, drive, request
from bench.gateway.peers import (
    ENGINES,
    REST_S,
    SETTLE_S,
    WITH_SLO,
    WORKERS,
    Way,
    Workload,
    start_gateways,
    start_process,
    wait_ready,
)
from tests.gateway.api_key_secrets import bearer
from tests.gateway.stack import ROOT
from tests.ports import free_ports

RATES: Final = (50.0, 500.0)
BODY_BYTES: Final = 2_000
WITH_KEYS: Final = f"{WITH_SLO}, API keys"
OWNED: Final = "two gateways, asked one owns"
HOP: Final = "two gateways, owner hop"
RATIOS: Final = {WITH_KEYS: WITH_SLO, HOP: OWNED}  # to what a way's CPU is compared

Row = dict[str, Any]


class CountingRoute(Route):
    """Counts requests that fail, such as while a gateway's picker does not get the processor, and goes on."""

    failed = 0

    async def send(self) -> None:
        try:
            await super().send()
        except RuntimeError:
            self.failed += 1


class Measured(NamedTuple):
    """One way with the headers of its requests."""

    way: Way
    headers: Mapping[str, str] = {}
    picker_port: int | None = None  # of a gateway that asks an owner

    def route(self) -> CountingRoute:
        bodies = Workload("open loop", BODY_BYTES, 1).bodies(self.way.model)
        lines = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items()).encode()
        return CountingRoute(self.way.port, [request(body, lines) for body in bodies])

    def unasked(self) -> float:
        """Returns how many requests the gateway has decided without the owner, because it did not answer in time."""
        if self.picker_port is None:
            return 0.0
        with urllib.request.urlopen(f"http://127.0.0.1:{self.picker_port}/metrics") as page:
            found = re.findall(rb"^plimsoll_gateway_owner_fallbacks_total(?:{.*})? (\S+)$", page.read(), re.MULTILINE)
        return sum(map(float, found))


def ways(stack: ExitStack, engines: list[int], trees: Iterable[Path], workers: int) -> list[Measured]:
    """Start all gateways, and return the ways to them."""
    found = []
    for tree, label in ((ROOT, ""), *((tree.resolve(), f", {tree.name}") for tree in trees)):
        port, _, pids, models = start_gateways(stack, tree, engines, workers)
        found.append(Measured(Way(f"{WITH_SLO}{label}", port, pids, models[1])))
    port, _, pids, models = start_gateways(stack, ROOT, engines, workers, "keys")
    found.append(Measured(Way(WITH_KEYS, port, pids, models[1]), bearer("bench")))
    port, picker_port, pids, (owned, other) = start_gateways(stack, ROOT, engines, workers, "two")
    found.append(Measured(Way(OWNED, port, pids, owned)))
    found.append(Measured(Way(HOP, port, pids, other), picker_port=picker_port))
    return found


async def measure(engine_port: int, measured: Measured, rate: float, seconds: float, rest: Sequence[float]) -> Row:
    """One way and the direct one in turns. `rest` is the way's CPU per second at rest."""
    way, direct, through = measured.way, Route(engine_port), measured.route()
    routes, count = (direct, through), round(seconds * rate)
    await drive(routes, WARM_UP, rate)
    for route in routes:
        route.latencies.clear()
    through.failed = 0
    loop, load = asyncio.get_running_loop(), os.getloadavg()[0]
    unasked = measured.unasked()
    before, started_s = way.cpu_s(), loop.time()
    await drive(routes, count, rate)
    used_s, duration_s = sum(way.cpu_s()) - sum(before), loop.time() - started_s
    for route in routes:
        route.close()
    added = {name: round(value - direct.quantiles()[name], 3) for name, value in through.quantiles().items()}
    cpu_us = round(1e6 * (used_s - sum(rest) * duration_s) / count, 1)
    return {
        "way": way.name,
        "rate": rate,
        "requests": count,
        "failed": through.failed,
        "direct_ms": direct.quantiles(),
        "added_ms": added,
        "cpu_us": cpu_us,
        "decided_without_owner": round(measured.unasked() - unasked),
        "sent_per_s": round(count / duration_s, 1),
        "load": load,
    }


async def run_rounds(
    engine_port: int, measured: list[Measured], rates: Sequence[float], rounds: int, seconds: float
) -> list[Row]:
    """Returns one row for each round, rate and way."""
    await asyncio.sleep(SETTLE_S)
    before = [one.way.cpu_s() for one in measured]
    await asyncio.sleep(REST_S)
    rest = {
        one.way.name: [(now_s - then_s) / REST_S for now_s, then_s in zip(one.way.cpu_s(), at_start, strict=True)]
        for one, at_start in zip(measured, before, strict=True)
    }
    rows = []
    for number in range(rounds):
        for rate in rates:
            for one in measured if number % 2 == 0 else measured[::-1]:
                row = await measure(engine_port, one, rate, seconds, rest[one.way.name])
                rows.append({"round": number, **row})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def run(
    rates: Sequence[float],
    seconds: float,
    rounds: int = 1,
    trees: Iterable[Path] = (),
    only: Callable[[str], bool] = lambda name: True,
) -> list[Row]:
    """Start everything, and measure the ways whose names `only` accepts."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, ExitStack() as stack:
        engines = free_ports(ENGINES)
        command = [sys.executable, "-m", "bench.gateway.upstream", *map(str, engines)]
        start_process(stack, Path(folder), command)
        measured = [one for one in ways(stack, engines, trees, WORKERS) if only(one.way.name)]
        for one in measured:
            wait_ready(one.way, one.headers)
        return uvloop.run(run_rounds(engines[0], measured, rates, rounds, seconds))


def figures(rate: float, seconds: float) -> Row:
    """Returns what the gateway adds for a service with an SLO."""
    (row,) = run([rate], seconds, only=WITH_SLO.__eq__)
    return row


def table(rows: list[Row]) -> str:
    """Returns Markdown: for each rate the medians of the rounds, with the least and the most."""
    parts = []
    for rate in dict.fromkeys(row["rate"] for row in rows):
        lines = [
            f"| {rate:g} requests/s | added p50, ms | added p99, ms | CPU, µs | ratio |",
            "|---|---:|---:|---:|---:|",
        ]
        at_rate = [row for row in rows if row["rate"] == rate]
        for way in dict.fromkeys(row["way"] for row in at_rate):
            of_way = [row for row in at_rate if row["way"] == way]
            latencies = [_spread([row["added_ms"][name] for row in of_way], 2) for name in ("p50", "p99")]
            cells = [*latencies, _spread([row["cpu_us"] for row in of_way], 0), _ratio(way, at_rate)]
            lines.append(f"| {way} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _ratio(way: str, rows: list[Row]) -> str:
    """Returns the CPU of a way by that of the one it is compared to, within each round."""
    if way not in RATIOS:
        return ""
    cpu_us = {(row["round"], row["way"]): row["cpu_us"] for row in rows}
    rounds = [number for number, name in cpu_us if name == way]
    return _spread([cpu_us[number, way] / cpu_us[number, RATIOS[way]] for number in rounds], 2)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, metavar="TREE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of one measurement")
    parser.add_argument("--out", type=Path, help="file for all rounds")
    options = parser.parse_args(arguments)
    rows = run(RATES, options.seconds, options.rounds, options.trees)
    if options.out is not None:
        options.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print(table(rows))
    unasked, asked = (
        sum(row[name] for row in rows if row["way"] == HOP) for name in ("decided_without_owner", "requests")
    )
    print(f"\n{unasked} of {asked} requests with the hop were decided without the owner")
    print(f"{sum(row['failed'] for row in rows)} of {sum(row['requests'] for row in rows)} requests failed")
    direct = [row["direct_ms"]["p99"] for row in rows]
    loads = [row["load"] for row in rows]
    print(f"the direct way's p99 {min(direct)} to {max(direct)} ms; load average {min(loads):.1f} to {max(loads):.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
