"""One run of Dynamo's replay, with the result of each request."""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from bench.dynamo_replay.controllers import ReplayController
from bench.dynamo_replay.counters import GROUPS
from bench.dynamo_replay.figures import ReplayRun
from bench.dynamo_replay.step_tables import StepLaw
from plimsoll.core.types import Role
from plimsoll.sim.attempt import Attempt, AttemptOutcome, TraceRequest
from plimsoll.sim.engine.kv_link import FABRIC_BYTES_PER_S
from plimsoll.sim.errors import BadInput

VERSION: Final = "1.4.2"
_MODULES: Final = (
    "dynamo._core",
    "dynamo.common.forward_pass_metrics",
    "dynamo.planner.config.planner_config",
    "dynamo.planner.core.types",
    "dynamo.planner.offline.replay_adapter",
)
_BLOCK_TOKENS: Final = 512  # tokens that a name in the trace stands for
_GB: Final = 1e9
ROUTERS: Final = ("kv_router", "round_robin")


def load_package() -> SimpleNamespace:
    """The package's names, from whichever module has them. Raises BadInput without the package."""
    os.environ.setdefault("DYN_LOG", "error")
    try:
        modules = [importlib.import_module(name) for name in _MODULES]
    except ImportError as error:
        raise BadInput(f"the replay of ai-dynamo {VERSION} cannot be imported ({error})") from None
    logging.getLogger("dynamo").setLevel(logging.CRITICAL)
    return SimpleNamespace(**{name: value for module in modules for name, value in vars(module).items()})


@dataclass
class RecordingController:
    """Asks a pilot until the load's end, and remembers what it ordered and what there was. workers: at first."""

    controller: ReplayController
    end_s: float
    workers: Mapping[Role, int]
    ready_counts: dict[Role, list[tuple[float, int]]] = field(init=False)
    desired_counts: dict[Role, list[tuple[float, int]]] = field(init=False)

    def __post_init__(self) -> None:
        self.ready_counts, self.desired_counts = (
            {role: [(0.0, count)] for role, count in self.workers.items()} for _ in ("there", "wanted")
        )

    def initial_tick_ms(self) -> float:
        return self.controller.initial_tick_ms()

    def on_tick(self, shown: dict[str, Any]) -> dict[str, Any]:
        now_s = shown["now_ms"] / 1000.0
        for role, last_count in self.ready_counts.items():
            if (count := shown[f"total_{GROUPS[role]}_count"]) != last_count[-1][1]:
                last_count.append((now_s, count))
        if now_s >= self.end_s:
            return {"target_prefill": None, "target_decode": None, "next_tick_ms": None}
        orders = self.controller.on_tick(shown)
        for role, last_count in self.desired_counts.items():
            if (target := orders[f"target_{GROUPS[role]}"]) is not None:
                last_count.append((now_s, target))
        return orders


def play(
    requests: Sequence[TraceRequest],
    law: StepLaw,
    controller: ReplayController,
    workers: Mapping[Role, int],
    start_s: float,
    end_s: float,
    router: str,
) -> ReplayRun:
    """Run Dynamo's engines with this step law under this load; the first request arrives at time 0 of their clock.

    workers: initial replicas of each tier. end_s: end of the load; running requests still complete. router: one of
    `ROUTERS`.
    """
    package, recorder = load_package(), RecordingController(controller, end_s, workers)
    with TemporaryDirectory() as folder:
        engine_args, tables = Path(folder), dict[str, Any](law.tables())
        np.savez(engine_args / "steps.npz", **tables)
        (engine_args / "asked.jsonl").write_text("\n".join(write_trace(requests)) + "\n")
        report = package.run_mocker_trace_replay(
            [engine_args / "asked.jsonl"],
            **_engine_args(law, workers, start_s, engine_args / "steps.npz", package),
            router_mode=router,
            trace_block_size=_BLOCK_TOKENS,
            report_jsonl_path=engine_args / "ended.jsonl",
            scaling_policy=recorder,
        )
        attempts = read_attempts(requests, (engine_args / "ended.jsonl").read_text().splitlines())
    paid = {role: paid_s(report, GROUPS[role], counts[-1][1], end_s) for role, counts in recorder.ready_counts.items()}
    return ReplayRun(attempts, paid, recorder.ready_counts, recorder.desired_counts)


