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

from bench.trust.check import Check
from bench.trust.drive import Loop, Sent, alone, legs, plant
from plimsoll.api import labels
from plimsoll.api.v1alpha1 import parse
from plimsoll.core.picking.endpoint import Role
from plimsoll.sim import profile
from plimsoll.sim.engine import Engine
from plimsoll.sim.job import Job
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies.base import Static
from plimsoll.sim.profile import Profile
from plimsoll.sim.setting import Setting
from plimsoll.sim.visit import Asked, Visit
from plimsoll.sim.world import World

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


def load(requests: int, per_s: float, seed: int, prompt: float = 1200.0, output: float = 220.0) -> list[Sent]:
    """Poisson arrivals with lognormal lengths of these means."""
    random, now_s, found = Random(seed), 0.0, []
    for _ in range(requests):
        now_s += random.expovariate(per_s)
        asked, made = prompt * random.lognormvariate(-0.18, 0.6), output * random.lognormvariate(-0.125, 0.5)
        found.append(Sent(now_s, max(1, int(asked)), max(1, int(made))))
    return found


def played(own: Profile, sent: Sequence[Sent], separate: bool) -> list[Engine]:
    """The engines that handled all of it: one for all, or one that prefills and one that decodes."""
    hardware = plant(own)
    if separate:
        engines = [hardware.engine(role, Random(0)) for role in (Role.PREFILL, Role.DECODE)]
        legs(hardware, sent, *engines)
    else:
        engines = [hardware.engine(Role.SERVE, Random(0))]
        alone(hardware, sent, engines[0])
    return engines


def leaks(sent: Sequence[Sent], engines: Sequence[Engine]) -> dict[str, int]:
    """Tokens asked for less those handled, and blocks still held, after all have ended; and how many were preempted."""
    meters = [one.meters for one in engines]
    prompts, first = sum(one.prompt for one in sent), len(engines) - 1  # tokens of each that the other makes anew
    return {
        "prompt tokens": len(engines) * prompts - sum(one.local + one.cached + one.moved for one in meters),
        "output tokens": sum(one.output + first for one in sent) - sum(one.generated for one in meters),
        "blocks": sum(one.blocks.total - one.blocks.free for one in engines),
        "busy engines": sum(not one.idle for one in engines),
        "preemptions": sum(one.preemptions for one in meters),
    }


def little(own: Profile, sent: Sequence[Sent], every_s: float) -> tuple[float, float]:
    """Mean number in the engine by its gauges, looked at every so often, and arrivals by time times mean stay."""
    engine = plant(own).engine(Role.SERVE, Random(0))
    jobs = [Job(place, one.prompt, one.output) for place, one in enumerate(sent)]
    loop = Loop([engine], lambda _, __: None)
    for job, one in zip(jobs, sent, strict=True):
        loop.at(one.at_s, lambda now_s, job=job: engine.add(job, now_s))  # type: ignore[misc]
    counts: list[float] = []

    def look(now_s: float) -> None:
        reading = engine.scraped("", now_s, now_s)
        counts.append(float((reading.running or 0) + (reading.waiting or 0)))
        if not engine.idle or now_s < sent[-1].at_s:
            loop.at(now_s + every_s, look)

    loop.at(every_s / 2, look)
    loop.run()
    stays_s = sum((job.last_s or 0.0) - job.arrived_s for job in jobs)
    return sum(counts) / len(counts), stays_s / (len(counts) * every_s)


def idled(own: Profile, lengths: Sequence[tuple[int, int]]) -> float:
    """Seconds beyond the work of a burst, over all of it; the profile must be level: no heat, no bend, no `anypre`."""
    engine: Engine = plant(own).engine(Role.SERVE, Random(0))
    jobs = [Job(place, prompt, output) for place, (prompt, output) in enumerate(lengths)]
    for job in jobs:
        engine.add(job, 0.0)
    Loop([engine], lambda _, __: None).run()
    c = own.coefficients
    work_s = engine.meters.steps * c.base
    for prompt, output in lengths:
        work_s += c.pretok * prompt + c.preattn * prompt * prompt / 2 + c.dec * (output - 1)
        work_s += c.ctx * ((output - 1) * prompt + (output - 1) * (output - 2) / 2)
    return max(job.last_s or 0.0 for job in jobs) / work_s - 1.0


