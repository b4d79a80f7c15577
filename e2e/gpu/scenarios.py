"""What is run, as data: the load over time, what is done to the engines meanwhile, and the manifest of the service.

A rate is a multiple of one engine's SLO capacity as `plimsoll plan` says it before (`capacity_per_s`), so that the same
scenario fits every card. Each trace is drawn from a seed before anything runs, and its hash is written down. A recorded
trace is a real one at its own times; stretches of it lie over each other, as one alone is less than an engine's load.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.hardware import traces
from e2e.gpu import rival
from e2e.gpu.settings import CACHES, CHECKOUT, HUB_MODEL, NAMESPACE

SERVICE: Final = "m"  # the model's name in the clients' requests
PLIMSOLL: Final = "plimsoll"
TTFT_S: Final = 0.5
TPOT_S: Final = 0.05
PERCENTILE: Final = 95
MAX_SEQUENCES: Final = 256
GPU_LABEL: Final = "nvidia.com/gpu.product"  # as GPU feature discovery sets it
CACHE_MOUNT: Final = Path("/home/plimsoll/hf")  # of the model's cache, in the engine's container
PAUSE_S: Final = 35.0  # between the loads of two scenarios
RESTART_S: Final = 60.0  # from the kill of an engine's core to its first answer, as expected of fewer imports
ITL_S: Final = 0.04  # of the scenario that compares arguments
LORA: Final = {"maxLoras": 4, "maxLoraRank": 16, "maxCpuLoras": 8}
CHUNK: Final = 1024  # prompt tokens of a step, which the operator sets for that ITL
_ARGUMENTS: Final = ("--max-model-len", "32768", "--max-num-seqs", str(MAX_SEQUENCES))  # added to the operator's
_COMMON: Final = (*_ARGUMENTS, "--max-num-queued-reqs", "2048", "--shutdown-timeout", "30")  # of all engines
ADAPTERS: Final = tuple(f"a{number}" for number in range(1, 7))
RECORDED: Final = CHECKOUT / "bench/scoreboard/traces/azure-code-2023.csv.gz"


@dataclass(frozen=True)
class Act:
    """Something done to an engine `at_s` seconds after the load began."""

    at_s: float
    what: str


@dataclass(frozen=True)
class Beside:
    """A second load at the same time: the names that its requests have in turn, its rate, and when it begins."""

    names: tuple[str, ...]
    share: float
    begin_s: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """`phases`: pairs of a multiple of one engine's capacity and seconds. `tools`: other load tools afterwards.

    `stretches`: seconds of the recorded trace, which are laid over each other; `phases` then only divide the figures.
    `every`: of each stretch only every n-th request, so that many of them are one load.
    `pair`: a prefill and a decode tier in place of `serve`, each between `low` and `high`. `rival`: a second service of
    lower priority. `tuning`: a second service without arguments from the SLO.
    `starts`: how often the engine's pod is deleted and the next one awaited, on a machine that is idle otherwise.
    `policy`: who sets the replicas, as `plimsoll simulate` names it. For others than Plimsoll the gateway admits by the
    SLO only with the option `gated=1`.
    `adapters`: how many there are at first; the act "add adapters" brings the others. `names`: what requests ask for.
    """

    name: str
    low: int
    high: int
    phases: tuple[tuple[float, float], ...]
    acts: tuple[Act, ...] = ()
    tools: bool = False
    to_zero: bool = False
    seed: int = 29
    ttft_s: float = TTFT_S
    tpot_s: float = TPOT_S
    stretches: tuple[float, ...] = ()
    every: int = 1
    pair: bool = False
    rival: bool = False
    tuning: bool = False
    adapters: int = 0
    names: tuple[str, ...] = (SERVICE,)
    beside: Beside | None = None
    starts: int = 0
    policy: str = PLIMSOLL

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers."""
        return ("prefill", "decode") if self.pair else ("serve",)

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.phases)

    @property
    def is_gated(self) -> bool:
        """Whether the gateway admits by the SLO."""
        return self.policy == PLIMSOLL or "gated=1" in self.policy


_PAIR: Final = ((0.3, 30.0), (0.7, 40.0))
_STEP: Final = ((0.6, 30.0), (1.5, 150.0), (0.5, 60.0))

