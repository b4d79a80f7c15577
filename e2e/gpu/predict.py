"""What `plimsoll plan` and `plimsoll simulate` say of each scenario before it runs: one file, with the traces' hashes.

The simulator gets the very requests, the very manifest, and the start-up time that was measured before; a kill is in
neither, so the prediction of such a scenario is that of the load alone, and how long no engine is ready.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from e2e.gpu import scenarios
from e2e.gpu.run import shortened
from e2e.gpu.scenarios import PLIMSOLL, SCENARIOS, TPOT_S, TTFT_S, Scenario
from e2e.gpu.settings import CHECKOUT
from plimsoll.cli.main import main as plimsoll

_POLICIES: Final = (PLIMSOLL, "static:1", "static:2", "hpa-concurrency", "keda-ttft")
_KEPT: Final = (
    "offered", "admitted", "shed", "attainment_offered", "attainment_admitted", "p50_ttft_s", "p95_ttft_s",
    "p50_tpot_s", "p95_tpot_s", "itl_p99_s", "goodput_rps", "gpu_hours", "changes", "mean_replicas",
)  # fmt: skip
PROFILES: Final = CHECKOUT / "operator/plimsoll/sim/profiles"
_MEAN_PROMPT, _MEAN_OUTPUT = 1190, 220  # of a chat, as the traces draw it


def predict(
    names: Sequence[str],
    hardware: str,
    start_up: str,
    out: Path,
    *,
    load: float | None = None,
    after: str | None = None,
    shorten: float = 1.0,
) -> None:
    """Writes `out`: the capacity of one engine, and for each named scenario with a load what is predicted by policy.

    load: capacity that the loads are multiples of, if another; after: scenario whose load the service has had before;
    shorten: factor of the scenarios' times.
    """
    capacity = _capacity(hardware)
    document: dict[str, Any] = {
        "hardware": hardware,
        "start_up_s": start_up,
        "capacity_per_s": capacity,
        "after": after,
        "shorten": shorten,
    }
    past = SCENARIOS[after] if after else None
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            scenario = shortened(SCENARIOS[name], shorten)
            if scenario.phases:
                found = _predict_one(scenario, load or capacity, hardware, start_up, Path(folder), past)
                document[scenario.name] = found
                print(scenario.name, json.dumps(next(iter(found["policies"].values()))), flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n")


def _capacity(hardware: str) -> float:
    slo = ["--ttft", f"{TTFT_S * 1000:.0f}ms", "--tpot", f"{TPOT_S * 1000:.0f}ms"]
    load = ["--rate", "10", "--prompt-tokens", str(_MEAN_PROMPT), "--output-tokens", str(_MEAN_OUTPUT)]
    document = _ask(["plan", "--hardware", hardware, *slo, *load, "--json"])
    return round(float(document["slo_capacity_per_s"]), 2)


def _predict_one(
    scenario: Scenario, capacity: float, hardware: str, start_up: str, folder: Path, past: Scenario | None
) -> dict[str, Any]:
    trace, service = folder / f"{scenario.name}.csv", folder / f"{scenario.name}.yaml"
    digest = scenarios.write_trace(scenario, capacity, trace, past)
    service.write_text(yaml.safe_dump(scenarios.manifest(replace(scenario, policy=PLIMSOLL))))  # whose SLO is scored
    words = ["--trace", str(trace), "--service", str(service), "--hardware", hardware, "--start-up", start_up]
    words += ["--gateways", "1", "--max-gpus", str(scenario.high * len(scenario.tiers))]
    compares = scenario.high > scenario.low and scenario.policy == PLIMSOLL
    policies = _POLICIES if compares else (scenario.policy,)
    found = {}
    for policy in policies:
        found[policy] = _simulate(words, policy)
    if scenario.tuning:
        found = {"Off": found["plimsoll"], "Auto": _with_chunk(words, hardware, folder / "profile.json")}
    document = {"trace_sha256": digest, "requests": len(trace.read_text().splitlines()) - 1, "policies": found}
    if any(act.what == "kill" for act in scenario.acts):
        document["without_engine_s"] = scenarios.seconds_without_engine(scenario, scenarios.RESTART_S)
    return document


def _simulate(words: Sequence[str], policy: str) -> dict[str, Any]:
    answer = _ask(["simulate", *words, "--policy", policy, "--output", "json"])
    return {key: answer[key] for key in _KEPT}


def _with_chunk(words: Sequence[str], hardware: str, path: Path) -> dict[str, Any]:
    """The same with the chunk that the operator sets for the ITL target, which a profile has."""
    profile = json.loads((PROFILES / f"{hardware}.json").read_text())
    path.write_text(json.dumps(profile | {"budget": scenarios.CHUNK}))
    return _simulate([str(path) if word == hardware else word for word in words], "plimsoll")


def _ask(words: Sequence[str]) -> Any:
    answer = io.StringIO()
    with contextlib.redirect_stdout(answer):
        plimsoll(words)
    return json.loads(answer.getvalue())
