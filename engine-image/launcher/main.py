"""The life of an engine pod: start, warm up, serve, drain, exit.

Problem: Kubernetes sends requests to every ready pod, treats exit code 0 as success, and ends pods with one SIGTERM.
Idea: one process in front of vLLM becomes ready only after warm-up, turns every unexpected end into a failure, and
handles SIGTERM in stages: handed over, quiet, unready, drain, exit 0. A dead engine ends this process, and so does one
that makes no progress (`launcher.progress`), because a hanging engine does not end by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import logging
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher import (
    adapters,
    client,
    command,
    drain,
    engine_info,
    engine_process,
    no_proxy,
    pod_group,
    progress,
    self_benchmark,
    warmup,
)
from launcher.adapter_state import AdapterStates
from launcher.asgi import wait_first
from launcher.contract import Contract, load
from launcher.engine_probe import EngineProbe, Health
from launcher.failure_cause import FailureCause
from launcher.health import EngineStatus, HealthServer
from launcher.pod_state import PodState
from launcher.prompts import PromptFactory
from launcher.redaction import redact
from launcher.settings import Settings, SettingsError, read
from launcher.startup_phases import StartupPhases, phase_order
from launcher.tls import EngineTls

HEALTH_POLL_SECONDS = 1.0
MAX_SCALING_SECONDS = 1800.0  # starting engines takes minutes
STARTUP_POLL_SECONDS = 0.1
# For the last errors of responses. vLLM ends at its watchdog's next turn, up to 5 s after its core's death, or never.
DEAD_ENGINE_SECONDS = 1.0
KILL_SECONDS = 5.0  # beyond the shutdown timeout; with the longest wait before SIGTERM still inside the grace
# For the end of a killed engine. A process inside a driver may not end; the container ends with the launcher.
REAP_SECONDS = 5.0

log = logging.getLogger("launcher")


class Launcher:
    """One engine from its start to its end."""

    def __init__(self, settings: Settings, contract: Contract, info: engine_info.EngineInfo, started: float) -> None:
        self._settings = settings
        self._contract = contract
        self._engine_info = info
        self._tls = EngineTls.of(settings.tls, contract)
        self._client = client.EngineClient(contract.ports["api"], None if self._tls is None else self._tls.loopback)
        self._probe = EngineProbe(self._client, contract)
        self._status = EngineStatus()
        is_local_path = os.path.isdir(settings.model)
        self._startup_phases = StartupPhases(
            phase_order(contract.startup_phases, fetched=bool(settings.source)),
            started,
            skipped=("download",) if is_local_path and not settings.source else (),
        )
        self._state = PodState(contract.paths["state"])
        self._failure_cause = FailureCause()
        has_slow_steps = settings.runtime == engine_info.SIMULATED or command.is_cpu_build(info.engine_version or "")
        self._progress = progress.ProgressMonitor(contract.progress, has_slow_steps)
        self._progress_pause_s = progress.WARMUP_PAUSE_SECONDS
        self._task_not_served = ""
        self._adapter_states = AdapterStates(contract.paths["state"])
        self._adapters = (
            adapters.AdapterLoader(
                contract.paths["adapters"],
                self._adapter_states,
                self._post,
                adapters.source_resolver(contract, settings.runtime, settings.lora.max_lora_rank),
            )
            if settings.lora is not None
            else None
        )

    async def run(self, argv: list[str], environment: dict[str, str]) -> int:
        """Run the engine until it ends or SIGTERM; returns the launcher's exit code."""
        self._state.reset()
        self._adapter_states.reset()
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        engine = engine_process.start_engine(argv, environment, self._observe_line)
        self._startup_phases.end("launch", time.monotonic())
        _run_in_background(engine_info.detect_accelerators, self._engine_info)
        health_server = HealthServer(
            self._contract,
            self._status,
            self._startup_phases,
            self._scrape,
            self._engine_info_document,
            lambda: [] if self._adapters is None else self._adapters.document,
            self._tls,
        )
        server = await health_server.start(self._contract.ports["launcher"])
        watcher = asyncio.create_task(self._watch_engine(engine))
        following = None if self._tls is None else asyncio.create_task(self._tls.follow())
        stopped = asyncio.create_task(stop.wait())
        await wait_first(engine.exit, stopped, watcher)
        code = await (self._drain(engine) if stop.is_set() else self._on_engine_exit(engine))
        watcher.cancel()
        if following is not None:
            following.cancel()
        server.close()
        return code

    def _observe_line(self, line: bytes) -> None:
        self._startup_phases.observe(line, time.monotonic())
        self._failure_cause.observe(line)

    async def _watch_engine(self, engine: engine_process.EngineProcess) -> None:
        """Make the engine ready, then watch it.

        Returns only if the engine is dead but has not exited, hangs, or does not serve the model's task. A worker has
        no API server: it is ready while its process runs, and the leader becomes ready only with all workers.
        """
        if self._settings.is_worker:
            self._status.warm = True
            log.info("this pod is a worker: its leader has the API server")
            await asyncio.Event().wait()
        while await self._probe.health() is not Health.HEALTHY:  # noqa: ASYNC110  another process: nothing to wait on
            await asyncio.sleep(STARTUP_POLL_SECONDS)
        self._startup_phases.end("api", time.monotonic())
        _run_in_background(
            engine_info.find_config, self._engine_info, self._settings, dict(os.environ)
        )  # downloaded by now
        hanging = asyncio.create_task(
            progress.observe(
                self._progress, self._probe.step_seconds, lambda: self._progress_pause_s, self._on_progress_tick
            )
        )
        dying = asyncio.create_task(self._wait_until_dead())
        following: asyncio.Task[None] | None = None
        try:
            await self._warm_up()
            if self._adapters is not None:
                await self._adapters.load_pinned()
                following = asyncio.create_task(self._adapters.follow())
            self._startup_phases.end("warmup", time.monotonic())
            self._status.warm = True
            log.info("ready after %s", ", ".join(f"{k} {v:.1f} s" for k, v in self._startup_phases.seconds().items()))
            await wait_first(hanging, dying)
        except warmup.TaskNotServed as error:
            self._task_not_served = str(error)
        finally:
            hanging.cancel()
            dying.cancel()
            if following is not None:
                following.cancel()
        if self._status.dead:
            log.error("the engine is dead: vLLM's /health says 503")
            await asyncio.wait({engine.exit}, timeout=DEAD_ENGINE_SECONDS)

    async def _wait_until_dead(self) -> None:
        """Return once vLLM reports after the warm-up that its engine core has ended.

        An engine that says that it is scaling gets no requests, and need not make progress for MAX_SCALING_SECONDS.
        """
        status, scaling_since = self._status, math.inf
        while not status.dead:
            await asyncio.sleep(HEALTH_POLL_SECONDS)
            health = await self._probe.health()
            status.dead = status.warm and health is Health.DEAD
            if health is not Health.UNKNOWN and status.scaling != (health is Health.SCALING):
                status.scaling, scaling_since = not status.scaling, time.monotonic()
                log.info("the engine says that it is %s", "scaling" if status.scaling else "not scaling any more")
            if health is Health.SCALING and time.monotonic() - scaling_since < MAX_SCALING_SECONDS:
                self._progress.excuse()

    def _on_progress_tick(self) -> bool:
        """Update the engine's progress in the status; returns whether the observation is over.

        A warm-up may compile for longer than a step takes, and has a limit of its own. A drain has one too.
        """
        status, monitor = self._status, self._progress
        status.stalled, status.hung = monitor.is_stalled, monitor.is_hung
        status.silent_s = monitor.silent_s if status.warm else 0.0
        return status.draining or (status.warm and status.hung)

    async def _warm_up(self) -> None:
        """Send the first requests, query the engine's facts, and run the self-benchmark in the remaining time."""
        started = time.monotonic()
        prompts = PromptFactory(self._settings.served_names[0])
        await warmup.run(self._send_warmup, self._contract.warmup, prompts, self._settings.task)
        self._progress_pause_s = self._contract.progress.poll_seconds  # the benchmark needs an otherwise idle engine
        await engine_info.query_engine(self._engine_info, self._contract, self._fetch)
        if self._settings.task != "generate":
            return  # the benchmark times generated tokens
        info, role = self._engine_info, self._settings.role
        contract = self._contract
        benchmark_plan = self_benchmark.plan_benchmark(
            contract.self_benchmark,
            contract.warmup.prompt_tokens,
            contract.warmup.batches,
            role=role,
            max_model_len=info.max_model_len or 0,
            max_sequences=info.max_sequences,
            kv_tokens=info.kv_tokens,
        )
        left_seconds = started + self._contract.warmup.timeout_seconds - time.monotonic()
        seconds = min(left_seconds, self._contract.self_benchmark.timeout_seconds)
        self._engine_info.self_benchmark = await self_benchmark.run(
            self._send_warmup, benchmark_plan, prompts, time.monotonic, seconds
        )

    async def _send_warmup(self, path: str, body: bytes | None) -> client.Response:
        return await self._client.request(path, body, self._contract.warmup.timeout_seconds)

    async def _post(self, path: str, body: bytes, seconds: float) -> client.Response:
        return await self._client.request(path, body, seconds)

    async def _fetch(self, path: str) -> client.Response:
        return await self._client.request(path)

    def _engine_info_document(self) -> bytes:
        return engine_info.to_json(
            self._engine_info,
            self._settings.role,
            self._status,
            self._startup_phases,
            time.monotonic(),
            None if self._adapters is None else self._adapters.document,
        )

    async def _scrape(self) -> bytes:
        """Return the engine's own metrics; none, at once, if the engine makes no progress."""
        return b"" if self._status.stalled else await self._probe.metrics()

    async def _on_engine_exit(self, engine: engine_process.EngineProcess) -> int:
        """Return the exit code after the engine's end; an unexpected end is a failure, even with exit code 0."""
        self._status.dead = True
        if self._task_not_served:
            return await self._end_running_engine(engine, self._task_not_served)
        is_running = not engine.exit.done()
        if is_running and self._status.hung:
            silent_s, requests = self._status.silent_s, self._state.in_flight
            return await self._end_running_engine(
                engine, f"the engine made no progress for {silent_s:.0f} s with {requests} requests running"
            )
        code = await self._kill(engine)
        await engine.log_copied()
        log.error("the engine ended %s with code %d", "only when it was killed," if is_running else "by itself", code)
        if self._failure_cause.message:  # without one, Kubernetes keeps the end of the log
            self._write_termination_message(self._failure_cause.message)
        return code or 1

    async def _end_running_engine(self, engine: engine_process.EngineProcess, cause: str) -> int:
        """Kill the engine, because a hanging one does not handle SIGTERM, and write the cause."""
        log.error("%s: it is killed", cause)
        self._write_termination_message(cause)  # before the kill, which may take its time
        await self._kill(engine)
        return 1

    async def _kill(self, engine: engine_process.EngineProcess) -> int:
        """Kill the engine's processes. Returns its exit code: 128 + 9 if it does not end in REAP_SECONDS."""
        if not engine.exit.done():
            engine.kill()
            await asyncio.wait({engine.exit}, timeout=REAP_SECONDS)
        return engine.exit.result() if engine.exit.done() else 128 + signal.SIGKILL

    async def _drain(self, engine: engine_process.EngineProcess) -> int:
        """Drain without losing a request: handed over, quiet, unready, SIGTERM, last responses, exit."""
        if self._settings.is_worker:
            return await self._end_worker(engine)
        was_serving = self._status.warm and not self._status.dead
        limits, timeout, leaving_at = self._contract.drain, self._settings.shutdown_timeout, time.time()
        self._status.leaving = True
        if was_serving:
            log.info("leaving: requests are served until the gateways have another engine")
            quiet = await self._until_quiet(engine, leaving_at, drain.handover_limit_seconds(limits, timeout))
            self._stop_serving()
            if not quiet and not engine.exit.done():
                log.warning("no other engine is ready yet, and running requests need the rest of the drain timeout")
                await self._until_quiet(engine, leaving_at, limits.max_rejecting_seconds)
            if engine.exit.done():
                return await self._on_engine_exit(engine)
        self._stop_serving()
        self._state.mark_stopping()
        engine.signal(signal.SIGTERM)
        left_seconds = drain.left_seconds(limits, timeout, time.time() - leaving_at)
        await asyncio.wait({engine.exit}, timeout=left_seconds + KILL_SECONDS)
        killed = not engine.exit.done()
        if killed:
            log.error("vLLM did not end in time: killed")
        code = await self._kill(engine)
        if not was_serving:
            return 0  # a start that was broken off has no failure to report
        self._report_aborted()
        return 1 if killed else code

    async def _end_worker(self, engine: engine_process.EngineProcess) -> int:
        """End after the leader, whose requests need this pod, or after the drain timeout."""
        group = self._settings.group
        assert group is not None
        self._status.leaving = True
        port, limits = self._contract.ports["launcher"], self._contract.drain
        leader = asyncio.create_task(
            pod_group.wait_until_leader_ended(lambda: pod_group.accepts_connections(group.leader, port))
        )
        seconds = self._settings.shutdown_timeout + limits.max_rejecting_seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await wait_first(leader, engine.exit)
        leader.cancel()
        engine.signal(signal.SIGTERM)
        await asyncio.wait({engine.exit}, timeout=KILL_SECONDS)
        await self._kill(engine)
        return 0

    def _stop_serving(self) -> None:
        """Become unready, and reject new requests."""
        self._status.draining = True
        self._state.mark_draining()

    async def _until_quiet(self, engine: engine_process.EngineProcess, leaving_at: float, limit_seconds: float) -> bool:
        """Wait until no gateway needs the engine, which returns True, until it has ended, or until the limit."""
        quiet = asyncio.create_task(
            drain.wait_until_quiet(self._state, self._contract.drain, leaving_at, limit_seconds)
        )
        await wait_first(quiet, engine.exit)
        return not quiet.cancel() and quiet.result()

    def _report_aborted(self) -> None:
        """Write the number of requests that the drain aborted to the pod's status."""
        aborted, seconds = self._state.in_flight, self._settings.shutdown_timeout
        if not aborted:
            return
        log.error("%d requests were cut off: the drain may take %d s", aborted, seconds)
        self._write_termination_message(json.dumps({"abortedRequests": aborted, "drainSeconds": seconds}))

    def _write_termination_message(self, message: str) -> None:
        with contextlib.suppress(OSError):  # not in a pod
            Path(self._contract.paths["termination_message"]).write_text(message, encoding="utf-8")


