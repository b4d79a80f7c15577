"""What the operator knows of engines without Plimsoll's launcher: those of a service with targets.

Problem: such engines report less. A simulation that knew more would size them better than a cluster does.

Idea: of the launcher's report only what vLLM's metrics page has remains, the shape of the KV cache. Accelerator, model
and arguments are unknown, as of a pod without node selector. The step times follow from the means of each engine's
requests (`observed_benchmark`), and a start-up has the phases that Kubernetes reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from plimsoll.core.autoscaling.inputs import TierSnapshot
from plimsoll.core.autoscaling.startup_time import POD_PHASES, StartingPod
from plimsoll.core.engine_model.observed_benchmark import observed_benchmark
from plimsoll.core.ports import EngineInfo, EngineReading, SelfBenchmark
from plimsoll.core.types import Role
from plimsoll.sim.startup import StartupPhases

_UNREPORTED_PHASE: Final = "launch"  # of a pod whose container runs and is not ready
_READY_PHASE: Final = "engine"  # from the start of the container to readiness


class AdoptedEngines:
    """The engines of one service. All times are seconds since the epoch."""

    def __init__(self) -> None:
        self._first: dict[str, EngineReading] = {}
        self._benchmarks: dict[str, SelfBenchmark] = {}

    def observe(self, role: Role, reading: EngineReading) -> None:
        """Learn from a scrape."""
        pod = reading.pod
        if pod in self._benchmarks:
            return
        benchmark = observed_benchmark(reading, self._first.setdefault(pod, reading), role)
        if benchmark is not None:
            self._benchmarks[pod] = benchmark

    def known(self, tier: TierSnapshot, ready: Sequence[str]) -> TierSnapshot:
        """The part of a snapshot that is known. ready: names of the tier's ready engines, oldest first."""
        scraped = next((pod for pod in ready if pod in self._first), None)
        info = None
        if scraped is not None and tier.engine_info is not None:
            info = EngineInfo(
                tier.engine_info.engine,
                tier.engine_info.engine_version,
                "unknown",
                tier.engine_info.gpus,
                kv_tokens=tier.engine_info.kv_tokens,
                block_tokens=tier.engine_info.block_tokens,
                self_benchmark=self._benchmarks.get(scraped),
            )
        return replace(tier, engine_info=info, starting=tuple(map(_known_start, tier.starting)))


def _known_start(pod: StartingPod) -> StartingPod:
    return pod if pod.phase in POD_PHASES else replace(pod, phase=_UNREPORTED_PHASE, phase_since_s=None)


def known_phases(phases: StartupPhases) -> StartupPhases:
    """The phases of a completed start-up without the launcher's report."""
    of_pod = tuple(phase for phase in phases if phase[0] in POD_PHASES)
    return (*of_pod, (_READY_PHASE, sum(seconds for name, seconds in phases if name not in POD_PHASES)))
