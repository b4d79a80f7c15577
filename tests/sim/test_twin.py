"""The comparison with vLLM's own scheduler: what a record says, how it is counted, and the one that was made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.hardware import traces
from bench.trust import engine_driver, recorded_runs, twin
from bench.trust.engine_driver import RecordedRequest
from bench.trust.recorded_runs import RequestRecord, SweepRun
from bench.trust.twin import TwinRun
from bench.twin import __main__ as command
from bench.twin import twin_load, vllm_server
from plimsoll.sim import profile, profiles

OWN = profile.load("h200-8b")
RUNS = {one.sweep.name: one for one in twin.read_runs()}


def self_comparison(slower: float = 1.0, later_s: float = 0.0) -> TwinRun:
    """A record that the simulator made, TPOT times a factor and TTFT with something on top."""
    sent = [RecordedRequest(one.at_s, one.prompt, one.output) for one in traces.poisson(20.0, 10.0, 3)]
    observed = [
        RequestRecord(each, got.first_s + later_s, got.tpot_s(each.output) * slower, True)
        for each, got in zip(sent, engine_driver.replay_one_engine(engine_driver.mean_plant(OWN), sent), strict=True)
    ]
    return TwinRun(SweepRun("x", "twin", OWN.budget, 20.0, len(observed), 60.0, 0.0, tuple(observed)), OWN)


def test_compare_simulator_with_itself_has_no_difference() -> None:
    assert [(one.figure, one.holds) for one in twin.run_checks(self_comparison())] == [(0.0, True)] * 5


@pytest.mark.parametrize(("slower", "later_s"), [(1.1, 0.0), (1.0, 0.05)])
def test_compare_slower_or_delayed_record_fails(slower: float, later_s: float) -> None:
    shares, *_ = twin.run_checks(self_comparison(slower, later_s))
    assert shares.figure > 2.0
    assert not shares.holds


@pytest.mark.parametrize("name", ["18/s", "22/s"])
def test_compare_recorded_vllm_run_matches_slo_scales(name: str) -> None:
    shares, *_ = twin.run_checks(RUNS[name])
    assert shares.holds, shares.detail


def test_records_are_complete_and_ordered() -> None:
    document = json.loads((recorded_runs.DATA / twin.RUNS_FILE).read_text())
    assert len(RUNS) == len(document["runs"]) >= 2
    for run in document["runs"]:
        requests = RUNS[run["name"]].sweep.requests
        assert [one.request.at_s for one in requests] == sorted(one.request.at_s for one in requests)
        assert all(one.ok for one in requests)


def row(**more: Any) -> dict[str, Any]:
    """A client's row, on the clock."""
    return {"at_s": 8.0, "late_s": 0.8, "prompt": 10, "output": 5, "first_s": 0.4, "last_s": 2.0, "ok": True, **more}


def test_record_times_count_from_first_send_in_engine_seconds() -> None:
    lines = twin_load.record_lines("r", [row(at_s=16.0, late_s=0.0), row()], 8.0)
    assert [line[1:] for line in lines] == [
        ("0.00000", 10, 5, "0.05000", "0.050000", 1),
        ("0.90000", 10, 5, "0.05000", "0.050000", 1),
    ]


def test_record_truncated_and_failed_requests_have_empty_fields() -> None:
    cut, silent = row(ok=False), row(at_s=9.0, ok=False, first_s=None, last_s=None)
    assert [line[4:] for line in twin_load.record_lines("r", [cut, silent], 1.0)] == [("0.40000", "", 0), ("", "", 0)]


def test_record_write_and_read_round_trip(tmp_path: Path) -> None:
    lines = twin_load.record_lines("r", [row(), row(at_s=16.0, late_s=0.0, ok=False)], 8.0)
    twin_load.write(tmp_path / twin.REQUESTS_FILE, lines)
    first = (tmp_path / twin.REQUESTS_FILE).read_bytes()
    twin_load.write(tmp_path / twin.REQUESTS_FILE, lines)
    assert (tmp_path / twin.REQUESTS_FILE).read_bytes() == first
    own = json.loads((profiles.PROFILE_FOLDER / "h200-8b.json").read_text())
    runs = [{"name": "r", "patience_s": 3.0}]
    document = {"profile": own, "frontend_s": 0.002, "frontend_token_s": 1e-6, "runs": runs}
    (tmp_path / twin.RUNS_FILE).write_text(json.dumps(document))
    [one] = twin.read_runs(tmp_path)
    assert one.profile == replace(OWN, frontend=0.002, frontend_token=1e-6)
    assert [each.ok for each in one.sweep.requests] == [True, False]
    assert one.sweep.seen_per_s == pytest.approx(1 / 0.9)


def test_line_fits_frontend_cost_through_two_lengths() -> None:
    each, token = twin_load.fit_line([0.0012, 0.003])
    assert token == pytest.approx(1e-6)
    assert each == pytest.approx(0.001)
    assert twin_load.fit_line([0.002, 0.001]) == (0.002, 0.0)


def test_bounded_excessive_load_is_rejected() -> None:
    needed = ["--vllm", "vllm", "--out", "x"]
    command.check_bounds(command.parser().parse_args(needed))
    for more in (["--rates", "500"], ["--scale", "100"]):
        with pytest.raises(ValueError, match="more than"):
            command.check_bounds(command.parser().parse_args([*needed, *more]))


def test_vllm_arguments_use_loopback_and_profile_limits() -> None:
    words = vllm_server.arguments(Path("m"), OWN, "h200-8b", 8.0, 1234)
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[words.index("--max-num-seqs") + 1] == str(OWN.max_num_seqs)
    assert json.loads(words[words.index("--additional-config") + 1]) == {
        "twin": {"profile": "h200-8b", "time_scale": 8.0}
    }
