"""Where the H100's first tokens lost their time, and the gate before such a host."""

import numpy as np
import pytest

from bench.hardware.admission import frontend_replay, ttft_breakdown
from bench.hardware.admission.ttft_breakdown import RequestTimeline
from bench.hardware.fit_step_model import Floats


def log(*rows: tuple[float, float, int, int, int]) -> dict[str, Floats]:
    """Steps: composed, done, prompts, their tokens, sequences that decode."""
    names = ("t_sched", "t_out", "npre", "pretok", "ndec")
    return dict(zip(names, np.array(rows, dtype=float).T, strict=True))


def test_match_prompts_sum_to_step_tokens() -> None:
    mine = [
        RequestTimeline(0.0, 100, 0.25, 1.0),
        RequestTimeline(0.0, 300, 0.26, 1.0),
        RequestTimeline(0.05, 200, 0.45, 1.0),
    ]
    ttft_breakdown.match(mine, log((0.1, 0.2, 2, 400, 0), (0.15, 0.3, 0, 0, 2), (0.2, 0.4, 1, 200, 2)))
    assert [way.composed_s for way in mine] == [0.1, 0.1, 0.2]
    assert [way.done_s for way in mine] == [0.2, 0.2, 0.4]
    assert mine[2].previous_composed_s == 0.15


def test_match_long_prompt_continues_in_next_step() -> None:
    mine = [RequestTimeline(0.0, 8000, 0.25, 1.0), RequestTimeline(0.0, 500, 0.45, 1.0)]
    ttft_breakdown.match(mine, log((0.1, 0.2, 2, 8192, 0), (0.2, 0.4, 1, 308, 1)))
    assert [way.composed_s for way in mine] == [0.1, 0.1]
    assert [way.done_s for way in mine] == [0.2, 0.4]


def test_release_with_cap_is_first_come_first_served() -> None:
    mine = [
        RequestTimeline(0.0, 1, 0.5, 1.0),
        RequestTimeline(0.1, 1, 0.6, 2.0),
        RequestTimeline(0.2, 1, 1.5, 3.0),
        RequestTimeline(0.3, 1, 2.5, 4.0),
    ]
    ttft_breakdown.assign_release_times(mine, 2)
    assert [way.released_s for way in mine] == [0.0, 0.1, 1.0, 2.0]


@pytest.fixture(scope="module")
def host() -> frontend_replay.HostOverhead:
    return frontend_replay.HostOverhead()


def test_ttft_breakdown_most_delay_precedes_the_engine() -> None:
    _, found = ttft_breakdown.load(frontend_replay.DATA, frontend_replay.CAPPED_RUN, frontend_replay.CAP)
    reported = ttft_breakdown.ttft_parts(found)
    assert len(found) >= 0.96 * 988
    assert [round(float(np.mean(reported[name]))) for name in ("before", "of it outside", "after")] == [135, 81, 44]
    assert np.percentile(reported["before"], 95) > 350
    assert np.percentile(reported["after"], 50) < 30
    assert np.percentile(reported["after"], 99) > 400


def test_replay_admission_meets_slo_with_goodput_of_cap(host: frontend_replay.HostOverhead) -> None:
    draws = [frontend_replay.play(host, 1.0, draw, 3) for draw in range(3)]
    gate, cap = (np.mean([one[arm] for one in draws], axis=0) for arm in ("gate, 2.0", "cap 160, 2.0"))
    assert gate[1] >= 0.95
    assert gate[0] >= 0.97 * cap[0]
    assert cap[1] == pytest.approx(0.915, abs=0.02)  # as it was seen


def test_replay_ideal_host_admission_matches_cap(host: frontend_replay.HostOverhead) -> None:
    found = frontend_replay.play(host, 0.0, 0, 1)
    assert found["gate, 2.0"][1] >= 0.99
    assert found["gate, 2.0"][0] >= 0.97 * found["cap 160, 2.0"][0]
