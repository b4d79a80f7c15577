"""Tokens that an engine should have made, against engines that were stepped token by token."""

from __future__ import annotations

import numpy as np
import pytest

from plimsoll.core.demand.completion_estimator import CompletionEstimator, OutputLengths
from plimsoll.core.workload import Workload, from_samples

RNG_SEED = 11
STEPS = 40  # of an interval


def lengths(tokens: np.ndarray) -> Workload:
    return from_samples(np.full(tokens.size, 100.0), np.zeros(tokens.size), tokens)


def sample_lengths(mean: float, deviation: float, rng: np.random.Generator, n: int) -> np.ndarray:
    return np.maximum(1.0, np.rint(rng.lognormal(np.log(mean) - deviation**2 / 2.0, deviation, n)))


def simulate_steps(begins: list[int], answers: np.ndarray, intervals: int) -> list[tuple[int, int, int]]:
    """Of each interval: requests begun, tokens made, requests running at its end.

    begins: the interval in which each begins; at which of its steps follows evenly.
    """
    at = np.array([interval * STEPS + (7 * n) % STEPS for n, interval in enumerate(begins)])
    found = []
    for i in range(intervals):
        low, high = i * STEPS, (i + 1) * STEPS
        made = np.minimum(answers, np.maximum(high - at, 0)) - np.minimum(answers, np.maximum(low - at, 0))
        running = int(np.sum((at < high) & (at + answers > high)))
        found.append((int(np.sum((at >= low) & (at < high))), int(made.sum()), running))
    return found


def predict_completions(usual: OutputLengths, visited: list[tuple[int, int, int]], first: int = 0) -> list[float]:
    """Tokens expected of each interval from the first that is seen on."""
    answers, found = CompletionEstimator(visited[first - 1][2] if first else 0.0), []
    for begun, _, _ in visited[first:]:
        answers.advance(STEPS, begun)
        found.append(answers.expected_completions(usual) * usual.mean_tokens)
    return found


@pytest.mark.parametrize("deviation", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("mean", [30.0, 200.0, 900.0])
def test_expected_tokens_follow_request_start_times(mean: float, deviation: float) -> None:
    """Bursts of requests whose answers are shorter or much longer than an interval."""
    rng = np.random.default_rng(RNG_SEED)
    begins = [i for i in range(120) for _ in range(int(rng.choice([0, 0, 5, 60])))]
    answers = sample_lengths(mean, deviation, rng, len(begins))
    observed = simulate_steps(begins, answers, 120)
    usual = OutputLengths(lengths(answers))
    expected, made = np.array(predict_completions(usual, observed)), np.array([tokens for _, tokens, _ in observed])
    assert expected.sum() == pytest.approx(made.sum(), rel=0.03)
    over = np.convolve(np.ones(6), made, "valid"), np.convolve(np.ones(6), expected, "valid")
    busy = over[0] > 0.5 * over[0].mean()
    assert np.abs(over[1][busy] / over[0][busy] - 1.0).max() < (0.1 if deviation < 1.0 else 0.35)


def test_initially_running_requests_are_spread_over_lengths() -> None:
    rng = np.random.default_rng(RNG_SEED)
    begins = [i for i in range(60) for _ in range(40)]
    answers = sample_lengths(400.0, 0.3, rng, len(begins))
    observed = simulate_steps(begins, answers, 60)
    expected = predict_completions(OutputLengths(lengths(answers)), observed, first=30)
    assert expected == pytest.approx([tokens for _, tokens, _ in observed[30:]], rel=0.05)


def test_longer_outputs_exceed_expected_tokens_before_end() -> None:
    answers = np.concatenate((np.full(800, 100.0), np.full(400, 800.0)))
    observed = simulate_steps([i for i in range(30) for _ in range(40)], answers, 30)
    expected = predict_completions(OutputLengths(lengths(np.full(9, 100.0))), observed)
    made = [tokens for _, tokens, _ in observed]
    assert expected[10:20] == pytest.approx(made[10:20], rel=0.02)
    assert all(now > 1.5 * then for now, then in zip(made[24:], expected[24:], strict=True)), (
        "200 of 800 tokens are out"
    )


def test_completions_clock_stops_while_idle() -> None:
    usual, answers = OutputLengths(lengths(np.full(9, 50.0))), CompletionEstimator(0.0)
    answers.advance(200.0, 8.0)
    assert answers.expected_completions(usual) == pytest.approx(8.0, rel=0.15), "but for those that began last"
    answers.advance(0.0, 0.0)
    assert answers.expected_completions(usual) == 0.0
    answers.advance(60.0, 0.0)
    left = answers.expected_completions(usual)
    answers.advance(60.0, 0.0)
    assert 0.0 < left < 1.2
    assert answers.expected_completions(usual) == pytest.approx(0.0, abs=1e-9)


def test_completions_same_step_starts_count_first_token() -> None:
    usual, answers = OutputLengths(lengths(np.full(9, 50.0))), CompletionEstimator(0.0)
    answers.advance(0.0, 5.0)  # no engine counts so, but a scrape can come between two of its counters
    assert answers.expected_completions(usual) == pytest.approx(5.0 / 50.0)
    answers.advance(49.0, 0.0)
    assert answers.expected_completions(usual) == pytest.approx(5.0 * 49.0 / 50.0, rel=0.02)


def test_completions_cohort_count_is_bounded() -> None:
    usual, answers = OutputLengths(lengths(np.full(9, 1e6))), CompletionEstimator(0.0)
    for _ in range(1000):
        answers.advance(1.0, 1.0)
    assert len(answers._cohorts) == 256
    brief = OutputLengths(lengths(np.full(9, 10.0)))
    answers.expected_completions(brief)
    assert len(answers._cohorts) < 15
    assert answers.expected_completions(usual) > 0.0