def _engine_args(
    law: StepLaw, workers: Mapping[Role, int], start_s: float, steps: Path, package: SimpleNamespace
) -> dict[str, Any]:
    """The arguments that say which engines there are."""
    profile = law.profile
    engine = {
        "engine_type": "vllm",
        "block_size": profile.block_size,
        "num_gpu_blocks": profile.kv_tokens // profile.block_size,
        "max_num_seqs": profile.max_num_seqs,
        "max_num_batched_tokens": profile.budget,
        "max_model_len": profile.max_model_len,
        "enable_prefix_caching": False,
        "startup_time": start_s,
        "planner_profile_data": str(steps),
    }

    def made(**more: Any) -> Any:
        return package.MockEngineArgs.from_json(json.dumps({**engine, **more}))

    if Role.SERVE in workers:
        return {"extra_engine_args": made(), "num_workers": workers[Role.SERVE]}
    kv_link = {"kv_bytes_per_token": profile.kv_bytes_per_token, "kv_transfer_bandwidth": FABRIC_BYTES_PER_S / _GB}
    return {
        "prefill_engine_args": made(worker_type="prefill", **kv_link),
        "decode_engine_args": made(worker_type="decode", **kv_link),
        "num_prefill_workers": workers[Role.PREFILL],
        "num_decode_workers": workers[Role.DECODE],
    }


def write_trace(requests: Iterable[TraceRequest]) -> Iterable[str]:
    """The load in the form that their replay reads; no two prompts have anything in common."""
    name = 0
    for request in requests:
        blocks = -(-request.prompt_tokens // _BLOCK_TOKENS)
        yield json.dumps(
            {
                "timestamp": 1000.0 * request.at_s,
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "hash_ids": list(range(name, name + blocks)),
            }
        )
        name += blocks


def read_attempts(requests: Sequence[TraceRequest], lines: Iterable[str]) -> list[Attempt]:
    """Each request of the load, with what their report says of it: a line each for those that ended, in any order."""
    unmatched: dict[tuple[int, int, int], list[int]] = {}
    for number, request in reversed(list(enumerate(requests))):
        key = _request_key(1000.0 * request.at_s, request.prompt_tokens, request.output_tokens)
        unmatched.setdefault(key, []).append(number)
    attempts = [
        Attempt(number, request, None, outcome=AttemptOutcome.UNFINISHED) for number, request in enumerate(requests, 1)
    ]
    for line in lines:
        report = json.loads(line)
        key = _request_key(report["arrival_time_ms"], report["input_length"], report["requested_output_length"])
        attempt = attempts[unmatched[key].pop()]
        if report["terminal_status"] != "completed":
            attempt.outcome = AttemptOutcome.REFUSED
            continue
        attempt.outcome = AttemptOutcome.OK
        attempt.first_token_s = attempt.trace_request.at_s + report["ttft_ms"] / 1000.0
        attempt.end_s = attempt.first_token_s + (report["itl_ms"] or 0.0) / 1000.0 * (
            attempt.trace_request.output_tokens - 1
        )
    return attempts


def _request_key(at_ms: float, prompt_tokens: int, output_tokens: int) -> tuple[int, int, int]:
    """What tells a request: their replay gives it a name of its own."""
    return round(1000.0 * at_ms), prompt_tokens, output_tokens


def paid_s(report: dict[str, Any], group: str, ready_counts: int, end_s: float) -> float:
    """Return a tier's replica-seconds until the end of the load.

    ready_counts: replicas at that time. A run ends with its last request, which may be earlier or later.
    """
    over_s: float = report["duration_ms"] / 1000.0 - end_s
    report_s: float = report[f"{group}_worker_seconds"]
    return report_s - ready_counts * over_s
