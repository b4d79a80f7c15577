"""The life of an engine pod: start, warm up, serve, drain, exit.

Problem: Kubernetes sends requests to what says it is ready, forgets what exits 0, and ends pods with one SIGTERM.
Idea: one process in front of vLLM says ready only after warm-up, turns every end that nobody asked for into a failure,
and stretches the SIGTERM into unready, quiet, drain, exit 0. Liveness is this process's own: a dead engine ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher import about, client, command, drain, ladder, supervise, warmup
from launcher.asgi import first_of
from launcher.contract import Contract, load
from launcher.health import HealthServer, Status
from launcher.phases import Phases
from launcher.prompts import Prompts
from launcher.settings import Settings, SettingsError, read
from launcher.state import State

HEALTH = "/health"
WATCH_SECONDS = 1.0
STARTING_POLL_SECONDS = 0.1
# vLLM's own watchdog ends it within 5 s of its engine core's death; a server kept alive against that is of no use.
DEAD_ENGINE_SECONDS = 10.0
KILL_SECONDS = 5.0  # beyond the shutdown timeout; with the longest wait before SIGTERM still inside the grace

log = logging.getLogger("launcher")


class Launcher:
    """One engine from its start to its end."""

    def __init__(self, settings: Settings, contract: Contract, facts: about.Facts, started: float) -> None:
        self._settings = settings
        self._contract = contract
        self._facts = facts
        self._port = contract.ports["api"]
        self._status = Status()
        local = os.path.isdir(settings.model)
        self._phases = Phases(contract.start_phases, started, skipped=("download",) if local else ())
        self._state = State(contract.paths["state"])

    async def run(self, argv: list[str], environment: dict[str, str]) -> int:
        """Runs the engine until it ends or we are told to stop; returns the launcher's exit code."""
        self._state.reset()
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        engine = supervise.start(argv, environment, lambda line: self._phases.observe(line, time.monotonic()))
        self._phases.end("launch", time.monotonic())
        _aside(about.look, self._facts)
        answers = HealthServer(self._contract, self._status, self._phases, self._scrape, self._about)
        server = await answers.start(self._contract.ports["launcher"])
        watch = asyncio.create_task(self._watch(engine))
        stopped = asyncio.create_task(stop.wait())
        await first_of(engine.exit, stopped, watch)
        code = await (self._drain(engine) if stop.is_set() else self._failed(engine))
        watch.cancel()
        server.close()
        return code

    async def _watch(self, engine: supervise.Engine) -> None:
        """Makes the engine ready, then looks after it; ends only if the engine is dead and does not go."""
        while not await self._healthy():  # noqa: ASYNC110  another process: nothing to wait on
            await asyncio.sleep(STARTING_POLL_SECONDS)
        self._phases.end("api", time.monotonic())
        _aside(about.find_config, self._facts, self._settings, dict(os.environ))  # downloaded by now
        await self._warm_up()
        self._phases.end("warmup", time.monotonic())
        self._status.warm = True
        log.info("ready after %s", ", ".join(f"{k} {v:.1f} s" for k, v in self._phases.seconds().items()))
        while not self._status.dead:
            await asyncio.sleep(WATCH_SECONDS)
            self._status.dead = await self._healthy() is False
        log.error("the engine is dead: vLLM's /health says 503")
        await asyncio.wait({engine.exit}, timeout=DEAD_ENGINE_SECONDS)

    async def _warm_up(self) -> None:
        """First requests, then what the engine says of itself, then how fast it is in the time that is left."""
        began = time.monotonic()
        prompts = Prompts(self._settings.served_names[0])
        await warmup.run(self._ask, self._contract.warmup, prompts)
        await about.learn(self._facts, self._contract, self._get)
        known, role = self._facts, self._settings.role
        plan = ladder.plan(self._contract, role, known.max_model_len or 0, known.max_sequences, known.kv_tokens)
        left = began + self._contract.warmup.timeout_seconds - time.monotonic()
        seconds = min(left, self._contract.ladder.timeout_seconds)
        self._facts.ladder = await ladder.run(self._ask, plan, prompts, time.monotonic, seconds)

    async def _healthy(self) -> bool | None:
        """What vLLM says of its engine: True, False (dead), or None where it gives no answer (starting, busy)."""
        try:
            answer = await client.request(self._port, HEALTH)
        except (OSError, TimeoutError, ValueError):
            return None
        return {200: True, 503: False}.get(answer.status)

    async def _ask(self, path: str, body: bytes | None) -> client.Response:
        return await client.request(self._port, path, body, self._contract.warmup.timeout_seconds)

    async def _get(self, path: str) -> client.Response:
        return await client.request(self._port, path)

    def _about(self) -> bytes:
        return about.document(self._facts, self._settings.role, self._status, self._phases, time.monotonic())

    async def _scrape(self) -> bytes:
        try:
            answer = await client.request(self._port, self._contract.paths["metrics"])
        except (OSError, TimeoutError, ValueError):
            return b""
        return answer.body if answer.status == 200 else b""

    async def _failed(self, engine: supervise.Engine) -> int:
        """An end that nobody asked for is a failure, whatever vLLM calls it."""
        self._status.dead = True
        if not engine.exit.done():
            engine.kill()
        code = await engine.exit
        log.error("the engine ended by itself with code %d", code)
        return code or 1

    async def _drain(self, engine: supervise.Engine) -> int:
        """Leaves without losing a request: unready and refusing, quiet, SIGTERM, the last answers, exit."""
        was_ready = self._status.ready
        self._status.draining = True
        self._state.mark_draining()
        if was_ready:
            log.info("draining: new requests are refused")
            quiet = asyncio.create_task(drain.quiet(self._state, self._contract.drain))
            await first_of(quiet, engine.exit)
            quiet.cancel()
            if engine.exit.done():
                return await self._failed(engine)
        self._state.mark_stopping()
        engine.signal(signal.SIGTERM)
        await asyncio.wait({engine.exit}, timeout=self._settings.shutdown_timeout + KILL_SECONDS)
        killed = not engine.exit.done()
        if killed:
            log.error("vLLM did not end in time: killed")
            engine.kill()
        code = await engine.exit
        if not was_ready:
            return 0  # a start that was broken off has no failure to report
        self._account()
        return 1 if killed else code

    def _account(self) -> None:
        """Says how many requests the drain left without their answers, where the pod's status shows it."""
        cut_off, seconds = self._state.held, self._settings.shutdown_timeout
        if not cut_off:
            return
        log.error("%d requests were cut off: the drain may take %d s", cut_off, seconds)
        words = json.dumps({"cutOff": cut_off, "drainSeconds": seconds})
        with contextlib.suppress(OSError):  # not in a pod
            Path(self._contract.paths["last_words"]).write_text(words, encoding="utf-8")


def _aside(work: Callable[..., None], *arguments: Any) -> None:
    """Runs what may hang (a driver, a disk) where nobody waits for it, at the end of the process neither."""
    threading.Thread(target=work, args=arguments, name=work.__name__, daemon=True).start()


def _installed_version() -> str:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ""


def main() -> int:
    """Runs the engine that the environment describes; returns the exit code."""
    started = time.monotonic()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="(launcher) %(levelname)s %(message)s")
    contract = load()
    try:
        settings = read(os.environ, contract)
        version = _installed_version() if settings.runtime == "vllm" else ""
        argv = command.engine_command(settings, contract, cpu=command.cpu_platform(version))
    except SettingsError as error:
        log.error("%s", error)
        return 2
    environment = command.engine_environment(os.environ, settings, contract)
    log.info("starting: %s", " ".join(argv))
    facts = about.told(settings, version)
    return asyncio.run(Launcher(settings, contract, facts, started).run(argv, environment))