SCENARIOS: Final = {
    one.name: one
    for one in (
        Scenario("steady", 1, 1, ((0.7, 60.0),), tools=True),
        Scenario("overload", 1, 1, ((0.6, 30.0), (1.6, 60.0), (0.6, 30.0))),
        Scenario("kill", 1, 1, ((0.4, 150.0),), acts=(Act(20.0, "kill"),)),
        Scenario("zero", 0, 1, (), to_zero=True),
        Scenario("starts", 1, 1, (), starts=4),
        Scenario("step", 1, 2, _STEP),
        Scenario("step-hpa", 1, 2, _STEP, policy="hpa-concurrency"),
        Scenario("step-hpa-gated", 1, 2, _STEP, policy="hpa-concurrency:gated=1"),
        Scenario("step-keda", 1, 2, _STEP, policy="keda-ttft"),
        Scenario("step-keda-gated", 1, 2, _STEP, policy="keda-ttft:gated=1"),
        Scenario(
            "trace",
            1,
            2,
            ((0.6, 160.0), (1.1, 140.0)),  # of one engine's capacity for these lengths
            ttft_s=1.0,
            tpot_s=0.1,  # a step that reads 2,000 prompt tokens takes 70 ms, and an answer has 28 tokens
            stretches=(960.0, 2870.0, 2880.0, 2980.0, 3060.0, 3100.0),
        ),
        Scenario(
            "long-trace",
            1,
            2,
            ((0.8, 640.0), (0.5, 160.0), (0.7, 400.0)),  # of one engine's capacity for these lengths
            ttft_s=1.0,
            tpot_s=0.1,
            stretches=(180.0, 240.0, 270.0, 320.0, 930.0, 2060.0, 2080.0, 2100.0, 2130.0),
            every=3,
        ),
        Scenario("kills", 2, 2, ((1.0, 200.0),), acts=(Act(20.0, "kill"), Act(80.0, "kill"), Act(140.0, "kill"))),
        Scenario("rollout", 1, 1, ((0.5, 170.0),), acts=(Act(35.0, "rollout"),)),
        Scenario("failures", 2, 2, ((1.0, 230.0),), acts=(Act(15.0, "stop"), Act(145.0, "delete"))),
        Scenario("restart", 2, 2, ((0.3, 40.0), (0.6, 40.0), (0.9, 40.0)), acts=(Act(92.0, "restart operator"),)),
        Scenario("rivals", 1, 2, ((0.5, 20.0), (1.5, 110.0), (0.4, 80.0)), rival=True),
        Scenario("pair", 1, 1, _PAIR, pair=True),
        Scenario("aggregated", 2, 2, _PAIR),  # the same requests
        Scenario("tools", 2, 2, ((1.0, 20.0),), tools=True),
        Scenario("tuning", 1, 1, ((0.7, 70.0),), tuning=True, beside=Beside((rival.RIVAL,), 0.7)),
        Scenario(
            "lora",
            1,
            1,
            ((0.35, 75.0),),
            acts=(Act(5.0, "add adapters"),),
            adapters=3,
            names=(SERVICE, *ADAPTERS[:3]),
            beside=Beside(ADAPTERS[3:], 0.25, begin_s=35.0),
        ),
    )
}


def trace(scenario: Scenario, capacity_per_s: float) -> list[traces.PlannedRequest]:
    """The requests of a scenario: Poisson arrivals in each phase with the lengths of a chat, or the recorded ones."""
    if scenario.stretches:
        return _recorded(scenario)
    requests: list[traces.PlannedRequest] = []
    begin = 0.0
    for number, (share, seconds) in enumerate(scenario.phases):
        rows = traces.poisson(share * capacity_per_s, seconds, scenario.seed * 1000 + number)
        requests += [traces.PlannedRequest(begin + row.at_s, row.prompt, row.output) for row in rows]
        begin += seconds
    return requests


def trace_beside(beside: Beside, scenario: Scenario, capacity_per_s: float) -> list[traces.PlannedRequest]:
    """The requests of a second load: those of the first if it has its rate and time, else others."""
    (share, _), *_ = scenario.phases
    if (beside.share, beside.begin_s) == (share, 0.0):
        return trace(scenario, capacity_per_s)
    seconds = scenario.seconds - beside.begin_s
    rows = traces.poisson(beside.share * capacity_per_s, seconds, scenario.seed * 1000 + 500)
    return [traces.PlannedRequest(beside.begin_s + row.at_s, row.prompt, row.output) for row in rows]


def seconds_without_engine(scenario: Scenario, restart_s: float) -> float:
    """How long no engine is ready if each kill ends the first ready one, which is ready again `restart_s` later."""
    back_s, total_s = [0.0] * scenario.low, 0.0
    for kill in (act for act in scenario.acts if act.what == "kill"):
        ready = [engine for engine, at_s in enumerate(back_s) if at_s <= kill.at_s]
        if ready:
            back_s[ready[0]] = kill.at_s + restart_s
            total_s += max(0.0, min(min(back_s), scenario.seconds) - kill.at_s)
    return total_s


