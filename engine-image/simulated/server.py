"""The process: command line, cold start, serving, and shutdown.

SIGTERM is handled as in vLLM: running requests may finish within --shutdown-timeout while /health stays 200 and new
requests get a 500; the rest is aborted; exit 0. SIGUSR1 kills the engine core: /health is 503, streams break with an
error event, and the process ends some seconds later with code 0, as vLLM does. SIGUSR2 hangs the engine core: the API
server responds as before, /health is 200, and no more tokens are generated.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import socket
import ssl
import sys
import time
import uuid
from typing import Any

from prometheus_client import REGISTRY, generate_latest

from plimsoll.engines import vllm
from plimsoll.sim.engine.kv_link import KvLink
from simulated import cold_start
from simulated.api import OpenAiApi
from simulated.engine_core import EngineCore
from simulated.exposition import MetricsExposition
from simulated.kv_leases import LeaseTable
from simulated.kv_side_channel import LeaseServer
from simulated.options import EngineOptions, OptionsError, TlsOptions, parse_options
from simulated.real_time_driver import DEAD_ENGINE_EXIT_SECONDS, RealTimeDriver
from simulated.served_metrics import ServedMetrics
from simulated.step_noise import draw_step_noise

KEEP_ALIVE_SECONDS = 5
LISTEN_BACKLOG = 2048
REFRESH_SECONDS = 0.2  # between two looks at the files of TLS


def log_line(process: str, source: str, message: str, level: str = "INFO") -> None:
    """Write a line in the format of vLLM's log."""
    stamp = time.strftime("%m-%d %H:%M:%S")
    print(f"({process} pid={os.getpid()}) {level} {stamp} [{source}] {message}", flush=True)


def make_core(options: EngineOptions) -> EngineCore:
    """Return the engine core of these options."""
    profile = options.profile
    kv_link = KvLink(profile.layers, profile.block_size, profile.kv_bytes_per_token, options.transfer_rate)
    return EngineCore(
        profile.scaled(options.step_factor),
        kv_link.scaled(options.time_scale),
        LeaseTable(options.lease_s),
        ServedMetrics(profile.max_model_len, bool(options.kv_role)),
        prefix_caching=options.prefix_caching,
        noise=draw_step_noise(options.noise, options.seed),
        max_adapters=options.lora.max_loras if options.lora.enabled else 0,
    )


def make_api(options: EngineOptions, created_s: float) -> tuple[OpenAiApi, RealTimeDriver, str]:
    """Everything behind the HTTP server, on the running loop, and the engine's name; `since` is a Unix time."""
    core = make_core(options)
    driver = RealTimeDriver(core, options.coalesce_s, options.recompute)
    exposition = MetricsExposition(options, core, created_s, lambda: driver.deferred)
    engine_id = str(uuid.uuid4())
    # the middleware's own counters and the process's are in the library's registry, as in vLLM
    api = OpenAiApi(options, driver, engine_id, lambda: generate_latest(REGISTRY) + exposition.text().encode())
    return api, driver, engine_id


def bind_socket(host: str, port: int) -> socket.socket:
    """Return the API's socket, bound but closed to connections until the engine is ready, as vLLM's is."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    return sock


async def serve(options: EngineOptions) -> None:
    """Run one engine from its cold start to its end; this process's imports are part of the start-up time."""
    due_s = time.monotonic()
    sock = bind_socket(options.host, options.port)
    api, driver, engine_id = make_api(options, time.time())
    for phase in cold_start.startup_phases(options):
        due_s += phase.seconds
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        for source, message in phase.log_lines:
            log_line("EngineCore", source, message)
    async with contextlib.AsyncExitStack() as open_servers:
        if options.kv_role in (vllm.KV_PRODUCER, vllm.KV_BOTH):
            lease_server = LeaseServer(
                engine_id,
                driver.core.leases.claim,
                lambda request_id: driver.core.leases.restart_expiry(request_id, driver.now()),
                driver.on_lease_freed,
            )
            side_channel = await lease_server.listen(options.side_channel_host, options.side_channel_port)
            open_servers.callback(side_channel.close)
        await _serve_http(options, api, driver, sock)


