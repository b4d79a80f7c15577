"""When an engine without progress is unready, when it is restarted, and how its core is asked."""

import asyncio
import signal
import time
from pathlib import Path

import pytest

from launcher import engine_process, progress
from launcher import main as launcher_main
from launcher.core_probe import CoreProbe
from launcher.engine_info import from_settings
from launcher.health import EngineStatus
from launcher.main import Launcher
from launcher.progress import MAX_TICK_SECONDS, STEP_WINDOW_SECONDS, TICK_SECONDS, ProgressMonitor
from launcher.settings import read
from plimsoll.api.v1alpha1 import parse
from plimsoll.resources.engine_pod import pod_template
from tests import builders
from tests.engine_image.middleware_harness import CONTRACT, completion_engine, make_harness

LIMITS = CONTRACT.progress
PATH = CONTRACT.paths["progress"]
READY_LATENCY_S, RESTART_LATENCY_S = 1.0, 10.0  # gateway and kubelet: until no request comes, until it runs again


def pass_time(monitor: ProgressMonitor, seconds: float) -> None:
    for _ in range(round(seconds / TICK_SECONDS)):
        monitor.advance(TICK_SECONDS)


def test_bounds_hold_15_s_until_unready_and_60_s_until_restart() -> None:
    container = pod_template(parse(builders.service()), "decode", builders.PLATFORM)["spec"]["containers"][0]
    probe = container["readinessProbe"]
    seen_s = probe["failureThreshold"] * probe["periodSeconds"]
    assert LIMITS.unready_seconds + TICK_SECONDS + seen_s + READY_LATENCY_S <= 15
    kill_s = TICK_SECONDS + launcher_main.REAP_SECONDS + engine_process.LOG_SECONDS
    assert LIMITS.restart_seconds + kill_s + RESTART_LATENCY_S <= 60


@pytest.mark.parametrize(
    ("silent_s", "stalled", "hung"),
    [(9.5, False, False), (10.0, True, False), (39.5, True, False), (40.0, True, True)],
)
def test_monitor_bounds_of_an_accelerator(silent_s: float, stalled: bool, hung: bool) -> None:
    monitor = ProgressMonitor(LIMITS, stretches=False)
    pass_time(monitor, 100)
    monitor.record(30.0)  # a compilation in the warm-up stretches nothing
    pass_time(monitor, silent_s)
    assert (monitor.silent_s, monitor.is_stalled, monitor.is_hung) == (silent_s, stalled, hung)


def test_monitor_progress_ends_the_silence() -> None:
    monitor = ProgressMonitor(LIMITS, stretches=False)
    pass_time(monitor, 39)
    monitor.record(39.0)
    assert (monitor.silent_s, monitor.is_stalled, monitor.is_hung) == (0, False, False)


def test_monitor_excused_silence_begins_anew() -> None:
    monitor = ProgressMonitor(LIMITS, stretches=False)
    pass_time(monitor, LIMITS.restart_seconds)
    assert monitor.is_hung
    monitor.excuse()
    assert (monitor.silent_s, monitor.is_stalled, monitor.is_hung) == (0.0, False, False)
    pass_time(monitor, LIMITS.restart_seconds)
    assert monitor.is_hung


@pytest.mark.parametrize(
    ("step_s", "unready_s", "restart_s"),
    [(0.1, 10, 40), (0.5, 10, 40), (2.0, 40, 160), (5.0, 100, 400), (60, 120, 480)],
)
def test_monitor_long_steps_stretch_both_bounds(step_s: float, unready_s: float, restart_s: float) -> None:
    monitor = ProgressMonitor(LIMITS, stretches=True)
    monitor.record(step_s)
    monitor.record(0.01)
    for bound_s, is_reached in (
        (unready_s, lambda: monitor.is_stalled),
        (restart_s - unready_s, lambda: monitor.is_hung),
    ):
        pass_time(monitor, bound_s - TICK_SECONDS)
        assert not is_reached()
        pass_time(monitor, TICK_SECONDS)
        assert is_reached()


def test_monitor_forgets_old_long_steps() -> None:
    monitor = ProgressMonitor(LIMITS, stretches=True)
    monitor.record(5.0)
    for _ in range(round(STEP_WINDOW_SECONDS) + 1):
        pass_time(monitor, 1)
        monitor.record(0.01)
    pass_time(monitor, 10)
    assert monitor.is_stalled


