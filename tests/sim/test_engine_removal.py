"""Sequences that are taken out of an engine before their end, and who is told of each step."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from plimsoll.sim.engine.engine_metrics import EngineMetrics
from plimsoll.sim.engine.kv_cache import KvCache
from plimsoll.sim.engine.kv_link import KvLink
from plimsoll.sim.engine.sequence import EngineSequence
from plimsoll.sim.engine.simulated_engine import SimulatedEngine
from plimsoll.sim.engine.step_run import StepRun
from plimsoll.sim.engine.step_timing import StepTiming
from plimsoll.sim.profile import HardwareProfile
from tests.sim import sim_harness

ROOMY = replace(sim_harness.H200, hot=None)
TIGHT = replace(ROOMY, kv_tokens=4_096, max_num_seqs=12, budget=512)


class Listening:
    """An engine, and the tokens that its listener counted for each sequence."""

    def __init__(self, own: HardwareProfile, can_skip: bool) -> None:
        self.tokens: Counter[EngineSequence] = Counter()
        self.steps = 0
        self.last_s: dict[EngineSequence, float] = {}
        self.engine = SimulatedEngine(
            own.max_num_seqs,
            own.budget,
            KvCache(own.kv_tokens // own.block_size, own.block_size),
            StepTiming(own),
            KvLink(own.layers, own.block_size, own.kv_bytes_per_token),
            EngineMetrics(own.max_model_len),
            can_skip,
            self.observe,
        )

    def observe(self, run: StepRun, steps: int, ended_s: float) -> None:
        self.steps += steps if run.emitting else 0
        for sequence in (*run.decoding, *run.prefill_completions):
            self.tokens[sequence] += steps
            assert ended_s > self.last_s.get(sequence, -1.0)
            self.last_s[sequence] = ended_s


def play(own: HardwareProfile, can_skip: bool, seed: int) -> tuple[Listening, list[EngineSequence], set[int]]:
    """Arrivals, one in three of which is taken out at some later moment, if it has not ended by then."""
    one, random = Listening(own, can_skip), Random(seed)
    lengths = sim_harness.PoissonLoad(150, 25.0, 400.0, 60.0, seed).draw()
    sequences = sim_harness.make_sequences(lengths)
    events = [(at_s, False, n) for n, (at_s, _, _) in enumerate(lengths)]
    events += [(at_s + random.expovariate(1.0), True, n) for n, (at_s, _, _) in enumerate(lengths) if n % 3 == 0]
    removed = set()
    for at_s, leaves, n in sorted(events):
        one.engine.advance(at_s)
        if not leaves:
            one.engine.add(sequences[n], at_s)
        elif sequences[n].last_token_s is None:
            one.engine.remove(sequences[n], at_s)
            removed.add(n)
    one.engine.count_steps(math.nextafter(math.inf, 0.0))
    return one, sequences, removed


@pytest.mark.parametrize("own", [ROOMY, TIGHT], ids=["roomy", "short of blocks"])
@pytest.mark.parametrize("seed", range(4))
def test_engine_removal_skipping_equals_single_stepping(own: HardwareProfile, seed: int) -> None:
    (one, ours, removed), (other, theirs, _) = (play(own, can_skip, seed) for can_skip in (True, False))
    assert removed
    for ours_one, theirs_one in zip(ours, theirs, strict=True):
        times = (theirs_one.first_token_s, theirs_one.last_token_s)
        assert (ours_one.first_token_s, ours_one.last_token_s) == pytest.approx(times, abs=1e-9)
        assert one.tokens[ours_one] == other.tokens[theirs_one]
    counted = [(e.metrics.steps, e.metrics.generated_tokens, e.metrics.preemptions) for e in (one.engine, other.engine)]
    assert counted[0] == counted[1]


@pytest.mark.parametrize("own", [ROOMY, TIGHT], ids=["roomy", "short of blocks"])
@pytest.mark.parametrize("seed", range(4))
def test_engine_removal_leaks_nothing(own: HardwareProfile, seed: int) -> None:
    one, sequences, removed = play(own, True, seed)
    assert one.engine.idle
    assert one.engine.kv_cache.used == 0
    for n, sequence in enumerate(sequences):
        if n in removed:
            assert sequence.last_token_s is None
            assert one.tokens[sequence] < sequence.output_tokens
        else:
            assert one.tokens[sequence] == sequence.output_tokens
            assert one.last_s[sequence] == pytest.approx(sequence.last_token_s)
    assert one.engine.metrics.generated_tokens == one.tokens.total()
    assert one.engine.metrics.steps == one.steps
    assert (one.engine.metrics.preemptions > 0) == (own is TIGHT)


def test_engine_removal_lets_waiting_sequence_in_at_next_step() -> None:
    one = Listening(replace(ROOMY, max_num_seqs=1), can_skip=True)
    long, late = EngineSequence(0, 100, 5_000), EngineSequence(1, 100, 2)
    one.engine.add(long, 0.0)
    one.engine.add(late, 0.1)
    one.engine.remove(long, 1.0)
    one.engine.advance(1.0 + 3 * (ROOMY.coefficients.base + ROOMY.coefficients.pretok * 100))
    assert late.first_token_s is not None
    assert one.engine.waiting == type(one.engine.waiting)()


def test_engine_failed_transfer_is_computed_here() -> None:
    one = Listening(ROOMY, can_skip=True)
    sequence = EngineSequence(0, 1_000, 3, remote=True)
    one.engine.add(sequence, 0.0)
    [(fetched, arrival_s)] = one.engine.kv_fetches
    assert fetched is sequence
    one.engine.on_kv_failed(sequence, arrival_s / 2)
    one.engine.on_kv_loaded(sequence, arrival_s)  # it does not wait for it any more
    one.engine.advance(9.0)
    assert one.engine.metrics.local_prompt_tokens == 1_000
    assert (sequence.transferred_tokens, one.tokens[sequence]) == (0, 3)


def test_engine_step_end_is_end_of_the_running_step() -> None:
    skipping, stepping = Listening(ROOMY, can_skip=True).engine, Listening(ROOMY, can_skip=False).engine
    for engine in (skipping, stepping):
        assert engine.step_end_s(1.0) == 1.0
        engine.add(EngineSequence(0, 100, 50), 1.0)
    for moment in range(30):
        now_s = 1.0 + 0.0071 * moment
        assert skipping.step_end_s(now_s) == pytest.approx(stepping.step_end_s(now_s))
        assert skipping.step_end_s(now_s) > now_s