def level(own: Profile) -> Profile:
    """The same without heat, bend and `anypre`."""
    return replace(own, coefficients=replace(own.coefficients, anypre=0.0), hot=None, hinge_dec=0.0)


def held_bytes(requests: int) -> int:
    """Most memory that a run of so many small requests took beyond what there was before it."""

    def asked() -> Iterator[Asked]:
        random, now_s = Random(5), 0.0
        for _ in range(requests):
            now_s += random.expovariate(40.0)
            yield Asked(now_s, 200, 5)

    service = parse(MANIFEST)
    hardware = Plant(profile.load("h200-8b"), plant(profile.load("h200-8b")).start)
    setting = Setting({Role.SERVE: 2}, requests / 40.0)
    seen = [0]

    def done(_: Visit) -> None:
        seen[0] += 1

    world = World(service, hardware, Static({Role.SERVE: 2}, gated=False), setting, done)
    tracemalloc.start()
    try:
        world.run(asked())
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seen[0] == requests, (seen, requests)
    return most


def same_bytes(requests: int) -> bool:
    """Whether two runs of one seed, in processes whose sets and dicts hash otherwise, write the same bytes."""
    written = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = (f"{one.at_s},{one.prompt},{one.output}" for one in load(requests, 20.0, 11))
        (folder / "trace.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))
        (folder / "service.yaml").write_text(yaml.safe_dump(MANIFEST))
        for salt in ("1", "2"):
            outs = [folder / f"{kind}-{salt}" for kind in ("requests", "replicas", "windows")]
            words = [word for out in outs for word in (f"--{out.name[:-2]}-out", str(out))]
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
            written.append(json.dumps([out.read_text() for out in outs]))
    return written[0] == written[1] and len(written[0]) > 100 * requests


def checks() -> list[Check]:
    own = profile.load("h200-8b")
    scenes = {
        "one engine, 20 req/s": (own, load(3000, 20.0, 1), False),
        "one engine short of blocks": (replace(own, kv_tokens=60_000), load(1000, 40.0, 3), False),
        "one that reads, one that writes": (replace(own, block_size=128), load(2000, 20.0, 6), True),
        "the same, short of blocks": (replace(own, block_size=128, kv_tokens=60_000), load(800, 25.0, 7), True),
    }
    found = []
    for name, (hardware, sent, separate) in scenes.items():
        left = leaks(sent, played(hardware, sent, separate))
        for kind in ("prompt tokens", "output tokens", "blocks", "busy engines"):
            found.append(Check("conservation laws", f"{name}: {kind} left", left[kind], 0.0, "", left))
    seen, law = little(own, load(3000, 18.0, 4), 0.02)
    found.append(Check("conservation laws", "Little's law at 18 req/s", 100 * (seen / law - 1), 0.5, "%"))
    lengths = [(one.prompt, one.output) for one in load(400, 1.0, 9)]
    found.append(
        Check("conservation laws", "work conservation, a burst of 400", 100 * idled(level(own), lengths), 1e-6, "%")
    )
    held_bytes(100)  # what is loaded once
    few, many = 1_000, 4_000
    held = [held_bytes(requests) for requests in (few, many)]
    growth = max(0.0, (held[1] - held[0]) / (many - few))
    told = {"requests": [few, many], "bytes": held}
    found.append(Check("conservation laws", "memory kept for each further request", growth, 100.0, "B", told))
    found.append(Check("same seed", "runs that differ, other hash seeds", 0.0 if same_bytes(2_000) else 1.0, 0.0))
    return found
