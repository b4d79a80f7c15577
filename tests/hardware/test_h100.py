"""A card that nothing was fitted to: what held of what was said before its runs, and what did not."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from bench.hardware import compare, fit, ladders
from bench.hardware.gate import compare as gate

DATA = Path(fit.__file__).parent / "data"


def off(run: str, source: str) -> list[float]:
    """How far p95 of TPOT was said from what was seen, as shares."""
    rates = json.loads((DATA / run / "prediction.json").read_text())["from"][source]["rates"]
    seen = compare.measured(DATA / run, DATA / run)
    said = [one["simulator"] for one in rates[: len(seen)]]
    return [one["tpot_s"]["p95"] / other["tpot_s"]["p95"] - 1 for one, other in zip(said, seen, strict=True)]


def test_the_dense_models_line_held_and_beyond_it_first_tokens_were_late() -> None:
    seen = compare.measured(DATA / "h100-8b", DATA / "h100-8b")
    assert [round(one["in_promise"], 3) for one in seen[4:]] == [0.991, 0.777]
    assert seen[5]["ttft_s"]["p95"] > 0.5
    assert seen[5]["tpot_s"]["p95"] < 0.05


@pytest.mark.parametrize(
    ("run", "source", "least", "most"),
    [
        ("h100-8b", "data sheet", 0.03, 0.14),
        ("h100-8b", "h200-8b-carried", -0.06, 0.06),
        ("h100-30b-a3b", "data sheet", -0.08, 0.0),
        ("h100-30b-a3b", "h200-30b-a3b-graphs-carried", -0.03, 0.0),
    ],
)
def test_how_far_the_pace_was_said_from_what_was_seen(run: str, source: str, least: float, most: float) -> None:
    found = [round(share, 2) for share in off(run, source)]
    assert (min(found), max(found)) == (least, most)


def test_a_sister_cards_profile_said_the_pace_better_than_the_data_sheet() -> None:
    for run, carried in (("h100-8b", "h200-8b-carried"), ("h100-30b-a3b", "h200-30b-a3b-graphs-carried")):
        assert fmean(map(abs, off(run, carried))) < fmean(map(abs, off(run, "data sheet")))


def test_the_steps_are_as_far_from_the_data_sheet_as_docs_say() -> None:
    law = ladders.laws(DATA / "h100-8b", 0)["data sheet"]
    assert round(ladders.over(DATA / "h100-8b", 0, law), 3) == 0.973


def test_the_gate_let_in_what_this_host_could_not_answer_in_time() -> None:
    folder = DATA / "h100-8b-gate"
    told = json.loads((folder / "prediction.json").read_text())
    rows = {one["run"]: one for one in gate.measured(folder, [folder], told)["c"]}
    kept = {run: round(one["admitted_in_promise"], 3) for run, one in rows.items()}
    assert kept == {"gate@1": 0.977, "gate@2": 0.809, "cap160@2": 0.915}
    for calls in told["from"].values():
        assert all(one["admitted_in_promise"] > 0.99 for one in calls["c"])
    assert round(rows["gate@2"]["goodput_rps"] / rows["cap160@2"]["goodput_rps"], 3) == 0.884


def test_most_of_what_the_core_does_not_know_lies_outside_of_the_engine() -> None:
    lines = (DATA / "h100-8b-gate" / "engine.metrics.txt").read_text().splitlines()
    seen = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

    def mean_ms(name: str) -> float:
        whole, count = (
            next(float(value) for key, value in seen.items() if key.startswith(f"vllm:{name}_seconds_{end}"))
            for end in ("sum", "count")
        )
        return whole / count * 1e3

    names = ("time_to_first_token", "request_queue_time", "request_prefill_time")
    first, queue, prefill = map(mean_ms, names)
    assert [round(one) for one in (first, queue, prefill, first - queue - prefill)] == [271, 5, 159, 107]


def test_the_gate_that_learns_how_late_first_tokens_are_kept_its_promise_under_overload() -> None:
    folder = DATA / "h100-8b-mended"
    told = json.loads((folder / "prediction.json").read_text())
    rows = gate.measured(folder, [folder], told)["d"]
    kept = [round(one["admitted_in_promise"], 3) for one in rows if one["run"] == "gate@2"]
    assert kept == [0.977, 0.981]
    runs = ("gate@2", "cap176@2", "cap208@2")
    goodput = {run: fmean(one["goodput_rps"] for one in rows if one["run"] == run) for run in runs}
    assert goodput["cap208@2"] < goodput["cap176@2"]
    assert round(goodput["gate@2"] / goodput["cap176@2"], 3) == 0.977
