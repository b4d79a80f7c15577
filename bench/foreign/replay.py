"""One run of their replay, and what each of its requests saw."""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from bench.foreign.law import Law
from bench.foreign.pilots import Pilot
from plimsoll.sim.errors import BadInput
from plimsoll.sim.visit import Asked

VERSION: Final = "1.4.2"
_MODULES: Final = (
    "dynamo._core",
    "dynamo.common.forward_pass_metrics",
    "dynamo.planner.config.planner_config",
    "dynamo.planner.core.types",
    "dynamo.planner.offline.replay_adapter",
)
_BLOCK: Final = 512  # tokens that a name in the trace stands for
ROUTERS: Final = ("kv_router", "round_robin")


def load() -> SimpleNamespace:
    """The package's names, from whichever module has them. Raises BadInput without the package."""
    os.environ.setdefault("DYN_LOG", "error")
    try:
        modules = [importlib.import_module(name) for name in _MODULES]
    except ImportError as error:
        raise BadInput(f"the replay of ai-dynamo {VERSION} cannot be imported ({error})") from None
    logging.getLogger("dynamo").setLevel(logging.CRITICAL)
    return SimpleNamespace(**{name: value for one in modules for name, value in vars(one).items()})


@dataclass(frozen=True)
class Seen:
    """Of one request. Seconds; tpot_s: 0 with a single token."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class Run:
    """requests: those that ended. gpu_s: replica-seconds until the load's end, starting and draining included. peak:
    most replicas. orders: wanted counts, with the moment of each in seconds."""

    requests: tuple[Seen, ...]
    gpu_s: float
    peak: int
    orders: tuple[tuple[float, int], ...] = ()


@dataclass
class Until:
    """Asks a pilot until the load's end, and remembers what it ordered and what there was then."""

    pilot: Pilot
    end_s: float
    there: int
    peak: int = field(init=False)
    orders: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.peak = self.there

    def initial_tick_ms(self) -> float:
        return self.pilot.initial_tick_ms()

    def on_tick(self, shown: dict[str, Any]) -> dict[str, Any]:
        self.there = shown["total_decode_count"]
        self.peak = max(self.peak, self.there)
        if shown["now_ms"] >= 1000.0 * self.end_s:
            return {"target_prefill": None, "target_decode": None, "next_tick_ms": None}
        told = self.pilot.on_tick(shown)
        if told["target_decode"] is not None:
            self.orders.append((shown["now_ms"] / 1000.0, told["target_decode"]))
        return told


def play(
    asked: Sequence[Asked], law: Law, pilot: Pilot, workers: int, start_s: float, end_s: float, router: str
) -> Run:
    """Their engines with this law under this load. end_s: of the load; what is under way then still ends."""
    package, until, own = load(), Until(pilot, end_s, workers), law.profile
    with TemporaryDirectory() as folder:
        there, tables = Path(folder), dict[str, Any](law.tables())
        np.savez(there / "steps.npz", **tables)
        (there / "asked.jsonl").write_text("\n".join(trace(asked)) + "\n")
        engine = {
            "engine_type": "vllm",
            "block_size": own.block_size,
            "num_gpu_blocks": own.kv_tokens // own.block_size,
            "max_num_seqs": own.max_num_seqs,
            "max_num_batched_tokens": own.budget,
            "max_model_len": own.max_model_len,
            "enable_prefix_caching": False,
            "startup_time": start_s,
            "planner_profile_data": str(there / "steps.npz"),
        }
        report = package.run_mocker_trace_replay(
            [there / "asked.jsonl"],
            extra_engine_args=package.MockEngineArgs.from_json(json.dumps(engine)),
            num_workers=workers,
            router_mode=router,
            trace_block_size=_BLOCK,
            report_jsonl_path=there / "ended.jsonl",
            scaling_policy=until,
        )
        requests = tuple(ended((there / "ended.jsonl").read_text().splitlines()))
    return Run(requests, paid_s(report, until.there, end_s), until.peak, tuple(until.orders))


def trace(asked: Iterable[Asked]) -> Iterable[str]:
    """The load in the form that their replay reads; no two prompts have anything in common."""
    name = 0
    for one in asked:
        blocks = -(-one.prompt_tokens // _BLOCK)
        yield json.dumps(
            {
                "timestamp": 1000.0 * one.at_s,
                "input_length": one.prompt_tokens,
                "output_length": one.output_tokens,
                "hash_ids": list(range(name, name + blocks)),
            }
        )
        name += blocks


def ended(lines: Iterable[str]) -> Iterable[Seen]:
    """Requests of their report that were answered."""
    for line in lines:
        one = json.loads(line)
        if one["terminal_status"] == "completed":
            yield Seen(one["ttft_ms"] / 1000.0, (one["itl_ms"] or 0.0) / 1000.0)


def paid_s(report: dict[str, Any], there: int, end_s: float) -> float:
    """Replica-seconds until the load's end. there: replicas at that time, which stay until the last request's end."""
    over_s: float = max(0.0, report["duration_ms"] / 1000.0 - end_s)
    whole_s: float = report["decode_worker_seconds"]
    return whole_s - there * over_s
