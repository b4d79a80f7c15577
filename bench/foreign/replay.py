"""One run of their replay, and what each of its requests saw."""

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

from bench.foreign.judge import Run
from bench.foreign.law import Law
from bench.foreign.pilots import Pilot
from bench.foreign.watch import GROUPS
from plimsoll.core.picking.endpoint import Role
from plimsoll.sim.errors import BadInput
from plimsoll.sim.visit import Asked, End, Visit
from plimsoll.sim.wire import FABRIC

VERSION: Final = "1.4.2"
_MODULES: Final = (
    "dynamo._core",
    "dynamo.common.forward_pass_metrics",
    "dynamo.planner.config.planner_config",
    "dynamo.planner.core.types",
    "dynamo.planner.offline.replay_adapter",
)
_BLOCK: Final = 512  # tokens that a name in the trace stands for
_GB: Final = 1e9
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


@dataclass
class Until:
    """Asks a pilot until the load's end, and remembers what it ordered and what there was. workers: at first."""

    pilot: Pilot
    end_s: float
    workers: Mapping[Role, int]
    there: dict[Role, list[tuple[float, int]]] = field(init=False)
    wanted: dict[Role, list[tuple[float, int]]] = field(init=False)

    def __post_init__(self) -> None:
        self.there, self.wanted = (
            {role: [(0.0, count)] for role, count in self.workers.items()} for _ in ("there", "wanted")
        )

    def initial_tick_ms(self) -> float:
        return self.pilot.initial_tick_ms()

    def on_tick(self, shown: dict[str, Any]) -> dict[str, Any]:
        now_s = shown["now_ms"] / 1000.0
        for role, known in self.there.items():
            if (count := shown[f"total_{GROUPS[role]}_count"]) != known[-1][1]:
                known.append((now_s, count))
        if now_s >= self.end_s:
            return {"target_prefill": None, "target_decode": None, "next_tick_ms": None}
        told = self.pilot.on_tick(shown)
        for role, known in self.wanted.items():
            if (target := told[f"target_{GROUPS[role]}"]) is not None:
                known.append((now_s, target))
        return told


def play(
    asked: Sequence[Asked], law: Law, pilot: Pilot, workers: Mapping[Role, int], start_s: float, end_s: float, how: str
) -> Run:
    """Their engines with this law under this load, whose first request comes at 0: their clock begins with it.

    workers: of each tier at first. end_s: of the load; what is under way then still ends. how: of `ROUTERS`.
    """
    package, until = load(), Until(pilot, end_s, workers)
    with TemporaryDirectory() as folder:
        there, tables = Path(folder), dict[str, Any](law.tables())
        np.savez(there / "steps.npz", **tables)
        (there / "asked.jsonl").write_text("\n".join(trace(asked)) + "\n")
        report = package.run_mocker_trace_replay(
            [there / "asked.jsonl"],
            **_engines(law, workers, start_s, there / "steps.npz", package),
            router_mode=how,
            trace_block_size=_BLOCK,
            report_jsonl_path=there / "ended.jsonl",
            scaling_policy=until,
        )
        visits = ended(asked, (there / "ended.jsonl").read_text().splitlines())
    paid = {role: paid_s(report, GROUPS[role], counts[-1][1], end_s) for role, counts in until.there.items()}
    return Run(visits, paid, until.there, until.wanted)


def _engines(
    law: Law, workers: Mapping[Role, int], start_s: float, steps: Path, package: SimpleNamespace
) -> dict[str, Any]:
    """The arguments that say which engines there are."""
    own = law.profile
    engine = {
        "engine_type": "vllm",
        "block_size": own.block_size,
        "num_gpu_blocks": own.kv_tokens // own.block_size,
        "max_num_seqs": own.max_num_seqs,
        "max_num_batched_tokens": own.budget,
        "max_model_len": own.max_model_len,
        "enable_prefix_caching": False,
        "startup_time": start_s,
        "planner_profile_data": str(steps),
    }

    def made(**more: Any) -> Any:
        return package.MockEngineArgs.from_json(json.dumps({**engine, **more}))

    if Role.SERVE in workers:
        return {"extra_engine_args": made(), "num_workers": workers[Role.SERVE]}
    wire = {"kv_bytes_per_token": own.kv_bytes_per_token, "kv_transfer_bandwidth": FABRIC / _GB}
    return {
        "prefill_engine_args": made(worker_type="prefill", **wire),
        "decode_engine_args": made(worker_type="decode", **wire),
        "num_prefill_workers": workers[Role.PREFILL],
        "num_decode_workers": workers[Role.DECODE],
    }


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


def ended(asked: Sequence[Asked], lines: Iterable[str]) -> list[Visit]:
    """Each request of the load, with what their report says of it: a line each for those that ended, in any order."""
    waiting: dict[tuple[int, int, int], list[int]] = {}
    for number, one in reversed(list(enumerate(asked))):
        mark = _mark(1000.0 * one.at_s, one.prompt_tokens, one.output_tokens)
        waiting.setdefault(mark, []).append(number)
    visits = [Visit(number, one, None, end=End.UNFINISHED) for number, one in enumerate(asked, 1)]
    for line in lines:
        told = json.loads(line)
        mark = _mark(told["arrival_time_ms"], told["input_length"], told["requested_output_length"])
        visit = visits[waiting[mark].pop()]
        if told["terminal_status"] != "completed":
            visit.end = End.REFUSED
            continue
        visit.end = End.OK
        visit.first_s = visit.asked.at_s + told["ttft_ms"] / 1000.0
        visit.end_s = visit.first_s + (told["itl_ms"] or 0.0) / 1000.0 * (visit.asked.output_tokens - 1)
    return visits


def _mark(at_ms: float, prompt_tokens: int, output_tokens: int) -> tuple[int, int, int]:
    """What tells a request: their replay gives it a name of its own."""
    return round(1000.0 * at_ms), prompt_tokens, output_tokens


def paid_s(report: dict[str, Any], group: str, there: int, end_s: float) -> float:
    """A tier's replica-seconds until the load's end. there: replicas at that time; a run ends with its last request,
    later than that or sooner."""
    over_s: float = report["duration_ms"] / 1000.0 - end_s
    whole_s: float = report[f"{group}_worker_seconds"]
    return whole_s - there * over_s
