"""What the simulator says of a scenario with adapters: the shares of its two loads and of each model name.

    python -m e2e.gpu.predict_adapters lora --hardware h200-8b-launcher --capacity 19.38 --out OUT.json

`plimsoll simulate` scores all requests together; a page on adapters needs those of each name. Engines run `maxLoras`
adapters at once, as vLLM does, and clients do not repeat what was rejected.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from e2e.gpu import scenarios
from e2e.gpu.scenarios import SERVICE, Scenario
from plimsoll.api.v1alpha1 import parse
from plimsoll.core.types import Role
from plimsoll.sim import profile
from plimsoll.sim.attempt import Attempt, AttemptOutcome, TraceRequest
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies.base import PlimsollPolicy
from plimsoll.sim.run_config import RunConfig
from plimsoll.sim.simulator import Simulator
from plimsoll.sim.startup import StartupDistribution


def loads(scenario: Scenario, capacity_per_s: float) -> tuple[list[TraceRequest], list[TraceRequest]]:
    """Requests of the first and of the second load, with the names that the client gives them in turn."""
    assert scenario.beside
    both = (
        (scenario.names, scenarios.trace(scenario, capacity_per_s)),
        (scenario.beside.names, scenarios.trace_beside(scenario.beside, scenario, capacity_per_s)),
    )
    first, second = (
        [
            TraceRequest(row.at_s, row.prompt, row.output, adapter=name if name != SERVICE else "")
            for row, name in ((row, names[number % len(names)]) for number, row in enumerate(rows))
        ]
        for names, rows in both
    )
    return first, second


def predict(scenario: Scenario, capacity_per_s: float, hardware: str, scale: float = 1.0) -> dict[str, Any]:
    """Of each load and of each name in it: offered, within the SLO and rejected. scale: of the engines' step times."""
    service = parse(scenarios.manifest(scenario, version=1))  # with all adapters: they are there when they are asked
    engine = replace(profile.load(hardware), max_num_seqs=scenarios.MAX_SEQUENCES)
    plant = Plant(engine, StartupDistribution(60.0, 60.0), scale=scale, max_adapters=scenarios.LORA["maxLoras"])
    attempts: list[Attempt] = []
    config = RunConfig({Role.SERVE: scenario.low}, scenario.seconds)
    first, second = loads(scenario, capacity_per_s)
    requests = sorted((*first, *second), key=lambda request: request.at_s)
    Simulator(service, plant, PlimsollPolicy(), config, attempts.append).run(requests)
    names = {one.adapter for one in second}
    parts = {
        "first": [one for one in attempts if one.trace_request.adapter not in names],
        "beside": [one for one in attempts if one.trace_request.adapter in names],
    }
    return {load: _shares(part, scenario) for load, part in parts.items()}


def _shares(attempts: Iterable[Attempt], scenario: Scenario) -> dict[str, Any]:
    offered: Counter[str] = Counter()
    within: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    for one in attempts:
        name = one.trace_request.adapter or SERVICE
        offered[name] += 1
        rejected[one.reason or ""] += one.outcome is AttemptOutcome.SHED
        in_time = one.ttft_s is not None and one.ttft_s <= scenario.ttft_s
        within[name] += (
            one.outcome is AttemptOutcome.OK and in_time and (one.tpot_s is None or one.tpot_s <= scenario.tpot_s)
        )
    return {
        "offered": offered.total(),
        "within_share": round(within.total() / offered.total(), 4),
        "rejected": {reason: count for reason, count in rejected.items() if count},
        "names": {name: round(within[name] / count, 4) for name, count in sorted(offered.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", choices=[one.name for one in scenarios.SCENARIOS.values() if one.adapters])
    parser.add_argument("--hardware", required=True, help="a profile of `plimsoll simulate`")
    parser.add_argument("--capacity", type=float, required=True, help="requests/s of one engine")
    parser.add_argument("--plant-scale", type=float, default=1.0, help="as `plimsoll simulate` has it")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    document = {"hardware": given.hardware, "capacity_per_s": given.capacity}
    scenario = scenarios.SCENARIOS[given.scenario]
    document[given.scenario] = predict(scenario, given.capacity, given.hardware, given.plant_scale)
    given.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document[given.scenario]))


if __name__ == "__main__":
    main()
