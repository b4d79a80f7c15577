"""The bench of mismatches: plants that differ from what engines report, and how a case is judged."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from bench.mismatch import command
from bench.mismatch.cases import CASES, TwoLengths
from bench.mismatch.command import CaseResult
from bench.mismatch.plants import MismatchedPlant
from bench.mismatch.runs import MismatchRun, simulate
from plimsoll.api.v1alpha1 import parse
from plimsoll.core.types import Role
from plimsoll.sim.plant import Plant

KEPT = MismatchRun((100,) * 6, (0, 50, 95, 100, 100, 95), 600.0, 4, 1, 2.0, 3)
LEAST = {Role.SERVE: 3}


def plant(name: str) -> MismatchedPlant:
    return MismatchedPlant(**CASES[name].plant_fields())


@pytest.mark.parametrize("name", CASES)
def test_engines_report_announced_profile_without_benchmark(name: str) -> None:
    reported, announced = plant(name).engine_info(Role.SERVE), CASES[name].plant_fields()["announced"]
    assert reported.self_benchmark is None
    assert reported.max_sequences == announced.max_num_seqs
    assert reported.kv_tokens == announced.kv_tokens - announced.kv_tokens % announced.block_size


@pytest.mark.parametrize("name", CASES)
def test_manifests_of_cases_are_valid(name: str) -> None:
    assert parse(CASES[name].manifest()).spec.slo is not None


def test_engine_has_less_than_it_reports() -> None:
    assert plant("few-slots").profile.max_num_seqs == 32
    half = plant("half-kv")
    assert half.announced is not None
    assert half.profile.kv_tokens == half.announced.kv_tokens // 2


def test_host_delays_first_token() -> None:
    usual = Plant.frontend_s(plant("none"), 1000)
    assert plant("none").frontend_s(1000) == usual
    assert plant("host-350ms").frontend_s(1000) == pytest.approx(usual + 0.35)


def test_host_delay_rises_with_batch() -> None:
    loaded = plant("host-load")
    idle_s = loaded.frontend_s(1000)
    engine = loaded.engine(Role.SERVE, Random(0))
    assert loaded.frontend_s(1000) == idle_s
    engine_with_load = type("Busy", (), {"running": 50})()
    loaded._engines[:] = [engine, engine_with_load]  # an idle engine does not dilute the busy one
    assert loaded.frontend_s(1000) == pytest.approx(idle_s + 50 * 0.002)


def test_every_fourth_engine_is_slow() -> None:
    slow = replace(plant("one-slow"), spread=0.0)
    paces = [slow.engine(Role.SERVE, Random(0))._timing.series(0, 0, 0.0, 1, 0).first_s for _ in range(8)]
    assert paces[3] == paces[7] == pytest.approx(2 * paces[0])
    assert len(set(paces)) == 2


def test_two_prompt_lengths_have_their_share() -> None:
    drawn = TwoLengths(500, 16000, 0.2, 256.0).draw(np.random.default_rng(0), 5000)
    assert {prompt for prompt, _ in drawn} == {500, 16000}
    assert sum(prompt == 16000 for prompt, _ in drawn) / 5000 == pytest.approx(0.2, abs=0.02)


def test_case_holds_only_if_all_of_it_does() -> None:
    case = CASES["none"]
    assert CaseResult(case, LEAST, [KEPT] * 10).holds
    assert not CaseResult(case, LEAST, [KEPT, replace(KEPT, max_replicas=5)]).holds
    assert not CaseResult(case, LEAST, [KEPT, replace(KEPT, reversals=2)]).holds
    assert not CaseResult(case, LEAST, [KEPT, replace(KEPT, settled_s=None)]).holds
    missed = replace(KEPT, within_slo=(0, 50, 94, 100, 100, 95))
    assert CaseResult(case, LEAST, [KEPT] * 9 + [missed]).holds  # 1 of 40 windows
    assert not CaseResult(case, LEAST, [KEPT] * 3 + [missed]).holds  # 1 of 16


def test_windows_count_from_first_whole_one_after_settling() -> None:
    assert KEPT.settled_windows == (True, True, True, True)
    assert replace(KEPT, settled_s=601.0).settled_windows == (True, True, True)
    assert replace(KEPT, within_slo=(0, 50, 94, 100, 100, 95)).settled_windows == (False, True, True, True)


def test_run_of_a_constant_fleet() -> None:
    case = replace(CASES["host-107ms"], rate=1.0)
    run = simulate(case, "static:2", 0, {Role.SERVE: 2})
    assert run.settled_s == 300.0
    assert (run.max_replicas, run.reversals) == (2, 0)
    assert sum(run.offered) == pytest.approx(1800, rel=0.1)
    assert run.attainment > 0.95
    assert run.gpu_hours == pytest.approx(1.0, rel=0.05)


def test_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--cases", "nonesuch"]) == 2
    assert "no case nonesuch; cases: none, host-107ms" in capsys.readouterr().err
