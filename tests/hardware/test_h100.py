"""A card that nothing was fitted to: what held of what was said before its runs, and what did not."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from bench.hardware import fit_step_model, summarise
from bench.hardware.admission import compare as gate

DATA = Path(fit_step_model.__file__).parent / "data"


def off(run: str, source: str) -> list[float]:
    """How far p95 of TPOT was said from what was seen, as shares."""
    rates = json.loads((DATA / run / "prediction.json").read_text())["from"][source]["rates"]
    observed = summarise.read(DATA / run)["rates"]
    said = [one["simulator"] for one in rates[: len(observed)]]
    return [one["tpot_s"]["p95"] / other["tpot_s"]["p95"] - 1 for one, other in zip(said, observed, strict=True)]


def test_dense_model_capacity_held_and_ttft_was_late_beyond() -> None:
    observed = summarise.read(DATA / "h100-8b")["rates"]
    assert [round(one["in_promise"], 3) for one in observed[4:]] == [0.991, 0.777]
    assert observed[5]["ttft_s"]["p95"] > 0.5
    assert observed[5]["tpot_s"]["p95"] < 0.05


@pytest.mark.parametrize(
    ("run", "source", "least", "most"),
    [
        ("h100-8b", "data sheet", 0.03, 0.14),
        ("h100-8b", "h200-8b-carried", -0.06, 0.06),
        ("h100-30b-a3b", "data sheet", -0.08, 0.0),
        ("h100-30b-a3b", "h200-30b-a3b-graphs-carried", -0.03, 0.0),
    ],
)
def test_tpot_prediction_error_matches_docs(run: str, source: str, least: float, most: float) -> None:
    found = [round(share, 2) for share in off(run, source)]
    assert (min(found), max(found)) == (least, most)


def test_profile_of_sister_gpu_predicts_better_than_data_sheet() -> None:
    for run, carried in (("h100-8b", "h200-8b-carried"), ("h100-30b-a3b", "h200-30b-a3b-graphs-carried")):
        assert fmean(map(abs, off(run, carried))) < fmean(map(abs, off(run, "data sheet")))


def test_steps_deviation_from_data_sheet_matches_docs() -> None:
    assert round(summarise.read(DATA / "h100-8b")["steps"]["over_data_sheet"]["0"], 3) == 0.973


def test_admission_admitted_too_much_for_slow_frontend() -> None:
    folder = DATA / "h100-8b-gate"
    document = json.loads((folder / "prediction.json").read_text())
    rows = {one["run"]: one for one in gate.measured(folder, [folder], document)["c"]}
    kept = {run: round(one["admitted_in_promise"], 3) for run, one in rows.items()}
    assert kept == {"gate@1": 0.977, "gate@2": 0.809, "cap160@2": 0.915}
    for calls in document["from"].values():
        assert all(one["admitted_in_promise"] > 0.99 for one in calls["c"])
    assert round(rows["gate@2"]["goodput_rps"] / rows["cap160@2"]["goodput_rps"], 3) == 0.884


def test_ttft_residual_lies_mostly_outside_the_engine() -> None:
    lines = (DATA / "h100-8b-gate" / "engine.metrics.txt").read_text().splitlines()
    observed = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

    def mean_ms(name: str) -> float:
        whole, count = (
            next(float(value) for key, value in observed.items() if key.startswith(f"vllm:{name}_seconds_{end}"))
            for end in ("sum", "count")
        )
        return whole / count * 1e3

    names = ("time_to_first_token", "request_queue_time", "request_prefill_time")
    first, queue, prefill = map(mean_ms, names)
    assert [round(one) for one in (first, queue, prefill, first - queue - prefill)] == [271, 5, 159, 107]


def test_admission_with_ttft_residual_met_slo_under_overload() -> None:
    rows = summarise.read(DATA / "h100-8b-mended")["admission"]["d"]
    kept = [round(one["admitted_in_promise"], 3) for one in rows if one["run"] == "gate@2"]
    assert kept == [0.977, 0.981]
    runs = ("gate@2", "cap176@2", "cap208@2")
    goodput = {run: fmean(one["goodput_rps"] for one in rows if one["run"] == run) for run in runs}
    assert goodput["cap208@2"] < goodput["cap176@2"]
    assert round(goodput["gate@2"] / goodput["cap176@2"], 3) == 0.977
