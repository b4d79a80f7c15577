"""The kubelet's and the operator's view of an engine during an event."""

from __future__ import annotations

import json
import threading
import time
from types import TracebackType
from typing import Final, Self

from bench.hardware.engine import LaunchedEngine
from launcher.contract import Contract

PROBE_S: Final = 0.2
SCRAPE_S: Final = 1.0
_ENGINE_METRIC: Final = b"vllm:num_requests_running"


class ProbeWatch:
    """Probes /readyz and /livez and scrapes /metrics, as kubelet and operator do but more often, until the block ends.

    The engine core's own answer (`/plimsoll/progress` on the API port) is asked as the launcher does.
    """

    def __init__(self, engine: LaunchedEngine, contract: Contract) -> None:
        self._engine, self._contract = engine, contract
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._probe, self._scrape, self._progress)
        ]
        self.seen: dict[str, float] = {
            "probes": 0, "unready": 0, "not_live": 0, "slowest_probe_s": 0.0,
            "scrapes": 0, "scrapes_without_engine": 0, "slowest_scrape_s": 0.0,
            "progress_answers": 0, "progress_silences": 0, "longest_step_s": 0.0,
        }  # fmt: skip

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10)
        self.seen = {name: round(value, 3) for name, value in self.seen.items()}

    @property
    def never_unready(self) -> bool:
        """Whether every probe said ready and live."""
        return bool(self.seen["probes"]) and not self.seen["unready"] and not self.seen["not_live"]

    @property
    def always_scraped(self) -> bool:
        """Whether every page had the engine's own metrics."""
        return bool(self.seen["scrapes"]) and not self.seen["scrapes_without_engine"]

    def _timed(self, path: str, slowest: str, port: int | None = None) -> tuple[int, bytes]:
        began = time.monotonic()
        status, body = self._engine.get(path, port=port)
        self.seen[slowest] = max(self.seen[slowest], time.monotonic() - began)
        return status, body

    def _probe(self) -> None:
        while not self._stop.wait(PROBE_S):
            self.seen["probes"] += 1
            self.seen["unready"] += self._timed(self._contract.paths["ready"], "slowest_probe_s")[0] != 200
            self.seen["not_live"] += self._timed(self._contract.paths["live"], "slowest_probe_s")[0] != 200

    def _scrape(self) -> None:
        while not self._stop.wait(SCRAPE_S):
            self.seen["scrapes"] += 1
            _, body = self._timed(self._contract.paths["metrics"], "slowest_scrape_s")
            self.seen["scrapes_without_engine"] += _ENGINE_METRIC not in body

    def _progress(self) -> None:
        while not self._stop.wait(SCRAPE_S):
            status, body = self._engine.get(self._contract.paths["progress"], port=self._engine.api)
            if status != 200:
                self.seen["progress_silences"] += 1
                continue
            self.seen["progress_answers"] += 1
            self.seen["longest_step_s"] = max(self.seen["longest_step_s"], float(json.loads(body)["step_seconds"]))


def wait_readiness(engine: LaunchedEngine, path: str, ready: bool, seconds: float) -> float | None:
    """Seconds until the probe says ready (or unready), None if it does not in time."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if (engine.get(path)[0] == 200) == ready:
            return round(time.monotonic() - began, 2)
        time.sleep(0.1)
    return None