async def _serve_http(options: EngineOptions, api: OpenAiApi, driver: RealTimeDriver, sock: socket.socket) -> None:
    # not in the environment that checks types
    uvicorn: Any = importlib.import_module("uvicorn")
    config = uvicorn.Config(
        api,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        backlog=LISTEN_BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=KEEP_ALIVE_SECONDS,
        **_tls_settings(options.tls),
    )
    config.load()
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # signals are ours
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, driver.kill_core)
    loop.add_signal_handler(signal.SIGUSR2, driver.hang_core)
    scheme = "http" if options.tls is None else "https"
    log_line("APIServer", "api_server.py:1370", f"Starting vLLM server on {scheme}://{options.host}:{options.port}")
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    refreshing = asyncio.ensure_future(_refresh_tls(config.ssl, options.tls))
    stopped = asyncio.ensure_future(_wait_for_end(options, api, driver, stop))
    await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await serving
    stopped.cancel()
    refreshing.cancel()


def _tls_settings(tls: TlsOptions | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        "ssl_keyfile": tls.key,
        "ssl_certfile": tls.certificate,
        "ssl_ca_certs": tls.authority,
        "ssl_cert_reqs": tls.requirement,
    }


async def _refresh_tls(context: Any, tls: TlsOptions | None) -> None:
    """Load changed files for new connections, as vLLM does with --enable-ssl-refresh."""
    if tls is None or not tls.refresh:
        return
    paths = [path for path in (tls.key, tls.certificate, tls.authority) if path]
    loaded = [os.stat(path).st_mtime_ns for path in paths]
    while True:
        await asyncio.sleep(REFRESH_SECONDS)
        written = [os.stat(path).st_mtime_ns for path in paths]
        if written == loaded:
            continue
        loaded = written
        try:
            context.load_cert_chain(tls.certificate, tls.key)
            if tls.authority:
                context.load_verify_locations(tls.authority)
        except (ssl.SSLError, OSError) as error:  # a file is being written
            log_line("APIServer", "ssl.py:70", f"SSLCertRefresher failed: {error}", "ERROR")


async def _wait_for_end(options: EngineOptions, api: OpenAiApi, driver: RealTimeDriver, stop: asyncio.Event) -> None:
    """Return when the server may close: after SIGTERM and its drain, or some time after the core's death."""
    stopping = asyncio.ensure_future(stop.wait())
    dying = asyncio.ensure_future(driver.core_died.wait())
    await asyncio.wait({stopping, dying}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    dying.cancel()
    if driver.dead:
        log_line("APIServer", "async_llm.py:810", "AsyncLLM output_handler failed: EngineDeadError", "ERROR")
        await asyncio.sleep(DEAD_ENGINE_EXIT_SECONDS * options.time_scale)
        return
    api.stopping = True
    log_line("APIServer", "launcher.py:139", f"Draining: up to {options.shutdown_s:g} s")
    if not await driver.wait_drained(options.shutdown_s):
        driver.abort_all()


def _run(options: EngineOptions) -> None:
    try:
        uvloop: Any = importlib.import_module("uvloop")
    except ImportError:
        asyncio.run(serve(options))
    else:
        uvloop.run(serve(options))


def _run_headless() -> int:
    """Be a worker of an engine of several pods, whose leader simulates the whole engine: run until SIGTERM."""
    log_line("Worker", "serve.py:1", "Launching headless worker")
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    signal.sigwait(ends)
    return 0


def main(arguments: list[str]) -> int:
    """Run an engine; returns the exit code."""
    if vllm.has_flag(arguments, vllm.HEADLESS):
        return _run_headless()
    try:
        options = parse_options(arguments, os.environ)
    except OptionsError as error:
        print(f"simulated serve: error: {error}", file=sys.stderr, flush=True)
        return 2
    if options.ignored:
        log_line("APIServer", "options", f"without meaning here: {' '.join(options.ignored)}", "WARNING")
    _run(options)
    return 0
