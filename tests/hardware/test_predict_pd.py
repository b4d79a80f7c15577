"""What is said of a pair before it runs: the core's laws and its simulated engines, of the same words."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.hardware import long_steps, predict_pd, traces
from bench.hardware.measure_pd import PairRun
from bench.trust.engine_driver import RecordedRequest
from plimsoll.sim import profile

OWN = predict_pd.pair_profile("h200-8b", predict_pd.KV_CACHE_TOKENS)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    traces.write(path, traces.poisson(20, 12, 3))
    return path


def predictions(trace: Path, *words: str) -> list[dict[str, Any]]:
    out = trace.with_name("said.json")
    runs = [f"--run={word.replace('TRACE', str(trace))}" for word in words]
    assert predict_pd.main([*runs, "--out", str(out)]) == 0
    found: list[dict[str, Any]] = json.loads(out.read_text())["runs"]
    return found


def test_predict_pd_and_small_budget_shorten_token_gaps(trace: Path) -> None:
    both, pair, small = (one["engines"] for one in predictions(trace, "agg:TRACE", "pd:TRACE", "agg:TRACE:1024"))
    assert pair["p99_gap_ms"] < small["p99_gap_ms"] < both["p99_gap_ms"]
    assert pair["ttft_ms"][0] > both["ttft_ms"][0]
    assert both["preempted"] == pair["preempted"] == 0


def test_predict_local_prefill_shifts_load_to_decode_engine(trace: Path) -> None:
    away, mixed, none = (one["law"] for one in predictions(trace, "pd:TRACE", "pd:TRACE:900", "pd:TRACE:1500"))
    assert away["line_rps"] < mixed["line_rps"] < none["line_rps"]
    assert away["decode_rho"] < mixed["decode_rho"] < none["decode_rho"]


def test_predict_short_prompt_is_prefilled_locally() -> None:
    load = PairRun(0, "pd", Path("t.csv"), 900)
    sent = [RecordedRequest(0.0, 899, 20), RecordedRequest(5.0, 900, 20)]
    (near, away), _, _, _ = predict_pd.replay_pair(load, sent, OWN)
    assert near.remote_prefill_s == 0.0 < away.remote_prefill_s
    assert near.first_s < away.first_s


def test_long_steps_count_only_excess_over_model() -> None:
    """Steps as the law says, but those of more than 512 tokens take 5 ms more; their ends are stamped 3 ms late."""
    own = profile.load("h200-8b")
    kinds = [("t_out", float), *((name, float) for name in ("npre", "pretok", "preattn", "ndec", "decctx"))]
    steps = np.zeros(401, dtype=kinds)
    steps["ndec"] = 10
    for place, tokens in ((50, 300), (100, 600), (150, 300), (200, 600), (250, 800)):
        steps[place] = (0.0, 1, tokens, 0, 10, 0)
    slow = (steps["pretok"] > 512) * 5e-3
    steps["t_out"][1:] = np.cumsum(long_steps.model_step_s(steps, own) + slow[1:])
    steps["t_out"] += (steps["pretok"] > 0) * 3e-3
    found = long_steps.excess_by_tokens(steps, own)
    assert [None if one is None else one.steps for one in found] == [2, 2, 1, None]
    assert [round(one.excess_s * 1e3, 6) for one in found if one is not None] == [0.0, 5.0, 5.0]
