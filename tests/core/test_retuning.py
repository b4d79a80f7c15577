"""When engines get another chunk from measurements, and when they get the former one back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest

from plimsoll.cli.plan import profile_machines
from plimsoll.core import codec
from plimsoll.core.autoscaling.retuning_state import RetuningState
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.planning import retuning
from plimsoll.core.planning.arrangement import aggregated_tier
from plimsoll.core.planning.retuning import DAY_S, HOUR_S, Minute, Prediction
from plimsoll.core.planning.workloads import lognormal_workload
from plimsoll.core.slo import Slo
from plimsoll.core.units import MINUTE_S
from plimsoll.sim import profile

START_S = 1.8e9
MACHINE = profile_machines(profile.load("h200-8b"), 1)[0]


def tier(chunk: int = 8192, itl_s: float | None = 0.04) -> TierSpec:
    slo = Slo(0.95, ttft_s=0.5, tpot_s=0.03, itl_s=itl_s)
    made = aggregated_tier(MACHINE, lognormal_workload(1000, 200), slo)
    return replace(made, limits=replace(made.limits, token_budget=chunk))


TIERS = {chunk: tier(chunk) for chunk in (1024, 2048, 4096, 8192)}


@dataclass
class Engines:
    """A service whose engines have a chunk of their own. Each rollout takes five minutes.

    pending: one more engine is ordered and not ready. progresses_until_s: until when rollouts make progress.

    met: chance that a minute is within the SLO, by chunk and load. changes: time, chunk that was wanted, is_undo.
    """

    met: Callable[[int, float], float] = lambda chunk, load: 1.0
    load: Callable[[float], float] = lambda now_s: 8.0
    own: int = 8192
    starts: bool = True
    basis: str = "slo-1"
    has_turn: bool = True
    pending: bool = False
    progresses_until_s: float = 0.0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))
    now_s: float = START_S
    state: RetuningState = field(default_factory=RetuningState)
    deployed: int = 0
    changes: list[tuple[float, int, bool]] = field(default_factory=list)
    _settled_s: float = 0.0

    def run(self, days: float, revision: str = "chat-serve-1") -> Engines:
        for _ in range(round(days * DAY_S / MINUTE_S)):
            self.now_s += MINUTE_S
            chunk, load = self.deployed or self.own, self.load(self.now_s)
            minute = Minute(
                revision, self.deployed, self.now_s >= self._settled_s and not self.pending, load,
                bool(self.rng.random() < self.met(chunk, load)), TIERS[chunk], largest=self.own, basis=self.basis,
                has_turn=self.has_turn,
                is_rolled_out=self.now_s >= self._settled_s, progressed_s=min(self.now_s, self.progresses_until_s),
            )  # fmt: skip
            former, self.state = self.state, retuning.update(self.state, minute, self.now_s)
            if self.state.wanted is not None and self.state.changed_s != former.changed_s:
                self.changes.append((self.now_s, self.state.wanted, self.state.is_undo))
                self.deployed = self.state.wanted
                self._settled_s = self.now_s + 300.0 if self.starts or self.state.is_undo else math.inf
        return self

    @property
    def undone(self) -> list[bool]:
        return [is_undo for _, _, is_undo in self.changes]


def daily(now_s: float) -> float:
    """A load with a daily pattern, requests per second of a replica."""
    return 8.0 + 5.0 * math.sin(2 * math.pi * now_s / DAY_S)


@pytest.fixture
def goodputs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], float]], None]:
    """Replaces the prediction by a goodput for each chunk, requests per second."""

    def install(goodput: Callable[[int], float]) -> None:
        def predict(one: TierSpec, chunks: Sequence[int], factor: float = 1.0) -> list[Prediction]:
            return [Prediction(chunk, goodput(chunk)) for chunk in chunks]

        monkeypatch.setattr(retuning, "predict_goodputs", predict)

    return install


Install = Callable[[Callable[[int], float]], None]


def test_prediction_prefers_the_measured_chunk() -> None:
    """With an ITL target of 40 ms a step of 1,024 tokens fits it, and one of 2,048 or more does not."""
    found = {one.chunk: one.goodput_per_s for one in retuning.predict_goodputs(tier(), (8192, 1024, 2048))}
    assert found[1024] > 2.0 * found[8192]
    assert found[2048] < 1.1 * found[8192]


def test_prediction_bounds_how_full_small_chunks_are() -> None:
    """The TTFT model was checked up to steps that are a quarter full."""
    (own,) = retuning.predict_goodputs(tier(1024), (1024,))
    _, other = retuning.predict_goodputs(tier(8192), (8192, 1024))
    assert other.goodput_per_s < own.goodput_per_s


def test_without_itl_target_no_chunk_is_better() -> None:
    found = retuning.predict_goodputs(tier(itl_s=None), (8192, 4096, 2048, 1024))
    assert max(one.goodput_per_s for one in found) < retuning.MIN_GAIN * found[0].goodput_per_s


def test_change_after_a_day_says_why_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real prediction, for two days."""
    monkeypatch.setattr(retuning, "predict_goodputs", cache(retuning.predict_goodputs))
    engines = Engines().run(1.3)
    ((at_s, chunk, is_undo),) = engines.changes
    assert (chunk, is_undo) == (1024, False)
    assert 1.0 <= (at_s - START_S) / DAY_S < 1.1
    assert "with chunks of 8192, in each of 24 h" in engines.state.reason
    assert len(engines.run(1.2).changes) == 1
    assert engines.state.before == ()