def _recorded(scenario: Scenario) -> list[traces.PlannedRequest]:
    with gzip.open(RECORDED, "rt", encoding="ascii") as lines:
        rows = [
            traces.PlannedRequest(float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]))
            for row in csv.DictReader(lines)
        ]
    found = [
        traces.PlannedRequest(round(row.at_s - begin_s, 2), row.prompt, row.output)
        for begin_s in scenario.stretches
        for row in [row for row in rows if begin_s <= row.at_s < begin_s + scenario.seconds][:: scenario.every]
    ]
    return sorted(found, key=lambda row: row.at_s)


def compiled(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Sets of arguments of these scenarios' engines for which compilers make different code."""
    chosen = [SCENARIOS[name] for name in names]
    needed = (
        (_COMMON, any(not scenario.adapters for scenario in chosen)),
        ((*_COMMON, "--max-num-batched-tokens", str(CHUNK)), any(scenario.tuning for scenario in chosen)),
        ((*_COMMON, "--enable-lora", *_lora_arguments()), any(scenario.adapters for scenario in chosen)),
    )
    return [arguments for arguments, is_needed in needed if is_needed]


def _lora_arguments() -> tuple[str, ...]:
    bounds = zip(("--max-loras", "--max-lora-rank", "--max-cpu-loras"), map(str, LORA.values()), strict=True)
    return tuple(word for pair in bounds for word in pair)


def cache_variables() -> dict[str, str]:
    """Where compilers keep what they made: as the operator sets it for a model that a folder of the node keeps."""
    folders = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton"}
    return {name: str(CACHE_MOUNT / ".compiled" / folder) for name, folder in folders.items()}


def manifest(scenario: Scenario, *, version: int = 0, product: str = "NVIDIA-H100-80GB-HBM3") -> dict[str, Any]:
    """The InferenceService of a scenario; another `version` is another pod template, and so a rollout.

    A version of a scenario with adapters has those that are added. product: the type of the node's GPUs.
    """
    variables = {"STEPLOG_WEIGHTS": "1", "ROLLOUT": str(version)}
    tier: dict[str, Any] = {
        "minReplicas": scenario.low,
        "maxReplicas": scenario.high,
        "pod": {"priorityClassName": rival.HIGH},
    }
    spec: dict[str, Any] = {
        "model": {"uri": f"hf://{HUB_MODEL}", "cache": {"hostPath": str(CACHES)}},
        "engine": {
            "args": list(_ARGUMENTS),
            "env": [{"name": name, "value": value} for name, value in variables.items()],
            "drainTimeout": "30s",
        },
        "slo": {
            "ttft": f"{scenario.ttft_s * 1000:.0f}ms",
            "tpot": f"{scenario.tpot_s * 1000:.0f}ms",
            "percentile": PERCENTILE,
        },
        "tiers": dict.fromkeys(scenario.tiers, tier),
    }
    if scenario.policy != PLIMSOLL:
        spec["scaling"] = {"mode": "Recommend" if scenario.is_gated else "Off"}
    if not scenario.is_gated:
        del spec["slo"]
    if scenario.tuning:
        spec["slo"]["itl"] = f"{ITL_S * 1000:.0f}ms"
        spec["engine"]["tuning"] = "Auto"
        tier["pod"]["nodeSelector"] = {GPU_LABEL: product}
    if scenario.adapters:
        names = ADAPTERS if version else ADAPTERS[: scenario.adapters]
        spec["adapters"] = [{"name": name, "uri": f"file://{CACHE_MOUNT}/adapters/{name}"} for name in names]
        spec["engine"]["lora"] = LORA
        variables["ROLLOUT"] = "0"
        spec["engine"]["env"] = [{"name": name, "value": value} for name, value in variables.items()]
    if scenario.to_zero:
        spec["scaling"] = {"sloMissCost": 0, "horizon": "20s"}
        spec["admission"] = {"classes": [{"name": "default", "maxQueueTime": "120s"}]}
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": SERVICE, "namespace": NAMESPACE},
        "spec": spec,
    }


def without_tuning(first: dict[str, Any]) -> dict[str, Any]:
    """The second service, which differs from the first in its arguments only."""
    engine = {**first["spec"]["engine"], "tuning": "Off"}
    return {
        **first,
        "metadata": {"name": rival.RIVAL, "namespace": NAMESPACE},
        "spec": {**first["spec"], "engine": engine},
    }


def write_trace(scenario: Scenario, capacity_per_s: float, path: Path, past: Scenario | None = None) -> str:
    """The trace as `plimsoll simulate` reads it, after that of another scenario if `past` is given; its SHA-256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    requests = trace(scenario, capacity_per_s)
    if past:
        begin_s = past.seconds + PAUSE_S
        later = [traces.PlannedRequest(row.at_s + begin_s, row.prompt, row.output) for row in requests]
        requests = trace(past, capacity_per_s) + later
    traces.write(path, requests)
    return traces.digest(path)


def percentile(values: list[float], share: float) -> float | None:
    """A percentile; None of no values."""
    return round(float(np.percentile(values, share)), 4) if values else None
