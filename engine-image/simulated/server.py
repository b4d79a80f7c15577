"""The process: command line, cold start, serving, and the ways to end.

SIGTERM is vLLM's: what is in the engine may finish within --shutdown-timeout while /health stays 200 and new requests
get a 500; what is left then is aborted; exit 0. SIGUSR1 kills the engine core: /health says 503, streams break with an
error event, and the process ends some seconds later with code 0, as vLLM's does.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import socket
import sys
import time
import uuid
from typing import Any

from prometheus_client import REGISTRY, generate_latest

from simulated import start
from simulated.api import Api
from simulated.core import Core
from simulated.driver import DEAD_SECONDS, Driver
from simulated.exposition import Exposition
from simulated.meters import Meters
from simulated.options import Options, OptionsError, parse
from simulated.peers import Lender
from simulated.plant import Plant
from simulated.scheduler import Limits
from simulated.transfer import Leases, Wire

KEEP_ALIVE_SECONDS = 5
BACKLOG = 2048


def log(process: str, source: str, words: str, level: str = "INFO") -> None:
    """A line in the form of vLLM's log."""
    stamp = time.strftime("%m-%d %H:%M:%S")
    print(f"({process} pid={os.getpid()}) {level} {stamp} [{source}] {words}", flush=True)


def make_core(options: Options) -> tuple[Core, Meters]:
    """The engine core that the options describe, and its meters."""
    profile = options.profile
    meters = Meters(profile.max_model_len, bool(options.role))
    core = Core(
        Limits(profile.max_num_seqs, profile.budget, profile.block_size, options.prefix_caching),
        options.blocks,
        Plant(profile, options.factor, options.noise, options.seed),
        Wire(profile.layers, profile.block_size, profile.kv_bytes_per_token, options.transfer_rate, options.time_scale),
        Leases(options.lease_s),
        meters,
    )
    return core, meters


def make_api(options: Options, since: float) -> tuple[Api, Driver, str]:
    """Everything behind the HTTP server, on the running loop, and the engine's name; `since` is a Unix time."""
    core, meters = make_core(options)
    driver = Driver(core, options.coalesce_s, options.recompute)
    exposition = Exposition(options, core, meters, since, lambda: driver.deferred)
    engine_id = str(uuid.uuid4())
    # the middleware's own counters and the process's are in the library's registry, as in vLLM
    api = Api(options, driver, engine_id, lambda: generate_latest(REGISTRY) + exposition.text().encode())
    return api, driver, engine_id


def listening(host: str, port: int) -> socket.socket:
    """The API's socket, bound but closed to connections until the engine is ready, as vLLM's is."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    return sock


async def serve(options: Options) -> None:
    """One engine from its cold start to its end; our own imports are part of the start's seconds."""
    due = time.monotonic()
    sock = listening(options.host, options.port)
    api, driver, engine_id = make_api(options, time.time())
    for phase in start.phases(options):
        due += phase.seconds
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        for source, words in phase.lines:
            log("EngineCore", source, words)
    async with contextlib.AsyncExitStack() as open_servers:
        if options.role in ("kv_producer", "kv_both"):
            lender = Lender(
                engine_id,
                driver.core.leases.claim,
                lambda request_id: driver.core.leases.leave(request_id, driver.now()),
                driver.freed,
            )
            side = await lender.listen(options.side_host, options.side_port)
            open_servers.callback(side.close)
        await _answer(options, api, driver, sock)


async def _answer(options: Options, api: Api, driver: Driver, sock: socket.socket) -> None:
    # not in the environment that checks types
    uvicorn: Any = importlib.import_module("uvicorn")
    config = uvicorn.Config(
        api,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=KEEP_ALIVE_SECONDS,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # signals are ours
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, driver.die)
    log("APIServer", "api_server.py:1370", f"Starting vLLM server on http://{options.host}:{options.port}")
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    ending = asyncio.ensure_future(_end(options, api, driver, stop))
    await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await serving
    ending.cancel()


async def _end(options: Options, api: Api, driver: Driver, stop: asyncio.Event) -> None:
    """Returns when the server may close: after SIGTERM and what it lets finish, or some time after the core's death."""
    stopping = asyncio.ensure_future(stop.wait())
    dying = asyncio.ensure_future(driver.death.wait())
    await asyncio.wait({stopping, dying}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    dying.cancel()
    if driver.dead:
        log("APIServer", "async_llm.py:810", "AsyncLLM output_handler failed: EngineDeadError", "ERROR")
        await asyncio.sleep(DEAD_SECONDS * options.time_scale)
        return
    api.stopping = True
    log("APIServer", "launcher.py:139", f"Draining: up to {options.shutdown_s:g} s")
    if not await driver.drained(options.shutdown_s):
        driver.abort()


def _run(options: Options) -> None:
    try:
        uvloop: Any = importlib.import_module("uvloop")
    except ImportError:
        asyncio.run(serve(options))
    else:
        uvloop.run(serve(options))


def main(arguments: list[str]) -> int:
    """Runs an engine; returns the exit code."""
    try:
        options = parse(arguments, os.environ)
    except OptionsError as error:
        print(f"simulated serve: error: {error}", file=sys.stderr, flush=True)
        return 2
    if options.ignored:
        log("APIServer", "options", f"without meaning here: {' '.join(options.ignored)}", "WARNING")
    _run(options)
    return 0