class _RedactingFormatter(logging.Formatter):
    """Formats a record without secrets, such as those of the command line."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def _configure_logging() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_RedactingFormatter("(launcher) %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _run_in_background(target: Callable[..., None], *arguments: Any) -> None:
    """Run a function that may hang (a driver, a disk) without waiting for it, even at the process's end."""
    threading.Thread(target=target, args=arguments, name=target.__name__, daemon=True).start()


def _installed_version() -> str:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ""


def main() -> int:
    """Run the engine that the environment describes; returns the exit code."""
    started = time.monotonic()
    _configure_logging()
    contract = load()
    if changed := no_proxy.without_networks(os.environ):
        os.environ.update(changed)
        log.info("left networks out of NO_PROXY, which downloads cannot read: %s", os.environ.get("NO_PROXY", ""))
    try:
        settings = read(os.environ, contract)
        vllm_version = _installed_version() if settings.runtime == "vllm" else ""
        if (tls := EngineTls.of(settings.tls, contract)) is not None:
            tls.prepare()
        argv = command.engine_command(settings, contract, cpu=command.is_cpu_build(vllm_version))
    except SettingsError as error:
        log.error("%s", error)
        return 2
    environment = command.engine_environment(os.environ, settings, contract)
    log.info("starting: %s", shlex.join(argv))
    info = engine_info.from_settings(settings, vllm_version)
    return asyncio.run(Launcher(settings, contract, info, started).run(argv, environment))