def test_noise_of_goodput_changes_nothing(goodputs: Install) -> None:
    """Chunks that are equally good, with 20 % of noise in each prediction."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        goodputs(lambda chunk, rng=rng: 20.0 * rng.lognormal(0.0, 0.2))  # type: ignore[misc]
        engines = Engines(rng=rng, load=daily, met=lambda chunk, load: 0.9)
        assert engines.run(4).changes == []


def test_noise_at_the_margin_never_goes_back(goodputs: Install) -> None:
    """A gain that is just at the margin may be taken once, and is never reversed."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        true = {8192: 10.0, 1024: 12.0}
        goodputs(lambda chunk, rng=rng, true=true: true.get(chunk, 8.0) * rng.lognormal(0.0, 0.03))  # type: ignore[misc]
        engines = Engines(rng=rng, load=daily, met=lambda chunk, load: 0.9)
        assert len(engines.run(5).changes) <= 1


def test_noise_of_attainment_undoes_nothing(goodputs: Install) -> None:
    """Minutes of which a varying share is within the SLO, alike before and after."""
    goodputs({8192: 10.0, 1024: 20.0, 2048: 10.0, 4096: 10.0}.__getitem__)
    for seed in range(6):
        rng = np.random.default_rng(seed)
        by_hour = rng.beta(6.0, 2.0, size=24 * 4)
        index = iter(range(10**9))
        engines = Engines(
            rng=rng, load=daily, met=lambda chunk, load, by_hour=by_hour, index=index: by_hour[next(index) // 60]
        )  # type: ignore[misc]
        assert engines.run(3).undone == [False]


def test_at_most_one_change_a_day_with_any_preference(goodputs: Install) -> None:
    """Even if measurements prefer another chunk each day and each change makes the SLO worse."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        best = {day: int(rng.choice([1024, 2048, 4096, 8192])) for day in range(10)}
        engines = Engines(rng=rng)
        goodputs(lambda chunk, e=engines, best=best: 20.0 if chunk == best[int((e.now_s - START_S) / DAY_S)] else 10.0)  # type: ignore[misc]
        engines.met = lambda chunk, load, rng=rng: float(rng.random() < 0.5)  # type: ignore[misc]
        engines.run(8)
        changed_s = [at_s for at_s, _, is_undo in engines.changes if not is_undo]
        assert changed_s
        assert min(np.diff([START_S, *changed_s])) >= DAY_S


def test_worse_slo_is_undone_and_not_tried_again(goodputs: Install) -> None:
    goodputs({8192: 10.0, 1024: 20.0, 2048: 10.0, 4096: 10.0}.__getitem__)
    engines = Engines(met=lambda chunk, load: 0.97 if chunk == 8192 else 0.6, load=daily)
    engines.run(3)
    (changed_s, chunk, _), (undone_s, back, is_undo) = engines.changes
    assert (chunk, back, is_undo) == (1024, 0, True)
    assert undone_s - changed_s < DAY_S
    assert "% before at the same load" in engines.state.reason
    assert len(engines.run(4).changes) == 2
    engines.now_s += 26 * DAY_S
    assert [one for _, one, _ in engines.run(2).changes] == [1024, 0, 1024, 0]


def test_other_load_is_not_compared(goodputs: Install) -> None:
    """A load step after the change misses the SLO; it says nothing about the chunk."""
    goodputs({8192: 10.0, 1024: 20.0, 2048: 10.0, 4096: 10.0}.__getitem__)
    engines = Engines(met=lambda chunk, load: 0.97 if load < 10.0 else 0.2)
    engines.load = lambda now_s: 8.0 if now_s < START_S + 1.1 * DAY_S else 16.0
    assert engines.run(9).undone == [False]


def test_engines_that_do_not_start_are_undone(goodputs: Install) -> None:
    goodputs({8192: 10.0, 1024: 20.0, 2048: 10.0, 4096: 10.0}.__getitem__)
    engines = Engines(starts=False).run(2)
    (changed_s, _, _), (undone_s, back, is_undo) = engines.changes
    assert (back, is_undo) == (0, True)
    assert undone_s - changed_s == pytest.approx(2 * HOUR_S, abs=2 * MINUTE_S)
    assert "no further engine was ready within 2 h" in engines.state.reason


def test_engines_that_start_slowly_are_not_undone(goodputs: Install) -> None:
    """Of many engines, one after the other is replaced."""
    goodputs({8192: 10.0, 1024: 20.0, 2048: 10.0, 4096: 10.0}.__getitem__)
    engines = Engines(starts=False, progresses_until_s=START_S + 1.5 * DAY_S)
    assert engines.run(1.5).undone == [False]
    assert engines.run(0.2).undone == [False, True]


def test_change_waits_for_its_turn(goodputs: Install) -> None:
    goodputs({8192: 10.0, 1024: 20.0, 2048: 10.0, 4096: 10.0}.__getitem__)
    engines = Engines(has_turn=False).run(1.3)
    assert engines.changes == []
    engines.has_turn = True
    assert engines.run(0.1).undone == [False]


def test_engine_ordered_after_the_rollout_undoes_nothing(goodputs: Install) -> None:
    """Such as one that waits for a GPU, or the first one after a scale to zero."""
    goodputs({8192: 10.0, 1024: 20.0, 2048: 10.0, 4096: 10.0}.__getitem__)
    engines = Engines()
    while not engines.changes:
        engines.run(MINUTE_S / DAY_S)
    engines.pending = True
    assert engines.run(1).undone == [False]
    assert engines.state.wanted is None


def test_new_slo_after_a_change_undoes_nothing(goodputs: Install) -> None:
    """Fewer minutes are within a stricter SLO; that says nothing about the chunk."""
    goodputs({8192: 10.0, 1024: 20.0, 2048: 10.0, 4096: 10.0}.__getitem__)
    engines = Engines(met=lambda chunk, load: 0.97).run(1.2)
    assert engines.undone == [False]
    engines.basis, engines.met = "slo-2", lambda chunk, load: 0.5
    assert engines.run(2).undone == [False]


def test_little_load_and_short_hours_do_not_count(goodputs: Install) -> None:
    goodputs({8192: 10.0, 1024: 20.0, 2048: 10.0, 4096: 10.0}.__getitem__)
    assert Engines(load=lambda now_s: 2.0).run(3).changes == []


def test_little_load_costs_one_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """All chunks take 0.17 s of a core, the present one 0.02 s."""
    predicted = set[int]()

    def predict(one: TierSpec, chunks: Sequence[int], factor: float = 1.0) -> list[Prediction]:
        predicted.update(chunks)
        return [Prediction(chunk, 10.0) for chunk in chunks]

    monkeypatch.setattr(retuning, "predict_goodputs", predict)
    Engines(load=lambda now_s: 2.0).run(0.2)
    assert predicted == {8192}


def test_new_spec_starts_anew(goodputs: Install) -> None:
    goodputs({8192: 10.0, 1024: 20.0, 2048: 10.0, 4096: 10.0}.__getitem__)
    engines = Engines().run(0.9)
    assert engines.state.votes > 10
    engines.run(0.01, "chat-serve-2")
    assert (engines.state.votes, engines.changes) == (0, [])


def test_clock_set_back_keeps_what_is_refused(goodputs: Install) -> None:
    """The clock of a new leader may be behind that of the former one."""
    goodputs({8192: 10.0, 1024: 20.0, 2048: 10.0, 4096: 10.0}.__getitem__)
    engines = Engines(met=lambda chunk, load: 0.97 if chunk == 8192 else 0.6).run(3)
    assert engines.undone == [False, True]
    engines.now_s -= 2 * DAY_S
    engines.run(0.01)
    assert [one.chunk for one in engines.state.refused] == [1024]
    assert engines.state.changed_s <= engines.now_s
    assert engines.run(4).undone == [False, True]


def test_hours_end_one_by_one_after_a_pause() -> None:
    """After a pause of the operator for hours, predictions of many services do not come at once again."""
    states = dict.fromkeys(range(0, 3600, 36), RetuningState())
    ended = dict.fromkeys(states, 0.0)
    for count in [*range(90), *range(600, 720)]:
        now_s = START_S + count * MINUTE_S
        for phase_s, state in states.items():
            minute = Minute("chat-serve-1", 0, True, 8.0, True, None)
            states[phase_s] = retuning.update(state, minute, now_s, phase_s)
            if states[phase_s].hours != state.hours:
                ended[phase_s] = now_s
    assert max(map([*ended.values()].count, ended.values())) <= 2


def test_state_survives_a_restart_at_any_time(goodputs: Install) -> None:
    goodputs({8192: 10.0, 1024: 20.0, 2048: 10.0, 4096: 10.0}.__getitem__)
    engines, copy = (Engines(met=lambda chunk, load: 0.97 if chunk == 8192 else 0.5) for _ in range(2))
    for _ in range(24):
        engines.run(0.13)
        copy.run(0.13)
        copy.state = codec.decode(RetuningState, codec.encode(copy.state))
    assert copy.changes == engines.changes
    assert engines.undone == [False, True]


def test_lost_state_waits_for_a_day(goodputs: Install) -> None:
    """Without a checkpoint it is unknown when the last change was."""
    goodputs({8192: 10.0, 1024: 20.0, 2048: 10.0, 4096: 10.0}.__getitem__)
    engines = Engines().run(1.2)
    engines.state = RetuningState()
    goodputs({8192: 20.0, 1024: 10.0, 2048: 30.0, 4096: 10.0}.__getitem__)
    engines.run(0.9)
    assert len(engines.changes) == 1
    engines.run(0.3)
    assert [chunk for _, chunk, _ in engines.changes] == [1024, 2048]
