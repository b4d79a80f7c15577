"""LoRA adapters in the simulated engine: vLLM's limit on the adapters of a step, and what it does to a sixth one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from plimsoll.sim.engine.gpu_adapters import GpuAdapters
from plimsoll.sim.engine.sequence import EngineSequence
from tests.sim import sim_harness
from tests.sim.reference_engine import ReferenceEngine

NO_THROTTLING = replace(sim_harness.H200, hot=None)
NAMES = ("", "a", "b", "c", "d", "e", "f")
# name: hardware, load
LOADS = {
    "light": (NO_THROTTLING, sim_harness.PoissonLoad(600, 5.0)),
    "busy": (NO_THROTTLING, sim_harness.PoissonLoad(800, 20.0, seed=2)),
    "short of blocks": (replace(NO_THROTTLING, kv_tokens=60_000), sim_harness.PoissonLoad(500, 40.0, seed=3)),
    "few slots, small chunks": (
        replace(NO_THROTTLING, kv_tokens=30_000, max_num_seqs=24, budget=512),
        sim_harness.PoissonLoad(500, 30.0, seed=4),
    ),
}


def play(
    lengths: Sequence[sim_harness.Lengths], names: Sequence[str], max_adapters: int, *, can_skip: bool = True
) -> list[EngineSequence]:
    engine = sim_harness.make_engine(NO_THROTTLING, max_adapters=max_adapters, can_skip=can_skip)
    return _play(engine, lengths, names)


def _play(
    engine: sim_harness.SimulatedEngine, lengths: Sequence[sim_harness.Lengths], names: Sequence[str]
) -> list[EngineSequence]:
    sequences = [
        EngineSequence(n, prompt, output, adapter=name)
        for n, ((_, prompt, output), name) in enumerate(zip(lengths, names, strict=True))
    ]
    sim_harness.run_sequences(engine, sequences, [at_s for at_s, _, _ in lengths])
    return sequences


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("max_adapters", [1, 4])
def test_engine_with_adapters_equals_reference_engine(name: str, max_adapters: int) -> None:
    own, load = LOADS[name]
    lengths, random = load.draw(), Random(1)
    names = [random.choice(NAMES) for _ in lengths]
    engine, reference = sim_harness.make_engine(own, max_adapters=max_adapters), ReferenceEngine(own, max_adapters)
    ours, theirs = _play(engine, lengths, names), reference.run(lengths, remote=False, adapters=names)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.first_token_s, one.last_token_s) == pytest.approx(
            (other.first_token_s, other.last_token_s), abs=1e-9
        )
    assert engine.metrics.preemptions == reference.preemptions
    assert engine.metrics.steps == reference.steps


def test_engine_skips_waiting_request_of_further_adapter() -> None:
    lengths = [(0.0, 100, 400), (0.0, 100, 400), (0.1, 100, 5), (0.2, 100, 5), (0.3, 100, 5)]
    a, _, c, again, model = play(lengths, ["a", "b", "c", "a", ""], 2)
    assert a.last_token_s is not None
    assert c.first_token_s is not None
    assert c.first_token_s > a.last_token_s  # waited until one of the two had no request
    assert again.last_token_s is not None
    assert model.last_token_s is not None
    assert again.last_token_s < 1.0 > model.last_token_s  # those behind it did not


def test_engine_busy_adapters_starve_another_one() -> None:
    busy = [(0.05 * n, 100, 100) for n in range(200)]
    late = [(1.0, 100, 5)]
    *_, starved = play([*busy, *late], [*["a", "b"] * 100, "c"], 2)
    assert starved.first_token_s is not None
    assert starved.first_token_s > 10.0


def test_engine_adapter_load_delays_the_step() -> None:
    own, lengths = NO_THROTTLING, [(0.0, 100, 5), (5.0, 100, 5), (10.0, 100, 5), (15.0, 100, 5)]
    engine = sim_harness.make_engine(own, max_adapters=1, adapter_load_s=0.5)
    times = [one.first_token_s for one in _play(engine, lengths, ["a", "a", "b", ""])]
    assert None not in times
    waits = [round((at_s or 0.0) - arrived_s, 3) for at_s, (arrived_s, _, _) in zip(times, lengths, strict=True)]
    base_s = waits[3]
    assert waits == [pytest.approx(base_s + 0.5), base_s, pytest.approx(base_s + 0.5), base_s]


def test_gpu_adapters_evict_least_recently_used() -> None:
    adapters = GpuAdapters(2)
    assert [adapters.use([name]) for name in ("a", "b", "a", "c", "a", "b")] == [1, 1, 0, 1, 0, 1]
