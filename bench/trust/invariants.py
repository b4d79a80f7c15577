"""What must hold whatever the load is: nothing is lost, made up or idle beside work.

Each law is a function that tests call with smaller loads. Little's law is held with counts sampled from the engine's
own gauges, not with the stays themselves, of which the mean count is the sum by definition.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Final

import yaml

from bench.trust.check import SimulatorCheck
from bench.trust.engine_driver import EventLoop, RecordedRequest, mean_plant, replay_one_engine, replay_remote_prefill
from plimsoll.api import labels
from plimsoll.api.v1alpha1 import parse
from plimsoll.core.types import Role
from plimsoll.sim import profile
from plimsoll.sim.attempt import Attempt, TraceRequest
from plimsoll.sim.engine.sequence import EngineSequence
from plimsoll.sim.engine.simulated_engine import SimulatedEngine
from plimsoll.sim.engine_reading import scrape
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies.base import StaticPolicy
from plimsoll.sim.profile import HardwareProfile
from plimsoll.sim.run_config import RunConfig
from plimsoll.sim.simulator import Simulator

MANIFEST: Final = {
    "apiVersion": labels.API_VERSION,
    "kind": labels.KIND,
    "metadata": {"name": "chat", "namespace": "default"},
    "spec": {
        "model": {"uri": "file:///models/8b"},
        "tiers": {"serve": {"minReplicas": 1, "maxReplicas": 4}},
        "slo": {"ttft": "2s", "tpot": "50ms"},
    },
}

_CLI: Final = "import sys; from plimsoll.cli.main import main; sys.exit(main(sys.argv[1:]))"


def poisson_load(
    requests: int, per_s: float, seed: int, prompt: float = 1200.0, output: float = 220.0
) -> list[RecordedRequest]:
    """Poisson arrivals with lognormal lengths of these means."""
    random, now_s, drawn = Random(seed), 0.0, []
    for _ in range(requests):
        now_s += random.expovariate(per_s)
        target_tokens, output_draw = (
            prompt * random.lognormvariate(-0.18, 0.6),
            output * random.lognormvariate(-0.125, 0.5),
        )
        drawn.append(RecordedRequest(now_s, max(1, int(target_tokens)), max(1, int(output_draw))))
    return drawn


def replay(own: HardwareProfile, sent: Sequence[RecordedRequest], separate: bool) -> list[SimulatedEngine]:
    """The engines that handled all of it: one for all, or one that prefills and one that decodes."""
    hardware = mean_plant(own)
    if separate:
        engines = [hardware.engine(role, Random(0)) for role in (Role.PREFILL, Role.DECODE)]
        replay_remote_prefill(hardware, sent, *engines)
    else:
        engines = [hardware.engine(Role.SERVE, Random(0))]
        replay_one_engine(hardware, sent, engines[0])
    return engines


def leaked(requests: Sequence[RecordedRequest], engines: Sequence[SimulatedEngine]) -> dict[str, int]:
    """Tokens asked for less those handled, and blocks still held, after all have ended; and how many were preempted."""
    metrics = [engine.metrics for engine in engines]
    prompts, first_engine = (
        sum(engine.prompt for engine in requests),
        len(engines) - 1,
    )  # tokens of each that the other makes anew
    return {
        "prompt tokens": len(engines) * prompts
        - sum(
            engine.local_prompt_tokens + engine.cached_prompt_tokens + engine.transferred_prompt_tokens
            for engine in metrics
        ),
        "output tokens": sum(engine.output + first_engine for engine in requests)
        - sum(engine.generated_tokens for engine in metrics),
        "blocks": sum(engine.kv_cache.total - engine.kv_cache.free for engine in engines),
        "busy engines": sum(not engine.idle for engine in engines),
        "preemptions": sum(engine.preemptions for engine in metrics),
    }


def littles_law(own: HardwareProfile, requests: Sequence[RecordedRequest], every_s: float) -> tuple[float, float]:
    """Mean number in the engine by its gauges, looked at every so often, and arrivals by time times mean stay."""
    engine = mean_plant(own).engine(Role.SERVE, Random(0))
    sequences = [EngineSequence(place, one.prompt, one.output) for place, one in enumerate(requests)]
    loop = EventLoop([engine], lambda _, __: None)
    for sequence, one in zip(sequences, requests, strict=True):
        loop.schedule(one.at_s, lambda now_s, sequence=sequence: engine.add(sequence, now_s))  # type: ignore[misc]
    counts: list[float] = []

    def sample(now_s: float) -> None:
        reading = scrape(engine, "", now_s, now_s)
        counts.append(float((reading.running or 0) + (reading.waiting or 0)))
        if not engine.idle or now_s < requests[-1].at_s:
            loop.schedule(now_s + every_s, sample)

    loop.schedule(every_s / 2, sample)
    loop.run()
    stays_s = sum((sequence.last_token_s or 0.0) - sequence.arrived_s for sequence in sequences)
    return sum(counts) / len(counts), stays_s / (len(counts) * every_s)


def idle_share(own: HardwareProfile, lengths: Sequence[tuple[int, int]]) -> float:
    """Seconds beyond the work of a burst, over all of it; the profile must be level: no heat, no bend, no `anypre`."""
    engine: SimulatedEngine = mean_plant(own).engine(Role.SERVE, Random(0))
    sequences = [EngineSequence(place, prompt, output) for place, (prompt, output) in enumerate(lengths)]
    for sequence in sequences:
        engine.add(sequence, 0.0)
    EventLoop([engine], lambda _, __: None).run()
    c = own.coefficients
    work_s = engine.metrics.steps * c.base
    for prompt, output in lengths:
        work_s += c.pretok * prompt + c.preattn * prompt * prompt / 2 + c.dec * (output - 1)
        work_s += c.ctx * ((output - 1) * prompt + (output - 1) * (output - 2) / 2)
    return max(sequence.last_token_s or 0.0 for sequence in sequences) / work_s - 1.0


def without_nonlinearities(own: HardwareProfile) -> HardwareProfile:
    """The same without heat, bend and `anypre`."""
    return replace(own, coefficients=replace(own.coefficients, anypre=0.0), hot=None, hinge_dec=0.0)


def peak_bytes(requests: int) -> int:
    """Most memory that a run of so many small requests took beyond what there was before it."""

    def traffic() -> Iterator[TraceRequest]:
        random, now_s = Random(5), 0.0
        for _ in range(requests):
            now_s += random.expovariate(40.0)
            yield TraceRequest(now_s, 200, 5)

    service = parse(MANIFEST)
    hardware = Plant(profile.load("h200-8b"), mean_plant(profile.load("h200-8b")).startup)
    setting = RunConfig({Role.SERVE: 2}, requests / 40.0)
    peaks = [0]

    def done(_: Attempt) -> None:
        peaks[0] += 1

    simulator = Simulator(service, hardware, StaticPolicy({Role.SERVE: 2}, runs_operator=False), setting, done)
    tracemalloc.start()
    try:
        simulator.run(traffic())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peaks[0] == requests, (peaks, requests)
    return peak


def is_reproducible(requests: int) -> bool:
    """Whether two runs of one seed, in processes whose sets and dicts hash otherwise, write the same bytes."""
    outputs = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = (f"{one.at_s},{one.prompt},{one.output}" for one in poisson_load(requests, 20.0, 11))
        (folder / "trace.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))
        (folder / "service.yaml").write_text(yaml.safe_dump(MANIFEST))
        for salt in ("1", "2"):
            outs = [folder / f"{kind}-{salt}" for kind in ("requests", "replicas", "windows")]
            words = [word for output_path in outs for word in (f"--{output_path.name[:-2]}-out", str(output_path))]
            subprocess.run(
                [
                    *(sys.executable, "-c", _CLI, "simulate", "--trace", str(folder / "trace.csv")),
                    *("--service", str(folder / "service.yaml"), "--hardware", "h200-8b", "--seed", "7"),
                    *("--start-up", "uniform:5,20", "--output", "json", *words),
                ],
                check=True,
                capture_output=True,
                env={**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            outputs.append(json.dumps([output_path.read_text() for output_path in outs]))
    return outputs[0] == outputs[1] and len(outputs[0]) > 100 * requests


def checks() -> list[SimulatorCheck]:
    hardware_profile = profile.load("h200-8b")
    scenes = {
        "one engine, 20 req/s": (hardware_profile, poisson_load(3000, 20.0, 1), False),
        "one engine short of blocks": (replace(hardware_profile, kv_tokens=60_000), poisson_load(1000, 40.0, 3), False),
        "one that reads, one that writes": (
            replace(hardware_profile, block_size=128),
            poisson_load(2000, 20.0, 6),
            True,
        ),
        "the same, short of blocks": (
            replace(hardware_profile, block_size=128, kv_tokens=60_000),
            poisson_load(800, 25.0, 7),
            True,
        ),
    }
    results = []
    for name, (hardware, sent_requests, separate) in scenes.items():
        leaked_counts = leaked(sent_requests, replay(hardware, sent_requests, separate))
        for kind in ("prompt tokens", "output tokens", "blocks", "busy engines"):
            results.append(
                SimulatorCheck("conservation laws", f"{name}: {kind} left", leaked_counts[kind], 0.0, "", leaked_counts)
            )
    counts, little_counts = littles_law(hardware_profile, poisson_load(3000, 18.0, 4), 0.02)
    results.append(
        SimulatorCheck("conservation laws", "Little's law at 18 req/s", 100 * (counts / little_counts - 1), 0.5, "%")
    )
    lengths = [(one.prompt, one.output) for one in poisson_load(400, 1.0, 9)]
    results.append(
        SimulatorCheck(
            "conservation laws",
            "work conservation, a burst of 400",
            100 * idle_share(without_nonlinearities(hardware_profile), lengths),
            1e-6,
            "%",
        )
    )
    peak_bytes(100)  # what is loaded once
    small_bytes, large_bytes = 1_000, 4_000
    bytes_held = [peak_bytes(requests) for requests in (small_bytes, large_bytes)]
    growth = max(0.0, (bytes_held[1] - bytes_held[0]) / (large_bytes - small_bytes))
    text = {"requests": [small_bytes, large_bytes], "bytes": bytes_held}
    results.append(
        SimulatorCheck("conservation laws", "memory kept for each further request", growth, 100.0, "B", text)
    )
    results.append(
        SimulatorCheck("same seed", "runs that differ, other hash seeds", 0.0 if is_reproducible(2_000) else 1.0, 0.0)
    )
    return results