def test_monitor_pause_of_the_launcher_is_no_silence() -> None:
    monitor = ProgressMonitor(LIMITS, stretches=False)
    monitor.advance(3600.0)
    assert monitor.silent_s == MAX_TICK_SECONDS
    assert not monitor.is_stalled


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, b'{"step_seconds": 0.25}', 0.25),
        (200, b'{"step_seconds": 1}', 1.0),
        (503, b'{"step_seconds": 0.25}', None),
        (200, b"[]", None),
        (200, b"", None),
        (200, b'{"step_seconds": "x"}', None),
        (200, b"[" * 9999, None),
    ],
)
def test_progress_answer_is_parsed(status: int, body: bytes, expected: float | None) -> None:
    assert progress.parse_step_seconds(status, body) == expected


async def test_observe_asks_until_the_tick_says_so() -> None:
    monitor = ProgressMonitor(LIMITS, stretches=False)
    answers = [None, 0.2, None]
    ticks = 0

    async def next_answer() -> float | None:
        return answers.pop(0) if answers else None

    def on_tick() -> bool:
        nonlocal ticks
        ticks += 1
        return ticks == 3

    await progress.observe(monitor, next_answer, lambda: 0.0, on_tick)
    assert not answers
    assert TICK_SECONDS <= monitor.silent_s <= 2 * MAX_TICK_SECONDS


@pytest.mark.parametrize(
    ("status", "ready", "live", "name"),
    [
        (EngineStatus(warm=True, stalled=True), False, True, "stalled"),
        (EngineStatus(warm=True, stalled=True, hung=True), False, False, "stalled"),
        (EngineStatus(stalled=True, hung=True), False, True, "starting"),
        (EngineStatus(warm=True, stalled=True, hung=True, draining=True), False, True, "draining"),
    ],
)
def test_status_of_an_engine_without_progress(status: EngineStatus, ready: bool, live: bool, name: str) -> None:
    assert (status.ready, status.live, status.state_name) == (ready, live, name)


async def test_core_probe_keeps_one_question_open() -> None:
    requested, core_goes_on, now = 0, asyncio.Event(), 0.0

    class Client:
        async def is_sleeping(self) -> bool:
            nonlocal requested, now
            requested += 1
            await core_goes_on.wait()
            return False

    probe, client = CoreProbe(lambda: now), Client()
    first = await probe.wait_answer(client, 0.01)
    now = 7.0
    second = await probe.wait_answer(client, 0.01)
    assert (first.answered, second.answered, second.seconds, requested) == (False, False, 7.0, 1)
    waiting = asyncio.create_task(probe.wait_answer(client, 60.0))
    await asyncio.sleep(0)
    now = 8.0
    core_goes_on.set()
    third = await waiting
    assert (third.answered, third.seconds, requested) == (True, 8.0, 1)
    assert (await probe.wait_answer(client, 60.0)).seconds == 0.0
    assert requested == 2


async def test_middleware_answers_for_the_core(tmp_path: Path) -> None:
    core_goes_on = asyncio.Event()

    async def is_sleeping() -> bool:
        await core_goes_on.wait()
        return False

    async with make_harness(completion_engine(), "serve", tmp_path) as harness:
        harness.is_sleeping = is_sleeping
        silent = await harness.send(b"", PATH, method="GET")
        core_goes_on.set()
        answered = await harness.send(b"", PATH, method="GET")
    assert silent.status == 503
    assert silent.json["step_seconds"] >= LIMITS.answer_seconds * 0.99
    assert answered.status == 200
    assert not harness.engine.requests, "vLLM has no such path"


async def test_middleware_unreachable_core_counts_as_api(tmp_path: Path) -> None:
    async def broken() -> bool:
        raise NotImplementedError

    async with make_harness(completion_engine(), "serve", tmp_path) as harness:
        assert (await harness.send(b"", PATH, method="GET")).status == 200
        harness.is_sleeping = broken
        assert (await harness.send(b"", PATH, method="GET")).status == 200


class Unkillable:
    """An engine in a driver's call that no signal ends."""

    def __init__(self) -> None:
        self.exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.killed = False

    def kill(self) -> None:
        self.killed = True

    async def log_copied(self) -> None:
        """Nothing comes any more."""


async def test_launcher_ends_though_the_engine_cannot_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_main, "REAP_SECONDS", 0.05)
    settings = read({"PLIMSOLL_MODEL": "m"}, CONTRACT)
    launcher = Launcher(settings, CONTRACT, from_settings(settings, ""), time.monotonic())
    engine = Unkillable()
    async with asyncio.timeout(30):
        code = await launcher._on_engine_exit(engine)  # type: ignore[arg-type]
    assert (engine.killed, code) == (True, 128 + signal.SIGKILL)
