"""What an engine's counters teach: on recorded H200 runs, on made ones whose truth is known, and where it is nothing.

What is reached on the recorded 8B, fitted on about 100 s of the chat mix at 4 to 21 requests/s and judged on mixes
that it never saw, with request lengths from the gateway or with step sums (windows of 2 to 5 s):

- From the roofline prior of `plimsoll.core.roofline`, also 30 % too slow: TPOT and knee within 5 % on short and on long
  prompts, and on long ones at token budgets of 1,024 to 4,096. What clients saw is another measure, a mean over
  requests: within 6 %, where the mean step itself is 4 % off it.
- From priors off by 20 % as a whole and by 10 % in each coefficient: 2 % in the median, nine of ten within 5 %.
- From a prior that splits the work wrongly by 40 % (data-sheet rates times one share): up to 15 %, as chance varies one
  mix too little to tell prefill from decode. The stated deviation covers that, twice over in no case.
- Beyond it: a budget of 512 (TPOT 17 % off) and prompts that are all cached (knee 18 % off).

With bare stock counters: within 5 % at other rates of the same mix, nothing of another mix (TPOT up to 140 % off).
The 70B has one mix only; at a rate left out, TPOT and knee are within 8 %.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from plimsoll.core.calibration.answer import MISFIT, estimate, expectation, knowledge, pessimistic
from plimsoll.core.calibration.belief import Posterior, coefficients, counted, unknown
from plimsoll.core.calibration.state import EngineKey, from_dict, to_dict
from plimsoll.core.calibration.update import refusal, update, update_all
from plimsoll.core.calibration.window import Lengths, WindowSums, filled, lengths_of
from plimsoll.core.latency import StepModel
from plimsoll.core.workload import from_samples

DATA = Path(__file__).parent / "data" / "calibration"
EVERY_S = 15.0
CHAT = tuple(f"8b_chat@{rate}" for rate in (4, 8, 12, 15, 18, 21))
BASE_S = 4.88e-3  # one sequence, measured: 4.90 ms less the reading of 800 cached tokens
TARGET_S = 0.030
KEY = EngineKey("meta-llama/Llama-3.1-8B-Instruct", "NVIDIA-H200", "tp1", "vllm 0.26.0")

# Roofline of an 8B (16.06 GB of weights, 32 layers of 32 x 128, 131,072 B of KV a token) from the H200's data sheet:
# 4.8 TB/s, 989 TFLOP/s. Weights are read while a prefill computes, so its step has no base of its own.
FLOOR = StepModel(16.06e9 / 4.8e12, -16.06e9 / 4.8e12, 13.96e9 / 989e12, 524288 / 989e12, 2e-6, 131072 / 4.8e12)
FLOOR_70B = StepModel(70.6e9 / 4.8e12, -70.6e9 / 4.8e12, 141e9 / 1979e12, 2.62e6 / 1979e12, 10e-6, 327680 / 4.8e12)

# What `plimsoll.core.roofline` expects of it, with the shares of the sheet's rates that engines reach.
ROOFLINE = StepModel(4.96e-3, 0.0, 2.17e-5, 1.18e-9, 1.52e-5, 3.21e-8)
OTHER_MIXES = ("8b_short@30", "8b-mixed_b8192@12")


def rows(name: str) -> dict[str, list[dict[str, float]]]:
    """Lines of one of the data files by run; what is no number is left out."""
    found: dict[str, list[dict[str, float]]] = {}
    with (DATA / name).open() as lines:
        for line in csv.DictReader(lines):
            run = line.pop("run")
            numbers = {key: float(text) for key, text in line.items() if key not in ("server", "mix")}
            found.setdefault(run, []).append(numbers)
    return found


SECONDS, RUNS = rows("windows.csv"), {run: lines[0] for run, lines in rows("runs.csv").items()}


def prior_of(floor: StepModel, efficiency: float) -> StepModel:
    base, _, token, pair, _, cached = astuple(floor)
    return StepModel(base / efficiency, 0.0, token / efficiency, pair / efficiency, token, cached / efficiency)


def summed(run: str, lines: Sequence[dict[str, float]]) -> WindowSums:
    """One window with everything counted."""
    total = {key: sum(line[key] for line in lines) for key in lines[0]}
    prompt, output = total["prompt_tokens"], total["output_tokens"]
    return WindowSums(
        end_s=0.0,
        busy_s=total["busy_s"],
        steps=total["steps"],
        computed_tokens=prompt + output,
        output_tokens=output,
        prompt_tokens=prompt,
        mean_running=max(1.0, total["mean_running"] / len(lines)),
        prefill_steps=total["prefill_steps"],
        prefill_pairs=total["prefill_pairs"],
        cached_tokens_read=total["cached_tokens_read"],
    )


def bare(window: WindowSums) -> WindowSums:
    return replace(window, prefill_steps=None, prefill_pairs=None, cached_tokens_read=None)


def recorded(runs: Sequence[str], counters: str, seconds: int = 3) -> list[WindowSums]:
    """Windows of some runs, one after the other: counters are "bare", "lengths" or "steps"."""
    made: list[WindowSums] = []
    for run in runs:
        for first in range(0, len(SECONDS[run]) - seconds + 1, seconds):
            window = summed(run, SECONDS[run][first : first + seconds])
            if counters != "steps":
                window = bare(window)
            if counters == "lengths":
                line = RUNS[run]
                names = ("chunk_tokens", "prefill_context_tokens", "decode_context_tokens")
                window = filled(window, Lengths(*(line[name] for name in names)))
            made.append(replace(window, end_s=EVERY_S * len(made)))
    return made


def fitted(windows: Sequence[WindowSums], efficiency: float = 0.75, floor: StepModel = FLOOR) -> Posterior:
    posterior = unknown(prior_of(floor, efficiency), floor)
    for window in windows:
        posterior = update(posterior, window)
    return posterior


@cache
def taught(runs: tuple[str, ...], counters: str, prior: StepModel = ROOFLINE, seconds: int = 3) -> Posterior:
    """Fitted on recorded runs of the 8B."""
    posterior = unknown(prior, FLOOR)
    for window in recorded(runs, counters, seconds):
        posterior = update(posterior, window)
    return posterior


def scaled(model: StepModel, factors: Sequence[float] | np.ndarray) -> StepModel:
    """Each coefficient times its factor, at or above the floor."""
    values = np.maximum(coefficients(model) * factors, coefficients(FLOOR))
    return StepModel(values[0], values[1] - values[0], *values[2:])


def law(base_s: float, rho: float) -> float:
    return base_s / (1 - rho)


def predicted(model: StepModel, run: str) -> tuple[float, float]:
    """Base, and rho from the work that a run served per busy second."""
    whole = summed(run, SECONDS[run])
    base_s = model.base_s
    work_s = float(counted(whole) @ coefficients(model)) - base_s * whole.steps
    return base_s, work_s / whole.busy_s


def mean_step_s(run: str) -> float:
    whole = summed(run, SECONDS[run])
    return whole.busy_s / whole.steps


def errors(model: StepModel, run: str, measured_base_s: float = BASE_S) -> tuple[float, float]:
    """Relative errors of TPOT = base / (1 - rho) and of the knee, the rate (over the run's) where TPOT is the target.

    Measured are the run's mean step, and with it rho = 1 - base / mean step.
    """
    base_s, rho = predicted(model, run)
    target_s = TARGET_S * measured_base_s / BASE_S
    measured_rho = 1 - measured_base_s / mean_step_s(run)
    knee, measured_knee = (1 - base_s / target_s) / rho, (1 - measured_base_s / target_s) / measured_rho
    return law(base_s, rho) / mean_step_s(run) - 1, knee / measured_knee - 1


@pytest.mark.parametrize("seconds", [2, 3, 5])
@pytest.mark.parametrize("slower", [1.0, 1.3])
@pytest.mark.parametrize("counters", ["lengths", "steps"])
@pytest.mark.parametrize("run", OTHER_MIXES)
def test_tpot_and_knee_of_a_mix_that_it_was_not_fitted_on(run: str, counters: str, slower: float, seconds: int) -> None:
    posterior = taught(CHAT, counters, scaled(ROOFLINE, [slower] * 6), seconds)
    assert knowledge(posterior).known
    tpot, knee = errors(estimate(posterior), run)
    assert abs(tpot) <= 0.05
    assert abs(knee) <= 0.05


@pytest.mark.parametrize("counters", ["lengths", "steps"])
def test_priors_that_are_off_are_put_right(counters: str) -> None:
    rng = np.random.default_rng(3)
    before, after = [], []
    for _ in range(20):
        prior = scaled(ROOFLINE, np.exp(rng.normal(0, 0.2) + rng.normal(0, 0.1, 6)))
        model = estimate(taught(CHAT, counters, prior))
        before += [np.abs(errors(prior, run)) for run in OTHER_MIXES]
        after += [np.abs(errors(model, run)) for run in OTHER_MIXES]
    assert np.median(before, axis=0)[0] > 0.2
    assert (np.median(after, axis=0) <= 0.025).all()
    assert (np.quantile(after, 0.9, axis=0) <= 0.05).all()


@pytest.mark.parametrize("counters", ["lengths", "steps"])
@pytest.mark.parametrize("run", OTHER_MIXES)
def test_clients_of_that_mix_saw_that_mean_within_six_percent(run: str, counters: str) -> None:
    tpot_s = law(*predicted(estimate(taught(CHAT, counters)), run))
    assert tpot_s == pytest.approx(RUNS[run]["tpot_mean_s"], rel=0.06)


@pytest.mark.parametrize("seconds", [2, 3, 5])
@pytest.mark.parametrize("counters", ["lengths", "steps"])
@pytest.mark.parametrize("budget", [1024, 2048, 4096])
def test_other_token_budgets_are_within_what_is_stated(budget: int, counters: str, seconds: int) -> None:
    tpot, knee = errors(estimate(taught(CHAT, counters, seconds=seconds)), f"8b-mixed_b{budget}@12")
    assert abs(tpot) <= 0.05
    assert abs(knee) <= 0.03


@pytest.mark.parametrize("seconds", [2, 3, 5])
@pytest.mark.parametrize("efficiency", [0.6, 0.9, None])
@pytest.mark.parametrize("counters", ["lengths", "steps"])
def test_the_stated_deviation_covers_every_run_before_overload(
    counters: str, efficiency: float | None, seconds: int
) -> None:
    prior = ROOFLINE if efficiency is None else prior_of(FLOOR, efficiency)
    posterior = taught(CHAT, counters, prior, seconds)
    for run in RUNS:
        if run.startswith("8b") and run != "8b_chat@28":
            whole = summed(run, SECONDS[run])
            expected = expectation(posterior, whole)
            assert abs(whole.busy_s - expected.busy_s) <= 2 * expected.deviation_s, run
    worst = max(abs(error) for run in OTHER_MIXES for error in errors(estimate(posterior), run))
    assert worst <= 0.15


@pytest.mark.parametrize("counters", ["bare", "lengths", "steps"])
@pytest.mark.parametrize("run", ["8b_chat@8", "8b_chat@15"])
def test_bare_counters_tell_base_and_work_of_the_mix_at_hand(run: str, counters: str) -> None:
    posterior = taught(tuple(other for other in CHAT if other not in ("8b_chat@8", "8b_chat@15")), counters)
    whole = summed(run, SECONDS[run])
    expected = expectation(posterior, bare(whole) if counters == "bare" else whole)
    tpot_s = law(estimate(posterior).base_s, expected.work_s / whole.busy_s)
    assert tpot_s == pytest.approx(mean_step_s(run), rel=0.05)
    assert tpot_s == pytest.approx(RUNS[run]["tpot_p50_s"], rel=0.05)


def test_bare_counters_know_nothing_of_the_next_mix_and_notice() -> None:
    posterior = taught(CHAT, "bare")
    assert knowledge(posterior).known
    for window in recorded(["8b_short@30"], "bare"):
        posterior = update(posterior, replace(window, end_s=window.end_s + 10_000))
    assert not knowledge(posterior).known


@pytest.mark.parametrize("held_out", ["1", "2", "3", "3.8"])
def test_the_70b_is_within_eight_percent_at_a_rate_that_it_was_not_fitted_on(held_out: str) -> None:
    runs = [f"70b_chat@{rate}" for rate in ("1", "2", "3", "3.8") if rate != held_out]
    posterior = fitted(recorded(runs, "lengths"), floor=FLOOR_70B)
    tpot, knee = errors(estimate(posterior), f"70b_chat@{held_out}", 20.67e-3)
    assert abs(tpot) <= 0.08
    assert abs(knee) <= 0.08


def doubtful(posterior: Posterior, why: str) -> None:
    """Not known, in words, and sized at no less than the prior."""
    known = knowledge(posterior)
    assert (known.known, known.words.startswith("not known"), why in known.words) == (False, True, True), known


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("counters", ["bare", "lengths", "steps"])
def test_shuffled_data_teach_nothing(counters: str, seed: int) -> None:
    windows = recorded(CHAT, counters)
    times = np.random.default_rng(seed).permutation([window.busy_s / window.steps for window in windows])
    shuffled = [replace(w, busy_s=float(t) * w.steps) for w, t in zip(windows, times, strict=True)]
    posterior = fitted(shuffled)
    doubtful(posterior, "disagree")
    wide, honest = (expectation(p, windows[0]).deviation_s for p in (posterior, fitted(windows)))
    assert wide > 1.3 * honest


def test_sparse_data_teach_little() -> None:
    windows = recorded(CHAT, "lengths")
    posterior = fitted(windows[::6])
    doubtful(posterior, "are needed")
    assert knowledge(posterior).base_sd > 2 * knowledge(fitted(windows)).base_sd


@pytest.mark.parametrize("counters", ["bare", "lengths", "steps"])
def test_constant_load_tells_the_sum_and_nothing_else(counters: str) -> None:
    whole = {"bare": bare}.get(counters, lambda same: same)(summed("8b_chat@15", SECONDS["8b_chat@15"]))
    noise = np.random.default_rng(1).normal(1, 0.02, 100)
    posterior = fitted([replace(whole, end_s=15.0 * i, busy_s=whole.busy_s * float(n)) for i, n in enumerate(noise)])
    doubtful(posterior, "hardly varied")
    assert knowledge(posterior).directions == 1
    assert expectation(posterior, whole).busy_s == pytest.approx(whole.busy_s, rel=0.01)
    prior = unknown(prior_of(FLOOR, 0.75), FLOOR)
    assert pessimistic(posterior, 0.9).prefill_token_s > 1.15 * prior.prior.prefill_token_s  # as wide as before


def test_one_recorded_rate_alone_is_not_enough_for_the_base() -> None:
    for run in ("8b_chat@24", "8b_short@30", "8b-mixed_b8192@12"):
        doubtful(fitted(recorded([run], "lengths")), "not known")


def test_stock_counters_at_a_fixed_mix_excite_two_or_three_directions_and_no_more() -> None:
    assert knowledge(fitted(recorded(CHAT[:4], "bare", seconds=5))).directions == 2
    assert knowledge(taught(CHAT, "bare")).directions <= 3  # chance varies the mix a little


# Made windows, whose truth is known.

TRUTH = StepModel(4.9e-3, -1.0e-3, 2.1e-5, 1.4e-9, 1.5e-5, 3.2e-8)
HOT = replace(TRUTH, prefill_token_s=1.18 * TRUTH.prefill_token_s, prefill_pair_s=1.18 * TRUTH.prefill_pair_s)


def made(truth: StepModel, rng: np.random.Generator, count: int, start_s: float = 0.0) -> list[WindowSums]:
    """Windows of 15 s at random rates and mixes, each with 2 % of noise."""
    windows = []
    for number in range(count):
        batch, prompt, context = rng.uniform(5, 120), rng.uniform(200, 4000), rng.uniform(300, 4000)
        prefill_share = rng.uniform(0.02, 0.3)
        sums = np.array([1 - prefill_share, prefill_share, 0, 0, batch, batch * context])
        sums[2] = prefill_share * prompt
        sums[3] = sums[2] * prompt / 2
        steps = 15.0 / float(sums @ coefficients(truth))
        total = steps * sums
        noise = float(np.exp(rng.normal(0, 0.02)))
        windows.append(
            WindowSums(
                end_s=start_s + EVERY_S * number,
                busy_s=15.0 * noise,
                steps=steps,
                computed_tokens=total[2] + total[4],
                output_tokens=total[4],
                prompt_tokens=total[2],
                mean_running=batch,
                prefill_steps=total[1],
                prefill_pairs=total[3],
                cached_tokens_read=total[5],
            )
        )
    return windows


def test_step_sums_of_many_mixes_tell_all_but_the_pairs() -> None:
    posterior = fitted(made(TRUTH, np.random.default_rng(0), 400))
    found, true = coefficients(estimate(posterior)), coefficients(TRUTH)
    assert knowledge(posterior).known
    assert knowledge(posterior).directions == 5
    assert found[[0, 1, 2, 5]] == pytest.approx(true[[0, 1, 2, 5]], rel=0.06)
    assert found[4] == pytest.approx(true[4], rel=0.1)
    pairs_of_prior = posterior.prior.prefill_pair_s  # 4 % of the time: left where the common factor puts it
    assert found[3] == pytest.approx(pairs_of_prior, rel=0.3)


@pytest.mark.parametrize("count", [0, 3, 40])
def test_a_pessimistic_model_is_as_often_too_fast_as_it_says(count: int) -> None:
    rng = np.random.default_rng(2)
    prior = prior_of(FLOOR, 0.6)
    too_fast = 0
    for _ in range(100):
        factors = np.exp(rng.normal(0, 0.18) + rng.normal(0, 0.15, 6))
        values = np.maximum(factors * coefficients(prior), coefficients(FLOOR))
        truth = StepModel(values[0], values[1] - values[0], *values[2:])
        *seen, unseen = made(truth, rng, count + 1)
        sized = pessimistic(update_all(unknown(prior, FLOOR), seen), 0.9, at=unseen)
        work = counted(unseen)
        too_fast += bool(work @ coefficients(sized) < work @ coefficients(truth))
    assert too_fast <= 15  # of 100 where 10 are meant; `MISFIT` makes it fewer


def test_pessimism_closes_in_on_the_mean_as_data_come() -> None:
    windows = made(TRUTH, np.random.default_rng(3), 60)
    at = windows[0]
    work, margins = counted(at), []
    for count in (0, 5, 60):
        posterior = fitted(windows[:count])
        high, mean = pessimistic(posterior, 0.9, at), estimate(posterior)
        margins.append(float(work @ coefficients(high) / (work @ coefficients(mean))) - 1)
        each = coefficients(pessimistic(posterior, 0.9))
        assert work @ each >= work @ coefficients(high) * (1 - 1e-9)  # each at its quantile is the dearer one
    assert margins[0] > 0.3
    assert margins[0] > margins[1] > margins[2] > NORMAL_90 * MISFIT


NORMAL_90 = 1.2815  # standard deviations


FOLLOWED_WITHIN = 16


@pytest.mark.parametrize(("before", "after"), [(TRUTH, HOT), (HOT, TRUTH)], ids=["heats up", "cools down"])
@pytest.mark.parametrize("seed", range(3))
def test_a_lasting_change_is_followed_within_sixteen_windows(before: StepModel, after: StepModel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    posterior = fitted(made(before, rng, 120))
    changed = made(after, rng, FOLLOWED_WITHIN, start_s=120 * EVERY_S)
    for window in changed:
        posterior = update(posterior, window)
    off = [float(counted(w) @ coefficients(estimate(posterior))) / (15.0) - 1 for w in made(after, rng, 50)]
    assert abs(np.mean(off)) <= 0.03


@pytest.mark.parametrize("wild", [0.8, 1.3, 10.0])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("seed", [5, 6])
def test_a_wild_window_does_not_move_it(wild: float, times: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    windows = made(TRUTH, rng, 60)
    before = fitted(windows)
    after = before
    for window in made(TRUTH, rng, times, start_s=windows[-1].end_s):
        assert refusal(after, window) is None
        after = update(after, replace(window, busy_s=wild * window.busy_s))
    moved = [expectation(after, w).busy_s / expectation(before, w).busy_s for w in made(TRUTH, rng, 50)]
    assert moved == pytest.approx([1.0] * 50, abs=0.005)
    assert knowledge(after).noise_sd > knowledge(before).noise_sd  # seen, and counted as doubt


def test_hours_of_steady_speed_raises_no_alarm() -> None:
    posterior, weight = unknown(prior_of(FLOOR, 0.75), FLOOR), 0.0
    for window in made(TRUTH, np.random.default_rng(11), 400):
        posterior = update(posterior, window)
        assert posterior.weight > 0.98 * weight
        weight = posterior.weight


def test_what_is_old_is_forgotten_by_half_lives() -> None:
    posterior = fitted(made(TRUTH, np.random.default_rng(6), 100))
    (window,) = made(TRUTH, np.random.default_rng(7), 1)
    later = update(posterior, replace(window, end_s=100 * EVERY_S + 1800))
    added = 1 - 50 / (window.steps + 50)
    assert later.weight == pytest.approx(posterior.weight / 2, abs=1 + added)
    much_later = update(posterior, replace(window, end_s=1e9))
    assert much_later.weight == pytest.approx(added)
    assert not knowledge(much_later).known


def test_replicas_that_differ_by_ten_percent_are_one_engine_of_mean_speed() -> None:
    rng, posterior = np.random.default_rng(12), unknown(prior_of(FLOOR, 0.75), FLOOR)
    for tick in range(60):
        four = zip(made(TRUTH, rng, 4), (0.9, 0.9, 1.1, 1.1), strict=True)
        posterior = update_all(posterior, [replace(w, end_s=EVERY_S * tick, busy_s=f * w.busy_s) for w, f in four])
    assert posterior.weight > 150  # no alarm
    off = [expectation(posterior, window).busy_s / 15.0 - 1 for window in made(TRUTH, rng, 50)]
    assert abs(np.mean(off)) <= 0.02
    assert 0.08 < knowledge(posterior).noise_sd < 0.12


def test_a_batch_is_the_same_in_any_order() -> None:
    windows = made(TRUTH, np.random.default_rng(8), 30)
    start = unknown(prior_of(FLOOR, 0.75), FLOOR)
    one, other = update_all(start, windows), update_all(start, windows[::-1])
    assert other.information == pytest.approx(one.information, rel=1e-12, abs=1e-12)
    assert coefficients(estimate(other)) == pytest.approx(coefficients(estimate(one)), rel=1e-9)


def test_windows_one_by_one_say_the_same_in_any_order_but_for_the_noise() -> None:
    windows = [replace(window, end_s=0.0) for window in made(TRUTH, np.random.default_rng(9), 60)]
    one, other = fitted(windows), fitted(windows[::-1])
    assert coefficients(estimate(other))[[0, 2, 5]] == pytest.approx(coefficients(estimate(one))[[0, 2, 5]], rel=0.01)


def test_before_any_window_the_prior_is_all_there_is() -> None:
    prior = prior_of(FLOOR, 0.75)
    posterior = unknown(prior, FLOOR)
    assert coefficients(estimate(posterior)) == pytest.approx(coefficients(prior))
    assert coefficients(pessimistic(posterior, 0.5)) == pytest.approx(coefficients(prior))
    doubtful(posterior, "0 windows")
    assert knowledge(posterior).directions == 0


def test_lengths_fill_in_what_was_not_counted_and_leave_what_was() -> None:
    whole = summed("8b_chat@15", SECONDS["8b_chat@15"])
    lengths = Lengths(1188.0, 820.0, 1337.0)
    assert filled(whole, lengths) == whole
    some = filled(replace(whole, prefill_pairs=None), lengths)
    assert some.prefill_pairs == pytest.approx(820.0 * whole.prompt_tokens)
    assert (some.prefill_steps, some.exact) == (whole.prefill_steps, True)
    steps = filled(bare(whole), lengths).prefill_steps
    assert steps == pytest.approx(whole.prefill_steps, rel=0.1)
    with pytest.raises(ValueError, match="positive"):
        filled(whole, Lengths(0.0, 820.0, 1337.0))


def test_lengths_of_a_workload_are_token_weighted() -> None:
    workload = from_samples([1000.0, 10_000.0], [0.0, 96.0], [100.0, 300.0])
    lengths = lengths_of(workload, 8192)
    assert lengths.chunk_tokens == pytest.approx(11_000 / 3)
    assert lengths.prefill_context_tokens == pytest.approx((1000 * 500 + 10_000 * 5096) / 11_000)
    assert lengths.decode_context_tokens == pytest.approx((100 * 1050 + 300 * 10_246) / 400)
    with pytest.raises(ValueError, match="above 0"):
        lengths_of(workload, 0)


def test_speculation_counts_sequences_and_not_tokens() -> None:
    posterior = unknown(prior_of(FLOOR, 0.75), FLOOR)
    plain = summed("8b_short@30", SECONDS["8b_short@30"])
    output = 2.5 * plain.mean_running * plain.steps
    drafted = replace(plain, output_tokens=output, computed_tokens=plain.prompt_tokens + output)
    assert expectation(posterior, drafted).busy_s == pytest.approx(expectation(posterior, plain).busy_s, rel=0.02)


@pytest.mark.parametrize("quantile", [0.49, 1.0, math.nan])
def test_a_quantile_that_is_not_pessimistic_is_refused(quantile: float) -> None:
    with pytest.raises(ValueError, match="pessimistic quantile"):
        pessimistic(unknown(prior_of(FLOOR, 0.75), FLOOR), quantile)


def test_sizing_at_a_window_needs_its_context_sums() -> None:
    (window,) = made(TRUTH, np.random.default_rng(0), 1)
    posterior = unknown(prior_of(FLOOR, 0.75), FLOOR)
    with pytest.raises(ValueError, match="absent"):
        pessimistic(posterior, 0.9, at=bare(window))
    with pytest.raises(ValueError, match="too few"):
        pessimistic(posterior, 0.9, at=replace(window, steps=0.0, prefill_steps=0.0))


@pytest.mark.parametrize(
    ("prior", "half_life_s", "why"),
    [
        (replace(FLOOR, base_s=0.9 * FLOOR.base_s, any_prefill_s=0.0), 1800.0, "faster than its floor"),
        (replace(FLOOR, sequence_s=0.0), 1800.0, "faster than its floor"),
        (FLOOR, 1800.0, "takes time"),
        (prior_of(FLOOR, 0.75), 0.0, "half-life"),
        (prior_of(FLOOR, 0.75), math.nan, "half-life"),
    ],
)
def test_a_prior_that_makes_no_sense_is_refused(prior: StepModel, half_life_s: float, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        unknown(prior, FLOOR, half_life_s)


def test_state_survives_a_restart() -> None:
    posterior = fitted(made(TRUTH, np.random.default_rng(0), 150))
    text = json.dumps(to_dict(posterior, KEY), separators=(",", ":"))
    assert len(text) <= 1024
    read = from_dict(json.loads(text), KEY, posterior.prior, FLOOR)
    assert coefficients(estimate(read)) == pytest.approx(coefficients(estimate(posterior)), rel=1e-4)
    assert knowledge(read).words == knowledge(posterior).words
    (window,) = made(TRUTH, np.random.default_rng(1), 1, start_s=150 * EVERY_S)
    assert update(read, window).weight == pytest.approx(update(posterior, window).weight)
    fresh = unknown(posterior.prior, FLOOR)
    assert from_dict(to_dict(fresh, KEY), KEY, fresh.prior, FLOOR) == fresh
